// Silence, stuck devices and hangs, in virtual time.
#include "daemon/server/executor_watch.h"

#include <gtest/gtest.h>

namespace slice::server {
namespace {

constexpr TimeNs kNow = 1000 * kSecond;

class ExecutorWatchTest : public ::testing::Test {
 protected:
  ExecutorWatch watch{2, {.silence = 2 * kSecond, .hang = 120 * kSecond}};
};

TEST_F(ExecutorWatchTest, Happy_IdleExecutorIsNeverSilent) {
  watch.Look(100, 100, 0, kNow);
  EXPECT_EQ(watch.NextLook(kNow), kNever);
  watch.Look(100, 100, 0, kNow + 3600 * kSecond);
  EXPECT_EQ(watch.silent_since(), 0);
  EXPECT_FALSE(watch.Hang(kNow + 3600 * kSecond).has_value());
}

TEST_F(ExecutorWatchTest, Edge_CommandsThatNobodyTakesAreSilenceThenAHang) {
  watch.Look(0, 64, 0, kNow);
  EXPECT_EQ(watch.silent_since(), 0);
  EXPECT_EQ(watch.NextLook(kNow), kNow + 2 * kSecond);
  watch.Look(0, 128, 0, kNow + 2 * kSecond);  // more commands change nothing
  EXPECT_EQ(watch.silent_since(), kNow);
  EXPECT_EQ(watch.NextLook(kNow + 2 * kSecond), kNow + 120 * kSecond);
  EXPECT_FALSE(watch.Hang(kNow + 120 * kSecond - 1).has_value());
  ASSERT_TRUE(watch.Hang(kNow + 120 * kSecond).has_value());
  EXPECT_EQ(*watch.Hang(kNow + 120 * kSecond),
            "no command was taken for 120000 ms, the limit is 120000");
}

TEST_F(ExecutorWatchTest, Happy_ASignOfLifeEndsSilence) {
  watch.Look(0, 128, 0, kNow);
  watch.Look(0, 128, 0, kNow + 3 * kSecond);
  ASSERT_NE(watch.silent_since(), 0);
  watch.Look(64, 128, 0, kNow + 4 * kSecond);  // took one
  EXPECT_EQ(watch.silent_since(), 0);
  watch.Look(64, 128, 0, kNow + 7 * kSecond);
  EXPECT_EQ(watch.silent_since(), kNow + 4 * kSecond);
  watch.Reported();
  watch.Look(64, 128, 0, kNow + 8 * kSecond);
  EXPECT_EQ(watch.silent_since(), 0);
}

// A device's thread takes no commands while it runs an op that may take this long.
TEST_F(ExecutorWatchTest, Edge_CommandsBehindALongOpAreNoSilence) {
  watch.Started(1, kNow);
  watch.Look(0, 64, 0, kNow);
  watch.Look(0, 64, 0, kNow + 60 * kSecond);
  EXPECT_EQ(watch.silent_since(), 0);
  EXPECT_EQ(watch.stuck_since(1), 0);
  // Once the op is far over its prediction, nothing excuses it.
  watch.Look(0, 64, 2, kNow + 61 * kSecond);
  EXPECT_EQ(watch.stuck_since(1), kNow);
  EXPECT_EQ(watch.stuck_since(0), 0);
  watch.Look(0, 64, 2, kNow + 63 * kSecond);
  EXPECT_EQ(watch.silent_since(), kNow + 61 * kSecond);
}

TEST_F(ExecutorWatchTest, Edge_AShortOverrunIsNotStuck) {
  watch.Started(0, kNow);
  watch.Look(64, 64, 1, kNow + kSecond);
  EXPECT_EQ(watch.stuck_since(0), 0);
  EXPECT_LE(watch.NextLook(kNow + kSecond), kNow + 3 * kSecond);
  watch.Look(64, 64, 1, kNow + 2 * kSecond);
  EXPECT_EQ(watch.stuck_since(0), kNow);
  watch.Finished(0);
  watch.Look(64, 64, 0, kNow + 3 * kSecond);
  EXPECT_EQ(watch.stuck_since(0), 0);
}

TEST_F(ExecutorWatchTest, Edge_AnOpPastTheLimitIsAHang) {
  watch.Started(1, kNow);
  EXPECT_FALSE(watch.Hang(kNow + 120 * kSecond - 1).has_value());
  EXPECT_EQ(watch.Hang(kNow + 120 * kSecond).value_or(""),
            "device 1: an op has been running for 120000 ms, the limit is 120000");
  watch.Failed();
  EXPECT_FALSE(watch.Hang(kNow + 120 * kSecond).has_value());
}

TEST_F(ExecutorWatchTest, Edge_NoLimitIsNoHang) {
  ExecutorWatch patient(1, {.silence = 2 * kSecond, .hang = 0});
  patient.Started(0, kNow);
  patient.Look(0, 64, 1, kNow);
  patient.Look(0, 64, 1, kNow + 3600 * kSecond);
  EXPECT_FALSE(patient.Hang(kNow + 3600 * kSecond).has_value());
  EXPECT_EQ(patient.stuck_since(0), kNow);
}

TEST_F(ExecutorWatchTest, Malicious_DevicesThatDoNotExistAndNonsenseInTheRing) {
  watch.Started(1u << 31, kNow);
  watch.Finished(2);
  watch.Look(~uint64_t{0}, 64, ~uint64_t{0}, kNow);  // took more than there was: it does not work
  watch.Look(~uint64_t{0}, 64, ~uint64_t{0}, kNow + 2 * kSecond);
  EXPECT_EQ(watch.silent_since(), kNow);
}

TEST_F(ExecutorWatchTest, Happy_AnotherExecutorStartsWithAClearRecord) {
  watch.Started(0, kNow);
  watch.Look(0, 64, 1, kNow);
  watch.Look(0, 64, 1, kNow + 130 * kSecond);
  ASSERT_NE(watch.silent_since(), 0);
  watch.Reset();
  EXPECT_EQ(watch.silent_since(), 0);
  EXPECT_EQ(watch.stuck_since(0), 0);
  EXPECT_FALSE(watch.Hang(kNow + 200 * kSecond).has_value());
  EXPECT_EQ(watch.NextLook(kNow + 200 * kSecond), kNever);
}

}  // namespace
}  // namespace slice::server
