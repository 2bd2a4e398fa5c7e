// An executor in virtual time behind engine::Sink: decodes the command records exactly as
// executor_ring.h says, runs ops and copies by a duration function, and answers with report
// records. Uses the real executor's launch queue rule.
//
// It is also a judge: it checks by itself what no engine may break (one op per device, inputs
// present, predecessors done, one writer per piece, memory within each pool) and collects the
// violations. Deterministic: events in order of time, then creation.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "daemon/engine/engine.h"
#include "daemon/executor/launch_queue.h"

namespace slice::testing {

struct VirtualOptions {
  DurationNs command_latency = 20 * kMicrosecond;  // ring -> executor
  DurationNs report_latency = 20 * kMicrosecond;   // executor -> engine
  double noise = 0;                                // relative, uniform
  double scale = 1;                                // actual duration / what the graph says
  double outlier_rate = 0;                         // ops that take ten times as long
  double fail_rate = 0;
  DurationNs copy_latency = 20 * kMicrosecond;
  double copy_ns_per_byte = 0.25;
  DurationNs command_time = 50 * kMicrosecond;  // tensor commands
  uint64_t seed = 1;
  bool check_memory = true;
};

class VirtualExecutor : public engine::Sink {
 public:
  VirtualExecutor(const engine::Config& config, const VirtualOptions& options);

  // ---- registration, as the cold path does ----
  struct BindingInfo {
    std::shared_ptr<const graph::Template> graph;
    std::vector<engine::TensorRef> statics;
  };
  void AddBinding(BindingId id, BindingInfo info) { bindings_[id.value] = std::move(info); }
  void AddSet(const engine::TensorSetConfig& set);

  // ---- driving ----
  void set_engine(engine::Engine* engine) { engine_ = engine; }
  TimeNs now() const { return now_; }
  TimeNs NextEvent() const { return events_.empty() ? kNever : events_.top().at; }
  // Advances to `at` and runs everything due. Reports reach the engine inside.
  void AdvanceTo(TimeNs at);
  // Everything is gone; commands on their way too.
  void Die();
  bool idle() const;
  bool busy() const { return running_ops_ > 0 || !transfers_.empty(); }

  // ---- engine::Sink ----
  void ToExecutor(uint32_t type, std::span<const std::byte> payload, DeviceIndex wake) override;
  void Complete(TenantId tenant, const wire::CompletionSlot& completion,
                const std::string& text) override;
  void Trace(const engine::TraceEvent& event) override;

  // ---- what happened ----
  struct Completion {
    wire::CompletionSlot slot;
    std::string text;
    TimeNs at = 0;
  };
  struct OpRun {
    uint64_t instance = 0;
    uint32_t attempt = 0, op = 0;
    DeviceIndex device = 0;
    TimeNs start = 0, finish = 0;
    bool ended = false;
    bool online = false;
    uint32_t tenant = 0;
  };
  struct CopyRun {
    uint64_t transfer = 0, instance = 0;
    uint32_t value = 0, set = 0;
    DomainIndex source = 0, destination = 0;
    TimeNs start = 0, finish = 0;
  };
  std::map<std::pair<uint32_t, uint64_t>, Completion> completions;  // (tenant, cookie)
  std::vector<OpRun> ops;
  std::vector<CopyRun> copies;
  std::vector<engine::TraceEvent> trace;
  std::vector<std::string> violations;
  std::vector<int64_t> pool_used, pool_peak;
  uint64_t recalls = 0, recalled_by_window = 0, drops = 0, ends = 0;
  uint64_t instances_known() const { return instances_.size(); }
  std::shared_ptr<const graph::Template> GraphOf(uint64_t instance) const {
    const auto found = graphs_.find(instance);
    return found == graphs_.end() ? nullptr : found->second;
  }
  // Set to decide the fate of an op: >= 0 fails it with that status after its time.
  std::function<int(uint64_t instance, uint32_t op)> fail_op;
  std::function<DurationNs(uint64_t instance, uint32_t op, DurationNs planned)> duration_of;
  std::function<int64_t(uint64_t instance, uint32_t op)> peak_of;  // bytes reported; else 0
  std::function<void(uint32_t type, std::span<const std::byte> payload)> on_command,
      on_report;                                        // spies, before delivery
  std::function<int(uint64_t transfer)> fail_transfer;  // status of its TransferDone
  std::function<bool(uint64_t instance, uint32_t op)>
      refuse_issue;  // true: given back at once, no memory

