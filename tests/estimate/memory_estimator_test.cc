#include "daemon/estimate/memory_estimator.h"

#include <gtest/gtest.h>

#include <limits>

#include "common/units.h"

namespace slice::estimate {
namespace {

TEST(MemoryEstimator, Happy_UnknownSignaturesNeedWhatTheyDeclare) {
  const MemoryEstimator memory;
  EXPECT_EQ(memory.Predict(1, 0).samples, 0u);
  EXPECT_EQ(memory.Predict(1, 0).BytesFor(kMiB), kMiB);
}

TEST(MemoryEstimator, Happy_MarginCoversWhatRunsTook) {
  MemoryEstimator memory;
  for (int i = 0; i < 200; ++i) memory.Observe(1, 0, kMiB, kMiB + i % 10 * kMiB / 20);
  EXPECT_NEAR(memory.Predict(1, 0).ratio, 1.45, 1e-6);
  EXPECT_NEAR(static_cast<double>(memory.Predict(1, 0).BytesFor(10 * kMiB)), 14.5 * kMiB, 64);
  EXPECT_EQ(memory.Predict(1, 1).samples, 0u) << "device kinds learn apart";
  EXPECT_EQ(memory.Predict(2, 0).samples, 0u);
}

TEST(MemoryEstimator, Edge_NeverBelowWhatIsDeclared) {
  MemoryEstimator memory;
  for (int i = 0; i < 100; ++i) memory.Observe(1, 0, kMiB, kMiB / 4);
  EXPECT_EQ(memory.Predict(1, 0).ratio, 1.0);
  for (const int64_t declared : {int64_t{0}, int64_t{1}, int64_t{4097}, int64_t{1} << 40})
    EXPECT_EQ(memory.Predict(1, 0).BytesFor(declared), declared);
}

// Bound: none at all.
TEST(MemoryEstimator, Edge_OneOutlierChangesNothing) {
  MemoryEstimator memory;
  for (int i = 0; i < 100; ++i) memory.Observe(1, 0, kMiB, kMiB * 5 / 4);
  memory.Observe(1, 0, kMiB, 500 * kMiB);
  EXPECT_NEAR(memory.Predict(1, 0).ratio, 1.25, 1e-6);
}

// Bound: a rise counts from the second run on, a fall after two windows.
TEST(MemoryEstimator, Edge_StepChangesAreFollowed) {
  MemoryEstimator memory;
  for (int i = 0; i < 100; ++i) memory.Observe(1, 0, kMiB, kMiB * 5 / 4);
  for (int i = 0; i < 2; ++i) memory.Observe(1, 0, kMiB, 3 * kMiB);
  EXPECT_NEAR(memory.Predict(1, 0).ratio, 3, 1e-6);
  for (uint32_t i = 0; i < 2 * MemoryEstimator::kWindow; ++i)
    memory.Observe(1, 0, kMiB, kMiB * 5 / 4);
  EXPECT_NEAR(memory.Predict(1, 0).ratio, 1.25, 1e-6);
}

TEST(MemoryEstimator, Edge_BadNumbersAreHarmlessAndSignaturesBounded) {
  MemoryEstimator memory;
  memory.Observe(1, 0, 0, kMiB);
  memory.Observe(1, 0, -1, kMiB);
  memory.Observe(1, 0, kMiB, -1);
  EXPECT_EQ(memory.Predict(1, 0).samples, 0u);
  for (int i = 0; i < 3; ++i) memory.Observe(1, 0, 1, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(memory.Predict(1, 0).ratio, MemoryEstimator::kRatioMax);
  EXPECT_GT(memory.Predict(1, 0).BytesFor(std::numeric_limits<int64_t>::max()), 0);
  for (uint64_t s = 0; s < MemoryEstimator::kSignaturesMax + 100; ++s)
    memory.Observe(s, 0, kMiB, kMiB);
  EXPECT_EQ(memory.signature_count(), MemoryEstimator::kSignaturesMax);
}

}  // namespace
}  // namespace slice::estimate
