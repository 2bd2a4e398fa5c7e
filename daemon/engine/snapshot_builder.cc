// The live window as a what-if simulation sees it (sim/snapshot.h): ops that are placed or later,
// then unscheduled ones of the best instances, up to a cap. Rebuilt when something changed; a
// round's commits are written into it in place.
#include <algorithm>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {

using gmg::OpState;

namespace {
constexpr size_t kWindowOps = 256;
constexpr double kFurtherStepsMax = 64;
constexpr uint64_t kPlacedOrder = uint64_t{1} << 48;  // behind everything that is issued
}  // namespace

void EngineImpl::BuildSnapshot(TimeNs now, Instance* first) {
  for (Instance* const instance : window_) instance->snapshot = sim::kNone;
  window_.clear();
  edges_.clear();
  snapshot_.Clear();
  ++snapshot_stamp_;
  snapshot_.now = now;
  snapshot_.offline_op_max = config_.offline_op_max;
  for (DomainIndex d = 0; d < config_.domains.size(); ++d)
    snapshot_.domains.push_back({ledger_.pool_free(d)});
  const auto enter = [this](Instance* instance) {
    if (instance->snapshot != sim::kNone) return;
    instance->snapshot = static_cast<uint32_t>(window_.size());
    window_.push_back(instance);
  };
  for (const DeviceState& device : devices_) {
    for (const auto* const list : {&device.launched, &device.issued, &device.placed}) {
      for (const OpRef& ref : *list) {
        if (ref.instance->phase == Phase::kStarted || list == &device.launched) enter(ref.instance);
      }
    }
  }
  // The instance in question and its queue-mates come whole; the rest by order until the window is
  // full.
  size_t planned = 0;
  for (const Instance* const instance : window_) planned += instance->unfinished;
  if (first != nullptr) {
    enter(first);
    planned += first->unfinished;
  }
  const auto fill = [&](const std::vector<Instance*>& list) {
    for (Instance* const instance : list) {
      if (planned >= kWindowOps) return;
      if (instance->snapshot != sim::kNone || instance->phase == Phase::kEnding || instance->parked)
        continue;
      enter(instance);
      planned += instance->unfinished;
    }
  };
  if (round_order_fresh_) fill(round_order_);
  fill(started_);
  fill(waiting_);
  // In submit order: the order of every access queue.
  std::sort(window_.begin(), window_.end(),
            [](const Instance* a, const Instance* b) { return a->creation < b->creation; });
  window_ops_.clear();
  window_values_.clear();
  for (uint32_t i = 0; i < window_.size(); ++i) {
    Instance* const instance = window_[i];
    instance->snapshot = i;
    instance->snapshot_ops = static_cast<uint32_t>(window_ops_.size());
    instance->snapshot_values = static_cast<uint32_t>(window_values_.size());
    window_ops_.resize(window_ops_.size() + instance->ops.size(), sim::kNone);
    window_values_.resize(window_values_.size() + instance->graph->crossing().size(), sim::kNone);
  }
  // What is not issued yet will be, in the order of the policy's keys.
  by_key_ = window_;
  std::sort(by_key_.begin(), by_key_.end(),
            [this](Instance* a, Instance* b) { return sched::Less(Key(a), Key(b)); });
  for (uint32_t rank = 0; rank < by_key_.size(); ++rank) by_key_[rank]->rank = rank;
  size_t unscheduled = 0;
  for (Instance* const instance : window_) {
    sim::SnapInstance snap;
    snap.service_class = instance->boosted_class;
    snap.priority = instance->priority;
    snap.arrival = instance->arrival;
    snap.deadline = instance->deadline;
    snap.tenant = instance->tenant->config.id.value;
    for (DomainIndex d = 0; d < instance->reserved.size(); ++d) {
      if (instance->reserved[d] > 0) snap.reserved_domains |= uint64_t{1} << d;
    }
    if (instance->sequence != nullptr && instance->sequence->open &&
        instance->boosted_class == ServiceClass::kOnline) {
      const estimate::GapEstimator::Gap gap = GapOf(instance->binding->service);
      if (gap.continues >= 0.05) {
        snap.gap_p10 = gap.p10;
        snap.gap_p90 = gap.p90;
        snap.rest_of_sequence = RestOfSequence(*instance, gap);
      }
    }
    snapshot_.instances.push_back(snap);
    const bool whole = instance == first || unscheduled < kWindowOps;
    if (whole) unscheduled += instance->unscheduled;
    AddOps(instance, whole, now);
  }
  for (Instance* const instance : window_) Link(instance);
  SealEdges();
  for (const DeviceState& device : devices_) {
    sim::SnapDevice snap;
    bool overrun = false;
    snap.domain = device.domain;
    snap.kind = config_.devices[device.index].kind;
    snap.free_at = LaunchedEnd(device, now, &overrun);
    if (!device.launched.empty())
      snap.running = SnapshotOf(*device.launched[0].instance, device.launched[0].op);
    snap.hosts_online = device.hosts_online;
    if (now < device.phantom_until) {
      snap.phantom_from = device.phantom_from;
      snap.phantom_until = device.phantom_until;
    }
    snapshot_.devices.push_back(snap);
  }
  for (const auto& transfer : transfers_) {
    if (!transfer->live) continue;
    sim::SnapTransfer snap;
    if (transfer->instance != nullptr) {
      if (transfer->instance->snapshot == sim::kNone) continue;
      snap.tensor = window_values_[transfer->instance->snapshot_values + transfer->crossing];
      if (snap.tensor >= snapshot_.tensors.size()) continue;
    } else {
      if (!transfer->move) continue;
      const Piece& piece = transfer->set->pieces[transfer->tensor];
      if (piece.snapshot_stamp != snapshot_stamp_) continue;
      snap.tensor = piece.snapshot;
    }
    if (snap.tensor == sim::kNone) continue;
    snap.source = transfer->source;
    snap.destination = transfer->destination;
    snap.service_class = transfer->service_class;
    if (transfer->admitted != 0) {
      const DurationNs copy =
          transfer_estimator_.Predict(transfer->source, transfer->destination, transfer->bytes);
      snap.finish = std::max(transfer->admitted + copy, now);
    } else if (snapshot_.tensors[snap.tensor].resident == 0) {
      continue;  // its source is not there yet: the simulator asks for it itself
    }
    snapshot_.transfers.push_back(snap);
  }
  snapshot_fresh_ = true;
}

