// The policies behind MakePolicy, and what they share. Only this folder includes it.
#pragma once

#include <utility>
#include <vector>

#include "daemon/sched/policy.h"
#include "daemon/sched/score.h"

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
  struct Outcome {  // of one candidate
    CandidateScore score;
    Measure measure;
    TimeNs retry_at = kNever;
  };
  uint64_t Prune(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                 uint64_t devices, DeviceIndex home) const;
  void Candidates(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                  uint64_t devices, DeviceIndex home);
  Outcome OutcomeOf(size_t candidate) const;
  TimeNs SliceOpening(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                      uint64_t devices);
  void Bucket(const sim::Snapshot& snapshot);
  static bool Better(const CandidateScore& a, const CandidateScore& b, DeviceIndex home);

  std::string_view name_;
  bool admits_offline_;
  sim::Simulator* simulator_;
  // Scratch, kept between calls.
  Scorer scorer_;
  std::vector<sim::Candidate> candidates_;
  std::vector<uint8_t> moves_;  // by candidate: managed tensors, for good
  std::vector<sim::Outcome> simulated_;
  std::vector<Outcome> outcomes_;
  std::vector<DurationNs> queued_;
  sim::Timeline timeline_;
  std::vector<std::pair<TimeNs, TimeNs>> busy_;
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
  std::vector<sim::Candidate> candidates_;
  std::vector<sim::Outcome> outcomes_;
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
  std::vector<sim::Candidate> candidates_;
  std::vector<sim::Outcome> outcomes_;
};

}  // namespace slice::sched
