// What the engine relies on, asked of every policy over random snapshots.
#include <gtest/gtest.h>

#include <algorithm>

#include "daemon/sched/policy.h"
#include "tests/sim/random_snapshot.h"

namespace slice::sched {
namespace {

class PolicyConformanceTest : public ::testing::TestWithParam<const char*> {};

// Unscheduled ops of the first instance that has some, in topological order (ids are).
std::vector<sim::OpIndex> FirstBatch(const sim::Snapshot& snapshot) {
  std::vector<sim::OpIndex> batch;
  for (sim::OpIndex i = 0; i < snapshot.ops.size() && batch.size() < 8; ++i) {
    if (snapshot.ops[i].state != sim::OpState::kUnscheduled) continue;
    if (!batch.empty() && snapshot.ops[i].instance != snapshot.ops[batch[0]].instance) continue;
    batch.push_back(i);
  }
  return batch;
}

TEST_P(PolicyConformanceTest, Happy_DecisionsAreLegalAndRepeatable) {
  int placed = 0, deferred = 0;
  for (uint64_t seed = 1; seed <= 800; ++seed) {
    const sim::RandomCase c = sim::MakeRandomCase(seed);
    const sim::Snapshot& snapshot = c.snapshot;
    const std::vector<sim::OpIndex> batch = FirstBatch(snapshot);
    if (batch.empty()) continue;
    const estimate::TransferEstimator transfers =
        sim::MakeRandomTransfers(seed, snapshot.domains.size());
    sim::Simulator simulator(transfers, {});
    const std::unique_ptr<Policy> policy = std::move(MakePolicy(GetParam(), &simulator).value());
    const auto home = static_cast<DeviceIndex>(seed % snapshot.devices.size());
    const Decision decision = policy->Decide(snapshot, batch, home);
    SCOPED_TRACE("seed " + std::to_string(seed));

    if (decision.placed) {
      ++placed;
      ASSERT_LT(decision.device, snapshot.devices.size());
      ASSERT_GE(decision.op_count, 1u);
      ASSERT_LE(decision.op_count, batch.size());
      for (uint32_t i = 0; i < decision.op_count; ++i) {
        ASSERT_NE((snapshot.ops[batch[i]].allowed_devices >> decision.device) & 1, 0u);
      }
      ASSERT_GT(decision.predicted_finish, snapshot.now);
      ASSERT_NE(decision.predicted_finish, kNever);
      ASSERT_EQ(std::count_if(decision.candidates.begin(), decision.candidates.end(),
                              [&](const CandidateScore& s) {
                                return !s.defer && s.device == decision.device;
                              }),
                1);
    } else {
      ++deferred;
      ASSERT_GT(decision.retry_at, snapshot.now) << "nothing is deferred without a wake";
      ASSERT_LE(decision.retry_at, snapshot.now + 100 * kMillisecond);
      ASSERT_TRUE(snapshot.ops[batch[0]].service_class == ServiceClass::kOffline ||
                  decision.op_count == 0)
          << "online work is never deferred";
    }
    const Decision again = policy->Decide(snapshot, batch, home);
    ASSERT_EQ(again.placed, decision.placed);
    ASSERT_EQ(again.device, decision.device);
    ASSERT_EQ(again.retry_at, decision.retry_at);
    ASSERT_EQ(again.predicted_finish, decision.predicted_finish);
  }
  EXPECT_GT(placed, 300);
}

TEST_P(PolicyConformanceTest, Edge_NoAllowedDeviceIsLookedAtAgain) {
  sim::RandomCase c = sim::MakeRandomCase(3);
  for (sim::SnapOp& op : c.snapshot.ops) op.allowed_devices = 0;
  const estimate::TransferEstimator transfers(c.snapshot.domains.size());
  sim::Simulator simulator(transfers, {});
  const std::unique_ptr<Policy> policy = std::move(MakePolicy(GetParam(), &simulator).value());
  const Decision decision = policy->Decide(c.snapshot, FirstBatch(c.snapshot), 0);
  EXPECT_FALSE(decision.placed);
  EXPECT_GT(decision.retry_at, c.snapshot.now);
  EXPECT_NE(decision.retry_at, kNever);
}

INSTANTIATE_TEST_SUITE_P(All, PolicyConformanceTest,
                         ::testing::Values("slice", "fifo", "online-only", "priority"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace slice::sched
