// What-if simulator (paper part 2): one event-driven timeline over devices and links from a
// snapshot and a placement.
//
// PURE: no clock, thread, IO. Deterministic: integer nanoseconds, ties by (class, priority, order,
// op index). The exact rules are in docs/simulation.md; tests/sim/naive_simulator.h is the same in
// the plainest words. Not thread-safe: one Simulator (with its scratch arrays) per thread.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "daemon/estimate/estimator.h"
#include "daemon/sim/snapshot.h"

namespace slice::sim {

// The order in which a device takes ready ops: online before offline, higher priority, lower order,
// lower op index.
struct QueueKey {
  ServiceClass service_class;
  int32_t priority;
  uint64_t order;
  uint32_t op;
};
inline bool RunsBefore(const QueueKey& a, const QueueKey& b) {
  if (a.service_class != b.service_class) return a.service_class < b.service_class;
  if (a.priority != b.priority) return a.priority > b.priority;
  if (a.order != b.order) return a.order < b.order;
  return a.op < b.op;
}

// Duration of an op on a device, at least 1 ns.
DurationNs OpDuration(const Snapshot& snapshot, OpIndex op, DeviceIndex device);

struct Placement {
  OpIndex op = kNone;
  DeviceIndex device = kNoDevice;  // kNoDevice: default rollout, but not before `earliest`
  TimeNs earliest = 0;
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
  TimeNs makespan = 0;
};

struct Options {
  DurationNs horizon = 2 * kSecond;
  DurationNs transfer_overhead = 30 * kMicrosecond;  // Intent -> Recv -> Send commands
};

// What the policy in force says about queues; must be what the engine and the executor do.
struct Rules {
  bool slices = true;   // offline ops respect phantoms
  bool classes = true;  // class and priority order queues and transfers (false: `order` alone, as
                        // under `fifo`)
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

  const estimate::TransferEstimator& transfers() const { return transfers_; }
  const Options& options() const { return options_; }

 private:
  class Core;
  const estimate::TransferEstimator& transfers_;
  Options options_;
  std::unique_ptr<Core> core_;
};

}  // namespace slice::sim
