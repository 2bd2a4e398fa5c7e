#include "daemon/sim/prepared.h"

#include <algorithm>

namespace slice::sim {
namespace {

constexpr int64_t kPackedMax = UINT32_MAX;

}  // namespace

size_t Prepared::bytes() const {
  return BytesIn(ops) + BytesIn(index) + BytesIn(edges) + BytesIn(generals) + BytesIn(slots) +
         BytesIn(tensors) + BytesIn(transfers) + BytesIn(running) + BytesIn(computing) +
         BytesIn(sinks) + BytesIn(batch);
}

void Preparation::Run(const Snapshot& snapshot, std::span<const OpIndex> batch, Rules rules,
                      Prepared* out) {
  s_ = &snapshot;
  out_ = out;
  out->snapshot = &snapshot;
  out->rules = rules;
  out->rollout = false;
  out->edges.clear();
  out->generals.clear();
  out->slots.clear();
  out->tensors.clear();
  out->transfers.clear();
  out->batch.assign(batch.size(), kNone);
  domains_ = 0;
  out->computing.assign(snapshot.domains.size(), 0);
  for (size_t d = 0; d < snapshot.devices.size(); ++d) {
    domains_ |= Bit(snapshot.devices[d].domain);
    out->computing[snapshot.devices[d].domain] |= Bit(static_cast<uint32_t>(d));
  }

  Order();
  PlaceOps(batch);
  ScanUses();
  out->ops.resize(snapshot.ops.size());
  out->sinks.assign(snapshot.instances.size(), 0);
  for (uint32_t id = 0; id < snapshot.ops.size(); ++id) Emit(id);
  for (const SnapTransfer& transfer : snapshot.transfers) {
    out->transfers.push_back(transfer);
    out->transfers.back().tensor = Slot(transfer.tensor);
  }
}

// Sorts by (class, priority, order, index). Within a class snapshots come in runs that are in order
// already (the ops of an instance, or of all): those are merged.
void Preparation::Order() {
  const SnapOp* const ops = s_->ops.data();
  const size_t count = s_->ops.size();
  const bool classes = out_->rules.classes;
  ranks_.resize(count);
  merged_.resize(count);
  const auto before = [](const Rank& a, const Rank& b) {
    if (a.high != b.high) return a.high < b.high;
    return a.order != b.order ? a.order < b.order : a.op < b.op;
  };
  // Instances of both classes alternate: apart from each other their runs are long.
  Rank *first = ranks_.data(), *second = merged_.data();
  for (OpIndex i = 0; i < count; ++i) {
    const SnapOp& op = ops[i];
    // Higher priority first, so it counts downwards.
    const auto priority = static_cast<uint32_t>(INT32_MAX - int64_t{op.priority});
    const uint64_t high =
        classes ? (uint64_t{static_cast<uint8_t>(op.service_class)} << 32) | priority : 0;
    if (high >> 32 == 0) {
      *first++ = {high, op.order, i};
    } else {
      *second++ = {high, op.order, i};
    }
  }
  out_->online_count = static_cast<uint32_t>(first - ranks_.data());
  std::copy(merged_.data(), second, first);
  runs_.assign(1, 0);
  for (size_t i = 1; i < count; ++i) {
    if (before(ranks_[i], ranks_[i - 1])) runs_.push_back(i);
  }
  runs_.push_back(count);
  while (runs_.size() > 2) {
    size_t kept = 0;
    for (size_t r = 0; r + 1 < runs_.size(); r += 2) {
      const size_t begin = runs_[r], middle = runs_[r + 1];
      const size_t end = r + 2 < runs_.size() ? runs_[r + 2] : middle;
      std::merge(ranks_.begin() + static_cast<std::ptrdiff_t>(begin),
                 ranks_.begin() + static_cast<std::ptrdiff_t>(middle),
                 ranks_.begin() + static_cast<std::ptrdiff_t>(middle),
                 ranks_.begin() + static_cast<std::ptrdiff_t>(end),
                 merged_.begin() + static_cast<std::ptrdiff_t>(begin), before);
      runs_[kept++] = begin;
    }
    runs_[kept++] = count;
    runs_.resize(kept);
    ranks_.swap(merged_);
  }
  out_->index.resize(count);
  id_.resize(count);
  for (uint32_t id = 0; id < count; ++id) {
    out_->index[id] = ranks_[id].op;
    id_[ranks_[id].op] = id;
  }
}

// The device of each op as far as no candidate and no rollout has a say.
void Preparation::PlaceOps(std::span<const OpIndex> batch) {
  device_.resize(s_->ops.size());
  for (size_t i = 0; i < s_->ops.size(); ++i) {
    const SnapOp& op = s_->ops[i];
    device_[i] = op.state == OpState::kUnscheduled || op.device >= s_->devices.size() ? kNoDevice
                                                                                      : op.device;
  }
  in_batch_.clear();
  for (const OpIndex op : batch) {
    device_[op] = kNoDevice;
    in_batch_.emplace_back(op, static_cast<uint32_t>(in_batch_.size()));
  }
  std::sort(in_batch_.begin(), in_batch_.end());
  out_->running.assign(s_->devices.size(), kNone);
  for (size_t d = 0; d < s_->devices.size(); ++d) {
    const OpIndex op = s_->devices[d].running;
    if (op == kNone) continue;
    device_[op] = static_cast<DeviceIndex>(d);
    out_->running[d] = id_[op];
  }
}

void Preparation::ScanUses() {
  uses_.assign(s_->tensors.size(), {});
  const auto touch = [this](Uses* uses, DeviceIndex device) {
    if (device == kNoDevice) {
      uses->place = Place::kMany;
      return;
    }
    const DomainIndex domain = s_->devices[device].domain;
    if (uses->place == Place::kUnknown) {
      uses->place = Place::kOne;
      uses->domain = domain;
    } else if (uses->domain != domain) {
      uses->place = Place::kMany;
    }
  };
  for (size_t i = 0; i < s_->ops.size(); ++i) {
    const SnapOp& op = s_->ops[i];
    const DeviceIndex device = device_[i];
    for (uint32_t u = op.reads_begin; u < op.reads_end; ++u) {
      Uses& uses = uses_[s_->uses[u]];
      ++uses.reads;
      touch(&uses, device);
    }
    if (op.writes_begin == op.writes_end) continue;
    const bool reserved =
        device != kNoDevice && (Reserved(op.instance) & Bit(s_->devices[device].domain)) != 0;
    for (uint32_t u = op.writes_begin; u < op.writes_end; ++u) {
      Uses& uses = uses_[s_->uses[u]];
      uses.writers = uses.writers == 0 ? 1 : 2;
      uses.writer_reserved = reserved;
      touch(&uses, device);
    }
  }
  for (const SnapTransfer& transfer : s_->transfers) {
    Uses& uses = uses_[transfer.tensor];
    uses.place = Place::kMany;
    if (s_->tensors[transfer.tensor].resident == 0) uses.writers = 2;  // the copy makes it
  }
  for (TensorIndex t = 0; t < uses_.size(); ++t) Settle(t);
}

// Settled: all that use it run in one domain, where it is or will be made, and when its bytes come
// back is known: nobody has to ask where it is.
void Preparation::Settle(TensorIndex index) {
  Uses& uses = uses_[index];
  const SnapTensor& tensor = s_->tensors[index];
  if (uses.place != Place::kOne) return;
  const uint64_t here = Bit(uses.domain);
  if (tensor.resident != 0 && (tensor.resident & here) == 0) return;
  const bool transient =
      !tensor.managed && !tensor.pinned && (tensor.instance != kNone || tensor.resident == 0);
  if (transient) {
    if (tensor.consumers != uses.reads || uses.writers > 1) return;
    if (tensor.resident != 0) {
      const uint64_t held = tensor.resident & ~Reserved(tensor.instance);
      if ((held & ~here) != 0 || uses.writers > 0) return;
      uses.held = held != 0;
    } else {
      uses.held = uses.writers == 1 && !uses.writer_reserved;
    }
    if (uses.held && uses.reads > 1) {  // who is the last?
      uses.held = false;
      return;
    }
  }
  uses.settled = true;
}

// Whether a read on this device needs no look at the tensor's state.
bool Preparation::Satisfied(TensorIndex index, DeviceIndex device) const {
  const Uses& uses = uses_[index];
  if (uses.settled) return true;
  if (uses.writers > 0) return false;
  const SnapTensor& tensor = s_->tensors[index];
  if (tensor.resident == 0) return true;  // comes from nowhere: counts as present
  if (!tensor.managed && !tensor.pinned && tensor.instance != kNone)
    return false;  // bytes to count
  const uint64_t asked = device == kNoDevice ? domains_ : Bit(s_->devices[device].domain);
  return (asked & ~tensor.resident) == 0;
}

uint32_t Preparation::Slot(TensorIndex index) {
  Uses& uses = uses_[index];
  if (uses.slot != kNone) return uses.slot;
  uses.slot = static_cast<uint32_t>(out_->tensors.size());
  const SnapTensor& from = s_->tensors[index];
  Prepared::Tensor tensor;
  tensor.resident = from.resident;
  tensor.tensor = index;
  tensor.pinned = from.pinned;
  tensor.transient =
      !from.managed && !from.pinned && (from.instance != kNone || from.resident == 0);
  const uint64_t reserved = Reserved(from.instance);
  if (tensor.transient) tensor.held = from.resident & ~reserved;
  tensor.free_of_charge = reserved | from.slots;
  out_->tensors.push_back(tensor);
  return uses.slot;
}

void Preparation::Emit(uint32_t id) {
  const OpIndex index = out_->index[id];
  const SnapOp& op = s_->ops[index];
  const DeviceIndex device = device_[index];
  Prepared::Op& to = out_->ops[id];
  to = {0, 0, 0, kNone, kNone, 0, device, 0};
  to.pending = static_cast<uint16_t>(std::min<uint32_t>(op.pending, Prepared::kManyPending));
  if (op.service_class == ServiceClass::kOnline) to.flags |= Prepared::kOnline;
  EmitEdges(index, &to);

  bool simple = device != kNoDevice && op.earliest <= s_->now;
  int64_t made = 0, back = 0;  // of settled tensors
  for (uint32_t u = op.reads_begin; u < op.reads_end; ++u) {
    const TensorIndex tensor = s_->uses[u];
    if (!Satisfied(tensor, device)) {
      simple = false;
    } else if (uses_[tensor].held) {
      back += s_->tensors[tensor].bytes;
    }
  }
  for (uint32_t u = op.writes_begin; u < op.writes_end; ++u) {
    const TensorIndex tensor = s_->uses[u];
    const Uses& uses = uses_[tensor];
    if (!uses.settled) {
      simple = false;
    } else if (uses.held) {
      made += s_->tensors[tensor].bytes;
      if (uses.reads == 0) back += s_->tensors[tensor].bytes;
    }
  }
  const DurationNs duration = device == kNoDevice ? 0 : OpDuration(*s_, index, device);
  if (simple) {
    int64_t take = 0, give = back;
    if ((Reserved(op.instance) & Bit(s_->devices[device].domain)) == 0) {
      take = std::max(made, op.memory_bytes);
      // What a running op holds was taken before the snapshot.
      if (out_->running[device] != id) give += take - made;
    }
    if (take >= 0 && take <= kPackedMax && give >= 0 && give <= kPackedMax &&
        duration <= kPackedMax) {
      to.duration = static_cast<uint32_t>(duration);
      to.take = static_cast<uint32_t>(take);
      to.give = static_cast<uint32_t>(give);
      return;
    }
  }
  to.flags |= Prepared::kGeneral;
  to.take = static_cast<uint32_t>(out_->generals.size());
  EmitGeneral(index, id, made, back);
}

void Preparation::EmitGeneral(OpIndex index, uint32_t id, int64_t made, int64_t give) {
  const SnapOp& op = s_->ops[index];
  Prepared::General general;
  general.op = index;
  general.device = out_->ops[id].device;
  general.online = op.service_class == ServiceClass::kOnline;
  general.made_settled = made;
  general.give_settled = give;
  general.reads_begin = static_cast<uint32_t>(out_->slots.size());
  for (uint32_t u = op.reads_begin; u < op.reads_end; ++u) {
    if (!Satisfied(s_->uses[u], general.device)) out_->slots.push_back(Slot(s_->uses[u]));
  }
  general.writes_begin = static_cast<uint32_t>(out_->slots.size());
  for (uint32_t u = op.writes_begin; u < op.writes_end; ++u) {
    if (!uses_[s_->uses[u]].settled) out_->slots.push_back(Slot(s_->uses[u]));
  }
  general.writes_end = static_cast<uint32_t>(out_->slots.size());
  if (general.device == kNoDevice) {
    const auto found =
        std::lower_bound(in_batch_.begin(), in_batch_.end(), std::pair(index, uint32_t{0}));
    if (found != in_batch_.end() && found->first == index) {
      general.batch = found->second;
      out_->batch[found->second] = static_cast<uint32_t>(out_->generals.size());
    } else {
      out_->rollout = true;
    }
  }
  out_->generals.push_back(general);
}

void Preparation::EmitEdges(OpIndex index, Prepared::Op* out) {
  const SnapOp& op = s_->ops[index];
  bool sink = true;
  for (uint32_t e = op.successors_begin; e < op.successors_end; ++e) {
    if (s_->ops[s_->edges[e]].instance == op.instance) sink = false;
  }
  if (sink && op.instance < out_->sinks.size()) {
    out->flags |= Prepared::kSink;
    ++out_->sinks[op.instance];
  }
  const uint32_t count = op.successors_end - op.successors_begin;
  if (count > 0) out->next = id_[s_->edges[op.successors_begin]];
  if (count == 2) out->more = id_[s_->edges[op.successors_begin + 1]];
  if (count <= 2) return;
  out->flags |= Prepared::kManyNext;
  out->more = static_cast<uint32_t>(out_->edges.size());
  out_->edges.push_back(count - 1);
  for (uint32_t e = op.successors_begin + 1; e < op.successors_end; ++e)
    out_->edges.push_back(id_[s_->edges[e]]);
}

}  // namespace slice::sim
