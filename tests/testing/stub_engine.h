// StubEngine: an engine::Engine that schedules nothing, for tests of the shell around it. It
// records what it is told and completes submits at once unless told to hold them.
//
// Threads: the engine thread, like the real one; tests look at the atomics of Control.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/engine/engine.h"
#include "daemon/gmg/json.h"

namespace slice::testing {

class StubEngine final : public engine::Engine {
 public:
  struct Control {
    std::atomic<bool> hold{false};                // keep requests in flight
    std::atomic<bool> keep_tenants{false};        // TenantGone stays false
    std::atomic<uint32_t> tenants_json_bytes{0};  // pad TenantsJson to more than this
    std::atomic<uint64_t> submits{0}, commands{0}, sequences{0}, closed{0}, cancels{0}, losses{0},
        readies{0}, given_up{0};
    std::atomic<uint64_t> tenants{0}, sets{0}, bindings{0}, templates{0};
    std::atomic<int64_t> last_deadline{0};
    std::atomic<int> last_class{-1};
    std::atomic<uint64_t> overrun_devices{0};
    // Further signatures in SaveEstimates, as if they were learned; and how often it was asked.
    std::atomic<uint64_t> signatures_learned{0}, estimates_asked{0};
  };

  StubEngine(Control* control, engine::Sink* sink) : control_(control), sink_(sink) {}

  Status AddTenant(const engine::TenantConfig& tenant, TimeNs) override {
    tenants_[tenant.id.value] = tenant;
    Publish();
    return Status::Ok();
  }
  void RemoveTenant(TenantId tenant, TimeNs) override {
    tenants_.erase(tenant.value);
    std::erase_if(sets_, [&](const auto& item) { return item.second == tenant.value; });
    std::erase_if(bindings_, [&](const auto& item) { return item.second.tenant == tenant; });
    Publish();
  }
  bool TenantGone(TenantId tenant) const override {
    return !tenants_.contains(tenant.value) && !control_->keep_tenants;
  }
  Status AddTemplate(TemplateId id, std::shared_ptr<const graph::Template> graph) override {
    templates_[id.value] = std::move(graph);
    Publish();
    return Status::Ok();
  }
  Status RemoveTemplate(TemplateId id) override {
    for (const auto& [binding, config] : bindings_) {
      if (config.graph == id)
        return Error(StatusCode::kStale, "template %u is used by binding %u", id.value, binding);
    }
    templates_.erase(id.value);
    Publish();
    return Status::Ok();
  }
  Status AddTensorSet(const engine::TensorSetConfig& set, TimeNs) override {
    for (const auto& tensor : set.tensors) {
      if (tensor.name == "refuse")
        return Error(StatusCode::kQuota, "no room for '%s'", tensor.name.c_str());
    }
    sets_[set.id.value] = set.tenant.value;
    Publish();
    return Status::Ok();
  }
  Status RemoveTensorSet(TensorSetId set, TimeNs) override {
    if (sets_.erase(set.value) == 0) return Error(StatusCode::kStale, "no set %u", set.value);
    Publish();
    return Status::Ok();
  }
  bool TensorSetGone(TensorSetId set) const override { return !sets_.contains(set.value); }
  Status Replicate(TensorSetId set, DomainIndex, TimeNs) override {
    return sets_.contains(set.value) ? Status::Ok()
                                     : Error(StatusCode::kStale, "no set %u", set.value);
  }
  bool ReplicasReady(TensorSetId, DomainIndex) const override { return !control_->hold; }
  Status AddBinding(const engine::BindingConfig& binding) override {
    if (!templates_.contains(binding.graph.value))
      return Error(StatusCode::kInternal, "unknown template");
    bindings_[binding.id.value] = binding;
    Publish();
    return Status::Ok();
  }
  Status RemoveBinding(BindingId binding) override {
    if (bindings_.erase(binding.value) == 0)
      return Error(StatusCode::kStale, "no binding %u", binding.value);
    Publish();
    return Status::Ok();
  }
  Status SetPolicy(std::string_view name, TimeNs) override {
    if (name != "slice" && name != "fifo")
      return Error(StatusCode::kInvalid, "no such policy; there are: slice, fifo");
    policy_ = name;
    return Status::Ok();
  }

