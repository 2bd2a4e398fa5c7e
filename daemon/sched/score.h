// How `slice` measures a candidate, and when one is beaten by the first (scheduling.md section 5).
// Inside of the policies.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "daemon/sched/policy.h"

namespace slice::sched {

// What a candidate's levels are made of, before they are rounded to buckets. All grow worse
// upwards.
struct Measure {
  bool feasible = true;
  int64_t lateness = 0;         // ns, summed over online sequences
  int64_t online_finish = 0;    // ns from now, summed over online instances
  DurationNs finish_after = 0;  // of the batch, from now, with the price of moving
  int64_t bytes_moved = 0;
  TimeNs batch_finish = 0;
};

inline constexpr DurationNs kLatenessBucket = kMillisecond;

// Whole percents above the best. Floor: less than 1 % is no difference.
int64_t PercentAbove(int64_t value, int64_t best);

// Finish of the batch; past the horizon, the horizon plus what is left of it.
TimeNs BatchFinish(const sim::Outcome& outcome, TimeNs horizon_end);

// Measures the candidates of one round. A candidate is beaten when it is worse than the first for
// certain, whatever is still to come and whatever the buckets of the others turn out to be: then
// leaving it out moves neither the choice nor the buckets of those that stay.
class Scorer : public sim::Bound {
 public:
  // `moves`: by candidate, whether it moves managed tensors. The spans outlive the scorer's use.
  void Start(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch, TimeNs horizon_end,
             std::span<const uint8_t> moves);
  void First(const sim::Outcome& outcome) override;
  TimeNs Ask(size_t candidate, const sim::Progress& progress) const override;

  // Of an outcome; of one that was beaten, what was certain when it was.
  Measure Of(size_t candidate, const sim::Outcome& outcome) const;

 private:
  struct Online {  // an online instance
    uint32_t instance = 0;
    DurationNs rest = 0;
    TimeNs deadline = kNever;
  };
  DurationNs Priced(size_t candidate, DurationNs finish_after) const;
  void CountSequences(const sim::Outcome& outcome, std::array<int32_t, kDevicesMax>* on) const;

  const sim::Snapshot* snapshot_ = nullptr;
  TimeNs horizon_end_ = 0;
  bool whole_ = false;  // an online batch: look to the ends of sequences
  std::span<const uint8_t> moves_;
  std::vector<Online> online_;
  Measure first_;
  // By candidate, written by the thread that simulates it.
  mutable std::vector<Measure> beaten_;
};

}  // namespace slice::sched
