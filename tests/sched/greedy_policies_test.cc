#include <gtest/gtest.h>

#include "daemon/sched/policy.h"
#include "tests/sim/snapshot_builder.h"

namespace slice::sched {
namespace {

using sim::kMs;
using sim::kUs;
using sim::OpIndex;
using sim::OpSpec;
using sim::SnapshotBuilder;

class GreedyPoliciesTest : public ::testing::Test {
 protected:
  Decision Decide(const char* name, SnapshotBuilder& builder, const std::vector<OpIndex>& batch,
                  DeviceIndex home = 0) {
    return std::move(MakePolicy(name, &simulator_).value())->Decide(builder.Build(), batch, home);
  }
  static OpSpec On(uint32_t instance, DeviceIndex device, DurationNs duration) {
    OpSpec spec;
    spec.instance = instance;
    spec.duration = duration;
    spec.state = sim::OpState::kPlaced;
    spec.device = device;
    return spec;
  }
  estimate::TransferEstimator transfers_{4};
  sim::Simulator simulator_{transfers_, {}};
};

TEST_F(GreedyPoliciesTest, Happy_FifoTakesTheEarliestFreeDevice) {
  SnapshotBuilder builder(3);
  builder.Chain(On(builder.Online(), 0, 5 * kMs), 2);
  builder.device(1).free_at = builder.now() + 4 * kMs;
  builder.Chain(On(builder.Offline(), 2, 5 * kMs), 1);
  OpSpec spec;
  spec.instance = builder.Offline();
  const std::vector<OpIndex> batch = {builder.Op(spec)};
  EXPECT_EQ(Decide("fifo", builder, batch).device, 1);
  builder.op(batch[0]).allowed_devices = 0b101;
  EXPECT_EQ(Decide("fifo", builder, batch).device, 2);
}

TEST_F(GreedyPoliciesTest, Happy_FifoBreaksTiesByDataThenHome) {
  SnapshotBuilder builder(3);
  OpSpec spec;
  spec.instance = builder.Offline();
  const std::vector<OpIndex> free_choice = {builder.Op(spec)};
  EXPECT_EQ(Decide("fifo", builder, free_choice, 1).device, 1);
  spec.reads = {builder.Managed(1'000, 2)};
  EXPECT_EQ(Decide("fifo", builder, {builder.Op(spec)}, 1).device, 2);
}

TEST_F(GreedyPoliciesTest, Happy_FifoLetsOfflineStandBeforeOnline) {
  SnapshotBuilder builder(1);
  builder.device(0).phantom_from = builder.now();
  builder.device(0).phantom_until = builder.now() + 10 * kMs;
  builder.Chain(On(builder.Offline(), 0, 20 * kMs), 1);  // came first
  OpSpec spec;
  spec.instance = builder.Online(builder.now() + 5 * kMs);
  const Decision decision = Decide("fifo", builder, {builder.Op(spec)});
  EXPECT_TRUE(decision.placed);
  EXPECT_EQ(decision.predicted_finish, builder.now() + 21 * kMs);
}

TEST_F(GreedyPoliciesTest, Happy_PriorityTakesTheEarliestFinish) {
  SnapshotBuilder builder(2);
  builder.Chain(On(builder.Online(), 0, 5 * kMs), 1);
  OpSpec spec;
  spec.instance = builder.Offline();
  spec.reads = {builder.Managed(4'000'000, 0)};  // 1.05 ms to move
  EXPECT_EQ(Decide("priority", builder, {builder.Op(spec)}).device, 1);
  spec.reads = {builder.Managed(40'000'000, 0)};
  EXPECT_EQ(Decide("priority", builder, {builder.Op(spec)}).device, 0);
}

TEST_F(GreedyPoliciesTest, Happy_PriorityNeverDefersAndIgnoresGaps) {
  SnapshotBuilder builder(1);
  builder.device(0).phantom_from = builder.now();
  builder.device(0).phantom_until = builder.now() + 5 * kMs;
  OpSpec spec;
  spec.instance = builder.Offline();
  spec.duration = 20 * kMs;
  const Decision decision = Decide("priority", builder, {builder.Op(spec)});
  EXPECT_TRUE(decision.placed);
  EXPECT_EQ(decision.predicted_finish, builder.now() + 20 * kMs);
}

}  // namespace
}  // namespace slice::sched
