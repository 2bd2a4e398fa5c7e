#include "libclient/control_channel.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "common/wire/control.h"
#include "tests/testing/fake_daemon.h"

namespace slice::client {
namespace {

using testing::FakeDaemon;

proto::Request StatusRequest() {
  proto::Request request;
  request.mutable_status()->set_what(0);
  return request;
}

TEST(ControlChannelTest, Happy_RequestIsAnswered) {
  FakeDaemon daemon;
  const auto channel = ControlChannel::Connect(daemon.path()).value();
  const auto reply = channel->Call(StatusRequest());
  ASSERT_TRUE(reply.ok()) << reply.status().ToString();
  EXPECT_EQ(reply.value().body().text(), "{}");
}

TEST(ControlChannelTest, Happy_PathComesFromOptionThenEnvironmentThenDefault) {
  ::setenv(wire::kSocketEnvironment, "/from/environment", 1);
  EXPECT_EQ(ResolveSocketPath("/from/option"), "/from/option");
  EXPECT_EQ(ResolveSocketPath(nullptr), "/from/environment");
  ::unsetenv(wire::kSocketEnvironment);
  EXPECT_EQ(ResolveSocketPath(nullptr), wire::kDefaultSocketPath);
}

TEST(ControlChannelTest, Edge_NoDaemonSaysPathErrnoAndHowToStart) {
  const Status status = ControlChannel::Connect("/nonexistent/sliced.sock").status();
  EXPECT_EQ(status.code(), StatusCode::kDaemonLost);
  for (const char* part :
       {"/nonexistent/sliced.sock", "No such file", "errno 2", "sliced --config FILE"}) {
    EXPECT_NE(status.text().find(part), std::string::npos) << part << " in " << status.text();
  }
}

TEST(ControlChannelTest, Edge_LongPathIsInvalid) {
  EXPECT_EQ(ControlChannel::Connect(std::string(200, 'x')).status().code(), StatusCode::kInvalid);
  const Status huge = ControlChannel::Connect(std::string(100'000, 'x')).status();
  EXPECT_NE(huge.text().find("has 100000 bytes"), std::string::npos) << huge.text();
  EXPECT_LT(huge.text().size(), 300u);  // a text for people
}

TEST(ControlChannelTest, Happy_RefusalKeepsCodeTextAndConnection) {
  std::atomic<int> count = 0;
  FakeDaemon daemon({.reply = [&](const proto::Request&, proto::Reply* reply, std::vector<Fd>*) {
    if (count++ > 0) return;
    reply->set_status(SLICE_ERR_QUOTA);
    reply->set_text("weights: 5 of 4 GiB");
  }});
  const auto channel = ControlChannel::Connect(daemon.path()).value();
  const Status status = channel->Call(StatusRequest()).status();
  EXPECT_EQ(status.code(), StatusCode::kQuota);
  EXPECT_EQ(status.text(), "weights: 5 of 4 GiB");
  EXPECT_FALSE(channel->broken());
  EXPECT_TRUE(channel->Call(StatusRequest()).ok());
}

TEST(ControlChannelTest, Edge_TooLongRequestIsInvalidAndNotSent) {
  FakeDaemon daemon;
  const auto channel = ControlChannel::Connect(daemon.path()).value();
  proto::Request request;
  request.mutable_set_policy()->set_policy(std::string(wire::kControlMessageBytesMax, 'x'));
  EXPECT_EQ(channel->Call(request).status().code(), StatusCode::kInvalid);
  EXPECT_TRUE(channel->Call(StatusRequest()).ok());
  EXPECT_EQ(daemon.requests().size(), 1u);
}

TEST(ControlChannelTest, Edge_LateReplyOfACallThatTimedOutIsDropped) {
  std::atomic<uint64_t> held = 0;
  FakeDaemon daemon({.raw = [&](int socket, const proto::Request& request) {
    if (held == 0) {  // never answer the first in time
      held = request.id();
      return true;
    }
    proto::Reply late;
    late.set_id(held);
    late.mutable_body()->set_text("late");
    FakeDaemon::Send(socket, late.SerializeAsString());
    return false;
  }});
  const auto channel = ControlChannel::Connect(daemon.path()).value();
  EXPECT_EQ(channel->Call(StatusRequest(), {}, nullptr, kMillisecond).status().code(),
            StatusCode::kTimeout);
  const auto reply = channel->Call(StatusRequest());
  ASSERT_TRUE(reply.ok()) << reply.status().ToString();
  EXPECT_EQ(reply.value().body().text(), "{}");
}

TEST(ControlChannelTest, Edge_NoAnswerSaysWhoAndWhatToTry) {
  FakeDaemon daemon({.raw = [](int, const proto::Request&) { return true; }});
  const auto channel = ControlChannel::Connect(daemon.path()).value();
  const Status status = channel->Call(StatusRequest(), {}, nullptr, 20 * kMillisecond).status();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  for (const std::string& part : {"sliced (pid " + std::to_string(::getpid()) + ")", daemon.path(),
                                  std::string("busy or stuck")}) {
    EXPECT_NE(status.text().find(part), std::string::npos) << part << " in " << status.text();
  }
  EXPECT_FALSE(channel->broken());
}

TEST(ControlChannelTest, Edge_FullQueueOfConnectionsIsATimeout) {
  const Fd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  FakeDaemon folder;  // for a path
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = folder.path() + ".full";
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(listener.get(), 0), 0);
  const auto first = ControlChannel::Connect(path, 20 * kMillisecond);  // nobody accepts
  const Status status = ControlChannel::Connect(path, 20 * kMillisecond).status();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_NE(status.text().find("accepts no connection"), std::string::npos) << status.text();
}

// Said before the request was read, whether the request still could be sent or not.
TEST(ControlChannelTest, Edge_DaemonsLastWordIsTheError) {
  proto::Reply word;
  word.set_status(SLICE_ERR_QUOTA);
  word.set_text("too many connections");
  for (const bool hangs_up_first : {false, true}) {
    FakeDaemon daemon({.raw = [&](int socket, const proto::Request&) {
      FakeDaemon::Send(socket, word.SerializeAsString());
      if (hangs_up_first) ::shutdown(socket, SHUT_RDWR);
      return true;
    }});
    const auto channel = ControlChannel::Connect(daemon.path()).value();
    if (hangs_up_first) {
      // The first request makes the daemon speak and hang up; nobody reads its answer.
      EXPECT_EQ(channel->Call(StatusRequest(), {}, nullptr, 0).status().code(),
                StatusCode::kTimeout);
      while (!channel->HungUp()) std::this_thread::yield();
    }
    const Status status = channel->Call(StatusRequest()).status();
    EXPECT_EQ(status.code(), StatusCode::kQuota);
    EXPECT_EQ(status.text(), "too many connections");
    EXPECT_TRUE(channel->broken());
    EXPECT_EQ(channel->Call(StatusRequest()).status().code(), StatusCode::kQuota);
  }
}

class ControlChannelGarbageTest : public ::testing::TestWithParam<int> {};

TEST_P(ControlChannelGarbageTest, Malicious_GarbageBreaksTheChannelForGood) {
  const int kind = GetParam();
  FakeDaemon daemon({.raw = [kind](int socket, const proto::Request& request) {
    proto::Reply reply;
    reply.set_id(request.id());
    std::string bytes;
    std::vector<int> fds;
    switch (kind) {
      case 0:
        bytes = "\xff\xff\xff\xff";
        break;  // no message
      case 1:
        reply.set_id(request.id() + 1);
        bytes = reply.SerializeAsString();
        break;  // from the future
      case 2:
        reply.set_status(77);
        bytes = reply.SerializeAsString();
        break;  // unknown status
      case 3:
        reply.set_status(-1);
        bytes = reply.SerializeAsString();
        break;
      case 4:
        bytes = std::string(wire::kControlMessageBytesMax + 1, 'x');
        break;  // too long
      case 5:   // too many descriptors
        bytes = reply.SerializeAsString();
        fds.assign(2 * wire::kControlFdsMax, 0);
        break;
      default:
        break;
    }
    FakeDaemon::Send(socket, bytes, fds);
    return true;
  }});
  const auto channel = ControlChannel::Connect(daemon.path()).value();
  EXPECT_EQ(channel->Call(StatusRequest()).status().code(), StatusCode::kProtocol);
  EXPECT_TRUE(channel->broken());
  EXPECT_EQ(channel->Call(StatusRequest()).status().code(), StatusCode::kProtocol);
}
INSTANTIATE_TEST_SUITE_P(Kinds, ControlChannelGarbageTest, ::testing::Range(0, 6));

TEST(ControlChannelTest, Edge_DaemonDeathDuringACallIsDaemonLost) {
  FakeDaemon* running = nullptr;
  std::atomic<bool> asked = false;
  FakeDaemon daemon({.raw = [&](int, const proto::Request&) {
    asked = true;
    asked.notify_all();
    return true;
  }});
  running = &daemon;
  const auto channel = ControlChannel::Connect(daemon.path()).value();
  std::thread killer([&] {
    asked.wait(false);
    running->Die();
  });
  EXPECT_EQ(channel->Call(StatusRequest()).status().code(), StatusCode::kDaemonLost);
  killer.join();
  EXPECT_EQ(channel->Call(StatusRequest()).status().code(), StatusCode::kDaemonLost);
}

TEST(ControlChannelTest, Race_ManyThreadsTakeTurns) {
  FakeDaemon daemon(
      {.reply = [](const proto::Request& request, proto::Reply* reply, std::vector<Fd>*) {
        reply->mutable_body()->set_text(std::to_string(request.error_text().token()));
      }});
  const auto channel = ControlChannel::Connect(daemon.path()).value();
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 8; ++t) {
    threads.emplace_back([&channel, t] {
      for (uint32_t i = 0; i < 100; ++i) {
        proto::Request request;
        request.mutable_error_text()->set_token(t * 1000 + i);
        const auto reply = channel->Call(request);
        ASSERT_TRUE(reply.ok()) << reply.status().ToString();
        ASSERT_EQ(reply.value().body().text(), std::to_string(t * 1000 + i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace slice::client
