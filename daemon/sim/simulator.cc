#include "daemon/sim/simulator.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "daemon/sim/core.h"

namespace slice::sim {
namespace {

constexpr uint64_t Bit(uint32_t index) { return uint64_t{1} << (index & 63); }

}  // namespace

DurationNs OpDuration(const Snapshot& snapshot, OpIndex op, DeviceIndex device) {
  const DurationNs base = snapshot.ops[op].duration;
  const uint8_t kind = snapshot.devices[device].kind;
  if (kind >= snapshot.kind_scale.size()) return std::max<DurationNs>(1, base);
  return std::max<DurationNs>(1,
                              std::llround(static_cast<double>(base) * snapshot.kind_scale[kind]));
}

Simulator::Simulator(const estimate::TransferEstimator& transfers, Options options)
    : transfers_(transfers),
      options_(options),
      core_(std::make_unique<Core>(transfers_, options_)) {}
Simulator::~Simulator() = default;

void Simulator::Run(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules,
                    Timeline* out) {
  core_->Run(snapshot, batch, rules, out);
}

void Simulator::Core::Run(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules,
                          Timeline* out) {
  snapshot_ = &snapshot;
  out_ = out;
  rules_ = rules;
  rules_.slices =
      rules.slices && rules.classes;  // without classes there is nobody to leave the gap to
  now_ = snapshot.now;
  end_ = now_ > kNever - options_.horizon ? kNever : now_ + options_.horizon;
  Load(batch);
  Advance();  // what ends now is taken before anything starts
  for (;;) {
    ReleaseAll();
    if (admit_) AdmitTransfers();
    for (uint64_t look = look_; look != 0; look &= look - 1)
      StartOn(static_cast<DeviceIndex>(std::countr_zero(look)));
    look_ = 0;
    TimeNs next = timers_.empty() ? kNever : timers_.front().at;
    for (const TimeNs at : slot_) next = std::min(next, at);
    if (next == kNever || next > end_) break;
    now_ = std::max(now_, next);
    Advance();
  }
  Summarise();
}

// ---- set-up ----

void Simulator::Core::Load(std::span<const Placement> batch) {
  const Snapshot& s = *snapshot_;
  const size_t op_count = s.ops.size();
  out_->start.assign(op_count, kNever);
  out_->finish.assign(op_count, kNever);
  out_->device.assign(op_count, kNoDevice);
  out_->instance_finish.assign(s.instances.size(), s.now);
  out_->instance_left.assign(s.instances.size(), 0);
  out_->bytes_moved = 0;
  out_->memory_feasible = true;
  out_->infeasible_domain = kNoDomain;
  out_->makespan = 0;

  tensors_.resize(s.tensors.size());
  for (size_t i = 0; i < s.tensors.size(); ++i) {
    const SnapTensor& from = s.tensors[i];
    Tensor& tensor = tensors_[i];
    tensor.resident = from.resident;
    tensor.incoming = 0;
    tensor.consumers = from.consumers;
    tensor.transient =
        !from.managed && !from.pinned && (from.instance != kNone || from.resident == 0);
    tensor.held = 0;
    if (tensor.transient && from.resident != 0) {
      const uint64_t reserved =
          from.instance < s.instances.size() ? s.instances[from.instance].reserved_domains : 0;
      tensor.held = from.resident & ~reserved;
    }
  }
  domains_.resize(s.domains.size());
  for (size_t i = 0; i < s.domains.size(); ++i)
    domains_[i] = {s.domains[i].free_bytes, {kNone, kNone}, {kNone, kNone}};
  instance_ops_.assign(s.instances.size(), 0);
  intents_.clear();
  waiting_.clear();
  waiters_.clear();
  timers_.clear();
  released_.clear();
  slot_.assign(s.devices.size() + 2 * s.domains.size(), kNever);
  look_ = 0;
  admit_ = false;

  ops_.resize(op_count);
  for (size_t i = 0; i < op_count; ++i) {
    const SnapOp& from = s.ops[i];
    ops_[i] = {from.earliest, from.pending, 0,
               from.state == OpState::kUnscheduled ? kNoDevice : from.device,
               from.service_class == ServiceClass::kOnline};
    if (from.instance < instance_ops_.size()) ++instance_ops_[from.instance];
  }
  for (const Placement& placement : batch) {
    Op& op = ops_[placement.op];
    op.device = placement.device;
    op.earliest = std::max(op.earliest, placement.earliest);
  }
  LoadTransfers();
  LoadDevices();
  for (OpIndex i = 0; i < op_count; ++i) {
    if (ops_[i].pending == 0 && out_->start[i] == kNever) PredecessorsDone(i);
  }
}

void Simulator::Core::LoadDevices() {
  const Snapshot& s = *snapshot_;
  devices_.resize(s.devices.size());
  for (size_t i = 0; i < s.devices.size(); ++i) {
    const SnapDevice& from = s.devices[i];
    Device& device = devices_[i];
    device.online.clear();
    device.offline.clear();
    device.running = from.running;
    device.refund = 0;
    device.backlog_online = device.backlog_offline = 0;
    device.phantom_from = from.phantom_from;
    device.phantom_until = from.phantom_until;
    device.wake_at = 0;
    if (from.running != kNone) {
      out_->start[from.running] = s.now;
      out_->device[from.running] = static_cast<DeviceIndex>(i);
      slot_[i] = std::max(from.free_at, s.now);
    } else if (from.free_at > s.now) {
      slot_[i] = from.free_at;  // busy with something outside the window
    }
  }
}

void Simulator::Core::LoadTransfers() {
  const Snapshot& s = *snapshot_;
  for (const SnapTransfer& from : s.transfers) {
    const uint32_t index = static_cast<uint32_t>(intents_.size());
    intents_.push_back({from.tensor, from.source, from.destination, from.service_class, kNone});
    tensors_[from.tensor].incoming |= Bit(from.destination);
    const size_t lane = Lane(intents_.back());
    if (from.finish != kNever && domains_[from.destination].incoming[lane] == kNone) {
      domains_[from.source].sending[lane] = index;
      domains_[from.destination].incoming[lane] = index;
      slot_[s.devices.size() + from.destination * 2 + lane] = std::max(from.finish, s.now);
    } else {
      waiting_.push_back(index);
      admit_ = true;
    }
  }
  if (rules_.classes) {
    std::stable_sort(waiting_.begin(), waiting_.end(), [this](uint32_t a, uint32_t b) {
      return intents_[a].service_class < intents_[b].service_class;
    });
  }
}

// ---- one step of time ----

void Simulator::Core::Advance() {
  const size_t device_count = devices_.size();
  for (size_t i = 0; i < slot_.size(); ++i) {
    if (slot_[i] > now_) continue;
    slot_[i] = kNever;
    if (i < device_count) {
      FinishOn(static_cast<DeviceIndex>(i));
    } else {
      CompleteTransfer(static_cast<DomainIndex>((i - device_count) / 2), (i - device_count) % 2);
    }
  }
  while (!timers_.empty() && timers_.front().at <= now_) {
    const uint32_t what = timers_.front().what;
    std::pop_heap(timers_.begin(), timers_.end(),
                  [](const Timer& a, const Timer& b) { return a.at > b.at; });
    timers_.pop_back();
    if ((what & kPhantomTimer) != 0) {
      look_ |= Bit(what & ~kPhantomTimer);
    } else {
      released_.push_back(what);
    }
  }
}

void Simulator::Core::AddTimer(TimeNs at, uint32_t what) {
  timers_.push_back({at, what});
  std::push_heap(timers_.begin(), timers_.end(),
                 [](const Timer& a, const Timer& b) { return a.at > b.at; });
}

void Simulator::Core::PredecessorsDone(OpIndex op) {
  const TimeNs earliest = ops_[op].earliest;
  if (earliest <= now_) {
    released_.push_back(op);
  } else if (earliest != kNever) {
    AddTimer(earliest, op);
  }
}

QueueKey Simulator::Core::Key(OpIndex op) const {
  const SnapOp& from = snapshot_->ops[op];
  if (!rules_.classes) return {ServiceClass::kOnline, 0, from.order, op};
  return {from.service_class, from.priority, from.order, op};
}

void Simulator::Core::ReleaseAll() {
  if (released_.size() > 1) {
    std::sort(released_.begin(), released_.end(),
              [this](OpIndex a, OpIndex b) { return RunsBefore(Key(a), Key(b)); });
  }
  for (const OpIndex op : released_) Release(op);
  released_.clear();
}

void Simulator::Core::Release(OpIndex index) {
  Op& op = ops_[index];
  const SnapOp& from = snapshot_->ops[index];
  if (op.device == kNoDevice) op.device = Rollout(index);
  if (op.device == kNoDevice) return;  // may run nowhere: never reached
  const DomainIndex domain = DomainOf(op.device);
  for (uint32_t i = from.reads_begin; i < from.reads_end; ++i) {
    const TensorIndex tensor = snapshot_->uses[i];
    const uint64_t resident = tensors_[tensor].resident;
    if ((resident & Bit(domain)) != 0 || resident == 0) continue;
    if (snapshot_->tensors[tensor].pinned && out_->memory_feasible) {
      out_->memory_feasible = false;
      out_->infeasible_domain = domain;
    }
    Request(tensor, domain, index);
  }
  Device& device = devices_[op.device];
  (op.online ? device.backlog_online : device.backlog_offline) += Duration(index, op.device);
  if (op.missing == 0) Enqueue(index);
}

// Earliest finish among the allowed devices: behind what is queued there and would run before it,
// and behind the copies that it needs (one after the other: they share the receive side). Ties:
// lower device.
DeviceIndex Simulator::Core::Rollout(OpIndex index) const {
  const Snapshot& s = *snapshot_;
  const SnapOp& op = s.ops[index];
  DeviceIndex best = kNoDevice;
  TimeNs best_finish = kNever;
  const uint64_t existing =
      devices_.size() >= 64 ? ~uint64_t{0} : Bit(static_cast<uint32_t>(devices_.size())) - 1;
  for (uint64_t left = op.allowed_devices & existing; left != 0; left &= left - 1) {
    const auto candidate = static_cast<DeviceIndex>(std::countr_zero(left));
    const Device& device = devices_[candidate];
    const DomainIndex domain = DomainOf(candidate);
    DurationNs copies = 0;
    bool pinned_elsewhere = false;
    for (uint32_t i = op.reads_begin; i < op.reads_end; ++i) {
      const TensorIndex tensor = s.uses[i];
      const uint64_t resident = tensors_[tensor].resident;
      if ((resident & Bit(domain)) != 0 || resident == 0) continue;
      pinned_elsewhere |= s.tensors[tensor].pinned;
      copies += CopyTime(SourceFor(tensor, domain), domain, tensor);
    }
    if (pinned_elsewhere) continue;
    TimeNs start = std::max(now_, slot_[candidate] == kNever ? now_ : slot_[candidate]);
    start += device.backlog_online;
    const DurationNs duration = Duration(index, candidate);
    if (!ops_[index].online || !rules_.classes) start += device.backlog_offline;
    if (!ops_[index].online && rules_.slices && start < device.phantom_until &&
        start + duration > device.phantom_from) {
      start = device.phantom_until;
    }
    const TimeNs finish = std::max(start, now_ + copies) + duration;
    if (finish < best_finish) {
      best_finish = finish;
      best = candidate;
    }
  }
  return best;
}

// ---- transfers ----

DurationNs Simulator::Core::CopyTime(DomainIndex source, DomainIndex destination,
                                     TensorIndex tensor) const {
  return options_.transfer_overhead +
         transfers_.Predict(source, destination, snapshot_->tensors[tensor].bytes);
}

DomainIndex Simulator::Core::SourceFor(TensorIndex tensor, DomainIndex destination) const {
  uint64_t resident = tensors_[tensor].resident;
  auto best = static_cast<DomainIndex>(std::countr_zero(resident));
  resident &= resident - 1;
  if (resident == 0) return best;
  DurationNs best_time = CopyTime(best, destination, tensor);
  for (; resident != 0; resident &= resident - 1) {
    const auto source = static_cast<DomainIndex>(std::countr_zero(resident));
    const DurationNs time = CopyTime(source, destination, tensor);
    if (time < best_time) {
      best_time = time;
      best = source;
    }
  }
  return best;
}

void Simulator::Core::Request(TensorIndex tensor, DomainIndex destination, OpIndex op) {
  const ServiceClass service_class = snapshot_->ops[op].service_class;
  uint32_t index = kNone;
  bool waits = true;
  if ((tensors_[tensor].incoming & Bit(destination)) != 0) {
    for (const uint32_t running : domains_[destination].incoming) {
      if (running == kNone || intents_[running].tensor != tensor) continue;
      index = running;
      waits = false;
    }
    if (index == kNone) {
      for (size_t i = 0; i < waiting_.size(); ++i) {
        const Intent& intent = intents_[waiting_[i]];
        if (intent.tensor != tensor || intent.destination != destination) continue;
        index = waiting_[i];
        // A better class behind it lifts it: taken out here and put back below.
        if (rules_.classes && service_class < intent.service_class) {
          waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
          intents_[index].service_class = service_class;
        } else {
          waits = false;
        }
        break;
      }
    }
  }
  if (index == kNone) {
    index = static_cast<uint32_t>(intents_.size());
    intents_.push_back({tensor, SourceFor(tensor, destination), destination, service_class, kNone});
    tensors_[tensor].incoming |= Bit(destination);
  }
  if (waits) {  // by class, then age: intents are numbered by age
    const auto before = [this](uint32_t a, uint32_t b) {
      if (rules_.classes && intents_[a].service_class != intents_[b].service_class) {
        return intents_[a].service_class < intents_[b].service_class;
      }
      return a < b;
    };
    waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), index, before), index);
    admit_ = true;
  }
  waiters_.push_back({op, intents_[index].waiters});
  intents_[index].waiters = static_cast<uint32_t>(waiters_.size() - 1);
  ++ops_[op].missing;
}

