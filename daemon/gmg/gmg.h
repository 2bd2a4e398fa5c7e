// The Global Mapping Graph: the engine's store of live instances, laid out in the segment
// (segment.h) so that readers see the same arrays that the engine works on.
//
// Owner: the engine. Threads: its one. Keeps operator states with their legal transitions and both
// frontiers.
//
// Allocates nothing once it is warm.
//
// Writing: Write(slot) opens an instance's block (counter odd) at its first change; CloseWrites()
// at the end of each engine call closes all, so that a reader never sees half an event.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/status.h"
#include "common/units.h"
#include "daemon/gmg/segment.h"
#include "daemon/graph/template.h"

namespace slice::gmg {

// Which transitions there are (scheduling rules, section 1): row = from, column = to.
inline constexpr bool kLegalTransitions[kOpStateCount][kOpStateCount] = {
    // unscheduled placed issued launched done failed cancelled
    {0, 1, 0, 0, 0, 0, 1},  // unscheduled
    {1, 0, 1, 0, 0, 0, 1},  // placed: committed, or re-placed later
    {0, 1, 0, 1, 0, 1, 1},  // issued: launched, or recalled
    {0, 0, 0, 0, 1, 1, 1},  // launched: runs to its end
    {0, 0, 0, 0, 0, 0, 0},  // done
    {0, 0, 0, 0, 0, 0, 0},  // failed
    {0, 0, 0, 0, 0, 0, 0},  // cancelled
};
inline bool IsLegal(OpState from, OpState to) {
  return kLegalTransitions[static_cast<size_t>(from)][static_cast<size_t>(to)];
}
// Placed, issued, launched or done: what the scheduled frontier is made of.
inline bool IsPlacedOrLater(OpState state) {
  return state >= OpState::kPlaced && state <= OpState::kDone;
}

// First-fit allocator of index ranges in a slab. Free ranges merge. Uses the heap only for more
// holes than there ever were.
class RangeAllocator {
 public:
  explicit RangeAllocator(uint32_t count);
  static constexpr uint32_t kNone = 0xffffffff;
  uint32_t Allocate(uint32_t count);  // kNone: no free range that long; 0 for an empty range
  void Free(uint32_t begin, uint32_t count);
  uint32_t free_count() const { return free_count_; }

 private:
  struct Range {
    uint32_t begin, count;
  };
  std::vector<Range> free_;  // ascending; never two that touch
  uint32_t free_count_ = 0;
};

class Gmg {
 public:
  static size_t Bytes(const Capacity& capacity);
  // `memory`: zeroed, at least Bytes(capacity), aligned to 64; outlives the object.
  Gmg(std::span<std::byte> memory, const Capacity& capacity, uint64_t epoch, uint64_t daemon_pid);
  // A store with the same records in use as `from`, in memory of its own (as above). Instances come
  // with CopyInstance; other records are empty until they are written.
  Gmg(const Gmg& from, std::span<std::byte> memory);
  void CopyInstance(const Gmg& from, uint32_t slot);

  template <typename Record>
  Record* At(Slab slab, uint32_t index) {
    SLICE_CHECK(index < slabs_[slab].count && sizeof(Record) == slabs_[slab].stride,
                "GMG index or record type");
    return reinterpret_cast<Record*>(memory_.data() + slabs_[slab].offset) + index;
  }
  template <typename Record>
  const Record* At(Slab slab, uint32_t index) const {
    return const_cast<Gmg*>(this)->At<Record>(slab, index);
  }
  uint32_t count(Slab slab) const { return slabs_[slab].count; }
  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(memory_.data()); }

  // A free record of a slab whose index 0.. are handed out here (all but devices, domains, ops,
  // tensors, names).
  uint32_t AllocateRecord(Slab slab);  // RangeAllocator::kNone: full
  void FreeRecord(Slab slab, uint32_t index);

  // Changes one record under its counter: UpdateRecord(&record, [&] { record.x = 1; }).
  template <typename Record, typename Change>
  static void UpdateRecord(Record* record, Change change) {
    BeginWrite(&record->sequence);
    change();
    EndWrite(&record->sequence);
  }

  // ---- templates ----
  uint32_t AddTemplate(TemplateId id, const graph::Template& graph);
  void RemoveTemplate(uint32_t record);

  // ---- instances ----
  // Whether the records can count a template's groups and uses. Errors: OVERFLOW.
  static Status Fits(const graph::Template& graph);
  // Allocates op and tensor ranges and fills them: all unscheduled, nothing resident. kNone, and
  // nothing changed: a slab is full. CHECKs the template against Fits().
  uint32_t AddInstance(const graph::Template& graph, const graph::BoundSizes& sizes);
  void FreeInstance(uint32_t slot);
  // New attempt: all ops unscheduled, nothing resident.
  void ResetInstance(uint32_t slot, const graph::Template& graph);

  InstanceRecord& instance(uint32_t slot) { return instances_[slot]; }
  // Opens the block for writing and returns it.
  InstanceRecord& Write(uint32_t slot);
  OpRecord* ops(uint32_t slot) { return ops_ + instances_[slot].op_begin.load(); }
  const OpRecord* ops(uint32_t slot) const { return ops_ + instances_[slot].op_begin.load(); }
  const TensorRecord* tensors(uint32_t slot) const {
    return tensors_ + instances_[slot].tensor_begin.load();
  }
  TensorRecord* tensors(uint32_t slot) { return tensors_ + instances_[slot].tensor_begin.load(); }

  // The one place where an op's state changes. CHECKs that the transition is legal; keeps pending
  // counts and both frontiers; `graph` is the instance's template.
  void SetOpState(uint32_t slot, const graph::Template& graph, uint32_t op, OpState to);

  uint32_t ops_free() const { return op_ranges_.free_count(); }
  uint32_t ops_live() const { return count(kOps) - op_ranges_.free_count(); }

  void CloseWrites();

 private:
  static void BeginWrite(Shared<uint32_t>* sequence);
  static void EndWrite(Shared<uint32_t>* sequence);
  void FindSlabs();
  void FillOps(uint32_t slot, const graph::Template& graph);
  void FillTensors(uint32_t slot, const graph::Template& graph);

  std::span<std::byte> memory_;
  SlabEntry slabs_[kSlabCount];
  InstanceRecord* instances_ = nullptr;
  OpRecord* ops_ = nullptr;
  TensorRecord* tensors_ = nullptr;
  std::vector<uint32_t> free_records_[kSlabCount];
  RangeAllocator op_ranges_, tensor_ranges_, name_ranges_;
  std::vector<uint32_t> open_;  // instances whose block is open
};

}  // namespace slice::gmg
