#include "daemon/sim/simulation.h"

#include <algorithm>
#include <bit>

#include "common/check.h"

namespace slice::sim {
namespace {

constexpr uint64_t Bit(uint32_t index) { return uint64_t{1} << (index & 63); }
constexpr uint32_t kSlotBits = 8;                          // of a key: the device
constexpr uint64_t kKeyTimeMax = (uint64_t{1} << 55) - 1;  // beyond every horizon
constexpr TimeNs kNowMax = TimeNs{1} << 61;  // 73 years: sums with what is in keys stay times

template <typename T>
size_t BytesOf(const std::vector<T>& v) {
  return v.size() * sizeof(T);
}

}  // namespace

size_t SimulationState::bytes() const {
  return BytesOf(keys) + BytesOf(left) + BytesOf(ready) + BytesOf(devices) + BytesOf(domains) +
         BytesOf(generals) + BytesOf(tensors) + BytesOf(instances) + BytesOf(intents) +
         BytesOf(waiting) + BytesOf(waiters) + BytesOf(timers) + BytesOf(released) +
         BytesOf(fresh) + BytesOf(due);
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
  Load();
  TakeEnds(NextKey());
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
  rollout_ = other.rollout_;
  st_ = prefix;
}

void Simulation::Place(const Candidate& candidate) {
  candidate_device_ = candidate.device;
  st_.batch_work = 0;
  for (const uint32_t index : p_->batch) {
    if (index == kNone) continue;
    SimulationState::General& general = st_.generals[index];
    general.device = candidate.device;
    general.earliest = std::max(p_->generals[index].earliest, candidate.earliest);
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
    general.earliest = std::max(p_->generals[index].earliest, placements[i].earliest);
  }
}

bool Simulation::Finish(const Bound* bound, size_t candidate) {
  prefix_ = pause_ = false;
  bound_ = bound;
  candidate_ = candidate;
  ask_at_ = bound == nullptr ? kNever : st_.now;
  for (const uint32_t op : st_.due) PredecessorsDone(op);
  st_.due.clear();
  return Loop();
}

bool Simulation::Loop() {
  uint64_t next = NextKey();
  for (;;) {
    // Everything that ends by now has been taken.
    if (pause_) return true;
    if (!st_.released.empty()) ReleaseAll();
    st_.fresh.clear();
    if (st_.admit) AdmitCopies();
    for (uint64_t look = st_.look; look != 0; look &= look - 1)
      next = std::min(next, StartOn(static_cast<uint32_t>(std::countr_zero(look))));
    st_.look = 0;
    if (trace_ != nullptr) TraceMemory();
    const TimeNs at = std::min(TimeOf(next), st_.side_next);
    if (at > end_) return true;
    if (at >= ask_at_ && Beaten(at)) return false;
    st_.now = std::max(st_.now, at);
    next = TakeEnds(next);
  }
}

// All that ends by now, devices first; returns the next key.
uint64_t Simulation::TakeEnds(uint64_t next) {
  const uint64_t now = static_cast<uint64_t>(st_.now - s_->now);
  while ((next >> kSlotBits) <= now) {
    FinishOn(next & 0xff);
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
  if (st_.batch_unfinished > 0) {
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

// Four chains, so that the comparisons overlap; the array is padded with kIdle.
uint64_t Simulation::NextKey() const {
  const uint64_t* const keys = st_.keys.data();
  const size_t count = st_.keys.size();
  uint64_t a = SimulationState::kIdle, b = a, c = a, d = a;
  for (size_t i = 0; i < count; i += 4) {
    a = std::min(a, keys[i]);
    b = std::min(b, keys[i + 1]);
    c = std::min(c, keys[i + 2]);
    d = std::min(d, keys[i + 3]);
  }
  return std::min(std::min(a, b), std::min(c, d));
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
  // A level has a word for each 64 of the one below.
  levels_ = 0;
  stride_ = 0;
  for (uint32_t words = op_count; levels_ == 0 || words > 1; ++levels_) {
    words = (words + 63) / 64;
    SLICE_CHECK(levels_ < level_at_.size(), "more ops than a window can have");
    level_at_[levels_] = stride_;
    stride_ += std::max<uint32_t>(words, 1);
  }

  st_.now = s.now;
  st_.side_next = kNever;
  st_.last_end = 0;
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
  st_.left = p.pending;
  st_.ready.assign(s.devices.size() * stride_, 0);
  st_.intents.clear();
  st_.waiting.clear();
  st_.waiters.clear();
  st_.timers.clear();
  st_.released.clear();
  st_.fresh.clear();
  st_.due.clear();
  st_.generals.resize(p.generals.size());
  for (size_t i = 0; i < p.generals.size(); ++i)
    st_.generals[i] = {p.generals[i].earliest, 0, p.generals[i].device};
  st_.tensors.resize(p.tensors.size());
  for (size_t i = 0; i < p.tensors.size(); ++i) {
    const Prepared::Tensor& from = p.tensors[i];
    st_.tensors[i] = {from.resident, 0, from.held, from.consumers};
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
    trace_->memory.resize(s.domains.size());
    for (size_t i = 0; i < s.domains.size(); ++i)
      trace_->memory[i].assign(1, {s.now, s.domains[i].free_bytes});
  }
  LoadTransfers();
  LoadDevices();
  for (uint32_t op = 0; op < op_count; ++op) {
    if (p.pending[op] == 0 && st_.left[op] != kStarted) {
      ++st_.left[op];
      Arrive(op);
    }
  }
}

void Simulation::LoadDevices() {
  const Snapshot& s = *s_;
  st_.devices.resize(s.devices.size());
  st_.keys.assign((s.devices.size() + 3) / 4 * 4, SimulationState::kIdle);
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
    st_.keys[i] = KeyOf(device.ends, i);
  }
}

// ---- the ready set ----

inline void Simulation::Insert(uint32_t device, uint32_t op) {
  uint64_t* const words = &st_.ready[size_t{device} * stride_];
  for (uint32_t level = 0; level < levels_; ++level) {
    words[level_at_[level] + (op >> 6)] |= Bit(op);
    op >>= 6;
  }
}

inline void Simulation::Remove(uint32_t device, uint32_t op) {
  uint64_t* const words = &st_.ready[size_t{device} * stride_];
  for (uint32_t level = 0; level < levels_; ++level) {
    uint64_t& word = words[level_at_[level] + (op >> 6)];
    word &= ~Bit(op);
    if (word != 0) return;
    op >>= 6;
  }
}

inline uint32_t Simulation::First(uint32_t device) const {
  const uint64_t* const words = &st_.ready[size_t{device} * stride_];
  uint32_t at = 0;
  for (uint32_t level = levels_; level-- > 0;) {
    const uint64_t word = words[level_at_[level] + at];
    if (word == 0) return kNone;  // only at the top
    at = at << 6 | static_cast<uint32_t>(std::countr_zero(word));
  }
  return at;
}

uint32_t Simulation::Next(uint32_t device, uint32_t op) const {
  const uint64_t* const words = &st_.ready[size_t{device} * stride_];
  // Up to the first level with something behind, then down to its first.
  for (uint32_t level = 0; level < levels_; ++level) {
    const uint64_t behind = words[level_at_[level] + (op >> 6)] & ~((Bit(op) - 1) | Bit(op));
    op >>= 6;
    if (behind == 0) continue;
    op = op << 6 | static_cast<uint32_t>(std::countr_zero(behind));
    while (level-- > 0)
      op = op << 6 | static_cast<uint32_t>(std::countr_zero(words[level_at_[level] + op]));
    return op;
  }
  return kNone;
}

// ---- ops ----

inline void Simulation::FinishOn(uint32_t index) {
  SimulationState::Device& device = st_.devices[index];
  st_.keys[index] = SimulationState::kIdle;
  st_.look |= Bit(index);
  const uint32_t op = device.running;
  if (op == kNone) return;
  device.running = kNone;
  st_.last_end = st_.now;
  const Prepared::Op& from = p_->ops[op];
  if ((from.flags & Prepared::kGeneral) == 0) {
    st_.domains[device.domain].free_bytes += from.give;
  } else {
    FinishGeneral(index, p_->generals[from.take]);
  }
  if (trace_ != nullptr) trace_->finish[p_->index[op]] = st_.now;
  if (from.next != kNone) {
    Arrive(from.next);
    if (from.more != kNone) {
      if ((from.flags & Prepared::kManyNext) == 0) {
        Arrive(from.more);
      } else {
        const uint32_t* next = &p_->edges[from.more];
        for (uint32_t i = *next; i > 0; --i) Arrive(*++next);
      }
    }
  }
  if ((from.flags & Prepared::kSink) != 0) FinishSink(index, op);
}

// A predecessor has ended.
inline void Simulation::Arrive(uint32_t op) {
  if (--st_.left[op] != 0) return;
  const Prepared::Op& from = p_->ops[op];
  if ((from.flags & Prepared::kGeneral) != 0) {
    PredecessorsDone(op);
    return;
  }
  Insert(from.device, op);
  st_.look |= Bit(from.device);
  if (rollout_) {
    Backlog(op, from.device) += from.duration;
    st_.fresh.push_back(op);
  }
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

DurationNs Simulation::Duration(uint32_t op, DeviceIndex device) const {
  const Prepared::Op& from = p_->ops[op];
  if ((from.flags & Prepared::kGeneral) == 0) return from.duration;
  const Prepared::General& general = p_->generals[from.take];
  return general.device != kNoDevice ? general.duration : OpDuration(*s_, general.op, device);
}

void Simulation::Enqueue(uint32_t op, DeviceIndex device) {
  Insert(device, op);
  st_.look |= Bit(device);
}

// Starts the first op that may; returns the device's key.
inline uint64_t Simulation::StartOn(uint32_t index) {
  if (st_.keys[index] != SimulationState::kIdle) return SimulationState::kIdle;
  uint32_t op = First(index);
  if (op == kNone) return SimulationState::kIdle;
  SimulationState::Device& device = st_.devices[index];
  if (slices_ && st_.now < device.phantom_until && op >= p_->online_count) {
    op = PickInGap(index);
    if (op == kNone) return SimulationState::kIdle;
  }
  Remove(index, op);
  const Prepared::Op& from = p_->ops[op];
  DurationNs duration = 0;
  if ((from.flags & Prepared::kGeneral) == 0) {
    duration = from.duration;
    SimulationState::Domain& domain = st_.domains[device.domain];
    domain.free_bytes -= from.take;
    domain.free_bytes_min = std::min(domain.free_bytes_min, domain.free_bytes);
    if (domain.free_bytes < 0 && from.take > 0) ShortOfMemory(device.domain, p_->index[op], kNone);
    if (rollout_) Backlog(op, index) -= duration;
  } else {
    duration = StartGeneral(index, op);
  }
  if (from.next != kNone) __builtin_prefetch(&st_.left[from.next]);
  device.running = op;
  device.ends = st_.now + duration;
  st_.left[op] = kStarted;
  --st_.unstarted;
  if (trace_ != nullptr) {
    trace_->start[p_->index[op]] = st_.now;
    trace_->device[p_->index[op]] = static_cast<DeviceIndex>(index);
  }
  return st_.keys[index] = KeyOf(device.ends, index);
}

// Inside a phantom only offline ops are left: the first in order that ends before it matters.
uint32_t Simulation::PickInGap(uint32_t index) {
  SimulationState::Device& device = st_.devices[index];
  for (uint32_t op = First(index); op != kNone; op = Next(index, op)) {
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
      st_.last_end = std::max(st_.last_end, device.ends);
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
  out->makespan = st_.last_end;
  out->free_bytes_min.clear();
  for (const SimulationState::Domain& domain : st_.domains)
    out->free_bytes_min.push_back(domain.free_bytes_min);
}

}  // namespace slice::sim
