#include "daemon/gmg/reader.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "common/checked.h"

namespace slice::gmg {

namespace {
constexpr int kRetriesMax = 200;
constexpr int kPausesMax = 128;
constexpr int kPatience = 16;  // a writer that runs holds a record open for microseconds
constexpr std::chrono::microseconds kNap{100};  // one that does not run, for a time slice
constexpr uint32_t kOpsMax = 1u << 20;

// Longer with each try: a reader that asks a busy counter again and again takes its cache line away
// from the writer each time.
void BackOff(int tries) {
  if (tries > kPatience) return std::this_thread::sleep_for(kNap);
  for (int i = 0; i < std::min(1 << std::min(tries, 10), kPausesMax); ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);  // an empty turn
#endif
  }
}
}  // namespace

std::string_view OpStateName(OpState state) {
  switch (state) {
    case OpState::kUnscheduled:
      return "unscheduled";
    case OpState::kPlaced:
      return "placed";
    case OpState::kIssued:
      return "issued";
    case OpState::kLaunched:
      return "launched";
    case OpState::kDone:
      return "done";
    case OpState::kFailed:
      return "failed";
    case OpState::kCancelled:
      return "cancelled";
  }
  return "unknown";
}
std::string_view InstanceStateName(InstanceState state) {
  switch (state) {
    case InstanceState::kFree:
      return "free";
    case InstanceState::kQueued:
      return "queued";
    case InstanceState::kStarted:
      return "started";
    case InstanceState::kEnding:
      return "ending";
  }
  return "unknown";
}
std::string_view TransferStateName(TransferState state) {
  switch (state) {
    case TransferState::kWatching:
      return "watching";
    case TransferState::kIntent:
      return "intent";
    case TransferState::kAdmitted:
      return "admitted";
  }
  return "unknown";
}

std::string_view AccessKindName(AccessKind kind) {
  switch (kind) {
    case AccessKind::kInstance:
      return "instance";
    case AccessKind::kCommand:
      return "command";
    case AccessKind::kMove:
      return "move";
  }
  return "unknown";
}
std::string_view AccessName(const QueueEntryView& entry) {
  if (entry.kind == AccessKind::kMove) return "move";
  return entry.resets ? "reset" : entry.write ? "write" : "read";
}

std::string_view DecisionBasisName(DecisionBasis basis) {
  switch (basis) {
    case DecisionBasis::kLevels:
      return "levels";
    case DecisionBasis::kFinish:
      return "finish";
    case DecisionBasis::kQueue:
      return "queue";
    case DecisionBasis::kOneDevice:
      return "one device";
  }
  return "unknown";
}
std::string ContentHashText(uint64_t content_hash) {
  char text[24];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(content_hash));
  return text;
}

Result<Reader> Reader::Open(std::span<const std::byte> segment) {
  if (segment.size() < 4096 || reinterpret_cast<uintptr_t>(segment.data()) % 64 != 0) {
    return Error(StatusCode::kBounds, "GMG segment has %zu bytes, its header alone needs 4096",
                 segment.size());
  }
  Reader reader(segment);
  const SegmentHeader& head = reader.header();
  if (__atomic_load_n(&head.magic, __ATOMIC_ACQUIRE) != kMagic) {
    return Error(StatusCode::kVersion, "not a GMG segment (magic %016llx)",
                 static_cast<unsigned long long>(head.magic));
  }
  if (head.layout_version != kLayoutVersion || head.layout_hash != kLayoutHash) {
    return Error(StatusCode::kVersion,
                 "GMG layout is version %u, hash %016llx; this program reads version %u, hash "
                 "%016llx: use the slicectl of the "
                 "running sliced",
                 head.layout_version, static_cast<unsigned long long>(head.layout_hash),
                 kLayoutVersion, static_cast<unsigned long long>(kLayoutHash));
  }
  Capacity capacity;
  for (uint32_t slab = 0; slab < kSlabCount; ++slab) capacity.counts[slab] = head.slabs[slab].count;
  const uint64_t bytes = LayOut(capacity, reader.slabs_);
  for (uint32_t slab = 0; slab < kSlabCount; ++slab) {
    const SlabEntry& given = head.slabs[slab];
    const SlabEntry& expected = reader.slabs_[slab];
    if (given.offset != expected.offset || given.stride != expected.stride ||
        bytes > segment.size()) {
      return Error(StatusCode::kBounds,
                   "GMG slab %u at offset %llu does not fit a segment of %zu bytes", slab,
                   static_cast<unsigned long long>(given.offset), segment.size());
    }
  }
  return reader;
}

template <typename Record>
const Record* Reader::At(Slab slab, uint32_t index) const {
  return reinterpret_cast<const Record*>(segment_.data() + slabs_[slab].offset) + index;
}
uint32_t Reader::Count(Slab slab) const { return slabs_[slab].count; }
uint32_t Reader::Used(Slab slab) const {
  return std::min<uint32_t>(header().used[slab], Count(slab));
}

template <typename Record, typename Copy>
bool Reader::ReadConsistent(const Record* record, Copy copy) const {
  for (int i = 0; i < kRetriesMax; ++i) {
    const uint32_t before = record->sequence;
    if (before % 2 == 0) {
      copy();
      if (record->sequence == before) return true;
    }
    BackOff(i);
  }
  return false;
}

