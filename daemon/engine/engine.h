// The engine: the scheduler's state machine. Owns the GMG, admission, memory ledger, access queues,
// placement, issue, recall and transfers. PURE: no IO, clock or thread of its own. `now` comes with
// each call; everything it wants done goes to the Sink. The same code runs in sliced and, with a
// virtual executor, in unit tests.
//
// Threads: one thread calls everything here. Blocks: never.
// Cold calls return a Status at once and change nothing on error. Hot calls report tenant faults as
// completions.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "common/units.h"
#include "common/wire/executor_ring.h"
#include "common/wire/tenant_ring.h"
#include "daemon/estimate/saved.h"
#include "daemon/graph/template.h"

namespace slice::engine {

struct DeviceConfig {
  std::string name;  // "cpu0"
  DomainIndex domain = 0;
  uint8_t kind = 0;  // device kind, key of learned durations
};
struct DomainConfig {
  std::string name;
  int64_t pool_bytes = 0;      // activations, workspaces, received copies
  int64_t retained_bytes = 0;  // weights, replicas, managed tensors
};
struct Config {
  std::vector<DeviceConfig> devices;
  std::vector<DomainConfig> domains;
  std::string policy = "slice";
  uint32_t batch_ops_max = 8;
  DurationNs batch_time_max = 20 * kMillisecond;
  uint32_t issue_ahead = 2;                         // issued, unlaunched ops per device
  DurationNs command_latency = 200 * kMicrosecond;  // H until measured
  DurationNs offline_op_max = 50 * kMillisecond;
  uint32_t tenant_queue_max = 256;  // instances admitted and not finished, per tenant
  uint32_t live_ops_max = 100'000;
  int64_t workspace_margin_bytes = 1 << 20;  // kernels' undeclared workspace per op
  bool drop_late = false;
  uint64_t epoch = 0;       // of the daemon's start; shown in the GMG's header
  uint64_t daemon_pid = 0;  // likewise
  // For developers: gets each round before it is decided (daemon/sched/round_text.h). Empty: none.
  std::function<void(std::string_view round)> record_round;
};

struct TenantConfig {
  TenantId id;
  std::string name;
  uint32_t uid = 0;
  uint32_t pid = 0;
  ServiceClass class_max = ServiceClass::kOffline;
  double weight = 1.0;
  int64_t memory_bytes_max = 0;  // all domains together
  uint64_t device_mask = 0;
  DeviceIndex home = 0;
  DurationNs deadline_min = 0;
  int64_t arena_bytes = 0;
};
struct TenantUser {
  TenantId tenant;
  uint32_t uid = 0;
};
enum class TensorKind : uint8_t { kConstant = 1, kMutable = 2, kManaged = 3 };
struct TensorSetConfig {
  TensorSetId id;
  TenantId tenant;
  TensorKind kind = TensorKind::kConstant;
  DomainIndex home = 0;
  struct Tensor {
    std::string name;
    int64_t bytes = 0;       // charged in `retained_bytes` of a domain while resident there
    uint64_t meta_hash = 0;  // dtype, sizes, strides: must equal the template's static input
  };
  std::vector<Tensor> tensors;
  // Managed: further domains in which the shell attached a segment for the set, so that its pieces
  // may move there.
  uint64_t segment_domains = 0;
};
struct TensorRef {
  TensorSetId set;
  uint32_t tensor = 0;
};
struct BindingConfig {
  BindingId id;
  TenantId tenant;
  TemplateId graph;
  std::vector<TensorRef> statics;  // by static position
};

struct Submit {
  TenantId tenant;
  uint64_t cookie = 0;
  BindingId binding;
  uint64_t sequence = 0;  // the client's number; 0 = a sequence of one
  TimeNs deadline = 0;    // 0 = the sequence's
  int32_t priority = 0;
  std::span<const int64_t> symbols;
  std::span<const wire::ArenaRange>
      inputs;  // checked against the arena by the server; exact sizes checked here
  std::span<const wire::ArenaRange> outputs;
};
struct OpenSequence {
  TenantId tenant;
  uint64_t sequence = 0;
  ServiceClass service_class = ServiceClass::kOffline;
  int32_t priority = 0;
  TimeNs deadline = kNever;
};
struct TensorCommand {
  TenantId tenant;
  uint64_t cookie = 0;
  wire::TensorCommandKind kind = wire::kTensorReset;
  std::span<const TensorRef> tensors;
  std::span<const wire::ArenaRange> ranges;  // write/read: one; else empty
  int32_t dimension = 0;
  uint64_t parameter = 0;
};

// What would become of a graph that was submitted now?
struct WhatIfQuery {
  std::string graph;  // its name, or hexadecimal digits that its content hash begins with
  TenantId tenant;    // whose binding; 0: the only one's
  std::vector<int64_t> symbols;  // in the template's order; empty: those of the latest submit
  // As the first step of a new sequence of this class; none: as a submit without a sequence.
  std::optional<ServiceClass> service_class;
};

// One measured or decided thing, for the timeline and `slicectl explain`.
struct TraceEvent {
  enum class Kind : uint8_t {
    kOp,
    kTransfer,
    kDefer,
    kRecall,
    kPolicy,
    kMark,
    kSubmit,
    kComplete,
    kCommand
  };
  Kind kind = Kind::kOp;
  TenantId tenant;
  ServiceClass service_class = ServiceClass::kOffline;
  SequenceId sequence;
  InstanceId instance;
  uint32_t op = 0;
  const char* name = nullptr;  // group name; lives as long as its template (recorder copies)
  DeviceIndex device = kNoDevice;
  DomainIndex source = kNoDomain, destination = kNoDomain;
  TimeNs start = 0, finish = 0;
  TimeNs predicted_start = 0, predicted_finish = 0;
  DurationNs cpu = 0;
  int64_t bytes = 0;
  std::string text;  // policy name, mark label, cause of a deferral
};

class Sink {
 public:
  virtual ~Sink() = default;
  // One record for the executor's command ring. `wake`: device whose thread must look (kNoDevice:
  // copies and bookkeeping; any device may drain it).
  virtual void ToExecutor(uint32_t type, std::span<const std::byte> payload, DeviceIndex wake) = 0;
  // All that is due is handed over; the engine goes on with predictions and records. A good moment
  // to wake the executor.
  virtual void CommandsReady() {}
  // `text` empty on success.
  virtual void Complete(TenantId tenant, const wire::CompletionSlot& completion,
                        const std::string& text) = 0;
  virtual void Trace(const TraceEvent& event) = 0;
};

struct Counters {
  uint64_t submits = 0, completions = 0, failures = 0, refused = 0, ops_executed = 0, transfers = 0,
           recalls = 0, deferrals = 0, rounds = 0, offline_ops = 0, offline_ops_off_home = 0,
           parked = 0;
  std::vector<DurationNs> device_busy;  // wall, by device
  std::vector<DurationNs> device_cpu;   // thread CPU, by device
};

class Engine {
 public:
  // `gmg_memory`: zeroed memory for the GMG segment of at least GmgBytes(config); outlives the
  // engine.
  static size_t GmgBytes(const Config& config);
  // What Create refuses. Errors: INVALID.
  static Status CheckConfig(const Config& config);
  static Result<std::unique_ptr<Engine>> Create(const Config& config,
                                                std::span<std::byte> gmg_memory, Sink* sink);
  virtual ~Engine() = default;

