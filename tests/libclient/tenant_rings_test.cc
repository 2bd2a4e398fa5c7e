#include "libclient/tenant_rings.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

namespace slice::client {
namespace {

using wire::Argument;
using wire::CompletionSlot;
using wire::kRingSlots;
using wire::SubmitSlot;

class TenantRingsTest : public ::testing::Test {
 protected:
  TenantRingsTest() : submit_(tenant(), daemon()), completion_(tenant(), daemon()) {}

  std::byte* tenant() { return reinterpret_cast<std::byte*>(tenant_.data()); }
  std::byte* daemon() { return reinterpret_cast<std::byte*>(daemon_.data()); }
  std::atomic_ref<uint64_t> At(std::byte* memory, size_t offset) {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(memory + offset));
  }
  SubmitSlot Slot(uint64_t index) {
    SubmitSlot slot;
    std::memcpy(&slot, tenant() + wire::kSlotsOffset + index % kRingSlots * sizeof slot,
                sizeof slot);
    return slot;
  }
  uint64_t Tail() { return At(tenant(), wire::kSubmitTailOffset).load(std::memory_order_acquire); }
  void SetHead(uint64_t head) {
    At(daemon(), wire::kSubmitHeadOffset).store(head, std::memory_order_release);
  }
  Status Push(uint64_t cookie, size_t argument_count = 0) {
    SubmitSlot slot{};
    slot.cookie = cookie;
    std::vector<Argument> arguments(argument_count, Argument{cookie, cookie + 1, cookie + 2});
    return submit_.Push(slot, arguments);
  }
  // The daemon's side: takes the next slot, checks its arguments.
  void TakeAndCheck(uint64_t index) {
    const SubmitSlot slot = Slot(index);
    ASSERT_LE(slot.args_offset + slot.args_bytes, wire::kArgumentAreaBytes);
    ASSERT_EQ(slot.args_offset % 8, 0u);
    for (uint32_t at = 0; at < slot.args_bytes; at += sizeof(Argument)) {
      Argument argument;
      std::memcpy(&argument, tenant() + wire::kArgumentsOffset + slot.args_offset + at,
                  sizeof argument);
      ASSERT_EQ(argument.handle, slot.cookie);
      ASSERT_EQ(argument.bytes, slot.cookie + 2);
    }
    SetHead(index + 1);
  }