 private:
  enum class OpState : uint8_t { kNone, kIssued, kLaunched, kFinished };
  struct Instance {
    wire::StartInstance start{};
    const BindingInfo* binding = nullptr;
    graph::BoundSizes sizes;
    std::vector<OpState> ops;
    std::vector<uint64_t> values;  // by crossing: domains
    std::vector<uint32_t> left;    // consumers
    std::vector<uint64_t> dynamics;
    std::vector<uint32_t> dynamics_left;
    uint32_t running = 0;
    bool ending = false, failed = false;
  };
  struct Device {
    executor::LaunchQueue queue;
    bool running = false, behind_online = false;
    TimeNs wake = kNever;
  };
  struct Transfer {
    wire::Watch watch{};
    bool intent = false, recv = false, running = false, cancelled = false;
    int64_t bytes = 0;
    int64_t charged = 0;
    TimeNs start = 0;
  };
  struct Event {
    TimeNs at;
    uint64_t order;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return at != other.at ? at > other.at : order > other.order;
    }
  };
  using InstanceKey = std::pair<uint64_t, uint32_t>;

  void At(TimeNs at, std::function<void()> run);
  void Command(uint32_t type, const std::vector<std::byte>& payload);
  template <typename Record>
  void Report(wire::ReportType type, const Record& record);
  Instance* Find(uint64_t id, uint32_t attempt);
  void OnStart(const std::vector<std::byte>& payload);
  void OnIssue(const wire::Issue& issue);
  void OnRecall(const wire::Recall& recall);
  void OnEnd(const wire::EndInstance& end);
  void OnWatch(const wire::Watch& watch);
  void StartCopy(uint64_t id);
  void FinishTransfer(uint64_t id, StatusCode status);
  void OnCommandRun(const wire::TensorCommandRun& run);
  void RunDevice(DeviceIndex device);
  void FinishOp(InstanceKey key, uint32_t op, DeviceIndex device, size_t record, bool online);
  bool IsReady(const Instance& instance, uint32_t op, DomainIndex domain) const;
  void Refresh(InstanceKey key, Instance* instance);
  void EndIfIdle(InstanceKey key);
  void FreeDead(Instance* instance);
  void Clear(Instance* instance);
  void Use(DomainIndex domain, int64_t bytes);
  void CheckPieces(const Instance& instance, uint32_t op, DomainIndex domain, bool begin);
  void Violate(const std::string& text) {
    violations.push_back(std::to_string(now_) + ": " + text);
  }
  static int64_t Rounded(int64_t bytes) {
    const int64_t unit = bytes > 8192 ? 4096 : 256;
    return (bytes + unit - 1) / unit * unit;
  }

  const engine::Config config_;
  VirtualOptions options_;
  std::mt19937_64 random_;
  engine::Engine* engine_ = nullptr;
  TimeNs now_ = 0;
  uint64_t next_event_ = 0;
  uint64_t life_ = 0;  // events of an earlier life do nothing
  std::priority_queue<Event> events_;
  std::map<uint32_t, BindingInfo> bindings_;
  struct SetState {
    engine::TensorSetConfig config;
    std::vector<uint64_t> resident;  // by tensor: domains with a valid copy
    std::vector<bool> zero;          // valid wherever no stale pages are
    std::vector<uint64_t> dirty;  // domains with pages that were written and not dropped or reset
    bool Valid(uint32_t tensor, DomainIndex domain) const {
      const uint64_t bit = uint64_t{1} << domain;
      return (resident[tensor] & bit) != 0 || (zero[tensor] && (dirty[tensor] & bit) == 0);
    }
    std::vector<uint32_t> writers, readers;
  };
  std::map<uint32_t, SetState> sets_;
  std::map<InstanceKey, Instance> instances_;
  std::map<uint64_t, std::shared_ptr<const graph::Template>>
      graphs_;  // of every instance ever started
  std::map<uint64_t, Transfer> transfers_;
  std::vector<Device> devices_;
  uint32_t running_ops_ = 0;
};

