// sliced: the scheduler daemon. Reads the config, starts the executor, serves tenants until SIGTERM
// or SIGINT.
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>

#include "common/log.h"
#include "common/wire/control.h"
#include "daemon/engine/engine.h"
#include "daemon/server/config.h"
#include "daemon/server/server.h"

namespace {

using slice::Result;
using slice::Status;
using slice::server::ServerConfig;

struct Arguments {
  std::string config, socket, executor, policy, pool, retained, log_level, estimates, record_rounds;
  int cpu_devices = 2;
  bool has_pool = false, has_retained = false;
  bool check_config = false;
  bool foreground = true;
};

int Fail(const Status& status) {
  std::fprintf(stderr, "sliced: %s\n", status.ToString().c_str());
  return 1;
}

std::string BesideSliced(const char* name) {
  char path[4096];
  const ssize_t bytes = ::readlink("/proc/self/exe", path, sizeof path - 1);
  const std::string self(path, bytes < 0 ? 0 : static_cast<size_t>(bytes));
  return self.substr(0, self.rfind('/') + 1) + name;
}

// What the flags say overrides what the file says.
Result<ServerConfig> MakeConfig(const Arguments& arguments) {
  SLICE_ASSIGN_OR_RETURN(ServerConfig config,
                         arguments.config.empty()
                             ? slice::server::DefaultConfig(arguments.cpu_devices)
                             : slice::server::LoadConfig(arguments.config));
  const auto override_bytes = [&](const char* flag, const std::string& text, auto member) {
    const Result<int64_t> bytes = slice::server::ParseBytes(text);
    if (!bytes.ok()) return Status(bytes.status().code(), flag + bytes.status().text());
    for (slice::engine::DomainConfig& domain : config.engine.domains) domain.*member = *bytes;
    return Status::Ok();
  };
  if (arguments.has_pool) {
    SLICE_RETURN_IF_ERROR(
        override_bytes("--pool: ", arguments.pool, &slice::engine::DomainConfig::pool_bytes));
  }
  if (arguments.has_retained) {
    SLICE_RETURN_IF_ERROR(override_bytes("--retained: ", arguments.retained,
                                         &slice::engine::DomainConfig::retained_bytes));
  }
  if (!arguments.socket.empty()) config.socket_path = arguments.socket;
  if (config.socket_path.empty()) config.socket_path = slice::wire::kDefaultSocketPath;
  if (!arguments.executor.empty()) config.executor_path = arguments.executor;
  if (config.executor_path.empty()) config.executor_path = BesideSliced("slice-executor");
  if (!arguments.policy.empty()) config.engine.policy = arguments.policy;
  if (!arguments.estimates.empty()) config.estimates_file = arguments.estimates;
  if (arguments.log_level == "debug") config.log_level = slice::LogLevel::kDebug;
  if (arguments.log_level == "info") config.log_level = slice::LogLevel::kInfo;
  if (arguments.log_level == "warning") config.log_level = slice::LogLevel::kWarning;
  if (arguments.log_level == "error") config.log_level = slice::LogLevel::kError;
  SLICE_RETURN_IF_ERROR(slice::server::CheckConfig(config));
  SLICE_RETURN_IF_ERROR(slice::engine::Engine::CheckConfig(config.engine));
  return config;
}

int Serve(ServerConfig config, const std::string& record_rounds) {
  sigset_t stop;
  ::sigemptyset(&stop);
  ::sigaddset(&stop, SIGTERM);
  ::sigaddset(&stop, SIGINT);
  ::sigprocmask(SIG_BLOCK, &stop, nullptr);  // before any thread: Server reads them from a signalfd
  ::signal(SIGPIPE, SIG_IGN);
  const Status log = slice::OpenLog(config.log_file, config.log_level);
  if (!log.ok()) return Fail(log);
  std::ofstream rounds;
  if (!record_rounds.empty()) {
    rounds.open(record_rounds, std::ios::app);
    if (!rounds) {
      return Fail(slice::Error(slice::StatusCode::kInvalid, "--record-rounds: cannot open %s",
                               record_rounds.c_str()));
    }
    config.engine.record_round = [&rounds](std::string_view round) { rounds << round; };
  }
  slice::server::Server::Parts parts;
  parts.engine_factory = slice::engine::Engine::Create;
  parts.gmg_bytes = slice::engine::Engine::GmgBytes(config.engine);
  parts.launcher = std::make_unique<slice::server::ZygoteLauncher>(config.executor_path);
  auto server = slice::server::Server::Create(config, std::move(parts));
  if (!server.ok()) return Fail(server.status());
  const Status signals = (*server)->StopOnSignals();
  if (!signals.ok()) return Fail(signals);
  (*server)->Run();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app{
      "sliced: schedules tensor operators of many tenants on the idle slices of shared devices"};
  app.footer(
      "What a flag says overrides what the file says; --check-config prints what is in effect.");
  CLI::Option* config_file =
      app.add_option("--config", arguments.config,
                     "TOML file; see docs/sliced.toml. Without it: CPU devices, for development");
  // An empty value would look like a flag that was not given.
  const CLI::Validator not_empty([](std::string& text) { return text.empty() ? "is empty" : ""; },
                                 "");
  config_file->check(not_empty);
  app.add_option("--socket", arguments.socket, "Path of the control socket")->check(not_empty);
  app.add_option("--executor", arguments.executor, "Path of slice-executor; default: beside sliced")
      ->check(not_empty);
  app.add_option("--policy", arguments.policy,
                 "Scheduling policy: slice, fifo, online-only or priority")
      ->check(not_empty);
  app.add_option("--estimates-file", arguments.estimates,
                 "Where learned durations are kept between runs; default: nowhere")
      ->check(not_empty);
  app.add_option("--cpu-devices", arguments.cpu_devices,
                 "Number of CPU devices; not with --config, whose file names its devices")
      ->check(CLI::Range(1, slice::kDevicesMax))
      ->excludes(config_file);
  const CLI::Option* pool = app.add_option(
      "--pool", arguments.pool, "Memory pool of each domain, e.g. 256MiB; at least 2MiB");
  const CLI::Option* retained =
      app.add_option("--retained", arguments.retained,
                     "Memory for weights and state of each domain; at least 1MiB");
  app.add_option("--log-level", arguments.log_level, "debug, info, warning or error")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  app.add_option("--record-rounds", arguments.record_rounds,
                 "For developers: appends every round (snapshot and op batch) to this file");
  app.add_flag("--check-config", arguments.check_config,
               "Only check the config and print what is in effect; exit status 0 = it is fine");
  app.add_flag("--foreground", arguments.foreground,
               "Stay in the foreground (the default, and the only way)");
  CLI11_PARSE(app, argc, argv);
  arguments.has_pool = pool->count() != 0;
  arguments.has_retained = retained->count() != 0;
  const Result<ServerConfig> config = MakeConfig(arguments);
  if (!config.ok()) return Fail(config.status());
  if (arguments.check_config) {
    std::printf("%s: %zu devices, %zu memory domains, %zu users named: fine\n%s",
                arguments.config.empty() ? "defaults" : arguments.config.c_str(),
                config->devices.size(), config->engine.domains.size(), config->tenants.size(),
                slice::server::DescribeConfig(*config).c_str());
    return 0;
  }
  return Serve(*config, arguments.record_rounds);
}