bool Simulator::Core::Blocked(const Intent& intent) const {
  const Domain& source = domains_[intent.source];
  const Domain& destination = domains_[intent.destination];
  if (source.sending[kOnlineLane] != kNone || destination.incoming[kOnlineLane] != kNone)
    return true;
  return Lane(intent) == kOfflineLane &&
         (source.sending[kOfflineLane] != kNone || destination.incoming[kOfflineLane] != kNone);
}

void Simulator::Core::Pause(uint32_t offline, DurationNs duration) {
  if (offline != kNone) CopySlot(intents_[offline].destination, kOfflineLane) += duration;
}

void Simulator::Core::AdmitTransfers() {
  admit_ = false;
  size_t kept = 0;
  for (const uint32_t index : waiting_) {
    const Intent& intent = intents_[index];
    if (Blocked(intent)) {
      waiting_[kept++] = index;
      continue;
    }
    const size_t lane = Lane(intent);
    const DurationNs duration =
        std::max<DurationNs>(1, CopyTime(intent.source, intent.destination, intent.tensor));
    Domain& source = domains_[intent.source];
    Domain& destination = domains_[intent.destination];
    if (lane == kOnlineLane) {  // what it overtakes goes on when it is through
      Pause(source.sending[kOfflineLane], duration);
      if (destination.incoming[kOfflineLane] != source.sending[kOfflineLane]) {
        Pause(destination.incoming[kOfflineLane], duration);
      }
    }
    source.sending[lane] = index;
    destination.incoming[lane] = index;
    const SnapTensor& from = snapshot_->tensors[intent.tensor];
    const uint64_t reserved = from.instance < snapshot_->instances.size()
                                  ? snapshot_->instances[from.instance].reserved_domains
                                  : 0;
    if (((reserved | from.slots) & Bit(intent.destination)) == 0) {
      Take(intent.destination, from.bytes);
      tensors_[intent.tensor].held |= Bit(intent.destination);
    }
    out_->bytes_moved += from.bytes;
    CopySlot(intent.destination, lane) = now_ + duration;
  }
  waiting_.resize(kept);
}

