// Reads the GMG segment from a read-only mapping: what slicectl shows. Needs no engine.
//
// Threads: any; several readers at once. Blocks: bounded retries (tens of milliseconds at most)
// against a writer that is changing a record; a record that stays busy is left out (the writer died
// inside, or the reader was starved). Nothing in the mapping is trusted: every offset and count is
// checked against the mapping's size, so that a damaged segment gives an error, never a fault.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"
#include "daemon/gmg/segment.h"

namespace slice::gmg {

struct DeviceView {
  uint32_t index = 0;
  std::string name;
  uint32_t domain = 0, kind = 0;
  bool hosts_online = false, overrun = false;
  uint64_t running_instance = 0;
  uint32_t running_op = 0, issued = 0, placed = 0, ops_done = 0;
  int64_t running_start_ns = 0, free_at_ns = 0, busy_ns = 0, phantom_from_ns = 0,
          phantom_until_ns = 0;
};
struct DomainView {
  uint32_t index = 0;
  std::string name;
  int64_t pool_bytes = 0, lane_bytes = 0, reserved_bytes = 0, granted_bytes = 0;
  int64_t retained_bytes_max = 0, retained_bytes = 0;
};
struct TenantView {
  uint32_t id = 0;
  std::string name;
  uint32_t uid = 0, pid = 0, home_device = 0, live_instances = 0;
  bool online = false, removing = false;
  int64_t memory_bytes_max = 0, pool_bytes = 0, retained_bytes = 0;
  uint64_t submits = 0, completions = 0;
};
struct TemplateView {
  uint32_t id = 0;
  uint64_t content_hash = 0;
  std::string name;
  std::vector<std::string> group_names;
};
struct SequenceView {
  uint64_t id = 0, number = 0;
  uint32_t tenant = 0, device = 0, steps = 0, live = 0;
  bool online = false;
  int32_t priority = 0;
  int64_t arrival_ns = 0, deadline_ns = 0;
};
struct OpView {
  OpState state = OpState::kUnscheduled;
  uint32_t device = 0, home_domain = 0, pending = 0;
  // Predictions: 0 until the op is issued.
  int64_t duration_ns = 0, issue_ns = 0, start_ns = 0, finish_ns = 0, predicted_start_ns = 0,
          predicted_finish_ns = 0;
};
struct TensorView {
  int64_t bytes = 0;
  uint64_t residency = 0, in_flight = 0;
  uint32_t consumers_left = 0;
};
struct InstanceView {
  uint64_t id = 0;
  InstanceState state = InstanceState::kFree;
  bool online = false;
  uint32_t attempt = 0, tenant = 0, template_id = 0, binding = 0, ops_done = 0;
  int32_t priority = 0;
  uint64_t sequence_id = 0, cookie = 0;
  int64_t submit_ns = 0, start_ns = 0, finish_ns = 0, predicted_finish_ns = 0, deadline_ns = 0;
  uint32_t frontier_unscheduled = 0, frontier_scheduled = 0;
  std::vector<OpView> ops;
  std::vector<TensorView> tensors;
};
struct QueueEntryView {
  AccessKind kind = AccessKind::kInstance;
  uint64_t owner = 0;  // id of the instance, command part or transfer
  bool write = false, resets = false;
  uint32_t uses_left = 0;
  // Entries before it that it waits for; 0: it may go on. A read waits for earlier writes, a write
  // for all.
  uint32_t waits_for = 0;
};
struct PieceView {
  uint32_t set = 0, tensor = 0, tenant = 0, domain = 0;
  uint32_t queue_length = 0;  // of the whole queue; `queue` has the first kQueueEntriesShown of it
  bool lost = false, managed = false, moving = false;
  uint64_t version = 0;
  int64_t bytes = 0;
  std::vector<QueueEntryView> queue;
};
struct TransferView {
  uint64_t id = 0, instance = 0;
  uint32_t set = 0, value = 0, source_domain = 0, destination_domain = 0;
  TransferState state = TransferState::kWatching;
  bool online = false;
  int64_t bytes = 0, requested_ns = 0, admitted_ns = 0;
};
struct CandidateView {
  bool defer = false, feasible = false, chosen = false;
  bool beaten = false;  // not simulated to its end: the figures are the least that they would be
  uint32_t device = 0;
  int64_t lateness_ms = 0;           // of online sequences, summed
  int64_t online_added_percent = 0;  // online work ends later than with the best candidate, by this
  int64_t finish_added_percent = 0;  // so does the batch
  int64_t bytes_moved = 0, queued_ms = 0;
  int64_t finish_ns = 0;  // of the batch; kNever: not known
};
struct DecisionView {
  uint64_t number = 0, instance = 0;
  uint32_t tenant = 0, op = 0, op_count = 0, device = 0;  // 255: deferred
  bool online = false;
  DecisionBasis basis = DecisionBasis::kLevels;  // which figures of the candidates mean anything
  int64_t time_ns = 0, retry_at_ns = 0;
  uint32_t candidates_left_out = 0;  // records hold kDecisionCandidatesMax
  std::vector<CandidateView> candidates;

