#include <gtest/gtest.h>

#include <limits>

#include "daemon/estimate/estimator.h"

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
  EXPECT_LE(gap.p10, 300 * kMicrosecond);
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
  gaps.ObserveNext(1, 60 * kSecond);
  EXPECT_EQ(gaps.Predict(1).p10, before.p10);
  EXPECT_EQ(gaps.Predict(1).p90, before.p90);
}

TEST(GapEstimator, Edge_ExtremeGapsStayInTheHistogram) {
  GapEstimator gaps;
  for (const DurationNs gap : {std::numeric_limits<DurationNs>::min(), DurationNs{-1},
                               DurationNs{0}, DurationNs{1}, kNever, kNever - 1}) {
    gaps.ObserveNext(1, gap);
  }
  const GapEstimator::Gap gap = gaps.Predict(1);
  EXPECT_EQ(gap.p10, 0);
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

TEST(GapEstimator, Edge_OnlyEndsMeanNoNextStep) {
  GapEstimator gaps;
  for (int i = 0; i < 20; ++i) gaps.ObserveEnd(1);
  EXPECT_EQ(gaps.Predict(1).continues, 0.0);
  EXPECT_FALSE(gaps.Predict(1).known);
}

}  // namespace
}  // namespace slice::estimate
