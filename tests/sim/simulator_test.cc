// The rules of docs/simulation.md one by one, each on the smallest snapshot that shows it.
#include "daemon/sim/simulator.h"

#include <gtest/gtest.h>

#include "tests/sim/snapshot_builder.h"

namespace slice::sim {
namespace {

// 30 us of commands; 20 us and 0.25 ns per byte on each link: 1 MB takes 300 us in all.
constexpr DurationNs kCopy1Mb = 30 * kUs + 20 * kUs + 250 * kUs;
constexpr int64_t kMb = 1'000'000;

class SimulatorTest : public ::testing::Test {
 protected:
  const Timeline& Run(SnapshotBuilder& builder, std::vector<Placement> batch = {},
                      Rules rules = {}) {
    builder_now_ = builder.now();
    simulator_.Run(builder.Build(), batch, rules, &timeline_);
    return timeline_;
  }
  // Relative to now, in us, so that expectations read like a chart.
  DurationNs Start(OpIndex op) const { return (timeline_.start[op] - builder_now_) / kUs; }
  DurationNs Finish(OpIndex op) const { return (timeline_.finish[op] - builder_now_) / kUs; }

  estimate::TransferEstimator transfers_{4};
  Simulator simulator_{transfers_, Options{}};
  Timeline timeline_;
  TimeNs builder_now_ = 0;
};

OpSpec PlacedOn(uint32_t instance, DeviceIndex device, DurationNs duration = kMs) {
  OpSpec spec;
  spec.instance = instance;
  spec.duration = duration;
  spec.state = OpState::kPlaced;
  spec.device = device;
  return spec;
}

TEST_F(SimulatorTest, Happy_ChainRunsBackToBack) {
  SnapshotBuilder builder(1);
  const std::vector<OpIndex> ops = builder.Chain(PlacedOn(builder.Online(), 0, 2 * kMs), 3);
  const Timeline& timeline = Run(builder);
  EXPECT_EQ(Start(ops[0]), 0);
  EXPECT_EQ(Start(ops[1]), 2'000);
  EXPECT_EQ(Finish(ops[2]), 6'000);
  EXPECT_EQ(timeline.instance_finish[0], builder.now() + 6 * kMs);
  EXPECT_EQ(timeline.makespan, builder.now() + 6 * kMs);
  EXPECT_EQ(timeline.instance_left[0], 0);
}

TEST_F(SimulatorTest, Happy_FreeDeviceTakesClassThenPriorityThenOrderThenIndex) {
  SnapshotBuilder builder(1);
  const uint32_t offline = builder.Offline();
  const uint32_t online = builder.Online();
  const uint32_t urgent = builder.Online();
  builder.instance(urgent).priority = 5;
  OpSpec spec = PlacedOn(offline, 0);
  spec.order = 0;
  const OpIndex last = builder.Op(spec);
  spec.instance = online;
  spec.order = 7;
  const OpIndex third = builder.Op(spec);
  const OpIndex fourth = builder.Op(spec);
  spec.order = 3;
  const OpIndex second = builder.Op(spec);
  spec.instance = urgent;
  spec.order = 9;
  const OpIndex first = builder.Op(spec);
  Run(builder);
  EXPECT_EQ(Start(first), 0);
  EXPECT_EQ(Start(second), 1'000);
  EXPECT_EQ(Start(third), 2'000);
  EXPECT_EQ(Start(fourth), 3'000);
  EXPECT_EQ(Start(last), 4'000);
}

TEST_F(SimulatorTest, Happy_WithoutClassesOrderAloneDecides) {
  SnapshotBuilder builder(1);
  OpSpec spec = PlacedOn(builder.Offline(), 0);
  spec.order = 0;
  const OpIndex offline = builder.Op(spec);
  spec.instance = builder.Online();
  spec.order = 1;
  const OpIndex online = builder.Op(spec);
  builder.device(0).phantom_from = builder.now();
  builder.device(0).phantom_until = builder.now() + 5 * kMs;
  Run(builder, {}, Rules{.slices = true, .classes = false});
  EXPECT_EQ(Start(offline), 0);
  EXPECT_EQ(Start(online), 1'000);
}

TEST_F(SimulatorTest, Happy_MissingInputIsCopiedFirst) {
  SnapshotBuilder builder(2);
  OpSpec spec = PlacedOn(builder.Online(), 1);
  spec.reads = {builder.Tensor(kMb, 0b01)};
  const OpIndex op = builder.Op(spec);
  const Timeline& timeline = Run(builder);
  EXPECT_EQ(Start(op), kCopy1Mb / kUs);
  EXPECT_EQ(timeline.bytes_moved, kMb);
}

TEST_F(SimulatorTest, Happy_OneCopyOutOfADomainAtATimeOnlineFirst) {
  SnapshotBuilder builder(3);
  OpSpec spec = PlacedOn(builder.Offline(), 1);
  spec.order = 0;
  spec.reads = {builder.Tensor(kMb, 0b001)};
  const OpIndex offline = builder.Op(spec);
  spec = PlacedOn(builder.Online(), 2);
  spec.order = 1;
  spec.reads = {builder.Tensor(kMb, 0b001)};
  const OpIndex online = builder.Op(spec);
  Run(builder);
  EXPECT_EQ(Start(online), 300);
  EXPECT_EQ(Start(offline), 600);
}

TEST_F(SimulatorTest, Happy_OnlineCopyOvertakesAnOfflineOneUnderWay) {
  SnapshotBuilder builder(3);
  OpSpec spec = PlacedOn(builder.Offline(), 1);
  spec.reads = {builder.Tensor(10 * kMb, 0b001)};
  const OpIndex offline = builder.Op(spec);
  spec = PlacedOn(builder.Online(), 2);
  spec.reads = {builder.Tensor(kMb, 0b001)};
  spec.earliest = builder.now() + kMs;
  const OpIndex online = builder.Op(spec);
  Run(builder);
  EXPECT_EQ(Start(online), 1'000 + 300);
  EXPECT_EQ(Start(offline), 50 + 2'500 + 300);
}

TEST_F(SimulatorTest, Happy_CopiesOfDifferentDomainsRunSideBySide) {
  SnapshotBuilder builder(4);
  OpSpec spec = PlacedOn(builder.Online(), 1);
  spec.reads = {builder.Tensor(kMb, 0b0001)};
  const OpIndex a = builder.Op(spec);
  spec = PlacedOn(builder.Online(), 3);
  spec.reads = {builder.Tensor(kMb, 0b0100)};
  const OpIndex b = builder.Op(spec);
  Run(builder);
  EXPECT_EQ(Start(a), 300);
  EXPECT_EQ(Start(b), 300);
}

TEST_F(SimulatorTest, Happy_TwoReadersShareOneCopyAndLiftItsClass) {
  SnapshotBuilder builder(3);
  const TensorIndex shared = builder.Tensor(kMb, 0b001);
  OpSpec spec = PlacedOn(builder.Offline(), 1);
  spec.order = 0;
  spec.reads = {builder.Tensor(kMb, 0b001)};
  const OpIndex other = builder.Op(spec);
  spec.device = 2;
  spec.reads = {shared};
  const OpIndex offline = builder.Op(spec);
  spec.instance = builder.Online();
  const OpIndex online = builder.Op(spec);
  const Timeline& timeline = Run(builder);
  EXPECT_EQ(Start(online), 300);
  EXPECT_EQ(Start(offline), 1'300);
  EXPECT_EQ(Start(other), 600);
  EXPECT_EQ(timeline.bytes_moved, 2 * kMb);
}

TEST_F(SimulatorTest, Happy_TransferUnderWayIsWaitedForNotRepeated) {
  SnapshotBuilder builder(2);
  const TensorIndex tensor = builder.Tensor(kMb, 0b01);
  builder.raw().transfers.push_back(
      {tensor, 0, 1, ServiceClass::kOffline, builder.now() + 100 * kUs});
  OpSpec spec = PlacedOn(builder.Online(), 1);
  spec.reads = {tensor};
  const OpIndex op = builder.Op(spec);
  const Timeline& timeline = Run(builder);
  EXPECT_EQ(Start(op), 100);
  EXPECT_EQ(timeline.bytes_moved, 0);
}

TEST_F(SimulatorTest, Happy_WriteLeavesTheWritersDomainAsTheOnlyResident) {
  SnapshotBuilder builder(2);
  const TensorIndex kv = builder.Managed(kMb, 0);
  const uint32_t instance = builder.Offline();
  OpSpec spec = PlacedOn(instance, 1);
  spec.reads = spec.writes = {kv};
  const OpIndex away = builder.Op(spec);
  spec.device = 0;
  spec.after = {away};
  const OpIndex home = builder.Op(spec);
  const Timeline& timeline = Run(builder);
  EXPECT_EQ(Start(away), 300);
  EXPECT_EQ(Start(home), 300 + 1'000 + 300);
  EXPECT_EQ(timeline.bytes_moved, 2 * kMb);
}

TEST_F(SimulatorTest, Happy_ActivationBytesComeBackAfterTheLastConsumer) {
  // Five 100-byte activations in a chain: two are alive at a time.
  for (const int64_t free_bytes : {200, 199}) {
    SnapshotBuilder builder(1, 1'000 * kMs, free_bytes);
    const uint32_t instance = builder.Offline();
    OpSpec spec = PlacedOn(instance, 0);
    for (int i = 0; i < 5; ++i) {
      spec.writes = {builder.Activation(100, instance)};
      spec.memory_bytes = 100;
      const OpIndex op = builder.Op(spec);
      spec.reads = spec.writes;
      spec.after = {op};
    }
    const Timeline& timeline = Run(builder);
    EXPECT_EQ(timeline.memory_feasible, free_bytes == 200);
    EXPECT_EQ(timeline.infeasible_domain, free_bytes == 200 ? kNoDomain : 0);
    EXPECT_EQ(Finish(4), 5'000) << "an infeasible window is still simulated to its end";
  }
}

TEST_F(SimulatorTest, Happy_TheFirstInfeasibilityNamesItsCause) {
  SnapshotBuilder builder(2, 1'000 * kMs, 1'000);
  const uint32_t instance = builder.Offline();
  OpSpec spec = PlacedOn(instance, 0, 2 * kMs);
  const OpIndex fits = builder.Op(spec);
  spec.after = {fits};
  spec.writes = {builder.Activation(1'300, instance)};
  const OpIndex large = builder.Op(spec);
  spec.after = {large};
  spec.writes = {builder.Activation(5'000, instance)};
  builder.Op(spec);
  const Infeasible outputs = Run(builder).infeasible;
  EXPECT_TRUE(outputs == (Infeasible{Infeasible::Cause::kMemory, 0, builder.now() + 2 * kMs, large,
                                     kNone, 300}));

  SnapshotBuilder pinned(2);
  const TensorIndex weights = pinned.Tensor(kMb, 0b01);
  pinned.tensor(weights).pinned = true;
  OpSpec elsewhere = PlacedOn(pinned.Offline(), 1);
  elsewhere.reads = {weights};
  const OpIndex op = pinned.Op(elsewhere);
  EXPECT_TRUE(Run(pinned).infeasible ==
              (Infeasible{Infeasible::Cause::kPinned, 1, pinned.now(), op, weights, 0}));
}

TEST_F(SimulatorTest, Happy_CopyThatDoesNotFitIsNamed) {
  SnapshotBuilder builder(2, 1'000 * kMs, 1'000);
  const uint32_t instance = builder.Offline();
  const TensorIndex input = builder.Activation(1'500, instance, 0b01);
  OpSpec spec = PlacedOn(instance, 1);
  spec.reads = {input};
  builder.Op(spec);
  EXPECT_TRUE(Run(builder).infeasible ==
              (Infeasible{Infeasible::Cause::kMemory, 1, builder.now(), kNone, input, 500}));
}

TEST_F(SimulatorTest, Happy_MemoryCurveHasEachStepAndThePeak) {
  SnapshotBuilder builder(1, 1'000 * kMs, 1'000);
  const uint32_t instance = builder.Offline();
  const TensorIndex between = builder.Activation(300, instance);
  OpSpec spec = PlacedOn(instance, 0);
  spec.writes = {between};
  const OpIndex makes = builder.Op(spec);
  spec.after = {makes};
  spec.reads = {between};
  spec.writes = {};
  spec.memory_bytes = 200;
  builder.Op(spec);
  Options options;
  options.memory_curve = true;
  Simulator simulator(transfers_, options);
  Timeline timeline;
  simulator.Run(builder.Build(), {}, &timeline);
  const TimeNs now = builder.now();
  const std::vector<MemoryPoint> expected = {{now, 700}, {now + kMs, 500}, {now + 2 * kMs, 1'000}};
  ASSERT_EQ(timeline.memory.size(), 1u);
  EXPECT_TRUE(timeline.memory[0] == expected);
  EXPECT_EQ(timeline.free_bytes_min, std::vector<int64_t>{500});
}

TEST_F(SimulatorTest, Happy_MemoryBeyondTheOutputsIsHeldWhileTheOpRuns) {
  SnapshotBuilder builder(1, 1'000 * kMs, 150);
  const uint32_t instance = builder.Offline();
  OpSpec spec = PlacedOn(instance, 0);
  spec.memory_bytes = 150;
  builder.Chain(spec, 3);
  EXPECT_TRUE(Run(builder).memory_feasible);
}

TEST_F(SimulatorTest, Edge_ReservedDomainTakesNothingFromFreeBytes) {
  SnapshotBuilder builder(2, 1'000 * kMs, 0);
  const uint32_t instance = builder.Offline();
  builder.instance(instance).reserved_domains = 0b01;
  OpSpec spec = PlacedOn(instance, 0);
  spec.memory_bytes = 500;
  spec.writes = {builder.Activation(500, instance)};
  const OpIndex op = builder.Op(spec);
  EXPECT_TRUE(Run(builder).memory_feasible);
  builder.op(op).device = 1;
  EXPECT_FALSE(Run(builder).memory_feasible);
  EXPECT_EQ(timeline_.infeasible_domain, 1);
}

TEST_F(SimulatorTest, Edge_CopyIntoAHomeSlotTakesNothing) {
  SnapshotBuilder builder(2, 1'000 * kMs, 0);
  const TensorIndex kv = builder.Managed(kMb, 0);
  builder.tensor(kv).resident = 0b10;
  OpSpec spec = PlacedOn(builder.Offline(), 0);
  spec.reads = {kv};
  builder.Op(spec);
  EXPECT_TRUE(Run(builder).memory_feasible);
  builder.tensor(kv).slots = 0;
  EXPECT_FALSE(Run(builder).memory_feasible);
}

TEST_F(SimulatorTest, Edge_PinnedInputElsewhereIsInfeasible) {
  SnapshotBuilder builder(2);
  const TensorIndex pinned = builder.Tensor(kMb, 0b01);
  builder.tensor(pinned).pinned = true;
  OpSpec spec = PlacedOn(builder.Offline(), 1);
  spec.reads = {pinned};
  builder.Op(spec);
  EXPECT_FALSE(Run(builder).memory_feasible);
  EXPECT_EQ(timeline_.infeasible_domain, 1);
}

TEST_F(SimulatorTest, Happy_OfflineRunsInAGapOnlyWhatEndsBeforeTheNextStep) {
  SnapshotBuilder builder(1);
  builder.device(0).phantom_from = builder.now() + 600 * kUs;
  builder.device(0).phantom_until = builder.now() + 2 * kMs;
  const uint32_t offline = builder.Offline();
  const OpIndex first = builder.Op(PlacedOn(offline, 0, kMs));  // does not fit, although first
  const OpIndex fits = builder.Op(PlacedOn(offline, 0, 400 * kUs));
  const OpIndex no_more =
      builder.Op(PlacedOn(offline, 0, 400 * kUs));  // would end after phantom_from by then
  Run(builder);
  EXPECT_EQ(Start(fits), 0);
  EXPECT_EQ(Start(first), 2'000);
  EXPECT_EQ(Start(no_more), 3'000);
}

TEST_F(SimulatorTest, Edge_OnlineAndUnrestrictedOpsIgnorePhantoms) {
  SnapshotBuilder builder(1);
  builder.device(0).phantom_from = builder.now();
  builder.device(0).phantom_until = builder.now() + 2 * kMs;
  const OpIndex offline = builder.Op(PlacedOn(builder.Offline(), 0));
  const OpIndex online = builder.Op(PlacedOn(builder.Online(), 0));
  Run(builder);
  EXPECT_EQ(Start(online), 0);
  EXPECT_EQ(Start(offline), 2'000);
  Run(builder, {}, Rules{.slices = false, .classes = true});
  EXPECT_EQ(Start(offline), 1'000);
}

TEST_F(SimulatorTest, Happy_EndOfAnOnlineStepOpensAPhantom) {
  SnapshotBuilder builder(1);
  const uint32_t online = builder.Online();
  builder.instance(online).gap_p10 = 500 * kUs;
  builder.instance(online).gap_p90 = 1'500 * kUs;
  builder.Chain(PlacedOn(online, 0), 2);
  const uint32_t offline = builder.Offline();
  const OpIndex wide = builder.Op(PlacedOn(offline, 0, 600 * kUs));
  const OpIndex narrow = builder.Op(PlacedOn(offline, 0, 500 * kUs));
  Run(builder);
  EXPECT_EQ(Start(narrow), 2'000);
  EXPECT_EQ(Start(wide), 3'500);
}

TEST_F(SimulatorTest, Happy_EarliestHoldsBackAndNeverIsNever) {
  SnapshotBuilder builder(1);
  const uint32_t instance = builder.Offline();
  OpSpec spec;
  spec.instance = instance;
  const OpIndex held = builder.Op(spec);
  const OpIndex never = builder.Op(spec);
  Run(builder, {{held, 0, builder.now() + 3 * kMs}, {never, kNoDevice, kNever}});
  EXPECT_EQ(Start(held), 3'000);
  EXPECT_EQ(timeline_.start[never], kNever);
  EXPECT_EQ(timeline_.instance_finish[instance], kNever);
  EXPECT_EQ(timeline_.instance_left[instance], kMs);
}

TEST_F(SimulatorTest, Happy_RolloutTakesTheEarliestFinish) {
  SnapshotBuilder builder(2);
  const uint32_t instance = builder.Offline();
  OpSpec spec;
  spec.instance = instance;
  spec.reads = {builder.Tensor(kMb, 0b01)};
  const OpIndex near = builder.Op(spec);
  spec.reads = {builder.Tensor(kMb, 0b01)};
  const OpIndex far = builder.Op(spec);
  Run(builder);
  EXPECT_EQ(timeline_.device[near], 0) << "the data are there";
  EXPECT_EQ(timeline_.device[far], 1) << "300 us of copying beat 1 ms of waiting";
  EXPECT_EQ(Start(far), 300);
}

TEST_F(SimulatorTest, Edge_RolloutKeepsToAllowedDevicesAndPinnedInputs) {
  SnapshotBuilder builder(3);
  const uint32_t instance = builder.Offline();
  OpSpec spec;
  spec.instance = instance;
  spec.allowed = 0b100;
  const OpIndex only = builder.Op(spec);
  spec.allowed = 0;
  const OpIndex nowhere = builder.Op(spec);
  spec.allowed = 0b111;
  spec.reads = {builder.Tensor(1, 0b010)};
  builder.tensor(spec.reads[0]).pinned = true;
  const OpIndex pinned = builder.Op(spec);
  Run(builder);
  EXPECT_EQ(timeline_.device[only], 2);
  EXPECT_EQ(timeline_.start[nowhere], kNever);
  EXPECT_EQ(timeline_.device[pinned], 1);
}

TEST_F(SimulatorTest, Happy_RunningOpEndsAtItsPredictionAndCannotBeMoved) {
  SnapshotBuilder builder(1);
  const uint32_t instance = builder.Offline();
  const OpIndex running = builder.Op(PlacedOn(instance, 0, 10 * kMs));
  OpSpec spec = PlacedOn(builder.Online(), 0);
  const OpIndex next = builder.Op(spec);
  builder.Running(running, 0, 4 * kMs);
  Run(builder);
  EXPECT_EQ(Start(running), 0);
  EXPECT_EQ(Finish(running), 4'000);
  EXPECT_EQ(Start(next), 4'000);
}

TEST_F(SimulatorTest, Edge_DeviceBusyOutsideTheWindow) {
  SnapshotBuilder builder(1);
  const OpIndex op = builder.Op(PlacedOn(builder.Online(), 0));
  builder.device(0).free_at = builder.now() + 2 * kMs;
  Run(builder);
  EXPECT_EQ(Start(op), 2'000);
}

TEST_F(SimulatorTest, Edge_HorizonCutsStartsButKeepsFinishesUnderWay) {
  SnapshotBuilder builder(1);
  const uint32_t instance = builder.Online();
  const std::vector<OpIndex> ops = builder.Chain(PlacedOn(instance, 0, 1'500 * kMs), 3);
  Run(builder);
  EXPECT_EQ(Start(ops[1]), 1'500'000);
  EXPECT_EQ(Finish(ops[1]), 3'000'000);
  EXPECT_EQ(timeline_.start[ops[2]], kNever);
  EXPECT_EQ(timeline_.instance_left[instance], 1'500 * kMs);
}

TEST_F(SimulatorTest, Edge_KindScaleAndTheShortestDuration) {
  SnapshotBuilder builder(2);
  builder.raw().kind_scale = {1.0, 0.25};
  builder.device(1).kind = 1;
  const uint32_t instance = builder.Online();
  const OpIndex scaled = builder.Op(PlacedOn(instance, 1, 4 * kMs));
  const OpIndex zero = builder.Op(PlacedOn(instance, 0, 0));
  Run(builder);
  EXPECT_EQ(Finish(scaled), 1'000);
  EXPECT_EQ(timeline_.finish[zero] - timeline_.start[zero], 1);
}

TEST_F(SimulatorTest, Edge_EmptySnapshot) {
  SnapshotBuilder builder(0);
  const Timeline& timeline = Run(builder);
  EXPECT_TRUE(timeline.start.empty());
  EXPECT_TRUE(timeline.memory_feasible);
}

}  // namespace
}  // namespace slice::sim