  std::vector<uint64_t> tenant_ = std::vector<uint64_t>(wire::kTenantRingBytes / 8);
  std::vector<uint64_t> daemon_ = std::vector<uint64_t>(wire::kDaemonRingBytes / 8);
  SubmitRing submit_;
  CompletionRing completion_;
};

TEST_F(TenantRingsTest, Happy_SlotAndArgumentsArriveAsWritten) {
  EXPECT_FALSE(submit_.SlotsWait());
  ASSERT_TRUE(Push(5, 3).ok());
  EXPECT_TRUE(submit_.SlotsWait());
  EXPECT_EQ(Tail(), 1u);
  EXPECT_EQ(Slot(0).cookie, 5u);
  EXPECT_EQ(Slot(0).args_bytes, 3 * sizeof(Argument));
  TakeAndCheck(0);
  EXPECT_FALSE(submit_.SlotsWait());
}

TEST_F(TenantRingsTest, Edge_FullRingWouldBlockUntilTheDaemonTakes) {
  for (uint64_t i = 0; i < kRingSlots; ++i) ASSERT_TRUE(Push(i).ok());
  EXPECT_EQ(Push(999).code(), StatusCode::kWouldBlock);
  EXPECT_EQ(Tail(), kRingSlots);
  EXPECT_TRUE(submit_.SlotsWait());
  SetHead(1);
  EXPECT_TRUE(Push(1000).ok());
  EXPECT_EQ(Push(1001).code(), StatusCode::kWouldBlock);
}

TEST_F(TenantRingsTest, Edge_SlotsAndArgumentsWrapManyTimes) {
  uint64_t pushed = 0;
  uint64_t taken = 0;
  while (pushed < 5000) {
    const Status status = Push(pushed, pushed * 7 % 900);  // up to 21 KiB each
    if (status.ok()) {
      ++pushed;
    } else {
      ASSERT_EQ(status.code(), StatusCode::kWouldBlock);
      ASSERT_LT(taken, pushed);
      ASSERT_NO_FATAL_FAILURE(TakeAndCheck(taken++));
    }
  }
  while (taken < pushed) ASSERT_NO_FATAL_FAILURE(TakeAndCheck(taken++));
}

TEST_F(TenantRingsTest, Edge_ArgumentsOfTheWholeAreaFitAnEmptyRing) {
  const size_t most = wire::kArgumentAreaBytes / sizeof(Argument);
  ASSERT_TRUE(Push(1, 10).ok());
  EXPECT_EQ(Push(2, most).code(), StatusCode::kWouldBlock);
  TakeAndCheck(0);
  ASSERT_TRUE(Push(3, most).ok());  // not at the area's beginning any more: skips to it
  EXPECT_EQ(Slot(1).args_offset, 0u);
  EXPECT_EQ(Push(4, 1).code(), StatusCode::kWouldBlock);
  TakeAndCheck(1);
  EXPECT_TRUE(Push(5, most).ok());
}

TEST_F(TenantRingsTest, Edge_ArgumentsLargerThanTheAreaAreInvalid) {
  EXPECT_EQ(Push(1, wire::kArgumentAreaBytes / sizeof(Argument) + 1).code(), StatusCode::kInvalid);
  EXPECT_EQ(Tail(), 0u);
}

TEST_F(TenantRingsTest, Malicious_ImpossibleSubmitHeadIsProtocol) {
  ASSERT_TRUE(Push(1).ok());
  SetHead(2);
  EXPECT_EQ(Push(2).code(), StatusCode::kProtocol);
  SetHead(1);
  ASSERT_TRUE(Push(3).ok());
  SetHead(0);  // backwards
  EXPECT_EQ(Push(4).code(), StatusCode::kProtocol);
}

TEST_F(TenantRingsTest, Malicious_ImpossibleCompletionTailIsProtocol) {
  CompletionSlot slot;
  EXPECT_FALSE(completion_.Pop(&slot).value());
  At(daemon(), wire::kCompletionTailOffset).store(kRingSlots + 1);
  EXPECT_EQ(completion_.Pop(&slot).status().code(), StatusCode::kProtocol);
  At(daemon(), wire::kCompletionTailOffset).store(UINT64_MAX);
  EXPECT_EQ(completion_.Pop(&slot).status().code(), StatusCode::kProtocol);
}

TEST_F(TenantRingsTest, Happy_DaemonSleepingIsSeen) {
  EXPECT_FALSE(submit_.DaemonSleeps());
  std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(daemon() + wire::kDaemonSleepingOffset))
      .store(1);
  EXPECT_TRUE(submit_.DaemonSleeps());
}

TEST_F(TenantRingsTest, Race_SubmitsAndCompletionsCrossTwoThreads) {
  constexpr uint64_t kCount = 20'000;
  std::thread daemon_thread([this] {  // echoes each slot as a completion
    for (uint64_t index = 0; index < kCount;) {
      if (index == Tail()) {
        std::this_thread::yield();
        continue;
      }
      const uint64_t consumed =
          At(tenant(), wire::kCompletionHeadOffset).load(std::memory_order_acquire);
      if (index - consumed >= kRingSlots) {
        std::this_thread::yield();
        continue;
      }
      CompletionSlot slot{};
      slot.cookie = Slot(index).cookie;
      std::memcpy(daemon() + wire::kSlotsOffset + index % kRingSlots * sizeof slot, &slot,
                  sizeof slot);
      ASSERT_NO_FATAL_FAILURE(TakeAndCheck(index));
      ++index;
      At(daemon(), wire::kCompletionTailOffset).store(index, std::memory_order_release);
    }
  });
  uint64_t pushed = 0;
  uint64_t completed = 0;
  while (completed < kCount) {
    const bool progress = pushed < kCount && Push(pushed, pushed % 50).ok();
    if (progress) ++pushed;
    CompletionSlot slot;
    while (completion_.Pop(&slot).value()) {
      ASSERT_EQ(slot.cookie, completed);
      ++completed;
    }
    completion_.Publish();
    if (!progress) std::this_thread::yield();
  }
  daemon_thread.join();
}

}  // namespace
}  // namespace slice::client
