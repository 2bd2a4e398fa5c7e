// Tiny rounds, all of them: every placement, every order of candidates, every order of work.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

#include "daemon/sched/score.h"
#include "tests/sim/naive_simulator.h"
#include "tests/sim/random_snapshot.h"
#include "tests/sim/snapshot_builder.h"

namespace slice::sched {
namespace {

using sim::Candidate;
using sim::OpIndex;

// The best candidate that was simulated to its end, by the levels that the scorer bounds.
size_t Best(const Scorer& scorer, const std::vector<sim::Outcome>& outcomes,
            const std::vector<Candidate>& candidates) {
  int64_t online_best = kNever, finish_best = kNever;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (outcomes[i].beaten) continue;
    const Measure measure = scorer.Of(i, outcomes[i]);
    online_best = std::min(online_best, measure.online_finish);
    finish_best = std::min(finish_best, measure.finish_after);
  }
  const auto levels = [&](size_t i) {
    const Measure m = scorer.Of(i, outcomes[i]);
    return std::tuple(
        !m.feasible, m.lateness / kLatenessBucket, PercentAbove(m.online_finish, online_best),
        PercentAbove(m.finish_after, finish_best), m.bytes_moved, candidates[i].device);
  };
  size_t best = outcomes.size();
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (!outcomes[i].beaten && (best == outcomes.size() || levels(i) < levels(best))) best = i;
  }
  return best;
}

TEST(Enumeration, Happy_AnyOrderOfCandidatesChoosesTheSame) {
  uint64_t stopped = 0, rounds = 0;
  for (uint64_t seed = 1; rounds < 150; ++seed) {
    const sim::RandomCase c = sim::MakeRandomCase(seed);
    if (c.batch.size() < 2 || c.snapshot.devices.size() > 4) continue;
    ++rounds;
    const estimate::TransferEstimator transfers =
        sim::MakeRandomTransfers(seed, c.snapshot.domains.size());
    sim::Simulator simulator(transfers, c.options);
    std::vector<OpIndex> batch;
    for (const sim::Placement& placement : c.batch) batch.push_back(placement.op);
    std::vector<Candidate> candidates;
    for (size_t d = 0; d < c.snapshot.devices.size(); ++d)
      candidates.push_back({static_cast<DeviceIndex>(d), 0});
    candidates.push_back({kNoDevice, c.snapshot.now + kMillisecond});
    const TimeNs horizon_end = c.snapshot.now + c.options.horizon;
    simulator.Prepare(c.snapshot, batch, c.rules);
    std::vector<uint8_t> moves(candidates.size(), 0);
    Scorer scorer;
    std::vector<sim::Outcome> outcomes;
    scorer.Start(c.snapshot, batch, horizon_end, moves);
    simulator.Evaluate(candidates, nullptr, &outcomes);
    const DeviceIndex expected = candidates[Best(scorer, outcomes, candidates)].device;
    const auto by_device = [](const Candidate& a, const Candidate& b) {
      return a.device < b.device;
    };
    do {
      scorer.Start(c.snapshot, batch, horizon_end, moves);
      simulator.Evaluate(candidates, &scorer, &outcomes);
      ASSERT_EQ(candidates[Best(scorer, outcomes, candidates)].device, expected) << "seed " << seed;
      for (const sim::Outcome& outcome : outcomes) stopped += outcome.beaten ? 1 : 0;
    } while (std::next_permutation(candidates.begin(), candidates.end(), by_device));
  }
  EXPECT_GT(stopped, 100u);
}

TEST(Enumeration, Happy_EveryPlacementOfATinyGraphEqualsTheNaiveSimulator) {
  constexpr size_t kOps = 4, kDevices = 3;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    std::mt19937_64 rng(seed);
    sim::SnapshotBuilder builder(kDevices);
    const uint32_t instance = rng() % 2 == 0 ? builder.Online() : builder.Offline();
    std::vector<OpIndex> ops;
    std::vector<sim::TensorIndex> made;
    for (size_t i = 0; i < kOps; ++i) {
      sim::OpSpec spec;
      spec.instance = instance;
      spec.duration = static_cast<DurationNs>(1 + rng() % 4) * kMillisecond;
      for (size_t k = 0; k < i; ++k) {
        if (rng() % 2 == 0) continue;
        spec.after.push_back(ops[k]);
        spec.reads.push_back(made[k]);
      }
      made.push_back(builder.Activation(static_cast<int64_t>(1 + rng() % 9) << 18, instance));
      spec.writes = {made.back()};
      ops.push_back(builder.Op(spec));
    }
    const sim::Snapshot& snapshot = builder.Build();
    const estimate::TransferEstimator transfers(kDevices);
    sim::Simulator simulator(transfers, {});
    for (size_t code = 0; code < 81; ++code) {
      std::vector<sim::Placement> placements;
      for (size_t i = 0, rest = code; i < kOps; ++i, rest /= kDevices)
        placements.push_back({ops[i], static_cast<DeviceIndex>(rest % kDevices), 0});
      sim::Timeline fast, naive;
      simulator.Run(snapshot, placements, &fast);
      sim::NaiveRun(snapshot, placements, {}, simulator.options(), transfers, &naive);
      ASSERT_EQ(fast.start, naive.start) << "seed " << seed << ", placement " << code;
      ASSERT_EQ(fast.finish, naive.finish) << "seed " << seed << ", placement " << code;
    }
  }
}