  // ---- cold ----
  virtual Status AddTenant(const TenantConfig& tenant, TimeNs now) = 0;
  // Unlaunched ops are dropped, launched ones and copies end; TenantGone() turns true when nothing
  // of it is left.
  virtual void RemoveTenant(TenantId tenant, TimeNs now) = 0;
  virtual bool TenantGone(TenantId tenant) const = 0;
  virtual Status AddTemplate(TemplateId id, std::shared_ptr<const graph::Template> graph) = 0;
  virtual Status RemoveTemplate(TemplateId id) = 0;  // STALE while bindings use it
  // QUOTA / NEVER_FITS name the numbers and who holds the memory.
  virtual Status AddTensorSet(const TensorSetConfig& set, TimeNs now) = 0;
  virtual Status RemoveTensorSet(TensorSetId set,
                                 TimeNs now) = 0;  // deferred until no instance uses it
  virtual bool TensorSetGone(TensorSetId set) const = 0;
  // Charges the copies and starts the transfers; ReplicasReady() when all are there.
  virtual Status Replicate(TensorSetId set, DomainIndex domain, TimeNs now) = 0;
  virtual bool ReplicasReady(TensorSetId set, DomainIndex domain) const = 0;
  virtual Status AddBinding(
      const BindingConfig& binding) = 0;  // GRAPH: count, kind or meta_hash differs
  virtual Status RemoveBinding(BindingId binding) = 0;
  virtual Status SetPolicy(std::string_view name, TimeNs now) = 0;

