// From placement to Issue: when an op is due, what it waits for, the windows of offline ops, and
// recall (scheduling rules, sections 1 and 6).
#include <algorithm>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {

using gmg::AccessEntry;
using gmg::OpState;

namespace {
constexpr DurationNs kReplaceEvery = 10 * kMillisecond;
constexpr double kOverrun = 3.0;
constexpr double kContinuesMin = 0.05;  // below: no phantom, a next step hardly ever comes
constexpr int64_t kGapMargin = 8;       // an eighth of a gap's quantiles
constexpr DurationNs kLongSlice =
    10 * kMillisecond;  // idle this long without online work: a long slice
}  // namespace

// One gap in ten lies beyond each quantile, often just beyond; an offline op must not start in the
// way of those.
estimate::GapEstimator::Gap EngineImpl::GapOf(uint64_t service) const {
  estimate::GapEstimator::Gap gap = gap_estimator_.Predict(service);
  gap.p10 -= gap.p10 / kGapMargin;
  gap.p90 += gap.p90 / kGapMargin;
  return gap;
}

void EngineImpl::UpdatePhantoms(TimeNs now) {
  for (DeviceState& device : devices_) {
    device.phantom_from = kNever;
    device.phantom_until = 0;
    device.hosts_online = false;
    for (const auto* const list : {&device.placed, &device.issued, &device.launched}) {
      for (const OpRef& ref : *list)
        device.hosts_online |= ref.instance->service_class == ServiceClass::kOnline;
    }
  }
  for (const auto& [id, tenant] : tenants_) {
    if (tenant->config.class_max == ServiceClass::kOnline && !tenant->removing)
      devices_[tenant->config.home].hosts_online = true;
  }
  for (size_t i = 0; i < between_.size();) {
    const Sequence& sequence = *between_[i];
    const estimate::GapEstimator::Gap gap = GapOf(sequence.service);
    const TimeNs until = sequence.last_completion + gap.p90;
    if (!sequence.open || sequence.live > 0 || sequence.last_device == kNoDevice || now >= until ||
        gap.continues < kContinuesMin) {
      between_[i] = between_.back();
      between_.pop_back();
      continue;
    }
    DeviceState& device = devices_[sequence.last_device];
    device.phantom_from = std::min(device.phantom_from, sequence.last_completion + gap.p10);
    device.phantom_until = std::max(device.phantom_until, until);
    device.hosts_online = true;
    ++i;
  }
}

// When the launched ops are over. Past its prediction an op may end any moment; past three times,
// it is believed to need half of what it took again, and the device takes nothing new.
TimeNs EngineImpl::LaunchedEnd(const DeviceState& device, TimeNs now, bool* overrun) const {
  *overrun = false;
  if (device.launched.empty()) return now;
  const DurationNs elapsed = now - device.started;
  const DurationNs predicted = Duration(device.launched[0]);
  TimeNs end = std::max(device.started + predicted, now);
  if (static_cast<double>(elapsed) > kOverrun * static_cast<double>(predicted) &&
      elapsed > kMillisecond) {
    *overrun = true;
    end = now + elapsed / 2;
  }
  for (size_t i = 1; i < device.launched.size(); ++i) end += Duration(device.launched[i]);
  return end;
}

uint64_t EngineImpl::OverrunDevices(TimeNs now) const {
  uint64_t mask = 0;
  for (const DeviceState& device : devices_) {
    bool overrun = false;
    LaunchedEnd(device, now, &overrun);
    mask |= uint64_t{overrun} << device.index;
  }
  return mask;
}

TimeNs EngineImpl::FreeAt(const DeviceState& device, TimeNs now) const {
  bool overrun = false;
  TimeNs end = LaunchedEnd(device, now, &overrun);
  for (const OpRef& ref : device.issued) end += Duration(ref);
  return end;
}

