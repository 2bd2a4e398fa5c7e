// What `slice` promises, each on the smallest situation that shows it.
#include <gtest/gtest.h>

#include <algorithm>

#include "daemon/sched/policy.h"
#include "tests/sim/snapshot_builder.h"

namespace slice::sched {
namespace {

using sim::kMs;
using sim::kUs;
using sim::OpIndex;
using sim::OpSpec;
using sim::SnapshotBuilder;

constexpr int64_t kMb = 1'000'000;  // 300 us to move: 50 us and 250 us

class SlicePolicyTest : public ::testing::Test {
 protected:
  Decision Decide(SnapshotBuilder& builder, const std::vector<OpIndex>& batch,
                  DeviceIndex home = 0) {
    return policy_->Decide(builder.Build(), batch, home);
  }
  static OpSpec On(uint32_t instance, DeviceIndex device, DurationNs duration) {
    OpSpec spec;
    spec.instance = instance;
    spec.duration = duration;
    spec.state = sim::OpState::kPlaced;
    spec.device = device;
    return spec;
  }
  // Unscheduled ops of an offline instance, each with a KV piece of its own at `home`.
  static std::vector<OpIndex> OfflineChain(SnapshotBuilder& builder, size_t count,
                                           DurationNs duration, int64_t kv_bytes,
                                           DomainIndex home) {
    const uint32_t instance = builder.Offline();
    std::vector<OpIndex> ops;
    for (size_t i = 0; i < count; ++i) {
      OpSpec spec;
      spec.instance = instance;
      spec.duration = duration;
      if (kv_bytes > 0) spec.reads = spec.writes = {builder.Managed(kv_bytes, home)};
      if (i > 0) spec.after = {ops.back()};
      ops.push_back(builder.Op(spec));
    }
    return ops;
  }
  static const CandidateScore& ScoreOf(const Decision& decision, DeviceIndex device) {
    return *std::find_if(decision.candidates.begin(), decision.candidates.end(),
                         [&](const CandidateScore& s) { return s.device == device; });
  }

