#include "daemon/estimate/contention_estimator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

namespace slice::estimate {
namespace {

using Class = ContentionEstimator::Class;

OpFeatures Op(int64_t tokens) { return {1, 0, tokens * 2'000'000, tokens * 2'000'000, tokens}; }

// A host on which an op takes `truth(tokens, activity)` ns, with 2 % noise.
class Host {
 public:
  explicit Host(std::function<double(int64_t, double)> truth) : truth_(std::move(truth)) {}

  // One run as the engine sees it. Returns |predicted / actual - 1|, with contention.
  double Run(int64_t tokens, double activity) {
    const OpFeatures op = Op(tokens);
    const double actual = truth_(tokens, activity) * std::max(0.5, noise_(random));
    const auto duration = static_cast<DurationNs>(actual);
    const double predicted = Predict(tokens, activity);
    contention.Learn(&ops, op, activity, duration);
    return std::abs(predicted / actual - 1);
  }
  double Predict(int64_t tokens, double activity) const {
    const Prediction prediction = ops.Predict(Op(tokens));
    return static_cast<double>(prediction.duration) *
           contention.Slowdown(Op(tokens), prediction, activity);
  }
  // Phases of other devices' load, each of some ten ops.
  void RunPhases(int count) {
    std::uniform_real_distribution<double> any(0, 1);
    for (int phase = 0; phase < count; ++phase) {
      const double activity = any(random);
      for (int i = 0; i < 12; ++i) Run(64 << i % 3, activity);
    }
  }

  OpEstimator ops{2e10, 8e9};
  ContentionEstimator contention;
  std::mt19937_64 random{3};

 private:
  std::function<double(int64_t, double)> truth_;
  std::normal_distribution<double> noise_{1, 0.02};
};

// Bound: 5 points.
TEST(ContentionEstimator, Happy_TwentyPercentUnderLoadAreRecovered) {
  for (const double slowdown : {0.2, 0.5}) {
    Host host([=](int64_t tokens, double activity) {
      return 50'000.0 * static_cast<double>(tokens) * (1 + slowdown * activity);
    });
    host.RunPhases(300);
    for (const int64_t tokens : {64, 128, 256})
      EXPECT_NEAR(host.Predict(tokens, 1) / host.Predict(tokens, 0), 1 + slowdown, 0.05) << tokens;
    ASSERT_EQ(host.contention.Reports().size(), 1u);
    const ContentionEstimator::Report report = host.contention.Reports()[0];
    EXPECT_TRUE(report.on);
    EXPECT_EQ(report.op_class, Class::kMemory);
    EXPECT_LT(report.error_with, report.error_without);
    double error = 0;
    for (int i = 0; i < 200; ++i) error += host.Run(128, i % 2) / 200;
    EXPECT_LT(error, 0.05);
  }
}

TEST(ContentionEstimator, Happy_OffWhereLoadDoesNotMatter) {
  Host host([](int64_t tokens, double) { return 50'000.0 * static_cast<double>(tokens); });
  host.RunPhases(300);
  ASSERT_EQ(host.contention.Reports().size(), 1u);
  EXPECT_FALSE(host.contention.Reports()[0].on);
  EXPECT_EQ(host.Predict(64, 1), host.Predict(64, 0));
}

TEST(ContentionEstimator, Edge_LoadThatStopsMatteringIsUnlearned) {
  bool shared = true;
  Host host([&](int64_t tokens, double activity) {
    return 50'000.0 * static_cast<double>(tokens) * (1 + (shared ? 0.3 : 0.0) * activity);
  });
  host.RunPhases(200);
  EXPECT_GT(host.Predict(64, 1) / host.Predict(64, 0), 1.2);
  shared = false;
  host.RunPhases(300);
  EXPECT_NEAR(host.Predict(64, 1) / host.Predict(64, 0), 1, 0.02);
}

// Bound: a run 500 times as long moves no prediction by more than 5 %.
TEST(ContentionEstimator, Edge_OneOutlierMovesLittle) {
  double factor = 1;
  Host host([&](int64_t tokens, double activity) {
    return factor * 50'000.0 * static_cast<double>(tokens) * (1 + 0.2 * activity);
  });
  host.RunPhases(100);
  for (const double activity : {0.0, 1.0}) {
    const double before = host.Predict(64, 1);
    factor = 500;
    host.Run(64, activity);
    factor = 1;
    EXPECT_NEAR(host.Predict(64, 1) / before, 1, 0.05);
  }
}

TEST(ContentionEstimator, Edge_AfterAnythingItRecovers) {
  double factor = 1;
  Host host([&](int64_t tokens, double activity) {
    return factor * 50'000.0 * static_cast<double>(tokens) * (1 + 0.2 * activity);
  });
  std::uniform_real_distribution<double> exponent(-4, 6), any(0, 1);
  for (int i = 0; i < 3'000; ++i) {
    factor = std::pow(10, exponent(host.random));
    host.Run(64 << i % 3, any(host.random));
  }
  factor = 1;
  host.RunPhases(400);
  EXPECT_NEAR(host.Predict(64, 1) / host.Predict(64, 0), 1.2, 0.05);
}

TEST(ContentionEstimator, Edge_UnknownActivityAndBadDurationsDoNothing) {
  ContentionEstimator contention;
  const Prediction known{kMillisecond, 0, 0.5f, Prediction::Level::kExact};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  OpEstimator ops(2e10, 8e9);
  contention.Learn(&ops, Op(64), 0.5, kMillisecond);
  EXPECT_TRUE(contention.Reports().empty()) << "nothing was known before";
  contention.Learn(&ops, Op(64), -1, kMillisecond);
  contention.Learn(&ops, Op(64), nan, kMillisecond);
  contention.Learn(&ops, Op(64), 0.5, 0);
  contention.Learn(&ops, Op(64), 0.5, -5);
  EXPECT_TRUE(contention.Reports().empty());
  EXPECT_EQ(contention.Slowdown(Op(64), known, nan), 1);
  EXPECT_EQ(contention.Slowdown(Op(64), Prediction{}, 1), 1);
}

}  // namespace
}  // namespace slice::estimate
