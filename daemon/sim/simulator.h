// What-if simulator (paper part 2): one event-driven timeline over devices and links from a snapshot and a placement.
//
// PURE: no clock, thread, IO. Deterministic: integer nanoseconds, ties by (class, priority, order, op index).
// Shares RunsBefore() with the executor's queues and transfer::Arbiter's admission rule with the engine, so that the
// simulated order cannot drift from the real one.
// Not thread-safe: one Simulator (with its scratch arrays) per thread.
#pragma once

#include <span>
#include <vector>

#include "daemon/estimate/estimator.h"
#include "daemon/sim/snapshot.h"

namespace slice::sim {

// The order in which a device takes ready ops: online before offline, higher priority, lower order, lower op index.
struct QueueKey {
  ServiceClass service_class;
  int32_t priority;
  uint64_t order;
  uint32_t op;
};
bool RunsBefore(const QueueKey& a, const QueueKey& b);

struct Placement {
  OpIndex op = kNone;
  DeviceIndex device = kNoDevice;
  TimeNs earliest = 0;
};

struct Timeline {
  std::vector<TimeNs> start;         // by op; kNever = not reached inside the horizon
  std::vector<TimeNs> finish;
  std::vector<DeviceIndex> device;   // where it ran (default rollout for ops that are not placed)
  std::vector<TimeNs> instance_finish;
  int64_t bytes_moved = 0;           // by transfers of the window
  bool memory_feasible = true;
  DomainIndex infeasible_domain = kNoDomain;
  TimeNs makespan = 0;
};

struct Options {
  DurationNs horizon = 2 * kSecond;
  DurationNs transfer_overhead = 30 * kMicrosecond;  // Intent -> Recv -> Send commands
};

class Simulator {
 public:
  Simulator(const estimate::TransferEstimator& transfers, Options options);
  // Overlays `batch` on the snapshot and runs to the end (or the horizon). Ops that are neither placed nor in the batch
  // take the default rollout: the allowed device with the earliest finish given residency.
  // `out` is reused. Work conserving except for windows (earliest) and the slice rule for offline ops.
  void Run(const Snapshot& snapshot, std::span<const Placement> batch, Timeline* out);

 private:
  const estimate::TransferEstimator& transfers_;
  Options options_;
  struct Scratch;
  std::vector<uint32_t> pending_;
  std::vector<uint64_t> resident_;
};

}  // namespace slice::sim
