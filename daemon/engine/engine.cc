// Construction, the run loop, policy switch, and what readers of the GMG see.
#include "daemon/engine/engine.h"

#include <algorithm>
#include <new>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {

using gmg::OpState;

namespace {
constexpr int kPassesMax =
    64;  // admission -> rounds -> issue; each pass makes progress, few are needed
constexpr int kRoundsPerPass = 4096;

std::vector<gmg::DomainLimits> LimitsOf(const Config& config) {
  std::vector<gmg::DomainLimits> limits;
  for (const DomainConfig& domain : config.domains)
    limits.push_back({domain.pool_bytes, domain.retained_bytes});
  return limits;
}
std::vector<DomainIndex> DomainsOf(const Config& config) {
  std::vector<DomainIndex> domains;
  for (const DeviceConfig& device : config.devices) domains.push_back(device.domain);
  return domains;
}
gmg::Capacity CapacityOf(const Config& config) {
  return gmg::Capacity::For(static_cast<uint32_t>(config.devices.size()),
                            static_cast<uint32_t>(config.domains.size()), config.live_ops_max);
}
}  // namespace

size_t Engine::GmgBytes(const Config& config) { return gmg::Gmg::Bytes(CapacityOf(config)); }

Status Engine::CheckConfig(const Config& config) {
  if (config.devices.empty() || config.devices.size() > kDevicesMax || config.domains.empty() ||
      config.domains.size() > kDevicesMax) {
    return Error(StatusCode::kInvalid,
                 "%zu devices and %zu memory domains configured; 1 to %d of each are possible",
                 config.devices.size(), config.domains.size(), kDevicesMax);
  }
  for (const DeviceConfig& device : config.devices) {
    if (device.domain >= config.domains.size()) {
      return Error(StatusCode::kInvalid, "device '%s' is in memory domain %u, there are %zu",
                   device.name.c_str(), device.domain, config.domains.size());
    }
  }
  for (const DomainConfig& domain : config.domains) {
    if (domain.pool_bytes <= 0 || domain.retained_bytes < 0) {
      return Error(StatusCode::kInvalid,
                   "memory domain '%s': pool_bytes must be above 0, retained_bytes not below",
                   domain.name.c_str());
    }
  }
  if (config.batch_ops_max == 0 || config.issue_ahead == 0 || config.live_ops_max == 0 ||
      config.tenant_queue_max == 0 || config.batch_time_max <= 0 || config.command_latency < 0 ||
      config.workspace_margin_bytes < 0) {
    return Error(StatusCode::kInvalid, "batch, issue_ahead, queue and op limits must be above 0");
  }
  return sched::MakePolicy(config.policy, nullptr).status();  // is there one of this name?
}

Result<std::unique_ptr<Engine>> Engine::Create(const Config& config,
                                               std::span<std::byte> gmg_memory, Sink* sink) {
  SLICE_RETURN_IF_ERROR(CheckConfig(config));
  if (sink == nullptr || gmg_memory.size() < GmgBytes(config)) {
    return Error(StatusCode::kInvalid, "the GMG needs %zu bytes, %zu are given", GmgBytes(config),
                 gmg_memory.size());
  }
  auto engine = std::make_unique<EngineImpl>(config, gmg_memory, sink);
  SLICE_RETURN_IF_ERROR(engine->Initialise());
  return std::unique_ptr<Engine>(std::move(engine));
}

// Roofline prior of a CPU core (estimator.h); the first samples replace it.
EngineImpl::Estimators::Estimators(size_t domain_count) : op(2e10, 8e9), transfer(domain_count) {}

EngineImpl::EngineImpl(const Config& config, std::span<std::byte> gmg_memory, Sink* sink)
    : config_(config),
      sink_(sink),
      gmg_(gmg_memory, CapacityOf(config), config.epoch, config.daemon_pid),
      ledger_(LimitsOf(config), DomainsOf(config)),
      arbiter_(config.domains.size()),
      estimators_(std::make_shared<Estimators>(config.domains.size())),
      simulator_(transfer_estimator_, sim::Options{}),
      op_extras_(NewOpExtras(config_)) {}

EngineImpl::OpExtras EngineImpl::NewOpExtras(const Config& config) {
  const size_t bytes = std::max<size_t>(config.live_ops_max, 1) * sizeof(OpExtra);
  OpExtras extras(static_cast<OpExtra*>(std::malloc(bytes)));
  if (extras == nullptr) throw std::bad_alloc();
  return extras;
}

