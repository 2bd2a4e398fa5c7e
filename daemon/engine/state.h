// What the engine keeps beside the GMG: tenants, sets, bindings, sequences, and the private half of
// instances and ops. Plain data; the rules are in the .cc files of EngineImpl. Pointers between
// these objects are stable: each is owned by one table of EngineImpl and outlives what points to it
// (use counts say when it may go).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "daemon/engine/engine.h"
#include "daemon/gmg/access_queue.h"
#include "daemon/gmg/gmg.h"
#include "daemon/sched/policy.h"
#include "daemon/transfer/arbiter.h"

namespace slice::engine {

struct Instance;
struct TensorSet;
struct Command;

// One class's numbers for StatusJson.
struct ClassCounters {
  uint64_t submits = 0, completions = 0, failures = 0, late = 0;
};

struct Tenant {
  TenantConfig config;
  uint32_t record = 0;  // in the GMG's tenant slab
  bool removing = false;
  std::vector<Instance*> instances;  // live, in submit order
  std::vector<Command*> commands;    // live
  uint32_t transfers = 0;            // live ones of its sets and instances
  uint64_t submits = 0, completions = 0;
};

struct Piece {
  TensorSet* set = nullptr;
  uint32_t tensor = 0;
  int64_t bytes = 0;
  DomainIndex domain = 0;
  bool managed = false;  // false: imported mutable, pinned
  bool lost = false;
  bool moving = false;
  uint64_t version = 0;
  uint32_t record = 0;
  gmg::AccessQueue queue;
  // Of the snapshot being built.
  uint64_t snapshot_stamp = 0;
  sim::TensorIndex snapshot = sim::kNone;
  std::vector<sim::OpIndex> writers, readers;  // last write, and reads since
};

struct TensorSet {
  TensorSetConfig config;
  Tenant* tenant = nullptr;
  int64_t bytes = 0;          // all tensors
  uint64_t resident = 0;      // constants: domains with every tensor
  std::vector<Piece> pieces;  // managed and mutable: by tensor
  uint32_t uses = 0;          // bindings, commands and transfers that point here
  bool removing = false;
};

// A copy of a constant set to a further domain, a few tensors at a time.
struct Replication {
  TensorSet* set = nullptr;
  DomainIndex domain = 0;
  uint32_t next = 0, in_flight = 0, done = 0;
  bool failed = false;
  bool remake = false;  // after the loss of an executor: not given up
  TimeNs retry_at = 0;
};

// What the engine needs of a template again and again, by group and by crossing value.
struct TemplateEntry {
  TemplateId id;
  std::shared_ptr<const graph::Template> graph;
  uint32_t record = 0;
  struct GroupPlan {
    std::vector<uint32_t> in;  // crossing indices
    std::vector<uint32_t> out;
    std::vector<uint32_t> scratch;  // results that do not cross: live while the op runs
  };
  std::vector<GroupPlan> groups;
  std::vector<uint32_t> last_use;      // group, by crossing index
  std::vector<uint32_t> dynamic_uses;  // groups that use it, by dynamic position
  std::vector<uint32_t> dynamic_last;
};

struct PieceUse {
  Piece* piece = nullptr;
  bool write = false;
  uint32_t whole = 0;            // of a group: index among the whole graph's (Binding::pieces)
  uint32_t ops = 0;              // of the whole graph: groups that touch it
  uint32_t read_slot = 0;        // of the whole graph, only read: index in Instance::read_versions
  std::vector<uint32_t> groups;  // of the whole graph: which ones
};
// The bindings of one session with the same weights are one service: the prompt and the steps of
// one model. Without weights: the session's other bindings.
inline uint64_t ServiceOf(TenantId tenant, TensorSetId weights) {
  return uint64_t{tenant.value} << 32 | weights.value;
}

struct Binding {
  BindingConfig config;
  Tenant* tenant = nullptr;
  const TemplateEntry* graph = nullptr;
  std::vector<std::vector<PieceUse>> group_pieces;       // by group
  std::vector<std::vector<TensorSet*>> group_constants;  // by group, no duplicates
  std::vector<PieceUse> pieces;                          // of the whole graph
  uint32_t read_only_pieces = 0;
  std::vector<TensorSet*> sets;
  uint32_t uses = 0;  // live instances
  bool removing = false;
  uint64_t service = 0;  // ServiceOf: gaps are learned by it
  // Of its latest submit: the next one often has the same.
  std::vector<int64_t> last_symbols;
  std::shared_ptr<const graph::BoundSizes> last_sizes;
};

struct Sequence {
  SequenceId id;
  uint64_t number = 0;
  Tenant* tenant = nullptr;
  ServiceClass service_class = ServiceClass::kOffline;
  int32_t priority = 0;
  TimeNs arrival = 0;
  TimeNs deadline = kNever;
  uint32_t record = 0;
  uint32_t live = 0, steps = 0;
  bool open = true;
  TimeNs last_completion = 0;  // 0: none yet
  uint64_t service = 0;        // of the step that completed last
  DeviceIndex last_device = kNoDevice;
};

// An op's private half. Small: there is one for each op that may be live (EngineImpl::op_extras_).
struct OpExtra {
  TimeNs last_replaced = -kSecond;
  uint32_t order = 0;                // of the issue, modulo 2^32 (EngineImpl::IssueOrder)
  bool prepared : 1 = false;         // memory charged, transfers asked for
  bool outputs_granted : 1 = false;  // outputs and scratch paid by a grant in its device's domain
  bool moved_piece : 1 = false;      // stays in its domain: a piece moved here for it
  bool home_only : 1 = false;        // a grant was refused
  bool recall_sent : 1 = false;
  bool want_unplace : 1 = false;
  bool settled : 1 = false;  // issued with all inputs local
};
static_assert(sizeof(OpExtra) == 16);
struct DynamicExtra {
  uint64_t present = 0, granted = 0;  // domains
  uint32_t uses_left = 0;
};

enum class Phase : uint8_t { kFree, kWaiting, kStarted, kEnding };

struct Instance {
  InstanceId id;
  uint32_t slot = 0;
  uint32_t generation = 0;
  uint32_t attempt = 1;
  Phase phase = Phase::kFree;
  Tenant* tenant = nullptr;
  Binding* binding = nullptr;
  const graph::Template* graph = nullptr;
  Sequence* sequence = nullptr;  // null: a sequence of one
  ServiceClass service_class = ServiceClass::kOffline;
  ServiceClass boosted_class = ServiceClass::kOffline;  // best class queued behind it
  int32_t priority = 0;
  TimeNs arrival = 0, deadline = kNever;
  uint64_t creation = 0, cookie = 0;
  TimeNs submitted = 0, first_start = 0, last_finish = 0, predicted_finish = 0;
  std::vector<int64_t> symbols;
  std::vector<wire::ArenaRange> inputs, outputs;
  std::shared_ptr<const graph::BoundSizes> sizes;
  std::span<OpExtra> ops;
  std::vector<DynamicExtra> dynamics;
  // By piece that it only reads: its version when this instance had read it, modulo 2^32. One that
  // wrote never runs again.
  std::vector<uint32_t> read_versions;
  std::vector<int64_t> reserved;  // by domain
  std::vector<int64_t> lanes;     // by device
  uint32_t unfinished = 0;
  uint32_t unscheduled = 0;
  uint32_t first_unfinished = 0;  // all ops before it are done
  DurationNs work_left = 0;
  TimeNs retry_at = 0;            // deferred until; 0 = not
  uint64_t writing_ops_left = 0;  // ops that write a piece and are not done
  bool began_write = false;
  bool completed = false;  // its completion is posted
  bool parked = false;
  bool started_sent = false;  // the executor knows it
  bool needs_prediction = false;
  bool deferral_traced = false;
  DeviceIndex last_device = kNoDevice;
  // Of the snapshot's window: index, first op and first value in EngineImpl::window_ops_ and
  // _values_
  uint32_t snapshot = sim::kNone;
  uint32_t snapshot_ops = 0, snapshot_values = 0;
  uint32_t rank = 0;  // by key
  uint64_t key_stamp = 0;
  sched::OrderKey key;
};

struct OpRef {
  Instance* instance = nullptr;
  uint32_t op = 0;
  friend bool operator==(const OpRef&, const OpRef&) = default;
};

struct DeviceState {
  DeviceIndex index = 0;
  DomainIndex domain = 0;
  std::vector<OpRef> placed, issued, launched;
  TimeNs started = 0;  // of the first launched op
  // Of the other devices together when it started; < 0: not known, or not the only one launched.
  DurationNs busy_beside = -1;
  TimeNs idle_since = 0;
  bool hosts_online = false;
  TimeNs phantom_from = kNever, phantom_until = 0;
  TimeNs issue_wake = kNever;  // when the next issue becomes due
  uint64_t done = 0;
};

struct Transfer {
  TransferId id;
  uint32_t slot = 0, generation = 0;
  bool live = false;
  bool cancel_sent = false;
  Tenant* tenant = nullptr;
  Instance* instance = nullptr;  // of a value
  uint32_t crossing = 0;
  TensorSet* set = nullptr;  // of a set's tensor
  uint32_t tensor = 0;
  bool move = false;
  DomainIndex source = 0, destination = 0;
  ServiceClass service_class = ServiceClass::kOffline;
  int64_t bytes = 0;
  TimeNs requested = 0, admitted = 0;
  uint32_t record = 0;
};

struct Command {  // one tenant command on some pieces
  Tenant* tenant = nullptr;
  uint64_t cookie = 0;
  wire::TensorCommandKind kind = wire::kTensorReset;
  int32_t dimension = 0;
  uint64_t parameter = 0;
  TimeNs submitted = 0, first_start = 0;
  uint32_t parts_left = 0, parts_running = 0;
  bool completed = false;
  wire::ArenaRange range{};
  StatusCode status = StatusCode::kOk;
};
struct CommandPart {
  CommandId id;
  uint32_t slot = 0, generation = 0;
  bool live = false, running = false;
  Command* command = nullptr;
  Piece* piece = nullptr;
};

}  // namespace slice::engine
