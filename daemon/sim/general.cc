// The rare side of a simulation: ops whose inputs must be looked up, the rollout, copies, timers.
#include <algorithm>
#include <bit>

#include "daemon/sim/simulation.h"

namespace slice::sim {
namespace {

constexpr auto kLater = [](const auto& a, const auto& b) { return a.at > b.at; };

}  // namespace

int64_t Simulation::BytesOf(uint32_t slot) const {
  return s_->tensors[p_->tensors[slot].tensor].bytes;
}

bool Simulation::Reserved(const Prepared::General& general, DomainIndex domain) const {
  const uint32_t instance = s_->ops[general.op].instance;
  return instance < s_->instances.size() &&
         (s_->instances[instance].reserved_domains & Bit(domain)) != 0;
}

// ---- general ops ----

void Simulation::PredecessorsDone(uint32_t op) {
  const uint32_t index = p_->ops[op].take;
  if (prefix_ && p_->generals[index].batch != kNone) {
    st_.due.push_back(op);
    pause_ = true;
    return;
  }
  const TimeNs earliest = st_.generals[index].earliest;
  if (earliest <= st_.now) {
    st_.released.push_back(op);
  } else if (earliest != kNever) {
    AddTimer(earliest, op);
  }
}

void Simulation::ReleaseAll() {
  // Ops are numbered in queue order.
  if (st_.released.size() > 1) std::sort(st_.released.begin(), st_.released.end());
  for (const uint32_t op : st_.released) Release(op);
  st_.released.clear();
}

void Simulation::Release(uint32_t op) {
  const uint32_t index = p_->ops[op].take;
  const Prepared::General& from = p_->generals[index];
  SimulationState::General& general = st_.generals[index];
  if (general.device == kNoDevice) general.device = Rollout(op);
  if (general.device == kNoDevice) return;  // may run nowhere: never reached
  const DomainIndex domain = st_.devices[general.device].domain;
  for (uint32_t i = from.reads_begin; i < from.writes_begin; ++i) {
    const uint32_t slot = p_->slots[i];
    const uint64_t resident = st_.tensors[slot].resident;
    if ((resident & Bit(domain)) != 0 || resident == 0) continue;
    const Prepared::Tensor& tensor = p_->tensors[slot];
    if (tensor.pinned && st_.infeasible.cause == Infeasible::Cause::kNothing) {
      st_.infeasible = {Infeasible::Cause::kPinned, domain, st_.now, from.op, tensor.tensor, 0};
    }
    Request(slot, domain, op, from.online ? ServiceClass::kOnline : ServiceClass::kOffline);
  }
  if (rollout_) Backlog(op, general.device) += Duration(op, general.device);
  if (general.missing == 0) Enqueue(op, general.device);
}

// Earliest finish among the allowed devices: behind what is queued there and would run before it,
// and behind the copies that it needs (one after the other: they share the receive side). Ties:
// lower device.
DeviceIndex Simulation::Rollout(uint32_t id) const {
  const Prepared::General& op = p_->generals[p_->ops[id].take];
  const uint64_t existing =
      st_.devices.size() >= 64 ? ~uint64_t{0} : Bit(static_cast<uint32_t>(st_.devices.size())) - 1;
  const uint64_t allowed = s_->ops[op.op].allowed_devices & existing;
  const bool choice = (allowed & (allowed - 1)) != 0;
  DeviceIndex best = kNoDevice;
  TimeNs best_finish = kNever;
  for (uint64_t left = allowed; left != 0; left &= left - 1) {
    const auto candidate = static_cast<DeviceIndex>(std::countr_zero(left));
    const SimulationState::Device& device = st_.devices[candidate];
    DurationNs copies = 0;
    bool pinned_elsewhere = false;
    for (uint32_t i = op.reads_begin; i < op.writes_begin; ++i) {
      const uint32_t slot = p_->slots[i];
      const uint64_t resident = st_.tensors[slot].resident;
      if ((resident & Bit(device.domain)) != 0 || resident == 0) continue;
      pinned_elsewhere |= p_->tensors[slot].pinned;
      if (choice) copies += CopyTime(SourceFor(slot, device.domain), device.domain, BytesOf(slot));
    }
    if (pinned_elsewhere) continue;
    if (!choice) return candidate;
    TimeNs start =
        st_.keys[candidate] == SimulationState::kIdle ? st_.now : std::max(st_.now, device.ends);
    const bool behind_offline = !op.online || !p_->rules.classes;
    start += device.backlog_online + (behind_offline ? device.backlog_offline : 0);
    // Ops that become ready at one time choose in queue order: who comes later does not count yet.
    for (const uint32_t other : st_.fresh) {
      const Prepared::Op& from = p_->ops[other];
      if (other > id && from.device == candidate &&
          (behind_offline || (from.flags & Prepared::kOnline) != 0))
        start -= from.duration;
    }
    const DurationNs duration = OpDuration(*s_, op.op, candidate);
    if (!op.online && slices_ && start < device.phantom_until &&
        start + duration > device.phantom_from) {
      start = device.phantom_until;
    }
    const TimeNs finish = std::max(start, st_.now + copies) + duration;
    if (finish < best_finish) {
      best_finish = finish;
      best = candidate;
    }
  }
  return best;
}

DurationNs Simulation::StartGeneral(uint32_t index, uint32_t op) {
  SimulationState::Device& device = st_.devices[index];
  const Prepared::General& from = p_->generals[p_->ops[op].take];
  const DurationNs duration = Duration(op, static_cast<DeviceIndex>(index));
  if (rollout_) Backlog(op, index) -= duration;
  if (from.batch != kNone && candidate_device_ != kNoDevice) st_.batch_work -= duration;
  device.refund = 0;
  if (Reserved(from, device.domain)) return duration;
  int64_t made = from.made_settled;
  for (uint32_t i = from.writes_begin; i < from.writes_end; ++i) {
    const uint32_t slot = p_->slots[i];
    if (p_->tensors[slot].transient && st_.tensors[slot].resident == 0) made += BytesOf(slot);
  }
  const int64_t taken = std::max(made, s_->ops[from.op].memory_bytes);
  Take(device.domain, taken, from.op, kNone);
  device.refund = taken - made;
  return duration;
}

void Simulation::FinishGeneral(uint32_t index, const Prepared::General& from) {
  SimulationState::Device& device = st_.devices[index];
  const DomainIndex domain = device.domain;
  st_.domains[domain].free_bytes += device.refund + from.give_settled;
  device.refund = 0;
  const bool reserved = Reserved(from, domain);
  for (uint32_t i = from.writes_begin; i < from.writes_end; ++i) {
    const uint32_t slot = p_->slots[i];
    const Prepared::Tensor& tensor = p_->tensors[slot];
    SimulationState::Tensor& state = st_.tensors[slot];
    if (tensor.transient && state.resident == 0 && !reserved) state.held |= Bit(domain);
    for (uint64_t stale = state.held & ~Bit(domain); stale != 0; stale &= stale - 1)
      st_.domains[static_cast<size_t>(std::countr_zero(stale))].free_bytes += BytesOf(slot);
    state.held &= Bit(domain);
    state.resident = Bit(domain);
    if (tensor.transient && state.consumers == 0) EndTensor(slot);
  }
  for (uint32_t i = from.reads_begin; i < from.writes_begin; ++i) {
    const uint32_t slot = p_->slots[i];
    SimulationState::Tensor& state = st_.tensors[slot];
    if (state.consumers > 0 && --state.consumers == 0 && p_->tensors[slot].transient)
      EndTensor(slot);
  }
  if (from.batch != kNone) {
    --st_.batch_unfinished;
    st_.batch_finish = st_.now;
  }
}

// ---- copies ----

void Simulation::LoadTransfers() {
  for (const SnapTransfer& from : p_->transfers) {
    const auto index = static_cast<uint32_t>(st_.intents.size());
    st_.intents.push_back({from.tensor, from.source, from.destination, from.service_class, kNone});
    st_.tensors[from.tensor].incoming |= Bit(from.destination);
    const ServiceClass service_class = LaneClass(from.service_class);
    const auto lane = static_cast<size_t>(service_class);
    SimulationState::Domain& source = st_.domains[from.source];
    SimulationState::Domain& destination = st_.domains[from.destination];
    if (from.finish != kNever && destination.incoming[lane] == kNone) {
      source.sending[lane] = index;
      source.sends.Enter(service_class);
      destination.incoming[lane] = index;
      destination.receives.Enter(service_class);
      destination.copy_ends[lane] = std::max(from.finish, s_->now);
    } else {
      st_.waiting.push_back(index);
      st_.admit = true;
    }
  }
  if (p_->rules.classes) {
    std::stable_sort(st_.waiting.begin(), st_.waiting.end(), [this](uint32_t a, uint32_t b) {
      return CopiesBefore({st_.intents[a].service_class, a}, {st_.intents[b].service_class, b});
    });
  }
  RenewSideNext();
}

// Windows have few links and sizes: each prediction is made once.
DurationNs Simulation::CopyTime(DomainIndex source, DomainIndex destination, int64_t bytes) const {
  const uint32_t link = static_cast<uint32_t>(source) << 8 | destination;
  const uint64_t hash = (static_cast<uint64_t>(bytes) ^ uint64_t{link} << 40) * kCopyCostHash;
  CopyCost& cost = copy_costs_[hash >> (64 - kCopyCostBits)];
  if (cost.bytes != bytes || cost.link != link)
    cost = {bytes, link,
            options_.transfer_overhead + transfers_.Predict(source, destination, bytes)};
  return cost.time;
}

DomainIndex Simulation::SourceFor(uint32_t slot, DomainIndex destination) const {
  uint64_t resident = st_.tensors[slot].resident;
  const int64_t bytes = BytesOf(slot);
  auto best = static_cast<DomainIndex>(std::countr_zero(resident));
  resident &= resident - 1;
  if (resident == 0) return best;
  DurationNs best_time = CopyTime(best, destination, bytes);
  for (; resident != 0; resident &= resident - 1) {
    const auto source = static_cast<DomainIndex>(std::countr_zero(resident));
    const DurationNs time = CopyTime(source, destination, bytes);
    if (time < best_time) {
      best_time = time;
      best = source;
    }
  }
  return best;
}

void Simulation::Request(uint32_t slot, DomainIndex destination, uint32_t op,
                         ServiceClass service_class) {
  std::vector<SimulationState::Intent>& intents = st_.intents;
  uint32_t index = kNone;
  bool waits = true;
  if ((st_.tensors[slot].incoming & Bit(destination)) != 0) {
    for (const uint32_t running : st_.domains[destination].incoming) {
      if (running == kNone || intents[running].tensor != slot) continue;
      index = running;
      waits = false;
    }
    if (index == kNone) {
      for (size_t i = 0; i < st_.waiting.size(); ++i) {
        const SimulationState::Intent& intent = intents[st_.waiting[i]];
        if (intent.tensor != slot || intent.destination != destination) continue;
        index = st_.waiting[i];
        // A better class behind it lifts it: taken out here and put back below.
        if (p_->rules.classes && service_class < intent.service_class) {
          st_.waiting.erase(st_.waiting.begin() + static_cast<std::ptrdiff_t>(i));
          intents[index].service_class = service_class;
        } else {
          waits = false;
        }
        break;
      }
    }
  }
  if (index == kNone) {
    index = static_cast<uint32_t>(intents.size());
    intents.push_back({slot, SourceFor(slot, destination), destination, service_class, kNone});
    st_.tensors[slot].incoming |= Bit(destination);
  }
  if (waits) {  // intents are numbered by age
    const auto before = [this](uint32_t a, uint32_t b) {
      return CopiesBefore({LaneClass(st_.intents[a].service_class), a},
                          {LaneClass(st_.intents[b].service_class), b});
    };
    st_.waiting.insert(std::upper_bound(st_.waiting.begin(), st_.waiting.end(), index, before),
                       index);
    st_.admit = true;
  }
  st_.waiters.push_back({op, intents[index].waiters});
  intents[index].waiters = static_cast<uint32_t>(st_.waiters.size() - 1);
  ++st_.generals[p_->ops[op].take].missing;
}

void Simulation::Pause(uint32_t offline, DurationNs duration) {
  if (offline != kNone)
    st_.domains[st_.intents[offline].destination].copy_ends[kOfflineLane] += duration;
}

void Simulation::AdmitCopies() {
  st_.admit = false;
  size_t kept = 0;
  for (const uint32_t index : st_.waiting) {
    const SimulationState::Intent& intent = st_.intents[index];
    const ServiceClass service_class = LaneClass(intent.service_class);
    SimulationState::Domain& source = st_.domains[intent.source];
    SimulationState::Domain& destination = st_.domains[intent.destination];
    if (source.sends.Blocks(service_class) || destination.receives.Blocks(service_class)) {
      st_.waiting[kept++] = index;
      continue;
    }
    const Prepared::Tensor& tensor = p_->tensors[intent.tensor];
    const int64_t bytes = BytesOf(intent.tensor);
    const DurationNs duration =
        std::max<DurationNs>(1, CopyTime(intent.source, intent.destination, bytes));
    const auto lane = static_cast<size_t>(service_class);
    if (lane == kOnlineLane) {  // what it overtakes goes on when it is through
      Pause(source.sending[kOfflineLane], duration);
      if (destination.incoming[kOfflineLane] != source.sending[kOfflineLane])
        Pause(destination.incoming[kOfflineLane], duration);
    }
    source.sending[lane] = index;
    source.sends.Enter(service_class);
    destination.incoming[lane] = index;
    destination.receives.Enter(service_class);
    destination.copy_ends[lane] = st_.now + duration;
    if ((tensor.free_of_charge & Bit(intent.destination)) == 0) {
      Take(intent.destination, bytes, kNone, tensor.tensor);
      st_.tensors[intent.tensor].held |= Bit(intent.destination);
    }
    st_.bytes_moved += bytes;
  }
  st_.waiting.resize(kept);
  RenewSideNext();
}

void Simulation::CompleteCopy(DomainIndex to, size_t lane) {
  SimulationState::Domain& destination = st_.domains[to];
  const uint32_t index = destination.incoming[lane];
  const SimulationState::Intent& intent = st_.intents[index];
  SimulationState::Domain& source = st_.domains[intent.source];
  const auto service_class = static_cast<ServiceClass>(lane);
  source.sending[lane] = kNone;
  source.sends.Leave(service_class);
  destination.incoming[lane] = kNone;
  destination.receives.Leave(service_class);
  destination.copy_ends[lane] = kNever;
  SimulationState::Tensor& tensor = st_.tensors[intent.tensor];
  tensor.incoming &= ~Bit(to);
  tensor.resident |= Bit(to);
  st_.admit = !st_.waiting.empty();
  for (uint32_t i = intent.waiters; i != kNone; i = st_.waiters[i].next) {
    const uint32_t op = st_.waiters[i].op;
    SimulationState::General& general = st_.generals[p_->ops[op].take];
    if (--general.missing == 0) Enqueue(op, general.device);
  }
}

// ---- timers, and the end of copies ----

void Simulation::EndSide() {
  for (size_t d = 0; d < st_.domains.size(); ++d) {
    for (const size_t lane : {kOnlineLane, kOfflineLane}) {
      if (st_.domains[d].copy_ends[lane] <= st_.now)
        CompleteCopy(static_cast<DomainIndex>(d), lane);
    }
  }
  while (!st_.timers.empty() && st_.timers.front().at <= st_.now) {
    const uint32_t what = st_.timers.front().what;
    std::pop_heap(st_.timers.begin(), st_.timers.end(), kLater);
    st_.timers.pop_back();
    if ((what & kPhantomTimer) != 0) {
      st_.look |= Bit(what & ~kPhantomTimer);
    } else {
      st_.released.push_back(what);
    }
  }
  RenewSideNext();
}

void Simulation::AddTimer(TimeNs at, uint32_t what) {
  st_.timers.push_back({at, what});
  std::push_heap(st_.timers.begin(), st_.timers.end(), kLater);
  st_.side_next = std::min(st_.side_next, at);
}

void Simulation::RenewSideNext() {
  st_.side_next = st_.timers.empty() ? kNever : st_.timers.front().at;
  for (const SimulationState::Domain& domain : st_.domains)
    st_.side_next = std::min({st_.side_next, domain.copy_ends[0], domain.copy_ends[1]});
}

// ---- memory ----

void Simulation::Take(DomainIndex index, int64_t bytes, OpIndex op, TensorIndex tensor) {
  if (bytes <= 0) return;
  SimulationState::Domain& domain = st_.domains[index];
  domain.free_bytes -= bytes;
  domain.free_bytes_min = std::min(domain.free_bytes_min, domain.free_bytes);
  if (domain.free_bytes < 0) ShortOfMemory(index, op, tensor);
}

void Simulation::ShortOfMemory(DomainIndex domain, OpIndex op, TensorIndex tensor) {
  if (st_.infeasible.cause != Infeasible::Cause::kNothing) return;
  st_.infeasible = {Infeasible::Cause::kMemory,     domain, st_.now, op, tensor,
                    -st_.domains[domain].free_bytes};
}

void Simulation::EndTensor(uint32_t slot) {
  SimulationState::Tensor& tensor = st_.tensors[slot];
  for (uint64_t held = tensor.held; held != 0; held &= held - 1)
    st_.domains[static_cast<size_t>(std::countr_zero(held))].free_bytes += BytesOf(slot);
  tensor.held = 0;
}

// The curve of each domain: what is free when all of one time has happened.
void Simulation::TraceMemory() {
  for (size_t d = 0; d < st_.domains.size(); ++d) {
    std::vector<MemoryPoint>& curve = trace_->memory[d];
    const int64_t free_bytes = st_.domains[d].free_bytes;
    if (curve.back().free_bytes == free_bytes) continue;
    if (curve.back().at == st_.now) {
      curve.back().free_bytes = free_bytes;
    } else {
      curve.push_back({st_.now, free_bytes});
    }
  }
}

}  // namespace slice::sim
