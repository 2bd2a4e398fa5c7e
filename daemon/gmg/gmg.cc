#include "daemon/gmg/gmg.h"

#include <algorithm>

namespace slice::gmg {

RangeAllocator::RangeAllocator(uint32_t count) : free_count_(count) {
  if (count > 0) free_.push_back({0, count});
}

uint32_t RangeAllocator::Allocate(uint32_t count) {
  if (count == 0) return 0;
  const auto fit = std::find_if(free_.begin(), free_.end(),
                                [count](const Range& range) { return range.count >= count; });
  if (fit == free_.end()) return kNone;
  const uint32_t begin = fit->begin;
  fit->begin += count;
  fit->count -= count;
  if (fit->count == 0) free_.erase(fit);
  free_count_ -= count;
  return begin;
}

void RangeAllocator::Free(uint32_t begin, uint32_t count) {
  if (count == 0) return;
  const auto next =
      std::upper_bound(free_.begin(), free_.end(), begin,
                       [](uint32_t index, const Range& range) { return index < range.begin; });
  const bool has_next = next != free_.end(), has_before = next != free_.begin();
  const auto before = has_before ? std::prev(next) : next;
  SLICE_CHECK((!has_next || begin + count <= next->begin) &&
                  (!has_before || before->begin + before->count <= begin),
              "range freed twice");
  free_count_ += count;
  const bool joins_next = has_next && begin + count == next->begin;
  const bool joins_before = has_before && before->begin + before->count == begin;
  if (joins_before) {
    before->count += count;
    if (joins_next) {
      before->count += next->count;
      free_.erase(next);
    }
  } else if (joins_next) {
    next->begin = begin;
    next->count += count;
  } else {
    free_.insert(next, {begin, count});
  }
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
  for (uint32_t slab = 0; slab < kSlabCount; ++slab)
    head.used[slab] = free_records_[slab].empty() ? slabs_[slab].count : 0u;
  FindSlabs();
  __atomic_store_n(&head.magic, kMagic, __ATOMIC_RELEASE);
}

Gmg::Gmg(const Gmg& from, std::span<std::byte> memory)
    : memory_(memory),
      op_ranges_(from.op_ranges_),
      tensor_ranges_(from.tensor_ranges_),
      name_ranges_(from.name_ranges_) {
  SLICE_CHECK(memory.size() >= from.memory_.size(), "GMG memory is smaller than its layout");
  SLICE_CHECK(reinterpret_cast<uintptr_t>(memory.data()) % 64 == 0,
              "GMG memory must be aligned to 64 bytes");
  std::copy(std::begin(from.slabs_), std::end(from.slabs_), std::begin(slabs_));
  std::copy(std::begin(from.free_records_), std::end(from.free_records_),
            std::begin(free_records_));
  header() = *reinterpret_cast<const SegmentHeader*>(from.memory_.data());
  FindSlabs();
}

void Gmg::FindSlabs() {
  instances_ = At<InstanceRecord>(kInstances, 0);
  ops_ = At<OpRecord>(kOps, 0);
  tensors_ = At<TensorRecord>(kTensors, 0);
}

void Gmg::CopyInstance(const Gmg& from, uint32_t slot) {
  const InstanceRecord& record = instances_[slot] = from.instances_[slot];
  std::copy_n(from.ops_ + record.op_begin, record.op_count.load(), ops_ + record.op_begin);
  std::copy_n(from.tensors_ + record.tensor_begin, record.tensor_count.load(),
              tensors_ + record.tensor_begin);
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
  SegmentHeader& head = header();
  if (head.used[slab] <= index) head.used[slab] = index + 1;
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

Status Gmg::Fits(const graph::Template& graph) {
  if (graph.groups().size() > UINT16_MAX) {
    return Error(StatusCode::kOverflow, "the graph has %zu operators, the limit is %u",
                 graph.groups().size(), UINT16_MAX);
  }
  return Status::Ok();
}

uint32_t Gmg::AddInstance(const graph::Template& graph, const graph::BoundSizes& sizes) {
  const auto op_count = static_cast<uint32_t>(graph.groups().size());
  const auto tensor_count = static_cast<uint32_t>(graph.crossing().size());
  SLICE_CHECK(op_count <= UINT16_MAX, "template does not fit the records");
  const uint32_t op_begin = op_ranges_.Allocate(op_count);
  if (op_begin == RangeAllocator::kNone) return RangeAllocator::kNone;
  const uint32_t tensor_begin = tensor_ranges_.Allocate(tensor_count);
  if (tensor_begin == RangeAllocator::kNone) {
    op_ranges_.Free(op_begin, op_count);
    return RangeAllocator::kNone;
  }
  const uint32_t slot = AllocateRecord(kInstances);
  if (slot == RangeAllocator::kNone) {
    op_ranges_.Free(op_begin, op_count);
    tensor_ranges_.Free(tensor_begin, tensor_count);
    return RangeAllocator::kNone;
  }
  InstanceRecord& record = Write(slot);
  record.state = InstanceState::kQueued;
  record.attempt = uint16_t{1};
  record.op_begin = op_begin;
  record.op_count = op_count;
  record.tensor_begin = tensor_begin;
  record.tensor_count = tensor_count;
  FillOps(slot, graph);
  TensorRecord* const tensor = tensors_ + tensor_begin;
  for (uint32_t t = 0; t < tensor_count; ++t) {
    const int64_t bytes = sizes.crossing_bytes(t);
    SLICE_CHECK(bytes <= TensorRecord::kBytesMax, "tensor does not fit its record");
    tensor[t].Set(bytes, 0);
  }
  FillTensors(slot, graph);
  return slot;
}

void Gmg::FillOps(uint32_t slot, const graph::Template& graph) {
  InstanceRecord& record = Write(slot);
  OpRecord* entry = ops(slot);
  uint32_t frontier = 0;
  for (const graph::Group& group : graph.groups()) {
    const auto predecessors = static_cast<uint16_t>(group.predecessors.size());
    entry->state = OpState::kUnscheduled;
    entry->device = kNoDevice;
    entry->pending = predecessors;
    entry->unplaced = predecessors;
    entry->successors_unscheduled = static_cast<uint16_t>(group.successors.size());
    entry->issue_ns = entry->start_ns = entry->finish_ns = entry->predicted_start_ns = 0;
    frontier += predecessors == 0;
    ++entry;
  }
  record.ops_done = 0u;
  record.frontier_unscheduled = frontier;
  record.frontier_scheduled = 0u;
}

void Gmg::FillTensors(uint32_t slot, const graph::Template& graph) {
  TensorRecord* entry = tensors(slot);
  for (const graph::ValueUse& use : graph.crossing()) {
    entry->residency = entry->in_flight = entry->granted = uint64_t{0};
    entry->set_consumers_left(static_cast<uint32_t>(use.consumers.size()));
    ++entry;
  }
}

void Gmg::ResetInstance(uint32_t slot, const graph::Template& graph) {
  InstanceRecord& record = Write(slot);
  record.attempt = static_cast<uint16_t>(record.attempt + 1);
  FillOps(slot, graph);
  FillTensors(slot, graph);
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
  const auto add = [](auto* count, int difference) {
    if (difference != 0)
      *count = static_cast<std::decay_t<decltype(count->load())>>(count->load() + difference);
  };
  // +1: it came to be so, -1: it is no more.
  const int placed = int{IsPlacedOrLater(to)} - int{IsPlacedOrLater(from)};
  const int unscheduled = int{to == OpState::kUnscheduled} - int{from == OpState::kUnscheduled};
  int unscheduled_frontier = entry.unplaced == 0 ? unscheduled : 0;
  int scheduled_frontier = entry.successors_unscheduled > 0 ? placed : 0;
  SLICE_CHECK(placed <= 0 || entry.unplaced == 0, "placed before its predecessors");
  if (placed != 0) {
    for (const uint32_t next : group.successors) {
      OpRecord& successor = all[next];
      const bool waits = successor.state == OpState::kUnscheduled;
      SLICE_CHECK(waits || unscheduled <= 0, "un-placed before its successors");
      const bool was_ready = successor.unplaced == 0;
      add(&successor.unplaced, -placed);
      if (waits) unscheduled_frontier += int{successor.unplaced == 0} - int{was_ready};
    }
  }
  if (unscheduled != 0) {
    for (const uint32_t before : group.predecessors) {
      OpRecord& predecessor = all[before];
      const bool was_open = predecessor.successors_unscheduled > 0;
      add(&predecessor.successors_unscheduled, unscheduled);
      if (IsPlacedOrLater(predecessor.state))
        scheduled_frontier += int{predecessor.successors_unscheduled > 0} - int{was_open};
    }
  }
  add(&record.frontier_unscheduled, unscheduled_frontier);
  add(&record.frontier_scheduled, scheduled_frontier);
  if (to == OpState::kUnscheduled) {
    entry.device = kNoDevice;
    entry.predicted_start_ns = 0;
  } else if (from == OpState::kIssued && to == OpState::kPlaced) {
    entry.issue_ns = entry.predicted_start_ns = 0;
  } else if (to == OpState::kDone) {
    add(&record.ops_done, 1);
    for (const uint32_t next : group.successors) add(&all[next].pending, -1);
  }
}

}  // namespace slice::gmg
