// The policies behind MakePolicy, and what they share. Only this folder includes it.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "daemon/sched/policy.h"

namespace slice::sched {

// Class; priority; feasible first; least slack; arrival (scheduling.md section 4).
OrderKey SlackFirstKey(const WorkItem& item, TimeNs now);
OrderKey ArrivalKey(const WorkItem& item);

// The longest front of the batch that some one device may run, and the devices that may.
struct BatchDevices {
  uint32_t op_count = 0;
  uint64_t devices = 0;
};
BatchDevices DevicesFor(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch);

// Bytes that the batch reads and that are not in the device's memory yet; `managed_bytes`: the part
// that moves for good.
int64_t BytesToMove(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                    DeviceIndex device, int64_t* managed_bytes);

// Finish of the batch in the timeline; past the horizon, the horizon plus what is left of it.
TimeNs BatchFinish(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                   const sim::Timeline& timeline, TimeNs horizon_end);

// Work that is placed on each device and not finished, in ns from now.
void QueuedWork(const sim::Snapshot& snapshot, std::vector<DurationNs>* by_device);

// Nowhere to go now: looked at again after this long, if no event comes first.
inline constexpr DurationNs kRetry = 10 * kMillisecond;
Decision Nowhere(const sim::Snapshot& snapshot);

// `slice` and `online-only`.
class SlicePolicy : public Policy {
 public:
  SlicePolicy(std::string_view name, bool admits_offline, sim::Simulator* simulator)
      : name_(name), admits_offline_(admits_offline), simulator_(simulator) {}
  std::string_view name() const override { return name_; }
  OrderKey Key(const WorkItem& item, TimeNs now) const override { return SlackFirstKey(item, now); }
  Decision Decide(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                  DeviceIndex home) override;
  bool Admits(ServiceClass service_class) const override {
    return admits_offline_ || service_class == ServiceClass::kOnline;
  }
  bool RespectsSlices() const override { return true; }
  bool ClassesOrderQueues() const override { return true; }

 private:
  struct Outcome {  // of one simulated candidate, before bucketing
    CandidateScore score;
    int64_t lateness = 0;         // ns, summed over online sequences
    int64_t online_finish = 0;    // ns from now, summed over online instances
    DurationNs finish_after = 0;  // of the batch, from now, with the price of moving
    TimeNs retry_at = kNever;
  };
  uint64_t Prune(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                 uint64_t devices, DeviceIndex home) const;
  Outcome Simulate(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                   DeviceIndex device, TimeNs earliest);
  TimeNs SliceOpening(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                      uint64_t devices);
  void CountSequences(const sim::Snapshot& snapshot);
  void Bucket(const sim::Snapshot& snapshot);
  static bool Better(const CandidateScore& a, const CandidateScore& b, DeviceIndex home);

  std::string_view name_;
  bool admits_offline_;
  sim::Simulator* simulator_;
  // Scratch, kept between calls.
  sim::Timeline timeline_;
  std::vector<sim::Placement> placements_;
  std::vector<Outcome> outcomes_;
  std::vector<DurationNs> queued_;
  std::vector<std::pair<TimeNs, TimeNs>> busy_;
  std::vector<DeviceIndex> last_device_;             // by instance
  std::array<int32_t, kDevicesMax> sequences_on_{};  // by device
};

// Baselines that take one look: `fifo` (earliest-free device, arrival order across classes) and
// `priority` (earliest finish, slice's order, no gap rule).
class FifoPolicy : public Policy {
 public:
  explicit FifoPolicy(sim::Simulator* simulator) : simulator_(simulator) {}
  std::string_view name() const override { return "fifo"; }
  OrderKey Key(const WorkItem& item, TimeNs) const override { return ArrivalKey(item); }
  Decision Decide(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                  DeviceIndex home) override;
  bool Admits(ServiceClass) const override { return true; }
  bool RespectsSlices() const override { return false; }
  bool ClassesOrderQueues() const override { return false; }

 private:
  sim::Simulator* simulator_;
  sim::Timeline timeline_;
  std::vector<sim::Placement> placements_;
  std::vector<DurationNs> queued_;
};

class PriorityPolicy : public Policy {
 public:
  explicit PriorityPolicy(sim::Simulator* simulator) : simulator_(simulator) {}
  std::string_view name() const override { return "priority"; }
  OrderKey Key(const WorkItem& item, TimeNs now) const override { return SlackFirstKey(item, now); }
  Decision Decide(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                  DeviceIndex home) override;
  bool Admits(ServiceClass) const override { return true; }
  bool RespectsSlices() const override { return false; }
  bool ClassesOrderQueues() const override { return true; }

 private:
  sim::Simulator* simulator_;
  sim::Timeline timeline_;
  std::vector<sim::Placement> placements_;
};

}  // namespace slice::sched
