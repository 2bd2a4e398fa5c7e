// What a configuration must be beyond its syntax, and how it is shown. Looks at files, users and
// the machine; changes nothing.
#include <fcntl.h>
#include <grp.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <iterator>

#include "daemon/server/config.h"

namespace slice::server {
namespace {

constexpr int64_t kRetainedBytesMin = kMiB;
constexpr uint64_t kArenaBytesMin = 4096;

// "64MiB", in the largest unit that says it exactly.
std::string SizeText(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes != 0 && bytes % 1024 == 0 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return std::to_string(bytes) + kUnits[unit];
}

std::string MillisecondsText(DurationNs duration) {
  return std::to_string(duration / kMillisecond) + " ms";
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

// Whether this process could make a file there.
Status CheckFolder(const std::string& folder, const char* what) {
  if (::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) == 0) return Status::Ok();
  return ErrnoError(StatusCode::kInvalid, errno, "%s: cannot write to folder '%s'", what,
                    folder.c_str());
}

Status CheckSocket(const std::string& path) {
  constexpr size_t kBytesMax = sizeof(sockaddr_un::sun_path) - 1;
  if (path.empty() || path.size() > kBytesMax) {
    return Error(StatusCode::kInvalid, "socket: '%s' has %zu bytes, 1 to %zu are possible",
                 path.c_str(), path.size(), kBytesMax);
  }
  struct stat info {};
  if (::lstat(path.c_str(), &info) == 0 && !S_ISSOCK(info.st_mode))
    return Error(StatusCode::kInvalid, "socket: '%s' exists and is not a socket", path.c_str());
  const std::string folder = FolderOf(path);
  // The last folder is made at start.
  if (::stat(folder.c_str(), &info) != 0 && errno == ENOENT)
    return CheckFolder(FolderOf(folder), "socket");
  return CheckFolder(folder, "socket");
}

Status CheckLogFile(const std::string& path) {
  if (path.empty()) return Status::Ok();
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return CheckFolder(FolderOf(path), "log_file");
  if (S_ISDIR(info.st_mode))
    return Error(StatusCode::kInvalid, "log_file: '%s' is a folder", path.c_str());
  if (::faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) == 0) return Status::Ok();
  return ErrnoError(StatusCode::kInvalid, errno, "log_file: cannot write '%s'", path.c_str());
}

// It is replaced as a whole, so its folder counts.
Status CheckEstimatesFile(const std::string& path) {
  if (path.empty()) return Status::Ok();
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode))
    return Error(StatusCode::kInvalid, "estimates_file: '%s' is a folder", path.c_str());
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode))
    return Error(StatusCode::kInvalid, "estimates_file: '%s' is not a regular file", path.c_str());
  return CheckFolder(FolderOf(path), "estimates_file");
}

Status CheckExecutor(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0)
    return ErrnoError(StatusCode::kInvalid, errno, "executor: '%s'", path.c_str());
  if (!S_ISREG(info.st_mode) || ::faccessat(AT_FDCWD, path.c_str(), X_OK, AT_EACCESS) != 0) {
    return Error(StatusCode::kInvalid, "executor: '%s' is not a program that this user may run",
                 path.c_str());
  }
  return Status::Ok();
}

Status CheckAdminGroup(const std::string& name) {
  if (name.empty()) return Status::Ok();
  group entry{};
  group* found = nullptr;
  std::vector<char> buffer(16384);
  ::getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (found != nullptr) return Status::Ok();
  return Error(StatusCode::kInvalid, "admin_group: there is no group '%s'", name.c_str());
}

Status CheckMemory(const ServerConfig& config) {
  const int64_t margin = config.engine.workspace_margin_bytes;
  if (margin > INT64_MAX / 256) {
    return Error(StatusCode::kInvalid, "workspace_margin of %s is beyond any machine",
                 SizeText(margin).c_str());
  }
  const int64_t pool_min = margin + kMiB;
  for (const engine::DomainConfig& domain : config.engine.domains) {
    const char* name = domain.name.c_str();
    if (domain.pool_bytes < pool_min) {
      return Error(StatusCode::kInvalid,
                   "domain '%s': a pool of %s is too small, at least %s: every op takes its "
                   "workspace_margin (%s) from it, beside what it reads and writes",
                   name, SizeText(domain.pool_bytes).c_str(), SizeText(pool_min).c_str(),
                   SizeText(margin).c_str());
    }
    if (domain.retained_bytes < kRetainedBytesMin) {
      return Error(StatusCode::kInvalid,
                   "domain '%s': retained of %s is too small, at least %s: weights, replicas and "
                   "managed tensors live in it",
                   name, SizeText(domain.retained_bytes).c_str(),
                   SizeText(kRetainedBytesMin).c_str());
    }
    if (domain.pool_bytes > INT64_MAX / 256 || domain.retained_bytes > INT64_MAX / 256)
      return Error(StatusCode::kInvalid, "domain '%s': a size is beyond any machine", name);
  }
  // Pools of CPU devices are touched at start: more than there is would end in the OOM killer.
  uint64_t host_domains = 0;
  for (const DeviceSpec& device : config.devices) {
    if (device.backend == "cpu") host_domains |= uint64_t{1} << device.domain;
  }
  int64_t pools = 0;
  for (size_t d = 0; d < config.engine.domains.size(); ++d) {
    if ((host_domains >> d & 1) != 0) pools += config.engine.domains[d].pool_bytes;
  }
  struct sysinfo memory {};
  ::sysinfo(&memory);
  const int64_t total = static_cast<int64_t>(memory.totalram) * memory.mem_unit;
  if (pools > total) {
    return Error(StatusCode::kInvalid,
                 "the pools of all CPU domains have %s together, this machine has %s: they are "
                 "touched at start",
                 SizeText(pools).c_str(), SizeText(total).c_str());
  }
  return Status::Ok();
}