// Engine, executor and clock together: schedule test actions, run until nothing is left to do.
class Simulation {
 public:
  explicit Simulation(const engine::Config& config, const VirtualOptions& options = {});

  engine::Engine& engine() { return *engine_; }
  VirtualExecutor& executor() { return executor_; }
  TimeNs now() const { return now_; }
  void At(TimeNs at, std::function<void()> action);
  void RunUntil(TimeNs at);
  // Until no event, action or wake is left, or `limit`. False: the limit was reached.
  bool RunAll(TimeNs limit = 3600 * kSecond);
  void KillExecutor(DurationNs restart_after);

  // Registration in both. Ids are given out here.
  TenantId AddTenant(ServiceClass service_class, DeviceIndex home = 0);
  TenantId AddTenant(engine::TenantConfig config);
  TemplateId AddTemplate(std::shared_ptr<const graph::Template> graph);
  // One set per kind, made to fit the template's static inputs; a binding over them. Constants on
  // every `replicas` domain.
  struct Service {
    TenantId tenant;
    BindingId binding;
    TensorSetId constants, managed, mutables;
    std::vector<engine::TensorRef> pieces;  // managed ones, in static order
    std::shared_ptr<const graph::Template> graph;
  };
  Service AddService(TenantId tenant, std::shared_ptr<const graph::Template> graph,
                     DomainIndex home = 0, std::vector<DomainIndex> replicas = {},
                     bool movable = true);
  // As AddService, with a home of its own for each kind of tensor.
  Service AddServiceAt(TenantId tenant, std::shared_ptr<const graph::Template> graph,
                       const std::map<engine::TensorKind, DomainIndex>& homes);
  // One set for each static input, in the domain given: pins ops wherever the test wants them.
  Service AddServiceSpread(TenantId tenant, std::shared_ptr<const graph::Template> graph,
                           const std::vector<DomainIndex>& homes);
  // Another graph over the same tensors (prefill and decode of one cache).
  Service AddGraph(const Service& service, std::shared_ptr<const graph::Template> graph);
  // Submits now; returns the cookie. Output slots never overlap.
  uint64_t Submit(const Service& service, uint64_t sequence = 0, TimeNs deadline = 0,
                  int32_t priority = 0);
  uint64_t Command(const Service& service, wire::TensorCommandKind kind,
                   std::vector<engine::TensorRef> pieces);
  void OpenSequence(TenantId tenant, uint64_t number, ServiceClass service_class,
                    TimeNs deadline = kNever);
  const VirtualExecutor::Completion* Find(TenantId tenant, uint64_t cookie) const;
  int StatusOf(TenantId tenant, uint64_t cookie) const;  // -1: no completion
  std::span<std::byte> gmg_memory() { return gmg_span_; }
  std::string Violations() const;
  // Thread CPU time of each Engine::Run, and whether it placed something.
  std::function<void(DurationNs cpu, bool placed)> run_probe;

 private:
  TensorSetId AddSet(const Service& service, engine::TensorKind kind, DomainIndex home,
                     uint64_t segment_domains);
  TensorSetId AddSet(const Service& service, std::span<const uint32_t> inputs,
                     engine::TensorKind kind, DomainIndex home, uint64_t segment_domains);
  Service Bind(Service service, std::vector<engine::TensorRef> statics);
  void Step(TimeNs at);
  struct Action {
    TimeNs at;
    uint64_t order;
    std::function<void()> run;
    bool operator<(const Action& other) const {
      return at != other.at ? at > other.at : order > other.order;
    }
  };
  engine::Config config_;
  std::unique_ptr<std::byte, void (*)(void*)> gmg_;  // zero pages, made when touched
  std::span<std::byte> gmg_span_;
  VirtualExecutor executor_;
  std::unique_ptr<engine::Engine> engine_;
  TimeNs now_ = 0;
  uint64_t next_action_ = 0;
  std::priority_queue<Action> actions_;
  uint32_t next_id_ = 1;
  uint64_t next_cookie_ = 1;
  uint64_t next_offset_ = 0;
};

}  // namespace slice::testing
