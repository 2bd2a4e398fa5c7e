#include "daemon/server/tenant_ring.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

namespace slice::server {
namespace {

class TenantRingTest : public ::testing::Test {
 protected:
  TenantRingTest() {
    memfd = CreateMemfd("tenant", wire::kTenantRingBytes).value();
    mine = Mapping::Map(memfd, wire::kTenantRingBytes, true).value();
    ring = TenantRing::Create(memfd, &handout).value();
    theirs = Mapping::Map(handout.daemon_ring, wire::kDaemonRingBytes, false).value();
  }
  void SetTail(uint64_t tail) {
    std::atomic_ref(*mine.as<uint64_t>(wire::kSubmitTailOffset)).store(tail);
  }
  void SetConsumed(uint64_t head) {
    std::atomic_ref(*mine.as<uint64_t>(wire::kCompletionHeadOffset)).store(head);
  }
  wire::SubmitSlot* slot(uint64_t i) {
    return mine.as<wire::SubmitSlot>(wire::kSlotsOffset +
                                     i % wire::kRingSlots * sizeof(wire::SubmitSlot));
  }
  bool WakeWaits() const {
    pollfd item{handout.completion_event.get(), POLLIN, 0};
    return ::poll(&item, 1, 0) == 1;
  }
  void CompleteOne() {
    ring->Promise();
    ring->Complete(wire::CompletionSlot{});
    ring->PublishCompleted();
  }

  Fd memfd;
  Mapping mine, theirs;
  TenantRing::Handout handout;
  std::unique_ptr<TenantRing> ring;
  TenantRing::Submission submission;
};

TEST_F(TenantRingTest, Happy_SlotAndArgumentsAreCopied) {
  slot(0)->cookie = 7;
  slot(0)->args_bytes = sizeof(wire::Argument);
  slot(0)->args_offset = 8;
  mine.as<wire::Argument>(wire::kArgumentsOffset + 8)->offset = 99;
  SetTail(1);
  ASSERT_TRUE(*ring->Take(&submission));
  ring->PublishTaken();
  slot(0)->cookie = 8;  // too late
  EXPECT_EQ(submission.slot.cookie, 7u);
  EXPECT_EQ(submission.arguments[0].offset, 99u);
  EXPECT_EQ(std::atomic_ref(*theirs.as<uint64_t>(wire::kSubmitHeadOffset)).load(), 1u);
  EXPECT_FALSE(*ring->Take(&submission));
}

TEST_F(TenantRingTest, Malicious_ImpossibleIndicesAreProtocolErrors) {
  SetTail(wire::kRingSlots + 1);
  EXPECT_EQ(ring->Take(&submission).status().code(), StatusCode::kProtocol);
  SetTail(~uint64_t{0});
  EXPECT_EQ(ring->Take(&submission).status().code(), StatusCode::kProtocol);
  SetTail(1);
  SetConsumed(1);  // nothing was completed
  EXPECT_EQ(ring->Take(&submission).status().code(), StatusCode::kProtocol);
}

TEST_F(TenantRingTest, Malicious_ArgumentsOutsideTheArea) {
  const struct {
    uint32_t offset, bytes;
  } bad[] = {{4, 24},
             {0, 23},
             {wire::kArgumentAreaBytes, 24},
             {0xfffffff8u, 24},
             {0, wire::kArgumentAreaBytes + 24}};
  uint64_t tail = 0;
  for (const auto& item : bad) {
    *slot(tail) = {};
    slot(tail)->args_offset = item.offset;
    slot(tail)->args_bytes = item.bytes;
    SetTail(++tail);
    ASSERT_TRUE(*ring->Take(&submission));
    EXPECT_EQ(submission.status.code(), StatusCode::kProtocol) << item.offset << " " << item.bytes;
    EXPECT_TRUE(submission.arguments.empty());
  }
  *slot(tail) = {};
  slot(tail)->reserved[15] = 1;
  SetTail(++tail);
  ASSERT_TRUE(*ring->Take(&submission));
  EXPECT_EQ(submission.status.code(), StatusCode::kProtocol);
}

TEST_F(TenantRingTest, Edge_NoSlotIsTakenWhoseCompletionMightNotFit) {
  for (uint32_t i = 0; i < wire::kRingSlots; ++i) {
    SetTail(i + 1);
    ASSERT_TRUE(*ring->Take(&submission));
    ring->Promise();
    ring->Complete(wire::CompletionSlot{});
  }
  ring->PublishCompleted();
  SetTail(wire::kRingSlots + 1);
  EXPECT_FALSE(*ring->Take(&submission));
  EXPECT_TRUE(ring->throttled());
  EXPECT_FALSE(ring->HasSubmissions()) << "none that can be taken";
  SetConsumed(1);
  EXPECT_TRUE(ring->HasSubmissions());
  EXPECT_TRUE(*ring->Take(&submission));
  EXPECT_FALSE(ring->throttled());
}

TEST_F(TenantRingTest, Happy_WakeUpsCoalesce) {
  EXPECT_FALSE(WakeWaits());
  CompleteOne();
  CompleteOne();
  EXPECT_TRUE(WakeWaits());
  ClearEventFd(handout.completion_event);
  EXPECT_FALSE(WakeWaits());
  CompleteOne();
  EXPECT_TRUE(WakeWaits());
}

TEST_F(TenantRingTest, Malicious_TenantThatFillsItsWakeUpsCannotBlockTheDaemon) {
  const int flags = ::fcntl(handout.completion_event.get(), F_GETFL);
  ASSERT_EQ(::fcntl(handout.completion_event.get(), F_SETFL, flags & ~O_NONBLOCK), 0);
  for (int i = 0; i < 100; ++i) CompleteOne();  // never reads one
  EXPECT_TRUE(WakeWaits());
}

TEST_F(TenantRingTest, Malicious_DaemonRingCannotBeWritten) {
  EXPECT_FALSE(Mapping::Map(handout.daemon_ring, wire::kDaemonRingBytes, true).ok());
  EXPECT_NE(::mprotect(theirs.data(), wire::kDaemonRingBytes, PROT_READ | PROT_WRITE), 0);
  const uint64_t value = 1;
  EXPECT_EQ(::pwrite(handout.daemon_ring.get(), &value, sizeof value, 0), -1);
  EXPECT_NE(::ftruncate(handout.daemon_ring.get(), 0), 0);
}

}  // namespace
}  // namespace slice::server