// Predicted time of the steps that are expected after this one. The first step of a sequence (a
// prompt) says little about the next ones, so nothing is expected of it.
DurationNs EngineImpl::RestOfSequence(const Instance& instance,
                                      const estimate::GapEstimator::Gap& gap) const {
  if (instance.sequence->steps < 2) return 0;
  DurationNs step = (gap.p10 + gap.p90) / 2;
  for (uint32_t op = 0; op < instance.ops.size(); ++op) step += Duration(instance, op);
  const double more = std::min(
      gap.continues / std::max(1.0 - gap.continues, 1.0 / kFurtherStepsMax), kFurtherStepsMax);
  return static_cast<DurationNs>(more * static_cast<double>(step));
}

void EngineImpl::AddOps(Instance* instance, bool unscheduled, TimeNs now) {
  const gmg::OpRecord* const ops = gmg_.ops(instance->slot);
  for (uint32_t op = instance->first_unfinished; op < instance->ops.size(); ++op) {
    const OpState state = ops[op].state;
    if (state > OpState::kLaunched || (state == OpState::kUnscheduled && !unscheduled)) continue;
    if (instance->phase == Phase::kEnding && state != OpState::kLaunched) continue;
    sim::SnapOp snap;
    snap.instance = instance->snapshot;
    snap.group = op;
    snap.device = ops[op].device;
    snap.service_class = instance->boosted_class;
    snap.priority = instance->priority;
    snap.duration = ops[op].duration_ns;
    snap.memory_bytes = OutputBytes(*instance, op);
    switch (state) {
      case OpState::kUnscheduled:
        snap.state = sim::OpState::kUnscheduled;
        break;
      case OpState::kPlaced:
        snap.state = sim::OpState::kPlaced;
        break;
      case OpState::kIssued:
        snap.state = sim::OpState::kIssued;
        break;
      default:
        snap.state = sim::OpState::kRunning;
        break;
    }
    if (state >= OpState::kIssued) {
      snap.order = IssueOrder(instance->ops[op]);
      snap.allowed_devices = uint64_t{1} << snap.device;
      const std::vector<OpRef>& launched = devices_[snap.device].launched;
      // Only one op of a device runs in a simulation; the others launched there are next.
      if (state == OpState::kLaunched && !(launched[0] == OpRef{instance, op}))
        snap.state = sim::OpState::kIssued;
    } else {
      snap.order = kPlacedOrder + (uint64_t{instance->rank} << 20) + op;
      snap.allowed_devices =
          state == OpState::kPlaced ? uint64_t{1} << snap.device : AllowedDevices(*instance, op);
      if (state == OpState::kUnscheduled && instance->retry_at > now) {
        snap.deferred = true;
        snap.earliest = instance->retry_at;
      }
    }
    window_ops_[instance->snapshot_ops + op] = static_cast<sim::OpIndex>(snapshot_.ops.size());
    AddUses(instance, op, &snap);
    snapshot_.ops.push_back(snap);
  }
}

sim::TensorIndex EngineImpl::ValueTensor(Instance* instance, uint32_t crossing) {
  sim::TensorIndex& index = window_values_[instance->snapshot_values + crossing];
  if (index == sim::kNone) {
    index = static_cast<sim::TensorIndex>(snapshot_.tensors.size());
    const gmg::TensorRecord& value = Value(*instance, crossing);
    sim::SnapTensor snap;
    snap.bytes = value.bytes();
    snap.resident = value.residency;
    snap.instance = instance->snapshot;
    snapshot_.tensors.push_back(snap);
  }
  return index;
}