uint64_t Reader::epoch() const { return header().epoch; }
uint64_t Reader::daemon_pid() const { return header().daemon_pid; }
std::string Reader::policy() const { return header().policy.Get(); }
int64_t Reader::updated_ns() const { return header().updated_ns; }

std::vector<DeviceView> Reader::Devices() const {
  std::vector<DeviceView> views;
  for (uint32_t i = 0; i < Count(kDevices); ++i) {
    const auto* const r = At<DeviceRecord>(kDevices, i);
    DeviceView v;
    const bool ok = ReadConsistent(r, [&] {
      v = {i,
           r->name.Get(),
           r->domain,
           r->kind,
           r->hosts_online != 0,
           r->overrun != 0,
           r->running_instance,
           r->running_op,
           r->issued,
           r->placed,
           r->ops_done,
           r->running_start_ns,
           r->free_at_ns,
           r->busy_ns,
           r->phantom_from_ns,
           r->phantom_until_ns};
    });
    if (ok) views.push_back(std::move(v));
  }
  return views;
}

std::vector<DomainView> Reader::Domains() const {
  std::vector<DomainView> views;
  for (uint32_t i = 0; i < Count(kDomains); ++i) {
    const auto* const r = At<DomainRecord>(kDomains, i);
    DomainView v;
    const bool ok = ReadConsistent(r, [&] {
      v = {i,
           r->name.Get(),
           r->pool_bytes,
           r->lane_bytes,
           r->reserved_bytes,
           r->granted_bytes,
           r->retained_bytes_max,
           r->retained_bytes};
    });
    if (ok) views.push_back(std::move(v));
  }
  return views;
}

std::vector<TenantView> Reader::Tenants() const {
  std::vector<TenantView> views;
  for (uint32_t i = 0; i < Used(kTenants); ++i) {
    const auto* const r = At<TenantRecord>(kTenants, i);
    TenantView v;
    const bool ok = ReadConsistent(r, [&] {
      v.id = r->id;
      v.name = r->name.Get();
      v.uid = r->uid;
      v.pid = r->pid;
      v.home_device = r->home_device;
      v.live_instances = r->live_instances;
      v.online = r->service_class == 0;
      v.removing = r->removing != 0;
      v.memory_bytes_max = r->memory_bytes_max;
      v.pool_bytes = r->pool_bytes;
      v.retained_bytes = r->retained_bytes;
      v.submits = r->submits;
      v.completions = r->completions;
    });
    if (ok && v.id != 0) views.push_back(std::move(v));
  }
  return views;
}

std::vector<TemplateView> Reader::Templates() const {
  std::vector<TemplateView> views;
  for (uint32_t i = 0; i < Used(kTemplates); ++i) {
    const auto* const r = At<TemplateRecord>(kTemplates, i);
    TemplateView v;
    const bool ok = ReadConsistent(r, [&] {
      v.id = r->id;
      v.content_hash = r->content_hash;
      v.name = r->name.Get();
      v.group_names.clear();
      const uint32_t begin = r->name_begin, count = r->group_count;
      if (v.id == 0 || !RangeFits(begin, count, Count(kGroupNames))) return;
      for (uint32_t g = 0; g < count; ++g)
        v.group_names.push_back(At<GroupNameRecord>(kGroupNames, begin + g)->name.Get());
    });
    if (ok && v.id != 0) views.push_back(std::move(v));
  }
  return views;
}

std::vector<SequenceView> Reader::Sequences() const {
  std::vector<SequenceView> views;
  for (uint32_t i = 0; i < Used(kSequences); ++i) {
    const auto* const r = At<SequenceRecord>(kSequences, i);
    SequenceView v;
    const bool ok = ReadConsistent(r, [&] {
      v = {r->id,
           r->number,
           r->tenant,
           r->device,
           r->steps,
           r->live,
           r->service_class == 0,
           r->priority,
           r->arrival_ns,
           r->deadline_ns};
    });
    if (ok && v.id != 0) views.push_back(v);
  }
  return views;
}

