#include "daemon/server/wake_latency.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

namespace slice::server {
namespace {

// A file in place of the kernel's device.
class WakeLatencyTest : public testing::Test {
 protected:
  void SetUp() override { std::ofstream(path_).close(); }
  void TearDown() override { std::filesystem::remove(path_); }
  std::string Content() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The tests of this file may run at the same time, in processes of their own.
  const std::string path_ = testing::TempDir() + "wake_latency_test." + std::to_string(::getpid());
};

TEST_F(WakeLatencyTest, IsHeldFromARequestUntilNoneCameForAWhile) {
  WakeLatency latency(7, path_);
  latency.Update(kSecond);
  EXPECT_FALSE(latency.held());
  EXPECT_EQ(latency.NextLook(), kNever);

  latency.OnlineRequest(2 * kSecond);
  latency.Update(2 * kSecond);
  ASSERT_TRUE(latency.held());
  int32_t written = -1;
  ASSERT_EQ(Content().size(), sizeof written);  // the kernel takes a 32-bit number
  std::memcpy(&written, Content().data(), sizeof written);
  EXPECT_EQ(written, 7);
  EXPECT_EQ(latency.NextLook(), 2 * kSecond + WakeLatency::kHold);

  latency.OnlineRequest(2 * kSecond + WakeLatency::kHold / 2);
  latency.Update(2 * kSecond + WakeLatency::kHold);
  EXPECT_TRUE(latency.held()) << "another request came";
  latency.Update(latency.NextLook());
  EXPECT_FALSE(latency.held());
  EXPECT_EQ(latency.NextLook(), kNever);

  latency.OnlineRequest(5 * kSecond);
  latency.Update(5 * kSecond);
  EXPECT_TRUE(latency.held()) << "again";
}

TEST_F(WakeLatencyTest, NothingIsHeldWhereTheKernelDecides) {
  WakeLatency latency(-1, path_);
  latency.OnlineRequest(kSecond);
  latency.Update(kSecond);
  EXPECT_FALSE(latency.held());
  EXPECT_EQ(Content(), "");
}

TEST_F(WakeLatencyTest, AHostWithoutTheDeviceIsAskedOnce) {
  std::filesystem::remove(path_);
  WakeLatency latency(0, path_);
  latency.OnlineRequest(kSecond);
  latency.Update(kSecond);
  EXPECT_FALSE(latency.held());
  std::ofstream(path_).close();  // would be taken if it asked again
  latency.Update(kSecond);
  EXPECT_FALSE(latency.held());
}

}  // namespace
}  // namespace slice::server
