#include "libclient/arena.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <thread>
#include <vector>

namespace slice::client {
namespace {

TEST(ArenaTest, Happy_RangesAreAlignedAndDisjoint) {
  Arena arena(4096);
  const uint64_t first = arena.Allocate(1).value();
  const uint64_t second = arena.Allocate(65).value();
  const uint64_t third = arena.Allocate(64).value();
  EXPECT_EQ(first % 64, 0u);
  EXPECT_EQ(second, first + 64);
  EXPECT_EQ(third, second + 128);
  EXPECT_EQ(arena.free_bytes(), 4096u - 64 - 128 - 64);
}

TEST(ArenaTest, Happy_FreedNeighboursBecomeOneRange) {
  Arena arena(3 * 64);
  const uint64_t a = arena.Allocate(64).value();
  const uint64_t b = arena.Allocate(64).value();
  const uint64_t c = arena.Allocate(64).value();
  ASSERT_TRUE(arena.Free(a).ok());
  ASSERT_TRUE(arena.Free(c).ok());
  EXPECT_EQ(arena.Allocate(128).status().code(), StatusCode::kNoMemory);  // two holes of 64
  ASSERT_TRUE(arena.Free(b).ok());
  EXPECT_EQ(arena.Allocate(192).value(), 0u);
}

TEST(ArenaTest, Edge_ZeroBytesGetsAPlace) {
  Arena arena(128);
  const uint64_t a = arena.Allocate(0).value();
  const uint64_t b = arena.Allocate(0).value();
  EXPECT_NE(a, b);
  EXPECT_EQ(arena.Allocate(0).status().code(), StatusCode::kNoMemory);
}

TEST(ArenaTest, Edge_FullArenaSaysWhatIsFree) {
  Arena arena(1024);
  ASSERT_TRUE(arena.Allocate(512).ok());
  const Status status = arena.Allocate(513).status();
  EXPECT_EQ(status.code(), StatusCode::kNoMemory);
  EXPECT_NE(status.text().find("513 bytes wanted, 512 of 1024"), std::string::npos)
      << status.text();
}

TEST(ArenaTest, Edge_HugeRequestDoesNotOverflow) {
  Arena arena(1024);
  EXPECT_EQ(arena.Allocate(UINT64_MAX).status().code(), StatusCode::kNoMemory);
  EXPECT_EQ(Arena(63).Allocate(1).status().code(), StatusCode::kNoMemory);
}

TEST(ArenaTest, Edge_DoubleFreeAndForeignOffsetAreInvalid) {
  Arena arena(1024);
  const uint64_t a = arena.Allocate(128).value();
  EXPECT_EQ(arena.Free(a + 64).code(), StatusCode::kInvalid);
  EXPECT_TRUE(arena.Free(a).ok());
  EXPECT_EQ(arena.Free(a).code(), StatusCode::kInvalid);
  EXPECT_EQ(arena.Free(1 << 20).code(), StatusCode::kInvalid);
}

TEST(ArenaTest, Happy_RandomUseNeverOverlapsAndEndsWhole) {
  Arena arena(64 * 1024);
  std::mt19937 random(1);
  std::map<uint64_t, uint64_t> live;
  for (int step = 0; step < 20'000; ++step) {
    if (live.empty() || random() % 2 == 0) {
      const uint64_t bytes = 1 + random() % 3000;
      const Result<uint64_t> offset = arena.Allocate(bytes);
      if (!offset.ok()) continue;
      const auto next = live.lower_bound(*offset);
      if (next != live.end()) {
        ASSERT_LE(*offset + bytes, next->first);
      }
      if (next != live.begin()) {
        const auto previous = std::prev(next);
        ASSERT_LE(previous->first + previous->second, *offset);
      }
      ASSERT_LE(*offset + bytes, arena.bytes());
      live.emplace(*offset, bytes);
    } else {
      const auto victim = std::next(live.begin(), static_cast<long>(random() % live.size()));
      ASSERT_TRUE(arena.Free(victim->first).ok());
      live.erase(victim);
    }
  }
  for (const auto& [offset, bytes] : live) ASSERT_TRUE(arena.Free(offset).ok());
  EXPECT_EQ(arena.Allocate(64 * 1024).value(), 0u);
}

TEST(ArenaTest, Race_ManyThreadsAllocateAndFree) {
  Arena arena(1 << 20);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&arena, t] {
      std::mt19937 random(t);
      for (int step = 0; step < 2000; ++step) {
        const Result<uint64_t> offset = arena.Allocate(1 + random() % 1000);
        if (offset.ok()) {
          EXPECT_TRUE(arena.Free(*offset).ok());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena.free_bytes(), uint64_t{1} << 20);
}

}  // namespace
}  // namespace slice::client