std::vector<InstanceView> Reader::Instances() const {
  std::vector<InstanceView> views;
  for (uint32_t i = 0; i < Used(kInstances); ++i) {
    const auto* const r = At<InstanceRecord>(kInstances, i);
    if (r->id == 0) continue;  // a hint only: checked again inside
    InstanceView v;
    const bool ok = ReadConsistent(r, [&] {
      v = InstanceView{};
      v.id = r->id;
      v.state = r->state;
      v.online = r->service_class == 0;
      v.attempt = r->attempt;
      v.tenant = r->tenant;
      v.template_id = r->template_id;
      v.binding = r->binding;
      v.ops_done = r->ops_done;
      v.priority = r->priority;
      v.sequence_id = r->sequence_id;
      v.cookie = r->cookie;
      v.submit_ns = r->submit_ns;
      v.start_ns = r->start_ns;
      v.finish_ns = r->finish_ns;
      v.predicted_finish_ns = r->predicted_finish_ns;
      v.deadline_ns = r->deadline_ns;
      v.frontier_unscheduled = r->frontier_unscheduled;
      v.frontier_scheduled = r->frontier_scheduled;
      const uint32_t op_begin = r->op_begin, op_count = r->op_count;
      const uint32_t tensor_begin = r->tensor_begin, tensor_count = r->tensor_count;
      if (!RangeFits(op_begin, op_count, Count(kOps)) ||
          !RangeFits(tensor_begin, tensor_count, Count(kTensors)) || op_count > kOpsMax ||
          tensor_count > kOpsMax) {
        return;
      }
      v.ops.resize(op_count);
      for (uint32_t op = 0; op < op_count; ++op) {
        const auto* const o = At<OpRecord>(kOps, op_begin + op);
        // A placed op's start is a bound, no prediction (segment.h).
        const bool predicted = o->state >= OpState::kIssued;
        const int64_t start = predicted ? o->predicted_start_ns.load() : 0;
        const int64_t duration = o->duration_ns;
        v.ops[op] = {
            o->state,    o->device,   o->home_domain, o->pending, duration,
            o->issue_ns, o->start_ns, o->finish_ns,   start,      predicted ? start + duration : 0};
      }
      v.tensors.resize(tensor_count);
      for (uint32_t t = 0; t < tensor_count; ++t) {
        const auto* const x = At<TensorRecord>(kTensors, tensor_begin + t);
        v.tensors[t] = {x->bytes(), x->residency, x->in_flight, x->consumers_left()};
      }
    });
    if (ok && v.id != 0 && v.state != InstanceState::kFree) views.push_back(std::move(v));
  }
  return views;
}

std::vector<PieceView> Reader::Pieces() const {
  std::vector<PieceView> views;
  for (uint32_t i = 0; i < Used(kPieces); ++i) {
    const auto* const r = At<PieceRecord>(kPieces, i);
    if (r->set == 0) continue;
    PieceView v;
    const bool ok = ReadConsistent(r, [&] {
      v = PieceView{};
      v.set = r->set;
      v.tensor = r->tensor;
      v.tenant = r->tenant;
      v.domain = r->domain;
      v.queue_length = r->queue_length;
      v.lost = r->lost != 0;
      v.managed = r->managed != 0;
      v.moving = r->moving != 0;
      v.version = r->version;
      v.bytes = r->bytes;
      uint32_t writes = 0;
      for (uint32_t e = 0; e < std::min(v.queue_length, kQueueEntriesShown); ++e) {
        const QueueEntryRecord& q = r->queue[e];
        const bool write = q.write != 0;
        v.queue.push_back({static_cast<AccessKind>(q.kind.load()), q.owner, write, q.resets != 0,
                           q.uses_left, write ? e : writes});
        writes += write;
      }
    });
    if (ok && v.set != 0) views.push_back(std::move(v));
  }
  return views;
}

std::vector<TransferView> Reader::Transfers() const {
  std::vector<TransferView> views;
  for (uint32_t i = 0; i < Used(kTransfers); ++i) {
    const auto* const r = At<TransferRecord>(kTransfers, i);
    if (r->id == 0) continue;
    TransferView v;
    const bool ok = ReadConsistent(r, [&] {
      v = {r->id,           r->instance,           r->set,
           r->value,        r->source_domain,      r->destination_domain,
           r->state,        r->service_class == 0, r->bytes,
           r->requested_ns, r->admitted_ns};
    });
    if (ok && v.id != 0) views.push_back(v);
  }
  return views;
}

std::vector<DecisionView> Reader::Decisions(size_t newest_max) const {
  std::vector<DecisionView> views;
  const uint64_t total = header().decision_count;
  const uint64_t count = std::min<uint64_t>({total, newest_max, Count(kDecisions)});
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t number = total - i;
    const auto* const r =
        At<DecisionRecord>(kDecisions, static_cast<uint32_t>((number - 1) % Count(kDecisions)));
    DecisionView v;
    const bool ok = ReadConsistent(r, [&] {
      v = DecisionView{};
      v.number = r->number;
      v.instance = r->instance;
      v.tenant = r->tenant;
      v.op = r->op;
      v.op_count = r->op_count;
      v.device = r->device;
      v.online = r->service_class == 0;
      v.time_ns = r->time_ns;
      v.retry_at_ns = r->retry_at_ns;
      v.basis = r->basis;
      const uint32_t offered = r->candidate_count;
      const auto kept = std::min<uint32_t>(offered, kDecisionCandidatesMax);
      v.candidates_left_out = offered - kept;
      for (uint32_t c = 0; c < kept; ++c) {
        const DecisionCandidate& d = r->candidates[c];
        v.candidates.push_back({d.defer != 0, d.feasible != 0, d.chosen != 0, d.beaten != 0,
                                d.device, d.lateness_bucket, d.online_added_bucket,
                                d.batch_finish_bucket, d.bytes_moved, d.queued_bucket,
                                d.batch_finish_ns});
      }
    });
    if (ok && v.number == number) views.push_back(std::move(v));  // else overwritten meanwhile
  }
  return views;
}

}  // namespace slice::gmg
