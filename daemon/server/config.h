// What sliced is told at start: devices, memory, scheduler options, and what each user may have.
// From a TOML file (docs/sliced.toml is the commented example) or, without one, a few CPU devices.
//
// Errors of the file name the file, the line and, for an unknown key, the nearest known one. Pure
// but for reading the file and looking up names, files and memory.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "common/log.h"
#include "common/status.h"
#include "common/units.h"
#include "daemon/engine/engine.h"

namespace slice::server {

struct DeviceSpec {
  std::string name;
  std::string backend = "cpu";
  uint32_t ordinal = 0;  // the backend's number
  DomainIndex domain = 0;
  int32_t cpu = -1;  // pin the device's thread; -1 = no
};

// What one user's sessions may have.
struct TenantPolicy {
  ServiceClass class_max = ServiceClass::kOffline;      // highest that is granted
  ServiceClass class_default = ServiceClass::kOffline;  // for a session that asks for none
  double weight = 1.0;                                  // default and highest
  int64_t memory_bytes_max = 0;  // per session, all domains together; 0 = all there is
  uint64_t device_mask = ~uint64_t{0};
  DurationNs deadline_min = 0;  // tighter ones are raised to this
  uint32_t sessions_max = 16;   // at the same time, of this user
};

// Bounds of one session, so that no tenant can exhaust the daemon.
struct SessionLimits {
  uint32_t sessions_max = 128;  // of all users
  uint32_t graphs_max = 64;
  uint64_t graph_bytes_max = uint64_t{256} << 20;  // all registered templates of a session
  uint32_t sets_max = 256;  // calls of import and alloc that are not released
  uint32_t tensors_max = 65'536;
  uint32_t bindings_max = 256;
  uint32_t sequences_max = 4'096;  // open at the same time
  uint64_t arena_bytes_max = uint64_t{8} << 30;
  uint32_t faults_max = 16;          // malformed messages and slots before the session is ended
  uint32_t executor_deaths_max = 3;  // in Blame::kWindow, with ops of the session running: the same
};

struct ServerConfig {
  std::string socket_path;
  std::string admin_group;  // may use administration requests; "" = root and the daemon's user only
  std::string log_file;     // "" = stderr
  LogLevel log_level = LogLevel::kInfo;
  std::string executor_path;   // "" = slice-executor beside sliced
  std::string estimates_file;  // learned durations, between runs; "" = not kept
  DurationNs executor_request_timeout = 60 * kSecond;
  int32_t cpu_wake_latency_us = 0;  // see wake_latency.h; below 0: as the kernel does
  DurationNs hang_limit =
      120 * kSecond;  // an op that runs longer: the executor is restarted; 0 = never
  // Not in the file:
  DurationNs executor_silence = 2 * kSecond;      // longer: it is shown as not responding
  DurationNs hello_timeout = 5 * kSecond;         // a connection that does not say Hello is ended
  DurationNs estimates_interval = 300 * kSecond;  // between two savings, if something was learned
  std::vector<DeviceSpec> devices;
  engine::Config engine;  // devices and domains too
  TenantPolicy tenant_defaults;
  std::map<uid_t, TenantPolicy> tenants;
  SessionLimits limits;

  const TenantPolicy& PolicyOf(uid_t uid) const {
    const auto found = tenants.find(uid);
    return found == tenants.end() ? tenant_defaults : found->second;
  }
};

// `count` CPU devices "cpu0".. with a memory domain each; 0 bytes = derived from the machine's
// memory. Any user may be online: for development. Errors: INVALID (count).
Result<ServerConfig> DefaultConfig(int count, int64_t pool_bytes = 0, int64_t retained_bytes = 0);
// Errors: INVALID with "FILE:LINE: ..." texts.
Result<ServerConfig> LoadConfig(const std::string& path);
Result<ServerConfig> ParseConfig(std::string_view text, const std::string& source_name);
// Whether sliced can start with it: paths, group, memory against this machine. The engine's part,
// the policy's name too, is Engine::CheckConfig. Errors: INVALID; the text has the limit and why.
Status CheckConfig(const ServerConfig& config);
// All that is in effect, for people; a line each.
std::string DescribeConfig(const ServerConfig& config);
// "512MiB", "2GiB", "4096". Errors: INVALID, OVERFLOW.
Result<int64_t> ParseBytes(std::string_view text);
// The known key with the smallest edit distance, or "" when none is near.
std::string NearestKey(std::string_view key, const std::vector<std::string_view>& known);

}  // namespace slice::server
