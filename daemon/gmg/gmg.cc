#include "daemon/gmg/gmg.h"

#include <algorithm>

namespace slice::gmg {

bool IsLegal(OpState from, OpState to) {
  using S = OpState;
  switch (from) {
    case S::kUnscheduled:
      return to == S::kPlaced || to == S::kCancelled;
    case S::kPlaced:
      return to == S::kIssued || to == S::kUnscheduled || to == S::kCancelled;
    case S::kIssued:
      return to == S::kLaunched || to == S::kPlaced || to == S::kFailed || to == S::kCancelled;
    case S::kLaunched:
      return to == S::kDone || to == S::kFailed || to == S::kCancelled;
    case S::kDone:
    case S::kFailed:
    case S::kCancelled:
      return false;
  }
  return false;
}

RangeAllocator::RangeAllocator(uint32_t count) : free_count_(count) {
  if (count > 0) free_.emplace(0, count);
}

uint32_t RangeAllocator::Allocate(uint32_t count) {
  if (count == 0) return 0;
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < count) continue;
    const uint32_t begin = it->first;
    const uint32_t rest = it->second - count;
    auto node = free_.extract(it);  // reuses the node: no allocation
    if (rest > 0) {
      node.key() = begin + count;
      node.mapped() = rest;
      free_.insert(std::move(node));
    }
    free_count_ -= count;
    return begin;
  }
  return kNone;
}

void RangeAllocator::Free(uint32_t begin, uint32_t count) {
  if (count == 0) return;
  free_count_ += count;
  auto next = free_.lower_bound(begin);
  SLICE_CHECK(next == free_.end() || begin + count <= next->first, "range freed twice");
  if (next != free_.end() && next->first == begin + count) {
    count += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    SLICE_CHECK(before->first + before->second <= begin, "range freed twice");
    if (before->first + before->second == begin) {
      before->second += count;
      return;
    }
  }
  free_.emplace(begin, count);
}

size_t Gmg::Bytes(const Capacity& capacity) {
  SlabEntry slabs[kSlabCount];
  return LayOut(capacity, slabs);
}

Gmg::Gmg(std::span<std::byte> memory, const Capacity& capacity, uint64_t epoch, uint64_t daemon_pid)
    : memory_(memory),
      op_ranges_(capacity.counts[kOps]),
      tensor_ranges_(capacity.counts[kTensors]),
      name_ranges_(capacity.counts[kGroupNames]) {
  const uint64_t bytes = LayOut(capacity, slabs_);
  SLICE_CHECK(memory.size() >= bytes, "GMG memory is smaller than its layout");
  SLICE_CHECK(reinterpret_cast<uintptr_t>(memory.data()) % 64 == 0,
              "GMG memory must be aligned to 64 bytes");
  for (const Slab slab : {kTenants, kTemplates, kSequences, kInstances, kPieces, kTransfers}) {
    free_records_[slab].resize(slabs_[slab].count);
    for (uint32_t i = 0; i < slabs_[slab].count; ++i)
      free_records_[slab][i] = slabs_[slab].count - 1 - i;
  }
  open_.reserve(64);
  SegmentHeader& head = header();
  head.layout_version = kLayoutVersion;
  head.layout_hash = kLayoutHash;
  head.epoch = epoch;
  head.daemon_pid = daemon_pid;
  head.segment_bytes = bytes;
  std::copy(std::begin(slabs_), std::end(slabs_), std::begin(head.slabs));
  instances_ = At<InstanceRecord>(kInstances, 0);
  ops_ = At<OpRecord>(kOps, 0);
  tensors_ = At<TensorRecord>(kTensors, 0);
  __atomic_store_n(&head.magic, kMagic, __ATOMIC_RELEASE);
}

void Gmg::BeginWrite(Shared<uint32_t>* sequence) {
  const uint32_t value = *sequence;
  SLICE_CHECK(value % 2 == 0, "record opened twice");
  *sequence = value + 1;
}

void Gmg::EndWrite(Shared<uint32_t>* sequence) { *sequence = *sequence + 1; }