sim::TensorIndex EngineImpl::PieceTensor(Piece* piece) {
  if (piece->snapshot_stamp != snapshot_stamp_) {
    piece->snapshot_stamp = snapshot_stamp_;
    piece->snapshot = static_cast<sim::TensorIndex>(snapshot_.tensors.size());
    piece->writers.clear();
    piece->readers.clear();
    sim::SnapTensor snap;
    snap.bytes = piece->bytes;
    snap.resident = uint64_t{1} << piece->domain;
    snap.managed = piece->managed;
    snap.pinned = !piece->managed;
    snap.slots = ~uint64_t{0};  // its bytes are in the retained ledger, never in a pool
    snapshot_.tensors.push_back(snap);
  }
  return piece->snapshot;
}

void EngineImpl::AddUses(Instance* instance, uint32_t op, sim::SnapOp* snap) {
  const TemplateEntry::GroupPlan& plan = instance->binding->graph->groups[op];
  snap->reads_begin = static_cast<uint32_t>(snapshot_.uses.size());
  const auto read = [this](sim::TensorIndex tensor) {
    ++snapshot_.tensors[tensor].consumers;
    snapshot_.uses.push_back(tensor);
  };
  for (const uint32_t crossing : plan.in) read(ValueTensor(instance, crossing));
  for (const PieceUse& use : instance->binding->group_pieces[op]) read(PieceTensor(use.piece));
  snap->reads_end = snap->writes_begin = static_cast<uint32_t>(snapshot_.uses.size());
  for (const uint32_t crossing : plan.out)
    snapshot_.uses.push_back(ValueTensor(instance, crossing));
  for (const PieceUse& use : instance->binding->group_pieces[op]) {
    if (use.write) snapshot_.uses.push_back(PieceTensor(use.piece));
  }
  snap->writes_end = static_cast<uint32_t>(snapshot_.uses.size());
}

// Edges inside the instance, then from earlier entries of its pieces' queues.
void EngineImpl::Link(Instance* instance) {
  for (uint32_t op = instance->first_unfinished; op < instance->ops.size(); ++op) {
    const sim::OpIndex from = SnapshotOf(*instance, op);
    if (from == sim::kNone) continue;
    for (const uint32_t next : instance->graph->groups()[op].successors) {
      const sim::OpIndex to = SnapshotOf(*instance, next);
      if (to != sim::kNone) edges_.push_back({from, to});
    }
  }
  for (const PieceUse& use : instance->binding->pieces) {
    Piece* const piece = use.piece;
    if (piece->snapshot_stamp != snapshot_stamp_) continue;
    const size_t readers_before = piece->readers.size();
    mine_.clear();
    for (const uint32_t op : use.groups) {
      const sim::OpIndex index = SnapshotOf(*instance, op);
      if (index == sim::kNone) continue;
      mine_.push_back(index);
      for (const sim::OpIndex writer : piece->writers) edges_.push_back({writer, index});
      if (!use.write) continue;
      for (size_t r = 0; r < readers_before; ++r) edges_.push_back({piece->readers[r], index});
    }
    if (mine_.empty()) continue;
    if (use.write) {
      piece->writers.assign(mine_.begin(), mine_.end());
      piece->readers.clear();
    } else {
      piece->readers.insert(piece->readers.end(), mine_.begin(), mine_.end());
    }
  }
}

void EngineImpl::SealEdges() {
  for (const Edge& edge : edges_) {
    ++snapshot_.ops[edge.from].successors_end;  // counts first
    ++snapshot_.ops[edge.to].pending;
  }
  uint32_t begin = 0;
  for (sim::SnapOp& op : snapshot_.ops) {
    const uint32_t count = op.successors_end;
    op.successors_begin = op.successors_end = begin;
    begin += count;
  }
  snapshot_.edges.resize(edges_.size());
  for (const Edge& edge : edges_)
    snapshot_.edges[snapshot_.ops[edge.from].successors_end++] = edge.to;
}

// What-if finish of everything submitted since the last time.
void EngineImpl::PredictPending(TimeNs now) {
  if (predict_.empty()) return;
  bool ran = false;
  for (const InstanceId id : predict_) {
    Instance* const instance = FindInstance(id.value);
    if (instance == nullptr || instance->completed || instance->parked ||
        !instance->needs_prediction)
      continue;
    instance->needs_prediction = false;
    if (!ran || instance->snapshot == sim::kNone) {
      BuildSnapshot(now, instance);
      const sim::Rules rules{policy_->RespectsSlices(), policy_->ClassesOrderQueues()};
      simulator_.Run(snapshot_, {}, rules, &timeline_);
      ran = true;
    }
    TimeNs finish = timeline_.instance_finish[instance->snapshot];
    if (finish == kNever) {  // past the horizon: what is left comes after it, at best
      finish = std::max(timeline_.makespan, now) + timeline_.instance_left[instance->snapshot];
    }
    instance->predicted_finish = finish;
    gmg_.Write(instance->slot).predicted_finish_ns = finish;
  }
  predict_.clear();
}

}  // namespace slice::engine
