// The TOML side of config.h. Every table is read through `Table`, which remembers the keys it
// knows: what is left over is an error that names its line and the nearest key. toml++ throws at
// syntax errors; nothing leaves this file.
#include <pwd.h>
#include <sys/stat.h>
#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <optional>
#include <set>
#include <sstream>

#include "daemon/server/config.h"

namespace slice::server {
namespace {

class Table {
 public:
  Table(const toml::table& table, std::string name, const std::string& source)
      : table_(table), name_(std::move(name)), source_(source) {}

  Status At(const toml::node& node, const std::string& text) const {
    return Error(StatusCode::kInvalid, "%s:%u: %s", source_.c_str(), node.source().begin.line,
                 text.c_str());
  }
  Status Here(const std::string& text) const {
    return Error(StatusCode::kInvalid, "%s:%u: %s", source_.c_str(), table_.source().begin.line,
                 text.c_str());
  }
  const toml::node* Get(const char* key) {
    known_.push_back(key);
    return table_.get(key);
  }

  Status Text(const char* key, std::string* out) {
    const toml::node* node = Get(key);
    if (node == nullptr) return Status::Ok();
    const auto value = node->value_exact<std::string>();
    if (!value.has_value()) return At(*node, Key(key) + " must be a string");
    *out = *value;
    return Status::Ok();
  }
  Status Flag(const char* key, bool* out) {
    const toml::node* node = Get(key);
    if (node == nullptr) return Status::Ok();
    const auto value = node->value_exact<bool>();
    if (!value.has_value()) return At(*node, Key(key) + " must be true or false");
    *out = *value;
    return Status::Ok();
  }
  Status Number(const char* key, int64_t min, int64_t max,
                const std::function<void(int64_t)>& set) {
    const toml::node* node = Get(key);
    if (node == nullptr) return Status::Ok();
    const auto value = node->value_exact<int64_t>();
    if (!value.has_value() || *value < min || *value > max) {
      return At(*node, Key(key) + " must be an integer from " + std::to_string(min) + " to " +
                           std::to_string(max));
    }
    set(*value);
    return Status::Ok();
  }
  Status Real(const char* key, double min, double max, double* out) {
    const toml::node* node = Get(key);
    if (node == nullptr) return Status::Ok();
    const auto value = node->value<double>();
    if (!value.has_value() || !(*value >= min) || *value > max) {
      return At(*node, Key(key) + " must be a number from " + std::to_string(min) + " to " +
                           std::to_string(max));
    }
    *out = *value;
    return Status::Ok();
  }
  Status Size(const char* key, int64_t* out) {
    const toml::node* node = Get(key);
    if (node == nullptr) return Status::Ok();
    if (const auto number = node->value_exact<int64_t>(); number.has_value() && *number >= 0) {
      *out = *number;
      return Status::Ok();
    }
    const auto text = node->value_exact<std::string>();
    if (!text.has_value()) return At(*node, Key(key) + " must be a size, e.g. \"512MiB\"");
    const Result<int64_t> bytes = ParseBytes(*text);
    if (!bytes.ok()) return At(*node, Key(key) + ": " + bytes.status().text());
    *out = *bytes;
    return Status::Ok();
  }
  // Every key that nobody asked for is an error.
  Status CheckUnknown() const {
    for (const auto& [key, node] : table_) {
      const std::string_view name = key.str();
      if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
      const std::string nearest = NearestKey(name, known_);
      const uint32_t line = key.source().begin.line;
      return Error(StatusCode::kInvalid, "%s:%u: unknown key '%s' in %s%s", source_.c_str(), line,
                   std::string(name).c_str(), name_.c_str(),
                   nearest.empty() ? "" : (": did you mean '" + nearest + "'?").c_str());
    }
    return Status::Ok();
  }

 private:
  std::string Key(const char* key) const { return name_ + ": " + key; }
  const toml::table& table_;
  std::string name_;
  const std::string& source_;
  std::vector<std::string_view> known_;
};

class Parser {
 public:
  Parser(const toml::table& root, const std::string& source)
      : root_(root, "the file", source), source_(source) {}

  Result<ServerConfig> Parse() {
    SLICE_RETURN_IF_ERROR(ReadDaemon());
    SLICE_RETURN_IF_ERROR(ReadDomains());
    SLICE_RETURN_IF_ERROR(ReadDevices());
    SLICE_RETURN_IF_ERROR(ReadScheduler());
    SLICE_RETURN_IF_ERROR(ReadLimits());
    SLICE_RETURN_IF_ERROR(ReadTenants());
    SLICE_RETURN_IF_ERROR(root_.CheckUnknown());
    return std::move(config_);
  }

