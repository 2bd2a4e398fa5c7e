// Placement policies: which op batch goes where, given a snapshot. PURE.
//
// One interface, switchable at run time. The engine asks Decide() once per op batch in a round; it
// commits what comes back.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "daemon/gmg/segment.h"
#include "daemon/sim/simulator.h"
#include "daemon/sim/snapshot.h"

namespace slice::sched {

// Heap key of unscheduled ops (scheduling.md section 4): class; priority; feasible-if-run-alone
// before already late; slack in 1 ms buckets; arrival; sequence of creation.
struct OrderKey {
  ServiceClass service_class = ServiceClass::kOffline;
  int32_t priority = 0;
  bool late = false;
  int64_t slack_bucket =
      0;  // of the latest start that meets the deadline: keys of different `now` compare
  TimeNs arrival = 0;
  uint64_t creation = 0;
};
struct WorkItem {  // what a policy may order by
  ServiceClass service_class = ServiceClass::kOffline;
  int32_t priority = 0;
  TimeNs arrival = 0;  // of the sequence
  TimeNs deadline = kNever;
  DurationNs work_left = 0;  // predicted, run alone
  uint64_t creation = 0;     // engine's counter: ties
};

struct CandidateScore {  // what slicectl explain shows; levels compared in order (scheduling.md
                         // section 5)
  bool defer = false;
  DeviceIndex device = kNoDevice;
  bool beaten = false;  // not simulated to its end: what follows is the least that it would be
  bool feasible = true;
  int64_t lateness_bucket = 0;      // summed lateness of online sequences, 1 ms buckets
  int64_t online_added_bucket = 0;  // added online finish time, 1 % buckets
  int64_t batch_finish_bucket = 0;  // 1 % buckets
  int64_t bytes_moved = 0;
  int64_t balance = 0;  // queued nanoseconds on the device, 1 ms buckets
  TimeNs batch_finish = kNever;
};

struct Decision {
  bool placed = false;
  DeviceIndex device = kNoDevice;    // for the first op_count ops of the batch
  uint32_t op_count = 0;             // the whole batch, unless no single device may run all of it
  TimeNs retry_at = kNever;          // deferred: when to look again (an event may come first)
  TimeNs predicted_finish = kNever;  // of the batch
  gmg::DecisionBasis basis = gmg::DecisionBasis::kLevels;
  std::vector<CandidateScore> candidates;

  bool Chose(const CandidateScore& score) const {
    return score.defer ? !placed : placed && score.device == device;
  }
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  virtual OrderKey Key(const WorkItem& item, TimeNs now) const = 0;
  // `batch`: connected unscheduled ops of one instance in `snapshot`, in topological order. `home`:
  // the tenant's home.
  virtual Decision Decide(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                          DeviceIndex home) = 0;
  // Whether submits of this class are taken at all now (online-only parks offline work).
  virtual bool Admits(ServiceClass service_class) const = 0;
  // Whether offline ops obey the slice rule (phantoms, windows, online-hosting devices) under this
  // policy.
  virtual bool RespectsSlices() const = 0;
  // Whether classes order the executor's queues (false: arrival order across classes, as `fifo`).
  virtual bool ClassesOrderQueues() const = 0;
};

bool Less(const OrderKey& a, const OrderKey& b);

// "slice", "fifo", "online-only", "priority". Errors: INVALID (text lists the names).
Result<std::unique_ptr<Policy>> MakePolicy(std::string_view name, sim::Simulator* simulator);

}  // namespace slice::sched
