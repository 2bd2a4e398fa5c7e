#include "daemon/executor/run_mode.h"

#include <google/protobuf/text_format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "daemon/executor/cpu_backend.h"
#include "daemon/executor/local_run.h"

namespace slice::executor {
namespace {

Result<std::string> ReadTemplate(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Error(StatusCode::kInvalid, "cannot read '%s'", path.c_str());
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!path.ends_with(".textproto")) return bytes;
  proto::GraphTemplate program;
  if (!google::protobuf::TextFormat::ParseFromString(bytes, &program)) {
    return Error(StatusCode::kGraph, "'%s' is not a GraphTemplate in text format", path.c_str());
  }
  return program.SerializeAsString();
}

Result<std::vector<int64_t>> BindSymbols(const graph::Template& source, const RunOptions& options) {
  std::vector<int64_t> values;
  size_t used = 0;
  for (const proto::Symbol& symbol : source.program().symbols()) {
    const auto given = options.symbols.find(symbol.name());
    used += given != options.symbols.end() ? 1 : 0;
    values.push_back(given != options.symbols.end() ? given->second : symbol.min());
  }
  if (used != options.symbols.size()) {
    return Error(StatusCode::kInvalid,
                 "a symbol was given that the template does not have; it has %zu", values.size());
  }
  return values;
}

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

void Print(const RunOptions& options, const LocalRun& run, const std::vector<int64_t>& medians) {
  const graph::Template& source = run.source();
  int64_t total = 0;
  for (const int64_t ns : medians) total += ns;
  if (options.json)
    std::printf("{\"total_ns\": %lld, \"groups\": [", static_cast<long long>(total));
  for (size_t g = 0; g < medians.size(); ++g) {
    const std::string& name = source.groups()[g].name;
    if (options.json) {
      std::printf("%s{\"name\": %s, \"ns\": %lld}", g == 0 ? "" : ", ", Quoted(name).c_str(),
                  static_cast<long long>(medians[g]));
    } else {
      std::printf("group %3zu %12lld ns  %s\n", g, static_cast<long long>(medians[g]),
                  name.c_str());
    }
  }
  if (options.json) std::printf("], \"results\": [");
  for (size_t r = 0; r < source.results().size(); ++r) {
    const std::span<const std::byte> bytes = run.result(r);
    const uint64_t hash =
        graph::ContentHash({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    double sum = 0;
    const bool is_float = source.values()[source.results()[r]].dtype == proto::FLOAT32;
    for (size_t at = 0; is_float && at + sizeof(float) <= bytes.size(); at += sizeof(float)) {
      float number = 0;
      std::memcpy(&number, bytes.data() + at, sizeof number);
      sum += static_cast<double>(number);
    }
    std::printf(options.json ? "%s{\"bytes\": %zu, \"checksum\": \"%016llx\", \"sum\": %.9g}"
                             : "%sresult %zu bytes, checksum %016llx, sum %.9g\n",
                options.json && r > 0 ? ", " : "", bytes.size(),
                static_cast<unsigned long long>(hash), sum);
  }
  if (options.json) {
    std::printf("]}\n");
  } else {
    std::printf("total %lld ns\n", static_cast<long long>(total));
  }
}

}  // namespace

Status RunTemplate(const RunOptions& options) {
  SLICE_ASSIGN_OR_RETURN(const std::string bytes, ReadTemplate(options.path));
  SLICE_ASSIGN_OR_RETURN(const std::shared_ptr<const graph::Template> source,
                         graph::Template::Parse(bytes));
  SLICE_ASSIGN_OR_RETURN(std::vector<int64_t> symbols, BindSymbols(*source, options));
  const std::unique_ptr<DeviceBackend> backend = CreateCpuBackend();
  SLICE_RETURN_IF_ERROR(backend->OpenDomain(LocalRun::kDomain, 0, options.pool_bytes));
  SLICE_ASSIGN_OR_RETURN(const std::unique_ptr<LocalRun> run,
                         LocalRun::Create(backend.get(), source, std::move(symbols), options.seed,
                                          options.pool_bytes));
  std::vector<std::vector<int64_t>> times(source->groups().size());
  for (int i = 0; i < std::max(options.repeat, 1); ++i) {
    std::vector<int64_t> group_ns;
    run->ResetInputs();
    SLICE_RETURN_IF_ERROR(run->Run(&group_ns));
    for (size_t g = 0; g < group_ns.size(); ++g) times[g].push_back(group_ns[g]);
  }
  std::vector<int64_t> medians;
  for (std::vector<int64_t>& list : times) {
    std::nth_element(list.begin(), list.begin() + static_cast<ptrdiff_t>(list.size() / 2),
                     list.end());
    medians.push_back(list[list.size() / 2]);
  }
  Print(options, *run, medians);
  return Status::Ok();
}

}  // namespace slice::executor