 private:
  // The sub-table `key`, or none.
  Status Sub(const char* key, std::optional<Table>* out) {
    const toml::node* node = root_.Get(key);
    if (node == nullptr) return Status::Ok();
    if (!node->is_table()) return root_.At(*node, std::string("[") + key + "] must be a table");
    out->emplace(*node->as_table(), std::string("[") + key + "]", source_);
    return Status::Ok();
  }
  Status EachOf(const char* key, const std::function<Status(Table&)>& read) {
    const toml::node* node = root_.Get(key);
    if (node == nullptr) return Status::Ok();
    if (!node->is_array_of_tables())
      return root_.At(*node, std::string("write [[") + key + "]], once for each");
    for (const toml::node& item : *node->as_array()) {
      Table table(*item.as_table(), std::string("[[") + key + "]]", source_);
      SLICE_RETURN_IF_ERROR(read(table));
      SLICE_RETURN_IF_ERROR(table.CheckUnknown());
    }
    return Status::Ok();
  }

  Status ReadDaemon() {
    std::optional<Table> table;
    SLICE_RETURN_IF_ERROR(Sub("daemon", &table));
    if (!table.has_value()) return Status::Ok();
    SLICE_RETURN_IF_ERROR(table->Text("socket", &config_.socket_path));
    SLICE_RETURN_IF_ERROR(table->Text("admin_group", &config_.admin_group));
    SLICE_RETURN_IF_ERROR(table->Text("executor", &config_.executor_path));
    SLICE_RETURN_IF_ERROR(table->Text("log_file", &config_.log_file));
    SLICE_RETURN_IF_ERROR(table->Text("estimates_file", &config_.estimates_file));
    std::string level = "info";
    SLICE_RETURN_IF_ERROR(table->Text("log_level", &level));
    const std::vector<std::string> levels = {"debug", "info", "warning", "error"};
    const auto found = std::find(levels.begin(), levels.end(), level);
    if (found == levels.end())
      return table->Here("[daemon]: log_level must be debug, info, warning or error");
    config_.log_level = static_cast<LogLevel>(found - levels.begin());
    SLICE_RETURN_IF_ERROR(table->Number(
        "executor_timeout_ms", 100, 3'600'000,
        [this](int64_t value) { config_.executor_request_timeout = value * kMillisecond; }));
    SLICE_RETURN_IF_ERROR(table->Number("hang_limit_ms", 0, 3'600'000, [this](int64_t value) {
      config_.hang_limit = value * kMillisecond;
    }));
    SLICE_RETURN_IF_ERROR(table->Number(
        "cpu_wake_latency_us", -1, 1'000'000,
        [this](int64_t value) { config_.cpu_wake_latency_us = static_cast<int32_t>(value); }));
    return table->CheckUnknown();
  }

  Status ReadDomains() {
    return EachOf("domain", [this](Table& table) {
      engine::DomainConfig domain;
      SLICE_RETURN_IF_ERROR(table.Text("name", &domain.name));
      SLICE_RETURN_IF_ERROR(table.Size("pool", &domain.pool_bytes));
      SLICE_RETURN_IF_ERROR(table.Size("retained", &domain.retained_bytes));
      if (domain.name.empty()) return table.Here("[[domain]] needs a name");
      for (const char* key : {"pool", "retained"}) {
        if (table.Get(key) == nullptr)
          return table.Here("[[domain]] '" + domain.name + "' needs " + key);
      }
      for (const engine::DomainConfig& other : config_.engine.domains) {
        if (other.name == domain.name)
          return table.Here("[[domain]] '" + domain.name + "' is there twice");
      }
      if (config_.engine.domains.size() >= kDevicesMax) return table.Here("more than 64 domains");
      config_.engine.domains.push_back(std::move(domain));
      return Status::Ok();
    });
  }

  Status ReadDevices() {
    const Status status = EachOf("device", [this](Table& table) {
      DeviceSpec device;
      std::string domain;
      SLICE_RETURN_IF_ERROR(table.Text("name", &device.name));
      SLICE_RETURN_IF_ERROR(table.Text("backend", &device.backend));
      SLICE_RETURN_IF_ERROR(table.Text("domain", &domain));
      SLICE_RETURN_IF_ERROR(table.Number("ordinal", 0, 1023, [&](int64_t value) {
        device.ordinal = static_cast<uint32_t>(value);
      }));
      SLICE_RETURN_IF_ERROR(table.Number(
          "cpu", -1, 65535, [&](int64_t value) { device.cpu = static_cast<int32_t>(value); }));
      if (device.name.empty()) return table.Here("[[device]] needs a name");
      if (device.backend != "cpu" && device.backend != "cuda") {
        return table.Here("[[device]] '" + device.name + "': backend must be cpu or cuda");
      }
      if (domain.empty()) domain = device.name;
      const auto& domains = config_.engine.domains;
      const auto found = std::find_if(domains.begin(), domains.end(),
                                      [&](const auto& item) { return item.name == domain; });
      if (found == domains.end()) {
        return table.Here("[[device]] '" + device.name + "': there is no [[domain]] named '" +
                          domain + "'");
      }
      for (const DeviceSpec& other : config_.devices) {
        if (other.name == device.name)
          return table.Here("[[device]] '" + device.name + "' is there twice");
      }
      if (config_.devices.size() >= kDevicesMax) return table.Here("more than 64 devices");
      device.domain = static_cast<DomainIndex>(found - domains.begin());
      config_.engine.devices.push_back(
          {device.name, device.domain, static_cast<uint8_t>(device.backend == "cuda" ? 1 : 0)});
      config_.devices.push_back(std::move(device));
      return Status::Ok();
    });
    SLICE_RETURN_IF_ERROR(status);
    if (config_.devices.empty())
      return root_.Here("no [[device]]: at least one is needed, with a [[domain]] of its name");
    return Status::Ok();
  }