// All schedules of a placed graph without copies: ops in any order that respects the edges, each as
// early as that order lets it. The simulated one is among them, and no schedule in which a device
// is never idle with work at hand takes, at the first difference, an op that goes before.
TEST(Enumeration, Happy_TheSimulatedScheduleIsOneOfAllAndKeepsTheOrderOfWork) {
  constexpr size_t kOps = 6;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    std::mt19937_64 rng(seed);
    sim::SnapshotBuilder builder(2);
    const uint32_t instances[] = {builder.Online(), builder.Offline()};
    std::vector<OpIndex> ops;
    std::vector<std::vector<size_t>> before(kOps);
    for (size_t i = 0; i < kOps; ++i) {
      sim::OpSpec spec;
      spec.instance = instances[rng() % 2];
      spec.duration = static_cast<DurationNs>(1 + rng() % 3) * kMillisecond;
      spec.state = sim::OpState::kPlaced;
      spec.device = static_cast<DeviceIndex>(rng() % 2);
      for (size_t k = 0; k < i; ++k) {
        if (rng() % 4 != 0) continue;
        spec.after.push_back(ops[k]);
        before[i].push_back(k);
      }
      ops.push_back(builder.Op(spec));
    }
    const sim::Snapshot& snapshot = builder.Build();
    const estimate::TransferEstimator transfers(2);
    sim::Simulator simulator(transfers, {});
    sim::Timeline timeline;
    simulator.Run(snapshot, {}, &timeline);

    std::vector<size_t> order(kOps);
    for (size_t i = 0; i < kOps; ++i) order[i] = i;
    bool found = false;
    TimeNs least = kNever;
    do {
      std::vector<TimeNs> start(kOps, kNever), finish(kOps, kNever);
      TimeNs free_at[2] = {snapshot.now, snapshot.now}, end = 0;
      bool legal = true;
      for (const size_t i : order) {
        start[i] = free_at[snapshot.ops[i].device];
        for (const size_t k : before[i]) {
          legal &= finish[k] != kNever;
          if (legal) start[i] = std::max(start[i], finish[k]);
        }
        if (!legal) break;
        finish[i] = free_at[snapshot.ops[i].device] = start[i] + snapshot.ops[i].duration;
        end = std::max(end, finish[i]);
      }
      if (!legal) continue;
      found |= start == timeline.start;
      least = std::min(least, end);
    } while (std::next_permutation(order.begin(), order.end()));
    EXPECT_TRUE(found) << "seed " << seed;
    EXPECT_GE(timeline.makespan, least) << "seed " << seed;
    // At each start, nobody who goes before was ready on that device.
    for (size_t i = 0; i < kOps; ++i) {
      for (size_t k = 0; k < kOps; ++k) {
        if (i == k || snapshot.ops[k].device != snapshot.ops[i].device) continue;
        TimeNs ready = snapshot.now;
        for (const size_t b : before[k]) ready = std::max(ready, timeline.finish[b]);
        const RunKey a{snapshot.ops[k].service_class, 0, snapshot.ops[k].order, 0,
                       static_cast<uint32_t>(k)};
        const RunKey b{snapshot.ops[i].service_class, 0, snapshot.ops[i].order, 0,
                       static_cast<uint32_t>(i)};
        const bool waits = ready <= timeline.start[i] && timeline.start[k] > timeline.start[i];
        EXPECT_FALSE(waits && RunsBefore(a, b)) << "seed " << seed << ": " << k << " before " << i;
      }
    }
  }
}

}  // namespace
}  // namespace slice::sched
