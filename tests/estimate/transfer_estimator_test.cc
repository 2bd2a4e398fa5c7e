#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "daemon/estimate/estimator.h"

namespace slice::estimate {
namespace {

constexpr int64_t kKiB = 1024;
// 15 us and 1 GB/s below the split, 40 us more and 10 GB/s above.
double Truth(int64_t bytes) {
  const auto size = static_cast<double>(bytes);
  return bytes <= TransferEstimator::kSplitBytes ? 15'000 + size : 260'000 + size * 0.1;
}
double Error(DurationNs predicted, double truth) {
  return std::abs(static_cast<double>(predicted) / truth - 1);
}

class TransferEstimatorTest : public ::testing::Test {
 protected:
  void Feed(int64_t bytes, double duration, int count, double cov = 0.015) {
    std::normal_distribution<double> noise(1, cov);
    for (int i = 0; i < count; ++i) {
      estimator_.Observe(0, 1, bytes,
                         static_cast<DurationNs>(duration * std::max(0.2, noise(rng_))));
    }
  }
  void FeedAll(int rounds, double factor = 1) {
    for (int i = 0; i < rounds; ++i) {
      for (const int64_t bytes :
           {4 * kKiB, 64 * kKiB, 200 * kKiB, 512 * kKiB, 4 * kMiB, 64 * kMiB}) {
        Feed(bytes, factor * Truth(bytes), 1);
      }
    }
  }
  TransferEstimator estimator_{3};
  std::mt19937_64 rng_{1};
};

TEST_F(TransferEstimatorTest, Happy_BothSegmentsAreLearned) {
  FeedAll(20);
  for (const int64_t bytes : {1 * kKiB, 32 * kKiB, 128 * kKiB, 1 * kMiB, 16 * kMiB, 200 * kMiB}) {
    EXPECT_LT(Error(estimator_.Predict(0, 1, bytes), Truth(bytes)), 0.05) << bytes;
  }
}

TEST_F(TransferEstimatorTest, Happy_FirstSamplesCount) {
  Feed(8 * kMiB, 3e6, 2);
  EXPECT_LT(Error(estimator_.Predict(0, 1, 8 * kMiB), 3e6), 0.05);
}

TEST_F(TransferEstimatorTest, Happy_OrderedPairsLearnApart) {
  const DurationNs back = estimator_.Predict(1, 0, kMiB);
  FeedAll(10);
  EXPECT_EQ(estimator_.Predict(1, 0, kMiB), back);
  EXPECT_EQ(estimator_.Predict(1, 1, kMiB), 0);
}

TEST_F(TransferEstimatorTest, Edge_OneSizeOnlyIsLearnedToo) {
  Feed(2 * kMiB, 5e5, 50);
  EXPECT_LT(Error(estimator_.Predict(0, 1, 2 * kMiB), 5e5), 0.03);
  EXPECT_GT(estimator_.Predict(0, 1, 64 * kMiB), 1'000'000);
  EXPECT_LE(estimator_.Predict(0, 1, 1), 500'000);
}

TEST_F(TransferEstimatorTest, Edge_BetweenTwoMeasuredSizesThePredictionLiesBetweenTheirs) {
  Feed(200 * kKiB, 9e5, 20, 0);
  Feed(512 * kKiB, 3e5, 20, 0);
  for (int64_t bytes = 200 * kKiB; bytes <= 512 * kKiB; bytes += kKiB) {
    ASSERT_LE(estimator_.Predict(0, 1, bytes), 930'000) << bytes;
    ASSERT_GE(estimator_.Predict(0, 1, bytes), 280'000) << bytes;
  }
}

// Bound: 5 % once warm.
TEST_F(TransferEstimatorTest, Edge_OneOutlierMovesThePredictionByFivePercentAtMost) {
  for (const double outlier : {1.0, 0.5, 3.0, 1e4}) {
    estimator_ = TransferEstimator(3);
    FeedAll(10);
    for (const int64_t bytes : {64 * kKiB, 4 * kMiB}) {
      const auto before = static_cast<double>(estimator_.Predict(0, 1, bytes));
      Feed(bytes, Truth(bytes) * outlier, 1);
      EXPECT_LE(Error(estimator_.Predict(0, 1, bytes), before), 0.05) << outlier << " at " << bytes;
    }
  }
}

// Bound: within 10 % after 20 samples of the segment.
TEST_F(TransferEstimatorTest, Edge_StepChangeIsFollowed) {
  for (const double factor : {0.25, 0.6, 1.5, 8.0}) {
    estimator_ = TransferEstimator(3);
    FeedAll(50);
    FeedAll(7, factor);
    for (const int64_t bytes : {64 * kKiB, 4 * kMiB, 64 * kMiB}) {
      EXPECT_LT(Error(estimator_.Predict(0, 1, bytes), factor * Truth(bytes)), 0.1)
          << factor << " at " << bytes;
    }
  }
}

// Bound: a factor of 8 for sizes not seen meanwhile, and 10 % after 20 samples of them.
TEST_F(TransferEstimatorTest, Edge_ASizeThatJumpsAndCreepsBackLeavesTheOthersAlone) {
  const double small = Truth(4 * kKiB), large = Truth(4 * kMiB);
  Feed(4 * kKiB, small, 20);
  for (int cycle = 0; cycle < 1'000; ++cycle) {
    Feed(4 * kMiB, 3 * large, 6, 0);
    for (double ns = 3 * large; ns > large; ns *= 0.985) Feed(4 * kMiB, ns, 1, 0);
    ASSERT_LE(Error(estimator_.Predict(0, 1, 4 * kKiB), small), 7.5) << cycle;
    ASSERT_GE(static_cast<double>(estimator_.Predict(0, 1, 4 * kKiB)), small / 8.5) << cycle;
  }
  Feed(4 * kKiB, small, 20);
  EXPECT_LT(Error(estimator_.Predict(0, 1, 4 * kKiB), small), 0.1);
  Feed(4 * kMiB, large, 20);
  EXPECT_LT(Error(estimator_.Predict(0, 1, 4 * kMiB), large), 0.1);
}

TEST_F(TransferEstimatorTest, Edge_BadSamplesAndDomainsAreHarmless) {
  const DurationNs before = estimator_.Predict(0, 1, kMiB);
  estimator_.Observe(0, 1, kMiB, 0);
  estimator_.Observe(0, 1, kMiB, -1);
  estimator_.Observe(0, 1, -1, 1000);
  estimator_.Observe(0, 9, kMiB, 1000);
  estimator_.Observe(9, 0, kMiB, 1000);
  estimator_.Observe(1, 1, kMiB, 1000);
  EXPECT_EQ(estimator_.Predict(0, 1, kMiB), before);
  EXPECT_EQ(estimator_.Predict(7, 9, kMiB), before);
  EXPECT_GT(estimator_.Predict(0, 1, std::numeric_limits<int64_t>::max()), 0);
  EXPECT_GT(estimator_.Predict(0, 1, -5), 0);
}

TEST_F(TransferEstimatorTest, Edge_AnySamplesLeaveAPositivePrediction) {
  std::uniform_int_distribution<int64_t> any(1, int64_t{1} << 40);
  for (int i = 0; i < 3'000; ++i) {
    estimator_.Observe(0, 1, any(rng_) % (64 * kMiB), any(rng_) >> (any(rng_) % 40));
    for (const int64_t bytes : {int64_t{0}, kKiB, kMiB, 100 * kMiB})
      ASSERT_GT(estimator_.Predict(0, 1, bytes), 0);
  }
  FeedAll(40);
  EXPECT_LT(Error(estimator_.Predict(0, 1, 4 * kMiB), Truth(4 * kMiB)), 0.1);
}

TEST_F(TransferEstimatorTest, Happy_SavedLinksTeachANewEstimator) {
  FeedAll(20);
  TransferEstimator other(3);
  EXPECT_GT(other.Import(estimator_.Export()), 0u);
  for (const int64_t bytes : {8 * kKiB, 128 * kKiB, 1 * kMiB, 64 * kMiB})
    EXPECT_LT(Error(other.Predict(0, 1, bytes), Truth(bytes)), 0.1) << bytes;
  EXPECT_EQ(other.Predict(1, 0, kMiB), TransferEstimator(3).Predict(1, 0, kMiB));
}

TEST_F(TransferEstimatorTest, Malicious_SavedNonsenseIsLeftOut) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<SavedLink> saved = {
      {0, 1, {{kMiB, nan}, {kMiB, -1}, {kMiB, 0}, {kMiB, HUGE_VAL}, {-1, 1e6}}},
      {0, 9, {{kMiB, 1e6}}},
      {9, 0, {{kMiB, 1e6}}},
      {1, 1, {{kMiB, 1e6}}}};
  EXPECT_EQ(estimator_.Import(saved), 0u);
  EXPECT_TRUE(estimator_.Report().empty());
}

}  // namespace
}  // namespace slice::estimate
