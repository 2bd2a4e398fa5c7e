#include "daemon/sched/score.h"

#include <algorithm>

namespace slice::sched {
namespace {

// Moving state for good must pay by more than the predictions' noise: its finish counts as 1/20
// later.
constexpr int64_t kMoveHysteresis = 20;

// Two values at least this far apart lie in different buckets whatever the best is, if it is not
// above `value`.
int64_t PercentOf(int64_t value) { return std::max<int64_t>(1, value / 100); }

}  // namespace

int64_t PercentAbove(int64_t value, int64_t best) {
  if (best == kNever || value <= best) return 0;
  return (value - best) / PercentOf(best);
}

TimeNs BatchFinish(const sim::Outcome& outcome, TimeNs horizon_end) {
  if (outcome.batch_left == 0) return outcome.batch_finish;
  return std::max(outcome.batch_finish, horizon_end) + outcome.batch_left;
}

void Scorer::Start(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                   TimeNs horizon_end, std::span<const uint8_t> moves) {
  snapshot_ = &snapshot;
  horizon_end_ = horizon_end;
  moves_ = moves;
  // Where an online step runs decides where the rest of its sequence will: sequences on one device
  // share its time. A move is paid once, sharing every step, so an online batch looks to the ends
  // of sequences. Offline work never changes who shares with whom; for it the steps in the window
  // are the finer measure.
  whole_ = snapshot.ops[batch[0]].service_class == ServiceClass::kOnline;
  online_.clear();
  for (uint32_t i = 0; i < snapshot.instances.size(); ++i) {
    const sim::SnapInstance& instance = snapshot.instances[i];
    if (instance.service_class == ServiceClass::kOnline)
      online_.push_back({i, instance.rest_of_sequence, instance.deadline});
  }
  beaten_.assign(moves.size(), {});
}

void Scorer::First(const sim::Outcome& outcome) { first_ = Of(0, outcome); }

DurationNs Scorer::Priced(size_t candidate, DurationNs finish_after) const {
  return moves_[candidate] != 0 ? finish_after + finish_after / kMoveHysteresis : finish_after;
}

Measure Scorer::Of(size_t candidate, const sim::Outcome& outcome) const {
  if (outcome.beaten) return beaten_[candidate];
  Measure measure;
  measure.feasible = outcome.feasible();
  measure.bytes_moved = outcome.bytes_moved;
  measure.batch_finish = BatchFinish(outcome, horizon_end_);
  measure.finish_after =
      Priced(candidate, std::max<DurationNs>(0, measure.batch_finish - snapshot_->now));
  std::array<int32_t, kDevicesMax> sequences_on;
  if (whole_) CountSequences(outcome, &sequences_on);
  for (const Online& online : online_) {
    const sim::InstanceOutcome& instance = outcome.instances[online.instance];
    TimeNs finish = instance.finish;
    if (finish == kNever) finish = horizon_end_ + instance.left;
    DurationNs rest = online.rest;
    if (whole_ && instance.last_device != kNoDevice) rest *= sequences_on[instance.last_device];
    measure.online_finish += finish - snapshot_->now + (whole_ ? rest : 0);
    if (online.deadline != kNever)
      measure.lateness += std::max<DurationNs>(0, finish + rest - online.deadline);
  }
  return measure;
}

// Online sequences that go on after their step of the window, by the device where it ends.
void Scorer::CountSequences(const sim::Outcome& outcome,
                            std::array<int32_t, kDevicesMax>* on) const {
  on->fill(0);
  for (const Online& online : online_) {
    const DeviceIndex device = outcome.instances[online.instance].last_device;
    if (device != kNoDevice && online.rest > 0) ++(*on)[device];
  }
  for (size_t i = 0; i < snapshot_->devices.size(); ++i) {
    if (snapshot_->devices[i].phantom_until > snapshot_->now)
      ++(*on)[i];  // one more between two steps
    (*on)[i] = std::max((*on)[i], 1);
  }
}

TimeNs Scorer::Ask(size_t candidate, const sim::Progress& progress) const {
  // What does not fit has no claim: home may be taken all the same, whatever its score.
  if (!first_.feasible) return kNever;
  const TimeNs now = progress.now;
  Measure least;
  least.feasible = progress.feasible;
  least.bytes_moved = progress.bytes_moved;
  least.batch_finish = progress.batch_finish_least;
  least.finish_after =
      Priced(candidate, std::max<DurationNs>(0, least.batch_finish - snapshot_->now));
  // It may still set the best value of a level, and with it the buckets of all.
  if (least.finish_after < first_.finish_after) {
    if (progress.batch_ended) return kNever;
    const DurationNs missing = first_.finish_after - least.finish_after;
    return now + std::max<DurationNs>(1, missing - missing / kMoveHysteresis);
  }
  int64_t unfinished = 0;
  for (const Online& online : online_) {
    const sim::InstanceProgress& instance = progress.instances[online.instance];
    const bool ended = instance.unfinished == 0;
    const TimeNs finish = ended ? instance.finish : now;
    unfinished += ended ? 0 : 1;
    least.online_finish += finish - snapshot_->now + (whole_ ? online.rest : 0);
    if (online.deadline != kNever)
      least.lateness += std::max<DurationNs>(0, finish + online.rest - online.deadline);
  }
  if (least.online_finish < first_.online_finish) {
    if (unfinished == 0) return kNever;
    return now + std::max<DurationNs>(1, (first_.online_finish - least.online_finish) / unfinished);
  }
  const auto beaten = [&] {
    beaten_[candidate] = least;
    return kBeaten;
  };
  if (!least.feasible) return beaten();
  const int64_t late = least.lateness / kLatenessBucket;
  const int64_t late_first = first_.lateness / kLatenessBucket;
  if (late > late_first) return beaten();
  if (late < late_first) return unfinished == 0 ? kNever : now + kLatenessBucket;
  if (least.online_finish - first_.online_finish >= PercentOf(first_.online_finish))
    return beaten();
  const DurationNs finish_needed = first_.finish_after + PercentOf(first_.finish_after);
  if (least.finish_after >= finish_needed) return beaten();
  if (least.bytes_moved > first_.bytes_moved) return beaten();
  if (progress.batch_ended && unfinished == 0) return kNever;
  return now + std::max<DurationNs>(1, finish_needed - least.finish_after);
}

}  // namespace slice::sched
