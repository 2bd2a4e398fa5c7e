// The engine thread: owns the Engine, the fast-path rings to the executor, and the daemon's ends of
// all tenants' rings. Everything that touches them runs here; the server thread hands closures in
// with Call.
//
//   tenants' submit rings ─┐                        ┌─► completion rings
//   executor's reports ────┼─► Engine::Handle, Run ─┼─► executor's command ring
//   server thread (Call) ──┘                        └─► timeline
//
// One turn: mailbox, reports, submissions (bounded per tenant), Engine::Run, then flush what the
// engine asked for. When there is nothing to do it announces sleep in every ring, looks once more,
// and sleeps in epoll until an eventfd, the engine's next wake or the mailbox. It never waits for a
// tenant and never for the server thread.
//
// Tenant data: a slot and its arguments are copied once (TenantRing), checked here against the
// session's own tables, and only then handed to the engine as ids. A tenant fault becomes a typed
// completion and is counted; past the limit, or on impossible ring indices, `Events::TenantFault`
// asks the server thread to end the session.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "common/fd.h"
#include "common/log.h"
#include "common/status.h"
#include "common/wire/record_ring.h"
#include "daemon/engine/engine.h"
#include "daemon/server/executor_watch.h"
#include "daemon/server/mailbox.h"
#include "daemon/server/tenant_ring.h"
#include "daemon/server/timeline.h"
#include "daemon/server/wake_latency.h"

namespace slice::server {

// The engine's ends of one executor's rings.
struct ExecutorRings {
  Mapping commands, reports;
  Fd engine_event;                // the executor signals
  std::vector<Fd> device_events;  // by device; the engine signals
};

// What a tenant's handle on the fast path stands for; from the session's tables.
struct RingBinding {
  BindingId id;
  std::shared_ptr<const graph::Template> graph;
};
struct RingTensor {
  engine::TensorRef ref;
  engine::TensorKind kind = engine::TensorKind::kConstant;
  uint64_t dense_bytes = 0;
  uint32_t dimensions = 0;
};

class EngineLoop final : private engine::Sink {
 public:
  // Called on the engine thread; implementations post to the server thread.
  struct Events {
    std::function<void(TenantId, Status)> tenant_fault;
    // Broke its protocol, or hangs. `generation` as given to AttachExecutor.
    std::function<void(uint64_t generation, Status)> executor_fault;
  };
  struct Options {
    uint32_t sequences_max = 4096;
    uint32_t faults_max = 16;
    int32_t cpu_wake_latency_us = -1;  // see wake_latency.h
    ExecutorWatch::Limits executor_limits;
    size_t timeline_events_max = 1'000'000;
  };
  using EngineFactory = std::function<Result<std::unique_ptr<engine::Engine>>(
      const engine::Config&, std::span<std::byte>, engine::Sink*)>;

  static Result<std::unique_ptr<EngineLoop>> Create(const engine::Config& config,
                                                    std::span<std::byte> gmg_memory,
                                                    const EngineFactory& factory, Options options,
                                                    Events events);
  ~EngineLoop() override;
  void Start();
  // After it Call runs closures on the calling thread.
  void Stop();

  // ---- any thread ----
  // Runs `task` on the engine thread and waits for it. Not from the engine thread.
  void Call(const std::function<void()>& task);
  // Fast-path turns so far; for tests.
  uint64_t turns() const { return turns_.load(std::memory_order_relaxed); }

  // ---- engine thread: inside Call ----
  engine::Engine& engine() { return *engine_; }
  Timeline& timeline() { return timeline_; }
  // `then` runs on the engine thread in the turn in which `condition` holds.
  void WhenTrue(std::function<bool()> condition, std::function<void()> then);
  // Before the end of this turn, which does it anyway.
  void RunWatches();

  Status AddTenant(const engine::TenantConfig& config, std::unique_ptr<TenantRing> ring);
  bool HasTenant(TenantId tenant) const { return tenants_.contains(tenant.value); }
  // Its ring is let go, completions go nowhere. `complete_with`: what waiting requests are told
  // first.
  void RemoveTenant(TenantId tenant, StatusCode complete_with);
  // Takes what is in its submit ring. Requests of the socket that end something are answered after
  // it: else they would overtake a submit that the tenant made before.
  void TakeSubmitted(TenantId tenant);
  void AddBinding(TenantId tenant, uint64_t handle, RingBinding binding);
  void RemoveBinding(TenantId tenant, uint64_t handle);
  // Takes it out of the engine; false while requests use it. Of a tenant that has ended: true when
  // nothing is left of it.
  bool TryRemoveBinding(TenantId tenant, BindingId binding);
  void AddTensor(TenantId tenant, uint64_t handle, RingTensor tensor);
  void RemoveTensor(TenantId tenant, uint64_t handle);
  // "" when the token is unknown or too old.
  std::string ErrorText(TenantId tenant, uint32_t token) const;

  // The rings of an executor that has all tables again; then Engine::ExecutorReady.
  void AttachExecutor(std::unique_ptr<ExecutorRings> rings, uint64_t generation);
  // The executor is dead: reports that it still wrote are handled, then Engine::ExecutorLost.
  // Returns whose ops it was running, the likeliest cause first.
  std::vector<engine::TenantUser> DetachExecutor();
  void ExecutorGivenUp();

