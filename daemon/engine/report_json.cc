// JSON texts for `slicectl status|devices|tenants`.
#include <algorithm>

#include "daemon/engine/engine_impl.h"
#include "daemon/gmg/json.h"

namespace slice::engine {

using gmg::JsonWriter;
using gmg::MemoryKind;

namespace {
double Median(std::vector<float> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return static_cast<double>(*middle);
}
}  // namespace

std::string EngineImpl::StatusJson(TimeNs now) const {
  uint64_t parked = 0;
  size_t commands = 0;
  for (const Instance* const instance : waiting_) parked += instance->parked;
  for (const auto& [id, tenant] : tenants_) commands += tenant->commands.size();
  JsonWriter json;
  json.BeginObject()
      .Field("policy", policy_->name())
      .Field("executor", executor_up_ ? "up"
                         : given_up_  ? "given up"
                                      : "restarting");
  json.Field("tenants", tenants_.size())
      .Field("templates", templates_.size())
      .Field("bindings", bindings_.size());
  json.Field("tensor_sets", sets_.size()).Field("sequences", sequences_.size());
  json.Field("instances_started", started_.size())
      .Field("instances_waiting", waiting_.size() - parked);
  json.Field("instances_parked", parked).Field("tensor_commands", commands);
  if (parked > 0) {
    json.Field(
        "parked_because",
        std::string_view("policy '" + std::string(policy_->name()) + "' takes no offline work; " +
                         std::to_string(parked) + " submits wait for another policy"));
  }
  json.Field("ops_live", gmg_.ops_live()).Field("ops_live_max", config_.live_ops_max);
  json.Field("transfers_live", arbiter_.size()).Field("transfers_waiting", arbiter_.pending());
  json.Field("replications", replications_.size())
      .Field("signatures", op_estimator_.signature_count());
  json.Field("report_latency_p99_ns", report_latency_p99_);
  json.Key("counters").BeginObject();
  json.Field("submits", counters_.submits)
      .Field("completions", counters_.completions)
      .Field("failures", counters_.failures);
  json.Field("refused", counters_.refused)
      .Field("ops_executed", counters_.ops_executed)
      .Field("transfers", counters_.transfers);
  json.Field("recalls", counters_.recalls)
      .Field("deferrals", counters_.deferrals)
      .Field("rounds", counters_.rounds);
  json.Field("offline_ops", counters_.offline_ops)
      .Field("offline_ops_off_home", counters_.offline_ops_off_home)
      .EndObject();
  json.Key("classes").BeginObject();
  for (const ServiceClass service_class : {ServiceClass::kOnline, ServiceClass::kOffline}) {
    const auto i = static_cast<size_t>(service_class);
    const ClassCounters& c = class_counters_[i];
    json.Key(i == 0 ? "online" : "offline").BeginObject();
    json.Field("submits", c.submits)
        .Field("completions", c.completions)
        .Field("failures", c.failures)
        .Field("late", c.late);
    json.Field("prediction_error_median", Median(prediction_errors_[i]))
        .Field("prediction_samples", prediction_errors_[i].size());
    json.EndObject();
  }
  json.EndObject().Field("now_ns", now).EndObject();
  return json.Take();
}

std::string EngineImpl::DevicesJson(TimeNs now) const {
  JsonWriter json;
  json.BeginObject().Key("devices").BeginArray();
  for (const DeviceState& device : devices_) {
    bool overrun = false;
    const TimeNs free_at = LaunchedEnd(device, now, &overrun);
    json.BeginObject()
        .Field("device", device.index)
        .Field("name", std::string_view(config_.devices[device.index].name));
    json.Field("domain", std::string_view(config_.domains[device.domain].name));
    if (!device.launched.empty()) {
      const OpRef& ref = device.launched[0];
      json.Key("running").BeginObject().Field("tenant", ref.instance->tenant->config.id.value);
      json.Field("instance", ref.instance->id.value).Field("op", ref.op);
      json.Field("name", std::string_view(ref.instance->graph->groups()[ref.op].name));
      json.Field("elapsed_ns", now - device.started).EndObject();
    }
    json.Field("issued", device.issued.size())
        .Field("placed", device.placed.size())
        .Field("ops_done", device.done);
    json.Field("free_in_ns", std::max<TimeNs>(free_at - now, 0)).Field("overrun", overrun);
    json.Field("hosts_online", device.hosts_online).Field("phantom", now < device.phantom_until);
    json.Field("busy_ns", counters_.device_busy[device.index])
        .Field("cpu_ns", counters_.device_cpu[device.index])
        .EndObject();
  }
  json.EndArray().Key("domains").BeginArray();
  for (DomainIndex d = 0; d < config_.domains.size(); ++d) {
    json.BeginObject().Field("domain", d).Field("name", std::string_view(config_.domains[d].name));
    json.Field("pool_bytes", ledger_.pool_capacity(d)).Field("lane_bytes", ledger_.lanes(d));
    json.Field("reserved_bytes", ledger_.reserved(d)).Field("granted_bytes", ledger_.granted(d));
    json.Field("pool_free_bytes", ledger_.pool_free(d))
        .Field("retained_bytes_max", ledger_.retained_capacity(d));
    json.Field("retained_bytes", ledger_.retained(d))
        .Field("pool_holders", std::string_view(ledger_.Holders(d, true)));
    json.Field("retained_holders", std::string_view(ledger_.Holders(d, false))).EndObject();
  }
  json.EndArray().EndObject();
  return json.Take();
}

std::string EngineImpl::TenantsJson(TimeNs now) const {
  std::vector<const Tenant*> tenants;
  for (const auto& [id, tenant] : tenants_) tenants.push_back(tenant.get());
  std::sort(tenants.begin(), tenants.end(),
            [](const Tenant* a, const Tenant* b) { return a->config.id < b->config.id; });
  JsonWriter json;
  json.BeginObject().Key("tenants").BeginArray();
  for (const Tenant* const tenant : tenants) {
    const TenantConfig& config = tenant->config;
    json.BeginObject()
        .Field("tenant", config.id.value)
        .Field("name", std::string_view(config.name));
    json.Field("uid", config.uid).Field("pid", config.pid);
    json.Field("class", config.class_max == ServiceClass::kOnline ? "online" : "offline")
        .Field("weight", config.weight);
    json.Field("home", std::string_view(config_.devices[config.home].name))
        .Field("removing", tenant->removing);
    size_t waiting = 0, parked = 0, running = 0;
    for (const Instance* const instance : tenant->instances) {
      parked += instance->parked;
      waiting += instance->phase == Phase::kWaiting && !instance->parked;
      running += instance->phase == Phase::kStarted;
    }
    json.Field("instances_running", running)
        .Field("instances_waiting", waiting)
        .Field("instances_parked", parked);
    json.Field("tensor_commands", tenant->commands.size())
        .Field("submits", tenant->submits)
        .Field("completions", tenant->completions);
    json.Field("memory_bytes_max", config.memory_bytes_max)
        .Field("pool_bytes", ledger_.pool_used(config.id));
    json.Field("retained_bytes", ledger_.retained_used(config.id)).Key("memory").BeginArray();
    for (DomainIndex d = 0; d < config_.domains.size(); ++d) {
      for (size_t k = 0; k < gmg::kMemoryKindCount; ++k) {
        const auto kind = static_cast<MemoryKind>(k);
        const int64_t bytes = ledger_.used(config.id, kind, d);
        if (bytes == 0) continue;
        json.BeginObject().Field("domain", std::string_view(config_.domains[d].name));
        json.Field("kind", gmg::MemoryKindName(kind)).Field("bytes", bytes).EndObject();
      }
    }
    json.EndArray().EndObject();
  }
  json.EndArray().Field("now_ns", now).EndObject();
  return json.Take();
}

}  // namespace slice::engine