void Simulator::Core::CompleteTransfer(DomainIndex destination, size_t lane) {
  const uint32_t index = domains_[destination].incoming[lane];
  const Intent& intent = intents_[index];
  domains_[intent.source].sending[lane] = kNone;
  domains_[destination].incoming[lane] = kNone;
  Tensor& tensor = tensors_[intent.tensor];
  tensor.incoming &= ~Bit(destination);
  tensor.resident |= Bit(destination);
  admit_ = !waiting_.empty();
  for (uint32_t i = intent.waiters; i != kNone; i = waiters_[i].next) {
    if (--ops_[waiters_[i].op].missing == 0) Enqueue(waiters_[i].op);
  }
}

// ---- devices ----

void Simulator::Core::Enqueue(OpIndex op) {
  const DeviceIndex index = ops_[op].device;
  Device& device = devices_[index];
  std::vector<Ready>& queue = ops_[op].online || !rules_.classes ? device.online : device.offline;
  queue.push_back({Key(op), Duration(op, index)});
  std::push_heap(queue.begin(), queue.end(),
                 [](const Ready& a, const Ready& b) { return RunsBefore(b.key, a.key); });
  look_ |= Bit(index);
}

bool Simulator::Core::Pick(DeviceIndex index, Ready* picked) {
  const auto after = [](const Ready& a, const Ready& b) { return RunsBefore(b.key, a.key); };
  Device& device = devices_[index];
  std::vector<Ready>* queue = !device.online.empty() ? &device.online : &device.offline;
  if (queue->empty()) return false;
  if (queue == &device.online || !rules_.slices || now_ >= device.phantom_until) {
    *picked = queue->front();
    std::pop_heap(queue->begin(), queue->end(), after);
    queue->pop_back();
    return true;
  }
  // Inside a phantom: the first in order that ends before it matters.
  size_t best = queue->size();
  for (size_t i = 0; i < queue->size(); ++i) {
    const Ready& ready = (*queue)[i];
    if (now_ + ready.duration > device.phantom_from) continue;
    if (best == queue->size() || RunsBefore(ready.key, (*queue)[best].key)) best = i;
  }
  if (best == queue->size()) {
    if (device.wake_at < device.phantom_until) {
      device.wake_at = device.phantom_until;
      AddTimer(device.phantom_until, kPhantomTimer | index);
    }
    return false;
  }
  *picked = (*queue)[best];
  (*queue)[best] = queue->back();
  queue->pop_back();
  std::make_heap(queue->begin(), queue->end(), after);
  return true;
}

