// Shared prefixes, early stops and threads change no decision: `slice` against brute force over
// thousands of random snapshots.
#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <tuple>

#include "daemon/sched/policy.h"
#include "tests/sched/exhaustive_policy.h"
#include "tests/sim/random_snapshot.h"

namespace slice::sched {
namespace {

struct Case {
  sim::RandomCase random;
  std::vector<sim::OpIndex> batch;
  DeviceIndex home = 0;
};

// A round over a random snapshot: some unscheduled ops of one instance. Tight and loose deadlines,
// sequences that go on, devices that host online tenants.
Case MakeCase(uint64_t seed) {
  Case c;
  c.random = sim::MakeRandomCase(seed);
  sim::Snapshot& s = c.random.snapshot;
  std::mt19937_64 rng(seed * 7919);
  for (sim::SnapInstance& instance : s.instances) {
    if (rng() % 2 == 0)
      instance.deadline = s.now + static_cast<DurationNs>(rng() % 40) * kMillisecond;
    if (rng() % 2 == 0)
      instance.rest_of_sequence = static_cast<DurationNs>(rng() % 20) * kMillisecond;
  }
  for (sim::SnapDevice& device : s.devices) device.hosts_online = rng() % 3 == 0;
  if (rng() % 2 == 0) s.offline_op_max = 2 * kMillisecond;
  c.home = static_cast<DeviceIndex>(rng() % s.devices.size());
  const auto instance = static_cast<uint32_t>(rng() % s.instances.size());
  for (sim::OpIndex i = 0; i < s.ops.size(); ++i) {
    const sim::SnapOp& op = s.ops[i];
    if (op.instance == instance && op.state == sim::OpState::kUnscheduled && c.batch.size() < 6)
      c.batch.push_back(i);
  }
  return c;
}

std::string Text(const Decision& decision) {
  return std::to_string(decision.placed) + " on " + std::to_string(decision.device) + ", " +
         std::to_string(decision.op_count) + " ops, retry " + std::to_string(decision.retry_at) +
         ", finish " + std::to_string(decision.predicted_finish) + ", " +
         std::to_string(decision.candidates.size()) + " candidates";
}

// Jobs backwards, each on a thread of its own.
void OnThreads(size_t count, const std::function<void(size_t)>& job) {
  std::vector<std::thread> threads;
  for (size_t i = count; i-- > 0;) threads.emplace_back([&job, i] { job(i); });
  for (std::thread& thread : threads) thread.join();
}

TEST(EarlyStop, Happy_DecisionsEqualExhaustiveEvaluation) {
  uint64_t decided = 0, stopped = 0, deferred = 0, away = 0, infeasible = 0;
  for (uint64_t seed = 1; seed <= 6'000; ++seed) {
    const Case c = MakeCase(seed);
    if (c.batch.empty()) continue;
    const sim::Snapshot& s = c.random.snapshot;
    const estimate::TransferEstimator transfers = sim::MakeRandomTransfers(seed, s.domains.size());
    sim::Simulator simulator(transfers, c.random.options);
    const auto policy = std::move(MakePolicy("slice", &simulator).value());
    const Decision fast = policy->Decide(s, c.batch, c.home);
    const Decision full = DecideExhaustively(s, c.batch, c.home, c.random.options, transfers);
    ASSERT_EQ(Text(fast), Text(full)) << "seed " << seed;
    ++decided;
    deferred += fast.placed ? 0 : 1;
    away += fast.placed && fast.device != c.home ? 1 : 0;
    for (const CandidateScore& score : fast.candidates) {
      stopped += score.beaten ? 1 : 0;
      infeasible += score.feasible ? 0 : 1;
    }
    EXPECT_TRUE(fast.candidates.empty() || !fast.candidates[0].beaten) << "seed " << seed;
  }
  // The cases must reach what they are there for.
  EXPECT_GT(stopped, decided / 10);
  EXPECT_GT(deferred, decided / 100);
  EXPECT_GT(away, decided / 10);
  EXPECT_GT(infeasible, decided / 50);
}

TEST(EarlyStop, Race_AnyNumberOfThreadsGivesTheSameScores) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const Case c = MakeCase(seed);
    if (c.batch.empty()) continue;
    const sim::Snapshot& s = c.random.snapshot;
    const estimate::TransferEstimator transfers = sim::MakeRandomTransfers(seed, s.domains.size());
    sim::Options threaded_options = c.random.options;
    threaded_options.for_each = OnThreads;
    sim::Simulator simulator(transfers, c.random.options), threaded(transfers, threaded_options);
    const auto alone = std::move(MakePolicy("slice", &simulator).value());
    const auto many = std::move(MakePolicy("slice", &threaded).value());
    const Decision a = alone->Decide(s, c.batch, c.home);
    const Decision b = many->Decide(s, c.batch, c.home);
    ASSERT_EQ(Text(a), Text(b)) << "seed " << seed;
    ASSERT_EQ(a.candidates.size(), b.candidates.size());
    for (size_t i = 0; i < a.candidates.size(); ++i) {
      const CandidateScore &x = a.candidates[i], &y = b.candidates[i];
      EXPECT_EQ(std::tie(x.defer, x.device, x.beaten, x.feasible, x.lateness_bucket,
                         x.online_added_bucket, x.batch_finish_bucket, x.bytes_moved, x.balance,
                         x.batch_finish),
                std::tie(y.defer, y.device, y.beaten, y.feasible, y.lateness_bucket,
                         y.online_added_bucket, y.batch_finish_bucket, y.bytes_moved, y.balance,
                         y.batch_finish))
          << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace slice::sched
