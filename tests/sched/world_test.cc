// Policies over seconds of work: who waits for whom, and what of the idle time is used. Everything
// is virtual and seeded; the bounds leave room for other seeds, not for noise.
#include "tests/sched/world.h"

#include <gtest/gtest.h>

#include <numeric>

namespace slice::sched {
namespace {

constexpr DurationNs kMs = kMillisecond;

WorldTenant Online() {
  WorldTenant online;
  online.service_class = ServiceClass::kOnline;
  online.sequences_per_second = 5;  // of 16 ms + 16 x 4.3 ms: 40 % of a device
  online.deadline = 200 * kMs;
  return online;
}
WorldTenant Offline(DeviceIndex home) {
  WorldTenant offline;
  offline.home = home;
  offline.prefill_layer = 8 * kMs;
  offline.step_layer = kMs;
  return offline;
}
// Two devices; online work at home on 0, offline work at home on 0 and, twice, on 1.
WorldConfig Mixed(const char* policy, uint64_t seed) {
  WorldConfig config;
  config.policy = policy;
  config.seed = seed;
  config.tenants = {Online(), Offline(0), Offline(1), Offline(1)};
  return config;
}
DurationNs Total(const std::vector<DurationNs>& busy) {
  return std::accumulate(busy.begin(), busy.end(), DurationNs{0});
}

class World : public ::testing::TestWithParam<uint64_t> {};

TEST_P(World, Happy_OnlineUnderSliceIsLikeOnlineAlone) {
  const WorldReport alone = RunWorld(Mixed("online-only", GetParam()));
  const WorldReport slice = RunWorld(Mixed("slice", GetParam()));
  ASSERT_GT(alone.online_steps.size(), 200u);
  EXPECT_EQ(alone.offline_steps, 0u);
  EXPECT_LE(slice.Quantile(slice.online_steps, 0.5),
            1.03 * alone.Quantile(alone.online_steps, 0.5));
  EXPECT_LE(slice.Quantile(slice.online_steps, 0.95),
            1.10 * alone.Quantile(alone.online_steps, 0.95));
  EXPECT_LE(slice.Quantile(slice.online_sequences, 0.5),
            1.15 * alone.Quantile(alone.online_sequences, 0.5));
  // The worst that is left is to arrive just after an offline op of 8 ms began.
  EXPECT_LE(slice.Quantile(slice.online_steps, 0.99),
            alone.Quantile(alone.online_steps, 0.99) + 9e6);
  EXPECT_LE(slice.online_late, alone.online_late);
}

TEST_P(World, Happy_SliceUsesNearlyAllIdleTime) {
  const WorldReport slice = RunWorld(Mixed("slice", GetParam()));
  const WorldReport priority = RunWorld(Mixed("priority", GetParam()));
  for (const DurationNs busy : slice.busy) EXPECT_GE(busy, 3'600 * kMs) << "90 % of 4 s";
  EXPECT_GE(static_cast<double>(slice.offline_work),
            0.93 * static_cast<double>(priority.offline_work))
      << "leaving the gaps costs little";
  EXPECT_GT(slice.offline_ops_off_home, 500u);
}

TEST_P(World, Happy_StateMovesSeldom) {
  const WorldReport slice = RunWorld(Mixed("slice", GetParam()));
  const auto ops = static_cast<int64_t>(slice.offline_steps) * 8;
  EXPECT_LE(slice.bytes_moved >> 20, ops / 4) << "1 MiB for each op that finds its piece elsewhere";
}

TEST_P(World, Happy_BaselinesShowWhatTheRulesAreFor) {
  const WorldReport slice = RunWorld(Mixed("slice", GetParam()));
  const WorldReport priority = RunWorld(Mixed("priority", GetParam()));
  const WorldReport fifo = RunWorld(Mixed("fifo", GetParam()));
  EXPECT_GE(priority.Quantile(priority.online_steps, 0.5),
            1.1 * slice.Quantile(slice.online_steps, 0.5))
      << "an offline op in every gap between two steps";
  EXPECT_GE(fifo.Quantile(fifo.online_sequences, 0.5),
            2 * slice.Quantile(slice.online_sequences, 0.5));
}

TEST_P(World, Happy_OfflineLeavesABusyHomeForAnEmptyDevice) {
  WorldConfig config = Mixed("slice", GetParam());
  config.tenants = {Online(), Offline(0)};
  config.tenants[0].sequences_per_second = 9;
  const WorldReport report = RunWorld(config);
  EXPECT_GT(report.offline_ops_off_home, report.offline_steps * 8 / 4);
  config.tenants[1].kv_bytes = 400 << 20;  // 100 ms to move a piece: hardly ever worth it
  EXPECT_LE(RunWorld(config).offline_ops_off_home, 8u);
}

TEST_P(World, Happy_OneDeviceIsSharedWithoutHarm) {
  WorldConfig config = Mixed("slice", GetParam());
  config.devices = 1;
  config.tenants = {Online(), Offline(0)};
  config.tenants[0].sequences_per_second = 2;
  const WorldReport slice = RunWorld(config);
  config.policy = "online-only";
  const WorldReport alone = RunWorld(config);
  EXPECT_LE(slice.Quantile(slice.online_steps, 0.5),
            1.03 * alone.Quantile(alone.online_steps, 0.5));
  EXPECT_GE(Total(slice.busy), 3'400 * kMs);
  EXPECT_GT(slice.offline_steps, 50u);
}

TEST_P(World, Edge_OnlineOverloadStarvesOnlyOfflineWork) {
  WorldConfig config = Mixed("slice", GetParam());
  config.devices = 1;
  config.tenants = {Online(), Offline(0)};
  config.tenants[0].sequences_per_second = 20;  // 160 % of the device
  const WorldReport slice = RunWorld(config);
  config.policy = "online-only";
  const WorldReport alone = RunWorld(config);
  EXPECT_GE(static_cast<double>(slice.online_steps.size()),
            0.97 * static_cast<double>(alone.online_steps.size()));
}

TEST_P(World, Edge_SameSeedSameWorld) {
  const WorldReport a = RunWorld(Mixed("slice", GetParam())),
                    b = RunWorld(Mixed("slice", GetParam()));
  EXPECT_EQ(a.online_steps, b.online_steps);
  EXPECT_EQ(a.offline_work, b.offline_work);
  EXPECT_EQ(a.bytes_moved, b.bytes_moved);
}

INSTANTIATE_TEST_SUITE_P(Seeds, World, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace slice::sched
