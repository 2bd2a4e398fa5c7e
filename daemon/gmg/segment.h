// Layout of the GMG segment: the Global Mapping Graph in one block of shared memory.
//
// Owner: the engine's thread is the only writer. Readers (slicectl) hold a read-only mapping of the
// sealed memfd and use reader.h. No pointers, no locks: slabs of fixed records, found through the
// table in the header.
//
//        0 ┌──────────────────────────────────────────────────────────────────────────────┐
//          │ SegmentHeader  magic, layout version and hash, epoch, pid, slab table,       │
//          │                marks of use, policy                                          │
//     4096 ├──────────────────┬───────────────────────────────────────────────────────────┤
//          │ DeviceRecord[]   │ one for each device of the config                         │
//          │ DomainRecord[]   │ one for each memory domain                                │
//          │ TenantRecord[]   │ free when id == 0                                         │
//          │ TemplateRecord[] │ free when id == 0 ─────────┐ a range of names             │
//          │ GroupNameRecord[]│ ◄──────────────────────────┘                              │
//          │ SequenceRecord[] │ free when id == 0                                         │
//          │ InstanceRecord[] │ free when state == kFree ──┬──────┐ one range of each     │
//          │ OpRecord[]       │ ◄──────────────────────────┘      │                       │
//          │ TensorRecord[]   │ ◄─────────────────────────────────┘                       │
//          │ PieceRecord[]    │ one for each tensor of a managed or mutable set, with the │
//          │                  │ head of its access queue; free when set == 0              │
//          │ TransferRecord[] │ free when id == 0                                         │
//          │ DecisionRecord[] │ ring of the last decisions, for `slicectl explain`        │
//          └──────────────────┴───────────────────────────────────────────────────────────┘
//
// Consistency: every record but ops, tensors and names begins with a sequence counter, odd while
// the writer changes the record (seqlock). An instance's counter covers its ops and tensors too; a
// template's covers its group names. A reader copies, then checks that the counter is even and
// unchanged, or retries.
//
//   writer  counter = 7   fields ...   counter = 8
//   reader                counter? 7: busy, again         counter? 8   copy   counter? 8: good
//
// Fields are stored with release and loaded with acquire (plain moves on x86-64), so no fences are
// needed: who sees a new field sees the odd counter that went before it, and who read an old field
// reads the counter after it.
//
// What forces a bump of kLayoutVersion: a change of meaning. Changes of place or size change
// kLayoutHash by themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "common/units.h"

namespace slice::gmg {

inline constexpr uint64_t kMagic = 0x31474d4765636c53;  // "SlceGMG1"
inline constexpr uint32_t kLayoutVersion = 2;

// A field written by one thread and read by others.
template <typename T>
class Shared {
 public:
  Shared() = default;
  Shared(const Shared&) = default;
  // Not the implicit one, which would be a plain store: a = b = 0 assigns a from b.
  Shared& operator=(const Shared& other) {
    store(other.load());
    return *this;
  }
  T load() const {
    T value;
    __atomic_load(&value_, &value, __ATOMIC_ACQUIRE);
    return value;
  }
  void store(T value) { __atomic_store(&value_, &value, __ATOMIC_RELEASE); }
  operator T() const { return load(); }  // NOLINT(google-explicit-constructor)
  Shared& operator=(T value) {
    store(value);
    return *this;
  }

 private:
  T value_;
};

// Zero-padded text in words, so that a racing reader gets old or new words, never a data race.
template <size_t kBytes>
class Text {
 public:
  static_assert(kBytes % 8 == 0);
  // What does not fit is cut off, never inside a UTF-8 character.
  void Set(std::string_view text) {
    size_t length = text.size() < kBytes - 1 ? text.size() : kBytes - 1;
    while (length > 0 && length < text.size() && (text[length] & 0xc0) == 0x80) --length;
    for (size_t word = 0; word < kBytes / 8; ++word) {
      uint64_t bits = 0;
      const size_t begin = word * 8;
      if (begin < length)
        std::memcpy(&bits, text.data() + begin, length - begin < 8 ? length - begin : 8);
      words_[word] = bits;
    }
  }
  std::string Get() const {
    char buffer[kBytes];
    for (size_t word = 0; word < kBytes / 8; ++word) {
      const uint64_t bits = words_[word];
      std::memcpy(buffer + word * 8, &bits, 8);
    }
    buffer[kBytes - 1] = 0;
    return buffer;
  }