  // The engine's answers, with what only the shell knows.
  std::string StatusJson();
  std::string DevicesJson(bool executor_stopped);

 private:
  struct LiveSubmit {
    BindingId binding;  // 0: a tensor command
    std::vector<wire::ArenaRange> outputs;
  };
  // When a throttled ring is looked at again without a signal: sooner first, then more and more
  // seldom, so that a tenant that never reads its completions does not keep the daemon awake.
  struct Throttle {
    TimeNs look_at = kNever;
    DurationNs delay = 0;  // before that look; 0: start afresh
  };
  struct Tenant {
    engine::TenantConfig config;
    std::unique_ptr<TenantRing> ring;
    Throttle throttle;
    std::unordered_map<uint64_t, RingBinding> bindings;
    std::unordered_map<uint64_t, RingTensor> tensors;
    std::unordered_map<uint64_t, LiveSubmit> live;  // by cookie
    std::map<uint64_t, uint64_t> live_outputs;      // arena offset -> end
    std::unordered_set<uint64_t> sequences;
    std::map<uint32_t, std::string> texts;  // by token, the last few
    uint32_t next_token = 1;
    uint32_t faults = 0;
    uint64_t submits = 0;
    bool broken = false;  // reported; its ring is no longer read
  };
  struct Watch {
    std::function<bool()> condition;
    std::function<void()> then;
  };

  EngineLoop(const engine::Config& config, Options options, Events events);
  Status OpenDescriptors();
  void Main();
  bool Turn();
  void Sleep();
  void ArmTimer(TimeNs when);
  TimeNs NextWake() const;

  // Hot path (engine_submit.cc).
  // At most `slots_max` slots; true when there were any.
  bool DrainSubmissions(Tenant* tenant, uint32_t slots_max);
  void NoteThrottle(Tenant* tenant, bool worked);
  void HandleSlot(Tenant* tenant, const TenantRing::Submission& submission);
  void WakeAhead(const Tenant& tenant);
  Status HandleGraph(Tenant* tenant, const TenantRing::Submission& submission);
  Status HandleCommand(Tenant* tenant, const TenantRing::Submission& submission);
  Status HandleSequence(Tenant* tenant, const wire::SubmitSlot& slot);
  Status ReadRange(const Tenant& tenant, const wire::Argument& argument,
                   wire::ArenaRange* range) const;
  Status ReserveOutputs(Tenant* tenant, std::span<const wire::ArenaRange> outputs);
  void ReleaseLive(Tenant* tenant, uint64_t cookie);
  void Fault(Tenant* tenant, const Status& status);
  void Break(Tenant* tenant, const Status& status);
  void CompleteWithError(Tenant* tenant, uint64_t cookie, const Status& status);
  uint32_t KeepText(Tenant* tenant, const std::string& text);

  bool DrainReports();
  void NoteReport(uint32_t type, std::span<const std::byte> payload);
  void WatchExecutor();
  void ForgetExecutorState();
  void FlushCommands();

  // Sink
  void ToExecutor(uint32_t type, std::span<const std::byte> payload, DeviceIndex wake) override;
  void CommandsReady() override { FlushCommands(); }
  void Complete(TenantId tenant, const wire::CompletionSlot& completion,
                const std::string& text) override;
  void Trace(const engine::TraceEvent& event) override;

  const Options options_;
  const Events events_;
  const std::vector<engine::DeviceConfig> devices_;
  Timeline timeline_;
  std::unique_ptr<engine::Engine> engine_;
  TimeNs now_ = 0;

  Fd epoll_, timer_;
  Mailbox mailbox_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  bool running_ = false;  // the thread was started and not stopped; server thread
  std::atomic<uint64_t> turns_{0};
  TimeNs armed_ = kNever;

  std::map<uint32_t, std::unique_ptr<Tenant>> tenants_;
  std::unordered_set<uint32_t> to_publish_;
  TenantRing::Submission submission_;  // scratch
  std::vector<wire::ArenaRange> inputs_, outputs_;
  std::vector<int64_t> symbols_;
  std::vector<engine::TensorRef> refs_;

  std::unique_ptr<ExecutorRings> executor_;
  std::unique_ptr<RecordRing> commands_, reports_;
  RecordRing::Record record_;
  struct Command {
    uint32_t type;
    std::vector<std::byte> payload;
  };
  std::deque<Command> overflow_;  // commands that the ring had no room for
  std::vector<bool> wake_devices_;
  bool wake_any_ = false;
  DeviceIndex woken_ahead_ = kNoDevice;  // by WakeAhead; nobody has been seen asleep since
  WakeLatency wake_latency_;
  ExecutorWatch executor_watch_;
  bool silence_logged_ = false;
  std::vector<bool> stuck_logged_;  // by device
  uint64_t executor_generation_ = 0;
  bool reports_broken_ = false;  // nothing more is believed until another executor is attached
  bool hang_reported_ = false;

  std::vector<Watch> watches_;
  std::array<DurationNs, 1024> round_samples_{};
  uint64_t round_count_ = 0;
  RateLimitedLog fault_log_{"server", 5};
  RateLimitedLog executor_log_{"server", 5};
};

}  // namespace slice::server
