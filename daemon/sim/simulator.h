// What-if simulator (paper part 2): one event-driven timeline over devices and links from a
// snapshot and a placement.
//
// PURE: no clock, thread, IO. Deterministic: integer nanoseconds, ties by (class, priority, order,
// op index). The exact rules are in docs/simulation.md; tests/sim/naive_simulator.h is the same in
// the plainest words. Two ways to use it:
//
//   Run       one placement, the whole timeline;
//   Evaluate  many candidates for one op batch: the snapshot is prepared once, what happens before
//             the batch becomes ready is simulated once, and a candidate stops where it is beaten.
//
// Threads: one Simulator (with its scratch arrays) per thread. Evaluate may hand its candidates to
// threads of the caller (Options::for_each); the outcome is the same, bit for bit.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "common/queue_rules.h"
#include "daemon/estimate/estimator.h"
#include "daemon/sim/snapshot.h"

namespace slice::sim {

// Duration of an op on a device, at least 1 ns.
DurationNs OpDuration(const Snapshot& snapshot, OpIndex op, DeviceIndex device);

struct Placement {
  OpIndex op = kNone;
  DeviceIndex device = kNoDevice;  // kNoDevice: default rollout, but not before `earliest`
  TimeNs earliest = 0;
};

// The first thing that cannot be: an op placed where an input is pinned away, or memory that is not
// there.
struct Infeasible {
  enum class Cause : uint8_t { kNothing, kMemory, kPinned };
  Cause cause = Cause::kNothing;
  DomainIndex domain = kNoDomain;
  TimeNs at = kNever;
  OpIndex op = kNone;          // whose outputs or input; kNone: a copy
  TensorIndex tensor = kNone;  // the copy, or the pinned input; kNone: the outputs of `op`
  int64_t short_bytes = 0;     // kMemory: how many are missing
  bool operator==(const Infeasible&) const = default;
};

struct MemoryPoint {  // free bytes of a domain from `at` on
  TimeNs at = 0;
  int64_t free_bytes = 0;
  bool operator==(const MemoryPoint&) const = default;
};

struct Timeline {
  std::vector<TimeNs> start;  // by op; kNever = not reached inside the horizon
  std::vector<TimeNs> finish;
  std::vector<DeviceIndex> device;  // where it ran (default rollout for ops that are not placed)
  std::vector<TimeNs>
      instance_finish;  // kNever when an op of it was not reached; now when it has no ops
  std::vector<DurationNs> instance_left;  // work of the ops that were not reached, on device kind 0
  int64_t bytes_moved = 0;                // by transfers of the window
  bool memory_feasible = true;
  DomainIndex infeasible_domain = kNoDomain;
  Infeasible infeasible;
  TimeNs makespan = 0;
  std::vector<std::vector<MemoryPoint>> memory;  // by domain: its curve; with Options::memory_curve
  std::vector<int64_t> free_bytes_min;           // by domain: its peak
};

struct Options {
  DurationNs horizon = 2 * kSecond;                  // counts as kHorizonMax where it is longer
  DurationNs transfer_overhead = 30 * kMicrosecond;  // Intent -> Recv -> Send commands
  bool memory_curve = false;                         // in timelines
  // Runs job(0) ... job(count - 1), in any order, on any threads, and returns when all have ended.
  // Empty: one after the other, on the caller's.
  std::function<void(size_t count, const std::function<void(size_t)>& job)> for_each;
};
inline constexpr DurationNs kHorizonMax = DurationNs{1} << 54;  // 208 days

// What the policy in force says about queues; must be what the engine and the executor do.
struct Rules {
  bool slices = true;   // offline ops respect phantoms
  bool classes = true;  // class and priority order queues and transfers (false: `order` alone, as
                        // under `fifo`)
};

// One way to place all ops of a batch.
struct Candidate {
  DeviceIndex device = kNoDevice;  // kNoDevice: default rollout
  TimeNs earliest = 0;
};

struct InstanceOutcome {
  TimeNs finish = 0;                    // kNever: an op of it was not reached
  DeviceIndex last_device = kNoDevice;  // where its last op ended
  DurationNs left = 0;                  // work that was not reached, on device kind 0
};

struct Outcome {
  bool beaten = false;  // stopped early: what follows is what had happened by then
  Infeasible infeasible;
  int64_t bytes_moved = 0;
  TimeNs batch_finish = 0;    // of the ops of the batch that were reached
  DurationNs batch_left = 0;  // of those that were not, on device kind 0
  std::vector<InstanceOutcome> instances;
  bool feasible() const { return infeasible.cause == Infeasible::Cause::kNothing; }
};

struct InstanceProgress {
  TimeNs finish = 0;        // of those of its ops that have ended and that none of it waits for
  uint32_t unfinished = 0;  // such ops that have not ended; 0: the instance has
  OpIndex last = kNone;     // which ended at `finish`
  DeviceIndex last_device = kNoDevice;
};

// What is known of a candidate while it is simulated. Each can only grow worse.
struct Progress {
  TimeNs now = 0;  // nothing that is unfinished can end before
  bool feasible = true;
  int64_t bytes_moved = 0;
  TimeNs batch_finish_least = 0;  // the batch cannot end before; at most the end of the horizon
                                  // while it has not
  bool batch_ended = false;
  std::span<const InstanceProgress> instances;
};

// Decides when a candidate is beaten by the first one. Its calls may come from any thread of
// Options::for_each, for several candidates at a time.
class Bound {
 public:
  static constexpr TimeNs kBeaten = INT64_MIN;
  virtual ~Bound() = default;
  // The first candidate has been simulated to its end.
  virtual void First(const Outcome& outcome) = 0;
  // kBeaten: stop. Else when to ask again: asked at the first event at or after that time.
  virtual TimeNs Ask(size_t candidate, const Progress& progress) const = 0;
};

class Simulator {
 public:
  // `transfers` outlives the simulator.
  Simulator(const estimate::TransferEstimator& transfers, Options options);
  ~Simulator();
  Simulator(const Simulator&) = delete;
  Simulator& operator=(const Simulator&) = delete;

  // Overlays `batch` on the snapshot and runs to the end (or the horizon). Ops that are neither
  // placed nor in the batch take the default rollout: the allowed device with the earliest finish
  // given residency. `out` is reused. Work conserving except for windows (earliest) and the slice
  // rule for offline ops.
  void Run(const Snapshot& snapshot, std::span<const Placement> batch, Timeline* out) {
    Run(snapshot, batch, Rules{}, out);
  }
  void Run(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules, Timeline* out);

  // Packs a snapshot for Evaluate and RunPrepared with this batch; it must stay as it is until the
  // last of them.
  void Prepare(const Snapshot& snapshot, std::span<const OpIndex> batch, Rules rules);
  // Simulates each candidate; outcomes in their order, `out` is reused. With a bound, the first
  // candidate is simulated to its end and the others until it beats them.
  void Evaluate(std::span<const Candidate> candidates, Bound* bound, std::vector<Outcome>* out);
  // The whole timeline of one candidate.
  void RunPrepared(const Candidate& candidate, Timeline* out);
  // Bytes of the prepared snapshot and of one simulation's state.
  size_t bytes() const;

  const estimate::TransferEstimator& transfers() const { return transfers_; }
  const Options& options() const { return options_; }

 private:
  struct Scratch;
  const estimate::TransferEstimator& transfers_;
  Options options_;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace slice::sim