  estimate::TransferEstimator transfers_{64};
  sim::Simulator simulator_{transfers_, {}};
  std::unique_ptr<Policy> policy_ = std::move(MakePolicy("slice", &simulator_).value());
};

TEST_F(SlicePolicyTest, Happy_IdleHomeTakesTheBatch) {
  SnapshotBuilder builder(2);
  const std::vector<OpIndex> batch = OfflineChain(builder, 4, 2 * kMs, kMb, 1);
  const Decision decision = Decide(builder, batch, 1);
  EXPECT_TRUE(decision.placed);
  EXPECT_EQ(decision.device, 1);
  EXPECT_EQ(decision.op_count, 4u);
  EXPECT_EQ(decision.predicted_finish, builder.now() + 8 * kMs);
}

TEST_F(SlicePolicyTest, Happy_OnlyCandidateStillPredicts) {
  SnapshotBuilder builder(2);
  OpSpec spec;
  spec.instance = builder.Online(builder.now() + 50 * kMs);
  spec.duration = 3 * kMs;
  spec.allowed = 0b10;
  const std::vector<OpIndex> batch = builder.Chain(spec, 2);
  const Decision decision = Decide(builder, batch);
  EXPECT_TRUE(decision.placed);
  EXPECT_EQ(decision.device, 1);
  EXPECT_EQ(decision.predicted_finish, builder.now() + 6 * kMs);
  EXPECT_EQ(decision.candidates.size(), 1u);
}

TEST_F(SlicePolicyTest, Happy_OfflineLeavesABusyHomeWhenTheMovePays) {
  SnapshotBuilder builder(2);
  builder.Chain(On(builder.Online(), 0, 2 * kMs), 20);  // home busy for 40 ms
  const std::vector<OpIndex> batch = OfflineChain(builder, 4, 2 * kMs, kMb, 0);
  const Decision decision = Decide(builder, batch);
  EXPECT_TRUE(decision.placed);
  EXPECT_EQ(decision.device, 1);
  EXPECT_EQ(ScoreOf(decision, 1).bytes_moved, 4 * kMb);
  EXPECT_EQ(ScoreOf(decision, 0).online_added_bucket, 0);
}

TEST_F(SlicePolicyTest, Happy_OfflineWaitsAtHomeWhenTheMoveIsDearer) {
  SnapshotBuilder builder(2);
  builder.Chain(On(builder.Online(), 0, 2 * kMs), 5);  // 10 ms
  const std::vector<OpIndex> batch = OfflineChain(builder, 4, 2 * kMs, 100 * kMb, 0);
  const Decision decision = Decide(builder, batch);
  EXPECT_TRUE(decision.placed);
  EXPECT_EQ(decision.device, 0);
}

TEST_F(SlicePolicyTest, Edge_AGainBelowFivePercentMovesNoState) {
  for (const bool pays : {false, true}) {
    SnapshotBuilder builder(2);
    builder.Chain(On(builder.Online(), 0, pays ? 3 * kMs : 700 * kUs), 1);
    // 20 ms of work; moving 1 MB delays it by 0.3 ms, staying by 0.7 ms (a gain of 2 %) or 3 ms (13
    // %).
    const std::vector<OpIndex> batch = OfflineChain(builder, 1, 20 * kMs, kMb, 0);
    EXPECT_EQ(Decide(builder, batch).device, pays ? 1 : 0);
  }
}

TEST_F(SlicePolicyTest, Happy_StateThatMovedStaysWhereItIs) {
  SnapshotBuilder builder(2);
  const std::vector<OpIndex> batch =
      OfflineChain(builder, 4, 2 * kMs, kMb, 1);  // KV on 1, home 0 idle again
  EXPECT_EQ(Decide(builder, batch, 0).device, 1);
}

// An online pipeline over both devices: A on 0, B on 1, C on 0. Device 0 idles during B; a long
// offline op there would delay C.
struct Pipeline {
  SnapshotBuilder builder{2};
  OpIndex c = 0;
  Pipeline(DurationNs middle, DurationNs deadline) {
    const uint32_t online = builder.Online(builder.now() + deadline);
    OpSpec spec = On(online, 0, 2 * kMs);
    const OpIndex a = builder.Op(spec);
    spec = On(online, 1, middle);
    spec.after = {a};
    const OpIndex b = builder.Op(spec);
    spec = On(online, 0, 2 * kMs);
    spec.after = {b};
    c = builder.Op(spec);
  }
  static OpSpec On(uint32_t instance, DeviceIndex device, DurationNs duration) {
    OpSpec spec;
    spec.instance = instance;
    spec.duration = duration;
    spec.state = sim::OpState::kPlaced;
    spec.device = device;
    return spec;
  }
};

TEST_F(SlicePolicyTest, Happy_OfflineIsDeferredRatherThanDelayOnline) {
  Pipeline pipeline(4 * kMs, kSecond);
  SnapshotBuilder& builder = pipeline.builder;
  OpSpec spec;
  spec.instance = builder.Offline();
  spec.duration = 20 * kMs;
  spec.allowed = 0b01;
  const OpIndex op = builder.Op(spec);
  const Decision decision = Decide(builder, {op});
  EXPECT_FALSE(decision.placed);
  EXPECT_EQ(decision.retry_at, builder.now() + 8 * kMs) << "when C ends";
  EXPECT_EQ(decision.predicted_finish, builder.now() + 28 * kMs);
  EXPECT_GT(ScoreOf(decision, 0).online_added_bucket, 0);
}

TEST_F(SlicePolicyTest, Happy_AGapThatHoldsTheOpIsFilled) {
  Pipeline pipeline(4 * kMs, kSecond);
  SnapshotBuilder& builder = pipeline.builder;
  OpSpec spec;
  spec.instance = builder.Offline();
  spec.duration = 3 * kMs;
  spec.allowed = 0b01;
  const Decision decision = Decide(builder, {builder.Op(spec)});
  // It fits between A and C: placed at once, its queue is behind A.
  EXPECT_TRUE(decision.placed);
  EXPECT_EQ(decision.predicted_finish, builder.now() + 5 * kMs);
}

TEST_F(SlicePolicyTest, Happy_AnotherIdleDeviceBeatsDeferral) {
  Pipeline pipeline(4 * kMs, kSecond);
  SnapshotBuilder builder = pipeline.builder;
  builder.raw().devices.push_back({.domain = 2, .free_at = builder.now()});
  builder.raw().domains.push_back({int64_t{1} << 40});
  const std::vector<OpIndex> batch = OfflineChain(builder, 1, 20 * kMs, kMb, 0);
  const Decision decision = Decide(builder, batch);
  EXPECT_TRUE(decision.placed);
  EXPECT_EQ(decision.device, 2);
}

TEST_F(SlicePolicyTest, Happy_LatenessWeighsMoreThanAnyThroughput) {
  // C ends 0.1 ms before its deadline; the offline op fits in no gap.
  Pipeline pipeline(4 * kMs, 8 * kMs + 100 * kUs);
  SnapshotBuilder& builder = pipeline.builder;
  OpSpec spec;
  spec.instance = builder.Offline();
  spec.duration = 10 * kMs;
  spec.allowed = 0b01;
  const Decision decision = Decide(builder, {builder.Op(spec)});
  EXPECT_FALSE(decision.placed);
  EXPECT_GE(ScoreOf(decision, 0).lateness_bucket, 5);
}

TEST_F(SlicePolicyTest, Happy_GapAfterAnOnlineStepIsLeftFree) {
  SnapshotBuilder builder(1);
  builder.device(0).phantom_from = builder.now() + 300 * kUs;
  builder.device(0).phantom_until = builder.now() + 2 * kMs;
  const std::vector<OpIndex> batch = OfflineChain(builder, 1, kMs, 0, 0);
  const Decision decision = Decide(builder, batch);
  // Placed or deferred, nothing starts before the phantom is over.
  EXPECT_EQ(decision.predicted_finish, builder.now() + 3 * kMs);
}

TEST_F(SlicePolicyTest, Happy_OnlineMovesAwayFromALongOfflineOp) {
  SnapshotBuilder builder(2);
  const OpIndex running = builder.Op(On(builder.Offline(), 0, 50 * kMs));
  builder.Running(running, 0, 30 * kMs);
  OpSpec spec;
  spec.instance = builder.Online(builder.now() + 10 * kMs);
  spec.duration = kMs;
  spec.reads = spec.writes = {builder.Managed(4 * kMb, 0)};
  const OpIndex op = builder.Op(spec);
  const Decision decision = Decide(builder, {op});
  EXPECT_EQ(decision.device, 1);
  EXPECT_GE(ScoreOf(decision, 0).lateness_bucket, 20);
}

TEST_F(SlicePolicyTest, Happy_OnlineStaysHomeBeforeAShortWait) {
  SnapshotBuilder builder(2);
  const OpIndex running = builder.Op(On(builder.Offline(), 0, 50 * kMs));
  builder.Running(running, 0, 500 * kUs);
  OpSpec spec;
  spec.instance = builder.Online(builder.now() + 10 * kMs);
  spec.duration = kMs;
  spec.reads = spec.writes = {builder.Managed(4 * kMb, 0)};
  EXPECT_EQ(Decide(builder, {builder.Op(spec)}).device, 0);
}

TEST_F(SlicePolicyTest, Happy_EqualDevicesGoToHome) {
  SnapshotBuilder builder(4);
  OpSpec spec;
  spec.instance = builder.Online();
  EXPECT_EQ(Decide(builder, {builder.Op(spec)}, 2).device, 2);
}

TEST_F(SlicePolicyTest, Happy_WhatDoesNotFitGoesElsewhere) {
  SnapshotBuilder builder(2);
  builder.domain(0).free_bytes = 10;
  OpSpec spec;
  spec.instance = builder.Offline();
  spec.memory_bytes = 1'000;
  const OpIndex op = builder.Op(spec);
  EXPECT_EQ(Decide(builder, {op}, 0).device, 1);
}

TEST_F(SlicePolicyTest, Edge_WhatFitsNowhereGoesHome) {
  SnapshotBuilder builder(3);
  for (size_t i = 0; i < 3; ++i) builder.domain(i).free_bytes = 10;
  builder.Chain(On(builder.Online(), 1, 2 * kMs), 5);
  OpSpec spec;
  spec.instance = builder.Offline();
  spec.memory_bytes = 1'000;
  const Decision decision = Decide(builder, {builder.Op(spec)}, 1);
  EXPECT_TRUE(decision.placed);
  EXPECT_EQ(decision.device, 1);
  EXPECT_FALSE(ScoreOf(decision, 1).feasible);
}

TEST_F(SlicePolicyTest, Happy_LongOfflineOpsKeepOffDevicesWithOnlineTenants) {
  SnapshotBuilder builder(2);
  builder.raw().offline_op_max = 50 * kMs;
  builder.device(0).hosts_online = true;
  builder.Chain(On(builder.Offline(), 1, 10 * kMs), 3);  // device 1 is busy, and still the only one
  OpSpec spec;
  spec.instance = builder.Offline();
  spec.duration = 60 * kMs;
  const OpIndex longer = builder.Op(spec);
  EXPECT_EQ(Decide(builder, {longer}).device, 1);
  builder.device(1).hosts_online = true;
  EXPECT_EQ(Decide(builder, {longer}).device, 0) << "no quiet device: never stuck";
}

TEST_F(SlicePolicyTest, Edge_BatchThatNoDeviceMayRunWholeIsCut) {
  SnapshotBuilder builder(2);
  OpSpec spec;
  spec.instance = builder.Offline();
  const OpIndex first = builder.Op(spec);
  spec.after = {first};
  spec.allowed = 0b10;
  const OpIndex second = builder.Op(spec);
  spec.after = {second};
  spec.allowed = 0b01;
  const OpIndex third = builder.Op(spec);
  const Decision decision = Decide(builder, {first, second, third});
  EXPECT_TRUE(decision.placed);
  EXPECT_EQ(decision.device, 1);
  EXPECT_EQ(decision.op_count, 2u);
}

TEST_F(SlicePolicyTest, Edge_ManyDevicesArePrunedButTheIdleOneIsFound) {
  SnapshotBuilder builder(64);
  for (size_t i = 0; i < 64; ++i) {
    if (i != 41) builder.Chain(On(builder.Online(), static_cast<DeviceIndex>(i), 5 * kMs), 2);
    builder.device(i).free_at = builder.now() + (i == 41 ? 0 : 10 * kMs);
  }
  const std::vector<OpIndex> batch = OfflineChain(builder, 2, 2 * kMs, kMb, 0);
  const Decision decision = Decide(builder, batch, 0);
  EXPECT_TRUE(decision.placed);
  EXPECT_EQ(decision.device, 41);
  EXPECT_LE(decision.candidates.size(), 6u);
}

TEST_F(SlicePolicyTest, Edge_WorkBeyondTheHorizonStillCompares) {
  SnapshotBuilder builder(2);
  builder.Chain(On(builder.Offline(), 0, 1'500 * kMs), 3);
  const std::vector<OpIndex> batch = OfflineChain(builder, 3, 1'500 * kMs, 0, 0);
  const Decision decision = Decide(builder, batch, 0);
  EXPECT_EQ(decision.device, 1);
  EXPECT_NE(decision.predicted_finish, kNever);
}

TEST_F(SlicePolicyTest, Happy_OnlineOnlyPlacesOnlineAsSliceDoes) {
  const std::unique_ptr<Policy> online_only =
      std::move(MakePolicy("online-only", &simulator_).value());
  SnapshotBuilder builder(3);
  builder.Chain(On(builder.Online(builder.now() + 20 * kMs), 0, 2 * kMs), 3);
  OpSpec spec;
  spec.instance = builder.Online(builder.now() + 15 * kMs);
  spec.duration = 2 * kMs;
  spec.reads = {builder.Managed(2 * kMb, 0)};
  const std::vector<OpIndex> batch = builder.Chain(spec, 3);
  const sim::Snapshot& snapshot = builder.Build();
  const Decision a = policy_->Decide(snapshot, batch, 0),
                 b = online_only->Decide(snapshot, batch, 0);
  EXPECT_EQ(a.device, b.device);
  EXPECT_EQ(a.predicted_finish, b.predicted_finish);
}

}  // namespace
}  // namespace slice::sched
