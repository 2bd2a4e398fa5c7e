// The policy of the paper: every candidate, deferral too, is simulated over the live window; the
// outcomes are compared level by level in buckets (scheduling.md section 5), so that noise in the
// predictions moves nothing. A candidate that cannot win any more is not simulated further.
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

  simulator_->Prepare(snapshot, batch, sim::Rules{RespectsSlices(), ClassesOrderQueues()});
  Candidates(snapshot, batch, devices, home);
  if (offline && OnlineAround(snapshot)) {
    const TimeNs opening = SliceOpening(snapshot, batch, allowed.devices);
    if (opening != kNever) {
      candidates_.push_back({kNoDevice, opening});
      moves_.push_back(0);
    }
  }
  scorer_.Start(snapshot, batch, snapshot.now + simulator_->options().horizon, moves_);
  simulator_->Evaluate(candidates_, &scorer_, &simulated_);
  outcomes_.clear();
  for (size_t i = 0; i < candidates_.size(); ++i) outcomes_.push_back(OutcomeOf(i));
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
  decision.basis =
      outcomes_.size() > 1 ? gmg::DecisionBasis::kLevels : gmg::DecisionBasis::kOneDevice;
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

// Home first: it wins most rounds, and what comes first is what the others have to beat.
void SlicePolicy::Candidates(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                             uint64_t devices, DeviceIndex home) {
  candidates_.clear();
  moves_.clear();
  const auto add = [&](DeviceIndex device) {
    int64_t managed = 0;
    BytesToMove(snapshot, batch, device, &managed);
    candidates_.push_back({device, 0});
    moves_.push_back(managed > 0 ? 1 : 0);
  };
  if (home < kDevicesMax && (devices >> home & 1) != 0) add(home);
  for (uint64_t left = devices; left != 0; left &= left - 1) {
    const auto device = static_cast<DeviceIndex>(std::countr_zero(left));
    if (device != home) add(device);
  }
}

SlicePolicy::Outcome SlicePolicy::OutcomeOf(size_t candidate) const {
  Outcome outcome;
  outcome.measure = scorer_.Of(candidate, simulated_[candidate]);
  CandidateScore& score = outcome.score;
  score.device = candidates_[candidate].device;
  score.defer = score.device == kNoDevice;
  score.beaten = simulated_[candidate].beaten;
  score.feasible = outcome.measure.feasible;
  score.bytes_moved = outcome.measure.bytes_moved;
  score.batch_finish = outcome.measure.batch_finish;
  if (score.defer) outcome.retry_at = candidates_[candidate].earliest;
  return outcome;
}

// When the batch's first op could first run on an allowed device without touching online work: the
// first gap in the online ops of a timeline without the batch that holds it. kNever if a device is
// open now.
TimeNs SlicePolicy::SliceOpening(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                                 uint64_t devices) {
  simulator_->RunPrepared({kNoDevice, kNever}, &timeline_);

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
    online_best = std::min(online_best, outcome.measure.online_finish);
    finish_best = std::min(finish_best, outcome.measure.finish_after);
  }
  QueuedWork(snapshot, &queued_);
  for (Outcome& outcome : outcomes_) {
    CandidateScore& score = outcome.score;
    score.lateness_bucket = outcome.measure.lateness / kLatenessBucket;
    score.online_added_bucket = PercentAbove(outcome.measure.online_finish, online_best);
    score.batch_finish_bucket = PercentAbove(outcome.measure.finish_after, finish_best);
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