Status EngineImpl::Initialise() {
  SLICE_ASSIGN_OR_RETURN(policy_, sched::MakePolicy(config_.policy, &simulator_));
  domain_devices_.assign(config_.domains.size(), 0);
  devices_.resize(config_.devices.size());
  for (DeviceIndex d = 0; d < devices_.size(); ++d) {
    devices_[d].index = d;
    devices_[d].domain = config_.devices[d].domain;
    domain_devices_[devices_[d].domain] |= uint64_t{1} << d;
    auto* const record = gmg_.At<gmg::DeviceRecord>(gmg::kDevices, d);
    gmg::Gmg::UpdateRecord(record, [&] {
      record->name.Set(config_.devices[d].name);
      record->domain = devices_[d].domain;
      record->kind = config_.devices[d].kind;
    });
  }
  for (DomainIndex d = 0; d < config_.domains.size(); ++d) {
    auto* const record = gmg_.At<gmg::DomainRecord>(gmg::kDomains, d);
    gmg::Gmg::UpdateRecord(record, [&] {
      record->name.Set(config_.domains[d].name);
      record->pool_bytes = config_.domains[d].pool_bytes;
      record->retained_bytes_max = config_.domains[d].retained_bytes;
    });
  }
  counters_.device_busy.assign(devices_.size(), 0);
  counters_.device_cpu.assign(devices_.size(), 0);
  Publish();
  return Status::Ok();
}

void EngineImpl::SetState(Instance* instance, uint32_t op, OpState state) {
  const OpState before = Op(*instance, op).state;
  gmg_.SetOpState(instance->slot, *instance->graph, op, state);
  if (before == OpState::kUnscheduled) --instance->unscheduled;
  if (state == OpState::kUnscheduled) ++instance->unscheduled;
  snapshot_fresh_ =
      snapshot_fresh_ && state == OpState::kPlaced;  // a round keeps it up to date itself
}

void EngineImpl::Run(TimeNs now) {
  now_ = now;
  ++run_stamp_;
  const bool due = now >= next_wake_;
  if (!executor_up_ ||
      (!work_dirty_ && !admission_dirty_ && !deferral_event_ && predict_.empty() && !due)) {
    gmg_.CloseWrites();
    return;
  }
  UpdatePhantoms(now);
  if (deferral_event_) WakeDeferred();
  deferral_event_ = work_dirty_ = false;
  PumpReplications(now);
  for (int pass = 0; pass < kPassesMax; ++pass) {
    AdmitWaiting();
    round_order_fresh_ = snapshot_fresh_ = false;
    for (int round = 0; round < kRoundsPerPass && Round(now); ++round) {
    }
    const bool replaced = IssueAll(now);
    if (replaced || admission_dirty_) continue;
    ScheduleWake(now);
    // Nothing runs, nothing is awaited, and there is work: what is placed waits for what the
    // budgets keep out.
    if (!Stalled()) break;
    ignore_budget_ = true;
    const bool placed = Round(now);
    ignore_budget_ = false;
    if (!placed) break;
  }
  work_dirty_ = false;
  sink_->CommandsReady();
  PredictPending(now);
  ScheduleWake(now);
  Publish();
}

bool EngineImpl::Stalled() const {
  bool placed = false;
  for (const DeviceState& device : devices_) {
    if (!device.issued.empty() || !device.launched.empty()) return false;
    placed |= !device.placed.empty();
  }
  return placed && next_wake_ == kNever && arbiter_.size() == 0;
}

void EngineImpl::ScheduleWake(TimeNs now) {
  next_wake_ = kNever;
  const auto at = [&](TimeNs time) {
    if (time > now) next_wake_ = std::min(next_wake_, time);
  };
  bool offline = false;
  for (const Instance* const instance : started_) {
    if (instance->unscheduled > 0) at(instance->retry_at);
    offline |=
        instance->boosted_class == ServiceClass::kOffline && instance->phase == Phase::kStarted;
  }
  for (const Replication& replication : replications_) at(replication.retry_at);
  for (const DeviceState& device : devices_) {
    if (device.issue_wake != kNever) at(device.issue_wake);
    for (const OpRef& ref : device.placed) at(RetryAt(ref));
    if (offline) at(device.phantom_until);
  }
}