uint32_t Gmg::AllocateRecord(Slab slab) {
  if (free_records_[slab].empty()) return RangeAllocator::kNone;
  const uint32_t index = free_records_[slab].back();
  free_records_[slab].pop_back();
  return index;
}

void Gmg::FreeRecord(Slab slab, uint32_t index) { free_records_[slab].push_back(index); }

uint32_t Gmg::AddTemplate(TemplateId id, const graph::Template& graph) {
  const uint32_t index = AllocateRecord(kTemplates);
  if (index == RangeAllocator::kNone) return index;
  TemplateRecord* const record = At<TemplateRecord>(kTemplates, index);
  auto count = static_cast<uint32_t>(graph.groups().size());
  uint32_t begin = name_ranges_.Allocate(count);
  if (begin == RangeAllocator::kNone)
    begin = count = 0;  // names are for people: shown as numbers then
  UpdateRecord(record, [&] {
    record->id = id.value;
    record->content_hash = graph.content_hash();
    record->name.Set(graph.name());
    record->name_begin = begin;
    record->group_count = count;
    for (uint32_t g = 0; g < count; ++g)
      At<GroupNameRecord>(kGroupNames, begin + g)->name.Set(graph.groups()[g].name);
  });
  return index;
}

void Gmg::RemoveTemplate(uint32_t index) {
  TemplateRecord* const record = At<TemplateRecord>(kTemplates, index);
  name_ranges_.Free(record->name_begin, record->group_count);
  UpdateRecord(record, [&] {
    record->id = 0u;
    record->group_count = 0u;
  });
  FreeRecord(kTemplates, index);
}

InstanceRecord& Gmg::Write(uint32_t slot) {
  InstanceRecord& record = instances_[slot];
  if (record.sequence % 2 == 0) {
    BeginWrite(&record.sequence);
    open_.push_back(slot);
  }
  return record;
}

void Gmg::CloseWrites() {
  for (const uint32_t slot : open_) EndWrite(&instances_[slot].sequence);
  open_.clear();
}

uint32_t Gmg::AddInstance(const graph::Template& graph, const graph::BoundSizes& sizes) {
  const auto op_count = static_cast<uint32_t>(graph.groups().size());
  const auto tensor_count = static_cast<uint32_t>(graph.crossing().size());
  const uint32_t op_begin = op_ranges_.Allocate(op_count);
  if (op_begin == RangeAllocator::kNone) return RangeAllocator::kNone;
  const uint32_t tensor_begin = tensor_ranges_.Allocate(tensor_count);
  const uint32_t slot =
      tensor_begin == RangeAllocator::kNone ? RangeAllocator::kNone : AllocateRecord(kInstances);
  if (slot == RangeAllocator::kNone) {
    op_ranges_.Free(op_begin, op_count);
    if (tensor_begin != RangeAllocator::kNone) tensor_ranges_.Free(tensor_begin, tensor_count);
    return slot;
  }
  InstanceRecord& record = Write(slot);
  record.state = InstanceState::kQueued;
  record.attempt = uint16_t{1};
  record.op_begin = op_begin;
  record.op_count = op_count;
  record.tensor_begin = tensor_begin;
  record.tensor_count = tensor_count;
  for (uint32_t t = 0; t < tensor_count; ++t)
    tensors_[tensor_begin + t].bytes = sizes.crossing_bytes[t];
  FillOps(slot, graph);
  return slot;
}