// Whether an offline op may be handed to this device now, and with which window.
bool EngineImpl::SliceAllows(const Instance& instance, uint32_t op, const DeviceState& device,
                             TimeNs now, TimeNs* wake, wire::Issue* issue) const {
  issue->flags = 0;
  issue->earliest_ns = 0;
  issue->end_by_ns = INT64_MAX;
  if (!policy_->RespectsSlices() || instance.boosted_class == ServiceClass::kOnline) return true;
  const DurationNs duration = Duration(instance, op);
  const OpRef* online = nullptr;
  for (const auto* const list : {&device.issued, &device.launched}) {
    for (const OpRef& ref : *list) {
      if (ref.instance->service_class == ServiceClass::kOnline) online = &ref;
    }
  }
  const bool phantom = now < device.phantom_until;
  if (device.hosts_online && duration > config_.offline_op_max) {
    // Only into a slice that has shown to be long.
    bool online_placed = online != nullptr || phantom;
    for (const OpRef& ref : device.placed)
      online_placed |= ref.instance->service_class == ServiceClass::kOnline;
    if (online_placed || !device.launched.empty()) return false;
    if (now < device.idle_since + kLongSlice) {
      *wake = std::min(*wake, device.idle_since + kLongSlice);
      return false;
    }
  }
  const TimeNs end = FreeAt(device, now) + duration;
  if (phantom) {
    if (end > device.phantom_from) {
      *wake = std::min(*wake, device.phantom_until);
      return false;
    }
    issue->end_by_ns = device.phantom_from;
  }
  if (online != nullptr) {
    // Behind an online op a phantom opens when its sequence goes on: only what ends before the next
    // step may start.
    const Sequence* const sequence = online->instance->sequence;
    uint32_t here = 0;
    for (const auto* const list : {&device.issued, &device.launched}) {
      for (const OpRef& ref : *list) here += ref.instance == online->instance;
    }
    if (online->instance->unfinished > here) return false;
    if (sequence != nullptr && sequence->open) {
      const estimate::GapEstimator::Gap gap = GapOf(online->instance->binding->service);
      if (gap.continues >= kContinuesMin) {
        if (duration > gap.p10) return false;
        issue->end_by_ns = std::min<int64_t>(issue->end_by_ns, FreeAt(device, now) + gap.p10);
      }
    }
    issue->flags = wire::kAfterOnlineFinish;
  }
  return true;
}

// Whether the access queues let the op touch its pieces, and whether they are or can come to where
// it was placed.
bool EngineImpl::PiecesReady(Instance* instance, uint32_t op, DomainIndex domain, bool* must_move) {
  *must_move = false;
  for (const PieceUse& use : instance->binding->group_pieces[op]) {
    const gmg::AccessQueue& queue = use.piece->queue;
    const auto kind = AccessEntry::Kind::kInstance;
    if (use.piece->moving || use.piece->lost) return false;
    if (!(use.write ? queue.MayWrite(kind, instance->slot) : queue.MayRead(kind, instance->slot)))
      return false;
    if (use.piece->domain == domain) continue;
    *must_move = true;
    if (!queue.IsFirst(kind, instance->slot)) return false;
  }
  return true;
}

