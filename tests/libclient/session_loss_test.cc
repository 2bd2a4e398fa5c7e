// Daemon death, garbage in the rings, fork.
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "tests/libclient/session_fixture.h"

namespace slice::testing {
namespace {

class SessionLossTest : public SessionFixture {};

TEST_F(SessionLossTest, Edge_DaemonDeathEndsEveryWaitAndEveryCall) {
  Start(Silent());
  Bind();
  const auto handles = AllocTensors(1);
  std::vector<slice_ticket_t> tickets;
  for (int i = 0; i < 6; ++i) tickets.push_back(MustSubmit());
  const slice_ticket_t unwaited = MustSubmit();
  std::vector<std::thread> threads;
  for (const slice_ticket_t ticket : tickets) {
    threads.emplace_back([this, ticket] {
      EXPECT_EQ(slice_wait(session_, ticket, -1, nullptr), SLICE_ERR_DAEMON_LOST);
      ExpectErrorContains(daemon_->path());
    });
  }
  daemon_->Die();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(slice_wait(session_, unwaited, -1, nullptr), SLICE_ERR_DAEMON_LOST);
  slice_ticket_t ticket = 0;
  EXPECT_EQ(Submit(&ticket), SLICE_ERR_DAEMON_LOST);
  EXPECT_EQ(slice_tensor_reset(session_, handles.data(), 1, nullptr), SLICE_ERR_DAEMON_LOST);
  EXPECT_EQ(slice_tensor_release(session_, handles.data(), 1), SLICE_ERR_DAEMON_LOST);
  slice_graph_t graph = 0;
  EXPECT_EQ(slice_graph_register(session_, "x", 1, &graph), SLICE_ERR_DAEMON_LOST);
  slice_sequence_t sequence = 0;
  EXPECT_EQ(slice_sequence_open(session_, nullptr, &sequence), SLICE_ERR_DAEMON_LOST);
  uint64_t offset = 0;
  EXPECT_EQ(slice_arena_alloc(session_, 1, &offset, nullptr), SLICE_ERR_DAEMON_LOST);
  slice_session_limits_t limits{};
  limits.size = sizeof limits;
  EXPECT_EQ(slice_session_limits(session_, &limits), SLICE_ERR_DAEMON_LOST);
}

TEST_F(SessionLossTest, Edge_ResultsThatArrivedBeforeTheDeathAreGood) {
  Start(Silent());
  Bind();
  const slice_ticket_t finished = MustSubmit();
  const slice_ticket_t lost = MustSubmit();
  daemon_->Settle();
  daemon_->Complete({FakeDaemon::Completion(finished)});
  daemon_->Die();
  EXPECT_EQ(slice_wait(session_, lost, -1, nullptr), SLICE_ERR_DAEMON_LOST);
  EXPECT_EQ(slice_wait(session_, finished, -1, nullptr), SLICE_OK);
  EXPECT_EQ(slice_wait(session_, lost, -1, nullptr), SLICE_ERR_STALE);
}

TEST_F(SessionLossTest, Edge_DeathMakesTheEventLoopFdReadable) {
  Start();
  const int fd = slice_session_fd(session_);
  daemon_->Die();
  pollfd item{fd, POLLIN, 0};
  EXPECT_EQ(::poll(&item, 1, -1), 1);
  EXPECT_EQ(slice_wait(session_, 0, 0, nullptr), SLICE_ERR_DAEMON_LOST);
  EXPECT_EQ(::poll(&item, 1, 0), 1);
}

TEST_F(SessionLossTest, Edge_SubmitLoopOnAFullRingLearnsOfTheDeath) {
  Start();
  Bind();
  daemon_->Pause();
  for (uint32_t i = 0; i < wire::kRingSlots; ++i) MustSubmit();
  daemon_->Die();
  slice_ticket_t ticket = 0;
  EXPECT_EQ(Submit(&ticket), SLICE_ERR_DAEMON_LOST);
}

TEST_F(SessionLossTest, Edge_DeathDuringHelloIsDaemonLost) {
  daemon_ =
      std::make_unique<FakeDaemon>(FakeDaemon::Hooks{.raw = [](int socket, const proto::Request&) {
        ::shutdown(socket, SHUT_RDWR);
        return true;
      }});
  const slice_session_options_t options = Options();
  EXPECT_EQ(slice_session_open(&options, &session_), SLICE_ERR_DAEMON_LOST);
}

class SessionGarbageTest : public SessionFixture {
 protected:
  void ExpectProtocol(std::function<void(std::byte*, slice_ticket_t)> corrupt) {
    Start(Silent());
    Bind();
    const slice_ticket_t ticket = MustSubmit();
    std::thread waiter(
        [&] { EXPECT_EQ(slice_wait(session_, ticket, -1, nullptr), SLICE_ERR_PROTOCOL); });
    daemon_->Corrupt([&](std::byte* ring) { corrupt(ring, ticket); });
    waiter.join();
    slice_ticket_t next = 0;
    EXPECT_EQ(Submit(&next), SLICE_ERR_PROTOCOL);
    ExpectErrorContains("session closed");
  }
  static void Store(std::byte* ring, size_t offset, uint64_t value) {
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(ring + offset))
        .store(value, std::memory_order_release);
  }
};

TEST_F(SessionGarbageTest, Malicious_ImpossibleCompletionTail) {
  ExpectProtocol(
      [](std::byte* ring, slice_ticket_t) { Store(ring, wire::kCompletionTailOffset, 100'000); });
}

TEST_F(SessionGarbageTest, Malicious_CompletionOfAnUnknownRequest) {
  ExpectProtocol([](std::byte* ring, slice_ticket_t) {
    Store(ring, wire::kSlotsOffset, 4711);
    Store(ring, wire::kCompletionTailOffset, 1);
  });
}

TEST_F(SessionGarbageTest, Malicious_CompletionWithAnUnknownStatus) {
  ExpectProtocol([](std::byte* ring, slice_ticket_t ticket) {
    wire::CompletionSlot slot = FakeDaemon::Completion(ticket, 1000);
    std::memcpy(ring + wire::kSlotsOffset, &slot, sizeof slot);
    Store(ring, wire::kCompletionTailOffset, 1);
  });
}

TEST_F(SessionLossTest, Edge_ChildOfAForkGetsInvalidAndTheParentGoesOn) {
  Start();
  Bind();
  const slice_ticket_t ticket = MustSubmit();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    uint64_t out = 0;
    const bool right = slice_wait(session_, ticket, 0, nullptr) == SLICE_ERR_INVALID &&
                       Submit(&out) == SLICE_ERR_INVALID &&
                       slice_arena_alloc(session_, 1, &out, nullptr) == SLICE_ERR_INVALID &&
                       slice_graph_unregister(session_, 1) == SLICE_ERR_INVALID &&
                       slice_session_fd(session_) == -1 &&
                       std::string(slice_last_error()).find("fork") != std::string::npos;
    slice_session_close(session_);  // frees the child's copy only
    ::_exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(slice_wait(session_, ticket, -1, nullptr), SLICE_OK);
  EXPECT_EQ(slice_wait(session_, MustSubmit(), -1, nullptr), SLICE_OK);
}

TEST_F(SessionLossTest, Race_SessionsOpenAndCloseWhileOthersRun) {
  Start();
  Bind();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this] {
      for (int i = 0; i < 10; ++i) {
        const slice_session_options_t options = Options();
        slice_session_t* session = nullptr;
        ASSERT_EQ(slice_session_open(&options, &session), SLICE_OK) << slice_last_error();
        slice_session_close(session);
      }
    });
  }
  for (int i = 0; i < 200; ++i)
    EXPECT_EQ(slice_wait(session_, MustSubmit(), -1, nullptr), SLICE_OK);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace slice::testing