TimeNs EngineImpl::NextWake() const {
  if (executor_up_ && (work_dirty_ || admission_dirty_ || deferral_event_)) return now_;
  return executor_up_ ? next_wake_ : kNever;
}

Status EngineImpl::SetPolicy(std::string_view name, TimeNs now) {
  now_ = now;
  SLICE_ASSIGN_OR_RETURN(std::unique_ptr<sched::Policy> policy,
                         sched::MakePolicy(name, &simulator_));
  policy_ = std::move(policy);
  ++run_stamp_;
  std::vector<Instance*> waiting;
  waiting.swap(waiting_);
  counters_.parked = 0;
  for (Instance* const instance : waiting) {
    instance->parked = !policy_->Admits(instance->service_class);
    if (instance->parked) ++counters_.parked;
    InsertWaiting(instance);
  }
  // What has not been handed over is placed anew; nothing is lost.
  for (Instance* const instance : started_) {
    if (instance->phase != Phase::kStarted) continue;
    instance->retry_at = 0;
    instance->key_stamp = 0;
    for (uint32_t op = instance->first_unfinished; op < instance->ops.size(); ++op) {
      if (Op(*instance, op).state == OpState::kPlaced) WantUnplace(instance, op);
    }
    UnplaceWanted(instance, now);
  }
  admission_dirty_ = work_dirty_ = deferral_event_ = true;
  TraceEvent event;
  event.kind = TraceEvent::Kind::kPolicy;
  event.start = event.finish = now;
  event.text = std::string(policy_->name());
  sink_->Trace(event);
  Publish();
  return Status::Ok();
}

void EngineImpl::Publish() {
  gmg::SegmentHeader& header = gmg_.header();
  header.updated_ns = now_;
  header.policy.Set(policy_->name());
  for (const DeviceState& device : devices_) {
    auto* const record = gmg_.At<gmg::DeviceRecord>(gmg::kDevices, device.index);
    bool overrun = false;
    const TimeNs free_at = LaunchedEnd(device, now_, &overrun);
    gmg::Gmg::UpdateRecord(record, [&] {
      record->hosts_online = uint8_t{device.hosts_online};
      record->overrun = uint8_t{overrun};
      const bool runs = !device.launched.empty();
      record->running_instance = runs ? device.launched[0].instance->id.value : uint64_t{0};
      record->running_op = runs ? device.launched[0].op : 0u;
      record->running_start_ns = runs ? device.started : 0;
      record->issued = static_cast<uint32_t>(device.issued.size());
      record->placed = static_cast<uint32_t>(device.placed.size());
      record->ops_done = static_cast<uint32_t>(device.done);
      record->free_at_ns = free_at;
      record->busy_ns = counters_.device_busy[device.index];
      record->phantom_from_ns = device.phantom_from;
      record->phantom_until_ns = device.phantom_until;
    });
  }
  for (DomainIndex d = 0; d < config_.domains.size(); ++d) {
    auto* const record = gmg_.At<gmg::DomainRecord>(gmg::kDomains, d);
    gmg::Gmg::UpdateRecord(record, [&] {
      record->lane_bytes = ledger_.lanes(d);
      record->reserved_bytes = ledger_.reserved(d);
      record->granted_bytes = ledger_.granted(d);
      record->retained_bytes = ledger_.retained(d);
    });
  }
  for (const auto& [id, tenant] : tenants_) {
    auto* const record = gmg_.At<gmg::TenantRecord>(gmg::kTenants, tenant->record);
    gmg::Gmg::UpdateRecord(record, [&] {
      const TenantConfig& config = tenant->config;
      if (record->id != config.id.value) {
        record->id = config.id.value;
        record->name.Set(config.name);
        record->uid = config.uid;
        record->pid = config.pid;
        record->service_class = static_cast<uint8_t>(config.class_max);
        record->home_device = config.home;
        record->memory_bytes_max = config.memory_bytes_max;
      }
      record->removing = uint16_t{tenant->removing};
      record->live_instances = static_cast<uint32_t>(tenant->instances.size());
      record->pool_bytes = ledger_.pool_used(config.id);
      record->retained_bytes = ledger_.retained_used(config.id);
      record->submits = tenant->submits;
      record->completions = tenant->completions;
    });
  }
  gmg_.CloseWrites();
}

}  // namespace slice::engine