void Gmg::FillOps(uint32_t slot, const graph::Template& graph) {
  InstanceRecord& record = Write(slot);
  OpRecord* const op_records = ops(slot);
  TensorRecord* const tensor_records = tensors(slot);
  uint32_t frontier = 0;
  for (uint32_t op = 0; op < record.op_count; ++op) {
    const graph::Group& group = graph.groups()[op];
    OpRecord& entry = op_records[op];
    const auto predecessors = static_cast<uint32_t>(group.predecessors.size());
    entry.state = OpState::kUnscheduled;
    entry.device = kNoDevice;
    entry.pending = predecessors;
    entry.unplaced = predecessors;
    entry.successors_unscheduled = static_cast<uint32_t>(group.successors.size());
    for (Shared<int64_t>* const time : {&entry.issue_ns, &entry.start_ns, &entry.finish_ns,
                                        &entry.predicted_start_ns, &entry.predicted_finish_ns}) {
      *time = 0;
    }
    frontier += predecessors == 0;
  }
  for (uint32_t t = 0; t < record.tensor_count; ++t) {
    const graph::ValueUse& use = graph.crossing()[t];
    TensorRecord& entry = tensor_records[t];
    entry.residency = uint64_t{0};
    entry.in_flight = uint64_t{0};
    entry.granted = uint64_t{0};
    entry.consumers_left = static_cast<uint32_t>(use.consumers.size());
    entry.producer = use.producer;
  }
  record.ops_done = 0u;
  record.frontier_unscheduled = frontier;
  record.frontier_scheduled = 0u;
}

void Gmg::ResetInstance(uint32_t slot, const graph::Template& graph) {
  InstanceRecord& record = Write(slot);
  record.attempt = static_cast<uint16_t>(record.attempt + 1);
  FillOps(slot, graph);
}

void Gmg::FreeInstance(uint32_t slot) {
  InstanceRecord& record = Write(slot);
  op_ranges_.Free(record.op_begin, record.op_count);
  tensor_ranges_.Free(record.tensor_begin, record.tensor_count);
  record.state = InstanceState::kFree;
  record.id = uint64_t{0};
  record.op_count = 0u;
  record.tensor_count = 0u;
  FreeRecord(kInstances, slot);
}

void Gmg::SetOpState(uint32_t slot, const graph::Template& graph, uint32_t op, OpState to) {
  InstanceRecord& record = Write(slot);
  OpRecord* const all = ops(slot);
  OpRecord& entry = all[op];
  const OpState from = entry.state;
  SLICE_CHECK(IsLegal(from, to), "operator state transition");
  entry.state = to;
  const graph::Group& group = graph.groups()[op];
  const bool was_placed = IsPlacedOrLater(from), is_placed = IsPlacedOrLater(to);
  if (!was_placed && is_placed) {
    SLICE_CHECK(entry.unplaced == 0, "placed before its predecessors");
    record.frontier_unscheduled = record.frontier_unscheduled - 1;
    if (entry.successors_unscheduled > 0) record.frontier_scheduled = record.frontier_scheduled + 1;
    for (const uint32_t next : group.successors) {
      all[next].unplaced = all[next].unplaced - 1;
      if (all[next].unplaced == 0 && all[next].state == OpState::kUnscheduled) {
        record.frontier_unscheduled = record.frontier_unscheduled + 1;
      }
    }
  } else if (was_placed && to == OpState::kUnscheduled) {
    entry.device = kNoDevice;
    record.frontier_unscheduled = record.frontier_unscheduled + 1;
    if (entry.successors_unscheduled > 0) record.frontier_scheduled = record.frontier_scheduled - 1;
    for (const uint32_t next : group.successors) {
      SLICE_CHECK(all[next].state == OpState::kUnscheduled, "un-placed before its successors");
      if (all[next].unplaced == 0) record.frontier_unscheduled = record.frontier_unscheduled - 1;
      all[next].unplaced = all[next].unplaced + 1;
    }
  }
  if (was_placed != is_placed && to != OpState::kCancelled && to != OpState::kFailed) {
    for (const uint32_t before : group.predecessors) {
      const uint32_t left = all[before].successors_unscheduled;
      const uint32_t now_left = is_placed ? left - 1 : left + 1;
      all[before].successors_unscheduled = now_left;
      if (!IsPlacedOrLater(all[before].state)) continue;
      if (left > 0 && now_left == 0) record.frontier_scheduled = record.frontier_scheduled - 1;
      if (left == 0 && now_left > 0) record.frontier_scheduled = record.frontier_scheduled + 1;
    }
  }
  if (to == OpState::kDone) {
    record.ops_done = record.ops_done + 1;
    for (const uint32_t next : group.successors) all[next].pending = all[next].pending - 1;
  }
}

}  // namespace slice::gmg
