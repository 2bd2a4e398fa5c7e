#include "daemon/executor/pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <thread>

namespace slice::executor {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
using Refusal = MemoryPool::Refusal;

struct Pool {
  explicit Pool(size_t bytes = 16 * kMiB) : pool(std::move(MemoryPool::Create(bytes)).value()) {
    pool->SetCap(1, 8 * kMiB);
    pool->SetCap(2, 8 * kMiB);
  }
  std::byte* Take(uint32_t tenant, size_t bytes) {
    refusal = Refusal::kNone;
    return static_cast<std::byte*>(pool->Allocate(tenant, bytes, &charged, &refusal));
  }
  std::unique_ptr<MemoryPool> pool;
  size_t charged = 0;
  Refusal refusal = Refusal::kNone;
};

TEST(Happy_Pool, BlocksAreAlignedDisjointAndCharged) {
  Pool p;
  std::vector<std::pair<std::byte*, size_t>> blocks;
  uint64_t total = 0;
  for (const size_t bytes : {1, 64, 65, 5504, 8192, 8193, 70000, 1 << 20}) {
    std::byte* block = p.Take(1, bytes);
    ASSERT_NE(block, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 64, 0u);
    EXPECT_GE(p.charged, bytes);
    EXPECT_LE(p.charged, bytes > 8192 ? bytes : bytes + bytes / 4 + 64);
    std::memset(block, 0xab, bytes);
    total += p.charged;
    for (const auto& [other, size] : blocks)
      EXPECT_TRUE(block + bytes <= other || other + size <= block);
    blocks.emplace_back(block, bytes);
  }
  EXPECT_EQ(p.pool->BytesUsed(1), total);
  for (const auto& [block, size] : blocks) p.pool->Free(block);
  EXPECT_EQ(p.pool->BytesUsed(), 0u);
}

TEST(Happy_Pool, FreedMemoryIsUsedAgain) {
  Pool p;
  std::set<std::byte*> seen;
  for (int i = 0; i < 1000; ++i) {
    for (const size_t bytes : {2048, 100'000}) {
      std::byte* block = p.Take(1, bytes);
      ASSERT_NE(block, nullptr);
      seen.insert(block);
      p.pool->Free(block);
    }
  }
  EXPECT_EQ(seen.size(), 2u);
}

TEST(Edge_Pool, CapIsHard) {
  Pool p;
  std::byte* block = p.Take(1, 8 * kMiB);
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(p.Take(1, 1), nullptr);
  EXPECT_EQ(p.refusal, Refusal::kTenantCap);
  EXPECT_NE(p.Take(2, 1), nullptr);  // the neighbour is not affected
  p.pool->Free(block);
  EXPECT_NE(p.Take(1, 1), nullptr);
}

TEST(Edge_Pool, FullPoolIsTold) {
  Pool p(4 * kMiB);
  EXPECT_EQ(p.Take(1, 5 * kMiB), nullptr);
  EXPECT_EQ(p.refusal, Refusal::kPoolFull);
  EXPECT_EQ(p.Take(9, 64), nullptr);
  EXPECT_EQ(p.refusal, Refusal::kUnknownTenant);
  EXPECT_EQ(p.Take(1, SIZE_MAX), nullptr);
  EXPECT_EQ(p.refusal, Refusal::kTenantCap);
}

TEST(Edge_Pool, CachesAreGivenBackUnderPressure) {
  Pool p(8 * kMiB);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::byte*> blocks;
    const size_t bytes = size_t{64} << (4 * round);  // 64 B, 1 KiB, 16 KiB
    for (;;) {
      std::byte* block = p.Take(1, bytes);
      if (block == nullptr) break;
      blocks.push_back(block);
    }
    EXPECT_GT(blocks.size() * bytes, 7 * kMiB) << bytes;
    for (std::byte* block : blocks) p.pool->Free(block);
  }
  EXPECT_NE(p.Take(2, 7 * kMiB), nullptr);
}

TEST(Malicious_Pool, NothingLeaksFromTenantToTenant) {
  Pool p(4 * kMiB);
  for (const size_t bytes : {512, 40'000, 3 << 20}) {
    std::vector<std::byte*> blocks;
    for (std::byte* block = p.Take(1, bytes); block != nullptr; block = p.Take(1, bytes)) {
      std::memset(block, 0x5a, bytes);
      blocks.push_back(block);
    }
    for (std::byte* block : blocks) p.pool->Free(block);
    blocks.clear();
    for (std::byte* block = p.Take(2, bytes); block != nullptr; block = p.Take(2, bytes)) {
      for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(block[i], std::byte{0}) << bytes << " at " << i;
      blocks.push_back(block);
    }
    ASSERT_FALSE(blocks.empty());
    for (std::byte* block : blocks) p.pool->Free(block);
  }
}

TEST(Edge_Pool, DroppedTenantIsForgottenWhenItsLastBlockGoes) {
  Pool p;
  std::byte* block = p.Take(1, 5000);
  p.pool->DropTenant(1);
  EXPECT_EQ(p.Take(1, 64), nullptr);
  EXPECT_EQ(p.refusal, Refusal::kUnknownTenant);
  EXPECT_GT(p.pool->BytesUsed(), 0u);
  p.pool->Free(block);
  EXPECT_EQ(p.pool->BytesUsed(), 0u);
}

TEST(Race_Pool, BlocksMayBeFreedByAnotherThread) {
  Pool p;
  std::mutex mutex;
  std::vector<std::byte*> handed;
  bool done = false;
  std::thread freer([&] {
    for (;;) {
      std::vector<std::byte*> mine;
      {
        const std::lock_guard lock(mutex);
        mine.swap(handed);
        if (mine.empty() && done) return;
      }
      for (std::byte* block : mine) p.pool->Free(block);
    }
  });
  std::thread other([&] {
    for (int i = 0; i < 5000; ++i) {
      size_t charged = 0;
      Refusal refusal{};
      if (void* block = p.pool->Allocate(2, static_cast<size_t>(i % 9000 + 1), &charged, &refusal))
        p.pool->Free(block);
    }
  });
  std::mt19937 random(1);
  for (int i = 0; i < 5000; ++i) {
    std::byte* block = p.Take(1, random() % 50'000 + 1);
    if (block == nullptr) continue;
    block[0] = std::byte{1};
    const std::lock_guard lock(mutex);
    handed.push_back(block);
  }
  {
    const std::lock_guard lock(mutex);
    done = true;
  }
  freer.join();
  other.join();
  EXPECT_EQ(p.pool->BytesUsed(), 0u);
}

}  // namespace
}  // namespace slice::executor
