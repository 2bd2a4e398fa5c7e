#include "daemon/sim/simulation.h"

#include <algorithm>
#include <bit>

#include "common/check.h"

namespace slice::sim {
namespace {

inline uint32_t LowestBit(uint64_t mask) {  // of one that is not 0
  return static_cast<uint32_t>(__builtin_ctzll(mask));
}
constexpr uint32_t kSlotBits = 8;                          // of a key: the device
constexpr uint64_t kKeyTimeMax = (uint64_t{1} << 55) - 1;  // beyond every horizon
constexpr TimeNs kNowMax = TimeNs{1} << 61;  // 73 years: sums with what is in keys stay times

}  // namespace

size_t SimulationState::bytes() const {
  return BytesIn(keys) + BytesIn(groups) + BytesIn(left) + BytesIn(ready) + BytesIn(devices) +
         BytesIn(domains) + BytesIn(generals) + BytesIn(tensors) + BytesIn(instances) +
         BytesIn(intents) + BytesIn(waiting) + BytesIn(waiters) + BytesIn(timers) +
         BytesIn(released) + BytesIn(fresh) + BytesIn(due);
}

// ---- from the snapshot to the end ----

void Simulation::Prefix(const Prepared& prepared, bool rollout, Timeline* trace) {
  p_ = &prepared;
  s_ = prepared.snapshot;
  rollout_ = prepared.rollout || rollout;
  trace_ = trace;
  bound_ = nullptr;
  ask_at_ = kNever;
  prefix_ = true;
  copy_times_.Start(s_->domains.size());
  Load();
  Loop();
}

void Simulation::Start(const Simulation& other, const SimulationState& prefix) {
  p_ = other.p_;
  s_ = other.s_;
  trace_ = nullptr;
  end_ = other.end_;
  levels_ = other.levels_;
  stride_ = other.stride_;
  level_at_ = other.level_at_;
  slices_ = other.slices_;
  if (&other != this) copy_times_.Start(s_->domains.size());
  st_ = prefix;
}

void Simulation::Place(const Candidate& candidate) {
  candidate_device_ = candidate.device;
  st_.batch_work = 0;
  for (const uint32_t index : p_->batch) {
    if (index == kNone) continue;
    SimulationState::General& general = st_.generals[index];
    general.device = candidate.device;
    general.earliest = std::max(general.earliest, candidate.earliest);
    if (candidate.device != kNoDevice)
      st_.batch_work += OpDuration(*s_, p_->generals[index].op, candidate.device);
  }
}

void Simulation::Place(std::span<const Placement> placements) {
  candidate_device_ = kNoDevice;
  for (size_t i = 0; i < placements.size(); ++i) {
    const uint32_t index = p_->batch[i];
    if (index == kNone) continue;
    SimulationState::General& general = st_.generals[index];
    general.device = placements[i].device;
    general.earliest = std::max(general.earliest, placements[i].earliest);
  }
}

bool Simulation::Finish(const Bound* bound, size_t candidate) {
  prefix_ = pause_ = false;
  rollout_ = p_->rollout || (!p_->batch.empty() && candidate_device_ == kNoDevice);
  bound_ = bound;
  candidate_ = candidate;
  ask_at_ = bound == nullptr ? kNever : st_.now;
  for (const uint32_t op : st_.due) PredecessorsDone(op);
  st_.due.clear();
  return Loop();
}

bool Simulation::Loop() {
  const bool plain = !rollout_ && trace_ == nullptr;
  switch (levels_) {
    case 2:
      return plain ? LoopOn<2, true>() : LoopOn<2, false>();
    case 3:
      return plain ? LoopOn<3, true>() : LoopOn<3, false>();
    default:
      return plain ? LoopOn<4, true>() : LoopOn<4, false>();
  }
}

template <uint32_t kLevels, bool kPlain>
bool Simulation::LoopOn() {
  uint64_t next = TakeEnds<kLevels, kPlain>(NextKey());
  for (;;) {
    // Everything that ends by now has been taken.
    if (pause_) return true;
    if (!st_.released.empty()) ReleaseAll();
    if (!kPlain) CountFresh(kNone);
    if (st_.admit) AdmitCopies();
    for (uint64_t look = st_.look; look != 0; look &= look - 1)
      next = std::min(next, StartOn<kLevels, kPlain>(LowestBit(look)));
    st_.look = 0;
    if (!kPlain && trace_ != nullptr && options_.memory_curve) TraceMemory();
    const TimeNs at = std::min(TimeOf(next), st_.side_next);
    if (at > end_) return true;
    if (at >= ask_at_ && Beaten(at)) return false;
    st_.now = std::max(st_.now, at);
    next = TakeEnds<kLevels, kPlain>(next);
  }
}

// All that ends by now, devices first; returns the next key.
template <uint32_t kLevels, bool kPlain>
inline uint64_t Simulation::TakeEnds(uint64_t next) {
  const auto now = static_cast<uint64_t>(st_.now - s_->now);
  while ((next >> kSlotBits) <= now) {
    FinishOn<kLevels, kPlain>(next & 0xff);
    next = NextKey();
  }
  if (st_.side_next <= st_.now) EndSide();
  return next;
}

bool Simulation::Beaten(TimeNs at) {
  Progress progress;
  progress.now = at;
  progress.feasible = st_.infeasible.cause == Infeasible::Cause::kNothing;
  progress.bytes_moved = st_.bytes_moved;
  progress.batch_finish_least = st_.batch_finish;
  progress.batch_ended = st_.batch_unfinished == 0;
  if (!progress.batch_ended) {
    TimeNs least = at;
    if (candidate_device_ != kNoDevice) {
      // One after the other, behind what runs there.
      if (st_.devices[candidate_device_].running != kNone)
        least = std::max(least, st_.devices[candidate_device_].ends);
      least += st_.batch_work;
    }
    progress.batch_finish_least = std::max(st_.batch_finish, std::min(least, end_));
  }
  progress.instances = st_.instances;
  ask_at_ = bound_->Ask(candidate_, progress);
  return ask_at_ == Bound::kBeaten;
}

// The least of 8: three steps of independent comparisons.
inline uint64_t Least(const uint64_t* keys) {
  const uint64_t a = std::min(keys[0], keys[1]), b = std::min(keys[2], keys[3]);
  const uint64_t c = std::min(keys[4], keys[5]), d = std::min(keys[6], keys[7]);
  return std::min(std::min(a, b), std::min(c, d));
}

inline uint64_t Simulation::NextKey() const {
  return st_.groups.size() == 1 ? Least(st_.keys.data()) : Least(st_.groups.data());
}

inline void Simulation::SetKey(uint32_t device, uint64_t key) {
  st_.keys[device] = key;
  uint64_t& group = st_.groups[device / 8];
  group = std::min(group, key);
}

inline void Simulation::ClearKey(uint32_t device) {
  st_.keys[device] = SimulationState::kIdle;
  if (st_.groups.size() > 1) st_.groups[device / 8] = Least(&st_.keys[device & ~7U]);
}

uint64_t Simulation::KeyOf(TimeNs at, uint32_t device) const {
  return std::min(static_cast<uint64_t>(at - s_->now), kKeyTimeMax) << kSlotBits | device;
}

// ---- set-up ----

void Simulation::Load() {
  const Snapshot& s = *s_;
  const Prepared& p = *p_;
  const auto op_count = static_cast<uint32_t>(p.ops.size());
  slices_ =
      p.rules.slices && p.rules.classes;  // without classes there is nobody to leave the gap to
  SLICE_CHECK(s.now >= 0 && s.now <= kNowMax, "a snapshot from another clock");
  const DurationNs horizon = std::min(options_.horizon, kHorizonMax);
  end_ = s.now + horizon;
  // A level has a word for each 64 of the one below; the top level has one.
  levels_ = 2;
  for (uint64_t most = 64 * 64; most < op_count; most *= 64) ++levels_;
  SLICE_CHECK(levels_ <= kLevelsMax, "more ops than a window can have");
  stride_ = 0;
  uint32_t words = std::max<uint32_t>(op_count, 1);
  for (uint32_t level = 0; level < levels_; ++level) {
    words = (words + 63) / 64;
    level_at_[level] = stride_;
    stride_ += words;
  }

  st_.now = s.now;
  st_.side_next = kNever;
  st_.look = 0;
  st_.unstarted = op_count;
  st_.batch_work = 0;
  st_.batch_finish = 0;
  st_.batch_unfinished = 0;
  for (const uint32_t index : p.batch) st_.batch_unfinished += index != kNone ? 1 : 0;
  st_.bytes_moved = 0;
  st_.infeasible = {};
  st_.admit = false;
  pause_ = false;
  st_.left.resize(op_count);
  for (uint32_t op = 0; op < op_count; ++op) {
    st_.left[op] = p.ops[op].pending != Prepared::kManyPending ? p.ops[op].pending
                                                               : s.ops[p.index[op]].pending;
  }
  st_.ready.assign(s.devices.size() * stride_, 0);
  st_.intents.clear();
  st_.waiting.clear();
  st_.receiving = 0;
  st_.waiters.clear();
  st_.timers.clear();
  st_.released.clear();
  st_.fresh.clear();
  st_.due.clear();
  st_.generals.resize(p.generals.size());
  for (size_t i = 0; i < p.generals.size(); ++i)
    st_.generals[i] = {s.ops[p.generals[i].op].earliest, 0, p.generals[i].device};
  st_.tensors.resize(p.tensors.size());
  for (size_t i = 0; i < p.tensors.size(); ++i) {
    const Prepared::Tensor& from = p.tensors[i];
    st_.tensors[i] = {from.resident, 0, from.held, s.tensors[from.tensor].consumers};
  }
  st_.domains.resize(s.domains.size());
  for (size_t i = 0; i < s.domains.size(); ++i) {
    st_.domains[i] = {};
    st_.domains[i].free_bytes = st_.domains[i].free_bytes_min = s.domains[i].free_bytes;
  }
  st_.instances.resize(s.instances.size());
  for (size_t i = 0; i < s.instances.size(); ++i)
    st_.instances[i] = {s.now, p.sinks[i], kNone, kNoDevice};
  if (trace_ != nullptr) {
    trace_->start.assign(op_count, kNever);
    trace_->finish.assign(op_count, kNever);
    trace_->device.assign(op_count, kNoDevice);
    trace_->memory.resize(options_.memory_curve ? s.domains.size() : 0);
    for (size_t i = 0; i < trace_->memory.size(); ++i)
      trace_->memory[i].assign(1, {s.now, s.domains[i].free_bytes});
  }
  LoadTransfers();
  LoadDevices();
  for (uint32_t op = 0; op < op_count; ++op) {
    if (p.ops[op].pending != 0 || st_.left[op] == kStarted) continue;
    if ((p.ops[op].flags & Prepared::kGeneral) != 0) {
      PredecessorsDone(op);
    } else {
      Enqueue(op, p.ops[op].device);
      if (rollout_) st_.fresh.push_back(op);
    }
  }
}

void Simulation::LoadDevices() {
  const Snapshot& s = *s_;
  st_.devices.resize(s.devices.size());
  const size_t groups = std::max<size_t>(1, (s.devices.size() + 7) / 8);
  st_.keys.assign(8 * groups, SimulationState::kIdle);
  st_.groups.assign(groups == 1 ? 1 : 8, SimulationState::kIdle);
  for (uint32_t i = 0; i < s.devices.size(); ++i) {
    const SnapDevice& from = s.devices[i];
    SimulationState::Device& device = st_.devices[i];
    device = {};
    device.running = p_->running[i];
    device.domain = from.domain;
    device.phantom_from = from.phantom_from;
    device.phantom_until = from.phantom_until;
    if (device.running != kNone) {
      device.ends = std::max(from.free_at, s.now);
      st_.left[device.running] = kStarted;
      --st_.unstarted;
      if (trace_ != nullptr) {
        trace_->start[from.running] = s.now;
        trace_->device[from.running] = static_cast<DeviceIndex>(i);
      }
    } else if (from.free_at > s.now) {
      device.ends = from.free_at;  // busy with something outside the window
    } else {
      continue;
    }
    SetKey(i, KeyOf(device.ends, i));
  }
}

// ---- the ready set ----

template <uint32_t kLevels>
inline void Simulation::Insert(uint32_t device, uint32_t op) {
  for (uint32_t level = 0; level < kLevels; ++level) {
    Words(device, level)[op >> 6] |= Bit(op);
    op >>= 6;
  }
}

template <uint32_t kLevels>
inline void Simulation::Remove(uint32_t device, uint32_t op) {
  for (uint32_t level = 0; level < kLevels; ++level) {
    uint64_t& word = Words(device, level)[op >> 6];
    word &= ~Bit(op);
    if (word != 0) return;
    op >>= 6;
  }
}

template <uint32_t kLevels>
inline uint32_t Simulation::First(uint32_t device) const {
  const uint64_t top = *Words(device, kLevels - 1);
  if (top == 0) return kNone;
  uint32_t at = LowestBit(top);
  for (uint32_t level = kLevels - 1; level-- > 0;)
    at = at << 6 | LowestBit(Words(device, level)[at]);
  return at;
}

uint32_t Simulation::Next(uint32_t device, uint32_t op) const {
  for (uint64_t word = op >> 6; word < level_at_[1]; ++word) {
    const uint64_t from = word == op >> 6 ? ~(Bit(op) - 1) : ~uint64_t{0};
    const uint64_t left = Words(device, 0)[word] & from;
    if (left != 0) return static_cast<uint32_t>(word << 6) | LowestBit(left);
  }
  return kNone;
}

// ---- ops ----

template <uint32_t kLevels, bool kPlain>
inline void Simulation::FinishOn(uint32_t index) {
  SimulationState::Device& device = st_.devices[index];
  ClearKey(index);
  st_.look |= Bit(index);
  const uint32_t op = device.running;
  if (op == kNone) return;
  device.running = kNone;
  const Prepared::Op& from = p_->ops[op];
  if ((from.flags & Prepared::kGeneral) == 0) {
    st_.domains[device.domain].free_bytes += from.give;
  } else {
    FinishGeneral(index, p_->generals[from.take]);
  }
  if (!kPlain && trace_ != nullptr) trace_->finish[p_->index[op]] = st_.now;
  if (from.next != kNone) {
    Arrive<kLevels, kPlain>(from.next);
    if (from.more != kNone) {
      if ((from.flags & Prepared::kManyNext) == 0) {
        Arrive<kLevels, kPlain>(from.more);
      } else {
        const uint32_t* next = &p_->edges[from.more];
        for (uint32_t i = *next; i > 0; --i) Arrive<kLevels, kPlain>(*++next);
      }
    }
  }
  if ((from.flags & Prepared::kSink) != 0) FinishSink(index, op);
}

// A predecessor has ended.
template <uint32_t kLevels, bool kPlain>
inline void Simulation::Arrive(uint32_t op) {
  if (--st_.left[op] != 0) return;
  const Prepared::Op& from = p_->ops[op];
  if ((from.flags & Prepared::kGeneral) != 0) {
    PredecessorsDone(op);
    return;
  }
  Insert<kLevels>(from.device, op);
  st_.look |= Bit(from.device);
  if (!kPlain && rollout_) st_.fresh.push_back(op);
}

// The last op of an instance's part in the window may have ended.
void Simulation::FinishSink(uint32_t device, uint32_t op) {
  const OpIndex index = p_->index[op];
  const uint32_t of = s_->ops[index].instance;
  InstanceProgress& instance = st_.instances[of];
  if (st_.now > instance.finish || instance.last == kNone || index > instance.last) {
    instance.last = index;
    instance.last_device = static_cast<DeviceIndex>(device);
  }
  instance.finish = st_.now;
  if (--instance.unfinished == 0) OpenPhantom(s_->instances[of], device);
}

// A phantom opens behind the last op of an online step: the next step is expected between its
// quantiles.
void Simulation::OpenPhantom(const SnapInstance& instance, uint32_t index) {
  if (instance.service_class != ServiceClass::kOnline || instance.gap_p90 <= 0) return;
  SimulationState::Device& device = st_.devices[index];
  if (st_.now >= device.phantom_until) {
    device.phantom_from = st_.now + instance.gap_p10;
    device.phantom_until = st_.now + instance.gap_p90;
  } else {
    device.phantom_from = std::min(device.phantom_from, st_.now + instance.gap_p10);
    device.phantom_until = std::max(device.phantom_until, st_.now + instance.gap_p90);
  }
}

DurationNs& Simulation::Backlog(uint32_t op, uint32_t device) {
  SimulationState::Device& to = st_.devices[device];
  return (p_->ops[op].flags & Prepared::kOnline) != 0 ? to.backlog_online : to.backlog_offline;
}

// Simple ops that became ready now and come before `op` in queue order: rollouts see them in the
// backlog from here on. Ops that become ready at one time choose in that order, so who comes later
// must not count yet. `fresh` is sorted while ops are released: latest first.
void Simulation::CountFresh(uint32_t before) {
  while (!st_.fresh.empty() && st_.fresh.back() < before) {
    const uint32_t op = st_.fresh.back();
    st_.fresh.pop_back();
    Backlog(op, p_->ops[op].device) += p_->ops[op].duration;
  }
}

DurationNs Simulation::Duration(uint32_t op, DeviceIndex device) const {
  const Prepared::Op& from = p_->ops[op];
  if ((from.flags & Prepared::kGeneral) == 0) return from.duration;
  return OpDuration(*s_, p_->generals[from.take].op, device);
}

void Simulation::Enqueue(uint32_t op, DeviceIndex device) {
  for (uint32_t level = 0, at = op; level < levels_; ++level, at >>= 6)
    Words(device, level)[at >> 6] |= Bit(at);
  st_.look |= Bit(device);
}

// Starts the first op that may; returns the device's key.
template <uint32_t kLevels, bool kPlain>
inline uint64_t Simulation::StartOn(uint32_t index) {
  if (st_.keys[index] != SimulationState::kIdle) return SimulationState::kIdle;
  uint32_t op = First<kLevels>(index);
  if (op == kNone) return SimulationState::kIdle;
  SimulationState::Device& device = st_.devices[index];
  if (slices_ && st_.now < device.phantom_until && op >= p_->online_count) {
    op = PickInGap(index);
    if (op == kNone) return SimulationState::kIdle;
  }
  Remove<kLevels>(index, op);
  const Prepared::Op& from = p_->ops[op];
  DurationNs duration = 0;
  if ((from.flags & Prepared::kGeneral) == 0) {
    duration = from.duration;
    SimulationState::Domain& domain = st_.domains[device.domain];
    domain.free_bytes -= from.take;
    domain.free_bytes_min = std::min(domain.free_bytes_min, domain.free_bytes);
    if (domain.free_bytes < 0 && from.take > 0) ShortOfMemory(device.domain, p_->index[op], kNone);
    if (!kPlain && rollout_) Backlog(op, index) -= duration;
  } else {
    duration = StartGeneral(index, op);
  }
  if (from.next != kNone) __builtin_prefetch(&st_.left[from.next]);
  device.running = op;
  device.ends = st_.now + duration;
  st_.left[op] = kStarted;
  --st_.unstarted;
  if (!kPlain && trace_ != nullptr) {
    trace_->start[p_->index[op]] = st_.now;
    trace_->device[p_->index[op]] = static_cast<DeviceIndex>(index);
  }
  const uint64_t key = KeyOf(device.ends, index);
  SetKey(index, key);
  return key;
}

// Inside a phantom only offline ops are left: the first in order that ends before it matters.
uint32_t Simulation::PickInGap(uint32_t index) {
  SimulationState::Device& device = st_.devices[index];
  for (uint32_t op = Next(index, 0); op != kNone; op = Next(index, op + 1)) {
    if (st_.now + Duration(op, static_cast<DeviceIndex>(index)) <= device.phantom_from) return op;
  }
  if (device.wake_at < device.phantom_until) {
    device.wake_at = device.phantom_until;
    AddTimer(device.phantom_until, kPhantomTimer | index);
  }
  return kNone;
}

// ---- the results ----

void Simulation::Summarise(bool beaten, Outcome* out) {
  out->beaten = beaten;
  out->infeasible = st_.infeasible;
  out->bytes_moved = st_.bytes_moved;
  // What runs at the end has a known finish.
  if (!beaten) {
    for (uint32_t d = 0; d < st_.devices.size(); ++d) {
      const SimulationState::Device& device = st_.devices[d];
      if (device.running == kNone) continue;
      const OpIndex index = p_->index[device.running];
      const Prepared::Op& op = p_->ops[device.running];
      if ((op.flags & Prepared::kGeneral) != 0 && p_->generals[op.take].batch != kNone)
        st_.batch_finish = std::max(st_.batch_finish, device.ends);
      if ((op.flags & Prepared::kSink) == 0) continue;
      InstanceProgress& instance = st_.instances[s_->ops[index].instance];
      if (device.ends > instance.finish || instance.last == kNone ||
          (device.ends == instance.finish && index > instance.last)) {
        instance.last = index;
        instance.last_device = static_cast<DeviceIndex>(d);
      }
      instance.finish = std::max(instance.finish, device.ends);
      --instance.unfinished;
    }
  }
  out->batch_finish = st_.batch_finish;
  out->batch_left = 0;
  out->instances.resize(st_.instances.size());
  for (size_t i = 0; i < st_.instances.size(); ++i) {
    const InstanceProgress& from = st_.instances[i];
    out->instances[i] = from.unfinished == 0 ? InstanceOutcome{from.finish, from.last_device, 0}
                                             : InstanceOutcome{kNever, kNoDevice, 0};
  }
  if (st_.unstarted == 0) return;
  for (uint32_t op = 0; op < st_.left.size(); ++op) {
    if (st_.left[op] == kStarted) continue;
    const SnapOp& from = s_->ops[p_->index[op]];
    if (from.instance < out->instances.size()) {
      out->instances[from.instance].left += from.duration;
      out->instances[from.instance].finish = kNever;
    }
    const Prepared::Op& packed = p_->ops[op];
    if ((packed.flags & Prepared::kGeneral) != 0 && p_->generals[packed.take].batch != kNone)
      out->batch_left += from.duration;
  }
}

void Simulation::Summarise(Timeline* out) {
  Outcome outcome;
  Summarise(false, &outcome);
  for (const SimulationState::Device& device : st_.devices) {
    if (device.running != kNone) out->finish[p_->index[device.running]] = device.ends;
  }
  out->instance_finish.resize(outcome.instances.size());
  out->instance_left.resize(outcome.instances.size());
  for (size_t i = 0; i < outcome.instances.size(); ++i) {
    out->instance_finish[i] = outcome.instances[i].finish;
    out->instance_left[i] = outcome.instances[i].left;
  }
  out->bytes_moved = outcome.bytes_moved;
  out->infeasible = outcome.infeasible;
  out->memory_feasible = outcome.feasible();
  out->infeasible_domain = outcome.infeasible.domain;
  out->makespan = 0;
  for (const TimeNs finish : out->finish) {
    if (finish != kNever) out->makespan = std::max(out->makespan, finish);
  }
  out->free_bytes_min.clear();
  for (const SimulationState::Domain& domain : st_.domains)
    out->free_bytes_min.push_back(domain.free_bytes_min);
}

}  // namespace slice::sim
