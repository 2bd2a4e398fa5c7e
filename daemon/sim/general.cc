// The rare side of a simulation: ops whose inputs must be looked up, the rollout, copies, timers.
#include <algorithm>
#include <bit>
#include <functional>

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
  if (st_.fresh.size() > 1) std::sort(st_.fresh.begin(), st_.fresh.end(), std::greater<>());
  for (const uint32_t op : st_.released) {
    CountFresh(op);
    Release(op);
  }
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

// When a device is through with what runs there and with what is queued before the op.
TimeNs Simulation::QueueEnd(uint32_t index, bool behind_offline) const {
  const SimulationState::Device& device = st_.devices[index];
  const TimeNs start =
      st_.keys[index] == SimulationState::kIdle ? st_.now : std::max(st_.now, device.ends);
  return start + device.backlog_online + (behind_offline ? device.backlog_offline : 0);
}

// Earliest finish among the allowed devices: behind what is queued there and would run before it,
// and behind the copies that it needs (one after the other: they share the receive side). Ties:
// lower device. Devices beside all inputs come first: mostly they leave the others no chance, and
// then nobody asks how long copies would take.
DeviceIndex Simulation::Rollout(uint32_t id) const {
  const Prepared::General& op = p_->generals[p_->ops[id].take];
  const auto devices = static_cast<uint32_t>(st_.devices.size());
  uint64_t allowed =
      s_->ops[op.op].allowed_devices & (devices >= 64 ? ~uint64_t{0} : Bit(devices) - 1);
  uint64_t beside_all = ~uint64_t{0}, beside_pinned = ~uint64_t{0};  // domains
  for (uint32_t i = op.reads_begin; i < op.writes_begin; ++i) {
    const uint64_t resident = st_.tensors[p_->slots[i]].resident;
    if (resident == 0) continue;
    beside_all &= resident;
    if (p_->tensors[p_->slots[i]].pinned) beside_pinned &= resident;
  }
  if (beside_pinned != ~uint64_t{0}) allowed &= DevicesIn(beside_pinned);
  if ((allowed & (allowed - 1)) == 0)
    return allowed == 0 ? kNoDevice : static_cast<DeviceIndex>(std::countr_zero(allowed));

  const bool behind_offline = !op.online || !p_->rules.classes;
  DeviceIndex best = kNoDevice;
  TimeNs best_finish = kNever;
  const auto better = [&](TimeNs finish, DeviceIndex device) {
    return finish < best_finish || (finish == best_finish && device < best && best != kNoDevice);
  };
  uint32_t kind = kNone;  // of `duration`
  DurationNs duration = 0;
  const auto visit = [&](uint64_t mask, bool copies) {
    for (; mask != 0; mask &= mask - 1) {
      const auto candidate = static_cast<DeviceIndex>(std::countr_zero(mask));
      if (s_->devices[candidate].kind != kind) {
        kind = s_->devices[candidate].kind;
        duration = OpDuration(*s_, op.op, candidate);
      }
      TimeNs start = QueueEnd(candidate, behind_offline);
      const SimulationState::Device& device = st_.devices[candidate];
      if (!op.online && slices_ && start < device.phantom_until &&
          start + duration > device.phantom_from) {
        start = device.phantom_until;
      }
      if (copies) {
        if (!better(std::max(start, st_.now + options_.transfer_overhead) + duration, candidate))
          continue;
        start = std::max(start, st_.now + CopiesTo(op, device.domain));
      }
      const TimeNs finish = start + duration;
      if (!better(finish, candidate)) continue;
      best_finish = finish;
      best = candidate;
    }
  };
  const uint64_t beside = beside_all == ~uint64_t{0} ? allowed : allowed & DevicesIn(beside_all);
  visit(beside, false);
  visit(allowed & ~beside, true);
  return best;
}

uint64_t Simulation::DevicesIn(uint64_t domains) const {
  uint64_t devices = 0;
  if (p_->computing.size() < 64) domains &= Bit(static_cast<uint32_t>(p_->computing.size())) - 1;
  for (; domains != 0; domains &= domains - 1)
    devices |= p_->computing[static_cast<size_t>(std::countr_zero(domains))];
  return devices;
}

// Time of the copies that the op needs in a domain, one after the other.
DurationNs Simulation::CopiesTo(const Prepared::General& op, DomainIndex destination) const {
  DurationNs copies = 0;
  for (uint32_t i = op.reads_begin; i < op.writes_begin; ++i) {
    const uint32_t slot = p_->slots[i];
    uint64_t resident = st_.tensors[slot].resident;
    if ((resident & Bit(destination)) != 0 || resident == 0) continue;
    const int64_t bytes = BytesOf(slot);
    DurationNs least = kNever;
    for (; resident != 0; resident &= resident - 1)
      least = std::min(least, CopyTime(static_cast<DomainIndex>(std::countr_zero(resident)),
                                       destination, bytes));
    copies += least;
  }
  return copies;
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
      st_.receiving |= Bit(from.destination);
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
    st_.receiving |= Bit(intent.destination);
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
  if (destination.incoming[1 - lane] == kNone) st_.receiving &= ~Bit(to);
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
  for (uint64_t left = st_.receiving; left != 0; left &= left - 1) {
    const auto domain = static_cast<DomainIndex>(std::countr_zero(left));
    for (const size_t lane : {kOnlineLane, kOfflineLane}) {
      if (st_.domains[domain].copy_ends[lane] <= st_.now) CompleteCopy(domain, lane);
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
  for (uint64_t left = st_.receiving; left != 0; left &= left - 1) {
    const SimulationState::Domain& domain =
        st_.domains[static_cast<size_t>(std::countr_zero(left))];
    st_.side_next = std::min({st_.side_next, domain.copy_ends[0], domain.copy_ends[1]});
  }
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
