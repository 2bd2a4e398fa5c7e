// Which level answers, and how well tables read steps and ramps.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "daemon/estimate/op_estimator.h"

namespace slice::estimate {
namespace {

using Level = Prediction::Level;

OpFeatures Shape(int64_t tokens) {
  return {7, 0, tokens * 2'000'000, 4'000'000 + tokens * 16'000, tokens * 14'336};
}
double Error(const Prediction& prediction, double truth) {
  return std::abs(static_cast<double>(prediction.duration) / truth - 1);
}

class OpLevelsTest : public ::testing::Test {
 protected:
  template <typename Truth>
  void Learn(const std::vector<int64_t>& tokens, Truth truth, int runs, double cov = 0.01) {
    std::normal_distribution<double> noise(1, cov);
    for (int run = 0; run < runs; ++run) {
      for (const int64_t t : tokens)
        estimator_.Observe(Shape(t), static_cast<DurationNs>(truth(t) * noise(random_)));
    }
  }
  static std::vector<int64_t> Every(int64_t step, int64_t first, int64_t last) {
    std::vector<int64_t> tokens;
    for (int64_t t = first; t <= last; t += step) tokens.push_back(t);
    return tokens;
  }
  template <typename Truth>
  double MeanError(const std::vector<int64_t>& tokens, Truth truth) const {
    double sum = 0;
    for (const int64_t t : tokens) sum += Error(estimator_.Predict(Shape(t)), truth(t));
    return sum / static_cast<double>(tokens.size());
  }
  OpEstimator estimator_{2e12, 8e11};
  std::mt19937_64 random_{5};
};

// A curve that no line follows: the table must answer, and well.
double Bent(int64_t tokens) { return 20'000 + 900 * std::pow(static_cast<double>(tokens), 1.4); }
// Tiles of 128 tokens: level, then a jump just after the round size.
double Tiled(int64_t tokens) {
  return 40'000 + 30'000 * std::ceil(static_cast<double>(tokens) / 128);
}

TEST_F(OpLevelsTest, Happy_TheTableFollowsACurveThatNoLineDoes) {
  Learn(Every(64, 64, 4096), Bent, 6);
  const std::vector<int64_t> unseen = Every(64, 96, 4000);
  for (const int64_t t : unseen) EXPECT_EQ(estimator_.Predict(Shape(t)).level, Level::kTable) << t;
  EXPECT_LT(MeanError(unseen, Bent), 0.02);
  const OpEstimator::SignatureReport report = estimator_.Report(1)[0];
  EXPECT_LT(report.table_error, report.linear_error);
}

TEST_F(OpLevelsTest, Happy_StepsAreReadAsSteps) {
  Learn(Every(16, 16, 1024), Tiled, 6);
  EXPECT_LT(MeanError(Every(16, 24, 1000), Tiled), 0.02);
}

// Two sizes whose weights the data sheet has wrong: shapes of one cost differ sixfold.
TEST_F(OpLevelsTest, Happy_TheLinearFitAnswersWhereTheTableDoesWorse) {
  const auto shape = [](int64_t tokens, int64_t context) {
    return OpFeatures{7, 0, tokens * 2'000'000, context * 800'000, tokens};
  };
  const auto truth = [](int64_t tokens, int64_t context) {
    return 10'000.0 + 500.0 * static_cast<double>(tokens) + 3'000.0 * static_cast<double>(context);
  };
  std::uniform_int_distribution<int64_t> any(1, 2'000);
  for (int i = 0; i < 400; ++i) {
    const int64_t tokens = any(random_), context = any(random_);
    estimator_.Observe(shape(tokens, context), static_cast<DurationNs>(truth(tokens, context)));
  }
  int linear = 0;
  double error = 0;
  for (int i = 0; i < 100; ++i) {
    const int64_t tokens = any(random_), context = any(random_);
    const Prediction prediction = estimator_.Predict(shape(tokens, context));
    linear += prediction.level == Level::kLinear;
    error += Error(prediction, truth(tokens, context)) / 100;
  }
  EXPECT_GE(linear, 95);
  EXPECT_LT(error, 0.05);
}

// One run of a shape says less than neighbours that have been right all along.
TEST_F(OpLevelsTest, Happy_NeighboursOutweighAFirstRun) {
  Learn(Every(64, 64, 4096), Bent, 6);
  const OpFeatures shape = Shape(1'000);
  estimator_.Observe(shape, static_cast<DurationNs>(Bent(1'000) * 500));  // a cold first run
  EXPECT_EQ(estimator_.Predict(shape).level, Level::kTable);
  EXPECT_LT(Error(estimator_.Predict(shape), Bent(1'000)), 0.05);
  EXPECT_LT(Error(estimator_.Predict(Shape(990)), Bent(990)), 0.06)
      << "nor does it spoil the table";
  for (int i = 0; i < 24; ++i) estimator_.Observe(shape, static_cast<DurationNs>(Bent(1'000)));
  EXPECT_EQ(estimator_.Predict(shape).level, Level::kExact);
}

// ...and two that agree count, whatever the neighbours say.
TEST_F(OpLevelsTest, Happy_AgreeingRunsOutweighTheNeighbours) {
  Learn(Every(64, 64, 4096), Bent, 6);
  const double truth = Bent(1'000) * 2;  // an unlucky shape
  for (int i = 0; i < 3; ++i) estimator_.Observe(Shape(1'000), static_cast<DurationNs>(truth));
  EXPECT_LT(Error(estimator_.Predict(Shape(1'000)), truth), 0.05);
}

TEST_F(OpLevelsTest, Happy_EachLevelCanBeAsked) {
  Prediction prediction;
  EXPECT_TRUE(estimator_.PredictWith(Level::kPrior, Shape(64), &prediction));
  for (const Level level : {Level::kLinear, Level::kTable, Level::kExact})
    EXPECT_FALSE(estimator_.PredictWith(level, Shape(64), &prediction)) << LevelName(level);
  Learn(Every(64, 64, 4096), Bent, 6);
  for (const Level level : {Level::kPrior, Level::kLinear, Level::kTable, Level::kExact}) {
    ASSERT_TRUE(estimator_.PredictWith(level, Shape(64), &prediction)) << LevelName(level);
    EXPECT_EQ(prediction.level, level);
    EXPECT_GT(prediction.duration, 0);
    EXPECT_GT(prediction.spread, 0);
  }
}

TEST_F(OpLevelsTest, Edge_FarPastTheTableThePredictionGoesOnSensibly) {
  const auto truth = [](int64_t tokens) { return 30'000 + 1'000 * static_cast<double>(tokens); };
  Learn(Every(64, 256, 2048), truth, 6);
  for (const int64_t tokens : {16, 128, 3'000, 20'000})
    EXPECT_LT(Error(estimator_.Predict(Shape(tokens)), truth(tokens)), 0.15) << tokens;
}

TEST_F(OpLevelsTest, Edge_KnotsGatherWhereTheCurveBends) {
  estimator_ = OpEstimator(2e12, 8e11, {.shapes = 65'536, .signatures = 16, .knots = 48});
  const auto truth = [](int64_t tokens) {  // straight from 2,048 on
    return tokens < 2'048 ? Tiled(tokens)
                          : Tiled(2'048) + 200 * static_cast<double>(tokens - 2'048);
  };
  Learn(Every(32, 32, 16'384), truth, 6, 0.002);
  EXPECT_EQ(estimator_.Report(1)[0].shapes, 48u);
  double error = 0;
  Prediction prediction;
  const std::vector<int64_t> all = Every(32, 32, 16'384);
  for (const int64_t t : all) {
    ASSERT_TRUE(estimator_.PredictWith(Level::kTable, Shape(t), &prediction));
    error += Error(prediction, truth(t)) / static_cast<double>(all.size());
  }
  EXPECT_LT(error, 0.02);
}

TEST_F(OpLevelsTest, Happy_SavedKnotsTeachANewEstimator) {
  Learn(Every(64, 64, 4096), Bent, 20);
  OpEstimator other(2e12, 8e11);
  EXPECT_EQ(other.Import(estimator_.Export(1'000)), 64u);
  EXPECT_EQ(other.Predict(Shape(128)).level, Level::kExact);
  EXPECT_LT(Error(other.Predict(Shape(128)), Bent(128)), 0.03);
  EXPECT_EQ(other.Predict(Shape(96)).level, Level::kTable);
  EXPECT_LT(Error(other.Predict(Shape(96)), Bent(96)), 0.05);
  for (int i = 0; i < 20; ++i) other.Observe(Shape(128), static_cast<DurationNs>(3 * Bent(128)));
  EXPECT_LT(Error(other.Predict(Shape(128)), 3 * Bent(128)), 0.05) << "what is measured now counts";
}

TEST_F(OpLevelsTest, Malicious_SavedNonsenseIsLeftOut) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = HUGE_VAL;
  std::vector<SavedSignature> saved(1);
  for (const double ns : {nan, inf, -inf, 0.0, -1.0, 1e300})
    saved[0].shapes.push_back({1'000, 1'000, 1'000, ns, 1, 5});
  saved[0].shapes.push_back({-1, 1'000, 1'000, 1e6, 1, 5});
  saved[0].shapes.push_back({1'000, 1'000, -1, 1e6, 1, 5});
  saved[0].shapes.push_back({1'000, 1'000, 1'000, 1e6, nan, 5});
  saved[0].shapes.push_back({1'000, 1'000, 1'000, 1e6, 1, 0});
  EXPECT_EQ(estimator_.Import(saved), 0u);
  EXPECT_EQ(estimator_.signature_count(), 0u);
  saved[0].shapes.assign(100'000, {1'000, 1'000, 1'000, 1e6, 1, 5});
  EXPECT_LE(estimator_.Import(saved), OpEstimator::Limits{}.knots);
  saved[0].shapes = {{1'000, 1'000, 1'000, 2e6, inf, 5}};
  EXPECT_EQ(estimator_.Import(saved), 1u);
  EXPECT_GT(estimator_.Predict({0, 0, 1'000, 1'000, 1'000}).duration, 0);
}

TEST_F(OpLevelsTest, Edge_ExportKeepsTheSignaturesUsedLast) {
  for (uint64_t signature = 0; signature < 10; ++signature) {
    for (int64_t i = 1; i <= 10; ++i) estimator_.Observe({signature, 0, i, i, i}, 1'000'000);
  }
  const std::vector<SavedSignature> saved = estimator_.Export(35);
  ASSERT_EQ(saved.size(), 3u);
  EXPECT_EQ(saved[0].signature, 9u);
  EXPECT_EQ(saved[2].signature, 7u);
}

}  // namespace
}  // namespace slice::estimate