// Brings a placed op as near to its issue as possible: memory, transfers, moves. kYes: everything
// is there or on its way.
EngineImpl::Ready EngineImpl::Prepare(Instance* instance, uint32_t op, DeviceState* device,
                                      TimeNs now) {
  OpExtra& extra = instance->ops[op];
  const DomainIndex domain = device->domain;
  const uint64_t bit = uint64_t{1} << domain;
  if (extra.want_unplace || extra.recall_sent || RetryAt({instance, op}) > now) return Ready::kNo;
  bool local_pending = false, remote_pending = false;
  for (const uint32_t before : instance->graph->groups()[op].predecessors) {
    const gmg::OpRecord& record = Op(*instance, before);
    if (record.state == OpState::kDone) continue;
    const bool launched = record.state == OpState::kLaunched;
    if ((launched || record.state == OpState::kIssued) && record.device == device->index &&
        !instance->ops[before].recall_sent) {
      local_pending = true;
    } else if (launched && DomainOf(record.device) != domain) {
      remote_pending = true;  // worth watching its output
    } else {
      return Ready::kNo;
    }
  }
  bool must_move = false;
  if (!PiecesReady(instance, op, domain, &must_move)) return Ready::kNo;
  if (!extra.prepared) {
    const auto elsewhere = [&] {
      extra.home_only = true;
      WantUnplace(instance, op);
      UnplaceWanted(instance, now);
      return Ready::kReplaced;
    };
    if (must_move) {
      if (local_pending || remote_pending) return Ready::kNo;
      int64_t bytes = 0;
      for (const PieceUse& use : instance->binding->group_pieces[op]) {
        if (use.piece->domain == domain) continue;
        if (!CanMove(*use.piece, *instance, op, domain)) return elsewhere();
        bytes += use.piece->bytes;
      }
      if (bytes > ledger_.retained_free(domain)) return elsewhere();
    }
    const bool home = Op(*instance, op).home_domain == domain;
    if (home && local_pending && !InOrder(*instance, op, device->index)) return Ready::kNo;
    missing_.clear();
    for (const uint32_t crossing : instance->binding->graph->groups[op].in) {
      if (IsMissing(*instance, crossing, domain)) missing_.push_back(crossing);
    }
    if (!TakeGrant(instance, op, device->index)) return home ? Ready::kNo : elsewhere();
    extra.prepared = true;
    for (const uint32_t crossing : missing_) WatchValue(instance, crossing, domain, now);
    if (must_move) {
      extra.moved_piece = true;
      for (const PieceUse& use : instance->binding->group_pieces[op]) {
        if (use.piece->domain != domain) StartMove(use.piece, instance, domain, now);
      }
    }
  }
  for (const PieceUse& use : instance->binding->group_pieces[op]) {
    if (use.piece->domain != domain || use.piece->moving) return Ready::kNo;
  }
  if (remote_pending) return Ready::kNo;
  extra.settled = true;
  for (const uint32_t crossing : instance->binding->graph->groups[op].in) {
    const gmg::TensorRecord& value = Value(*instance, crossing);
    if ((value.residency & bit) != 0) continue;
    const gmg::OpRecord& producer = Op(*instance, instance->graph->crossing()[crossing].producer);
    if (producer.state != OpState::kDone && producer.device == device->index) continue;
    extra.settled = false;
    if (!IsAdmitted(*instance, crossing, domain)) {
      if ((value.in_flight & bit) == 0) {  // its copy failed: ask again
        ReleaseOutputs(instance, op);
        extra.prepared = false;
        SetRetryAt(instance, op, now + kMillisecond);
      }
      return Ready::kNo;
    }
  }
  return Ready::kYes;
}

bool EngineImpl::IssueOn(DeviceState* device, TimeNs now) {
  device->issue_wake = kNever;
  if (device->placed.empty()) return false;
  bool overrun = false;
  LaunchedEnd(*device, now, &overrun);
  if (overrun) {
    device->issue_wake = now + kMillisecond;
    return false;
  }
  issue_order_.assign(device->placed.begin(), device->placed.end());
  std::sort(issue_order_.begin(), issue_order_.end(), [this](const OpRef& a, const OpRef& b) {
    if (a.instance == b.instance) return a.op < b.op;
    return sched::Less(Key(a.instance), Key(b.instance));
  });
  const DurationNs lead = std::max(config_.command_latency, report_latency_p99_);
  bool replaced = false;
  for (const OpRef& ref : issue_order_) {
    Instance* const instance = ref.instance;
    if (instance->phase != Phase::kStarted) continue;
    const gmg::OpRecord& record = Op(*instance, ref.op);
    if (record.state != OpState::kPlaced || record.device != device->index) continue;
    wire::Issue window{};
    if (!SliceAllows(*instance, ref.op, *device, now, &device->issue_wake, &window)) continue;
    const Ready ready = Prepare(instance, ref.op, device, now);
    if (ready == Ready::kReplaced) replaced = true;
    if (ready != Ready::kYes || device->issued.size() >= config_.issue_ahead) continue;
    const TimeNs free_at = FreeAt(*device, now);
    if (free_at > now + lead) {
      device->issue_wake = std::min(device->issue_wake, free_at - lead);
      continue;
    }
    IssueOp(instance, ref.op, device, window, now);
  }
  return replaced;
}

bool EngineImpl::IssueAll(TimeNs now) {
  bool replaced = false;
  for (DeviceState& device : devices_) replaced |= IssueOn(&device, now);
  return replaced;
}

void EngineImpl::SetRetryAt(Instance* instance, uint32_t op, TimeNs at) {
  SLICE_CHECK(Op(*instance, op).state == OpState::kPlaced, "only placed ops are held back");
  gmg_.Write(instance->slot);
  Op(*instance, op).predicted_start_ns = at;
}

