// The fast simulator against the naive one: equal to the nanosecond over thousands of random
// snapshots.
#include <gtest/gtest.h>

#include "tests/sim/naive_simulator.h"
#include "tests/sim/random_snapshot.h"
#include "tests/sim/schedule_checker.h"

namespace slice::sim {
namespace {

constexpr uint64_t kCases = 12'000;

void ExpectEqual(const Timeline& fast, const Timeline& naive) {
  EXPECT_EQ(fast.start, naive.start);
  EXPECT_EQ(fast.finish, naive.finish);
  EXPECT_EQ(fast.instance_finish, naive.instance_finish);
  EXPECT_EQ(fast.instance_left, naive.instance_left);
  EXPECT_EQ(fast.bytes_moved, naive.bytes_moved);
  EXPECT_EQ(fast.memory_feasible, naive.memory_feasible);
  EXPECT_EQ(fast.infeasible_domain, naive.infeasible_domain);
  EXPECT_EQ(fast.makespan, naive.makespan);
  EXPECT_EQ(fast.device, naive.device);
  EXPECT_TRUE(fast.infeasible == naive.infeasible);
  EXPECT_EQ(fast.free_bytes_min, naive.free_bytes_min);
  EXPECT_TRUE(fast.memory == naive.memory);
}

TEST(SimulatorOracle, Happy_RandomSnapshotsEqualTheNaiveSimulator) {
  uint64_t moved = 0, infeasible = 0, cut = 0;
  for (uint64_t seed = 1; seed <= kCases; ++seed) {
    const RandomCase c = MakeRandomCase(seed);
    const estimate::TransferEstimator transfers =
        MakeRandomTransfers(seed, c.snapshot.domains.size());
    Simulator simulator(transfers, c.options);
    Timeline fast, naive;
    simulator.Run(c.snapshot, c.batch, c.rules, &fast);
    NaiveRun(c.snapshot, c.batch, c.rules, c.options, transfers, &naive);
    ExpectEqual(fast, naive);
    EXPECT_EQ(CheckSchedule(c.snapshot, c.batch, c.rules, fast), "");
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
    moved += fast.bytes_moved > 0 ? 1 : 0;
    infeasible += fast.memory_feasible ? 0 : 1;
    for (const DurationNs left : fast.instance_left) cut += left > 0 ? 1 : 0;
  }
  // The cases must reach what they are there for.
  EXPECT_GT(moved, kCases / 4);
  EXPECT_GT(infeasible, kCases / 50);
  EXPECT_GT(cut, kCases / 50);
}

TEST(SimulatorOracle, Edge_ScratchOfEarlierRunsLeavesNoTrace) {
  const estimate::TransferEstimator transfers = MakeRandomTransfers(7, kDevicesMax);
  Options options;
  Simulator reused(transfers, options);
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const RandomCase c = MakeRandomCase(seed);
    Simulator fresh(transfers, options);
    Timeline a, b;
    reused.Run(c.snapshot, c.batch, c.rules, &a);
    fresh.Run(c.snapshot, c.batch, c.rules, &b);
    ExpectEqual(a, b);
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace slice::sim
