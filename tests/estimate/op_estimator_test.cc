#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "daemon/estimate/estimator.h"

namespace slice::estimate {
namespace {

constexpr double kFlopsPerSecond = 2e10, kBytesPerSecond = 8e9;
using Level = Prediction::Level;

OpFeatures Shape(int64_t tokens, uint64_t signature = 1, uint8_t kind = 0) {
  return {signature, kind, tokens * 2'000'000, 4'000'000 + tokens * 16'000};
}
double Error(DurationNs predicted, double truth) {
  return std::abs(static_cast<double>(predicted) / truth - 1);
}

class OpEstimatorTest : public ::testing::Test {
 protected:
  // Samples with a relative noise of `cov`.
  void Feed(const OpFeatures& features, double mean, int count, double cov = 0.01) {
    std::normal_distribution<double> noise(1, cov);
    for (int i = 0; i < count; ++i) {
      estimator_.Observe(features, static_cast<DurationNs>(mean * std::max(0.2, noise(rng_))));
    }
  }
  DurationNs Predict(const OpFeatures& features) const {
    return estimator_.Predict(features).duration;
  }

  OpEstimator estimator_{kFlopsPerSecond, kBytesPerSecond};
  std::mt19937_64 rng_{1};
};

TEST_F(OpEstimatorTest, Happy_PriorIsTheRoofline) {
  const Prediction compute = estimator_.Predict({1, 0, 20'000'000'000, 1});
  EXPECT_EQ(compute.level, Level::kPrior);
  EXPECT_NEAR(static_cast<double>(compute.duration), 1e9, 1e4);
  EXPECT_NEAR(static_cast<double>(estimator_.Predict({1, 0, 1, 8'000'000'000}).duration), 1e9, 1e4);
}

TEST_F(OpEstimatorTest, Happy_ExactShapeConvergesToItsMean) {
  Feed(Shape(128), 5e6, 100, 0.05);
  const Prediction prediction = estimator_.Predict(Shape(128));
  EXPECT_EQ(prediction.level, Level::kExact);
  EXPECT_LT(Error(prediction.duration, 5e6), 0.03);
  EXPECT_GT(prediction.spread, 0);
  EXPECT_LT(prediction.spread, 5e5);
}

TEST_F(OpEstimatorTest, Happy_TableAndFitPredictShapesNeverSeen) {
  const auto truth = [](int64_t tokens) {
    return 300'000.0 + 25'000.0 * static_cast<double>(tokens);
  };
  for (int round = 0; round < 5; ++round) {
    for (const int64_t tokens : {16, 64, 128, 256, 700, 1024})
      Feed(Shape(tokens), truth(tokens), 3);
  }
  for (const int64_t tokens : {32, 100, 500, 900, 2048}) {
    const Prediction prediction = estimator_.Predict(Shape(tokens));
    EXPECT_NE(prediction.level, Level::kExact);
    EXPECT_NE(prediction.level, Level::kPrior);
    EXPECT_LT(Error(prediction.duration, truth(tokens)), 0.05) << tokens;
  }
}

TEST_F(OpEstimatorTest, Happy_FirstSampleOfASignatureScalesThePriorOfOtherShapes) {
  estimator_.Observe(Shape(1000), 10 * Predict(Shape(1000)));
  const double prior = static_cast<double>(
      OpEstimator(kFlopsPerSecond, kBytesPerSecond).Predict(Shape(500)).duration);
  EXPECT_LT(Error(Predict(Shape(500)), 10 * prior), 0.05);
}

TEST_F(OpEstimatorTest, Happy_DeviceKindsLearnApart) {
  Feed(Shape(64, 1, 0), 1e6, 10);
  Feed(Shape(64, 1, 1), 4e6, 10);
  EXPECT_LT(Error(Predict(Shape(64, 1, 0)), 1e6), 0.05);
  EXPECT_LT(Error(Predict(Shape(64, 1, 1)), 4e6), 0.05);
  EXPECT_EQ(estimator_.signature_count(), 2u);
}

// Bound: one outlier moves the next prediction by at most 5 % once warm, wherever it lies.
TEST_F(OpEstimatorTest, Edge_OneOutlierMovesThePredictionByFivePercentAtMost) {
  for (const double outlier : {1.0, 1e3, 5e5, 1.3e6, 3e6, 1e8, 9e17}) {
    estimator_ = OpEstimator(kFlopsPerSecond, kBytesPerSecond);
    Feed(Shape(64), 1e6, OpEstimator::kWarm, 0.02);
    const auto before = static_cast<double>(Predict(Shape(64)));
    estimator_.Observe(Shape(64), static_cast<DurationNs>(outlier));
    EXPECT_LE(Error(Predict(Shape(64)), before), 0.05) << outlier;
  }
}

TEST_F(OpEstimatorTest, Edge_ColdFirstRunDoesNotStick) {
  estimator_.Observe(Shape(64), 100'000'000);
  estimator_.Observe(Shape(64), 1'000'000);
  EXPECT_EQ(Predict(Shape(64)), 1'000'000);
}

// Bound: a step change is within 5 % after at most 20 samples, up or down, small or large.
TEST_F(OpEstimatorTest, Edge_StepChangeIsFollowedWithinTwentySamples) {
  for (const double factor : {0.01, 0.3, 0.5, 0.8, 0.9, 1.1, 1.2, 1.3, 1.6, 2.0, 10.0, 1000.0}) {
    for (const double cov : {0.0, 0.02}) {
      estimator_ = OpEstimator(kFlopsPerSecond, kBytesPerSecond);
      Feed(Shape(64), 1e6, 200, cov);
      Feed(Shape(64), 1e6 * factor, 20, cov);
      EXPECT_LE(Error(Predict(Shape(64)), 1e6 * factor), 0.05) << factor << " cov " << cov;
    }
  }
}

TEST_F(OpEstimatorTest, Regression_RareHugeSamplesLeaveAShapeUsable) {
  // 190 us with a 100 ms sample now and then: it must neither stick up there nor drift.
  for (int i = 0; i < 2'000; ++i) {
    estimator_.Observe(Shape(8), i % 40 == 7 ? 100'000'000 : 190'000 + i % 7 * 500);
    if (i >= 20) {
      ASSERT_LE(Error(Predict(Shape(8)), 191'500), 0.06) << i;
    }
  }
}

TEST_F(OpEstimatorTest, Edge_NeverStuckWhateverCameBefore) {
  std::uniform_int_distribution<int> exponent(0, 17);
  for (int i = 0; i < 500; ++i)
    estimator_.Observe(Shape(64), static_cast<DurationNs>(std::pow(10, exponent(rng_))));
  Feed(Shape(64), 2e6, 20);
  EXPECT_LE(Error(Predict(Shape(64)), 2e6), 0.05);
}

TEST_F(OpEstimatorTest, Edge_BadDurationsAndFeaturesAreHarmless) {
  Feed(Shape(64), 1e6, 10);
  const DurationNs before = Predict(Shape(64));
  for (const DurationNs bad :
       {DurationNs{0}, DurationNs{-1}, std::numeric_limits<DurationNs>::min()}) {
    estimator_.Observe(Shape(64), bad);
  }
  EXPECT_EQ(Predict(Shape(64)), before);
  EXPECT_GT(Predict({1, 0, -5, std::numeric_limits<int64_t>::min()}), 0);
  EXPECT_GT(
      Predict({1, 0, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max()}), 0);
  estimator_.Observe({1, 0, 0, 0}, 1);
  EXPECT_GT(Predict({1, 0, 0, 0}), 0);
}

TEST_F(OpEstimatorTest, Edge_LinearFitSurvivesOutliersInItsShapes) {
  const auto truth = [](int64_t tokens) {
    return 300'000.0 + 25'000.0 * static_cast<double>(tokens);
  };
  for (int round = 0; round < 30; ++round) {
    for (const int64_t tokens : {16, 64, 128, 256, 700, 1024}) {
      estimator_.Observe(Shape(tokens),
                         static_cast<DurationNs>(truth(tokens) * (round % 9 == 8 ? 50 : 1)));
    }
  }
  for (const int64_t tokens : {32, 500, 900})
    EXPECT_LT(Error(Predict(Shape(tokens)), truth(tokens)), 0.1) << tokens;
}

TEST_F(OpEstimatorTest, Edge_LinearFitFollowsAStepChangeOfAllShapes) {
  const auto truth = [](int64_t tokens) {
    return 300'000.0 + 25'000.0 * static_cast<double>(tokens);
  };
  for (const double factor : {1.0, 3.0}) {
    for (int round = 0; round < 40; ++round) {
      for (const int64_t tokens : {16, 64, 128, 256, 700, 1024})
        Feed(Shape(tokens), factor * truth(tokens), 1);
    }
    for (const int64_t tokens : {32, 500, 900}) {
      EXPECT_LT(Error(Predict(Shape(tokens)), factor * truth(tokens)), 0.1)
          << tokens << " x" << factor;
    }
  }
}

TEST_F(OpEstimatorTest, Edge_ShapesAndSignaturesAreBounded) {
  const OpEstimator::Limits limits{.shapes = 256, .signatures = 64, .knots = 16};
  estimator_ = OpEstimator(kFlopsPerSecond, kBytesPerSecond, limits);
  for (int64_t tokens = 1; tokens <= 2'000; ++tokens) estimator_.Observe(Shape(tokens), 1'000'000);
  EXPECT_EQ(estimator_.shape_count(), limits.shapes);
  EXPECT_NE(estimator_.Predict(Shape(1)).level, Level::kExact) << "not seen for longest: dropped";
  EXPECT_EQ(estimator_.Report(1)[0].shapes, limits.knots);
  Feed(Shape(2'000), 1e6, 10);
  EXPECT_EQ(estimator_.Predict(Shape(2'000)).level, Level::kExact);
  for (uint64_t signature = 0; signature < 10 * limits.signatures; ++signature) {
    estimator_.Observe(Shape(1, signature), 1'000'000);
  }
  EXPECT_EQ(estimator_.signature_count(), limits.signatures);
  EXPECT_EQ(estimator_.Report(1'000).size(), limits.signatures);
}

}  // namespace
}  // namespace slice::estimate