 private:
  Shared<uint64_t> words_[kBytes / 8];
};

// Operator states (scheduling rules, section 1):
//
//   unscheduled -> placed -> issued -> launched -> done | failed
//        ^          |  ^       |
//        +----------+  +-------+  revocable: re-placed, recalled;  any but done and failed ->
//        cancelled
enum class OpState : uint8_t {
  kUnscheduled,
  kPlaced,
  kIssued,
  kLaunched,
  kDone,
  kFailed,
  kCancelled
};
inline constexpr size_t kOpStateCount = 7;

//   free -> queued -> started -> ending -> free
//                        ^ new attempt: stays started, all ops unscheduled
enum class InstanceState : uint8_t { kFree, kQueued, kStarted, kEnding };

enum class TransferState : uint8_t { kWatching, kIntent, kAdmitted };

struct SlabEntry {
  uint64_t offset;
  uint32_t count;
  uint32_t stride;
};
enum Slab : uint32_t {
  kDevices,
  kDomains,
  kTenants,
  kTemplates,
  kGroupNames,
  kSequences,
  kInstances,
  kOps,
  kTensors,
  kPieces,
  kTransfers,
  kDecisions,
  kSlabCount
};

struct SegmentHeader {
  uint64_t magic;  // written last: a reader that sees it sees the table
  uint32_t layout_version;
  uint32_t reserved;
  uint64_t layout_hash;
  uint64_t epoch;  // of the daemon's start
  uint64_t daemon_pid;
  uint64_t segment_bytes;
  SlabEntry slabs[kSlabCount];
  // Records from here on were never used: a reader stops there. Whole slab for those that are not
  // handed out record by record.
  Shared<uint32_t> used[kSlabCount];
  Shared<uint64_t> decision_count;  // ever written; newest at (count - 1) % slab count
  Shared<int64_t> updated_ns;
  Text<32> policy;
};
static_assert(sizeof(SegmentHeader) <= 4096, "slabs begin at 4096");

struct DeviceRecord {
  Shared<uint32_t> sequence;
  Shared<uint8_t> domain;
  Shared<uint8_t> kind;
  Shared<uint8_t> hosts_online;
  Shared<uint8_t> overrun;  // running op is past three times its prediction
  Text<32> name;
  Shared<uint64_t> running_instance;  // 0: idle
  Shared<uint32_t> running_op;
  Shared<uint32_t> issued;  // handed over, not launched
  Shared<uint32_t> placed;
  Shared<uint32_t> ops_done;
  Shared<int64_t> running_start_ns;
  Shared<int64_t> free_at_ns;  // predicted
  Shared<int64_t> busy_ns;
  Shared<int64_t> phantom_from_ns;
  Shared<int64_t> phantom_until_ns;
};
struct DomainRecord {
  Shared<uint32_t> sequence;
  Shared<uint32_t> reserved;
  Text<32> name;
  Shared<int64_t> pool_bytes;
  Shared<int64_t> lane_bytes;
  Shared<int64_t> reserved_bytes;
  Shared<int64_t> granted_bytes;
  Shared<int64_t> retained_bytes_max;
  Shared<int64_t> retained_bytes;
};
struct TenantRecord {
  Shared<uint32_t> sequence;
  Shared<uint32_t> id;
  Text<48> name;
  Shared<uint32_t> uid;
  Shared<uint32_t> pid;
  Shared<uint8_t> service_class;
  Shared<uint8_t> home_device;
  Shared<uint16_t> removing;
  Shared<uint32_t> live_instances;
  Shared<int64_t> memory_bytes_max;
  Shared<int64_t> pool_bytes;
  Shared<int64_t> retained_bytes;
  Shared<uint64_t> submits;
  Shared<uint64_t> completions;
};
struct TemplateRecord {
  Shared<uint32_t> sequence;
  Shared<uint32_t> id;
  Shared<uint64_t> content_hash;
  Text<64> name;
  Shared<uint32_t> name_begin;   // in kGroupNames
  Shared<uint32_t> group_count;  // names kept: min(groups, what was free)
};
struct GroupNameRecord {
  Text<48> name;
};
struct SequenceRecord {
  Shared<uint32_t> sequence;
  Shared<uint32_t> tenant;
  Shared<uint64_t> id;
  Shared<uint64_t> number;  // the client's
  Shared<uint8_t> service_class;
  Shared<uint8_t> device;  // where its last step ended
  Shared<uint16_t> reserved;
  Shared<int32_t> priority;
  Shared<int64_t> arrival_ns;
  Shared<int64_t> deadline_ns;
  Shared<uint32_t> steps;  // completed
  Shared<uint32_t> live;
};
struct InstanceRecord {
  Shared<uint32_t> sequence;
  Shared<InstanceState> state;
  Shared<uint8_t> service_class;
  Shared<uint16_t> attempt;
  Shared<uint64_t> id;
  Shared<uint32_t> tenant;
  Shared<uint32_t> template_id;
  Shared<uint32_t> binding;
  Shared<int32_t> priority;
  Shared<uint64_t> sequence_id;
  Shared<uint64_t> cookie;
  Shared<int64_t> submit_ns;
  Shared<int64_t> start_ns;  // first op launched; 0 = none
  Shared<int64_t> finish_ns;
  Shared<int64_t> predicted_finish_ns;
  Shared<int64_t> deadline_ns;
  Shared<uint32_t> op_begin, op_count;
  Shared<uint32_t> tensor_begin, tensor_count;
  Shared<uint32_t> ops_done;
  Shared<uint32_t> frontier_unscheduled;  // ops that a round may place now
  Shared<uint32_t> frontier_scheduled;    // placed or later, with unscheduled successors
  Shared<uint32_t> reserved;
};
// Counts of a template's groups fit in 16 bits (graph::Limits::groups_max).
struct OpRecord {
  Shared<OpState> state;
  Shared<uint8_t> device;  // placement, when placed or later
  Shared<uint8_t> home_domain;
  Shared<uint8_t> reserved;
  Shared<uint16_t> pending;   // predecessors not done
  Shared<uint16_t> unplaced;  // predecessors not placed
  Shared<uint16_t> successors_unscheduled;
  Shared<int64_t> duration_ns;  // predicted
  Shared<int64_t> issue_ns;
  Shared<int64_t> start_ns;
  Shared<int64_t> finish_ns;
  // Placed: not issued before it (0: any time). Issued and later: as predicted at its issue, the
  // finish a duration behind it.
  Shared<int64_t> predicted_start_ns;
};
static_assert(sizeof(OpRecord) == 56);
// A value that crosses groups. Its producer is the template's to tell.
struct TensorRecord {
  static constexpr int64_t kBytesMax = (int64_t{1} << 48) - 1;
  Shared<uint64_t> size_and_uses;  // bytes << 16 | consumers left
  Shared<uint64_t> residency;      // domains with a valid copy
  Shared<uint64_t> in_flight;      // domains that a transfer brings it to
  Shared<uint64_t> granted;        // copies paid by a grant, not by the reservation

