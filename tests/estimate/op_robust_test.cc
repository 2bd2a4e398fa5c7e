// What bad samples may do to OpEstimator: each test states its bound.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "daemon/estimate/op_estimator.h"

namespace slice::estimate {
namespace {

OpFeatures Shape(int64_t tokens) {
  return {7, 0, tokens * 2'000'000, 4'000'000 + tokens * 16'000, tokens * 4'096};
}
double Truth(int64_t tokens) { return 50'000 + 800 * std::pow(static_cast<double>(tokens), 1.2); }
constexpr int64_t kShapes[] = {16, 64, 128, 256, 700, 1'024};

class OpRobustTest : public ::testing::Test {
 protected:
  void Learn(int runs, double factor = 1) {
    for (int run = 0; run < runs; ++run) {
      for (const int64_t tokens : kShapes) Run(tokens, factor);
    }
  }
  void Run(int64_t tokens, double factor) {
    estimator_.Observe(Shape(tokens),
                       static_cast<DurationNs>(Truth(tokens) * factor * noise_(random_)));
  }
  double Predict(int64_t tokens) const {
    return static_cast<double>(estimator_.Predict(Shape(tokens)).duration);
  }
  double Error(int64_t tokens, double factor = 1) const {
    return std::abs(Predict(tokens) / (factor * Truth(tokens)) - 1);
  }
  OpEstimator estimator_{2e12, 8e11};
  std::mt19937_64 random_{11};
  std::normal_distribution<double> noise_{1, 0.01};
};

// Bound: 5 %, on the shape itself and on every shape between and past the others.
TEST_F(OpRobustTest, Edge_ALoneOutlierMovesNoPredictionByMoreThanFivePercent) {
  Learn(10);
  for (const double factor : {500.0, 0.002}) {
    for (const int64_t tokens : kShapes) {
      std::vector<double> before;
      for (int64_t t = 8; t < 1'100; t += 4) before.push_back(Predict(t));
      Run(tokens, factor);
      for (size_t i = 0; i < before.size(); ++i) {
        const auto t = static_cast<int64_t>(8 + 4 * i);
        EXPECT_NEAR(Predict(t) / before[i], 1, 0.05) << t << " after " << tokens;
      }
      Learn(10);
    }
  }
}

// Bound: 5 % at any time, once warm.
TEST_F(OpRobustTest, Edge_OnePercentOfOutliersMovesNoPredictionByMoreThanFivePercent) {
  Learn(10);
  std::bernoulli_distribution outlier(0.01);
  std::uniform_real_distribution<double> exponent(-3, 3);
  for (int i = 0; i < 3'000; ++i) {
    for (const int64_t tokens : kShapes)
      Run(tokens, outlier(random_) ? std::pow(10, exponent(random_)) : 1);
    for (const int64_t tokens : kShapes) ASSERT_LE(Error(tokens), 0.05) << tokens << " at " << i;
  }
}

// Bound: within 5 % after 20 samples of a shape.
TEST_F(OpRobustTest, Edge_ASlowerClockIsFollowedWithinTwentySamples) {
  for (const double factor : {1 / 0.7, 1.0, 1.3, 0.7, 3.0, 0.1}) {
    Learn(20, factor);
    for (const int64_t tokens : kShapes) EXPECT_LE(Error(tokens, factor), 0.05) << factor;
  }
}

// Bound: 10 % behind a drift of half a percent per sample.
TEST_F(OpRobustTest, Edge_ASlowDriftIsFollowed) {
  Learn(20);
  double factor = 1;
  for (int i = 0; i < 400; ++i) {
    factor *= i < 200 ? 1.005 : 1 / 1.005;
    Learn(1, factor);
    for (const int64_t tokens : kShapes) ASSERT_LE(Error(tokens, factor), 0.1) << i;
  }
}

// Bound: none at all. Equal time stamps make a duration of 0, a clock set back a negative one.
TEST_F(OpRobustTest, Edge_ZeroAndNegativeDurationsChangeNothing) {
  Learn(10);
  std::vector<double> before;
  for (int64_t t = 8; t < 1'100; t += 4) before.push_back(Predict(t));
  for (const DurationNs bad :
       {DurationNs{0}, DurationNs{-1}, -86'400 * kSecond, std::numeric_limits<DurationNs>::min()}) {
    for (const int64_t tokens : {int64_t{16}, int64_t{333}}) estimator_.Observe(Shape(tokens), bad);
  }
  for (size_t i = 0; i < before.size(); ++i)
    EXPECT_EQ(Predict(static_cast<int64_t>(8 + 4 * i)), before[i]);
}

TEST_F(OpRobustTest, Edge_ActivitiesThatAreNoneChangeNothing) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double activity : {nan, -1.0, -HUGE_VAL})
    estimator_.Observe(Shape(16), 1'000'000, activity);
  EXPECT_LT(estimator_.Predict(Shape(16)).activity, 0);
  estimator_.Observe(Shape(16), 1'000'000, HUGE_VAL);
  EXPECT_EQ(estimator_.Predict(Shape(16)).activity, 1.0f);
}

// Bound: 10 % for the shapes around it once its neighbours have run. It never runs again itself.
TEST_F(OpRobustTest, Edge_AShapeWhoseOnlyRunWasAnOutlierIsForgotten) {
  for (const double factor : {500.0, 0.002}) {
    estimator_ = OpEstimator(2e12, 8e11);
    Run(64, 1);
    Run(600, factor);
    Learn(3);
    for (int64_t tokens = 96; tokens <= 1'024; tokens += 64) Run(tokens, 1);
    for (const int64_t tokens : {500, 580, 620, 700}) EXPECT_LE(Error(tokens), 0.1) << tokens;
  }
}

// Shapes outlive their signature: their own means still answer, before and after they run again.
TEST_F(OpRobustTest, Regression_AShapeWhoseSignatureWasDroppedAnswersWithItsMean) {
  estimator_ = OpEstimator(2e12, 8e11, {.shapes = 65'536, .signatures = 64, .knots = 512});
  std::uniform_real_distribution<double> wild(0.3, 1.7);
  const auto truth = [](int64_t tokens) { return 10 * Truth(tokens); };  // far from the prior
  for (int run = 0; run < 100; ++run) {
    for (int64_t tokens = 16; tokens <= 1'024; tokens += 16) {
      const double noise = tokens == 512 ? wild(random_) : noise_(random_);
      estimator_.Observe(Shape(tokens), static_cast<DurationNs>(truth(tokens) * noise));
    }
  }
  ASSERT_EQ(estimator_.Predict(Shape(512)).level, Prediction::Level::kTable);
  for (uint64_t signature = 100; signature < 300; ++signature)
    estimator_.Observe({signature, 0, 1'000, 1'000, 1'000}, 50'000);
  EXPECT_LT(std::abs(Predict(512) / truth(512) - 1), 0.3) << "signature dropped";
  estimator_.Observe(Shape(16), static_cast<DurationNs>(truth(16)));
  EXPECT_LT(std::abs(Predict(512) / truth(512) - 1), 0.3) << "another shape brought it back";
  estimator_.Observe(Shape(512), static_cast<DurationNs>(truth(512)));
  EXPECT_LT(std::abs(Predict(512) / truth(512) - 1), 0.3) << "it ran again";
}

// Shapes of equal cost share a knot; the size of each counts for where steps can be.
TEST_F(OpRobustTest, Regression_SizesOfShapesOfEqualCostStayWholeNumbersOfUnits) {
  const auto shape = [](int64_t cost, int64_t size) {
    return OpFeatures{7, 0, cost * 1'000'000, 0, size};
  };
  for (int run = 0; run < 10; ++run) {
    estimator_.Observe(shape(1, 16), 100'000);
    estimator_.Observe(shape(3, 32), 300'000);
  }
  for (int run = 0; run < 10; ++run) {  // the same costs, sizes that are no multiples of 16
    estimator_.Observe(shape(1, 24), 100'000);
    estimator_.Observe(shape(3, 30), 300'000);
  }
  const DurationNs between = estimator_.Predict(shape(2, 27)).duration;
  EXPECT_GE(between, 95'000);
  EXPECT_LE(between, 305'000);
}

// Bound: after anything, 30 good samples of a shape bring its prediction within 5 %.
TEST_F(OpRobustTest, Edge_NoStateHoldsAgainstGoodSamples) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    random_.seed(seed);
    estimator_ = OpEstimator(2e12, 8e11, {.shapes = 1'024, .signatures = 8, .knots = 32});
    std::uniform_int_distribution<int> bits(0, 62), what(0, 9), tokens(1, 1'100);
    const int length = 100 + static_cast<int>(seed) * 40;
    DurationNs last = 1;
    for (int i = 0; i < length; ++i) {
      // Runs of one value, values of any size, features of any size.
      if (what(random_) < 4) last = DurationNs{1} << bits(random_);
      OpFeatures features = Shape(seed % 2 == 0 ? kShapes[i % 6] : tokens(random_));
      if (what(random_) == 0) features.flops = int64_t{1} << bits(random_);
      if (what(random_) == 0) features.bytes = -(int64_t{1} << bits(random_));
      if (what(random_) == 0) features.size = int64_t{1} << bits(random_);
      estimator_.Observe(features, what(random_) == 0 ? -last : last);
      const Prediction prediction = estimator_.Predict(Shape(tokens(random_)));
      ASSERT_GT(prediction.duration, 0);
      ASSERT_GE(prediction.spread, 0);
      ASSERT_LE(prediction.duration, 3'600 * kSecond);
    }
    Learn(30);
    for (const int64_t t : kShapes) ASSERT_LE(Error(t), 0.05) << t << ", seed " << seed;
  }
}

}  // namespace
}  // namespace slice::estimate
