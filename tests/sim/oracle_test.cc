// The fast simulator against the naive one: equal to the nanosecond over thousands of random
// snapshots.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/sim/naive_simulator.h"
#include "tests/sim/random_snapshot.h"
#include "tests/sim/schedule_checker.h"
#include "tests/sim/workload.h"

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

Options ToTheEnd() {
  Options options;
  options.horizon = 3600 * kSecond;
  options.memory_curve = true;
  return options;
}

// What a domain must have free in the end: what it had, and the activations that were there and
// found their last reader.
std::vector<int64_t> FreeInTheEnd(const Snapshot& snapshot) {
  std::vector<int64_t> free_bytes;
  for (size_t d = 0; d < snapshot.domains.size(); ++d) {
    int64_t bytes = snapshot.domains[d].free_bytes;
    for (const SnapTensor& tensor : snapshot.tensors) {
      if (tensor.managed || tensor.pinned || tensor.instance == kNone || tensor.consumers == 0)
        continue;
      const uint64_t held = tensor.resident & ~snapshot.instances[tensor.instance].reserved_domains;
      if ((held >> d & 1) != 0) bytes += tensor.bytes;
    }
    free_bytes.push_back(bytes);
  }
  return free_bytes;
}

void ExpectAllGivenBack(const Snapshot& snapshot, const Timeline& timeline) {
  const std::vector<int64_t> expected = FreeInTheEnd(snapshot);
  for (size_t d = 0; d < expected.size(); ++d)
    EXPECT_EQ(timeline.memory[d].back().free_bytes, expected[d]) << "domain " << d;
}

TEST(SimulatorOracle, Happy_MemoryComesBackWhenAllIsDone) {
  uint64_t checked = 0;
  for (uint64_t seed = 1; seed <= 4'000; ++seed) {
    RandomCase c = MakeRandomCase(seed);
    c.options.horizon = 3600 * kSecond;
    c.snapshot.transfers.clear();
    const estimate::TransferEstimator transfers(c.snapshot.domains.size());
    Simulator simulator(transfers, c.options);
    Timeline timeline;
    simulator.Run(c.snapshot, c.batch, c.rules, &timeline);
    // A copy of a constant stays, and so does what an op that was never reached would have read.
    // What a running op holds was taken before the snapshot.
    const bool all = std::count(timeline.finish.begin(), timeline.finish.end(), kNever) == 0;
    const bool running = std::any_of(c.snapshot.devices.begin(), c.snapshot.devices.end(),
                                     [](const SnapDevice& d) { return d.running != kNone; });
    if (!all || running || timeline.bytes_moved > 0) continue;
    ExpectAllGivenBack(c.snapshot, timeline);
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
    ++checked;
  }
  EXPECT_GT(checked, 100u);
}

TEST(SimulatorOracle, Happy_ChainsOverDevicesEqualTheNaiveSimulator) {
  uint64_t seed = 0;
  for (const uint32_t devices : {1U, 2U, 8U, 9U, 64U}) {
    for (const uint32_t ops : {64U, 640U, 6'400U}) {
      const Snapshot snapshot = MakeWorkload(ops, devices, ++seed);
      const estimate::TransferEstimator transfers(devices);
      const Options options = ToTheEnd();
      Simulator simulator(transfers, options);
      Timeline fast, naive;
      simulator.Run(snapshot, {}, &fast);
      NaiveRun(snapshot, {}, {}, options, transfers, &naive);
      ExpectEqual(fast, naive);
      EXPECT_EQ(CheckSchedule(snapshot, {}, {}, fast), "");
      ExpectAllGivenBack(snapshot, fast);
      EXPECT_TRUE(devices == 1 || ops == 64 || fast.bytes_moved > 0);
      ASSERT_FALSE(HasFailure()) << ops << " ops on " << devices << " devices";
    }
  }
}

TEST(SimulatorOracle, Edge_SetsOfThreeAndFourLevels) {
  for (const uint32_t ops : {20'000U, 300'000U}) {
    const Snapshot snapshot = MakeWorkload(ops, 8, 3);
    const estimate::TransferEstimator transfers(8);
    const Options options = ToTheEnd();
    Simulator simulator(transfers, options);
    Timeline fast, naive;
    simulator.Run(snapshot, {}, &fast);
    NaiveRun(snapshot, {}, {}, options, transfers, &naive);
    ASSERT_TRUE(fast.start == naive.start && fast.finish == naive.finish);
  }
}

TEST(SimulatorOracle, Happy_EvaluateAgreesWithRunOnEveryCandidate) {
  for (uint64_t seed = 1; seed <= 2'000; ++seed) {
    const RandomCase c = MakeRandomCase(seed);
    if (c.batch.empty()) continue;
    const estimate::TransferEstimator transfers =
        MakeRandomTransfers(seed, c.snapshot.domains.size());
    Simulator simulator(transfers, c.options);
    std::vector<OpIndex> batch;
    for (const Placement& placement : c.batch) batch.push_back(placement.op);
    std::vector<Candidate> candidates = {{kNoDevice, 0}, {kNoDevice, kNever}};
    for (size_t d = 0; d < std::min<size_t>(4, c.snapshot.devices.size()); ++d) {
      candidates.push_back({static_cast<DeviceIndex>(d), 0});
      candidates.push_back({static_cast<DeviceIndex>(d), c.snapshot.now + 3 * kMillisecond});
    }
    std::vector<Outcome> outcomes;
    simulator.Prepare(c.snapshot, batch, c.rules);
    simulator.Evaluate(candidates, nullptr, &outcomes);
    for (size_t i = 0; i < candidates.size(); ++i) {
      std::vector<Placement> placements;
      for (const OpIndex op : batch)
        placements.push_back({op, candidates[i].device, candidates[i].earliest});
      Timeline naive;
      NaiveRun(c.snapshot, placements, c.rules, c.options, transfers, &naive);
      EXPECT_EQ(outcomes[i].bytes_moved, naive.bytes_moved);
      EXPECT_TRUE(outcomes[i].infeasible == naive.infeasible);
      TimeNs finish = 0;
      DurationNs left = 0;
      for (const OpIndex op : batch) {
        if (naive.finish[op] == kNever) {
          left += c.snapshot.ops[op].duration;
        } else {
          finish = std::max(finish, naive.finish[op]);
        }
      }
      EXPECT_EQ(outcomes[i].batch_finish, finish);
      EXPECT_EQ(outcomes[i].batch_left, left);
      for (size_t k = 0; k < naive.instance_finish.size(); ++k) {
        EXPECT_EQ(outcomes[i].instances[k].finish, naive.instance_finish[k]);
        EXPECT_EQ(outcomes[i].instances[k].left, naive.instance_left[k]);
      }
      ASSERT_FALSE(HasFailure()) << "seed " << seed << ", candidate " << i;
    }
  }
}

TEST(SimulatorOracle, Edge_ScratchOfEarlierRunsLeavesNoTrace) {
  const estimate::TransferEstimator transfers = MakeRandomTransfers(7, kDevicesMax);
  Options options;
  options.memory_curve = true;
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
