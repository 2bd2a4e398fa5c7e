// slice-replay: what recorded measurements say about the scheduler, without a device.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <string>
#include <vector>

#include "tools/replay/csv.h"
#include "tools/replay/estimators.h"

namespace {

using slice::Status;
using slice::StatusCode;
namespace replay = slice::replay;

Status WriteText(const std::string& path, const std::string& text) {
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr)
    return slice::ErrnoError(StatusCode::kInvalid, errno, "cannot write '%s'", path.c_str());
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !written)
    return slice::ErrnoError(StatusCode::kInvalid, errno, "cannot write '%s'", path.c_str());
  return Status::Ok();
}

Status RunEstimators(const std::vector<std::string>& files, const std::string& json_path,
                     const replay::EvaluationOptions& options) {
  replay::Profile profile;
  for (const std::string& file : files) {
    SLICE_ASSIGN_OR_RETURN(const replay::Csv csv, replay::ReadCsv(file));
    SLICE_RETURN_IF_ERROR(replay::AddProfile(csv, &profile));
  }
  SLICE_ASSIGN_OR_RETURN(const replay::Evaluation evaluation, replay::Evaluate(profile, options));
  std::fputs(replay::TextOf(evaluation).c_str(), stdout);
  if (json_path.empty()) return Status::Ok();
  return WriteText(json_path, replay::FiguresJson(evaluation));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"slice-replay: evaluates the scheduler's parts on recorded measurements"};
  app.require_subcommand(1);
  std::vector<std::string> files;
  std::string json_path;
  replay::EvaluationOptions options;
  CLI::App* const estimators = app.add_subcommand(
      "estimators", "Errors of the duration estimators on profiles of operators or transfers");
  estimators->add_option("--profile", files, "CSV file (may be repeated)")->required();
  estimators->add_option("--json", json_path, "Write the figures there too");
  estimators->add_option("--seed", options.seed, "Of folds, draws and order")
      ->capture_default_str();
  estimators->add_option("--folds", options.folds, "Parts, each held out once")
      ->capture_default_str();
  estimators->add_option("--flops-per-second", options.flops_per_second, "Of the profiled device")
      ->capture_default_str();
  estimators
      ->add_option("--bytes-per-second", options.bytes_per_second,
                   "Of the profiled device's memory")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const Status status = RunEstimators(files, json_path, options);
  if (!status.ok()) {
    std::fprintf(stderr, "slice-replay: %s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}