  Status ReadScheduler() {
    std::optional<Table> table;
    SLICE_RETURN_IF_ERROR(Sub("scheduler", &table));
    if (!table.has_value()) return Status::Ok();
    engine::Config& engine = config_.engine;
    SLICE_RETURN_IF_ERROR(table->Text("policy", &engine.policy));
    const auto set32 = [](uint32_t* to) {
      return [to](int64_t value) { *to = static_cast<uint32_t>(value); };
    };
    SLICE_RETURN_IF_ERROR(table->Number("issue_ahead", 1, 64, set32(&engine.issue_ahead)));
    SLICE_RETURN_IF_ERROR(table->Number("batch_ops_max", 1, 1024, set32(&engine.batch_ops_max)));
    SLICE_RETURN_IF_ERROR(
        table->Number("tenant_queue_max", 1, 256, set32(&engine.tenant_queue_max)));
    SLICE_RETURN_IF_ERROR(
        table->Number("live_ops_max", 1, 10'000'000, set32(&engine.live_ops_max)));
    const auto set_us = [](DurationNs* to) {
      return [to](int64_t value) { *to = value * kMicrosecond; };
    };
    SLICE_RETURN_IF_ERROR(
        table->Number("batch_time_max_us", 1, 60'000'000, set_us(&engine.batch_time_max)));
    SLICE_RETURN_IF_ERROR(
        table->Number("command_latency_us", 1, 1'000'000, set_us(&engine.command_latency)));
    SLICE_RETURN_IF_ERROR(
        table->Number("offline_op_max_us", 1, 3'600'000'000, set_us(&engine.offline_op_max)));
    SLICE_RETURN_IF_ERROR(table->Size("workspace_margin", &engine.workspace_margin_bytes));
    SLICE_RETURN_IF_ERROR(table->Flag("drop_late", &engine.drop_late));
    return table->CheckUnknown();
  }

  Status ReadLimits() {
    std::optional<Table> table;
    SLICE_RETURN_IF_ERROR(Sub("limits", &table));
    if (!table.has_value()) return Status::Ok();
    SessionLimits& limits = config_.limits;
    const auto set32 = [](uint32_t* to) {
      return [to](int64_t value) { *to = static_cast<uint32_t>(value); };
    };
    SLICE_RETURN_IF_ERROR(table->Number("sessions_max", 1, 4096, set32(&limits.sessions_max)));
    SLICE_RETURN_IF_ERROR(table->Number("graphs_max", 1, 4096, set32(&limits.graphs_max)));
    SLICE_RETURN_IF_ERROR(table->Number("tensor_sets_max", 1, 65536, set32(&limits.sets_max)));
    SLICE_RETURN_IF_ERROR(table->Number("tensors_max", 1, 10'000'000, set32(&limits.tensors_max)));
    SLICE_RETURN_IF_ERROR(table->Number("bindings_max", 1, 65536, set32(&limits.bindings_max)));
    SLICE_RETURN_IF_ERROR(
        table->Number("sequences_max", 1, 1'000'000, set32(&limits.sequences_max)));
    SLICE_RETURN_IF_ERROR(table->Number("faults_max", 1, 1'000'000, set32(&limits.faults_max)));
    SLICE_RETURN_IF_ERROR(
        table->Number("executor_deaths_max", 1, 1'000'000, set32(&limits.executor_deaths_max)));
    int64_t arena = static_cast<int64_t>(limits.arena_bytes_max);
    SLICE_RETURN_IF_ERROR(table->Size("arena_max", &arena));
    limits.arena_bytes_max = static_cast<uint64_t>(arena);
    return table->CheckUnknown();
  }

  Status ReadClass(Table* table, const char* key, ServiceClass* out) {
    std::string name;
    SLICE_RETURN_IF_ERROR(table->Text(key, &name));
    if (name.empty()) return Status::Ok();
    if (name != "online" && name != "offline")
      return table->Here(std::string(key) + " must be \"online\" or \"offline\"");
    *out = name == "online" ? ServiceClass::kOnline : ServiceClass::kOffline;
    return Status::Ok();
  }

  Status ReadPolicy(Table* table, TenantPolicy* policy) {
    SLICE_RETURN_IF_ERROR(ReadClass(table, "class", &policy->class_max));
    SLICE_RETURN_IF_ERROR(ReadClass(table, "default_class", &policy->class_default));
    if (policy->class_default == ServiceClass::kOnline &&
        policy->class_max == ServiceClass::kOffline) {
      return table->Here("default_class is online, but class allows offline only");
    }
    SLICE_RETURN_IF_ERROR(table->Real("weight", 0.001, 1e6, &policy->weight));
    SLICE_RETURN_IF_ERROR(table->Size("memory", &policy->memory_bytes_max));
    SLICE_RETURN_IF_ERROR(table->Number("deadline_min_ms", 0, 86'400'000, [policy](int64_t value) {
      policy->deadline_min = value * kMillisecond;
    }));
    SLICE_RETURN_IF_ERROR(table->Number("sessions_max", 1, 4096, [policy](int64_t value) {
      policy->sessions_max = static_cast<uint32_t>(value);
    }));
    const toml::node* devices = table->Get("devices");
    if (devices == nullptr) return Status::Ok();
    if (!devices->is_array() || devices->as_array()->empty()) {
      return table->At(*devices, "devices must be a list of device names, e.g. [\"cpu0\"]");
    }
    policy->device_mask = 0;
    for (const toml::node& item : *devices->as_array()) {
      const std::string name = item.value_or(std::string());
      const auto found =
          std::find_if(config_.devices.begin(), config_.devices.end(),
                       [&](const DeviceSpec& device) { return device.name == name; });
      if (found == config_.devices.end())
        return table->At(item, "devices: there is no [[device]] named '" + name + "'");
      policy->device_mask |= uint64_t{1} << (found - config_.devices.begin());
    }
    return Status::Ok();
  }

  Status ReadTenants() {
    std::optional<Table> defaults;
    SLICE_RETURN_IF_ERROR(Sub("tenant_defaults", &defaults));
    if (defaults.has_value()) {
      SLICE_RETURN_IF_ERROR(ReadPolicy(&*defaults, &config_.tenant_defaults));
      SLICE_RETURN_IF_ERROR(defaults->CheckUnknown());
    }
    return EachOf("tenant", [this](Table& table) {
      int64_t uid = -1;
      std::string user;
      SLICE_RETURN_IF_ERROR(
          table.Number("uid", 0, 0xfffffffe, [&](int64_t value) { uid = value; }));
      SLICE_RETURN_IF_ERROR(table.Text("user", &user));
      if ((uid < 0) == user.empty()) return table.Here("[[tenant]] needs either uid or user");
      if (!user.empty()) {
        passwd entry{};
        passwd* found = nullptr;
        std::vector<char> buffer(16384);
        ::getpwnam_r(user.c_str(), &entry, buffer.data(), buffer.size(), &found);
        if (found == nullptr) return table.Here("[[tenant]]: there is no user '" + user + "'");
        uid = found->pw_uid;
      }
      TenantPolicy policy = config_.tenant_defaults;
      SLICE_RETURN_IF_ERROR(ReadPolicy(&table, &policy));
      if (!config_.tenants.emplace(static_cast<uid_t>(uid), policy).second) {
        return table.Here("[[tenant]]: user " + std::to_string(uid) + " is there twice");
      }
      return Status::Ok();
    });
  }

  Table root_;
  const std::string& source_;
  ServerConfig config_;
};

}  // namespace

Result<ServerConfig> ParseConfig(std::string_view text, const std::string& source_name) {
  try {
    const toml::table root = toml::parse(text, source_name);
    return Parser(root, source_name).Parse();
  } catch (const toml::parse_error& error) {
    return Error(StatusCode::kInvalid, "%s:%u: %s", source_name.c_str(), error.source().begin.line,
                 std::string(error.description()).c_str());
  } catch (const std::exception& error) {
    return Error(StatusCode::kInvalid, "%s: %s", source_name.c_str(), error.what());
  }
}

Result<ServerConfig> LoadConfig(const std::string& path) {
  std::ifstream file(path);
  if (!file) return Error(StatusCode::kInvalid, "cannot read config file '%s'", path.c_str());
  std::stringstream content;
  content << file.rdbuf();
  if (file.bad() || !content)
    return Error(StatusCode::kInvalid, "cannot read config file '%s': is it a file?", path.c_str());
  return ParseConfig(content.str(), path);
}

}  // namespace slice::server