  bool deferred() const { return device == kNoDevice; }
  // Figures that the basis gives.
  bool has_levels() const { return basis == DecisionBasis::kLevels; }
  bool has_feasible() const { return has_levels() || basis == DecisionBasis::kFinish; }
  bool has_queue() const { return has_levels() || basis == DecisionBasis::kQueue; }
  bool has_bytes_moved() const { return has_feasible() || has_queue(); }
};

std::string_view OpStateName(OpState state);               // "unscheduled"
std::string_view InstanceStateName(InstanceState state);   // "queued"
std::string_view TransferStateName(TransferState state);   // "watching"
std::string_view AccessKindName(AccessKind kind);          // "instance"
std::string_view AccessName(const QueueEntryView& entry);  // "read", "write", "reset", "move"
std::string_view DecisionBasisName(DecisionBasis basis);   // "levels"
std::string ContentHashText(uint64_t content_hash);  // 16 hex digits, as `slicectl whatif` takes

class Reader {
 public:
  // `segment`: the whole mapping; must outlive the reader. Errors: VERSION (other magic, version or
  // layout hash: both are named), BOUNDS (table points outside).
  static Result<Reader> Open(std::span<const std::byte> segment);

  uint64_t epoch() const;
  uint64_t daemon_pid() const;
  std::string policy() const;
  int64_t updated_ns() const;

  std::vector<DeviceView> Devices() const;
  std::vector<DomainView> Domains() const;
  std::vector<TenantView> Tenants() const;
  std::vector<TemplateView> Templates() const;
  std::vector<SequenceView> Sequences() const;
  std::vector<InstanceView> Instances() const;  // each one consistent with its ops and tensors
  std::vector<PieceView> Pieces() const;
  std::vector<TransferView> Transfers() const;
  std::vector<DecisionView> Decisions(size_t newest_max) const;  // newest first

  // `slicectl graphs --json`:
  // {"epoch","pid","policy","devices","domains","tenants","instances":[{...,"ops":[...]}],
  // "pieces":[{...,"queue":[...]}],"transfers"}. with_ops: also every op of every instance.
  std::string GraphsJson(bool with_ops) const;
  // `slicectl explain --json`: the last decisions with candidates and scores.
  std::string DecisionsJson(size_t newest_max) const;

 private:
  explicit Reader(std::span<const std::byte> segment) : segment_(segment) {}
  template <typename Record>
  const Record* At(Slab slab, uint32_t index) const;
  uint32_t Count(Slab slab) const;
  uint32_t Used(Slab slab) const;  // records that were ever in use; at most Count()
  template <typename Record, typename Copy>
  bool ReadConsistent(const Record* record, Copy copy) const;
  const SegmentHeader& header() const {
    return *reinterpret_cast<const SegmentHeader*>(segment_.data());
  }

  std::span<const std::byte> segment_;
  SlabEntry slabs_[kSlabCount] = {};  // checked private copy of the table
};

}  // namespace slice::gmg
