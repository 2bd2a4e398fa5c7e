// Rounds: the best unscheduled op, its connected batch, the policy's decision, the placement
// (scheduling rules 1, 4, 5).
#include <algorithm>
#include <bit>
#include <utility>

#include "daemon/engine/engine_impl.h"
#include "daemon/sched/round_text.h"

namespace slice::engine {

using gmg::AccessEntry;
using gmg::OpState;

namespace {
constexpr int kDeferralsPerRun =
    4;  // the best deferred batches; the rest would be deferred as well
constexpr DurationNs kRetryMin = 100 * kMicrosecond;
constexpr DurationNs kRetryMax = 50 * kMillisecond;  // a deferral always has a wake
}  // namespace

const sched::OrderKey& EngineImpl::Key(Instance* instance) {
  if (instance->key_stamp != run_stamp_) {
    sched::WorkItem item;
    item.service_class = instance->boosted_class;
    item.priority = instance->priority;
    item.arrival = instance->arrival;
    item.deadline = instance->deadline;
    item.work_left = instance->work_left;
    item.creation = instance->creation;
    instance->key = policy_->Key(item, now_);
    instance->key_stamp = run_stamp_;
  }
  return instance->key;
}

DurationNs EngineImpl::Backlog(const DeviceState& device, ServiceClass service_class) const {
  DurationNs total = 0;
  for (const auto* const list : {&device.placed, &device.issued, &device.launched}) {
    for (const OpRef& ref : *list) {
      if (QueueClass(*ref.instance) <= service_class) total += Duration(ref);
    }
  }
  return total;
}

bool EngineImpl::CanMove(const Piece& piece, const Instance& instance, uint32_t op,
                         DomainIndex domain) const {
  if (!piece.managed || piece.lost || piece.moving ||
      (piece.set->config.segment_domains >> domain & 1) == 0 ||
      piece.bytes > ledger_.retained_free(domain)) {
    return false;
  }
  // Home, or to where other pieces of the op went already: it has nowhere else to run.
  if (domain == Op(instance, op).home_domain || instance.ops[op].moved_piece) return true;
  // Else only while nobody else who has started counts on its place, and no better class is queued
  // behind.
  for (const AccessEntry& entry : piece.queue.entries()) {
    if (entry.kind == AccessEntry::Kind::kMove) return false;
    if (entry.kind != AccessEntry::Kind::kInstance) continue;
    if (entry.owner == instance.slot) {
      if (entry.uses_left != 1) return false;
      continue;
    }
    const Instance* const other = InstanceAt(entry.owner);
    if (other == nullptr || other->phase != Phase::kWaiting ||
        other->service_class < instance.service_class)
      return false;
  }
  return true;
}

uint64_t EngineImpl::AllowedDevices(const Instance& instance, uint32_t op) {
  const OpExtra& extra = instance.ops[op];
  const DomainIndex home = Op(instance, op).home_domain;
  uint64_t domains = ~uint64_t{0};
  for (const TensorSet* const set : instance.binding->group_constants[op]) domains &= set->resident;
  if (extra.home_only && (domains >> home & 1) != 0) domains = uint64_t{1} << home;
  for (const PieceUse& use : instance.binding->group_pieces[op]) {
    uint64_t reachable = uint64_t{1} << use.piece->domain;
    for (DomainIndex d = 0; d < config_.domains.size(); ++d) {
      if ((reachable >> d & 1) == 0 && (domains >> d & 1) != 0 &&
          CanMove(*use.piece, instance, op, d))
        reachable |= uint64_t{1} << d;
    }
    domains &= reachable;
  }
  uint64_t devices = 0;
  for (DomainIndex d = 0; d < config_.domains.size(); ++d) {
    if ((domains >> d & 1) == 0) continue;
    if (d == home) {
      devices |= DomainDevices(d);
      continue;
    }
    const int64_t bytes = OutputBytes(instance, op) + MissingInputBytes(instance, op, d);
    const int64_t workspace =
        Charged(instance.sizes->workspace_bytes(op) + config_.workspace_margin_bytes);
    for (uint64_t mask = DomainDevices(d); mask != 0; mask &= mask - 1) {
      const auto device = static_cast<DeviceIndex>(__builtin_ctzll(mask));
      if (bytes + ledger_.LaneRaise(device, workspace) <= ledger_.pool_free(d))
        devices |= uint64_t{1} << device;
    }
  }
  return devices & instance.tenant->config.device_mask;
}

// Earlier entries of its pieces' queues are predecessors as well: placed first, or later entries
// could fill the devices' budgets with ops that wait for ones that cannot be placed any more.
bool EngineImpl::QueuesPlaced(const Instance& instance, uint32_t op) {
  for (const PieceUse& use : instance.binding->group_pieces[op]) {
    for (const AccessEntry& entry : use.piece->queue.entries()) {
      if (entry.kind != AccessEntry::Kind::kInstance) continue;
      if (entry.owner == instance.slot) break;
      if (!entry.write && !use.write) continue;
      const Instance* const other = InstanceAt(entry.owner);
      if (other == nullptr || other->phase == Phase::kEnding) continue;
      for (const PieceUse& theirs : other->binding->pieces) {
        if (theirs.piece != use.piece) continue;
        for (const uint32_t group : theirs.groups) {
          if (!gmg::IsPlacedOrLater(Op(*other, group).state)) return false;
        }
      }
    }
  }
  return true;
}

// The first op of the unscheduled frontier and what follows it, while one device may run all of it;
// and which devices may.
bool EngineImpl::CollectBatch(Instance* instance, std::vector<uint32_t>* batch, uint64_t* devices) {
  batch->clear();
  const gmg::OpRecord* const ops = gmg_.ops(instance->slot);
  const auto op_count = static_cast<uint32_t>(instance->ops.size());
  *devices = ~uint64_t{0};
  DurationNs time = 0;
  for (uint32_t op = instance->first_unfinished;
       op < op_count && batch->size() < config_.batch_ops_max; ++op) {
    if (ops[op].state != OpState::kUnscheduled) continue;
    bool connected = batch->empty(), ready = true;
    for (const uint32_t before : instance->graph->groups()[op].predecessors) {
      const bool inside = std::binary_search(batch->begin(), batch->end(), before);
      connected |= inside;
      ready &= inside || gmg::IsPlacedOrLater(ops[before].state);
    }
    if (!connected || !ready || !QueuesPlaced(*instance, op)) continue;
    if (!batch->empty() && time + Duration(*instance, op) > config_.batch_time_max) break;
    const uint64_t both = *devices & AllowedDevices(*instance, op);
    if (!batch->empty() && both == 0) break;
    *devices = both;
    time += Duration(*instance, op);
    batch->push_back(op);
  }
  return !batch->empty();
}

bool EngineImpl::MayPlace(const Instance& instance, TimeNs now) {
  if (instance.unscheduled == 0 || instance.phase != Phase::kStarted || instance.retry_at > now)
    return false;
  return policy_->Admits(instance.service_class);
}

bool EngineImpl::Round(TimeNs now) {
  if (!round_order_fresh_) {
    round_order_.clear();
    for (Instance* const instance : started_) {
      if (MayPlace(*instance, now)) round_order_.push_back(instance);
    }
    std::sort(round_order_.begin(), round_order_.end(),
              [this](Instance* a, Instance* b) { return sched::Less(Key(a), Key(b)); });
    round_order_fresh_ = true;
    deferrals_left_ = kDeferralsPerRun;
  }
  for (Instance* const instance : round_order_) {
    if (!MayPlace(*instance, now)) continue;
    if (deferrals_left_ == 0 && instance->boosted_class == ServiceClass::kOffline) continue;
    // Enough is placed where it could go: events of those devices bring us back.
    uint64_t open_devices = 0;
    const ServiceClass service_class = QueueClass(*instance);
    for (const DeviceState& device : devices_) {
      const bool idle = ignore_budget_ && device.issued.empty() && device.launched.empty();
      if (idle) open_devices |= uint64_t{1} << device.index;
      if (device.placed.size() < 2 * config_.batch_ops_max &&
          Backlog(device, service_class) < 2 * config_.batch_time_max) {
        open_devices |= uint64_t{1} << device.index;
      }
    }
    if (open_devices == 0) return false;
    uint64_t allowed = 0;
    if (!CollectBatch(instance, &batch_, &allowed)) continue;
    if (allowed == 0) {
      Defer(instance, now + kMillisecond, now, "no device may run it now");
      continue;
    }
    if ((allowed & open_devices) == 0) continue;
    if (const auto only = OnlyChoice(*instance, allowed, now); only.has_value()) {
      ++counters_.rounds;
      LogDecision(*instance, batch_, *only, now);
      Commit(instance, batch_, only->device);
      return true;
    }
    if (!snapshot_fresh_ || SnapshotOf(*instance, batch_[0]) == sim::kNone)
      BuildSnapshot(now, instance);
    batch_snapshot_.clear();
    for (const uint32_t op : batch_) batch_snapshot_.push_back(SnapshotOf(*instance, op));
    ++counters_.rounds;
    if (config_.record_round) {
      config_.record_round(
          sched::RoundText(snapshot_, batch_snapshot_, instance->tenant->config.home));
    }
    const sched::Decision decision =
        policy_->Decide(snapshot_, batch_snapshot_, instance->tenant->config.home);
    const size_t count =
        decision.op_count == 0 ? batch_.size() : std::min<size_t>(decision.op_count, batch_.size());
    LogDecision(*instance, {batch_.data(), count}, decision, now);
    if (on_decision_) on_decision_(*instance, decision);
    if (!decision.placed) {
      --deferrals_left_;
      Defer(instance, decision.retry_at, now, "policy");
      continue;
    }
    SLICE_CHECK(decision.device < devices_.size(), "policy chose a device that does not exist");
    Commit(instance, {batch_.data(), count}, decision.device);
    return true;
  }
  return false;
}

// Where the batch may run on one device and will not be deferred, every policy takes that device:
// nothing to simulate before the executor has the ops (PredictPending follows). Not where somebody
// looks at the decision's snapshot.
std::optional<sched::Decision> EngineImpl::OnlyChoice(const Instance& instance, uint64_t devices,
                                                      TimeNs now) const {
  const bool may_defer =
      policy_->RespectsSlices() && instance.boosted_class == ServiceClass::kOffline;
  if (!std::has_single_bit(devices) || may_defer || on_decision_ || config_.record_round)
    return std::nullopt;
  sched::Decision decision;
  decision.placed = true;
  decision.basis = gmg::DecisionBasis::kOneDevice;
  decision.device = static_cast<DeviceIndex>(std::countr_zero(devices));
  decision.op_count = static_cast<uint32_t>(batch_.size());
  decision.predicted_finish = now + Backlog(devices_[decision.device], QueueClass(instance));
  for (const uint32_t op : batch_) decision.predicted_finish += Duration(instance, op);
  sched::CandidateScore score;
  score.device = decision.device;
  score.batch_finish = decision.predicted_finish;
  decision.candidates.push_back(score);
  return decision;
}

void EngineImpl::Commit(Instance* instance, std::span<const uint32_t> batch, DeviceIndex device) {
  DeviceState& state = devices_[device];
  instance->retry_at = 0;
  instance->deferral_traced = false;
  for (const uint32_t op : batch) {
    Op(*instance, op).device = device;
    SetState(instance, op, OpState::kPlaced);
    state.placed.push_back({instance, op});
    const sim::OpIndex index = snapshot_fresh_ ? SnapshotOf(*instance, op) : sim::kNone;
    if (index == sim::kNone) {
      snapshot_fresh_ = false;  // the next decision must see this op
    } else {
      snapshot_.ops[index].state = sim::OpState::kPlaced;
      snapshot_.ops[index].device = device;
    }
  }
  work_dirty_ = true;
}

void EngineImpl::Defer(Instance* instance, TimeNs retry_at, TimeNs now, const char* cause) {
  if (retry_at == kNever || retry_at > now + kRetryMax) retry_at = now + kRetryMax;
  instance->retry_at = std::max(retry_at, now + kRetryMin);
  ++counters_.deferrals;
  // The first in a row: every event that wakes it may defer it again.
  if (std::exchange(instance->deferral_traced, true)) return;
  TraceEvent event;
  event.kind = TraceEvent::Kind::kDefer;
  event.tenant = instance->tenant->config.id;
  event.service_class = instance->service_class;
  event.instance = instance->id;
  event.op = batch_.empty() ? 0 : batch_[0];
  event.start = now;
  event.finish = instance->retry_at;
  event.text = cause;
  sink_->Trace(event);
}

void EngineImpl::WakeDeferred() {
  for (Instance* const instance : started_) instance->retry_at = 0;
}

void EngineImpl::LogDecision(const Instance& instance, std::span<const uint32_t> batch,
                             const sched::Decision& decision, TimeNs now) {
  gmg::SegmentHeader& header = gmg_.header();
  const uint64_t number = header.decision_count;
  auto* const record = gmg_.At<gmg::DecisionRecord>(
      gmg::kDecisions, static_cast<uint32_t>(number % gmg_.count(gmg::kDecisions)));
  // As many as a record holds; the chosen one is always among them.
  const std::vector<sched::CandidateScore>& candidates = decision.candidates;
  const size_t count = std::min(candidates.size(), gmg::kDecisionCandidatesMax);
  size_t last = count - 1;
  for (size_t i = count; i < candidates.size(); ++i) {
    if (decision.Chose(candidates[i])) last = i;
  }
  gmg::Gmg::UpdateRecord(record, [&] {
    record->tenant = instance.tenant->config.id.value;
    record->number = number + 1;
    record->time_ns = now;
    record->instance = instance.id.value;
    record->op = batch[0];
    record->op_count = static_cast<uint32_t>(batch.size());
    record->basis = decision.basis;
    record->device = decision.placed ? decision.device : kNoDevice;
    record->service_class = static_cast<uint8_t>(instance.service_class);
    record->retry_at_ns = decision.retry_at;
    record->candidate_count = static_cast<uint16_t>(candidates.size());
    const auto narrow = [](int64_t n) {
      return static_cast<int32_t>(std::clamp<int64_t>(n, INT32_MIN, INT32_MAX));
    };
    for (size_t i = 0; i < count; ++i) {
      const sched::CandidateScore& score = candidates[i + 1 == count ? last : i];
      gmg::DecisionCandidate& out = record->candidates[i];
      out.defer = uint8_t{score.defer};
      out.device = score.device;
      out.feasible = uint8_t{score.feasible};
      out.chosen = uint8_t{decision.Chose(score)};
      out.beaten = uint8_t{score.beaten};
      out.lateness_bucket = narrow(score.lateness_bucket);
      out.online_added_bucket = narrow(score.online_added_bucket);
      out.batch_finish_bucket = narrow(score.batch_finish_bucket);
      out.queued_bucket = narrow(score.balance);
      out.bytes_moved = score.bytes_moved;
      out.batch_finish_ns = score.batch_finish;
    }
  });
  header.decision_count = number + 1;
}

}  // namespace slice::engine
