// The simple baselines. Both simulate only to predict; they protect nobody.
#include <bit>
#include <limits>
#include <tuple>

#include "daemon/sched/policies.h"

namespace slice::sched {
Decision FifoPolicy::Decide(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                            DeviceIndex home) {
  const BatchDevices allowed = DevicesFor(snapshot, batch);
  if (allowed.op_count == 0) return Nowhere(snapshot);
  batch = batch.first(allowed.op_count);
  QueuedWork(snapshot, &queued_);
  // Earliest free; among equals where least has to be moved, then home, then the lower index.
  auto best =
      std::make_tuple(std::numeric_limits<DurationNs>::max(), int64_t{0}, false, DeviceIndex{0});
  Decision decision;
  for (uint64_t left = allowed.devices; left != 0; left &= left - 1) {
    const auto device = static_cast<DeviceIndex>(std::countr_zero(left));
    int64_t managed = 0;
    const int64_t moved = BytesToMove(snapshot, batch, device, &managed);
    best = std::min(best, std::make_tuple(queued_[device], moved, device != home, device));
    CandidateScore score;
    score.device = device;
    score.balance = queued_[device] / kMillisecond;
    score.bytes_moved = moved;
    decision.candidates.push_back(score);
  }
  decision.placed = true;
  decision.device = std::get<3>(best);
  decision.basis = gmg::DecisionBasis::kQueue;
  decision.op_count = allowed.op_count;
  simulator_->Prepare(snapshot, batch, sim::Rules{RespectsSlices(), ClassesOrderQueues()});
  candidates_.assign(1, {decision.device, 0});
  simulator_->Evaluate(candidates_, nullptr, &outcomes_);
  decision.predicted_finish =
      BatchFinish(outcomes_[0], snapshot.now + simulator_->options().horizon);
  for (CandidateScore& score : decision.candidates) {
    if (score.device == decision.device) score.batch_finish = decision.predicted_finish;
  }
  return decision;
}

Decision PriorityPolicy::Decide(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                                DeviceIndex home) {
  const BatchDevices allowed = DevicesFor(snapshot, batch);
  if (allowed.op_count == 0) return Nowhere(snapshot);
  batch = batch.first(allowed.op_count);
  candidates_.clear();
  for (uint64_t left = allowed.devices; left != 0; left &= left - 1)
    candidates_.push_back({static_cast<DeviceIndex>(std::countr_zero(left)), 0});
  simulator_->Prepare(snapshot, batch, sim::Rules{RespectsSlices(), ClassesOrderQueues()});
  simulator_->Evaluate(candidates_, nullptr, &outcomes_);
  auto best = std::make_tuple(true, kNever, false, DeviceIndex{0});
  Decision decision;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    const DeviceIndex device = candidates_[i].device;
    CandidateScore score;
    score.device = device;
    score.feasible = outcomes_[i].feasible();
    score.bytes_moved = outcomes_[i].bytes_moved;
    score.batch_finish = BatchFinish(outcomes_[i], snapshot.now + simulator_->options().horizon);
    best = std::min(best,
                    std::make_tuple(!score.feasible, score.batch_finish, device != home, device));
    decision.candidates.push_back(score);
  }
  decision.placed = true;
  decision.device = std::get<3>(best);
  decision.basis = gmg::DecisionBasis::kFinish;
  decision.predicted_finish = std::get<1>(best);
  decision.op_count = allowed.op_count;
  return decision;
}

}  // namespace slice::sched
