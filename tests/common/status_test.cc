#include "common/status.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "common/checked.h"

namespace slice {
namespace {

Result<int> Half(int value) {
  if (value % 2 != 0) return Error(StatusCode::kInvalid, "%d is odd", value);
  return value / 2;
}

Status Quarter(int value, int* out) {
  SLICE_ASSIGN_OR_RETURN(const int half, Half(value));
  SLICE_ASSIGN_OR_RETURN(*out, Half(half));
  return Status::Ok();
}

TEST(Happy_Status, AssignOrReturn_PassesValuesThrough) {
  int out = 0;
  ASSERT_TRUE(Quarter(12, &out).ok());
  EXPECT_EQ(out, 3);
}

TEST(Edge_Status, AssignOrReturn_StopsAtTheFirstError) {
  int out = -1;
  const Status status = Quarter(6, &out);
  EXPECT_EQ(status.code(), StatusCode::kInvalid);
  EXPECT_EQ(status.ToString(), "INVALID: 3 is odd");
  EXPECT_EQ(out, -1);
}

TEST(Edge_Status, ErrnoError_AppendsTheSystemsText) {
  EXPECT_EQ(ErrnoError(StatusCode::kNoMemory, ENOMEM, "map %d", 7).text(),
            std::string("map 7: ") + std::strerror(ENOMEM));
}

TEST(Happy_Result, MoveOnlyValue_CanBeTaken) {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(5);
  std::unique_ptr<int> taken = std::move(result).value();
  EXPECT_EQ(*taken, 5);
}

TEST(Edge_Result, ValueOfAnError_AbortsWithItsText) {
  EXPECT_DEATH((void)Half(1).value(), "1 is odd");
}

TEST(Edge_Checked, RangeFits_RefusesOverflowAndEnds) {
  EXPECT_TRUE(RangeFits(0, 10, 10));
  EXPECT_TRUE(RangeFits(10, 0, 10));
  EXPECT_FALSE(RangeFits(1, 10, 10));
  EXPECT_FALSE(RangeFits(11, 0, 10));
  EXPECT_FALSE(RangeFits(UINT64_MAX, 2, 10));
  EXPECT_FALSE(RangeFits(2, UINT64_MAX, 10));
}

TEST(Edge_Checked, Multiply_ReportsOverflow) {
  int64_t out = 0;
  EXPECT_TRUE(CheckedMul(int64_t{1} << 31, int64_t{1} << 31, &out));
  EXPECT_FALSE(CheckedMul(int64_t{1} << 32, int64_t{1} << 32, &out));
  EXPECT_FALSE(CheckedAdd(INT64_MAX, 1, &out));
  EXPECT_FALSE(CheckedSub(INT64_MIN, 1, &out));
}

}  // namespace
}  // namespace slice