  void Handle(const engine::Submit& submit, TimeNs now) override {
    control_->last_deadline = submit.deadline;
    ++control_->submits;
    Finish(submit.tenant, submit.cookie, now);
  }
  void Handle(const engine::OpenSequence& open, TimeNs) override {
    control_->last_class = static_cast<int>(open.service_class);
    ++control_->sequences;
  }
  void CloseSequence(TenantId, uint64_t, TimeNs) override { ++control_->closed; }
  void Cancel(TenantId tenant, uint64_t cookie, TimeNs now) override {
    ++control_->cancels;
    if (held_.erase({tenant.value, cookie}) != 0)
      Complete(tenant, cookie, StatusCode::kCancelled, now, "cancelled");
  }
  void Handle(const engine::TensorCommand& command, TimeNs now) override {
    ++control_->commands;
    Finish(command.tenant, command.cookie, now);
  }
  Status HandleReport(uint32_t type, std::span<const std::byte>, TimeNs) override {
    return type < 100 ? Error(StatusCode::kProtocol, "report of type %u", type) : Status::Ok();
  }
  void ExecutorLost(TimeNs) override { ++control_->losses; }
  void ExecutorReady(TimeNs) override { ++control_->readies; }
  void ExecutorGivenUp(TimeNs) override { ++control_->given_up; }
  void Run(TimeNs now) override {
    if (control_->hold) return;
    for (const auto& [tenant, cookie] : std::exchange(held_, {})) {
      if (tenants_.contains(tenant)) Complete(TenantId{tenant}, cookie, StatusCode::kOk, now, "");
    }
  }
  TimeNs NextWake() const override { return kNever; }
  uint64_t OverrunDevices(TimeNs) const override { return control_->overrun_devices; }
  // Whose requests are held.
  std::vector<engine::TenantUser> LaunchedTenants() const override {
    std::vector<engine::TenantUser> launched;
    for (const auto& [tenant, cookie] : held_) {
      if (!tenants_.contains(tenant) ||
          (!launched.empty() && launched.back().tenant.value == tenant))
        continue;
      launched.push_back({TenantId{tenant}, tenants_.at(tenant).uid});
    }
    return launched;
  }
  const engine::Counters& counters() const override { return counters_; }
  std::string policy_name() const override { return policy_; }
  estimate::Saved SaveEstimates() const override {
    estimate::Saved saved = saved_;
    for (uint64_t i = 1; i <= control_->signatures_learned; ++i)
      saved.signatures.push_back({i, 0, {{1, 1, 1, 1000.0, 0.0, 1}}});
    ++control_->estimates_asked;
    return saved;
  }
  size_t LoadEstimates(const estimate::Saved& saved) override {
    saved_ = saved;
    return saved.signatures.size() + saved.links.size();
  }
  std::string StatusJson(TimeNs) const override { return "{\"stub\":true}"; }
  std::string EstimatorsJson() const override { return "{\"signatures\":[]}"; }
  std::string DevicesJson(TimeNs) const override { return "{\"devices\":[]}"; }
  std::string TenantsJson(TimeNs) const override {
    const std::string padding(control_->tenants_json_bytes, 'x');
    gmg::JsonWriter json;
    json.BeginObject().Key("tenants").BeginArray().EndArray();
    json.Field("padding", std::string_view(padding)).EndObject();
    return json.Take();
  }
  Result<std::string> WhatIf(const engine::WhatIfQuery& query, TimeNs) const override {
    if (query.graph == "unknown")
      return Error(StatusCode::kInvalid, "no session has bound a graph 'unknown'");
    gmg::JsonWriter json;
    json.BeginObject().Field("graph", std::string_view(query.graph));
    json.Field("tenant", query.tenant.value)
        .Field("class", !query.service_class.has_value()                ? "none"
                        : *query.service_class == ServiceClass::kOnline ? "online"
                                                                        : "offline");
    json.Key("symbols").BeginArray();
    for (const int64_t symbol : query.symbols) json.Value(symbol);
    json.EndArray().EndObject();
    return json.Take();
  }

 private:
  void Finish(TenantId tenant, uint64_t cookie, TimeNs now) {
    if (control_->hold) {
      held_.insert({tenant.value, cookie});
    } else {
      Complete(tenant, cookie, StatusCode::kOk, now, "");
    }
  }
  void Complete(TenantId tenant, uint64_t cookie, StatusCode code, TimeNs now,
                const std::string& text) {
    wire::CompletionSlot slot{};
    slot.cookie = cookie;
    slot.status = static_cast<int32_t>(code);
    slot.failed_op = 0xffffffff;
    slot.submit_ns = slot.start_ns = slot.finish_ns = now;
    sink_->Complete(tenant, slot, text);
  }
  void Publish() {
    control_->tenants = tenants_.size();
    control_->sets = sets_.size();
    control_->bindings = bindings_.size();
    control_->templates = templates_.size();
  }

  Control* control_;
  engine::Sink* sink_;
  estimate::Saved saved_;
  engine::Counters counters_;
  std::string policy_ = "slice";
  std::map<uint32_t, engine::TenantConfig> tenants_;
  std::map<uint32_t, uint32_t> sets_;  // -> tenant
  std::map<uint32_t, engine::BindingConfig> bindings_;
  std::map<uint32_t, std::shared_ptr<const graph::Template>> templates_;
  std::set<std::pair<uint32_t, uint64_t>> held_;
};

}  // namespace slice::testing
