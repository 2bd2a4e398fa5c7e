#include "daemon/estimate/gap_estimator.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <random>
#include <string>

#include "tests/estimate/gap_traces.h"

namespace slice::estimate {
namespace {

TEST(GapEstimator, Happy_UnknownServiceIsAssumedToReturnWithinTwoMilliseconds) {
  const GapEstimator gaps;
  const GapEstimator::Gap gap = gaps.Predict(1);
  EXPECT_FALSE(gap.known);
  EXPECT_EQ(gap.p10, 0);
  EXPECT_EQ(gap.p90, 2 * kMillisecond);
  EXPECT_EQ(gap.continues, 1.0);
}

TEST(GapEstimator, Happy_QuantilesBracketTheSamples) {
  GapEstimator gaps;
  for (int i = 0; i < 200; ++i)
    gaps.ObserveNext(1, (300 + i % 5 * 50) * kMicrosecond);  // 300 to 500 us
  const GapEstimator::Gap gap = gaps.Predict(1);
  EXPECT_TRUE(gap.known);
  EXPECT_LE(gap.p10, 350 * kMicrosecond);
  EXPECT_GE(gap.p10, 240 * kMicrosecond);
  EXPECT_GE(gap.p90, 450 * kMicrosecond);
  EXPECT_LE(gap.p90, 620 * kMicrosecond);
}

TEST(GapEstimator, Happy_ProbabilityOfANextStep) {
  GapEstimator gaps;
  for (int sequence = 0; sequence < 50; ++sequence) {
    for (int step = 0; step < 9; ++step) gaps.ObserveNext(1, kMillisecond);
    gaps.ObserveEnd(1);
  }
  EXPECT_NEAR(gaps.Predict(1).continues, 0.9, 0.03);
}

TEST(GapEstimator, Edge_OldGapsFade) {
  GapEstimator gaps;
  for (int i = 0; i < 1'000; ++i) gaps.ObserveNext(1, 10 * kMillisecond);
  for (int i = 0; i < 150; ++i) gaps.ObserveNext(1, 100 * kMicrosecond);
  EXPECT_LE(gaps.Predict(1).p90, 120 * kMicrosecond);
}

TEST(GapEstimator, Edge_OneOutlierLeavesTheQuantilesAlone) {
  GapEstimator gaps;
  for (int i = 0; i < 100; ++i) gaps.ObserveNext(1, 400 * kMicrosecond);
  const GapEstimator::Gap before = gaps.Predict(1);
  // A long wait; a clock set forward by a day; one set back.
  for (const DurationNs outlier : {60 * kSecond, 86'400 * kSecond, -86'400 * kSecond}) {
    gaps.ObserveNext(1, outlier);
    for (const auto& [now, then] :
         {std::pair(gaps.Predict(1).p10, before.p10), std::pair(gaps.Predict(1).p90, before.p90)}) {
      EXPECT_NEAR(static_cast<double>(now), static_cast<double>(then),
                  0.05 * static_cast<double>(then));
    }
    for (int i = 0; i < 50; ++i) gaps.ObserveNext(1, 400 * kMicrosecond);
  }
}

// Bound: of the gaps that follow, 8 to 12 % are below the p10 that was predicted and 88 to 92 %
// below the p90.
void ExpectCalibrated(const std::vector<DurationNs>& gaps, const std::string& what) {
  const Coverage coverage = Replay(gaps);
  EXPECT_NEAR(coverage.p10, 0.10, 0.02) << what;
  EXPECT_NEAR(coverage.p90, 0.90, 0.02) << what;
}

TEST(GapEstimator, Happy_QuantilesHoldOnGapsOfMicrosecondsToSeconds) {
  for (const DurationNs median :
       {30 * kMicrosecond, 400 * kMicrosecond, 40 * kMillisecond, 3 * kSecond}) {
    for (const uint64_t seed : {1, 2, 3}) {
      ExpectCalibrated(GeneratedGaps(median, 5'000, seed),
                       std::to_string(median) + " ns, seed " + std::to_string(seed));
    }
  }
}

TEST(GapEstimator, Happy_QuantilesHoldOnRecordedTraces) {
  const char* const given = std::getenv("SLICE_TRACES");
  const std::string folder = given != nullptr ? given : SLICE_TRACES;
  bool found = false;
  for (const char* const name : {"online_a.csv", "online_b.csv"}) {
    const auto gaps = TraceGaps(folder + "/" + name, 1);
    if (gaps.empty()) continue;
    found = true;
    ExpectCalibrated(gaps, name);
  }
  if (!found) GTEST_SKIP() << "no traces in " << folder;
}

TEST(GapEstimator, Edge_AfterAnythingTheQuantilesComeBack) {
  std::mt19937_64 random(7);
  std::uniform_int_distribution<int> exponent(0, 62);
  GapEstimator gaps;
  for (int i = 0; i < 20'000; ++i) {
    const DurationNs gap = (DurationNs{1} << exponent(random)) * (i % 3 == 0 ? -1 : 1);
    i % 11 == 0 ? gaps.ObserveEnd(1) : gaps.ObserveNext(1, gap);
  }
  for (int i = 0; i < 300; ++i) gaps.ObserveNext(1, 500 * kMicrosecond);
  const GapEstimator::Gap gap = gaps.Predict(1);
  EXPECT_NEAR(static_cast<double>(gap.p10), 5e5, 1e5);
  EXPECT_NEAR(static_cast<double>(gap.p90), 5e5, 1e5);
  EXPECT_GT(gap.continues, 0.99);
}

TEST(GapEstimator, Edge_ExtremeGapsStayInTheHistogram) {
  GapEstimator gaps;
  for (const DurationNs gap : {std::numeric_limits<DurationNs>::min(), DurationNs{-1},
                               DurationNs{0}, DurationNs{1}, kNever, kNever - 1}) {
    gaps.ObserveNext(1, gap);
  }
  const GapEstimator::Gap gap = gaps.Predict(1);
  EXPECT_GE(gap.p10, 0);
  EXPECT_LE(gap.p10, kMicrosecond);
  EXPECT_GT(gap.p90, 0);
}

TEST(GapEstimator, Edge_ServicesAreBoundedAndForgotten) {
  GapEstimator gaps;
  for (uint64_t service = 0; service <= GapEstimator::kServicesMax; ++service) {
    for (int i = 0; i < 5; ++i) gaps.ObserveNext(service, kMillisecond);
  }
  EXPECT_FALSE(gaps.Predict(0).known);
  EXPECT_TRUE(gaps.Predict(GapEstimator::kServicesMax).known);
  gaps.Forget(GapEstimator::kServicesMax);
  EXPECT_FALSE(gaps.Predict(GapEstimator::kServicesMax).known);
}

TEST(GapEstimator, Malicious_BeyondTheLimitTheLeastUsedOfLateGoes) {
  GapEstimator gaps;
  constexpr uint64_t kKept = 1, kMax = GapEstimator::kServicesMax;
  for (uint64_t service = 1; service <= kMax; ++service) {
    for (int i = 0; i < 5; ++i) gaps.ObserveNext(service, kMillisecond);
  }
  for (uint64_t service = kMax + 1; service <= 3 * kMax; ++service) {
    if (service % 1'000 == 0) gaps.ObserveNext(kKept, kMillisecond);
    gaps.ObserveEnd(service);
    ASSERT_LE(gaps.service_count(), kMax);
  }
  EXPECT_EQ(gaps.service_count(), kMax);
  EXPECT_TRUE(gaps.Predict(kKept).known) << "it was in use all the time";
  EXPECT_FALSE(gaps.Predict(2).known);
  EXPECT_EQ(gaps.Predict(3 * kMax).continues, 1.0) << "a single end is not believed";
}

TEST(GapEstimator, Edge_OnlyEndsMeanNoNextStep) {
  GapEstimator gaps;
  for (int i = 0; i < 20; ++i) gaps.ObserveEnd(1);
  EXPECT_EQ(gaps.Predict(1).continues, 0.0);
  EXPECT_FALSE(gaps.Predict(1).known);
}

}  // namespace
}  // namespace slice::estimate
