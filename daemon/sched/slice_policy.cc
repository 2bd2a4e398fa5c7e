// The policy of the paper: every candidate, deferral too, is simulated over the live window; the
// outcomes are compared level by level in buckets (scheduling.md section 5), so that noise in the
// predictions moves nothing.
#include <algorithm>
#include <array>
#include <bit>
#include <tuple>

#include "daemon/sched/policies.h"

namespace slice::sched {
namespace {

constexpr int kCandidatesMax = 4;  // beside home
constexpr DurationNs kDeferMin = 100 * kMicrosecond;
constexpr DurationNs kDeferMax = 100 * kMillisecond;
// Moving state for good must pay by more than the predictions' noise: its finish counts as 1/20
// later.
constexpr int64_t kMoveHysteresis = 20;

// Whole percents above the best. Floor: less than 1 % is no difference.
int64_t PercentAbove(int64_t value, int64_t best) {
  if (best == kNever || value <= best) return 0;
  const int64_t unit = std::max<int64_t>(1, best / 100);
  return (value - best) / unit;
}

bool OnlineAround(const sim::Snapshot& snapshot) {
  for (const sim::SnapInstance& instance : snapshot.instances) {
    if (instance.service_class == ServiceClass::kOnline) return true;
  }
  for (const sim::SnapDevice& device : snapshot.devices) {
    if (device.phantom_until > snapshot.now) return true;
  }
  return false;
}

}  // namespace

Decision SlicePolicy::Decide(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                             DeviceIndex home) {
  const BatchDevices allowed = DevicesFor(snapshot, batch);
  if (allowed.op_count == 0) return Nowhere(snapshot);
  batch = batch.first(allowed.op_count);
  const bool offline = snapshot.ops[batch[0]].service_class == ServiceClass::kOffline;
  const uint64_t devices = Prune(snapshot, batch, allowed.devices, home);

  outcomes_.clear();
  for (uint64_t left = devices; left != 0; left &= left - 1) {
    outcomes_.push_back(
        Simulate(snapshot, batch, static_cast<DeviceIndex>(std::countr_zero(left)), 0));
  }
  if (offline && OnlineAround(snapshot)) {
    const TimeNs opening = SliceOpening(snapshot, batch, allowed.devices);
    if (opening != kNever) outcomes_.push_back(Simulate(snapshot, batch, kNoDevice, opening));
  }
  if (outcomes_.size() > 1) {
    Bucket(snapshot);
    std::sort(outcomes_.begin(), outcomes_.end(), [home](const Outcome& a, const Outcome& b) {
      return Better(a.score, b.score, home);
    });
  }
  // Where nothing fits, home does: its reservation holds whatever runs there.
  size_t chosen = 0;
  if (!outcomes_[0].score.feasible) {
    for (size_t i = 0; i < outcomes_.size(); ++i) {
      if (outcomes_[i].score.device == home && !outcomes_[i].score.defer) chosen = i;
    }
  }
  Decision decision;
  const Outcome& best = outcomes_[chosen];
  decision.placed = !best.score.defer;
  decision.device = best.score.device;
  decision.retry_at = best.retry_at;
  decision.predicted_finish = best.score.batch_finish;
  decision.op_count = allowed.op_count;
  decision.candidates.reserve(outcomes_.size());
  for (const Outcome& outcome : outcomes_) decision.candidates.push_back(outcome.score);
  return decision;
}

// Long offline ops keep off devices with online tenants; beyond that, the few devices with the
// least lower bound of (free, bytes moved) + work. Home always stays.
uint64_t SlicePolicy::Prune(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                            uint64_t devices, DeviceIndex home) const {
  if (snapshot.ops[batch[0]].service_class == ServiceClass::kOffline &&
      snapshot.offline_op_max != kNever) {
    uint64_t quiet = devices;
    for (uint64_t left = devices; left != 0; left &= left - 1) {
      const auto device = static_cast<DeviceIndex>(std::countr_zero(left));
      if (!snapshot.devices[device].hosts_online) continue;
      for (const sim::OpIndex op : batch) {
        if (sim::OpDuration(snapshot, op, device) > snapshot.offline_op_max)
          quiet &= ~(uint64_t{1} << device);
      }
    }
    if (quiet != 0) devices = quiet;
  }
  if (std::popcount(devices) <= kCandidatesMax + 1) return devices;

  std::array<std::pair<DurationNs, DeviceIndex>, kDevicesMax> bounds;
  size_t count = 0;
  for (uint64_t left = devices; left != 0; left &= left - 1) {
    const auto device = static_cast<DeviceIndex>(std::countr_zero(left));
    int64_t managed = 0;
    const int64_t bytes = BytesToMove(snapshot, batch, device, &managed);
    DurationNs copy = 0;
    if (bytes > 0) {
      const DomainIndex here = snapshot.devices[device].domain;
      const DomainIndex there =
          home < snapshot.devices.size() ? snapshot.devices[home].domain : here;
      copy = simulator_->transfers().Predict(there, here, bytes);
    }
    DurationNs work = 0;
    for (const sim::OpIndex op : batch) work += sim::OpDuration(snapshot, op, device);
    bounds[count++] = {std::max(snapshot.devices[device].free_at - snapshot.now, copy) + work,
                       device};
  }
  std::sort(bounds.begin(), bounds.begin() + static_cast<std::ptrdiff_t>(count));
  uint64_t kept = home < kDevicesMax ? devices & (uint64_t{1} << home) : 0;
  for (size_t i = 0; i < kCandidatesMax; ++i) kept |= uint64_t{1} << bounds[i].second;
  return kept;
}

// `device` kNoDevice: the rollout chooses, not before `earliest`; that is what a deferral is scored
// by.
SlicePolicy::Outcome SlicePolicy::Simulate(const sim::Snapshot& snapshot,
                                           std::span<const sim::OpIndex> batch, DeviceIndex device,
                                           TimeNs earliest) {
  placements_.clear();
  for (const sim::OpIndex op : batch) placements_.push_back({op, device, earliest});
  simulator_->Run(snapshot, placements_, &timeline_);

  const TimeNs horizon_end = snapshot.now + simulator_->options().horizon;
  Outcome outcome;
  outcome.score.defer = device == kNoDevice;
  outcome.score.device = device;
  outcome.score.feasible = timeline_.memory_feasible;
  outcome.score.bytes_moved = timeline_.bytes_moved;
  outcome.score.batch_finish = BatchFinish(snapshot, batch, timeline_, horizon_end);
  outcome.retry_at = device == kNoDevice ? earliest : kNever;
  outcome.finish_after = std::max<DurationNs>(0, outcome.score.batch_finish - snapshot.now);
  int64_t managed = 0;
  if (device != kNoDevice) BytesToMove(snapshot, batch, device, &managed);
  if (managed > 0) outcome.finish_after += outcome.finish_after / kMoveHysteresis;

  // Where an online step runs decides where the rest of its sequence will: sequences on one device
  // share its time. A move is paid once, sharing every step, so an online batch looks to the ends
  // of sequences. Offline work never changes who shares with whom; for it the steps in the window
  // are the finer measure.
  const bool whole = snapshot.ops[batch[0]].service_class == ServiceClass::kOnline;
  if (whole) CountSequences(snapshot);
  for (size_t i = 0; i < snapshot.instances.size(); ++i) {
    const sim::SnapInstance& instance = snapshot.instances[i];
    if (instance.service_class != ServiceClass::kOnline) continue;
    TimeNs finish = timeline_.instance_finish[i];
    if (finish == kNever) finish = horizon_end + timeline_.instance_left[i];
    DurationNs rest = instance.rest_of_sequence;
    if (whole && last_device_[i] != kNoDevice) rest *= sequences_on_[last_device_[i]];
    outcome.online_finish += finish - snapshot.now + (whole ? rest : 0);
    if (instance.deadline == kNever) continue;
    outcome.lateness += std::max<DurationNs>(0, finish + rest - instance.deadline);
  }
  return outcome;
}

// Online sequences that go on after their step of the window, by the device where it ends in
// `timeline_`.
void SlicePolicy::CountSequences(const sim::Snapshot& snapshot) {
  last_device_.assign(snapshot.instances.size(), kNoDevice);
  sequences_on_.fill(0);
  for (sim::OpIndex i = 0; i < snapshot.ops.size(); ++i) {
    const sim::SnapOp& op = snapshot.ops[i];
    if (op.service_class != ServiceClass::kOnline || op.instance >= snapshot.instances.size())
      continue;
    if (timeline_.finish[i] == timeline_.instance_finish[op.instance])
      last_device_[op.instance] = timeline_.device[i];
  }
  for (size_t i = 0; i < snapshot.instances.size(); ++i) {
    if (last_device_[i] != kNoDevice && snapshot.instances[i].rest_of_sequence > 0)
      ++sequences_on_[last_device_[i]];
  }
  for (size_t i = 0; i < snapshot.devices.size(); ++i) {
    if (snapshot.devices[i].phantom_until > snapshot.now)
      ++sequences_on_[i];  // one more between two steps
    sequences_on_[i] = std::max(sequences_on_[i], 1);
  }
}

// When the batch's first op could first run on an allowed device without touching online work: the
// first gap in the online ops of a timeline without the batch that holds it. kNever if a device is
// open now.
TimeNs SlicePolicy::SliceOpening(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                                 uint64_t devices) {
  placements_.clear();
  for (const sim::OpIndex op : batch) placements_.push_back({op, kNoDevice, kNever});
  simulator_->Run(snapshot, placements_, &timeline_);

  TimeNs opening = kNever;
  for (uint64_t left = devices; left != 0; left &= left - 1) {
    const auto device = static_cast<DeviceIndex>(std::countr_zero(left));
    const sim::SnapDevice& from = snapshot.devices[device];
    busy_.clear();
    if (from.free_at > snapshot.now) busy_.emplace_back(snapshot.now, from.free_at);
    if (from.phantom_until > snapshot.now)
      busy_.emplace_back(from.phantom_from, from.phantom_until);
    for (sim::OpIndex i = 0; i < snapshot.ops.size(); ++i) {
      const sim::SnapOp& op = snapshot.ops[i];
      if (op.service_class != ServiceClass::kOnline || timeline_.device[i] != device) continue;
      TimeNs end = timeline_.finish[i];
      if (op.instance < snapshot.instances.size()) {
        // Behind the last op of a step comes the gap in which the next one is expected.
        const sim::SnapInstance& instance = snapshot.instances[op.instance];
        if (instance.gap_p90 > 0 && timeline_.instance_finish[op.instance] == end) {
          busy_.emplace_back(end + instance.gap_p10, end + instance.gap_p90);
        }
      }
      busy_.emplace_back(timeline_.start[i], end);
    }
    std::sort(busy_.begin(), busy_.end());
    const DurationNs needed = sim::OpDuration(snapshot, batch[0], device);
    TimeNs open = snapshot.now;
    for (const auto& [begin, end] : busy_) {
      if (open + needed <= begin) break;
      open = std::max(open, end);
    }
    opening = std::min(opening, open);
  }
  if (opening <= snapshot.now || opening == kNever) return kNever;
  return std::clamp(opening, snapshot.now + kDeferMin, snapshot.now + kDeferMax);
}

void SlicePolicy::Bucket(const sim::Snapshot& snapshot) {
  int64_t online_best = kNever;
  DurationNs finish_best = kNever;
  for (const Outcome& outcome : outcomes_) {
    online_best = std::min(online_best, outcome.online_finish);
    finish_best = std::min(finish_best, outcome.finish_after);
  }
  QueuedWork(snapshot, &queued_);
  for (Outcome& outcome : outcomes_) {
    CandidateScore& score = outcome.score;
    score.lateness_bucket = outcome.lateness / kMillisecond;
    score.online_added_bucket = PercentAbove(outcome.online_finish, online_best);
    score.batch_finish_bucket = PercentAbove(outcome.finish_after, finish_best);
    score.balance = score.device < queued_.size() ? queued_[score.device] / kMillisecond : 0;
  }
}

bool SlicePolicy::Better(const CandidateScore& a, const CandidateScore& b, DeviceIndex home) {
  return std::make_tuple(!a.feasible, a.lateness_bucket, a.online_added_bucket,
                         a.batch_finish_bucket, a.bytes_moved, a.defer, a.balance, a.device != home,
                         a.device) < std::make_tuple(!b.feasible, b.lateness_bucket,
                                                     b.online_added_bucket, b.batch_finish_bucket,
                                                     b.bytes_moved, b.defer, b.balance,
                                                     b.device != home, b.device);
}

}  // namespace slice::sched