void Simulator::Core::StartOn(DeviceIndex index) {
  Ready picked;
  if (slot_[index] != kNever || !Pick(index, &picked)) return;
  Device& device = devices_[index];
  const OpIndex op = picked.key.op;
  (ops_[op].online ? device.backlog_online : device.backlog_offline) -= picked.duration;
  device.running = op;
  slot_[index] = now_ + picked.duration;
  out_->start[op] = now_;
  out_->device[op] = index;

  const SnapOp& from = snapshot_->ops[op];
  device.refund = 0;
  if (Reserved(from, DomainOf(index))) return;
  int64_t made = 0;
  for (uint32_t i = from.writes_begin; i < from.writes_end; ++i) {
    const TensorIndex tensor = snapshot_->uses[i];
    if (tensors_[tensor].transient && tensors_[tensor].resident == 0)
      made += snapshot_->tensors[tensor].bytes;
  }
  const int64_t taken = std::max(made, from.memory_bytes);
  if (taken > 0) Take(DomainOf(index), taken);
  device.refund = taken - made;
}

void Simulator::Core::FinishOn(DeviceIndex index) {
  Device& device = devices_[index];
  look_ |= Bit(index);
  const OpIndex op = device.running;
  if (op == kNone) return;
  device.running = kNone;
  const Snapshot& s = *snapshot_;
  const SnapOp& from = s.ops[op];
  const DomainIndex domain = DomainOf(index);
  out_->finish[op] = now_;
  domains_[domain].free_bytes += device.refund;
  const bool reserved = Reserved(from, domain);

  for (uint32_t i = from.writes_begin; i < from.writes_end; ++i) {
    Tensor& tensor = tensors_[s.uses[i]];
    if (tensor.transient && tensor.resident == 0 && !reserved) tensor.held |= Bit(domain);
    for (uint64_t stale = tensor.held & ~Bit(domain); stale != 0; stale &= stale - 1) {
      domains_[static_cast<size_t>(std::countr_zero(stale))].free_bytes +=
          s.tensors[s.uses[i]].bytes;
    }
    tensor.held &= Bit(domain);
    tensor.resident = Bit(domain);
    if (tensor.transient && tensor.consumers == 0) EndTensor(s.uses[i]);
  }
  for (uint32_t i = from.reads_begin; i < from.reads_end; ++i) {
    Tensor& tensor = tensors_[s.uses[i]];
    if (tensor.consumers > 0 && --tensor.consumers == 0 && tensor.transient) EndTensor(s.uses[i]);
  }
  for (uint32_t i = from.successors_begin; i < from.successors_end; ++i) {
    const OpIndex successor = s.edges[i];
    if (ops_[successor].pending > 0 && --ops_[successor].pending == 0) PredecessorsDone(successor);
  }
  if (from.instance < instance_ops_.size() && --instance_ops_[from.instance] == 0) {
    EndOfInstance(s.instances[from.instance], &device);
  }
}

