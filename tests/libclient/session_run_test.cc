// Submitting and waiting: what goes through the rings.
#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <random>
#include <thread>

#include "tests/libclient/session_fixture.h"

namespace slice::testing {
namespace {

constexpr int64_t kForEver = -1;

class SessionRunTest : public SessionFixture {
 protected:
  bool Readable(int fd, int timeout_ms) {
    pollfd item{fd, POLLIN, 0};
    return ::poll(&item, 1, timeout_ms) == 1;
  }
};

TEST_F(SessionRunTest, Happy_SubmitCarriesEverythingAndCompletes) {
  Start({.submit = [](const FakeDaemon::Submit& submit) {
    auto slot = FakeDaemon::Completion(submit.slot.cookie);
    slot.submit_ns = 1;
    slot.start_ns = 2;
    slot.finish_ns = 3;
    slot.predicted_finish_ns = 4;
    submit.arena[submit.arguments[3].offset] = std::byte{0x5a};
    return slot;
  }});
  Bind();
  slice_sequence_options_t sequence_options{};
  sequence_options.size = sizeof sequence_options;
  sequence_options.service_class = SLICE_CLASS_OFFLINE;
  sequence_options.priority = -3;
  sequence_options.deadline_ns = 99;
  slice_sequence_t sequence = 0;
  ASSERT_EQ(slice_sequence_open(session_, &sequence_options, &sequence), SLICE_OK);
  uint64_t input = 0;
  uint64_t output = 0;
  void* result = nullptr;
  ASSERT_EQ(slice_arena_alloc(session_, 64, &input, nullptr), SLICE_OK);
  ASSERT_EQ(slice_arena_alloc(session_, 128, &output, &result), SLICE_OK);
  const int64_t symbols[] = {5, -6};
  const slice_slot_t inputs[] = {{input, 64}};
  const slice_slot_t outputs[] = {{output, 128}};
  slice_submit_args_t args = Args();
  args.sequence = sequence;
  args.deadline_ns = 1234;
  args.priority = 8;
  args.symbols = symbols;
  args.symbol_count = 2;
  args.inputs = inputs;
  args.input_count = 1;
  args.outputs = outputs;
  args.output_count = 1;
  slice_ticket_t ticket = 0;
  ASSERT_EQ(slice_submit(session_, &args, &ticket), SLICE_OK) << slice_last_error();
  slice_completion_t completion{};
  completion.size = sizeof completion;
  ASSERT_EQ(slice_wait(session_, ticket, kForEver, &completion), SLICE_OK) << slice_last_error();
  ASSERT_EQ(slice_sequence_close(session_, sequence), SLICE_OK);

  EXPECT_EQ(completion.failed_op, UINT32_MAX);
  EXPECT_EQ(completion.submit_ns, 1);
  EXPECT_EQ(completion.predicted_finish_ns, 4);
  EXPECT_EQ(static_cast<unsigned char*>(result)[0], 0x5a);
  const auto taken = daemon_->taken();
  ASSERT_GE(taken.size(), 2u);
  EXPECT_EQ(taken[0].slot.flags, wire::kSequenceOpen | 2u << wire::kClassShift);
  EXPECT_EQ(taken[0].slot.sequence, sequence);
  EXPECT_EQ(taken[0].slot.priority, -3);
  EXPECT_EQ(taken[0].slot.deadline_ns, 99u);
  const auto& run = taken[1];
  EXPECT_EQ(run.slot.flags, wire::kSubmitGraph);
  EXPECT_EQ(run.slot.binding, binding_);
  EXPECT_EQ(run.slot.sequence, sequence);
  EXPECT_EQ(run.slot.deadline_ns, 1234u);
  EXPECT_EQ(run.slot.priority, 8);
  EXPECT_TRUE(std::all_of(std::begin(run.slot.reserved), std::end(run.slot.reserved),
                          [](uint8_t b) { return b == 0; }));
  ASSERT_EQ(run.arguments.size(), 4u);
  EXPECT_EQ(run.arguments[1].handle, wire::kArgSymbol | 1);
  EXPECT_EQ(static_cast<int64_t>(run.arguments[1].offset), -6);
  EXPECT_EQ(run.arguments[2].handle, wire::kArgArena);
  EXPECT_EQ(run.arguments[2].offset, input);
  EXPECT_EQ(run.arguments[3].bytes, 128u);
}

TEST_F(SessionRunTest, Happy_TicketIsConsumedOnce) {
  Start();
  Bind();
  const slice_ticket_t ticket = MustSubmit();
  EXPECT_EQ(slice_wait(session_, ticket, kForEver, nullptr), SLICE_OK);
  EXPECT_EQ(slice_wait(session_, ticket, kForEver, nullptr), SLICE_ERR_STALE);
  EXPECT_EQ(slice_wait(session_, 12345, 0, nullptr), SLICE_ERR_STALE);
  EXPECT_EQ(slice_cancel(session_, ticket), SLICE_ERR_STALE);
}

TEST_F(SessionRunTest, Edge_UnfinishedTicketTimesOutAndStaysValid) {
  Start(Silent());
  Bind();
  const slice_ticket_t ticket = MustSubmit();
  EXPECT_EQ(slice_wait(session_, ticket, 0, nullptr), SLICE_ERR_TIMEOUT);
  EXPECT_EQ(slice_wait(session_, ticket, 1'000'000, nullptr), SLICE_ERR_TIMEOUT);
  daemon_->Settle();
  daemon_->Complete({FakeDaemon::Completion(ticket)});
  EXPECT_EQ(slice_wait(session_, ticket, 0, nullptr), SLICE_OK);
}

TEST_F(SessionRunTest, Happy_FailureBringsTheDaemonsText) {
  Start({.submit = [](const FakeDaemon::Submit& submit) {
    auto slot = FakeDaemon::Completion(submit.slot.cookie, SLICE_ERR_OP_FAILED);
    slot.failed_op = 3;
    slot.text_token = 17;
    return slot;
  }});
  Bind();
  slice_completion_t completion{};
  completion.size = sizeof completion;
  EXPECT_EQ(slice_wait(session_, MustSubmit(), kForEver, &completion), SLICE_ERR_OP_FAILED);
  EXPECT_EQ(completion.status, SLICE_ERR_OP_FAILED);
  EXPECT_EQ(completion.failed_op, 3u);
  ExpectErrorContains("text of token 17");
}

TEST_F(SessionRunTest, Edge_FailureWithoutTextStillSaysWhere) {
  Start({.submit = [](const FakeDaemon::Submit& submit) {
    auto slot = FakeDaemon::Completion(submit.slot.cookie, SLICE_ERR_OP_FAILED);
    slot.failed_op = 3;
    return slot;
  }});
  Bind();
  EXPECT_EQ(slice_wait(session_, MustSubmit(), kForEver, nullptr), SLICE_ERR_OP_FAILED);
  ExpectErrorContains("at op 3");
}

TEST_F(SessionRunTest, Edge_FullRingWouldBlockAndRecovers) {
  Start();
  Bind();
  daemon_->Pause();
  std::vector<slice_ticket_t> tickets;
  for (uint32_t i = 0; i < wire::kRingSlots; ++i) tickets.push_back(MustSubmit());
  slice_ticket_t ticket = 77;
  EXPECT_EQ(Submit(&ticket), SLICE_ERR_WOULD_BLOCK);
  EXPECT_EQ(ticket, 77u);
  ExpectErrorContains("256");
  slice_sequence_t sequence = 0;
  EXPECT_EQ(slice_sequence_open(session_, nullptr, &sequence), SLICE_ERR_WOULD_BLOCK);
  daemon_->Resume();
  for (const slice_ticket_t t : tickets)
    EXPECT_EQ(slice_wait(session_, t, kForEver, nullptr), SLICE_OK);
  EXPECT_EQ(slice_wait(session_, MustSubmit(), kForEver, nullptr), SLICE_OK);
}

TEST_F(SessionRunTest, Edge_InFlightIsBoundedThoughTheDaemonTakesSlots) {
  Start(Silent());
  Bind();
  std::vector<wire::CompletionSlot> completions;
  for (uint32_t i = 0; i < wire::kRingSlots; ++i) {
    const slice_ticket_t ticket = MustSubmit();
    completions.push_back(FakeDaemon::Completion(ticket));
  }
  slice_ticket_t ticket = 0;
  EXPECT_EQ(Submit(&ticket), SLICE_ERR_WOULD_BLOCK);
  daemon_->Complete(completions);
  MustSubmit();  // nobody has waited: submitting drains the completions itself
  for (const auto& slot : completions)
    EXPECT_EQ(slice_wait(session_, slot.cookie, 0, nullptr), SLICE_OK);
}

TEST_F(SessionRunTest, Edge_ArgumentAreaFillsWrapsAndRefusesTooMuch) {
  Start();
  Bind();
  daemon_->Pause();
  const std::vector<int64_t> symbols(5000, 1);  // 120 KB of 256 KiB
  slice_submit_args_t args = Args();
  args.symbols = symbols.data();
  args.symbol_count = 5000;
  slice_ticket_t first = 0;
  slice_ticket_t second = 0;
  slice_ticket_t third = 0;
  ASSERT_EQ(slice_submit(session_, &args, &first), SLICE_OK);
  ASSERT_EQ(slice_submit(session_, &args, &second), SLICE_OK);
  EXPECT_EQ(slice_submit(session_, &args, &third), SLICE_ERR_WOULD_BLOCK);
  daemon_->Resume();
  EXPECT_EQ(slice_wait(session_, first, kForEver, nullptr), SLICE_OK);
  EXPECT_EQ(slice_wait(session_, second, kForEver, nullptr), SLICE_OK);
  for (int i = 0; i < 50; ++i) {
    args.symbol_count = static_cast<uint32_t>(100 + i * 90);
    ASSERT_EQ(slice_submit(session_, &args, &third), SLICE_OK);
    ASSERT_EQ(slice_wait(session_, third, kForEver, nullptr), SLICE_OK);
    ASSERT_EQ(daemon_->taken().back().arguments.size(), args.symbol_count);
  }
  args.symbol_count = 20'000;
  EXPECT_EQ(slice_submit(session_, &args, &third), SLICE_ERR_INVALID);
}

TEST_F(SessionRunTest, Edge_SubmitArgumentsAreChecked) {
  Start();
  Bind();
  slice_ticket_t ticket = 0;
  slice_submit_args_t args = Args();
  EXPECT_EQ(slice_submit(session_, nullptr, &ticket), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_submit(session_, &args, nullptr), SLICE_ERR_INVALID);
  args.size = 3;
  EXPECT_EQ(slice_submit(session_, &args, &ticket), SLICE_ERR_INVALID);
  args = Args();
  args.symbol_count = 1;
  EXPECT_EQ(slice_submit(session_, &args, &ticket), SLICE_ERR_INVALID);
  ExpectErrorContains("symbols is NULL");
  args = Args();
  args.binding = 4;
  EXPECT_EQ(slice_submit(session_, &args, &ticket), SLICE_ERR_STALE);
  args = Args();
  args.sequence = 4;
  EXPECT_EQ(slice_submit(session_, &args, &ticket), SLICE_ERR_STALE);
  EXPECT_EQ(slice_sequence_close(session_, 4), SLICE_ERR_STALE);
  slice_completion_t completion{};  // size not set
  EXPECT_EQ(slice_wait(session_, MustSubmit(), kForEver, &completion), SLICE_ERR_INVALID);
}

TEST_F(SessionRunTest, Happy_CancelNamesTheRequest) {
  Start(Silent());
  Bind();
  const slice_ticket_t ticket = MustSubmit();
  ASSERT_EQ(slice_cancel(session_, ticket), SLICE_OK);
  daemon_->Settle();
  const auto taken = daemon_->taken();
  EXPECT_EQ(taken.back().slot.flags, wire::kCancel);
  EXPECT_EQ(taken.back().slot.binding, ticket);
  daemon_->Complete({FakeDaemon::Completion(ticket, SLICE_ERR_CANCELLED)});
  errno = EINTR;
  EXPECT_EQ(slice_wait(session_, ticket, kForEver, nullptr), SLICE_ERR_CANCELLED);
  EXPECT_EQ(errno, 0);  // not a signal
}

TEST_F(SessionRunTest, Happy_TensorCommandsCarryTheirParameters) {
  Start();
  const auto handles = AllocTensors(2);
  slice_ticket_t ticket = 0;
  EXPECT_EQ(slice_tensor_reset(session_, handles.data(), 2, nullptr), SLICE_OK);
  EXPECT_EQ(slice_tensor_fill(session_, handles.data(), 1, 0x3f800000, nullptr), SLICE_OK);
  EXPECT_EQ(slice_tensor_crop(session_, handles.data(), 2, 1, 5, &ticket), SLICE_OK);
  EXPECT_EQ(slice_wait(session_, ticket, kForEver, nullptr), SLICE_OK);
  EXPECT_EQ(slice_tensor_write(session_, handles[0], 64, 128, nullptr), SLICE_OK);
  EXPECT_EQ(slice_tensor_read(session_, handles[1], 192, 128, nullptr), SLICE_OK);
  const auto taken = daemon_->taken();
  ASSERT_EQ(taken.size(), 5u);
  const auto kind = [&](size_t i) { return taken[i].slot.flags >> wire::kCommandKindShift & 0xff; };
  EXPECT_EQ(kind(0), wire::kTensorReset);
  EXPECT_EQ(taken[0].arguments.size(), 2u);
  EXPECT_EQ(taken[0].arguments[1].handle, handles[1]);
  EXPECT_EQ(kind(1), wire::kTensorFill);
  EXPECT_EQ(taken[1].slot.deadline_ns, 0x3f800000u);
  EXPECT_EQ(kind(2), wire::kTensorCrop);
  EXPECT_EQ(taken[2].slot.deadline_ns, 5u);
  EXPECT_EQ(taken[2].slot.priority, 1);
  EXPECT_EQ(kind(3), wire::kTensorWrite);
  EXPECT_EQ(taken[3].arguments[0].offset, 64u);
  EXPECT_EQ(taken[3].arguments[0].bytes, 128u);
  EXPECT_EQ(kind(4), wire::kTensorRead);
}

TEST_F(SessionRunTest, Edge_TensorCommandsAreChecked) {
  Start();
  const auto handles = AllocTensors(1);
  const slice_tensor_t unknown = 3;
  EXPECT_EQ(slice_tensor_reset(session_, &unknown, 1, nullptr), SLICE_ERR_STALE);
  EXPECT_EQ(slice_tensor_reset(session_, nullptr, 1, nullptr), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_tensor_reset(session_, handles.data(), 0, nullptr), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_tensor_crop(session_, handles.data(), 1, 2, 0, nullptr), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_tensor_crop(session_, handles.data(), 1, -1, 0, nullptr), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_tensor_write(session_, handles[0], 0, 127, nullptr), SLICE_ERR_BOUNDS);
  ExpectErrorContains("127 bytes, the tensor has 128");
  EXPECT_EQ(slice_tensor_read(session_, handles[0], 32, 128, nullptr), SLICE_ERR_BOUNDS);
  EXPECT_EQ(slice_tensor_read(session_, handles[0], 1 << 20, 128, nullptr), SLICE_ERR_BOUNDS);
  EXPECT_TRUE(daemon_->taken().empty());
}

TEST_F(SessionRunTest, Happy_EventLoopFdIsReadableWhileCompletionsWait) {
  Start(Silent());
  Bind();
  const int fd = slice_session_fd(session_);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(slice_session_fd(session_), fd);
  const slice_ticket_t first = MustSubmit();
  const slice_ticket_t second = MustSubmit();
  EXPECT_FALSE(Readable(fd, 0));
  daemon_->Settle();
  daemon_->Complete({FakeDaemon::Completion(second), FakeDaemon::Completion(first)});
  EXPECT_TRUE(Readable(fd, -1));
  EXPECT_EQ(slice_wait(session_, 0, 0, nullptr), SLICE_OK);  // something is finished
  EXPECT_EQ(slice_wait(session_, first, 0, nullptr), SLICE_OK);
  EXPECT_TRUE(Readable(fd, 0));  // the second still waits
  EXPECT_EQ(slice_wait(session_, second, 0, nullptr), SLICE_OK);
  EXPECT_EQ(slice_wait(session_, 0, 0, nullptr), SLICE_ERR_TIMEOUT);
  EXPECT_FALSE(Readable(fd, 0));
}

TEST_F(SessionRunTest, Edge_EventLoopFdMadeLateShowsWhatWaits) {
  Start();
  Bind();
  const slice_ticket_t ticket = MustSubmit();
  ASSERT_EQ(slice_wait(session_, 0, kForEver, nullptr), SLICE_OK);
  EXPECT_TRUE(Readable(slice_session_fd(session_), 0));
  EXPECT_EQ(slice_wait(session_, ticket, 0, nullptr), SLICE_OK);
}

TEST_F(SessionRunTest, Race_ManyThreadsSubmitAndWaitInAnyOrder) {
  Start({.submit = [](const FakeDaemon::Submit& submit) {
    auto slot = FakeDaemon::Completion(submit.slot.cookie);
    slot.predicted_finish_ns = static_cast<int64_t>(submit.arguments.at(0).offset);
    return slot;
  }});
  Bind();
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([this, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<std::pair<slice_ticket_t, int64_t>> open;
      for (int64_t i = 0; i < 300; ++i) {
        const int64_t symbol = t * 1000 + i;
        slice_submit_args_t args = Args();
        args.symbols = &symbol;
        args.symbol_count = 1;
        slice_ticket_t ticket = 0;
        const slice_status_t status = slice_submit(session_, &args, &ticket);
        if (status == SLICE_OK)
          open.emplace_back(ticket, symbol);
        else
          ASSERT_EQ(status, SLICE_ERR_WOULD_BLOCK);
        while (open.size() > 20 || (i == 299 && !open.empty())) {
          std::swap(open[random() % open.size()], open.back());
          slice_completion_t completion{};
          completion.size = sizeof completion;
          ASSERT_EQ(slice_wait(session_, open.back().first, kForEver, &completion), SLICE_OK)
              << slice_last_error();
          ASSERT_EQ(completion.predicted_finish_ns, open.back().second);
          open.pop_back();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(SessionRunTest, Race_WaiterOfAnUnfinishedTicketDoesNotHoldUpOthers) {
  Start(Silent());
  Bind();
  const slice_ticket_t slow = MustSubmit();
  std::vector<slice_ticket_t> fast;
  for (int i = 0; i < 4; ++i) fast.push_back(MustSubmit());
  std::vector<std::thread> threads;
  threads.emplace_back([&] { EXPECT_EQ(slice_wait(session_, slow, kForEver, nullptr), SLICE_OK); });
  for (const slice_ticket_t ticket : fast) {
    threads.emplace_back(
        [this, ticket] { EXPECT_EQ(slice_wait(session_, ticket, kForEver, nullptr), SLICE_OK); });
  }
  daemon_->Settle();
  for (const slice_ticket_t ticket : fast) daemon_->Complete({FakeDaemon::Completion(ticket)});
  for (size_t i = 1; i < threads.size(); ++i) threads[i].join();
  daemon_->Complete({FakeDaemon::Completion(slow)});
  threads[0].join();
}

TEST_F(SessionRunTest, Edge_SignalsInterruptEveryWaiter) {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;  // the hard case
  ASSERT_EQ(::sigaction(SIGUSR1, &action, nullptr), 0);
  Start(Silent());
  Bind();
  std::vector<slice_ticket_t> tickets = {MustSubmit(), MustSubmit(), MustSubmit()};
  std::atomic<int> interrupted = 0;
  std::vector<std::thread> threads;
  for (const slice_ticket_t ticket : tickets) {
    threads.emplace_back([&, ticket] {
      const slice_status_t status = slice_wait(session_, ticket, kForEver, nullptr);
      const int error = errno;
      EXPECT_EQ(status, SLICE_ERR_CANCELLED);
      EXPECT_EQ(error, EINTR);
      ++interrupted;
    });
  }
  // One polls, the others sleep on their futex; repeated because a signal may come before the
  // sleep.
  for (size_t i = 0; i < threads.size(); ++i) {
    while (interrupted <= static_cast<int>(i)) {
      for (std::thread& thread : threads) ::pthread_kill(thread.native_handle(), SIGUSR1);
      std::this_thread::yield();
    }
  }
  for (std::thread& thread : threads) thread.join();
  daemon_->Settle();
  for (const slice_ticket_t ticket : tickets) {
    daemon_->Complete({FakeDaemon::Completion(ticket)});
    EXPECT_EQ(slice_wait(session_, ticket, kForEver, nullptr), SLICE_OK);
  }
}

TEST_F(SessionRunTest, Edge_InterruptedCommandWithoutTicketIsDroppedWhenItEnds) {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGUSR1, &action, nullptr), 0);
  Start(Silent());
  const auto handles = AllocTensors(1);
  std::atomic<bool> ended = false;
  std::thread thread([&] {
    EXPECT_EQ(slice_tensor_reset(session_, handles.data(), 1, nullptr), SLICE_ERR_CANCELLED);
    EXPECT_EQ(errno, EINTR);
    ended = true;
  });
  while (!ended) {
    ::pthread_kill(thread.native_handle(), SIGUSR1);
    std::this_thread::yield();
  }
  thread.join();
  daemon_->Settle();
  daemon_->Complete({FakeDaemon::Completion(daemon_->taken().at(0).slot.cookie)});
  EXPECT_EQ(slice_wait(session_, 0, 0, nullptr), SLICE_ERR_TIMEOUT);  // drained, nothing unclaimed
}

}  // namespace
}  // namespace slice::testing