void EngineImpl::IssueOp(Instance* instance, uint32_t op, DeviceState* device,
                         const wire::Issue& window, TimeNs now) {
  OpExtra& extra = instance->ops[op];
  gmg::OpRecord& record = Op(*instance, op);
  wire::Issue issue = window;
  issue.instance = instance->id.value;
  issue.attempt = instance->attempt;
  issue.op = op;
  issue.device = device->index;
  issue.service_class = static_cast<uint8_t>(QueueClass(*instance));
  issue.priority = policy_->ClassesOrderQueues() ? instance->priority : 0;
  extra.order = static_cast<uint32_t>(next_order_);
  issue.order = next_order_++;
  issue.duration_ns = record.duration_ns;
  const TimeNs start = FreeAt(*device, now);
  SetState(instance, op, OpState::kIssued);
  record.issue_ns = now;
  record.predicted_start_ns = start;
  std::erase(device->placed, OpRef{instance, op});
  device->issued.push_back({instance, op});
  Send(wire::kIssue, issue, device->index);
}

// ---- recall
// -------------------------------------------------------------------------------------------------------

void EngineImpl::RecallOp(Instance* instance, uint32_t op, TimeNs now) {
  OpExtra& extra = instance->ops[op];
  if (extra.recall_sent || Op(*instance, op).state != OpState::kIssued || !executor_up_) return;
  extra.recall_sent = true;
  ++counters_.recalls;
  Send(wire::kRecall, wire::Recall{instance->id.value, instance->attempt, op},
       Op(*instance, op).device);
  TraceEvent event;
  event.kind = TraceEvent::Kind::kRecall;
  event.tenant = instance->tenant->config.id;
  event.service_class = instance->service_class;
  event.instance = instance->id;
  event.op = op;
  event.device = Op(*instance, op).device;
  event.start = event.finish = now;
  sink_->Trace(event);
}

// Marks an op and all its placed or issued dependants.
void EngineImpl::WantUnplace(Instance* instance, uint32_t op) {
  OpExtra& extra = instance->ops[op];
  const OpState state = Op(*instance, op).state;
  if (extra.want_unplace || extra.moved_piece ||
      (state != OpState::kPlaced && state != OpState::kIssued))
    return;
  extra.want_unplace = true;
  for (const uint32_t next : instance->graph->groups()[op].successors) WantUnplace(instance, next);
}

// Takes back what it can now, dependants first; asks the executor for what it holds. Called again
// with each answer.
void EngineImpl::UnplaceWanted(Instance* instance, TimeNs now) {
  for (auto op = static_cast<uint32_t>(instance->ops.size()); op-- > instance->first_unfinished;) {
    OpExtra& extra = instance->ops[op];
    if (!extra.want_unplace) continue;
    const OpState state = Op(*instance, op).state;
    if (state == OpState::kIssued) {
      RecallOp(instance, op, now);
      continue;
    }
    if (state != OpState::kPlaced) {
      extra.want_unplace = false;
      continue;
    }
    bool held = false, wait = false;
    for (const uint32_t next : instance->graph->groups()[op].successors) {
      const OpState after = Op(*instance, next).state;
      if (after == OpState::kUnscheduled) continue;
      (instance->ops[next].want_unplace ? wait : held) = true;
    }
    if (held) {
      extra.want_unplace = false;  // a dependant has to stay, so this one does
      continue;
    }
    if (wait) continue;
    extra.want_unplace = false;
    extra.prepared = false;
    extra.last_replaced = now;
    ReleaseOutputs(instance, op);
    std::erase(devices_[Op(*instance, op).device].placed, OpRef{instance, op});
    SetState(instance, op, OpState::kUnscheduled);
    work_dirty_ = true;
  }
}

void EngineImpl::RecallOffline(uint64_t devices, TimeNs now) {
  for (DeviceState& device : devices_) {
    if ((devices >> device.index & 1) == 0) continue;
    recall_.clear();
    for (const auto* const list : {&device.issued, &device.placed}) {
      for (const OpRef& ref : *list) {
        const bool offline = ref.instance->boosted_class == ServiceClass::kOffline;
        if (offline && now - ref.instance->ops[ref.op].last_replaced >= kReplaceEvery)
          recall_.push_back(ref);
      }
    }
    for (const OpRef& ref : recall_) WantUnplace(ref.instance, ref.op);
    for (const OpRef& ref : recall_) UnplaceWanted(ref.instance, now);
  }
}

}  // namespace slice::engine
