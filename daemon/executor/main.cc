// slice-executor: runs operators for sliced (the daemon), which starts it. By hand only with --run.
#include <google/protobuf/stubs/logging.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "common/log.h"
#include "common/wire/zygote.h"
#include "daemon/executor/run_mode.h"
#include "daemon/executor/service.h"
#include "daemon/executor/zygote.h"

namespace {

constexpr const char* kUsage =
    "usage: slice-executor --run TEMPLATE [--symbol NAME=VALUE ...] [--repeat N] [--seed S] "
    "[--json]\n"
    "         runs one template (binary, or .textproto) with random inputs and prints times and "
    "checksums\n"
    "       slice-executor --zygote [--control-fd N]   fork server, started by sliced\n"
    "       slice-executor [--control-fd N]            executor on a socket, started by sliced\n";

int Usage(const char* why) {
  std::fprintf(stderr, "slice-executor: %s\n%s", why, kUsage);
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  slice::executor::PrepareEnvironment(argv);
  slice::executor::RunOptions run;
  bool zygote = false;
  int control_fd = slice::wire::kControlFdDefault;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--json") {
      run.json = true;
    } else if (option == "--zygote") {
      zygote = true;
    } else if (option == "--help") {
      std::printf("%s", kUsage);
      return 0;
    } else if (i + 1 >= argc) {
      return Usage(("option " + option + " is not known or needs a value").c_str());
    } else if (option == "--run") {
      run.path = argv[++i];
    } else if (option == "--symbol") {
      const char* value = std::strchr(argv[++i], '=');
      if (value == nullptr) return Usage("--symbol wants NAME=VALUE");
      run.symbols[std::string(argv[i], static_cast<size_t>(value - argv[i]))] =
          std::atoll(value + 1);
    } else if (option == "--repeat") {
      run.repeat = std::atoi(argv[++i]);
    } else if (option == "--seed") {
      run.seed = std::strtoull(argv[++i], nullptr, 0);
    } else if (option == "--control-fd") {
      control_fd = std::atoi(argv[++i]);
    } else {
      return Usage(("option " + option + " is not known").c_str());
    }
  }
  // Templates are tenants' data: protobuf must not write a line for each bad one.
  google::protobuf::SetLogHandler(nullptr);
  slice::executor::PrepareTorch();
  if (!run.path.empty()) {
    const slice::Status status = slice::executor::RunTemplate(run);
    if (status.ok()) return 0;
    std::fprintf(stderr, "slice-executor: %s\n", status.ToString().c_str());
    return 1;
  }
  return zygote ? slice::executor::RunZygote(control_fd) : slice::executor::RunService(control_fd);
}