// A phantom opens behind the last op of an online step: the next step is expected between its
// quantiles.
void Simulator::Core::EndOfInstance(const SnapInstance& instance, Device* device) {
  if (instance.service_class != ServiceClass::kOnline || instance.gap_p90 <= 0) return;
  if (now_ >= device->phantom_until) {
    device->phantom_from = now_ + instance.gap_p10;
    device->phantom_until = now_ + instance.gap_p90;
  } else {
    device->phantom_from = std::min(device->phantom_from, now_ + instance.gap_p10);
    device->phantom_until = std::max(device->phantom_until, now_ + instance.gap_p90);
  }
}

// ---- memory ----

bool Simulator::Core::Reserved(const SnapOp& op, DomainIndex domain) const {
  return op.instance < snapshot_->instances.size() &&
         (snapshot_->instances[op.instance].reserved_domains & Bit(domain)) != 0;
}

void Simulator::Core::Take(DomainIndex domain, int64_t bytes) {
  domains_[domain].free_bytes -= bytes;
  if (domains_[domain].free_bytes < 0 && out_->memory_feasible) {
    out_->memory_feasible = false;
    out_->infeasible_domain = domain;
  }
}

void Simulator::Core::EndTensor(TensorIndex index) {
  Tensor& tensor = tensors_[index];
  for (uint64_t held = tensor.held; held != 0; held &= held - 1) {
    domains_[static_cast<size_t>(std::countr_zero(held))].free_bytes +=
        snapshot_->tensors[index].bytes;
  }
  tensor.held = 0;
}

void Simulator::Core::Summarise() {
  const Snapshot& s = *snapshot_;
  // What runs at the end of the horizon has a known finish.
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (devices_[i].running != kNone && slot_[i] != kNever)
      out_->finish[devices_[i].running] = slot_[i];
  }
  for (size_t i = 0; i < s.ops.size(); ++i) {
    const TimeNs finish = out_->finish[i];
    if (finish != kNever) out_->makespan = std::max(out_->makespan, finish);
    const uint32_t instance = s.ops[i].instance;
    if (instance >= s.instances.size()) continue;
    out_->instance_finish[instance] = std::max(out_->instance_finish[instance], finish);
    if (finish == kNever) out_->instance_left[instance] += s.ops[i].duration;
  }
}

}  // namespace slice::sim