  // ---- hot ----
  virtual void Handle(const Submit& submit, TimeNs now) = 0;
  virtual void Handle(const OpenSequence& open, TimeNs now) = 0;
  virtual void CloseSequence(TenantId tenant, uint64_t sequence, TimeNs now) = 0;
  virtual void Cancel(TenantId tenant, uint64_t cookie, TimeNs now) = 0;
  virtual void Handle(const TensorCommand& command, TimeNs now) = 0;
  // A record of the executor's report ring. PROTOCOL: garbage; the shell restarts the executor
  // then.
  virtual Status HandleReport(uint32_t type, std::span<const std::byte> payload, TimeNs now) = 0;
  // A new engine has no executor: submits wait, and nothing is sent, until the first ExecutorReady.
  virtual void ExecutorLost(TimeNs now) = 0;  // everything launched is gone
  virtual void ExecutorReady(
      TimeNs now) = 0;  // a new one has all templates, sets and bindings again
  virtual void ExecutorGivenUp(
      TimeNs now) = 0;  // could not be restarted: fail what waits with EXECUTOR_LOST
  // Runs rounds and issues until there is nothing more to decide now. Call after each batch of
  // events.
  virtual void Run(TimeNs now) = 0;
  // When Run must be called again without an event; kNever if not.
  virtual TimeNs NextWake() const = 0;

  // Bit d: the op that runs on device d has taken so much longer than predicted that the device
  // gets no new work.
  virtual uint64_t OverrunDevices(TimeNs now) const = 0;
  // Whose ops are launched now, each tenant once; the one whose op started last comes first. Before
  // ExecutorLost: who was running when the executor died.
  virtual std::vector<TenantUser> LaunchedTenants() const = 0;
  virtual const Counters& counters() const = 0;
  virtual std::string policy_name() const = 0;
  // What the estimators have learned, bounded in size, to be kept between runs...
  virtual estimate::Saved SaveEstimates() const = 0;
  // ...and learned again: before the first submit. Returns how many shapes and sizes counted.
  virtual size_t LoadEstimates(const estimate::Saved& saved) = 0;
  // JSON object texts for `slicectl status|devices|tenants|estimators`.
  virtual std::string StatusJson(TimeNs now) const = 0;
  virtual std::string DevicesJson(TimeNs now) const = 0;
  virtual std::string TenantsJson(TimeNs now) const = 0;
  virtual std::string EstimatorsJson() const = 0;  // bounded: what was used last
  // JSON object text for `slicectl whatif`: what Handle(Submit) and Run would decide and predict
  // now. Works on a copy of the engine: nothing is changed, said or recorded. Costs one copy of
  // what is live and what that uses, and one Run: up to 25 ms of this thread with 1,000 live
  // instances of as many bindings. Errors: INVALID (which graph, binding or symbols; lists what
  // there is), and what the submit would be refused with.
  virtual Result<std::string> WhatIf(const WhatIfQuery& query, TimeNs now) const = 0;
};

}  // namespace slice::engine
