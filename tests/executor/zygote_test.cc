#include "common/wire/zygote.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

#include "daemon/executor/socket_message.h"
#include "tests/testing/fake_engine.h"

namespace slice {
namespace {

using executor::ReceiveMessage;
using executor::SendMessage;
using executor::SocketMessage;

class Zygote {
 public:
  Zygote() {
    int pair[2];
    SLICE_CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
    socket = Fd(pair[0]);
    pid = ::fork();
    if (pid == 0) {
      ::dup2(pair[1], 3);
      if (pair[1] == 3) ::fcntl(3, F_SETFD, 0);
      ::execl(SLICE_EXECUTOR, SLICE_EXECUTOR, "--zygote", static_cast<char*>(nullptr));
      ::_exit(127);
    }
    ::close(pair[1]);
    SocketMessage message;
    SLICE_CHECK(
        ReceiveMessage(socket, &message).ok() && message.bytes.size() == sizeof(wire::ZygoteHello),
        "hello");
    std::memcpy(&hello, message.bytes.data(), sizeof hello);
  }
  ~Zygote() {
    socket.Close();
    ::waitpid(pid, nullptr, 0);
  }

  struct Child {
    Fd control;
    Fd pidfd;
    pid_t pid = -1;
  };
  Child Fork() {
    int pair[2];
    SLICE_CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
    Child child;
    child.control = Fd(pair[0]);
    const Fd theirs(pair[1]);
    const int fds[] = {theirs.get()};
    SLICE_CHECK(SendMessage(socket, std::string(1, wire::kZygoteFork), fds).ok(), "fork request");
    SocketMessage message;
    SLICE_CHECK(ReceiveMessage(socket, &message).ok() && message.fds.size() == 1, "fork reply");
    wire::ZygoteReply reply{};
    std::memcpy(&reply, message.bytes.data(), sizeof reply);
    SLICE_CHECK(reply.error == 0, "fork failed");
    child.pid = reply.pid;
    child.pidfd = std::move(message.fds[0]);
    return child;
  }

  Fd socket;
  pid_t pid = -1;
  wire::ZygoteHello hello{};
};

siginfo_t WaitChild(const Fd& pidfd) {
  pollfd poll{pidfd.get(), POLLIN, 0};
  ::poll(&poll, 1, 20'000);
  siginfo_t info{};
  ::waitid(P_PIDFD, static_cast<id_t>(pidfd.get()), &info, WEXITED | __WALL | WNOHANG);
  return info;
}

TEST(Happy_Zygote, ForksExecutorsThatBelongToTheCaller) {
  Zygote zygote;
  EXPECT_EQ(zygote.hello.version, wire::kZygoteVersion);
  EXPECT_EQ(zygote.hello.ring_version, wire::kExecutorRingVersion);
  for (int round = 0; round < 2; ++round) {
    Zygote::Child child = zygote.Fork();
    testing::FakeEngine engine(std::move(child.control), child.pid, {0}, 1, 1 << 20);
    EXPECT_EQ(engine.Setup().status(), SLICE_OK);
    EXPECT_EQ(engine.PoolBytes(), 0u);
    engine.Kill();
    const siginfo_t info = WaitChild(child.pidfd);
    EXPECT_EQ(info.si_pid, child.pid);
    EXPECT_EQ(info.si_status, SIGKILL);
  }
}

TEST(Edge_Zygote, ExecutorEndsWithItsSocketAndZygoteWithIts) {
  Zygote zygote;
  Zygote::Child child = zygote.Fork();
  child.control.Close();
  const siginfo_t info = WaitChild(child.pidfd);
  EXPECT_EQ(info.si_pid, child.pid);
  EXPECT_EQ(info.si_code, CLD_EXITED);
  EXPECT_EQ(info.si_status, 0);
}

}  // namespace
}  // namespace slice