Status CheckDevices(const ServerConfig& config) {
  const long cpus = ::sysconf(_SC_NPROCESSORS_CONF);
  for (const DeviceSpec& device : config.devices) {
    if (device.cpu >= cpus) {
      return Error(StatusCode::kInvalid, "device '%s': cpu %d, this machine has 0 to %ld",
                   device.name.c_str(), device.cpu, cpus - 1);
    }
  }
  return Status::Ok();
}

std::string PolicyText(const TenantPolicy& policy) {
  const auto class_name = [](ServiceClass service_class) {
    return service_class == ServiceClass::kOnline ? "online" : "offline";
  };
  char text[160];
  std::snprintf(text, sizeof text, "up to %s (default %s), weight %g, memory %s, %u sessions",
                class_name(policy.class_max), class_name(policy.class_default), policy.weight,
                policy.memory_bytes_max == 0 ? "all" : SizeText(policy.memory_bytes_max).c_str(),
                policy.sessions_max);
  return text;
}

}  // namespace

Status CheckConfig(const ServerConfig& config) {
  SLICE_RETURN_IF_ERROR(CheckSocket(config.socket_path));
  SLICE_RETURN_IF_ERROR(CheckLogFile(config.log_file));
  SLICE_RETURN_IF_ERROR(CheckEstimatesFile(config.estimates_file));
  SLICE_RETURN_IF_ERROR(CheckExecutor(config.executor_path));
  SLICE_RETURN_IF_ERROR(CheckAdminGroup(config.admin_group));
  SLICE_RETURN_IF_ERROR(CheckDevices(config));
  SLICE_RETURN_IF_ERROR(CheckMemory(config));
  if (config.limits.arena_bytes_max < kArenaBytesMin) {
    return Error(StatusCode::kInvalid, "limits: arena_max of %llu bytes, at least %llu: one page",
                 static_cast<unsigned long long>(config.limits.arena_bytes_max),
                 static_cast<unsigned long long>(kArenaBytesMin));
  }
  return Status::Ok();
}

std::string DescribeConfig(const ServerConfig& config) {
  constexpr const char* kLevels[] = {"debug", "info", "warning", "error"};
  std::string text;
  const auto line = [&text](const std::string& key, const std::string& value) {
    text += "  " + key + std::string(key.size() < 18 ? 18 - key.size() : 1, ' ') + value + "\n";
  };
  line("socket", config.socket_path);
  line("executor", config.executor_path);
  line("log", std::string(kLevels[static_cast<size_t>(config.log_level)]) + ", to " +
                  (config.log_file.empty() ? "standard error" : config.log_file));
  line("estimates", config.estimates_file.empty() ? "not kept" : config.estimates_file);
  line("admin group", config.admin_group.empty() ? "none" : config.admin_group);
  line("policy", config.engine.policy);
  line("executor timeout", MillisecondsText(config.executor_request_timeout));
  line("hang limit", config.hang_limit == 0 ? "none" : MillisecondsText(config.hang_limit));
  for (const engine::DomainConfig& domain : config.engine.domains) {
    line("domain " + domain.name,
         "pool " + SizeText(domain.pool_bytes) + ", retained " + SizeText(domain.retained_bytes));
  }
  for (const DeviceSpec& device : config.devices) {
    line("device " + device.name,
         device.backend + " " + std::to_string(device.ordinal) + ", domain " +
             config.engine.domains[device.domain].name +
             (device.cpu < 0 ? "" : ", pinned to CPU " + std::to_string(device.cpu)));
  }
  line("sessions", "at most " + std::to_string(config.limits.sessions_max));
  line("users", PolicyText(config.tenant_defaults));
  for (const auto& [uid, policy] : config.tenants)
    line("user " + std::to_string(uid), PolicyText(policy));
  return text;
}

}  // namespace slice::server
