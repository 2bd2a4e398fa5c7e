#include "common/fd_passing.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <string>

namespace slice {
namespace {

class FdPassingTest : public ::testing::Test {
 protected:
  FdPassingTest() {
    int pair[2];
    SLICE_CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
    near = Fd(pair[0]);
    far = Fd(pair[1]);
  }
  // A read end whose write end reports EPIPE when the last copy is closed.
  static std::pair<Fd, Fd> Pipe() {
    int ends[2];
    SLICE_CHECK(::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, "pipe");
    return {Fd(ends[0]), Fd(ends[1])};
  }
  static size_t OpenFds() {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      ++count;
    return count;
  }

  Fd near, far;
  std::array<char, 64> buffer{};
  ReceivedPacket packet;
};

TEST_F(FdPassingTest, Happy_BytesAndDescriptorsArriveInOrderAndCloseOnExec) {
  auto [reader, writer] = Pipe();
  const std::array<int, 2> fds = {reader.get(), writer.get()};
  ASSERT_EQ(SendWithFds(near, "hello", fds, 0), 0);
  ASSERT_EQ(ReceiveWithFds(far, buffer, 2, 0, &packet), 0);
  EXPECT_EQ(std::string(buffer.data(), packet.bytes), "hello");
  EXPECT_FALSE(packet.cut);
  EXPECT_FALSE(packet.excess_fds);
  ASSERT_EQ(packet.fds.size(), 2u);
  for (const Fd& fd : packet.fds) EXPECT_NE(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  const char sent = 'x';
  ASSERT_EQ(::write(packet.fds[1].get(), &sent, 1), 1);
  char got = 0;
  EXPECT_EQ(::read(packet.fds[0].get(), &got, 1), 1);
  EXPECT_EQ(got, 'x');
}

TEST_F(FdPassingTest, Edge_AsManyDescriptorsAsAllowed) {
  const std::vector<int> fds(kPassedFdsMax, near.get());
  ASSERT_EQ(SendWithFds(near, "x", fds, 0), 0);
  ASSERT_EQ(ReceiveWithFds(far, buffer, kPassedFdsMax, 0, &packet), 0);
  EXPECT_EQ(packet.fds.size(), kPassedFdsMax);
  EXPECT_FALSE(packet.excess_fds);
}

// 3 of 4: fits the rounded control buffer, so the kernel does not say MSG_CTRUNC. 0: no room at
// all.
TEST_F(FdPassingTest, Malicious_ExcessDescriptorsAreReportedAndAllClosed) {
  const size_t open_before = OpenFds();
  for (const auto& [sent, allowed] : {std::pair<size_t, size_t>{4, 3}, {1, 0}, {100, 4}}) {
    const std::vector<int> fds(sent, near.get());
    ASSERT_EQ(SendWithFds(near, "x", fds, 0), 0);
    ASSERT_EQ(ReceiveWithFds(far, buffer, allowed, 0, &packet), 0);
    EXPECT_TRUE(packet.excess_fds) << sent << " of " << allowed;
    EXPECT_TRUE(packet.fds.empty());
    EXPECT_EQ(packet.bytes, 1u);
  }
  EXPECT_EQ(OpenFds(), open_before);
}

TEST_F(FdPassingTest, Edge_ReceiverOutOfDescriptorsSaysSo) {
  const std::vector<int> fds(4, near.get());
  ASSERT_EQ(SendWithFds(near, "x", fds, 0), 0);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const Fd highest(::dup(near.get()));
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(highest.get()) + 1;  // room for none beyond it
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  const int error = ReceiveWithFds(far, buffer, 4, 0, &packet);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(error, EMFILE);
  EXPECT_EQ(ReceiveWithFds(far, buffer, 4, MSG_DONTWAIT, &packet), EAGAIN) << "the packet is gone";
}

TEST_F(FdPassingTest, Edge_LongPacketIsCutAndHangUpHasNoBytes) {
  ASSERT_EQ(SendWithFds(near, std::string(65, 'x'), {}, 0), 0);
  ASSERT_EQ(ReceiveWithFds(far, buffer, 0, 0, &packet), 0);
  EXPECT_TRUE(packet.cut);
  EXPECT_EQ(packet.bytes, 64u);
  near.Close();
  ASSERT_EQ(ReceiveWithFds(far, buffer, 0, 0, &packet), 0);
  EXPECT_EQ(packet.bytes, 0u);
}

TEST_F(FdPassingTest, Edge_ErrnoIsReturnedAndNoSignalRaised) {
  EXPECT_EQ(ReceiveWithFds(far, buffer, 0, MSG_DONTWAIT, &packet), EAGAIN);
  far.Close();
  EXPECT_EQ(SendWithFds(near, "x", {}, 0), EPIPE);
  EXPECT_EQ(SendWithFds(Fd(), "x", {}, 0), EBADF);
}

}  // namespace
}  // namespace slice