  int64_t bytes() const { return static_cast<int64_t>(size_and_uses >> 16); }
  uint32_t consumers_left() const { return static_cast<uint32_t>(size_and_uses & 0xffff); }
  void Set(int64_t bytes, uint32_t consumers) {
    size_and_uses = static_cast<uint64_t>(bytes) << 16 | consumers;
  }
  void set_consumers_left(uint32_t consumers) { Set(bytes(), consumers); }
};
static_assert(sizeof(TensorRecord) == 32);
// An entry of a piece's access queue (access_queue.h). The owner's id is that of an instance, a
// transfer or a tenant command's part, by kind.
struct QueueEntryRecord {
  Shared<uint64_t> owner;
  Shared<uint8_t> kind;  // AccessKind
  Shared<uint8_t> write;
  Shared<uint8_t> resets;
  Shared<uint8_t> reserved;
  Shared<uint32_t> uses_left;  // ops of the instance that touch the piece and are not done
};
enum class AccessKind : uint8_t { kInstance, kCommand, kMove };
inline constexpr uint32_t kQueueEntriesShown = 8;
struct PieceRecord {
  Shared<uint32_t> sequence;
  Shared<uint32_t> set;
  Shared<uint32_t> tensor;
  Shared<uint32_t> tenant;
  Shared<uint8_t> domain;
  Shared<uint8_t> lost;
  Shared<uint8_t> moving;
  Shared<uint8_t> managed;  // 0: imported mutable, pinned
  Shared<uint32_t> queue_length;
  Shared<uint64_t> version;
  Shared<int64_t> bytes;
  QueueEntryRecord queue[kQueueEntriesShown];  // the first ones
};
struct TransferRecord {
  Shared<uint32_t> sequence;
  Shared<uint32_t> value;  // value index or tensor of the set
  Shared<uint64_t> id;
  Shared<uint64_t> instance;  // 0: a set's tensor
  Shared<uint32_t> set;
  Shared<TransferState> state;
  Shared<uint8_t> source_domain, destination_domain;
  Shared<uint8_t> service_class;
  Shared<int64_t> bytes;
  Shared<int64_t> requested_ns;
  Shared<int64_t> admitted_ns;
};
// What a decision was made by.
enum class DecisionBasis : uint8_t {
  kLevels,     // simulated outcomes, level by level (`slice`, `online-only`)
  kFinish,     // the batch's simulated finish (`priority`)
  kQueue,      // queued work; only the chosen device is simulated (`fifo`)
  kOneDevice,  // nothing: one device could run it, nothing was compared
};
inline constexpr size_t kDecisionCandidatesMax = 6;
struct DecisionCandidate {
  Shared<uint8_t> defer, device, feasible, chosen;
  Shared<uint8_t> beaten;  // not simulated to its end: the figures are the least that they would be
  Shared<uint8_t> reserved8;
  Shared<uint16_t> reserved16;
  Shared<int32_t> lateness_bucket;
  Shared<int32_t> online_added_bucket;
  Shared<int32_t> batch_finish_bucket;
  Shared<int32_t> queued_bucket;
  Shared<int64_t> bytes_moved;
  Shared<int64_t> batch_finish_ns;
};
struct DecisionRecord {
  Shared<uint32_t> sequence;
  Shared<uint32_t> tenant;
  Shared<uint64_t> number;  // 1 + its index in the stream of decisions
  Shared<int64_t> time_ns;
  Shared<uint64_t> instance;
  Shared<uint32_t> op;  // first of the batch
  Shared<uint32_t> op_count;
  Shared<uint8_t> device;  // 0xff: deferred
  Shared<uint8_t> service_class;
  Shared<uint16_t> candidate_count;  // of the decision; the first ones, and the chosen, are kept
  Shared<DecisionBasis> basis;
  Shared<uint8_t> reserved8;
  Shared<uint16_t> reserved16;
  Shared<int64_t> retry_at_ns;
  DecisionCandidate candidates[kDecisionCandidatesMax];
};

// The fields whose place readers depend on, hashed. A field missing here is covered by its record's
// size only.
struct LayoutField {
  uint32_t offset;
  uint32_t bytes;
};
#define SLICE_GMG_FIELD(record, field)                                                           \
  LayoutField {                                                                                  \
    static_cast<uint32_t>(offsetof(record, field)), static_cast<uint32_t>(sizeof(record::field)) \
  }
#define SLICE_GMG_RECORD(record) \
  LayoutField { 0xffffffff, static_cast<uint32_t>(sizeof(record)) }
inline constexpr LayoutField kLayoutFields[] = {
    SLICE_GMG_RECORD(SegmentHeader),
    SLICE_GMG_FIELD(SegmentHeader, slabs),
    SLICE_GMG_FIELD(SegmentHeader, used),
    SLICE_GMG_FIELD(SegmentHeader, decision_count),
    SLICE_GMG_FIELD(SegmentHeader, policy),
    SLICE_GMG_RECORD(DeviceRecord),
    SLICE_GMG_FIELD(DeviceRecord, domain),
    SLICE_GMG_FIELD(DeviceRecord, name),
    SLICE_GMG_FIELD(DeviceRecord, running_instance),
    SLICE_GMG_FIELD(DeviceRecord, free_at_ns),
    SLICE_GMG_FIELD(DeviceRecord, phantom_until_ns),
    SLICE_GMG_RECORD(DomainRecord),
    SLICE_GMG_FIELD(DomainRecord, pool_bytes),
    SLICE_GMG_FIELD(DomainRecord, retained_bytes),
    SLICE_GMG_RECORD(TenantRecord),
    SLICE_GMG_FIELD(TenantRecord, name),
    SLICE_GMG_FIELD(TenantRecord, memory_bytes_max),
    SLICE_GMG_FIELD(TenantRecord, completions),
    SLICE_GMG_RECORD(TemplateRecord),
    SLICE_GMG_FIELD(TemplateRecord, name),
    SLICE_GMG_FIELD(TemplateRecord, name_begin),
    SLICE_GMG_FIELD(TemplateRecord, group_count),
    SLICE_GMG_RECORD(GroupNameRecord),
    SLICE_GMG_RECORD(SequenceRecord),
    SLICE_GMG_FIELD(SequenceRecord, number),
    SLICE_GMG_FIELD(SequenceRecord, deadline_ns),
    SLICE_GMG_RECORD(InstanceRecord),
    SLICE_GMG_FIELD(InstanceRecord, state),
    SLICE_GMG_FIELD(InstanceRecord, id),
    SLICE_GMG_FIELD(InstanceRecord, sequence_id),
    SLICE_GMG_FIELD(InstanceRecord, submit_ns),
    SLICE_GMG_FIELD(InstanceRecord, op_begin),
    SLICE_GMG_FIELD(InstanceRecord, tensor_begin),
    SLICE_GMG_FIELD(InstanceRecord, frontier_scheduled),
    SLICE_GMG_RECORD(OpRecord),
    SLICE_GMG_FIELD(OpRecord, state),
    SLICE_GMG_FIELD(OpRecord, device),
    SLICE_GMG_FIELD(OpRecord, duration_ns),
    SLICE_GMG_FIELD(OpRecord, predicted_start_ns),
    SLICE_GMG_RECORD(TensorRecord),
    SLICE_GMG_FIELD(TensorRecord, residency),
    SLICE_GMG_RECORD(QueueEntryRecord),
    SLICE_GMG_FIELD(QueueEntryRecord, uses_left),
    SLICE_GMG_RECORD(PieceRecord),
    SLICE_GMG_FIELD(PieceRecord, domain),
    SLICE_GMG_FIELD(PieceRecord, bytes),
    SLICE_GMG_FIELD(PieceRecord, queue),
    SLICE_GMG_RECORD(TransferRecord),
    SLICE_GMG_FIELD(TransferRecord, state),
    SLICE_GMG_FIELD(TransferRecord, admitted_ns),
    SLICE_GMG_RECORD(DecisionCandidate),
    SLICE_GMG_FIELD(DecisionCandidate, beaten),
    SLICE_GMG_FIELD(DecisionCandidate, queued_bucket),
    SLICE_GMG_RECORD(DecisionRecord),
    SLICE_GMG_FIELD(DecisionRecord, basis),
    SLICE_GMG_FIELD(DecisionRecord, candidates),
};
#undef SLICE_GMG_FIELD
#undef SLICE_GMG_RECORD

constexpr uint64_t ComputeLayoutHash() {
  uint64_t hash = 0xcbf29ce484222325;
  for (const LayoutField& field : kLayoutFields) {
    hash = (hash ^ field.offset) * 0x100000001b3;
    hash = (hash ^ field.bytes) * 0x100000001b3;
  }
  return hash;
}
inline constexpr uint64_t kLayoutHash = ComputeLayoutHash();

// How many records of each kind a segment holds.
struct Capacity {
  uint32_t counts[kSlabCount] = {};
  static Capacity For(uint32_t device_count, uint32_t domain_count, uint32_t live_ops_max);
};
// Fills the slab table; returns the segment's size.
uint64_t LayOut(const Capacity& capacity, SlabEntry (&slabs)[kSlabCount]);

}  // namespace slice::gmg
