// The GMG allocates nothing once it is warm: a binary of its own, because it counts every call of
// operator new. Binding, filling, all transitions, queues, ledger, freeing, at full load.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>

#include "daemon/gmg/access_queue.h"
#include "daemon/gmg/gmg.h"
#include "daemon/gmg/ledger.h"
#include "tests/testing/graph_builder.h"

namespace {
std::atomic<uint64_t> allocations{0};
void* Allocate(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* const memory = std::malloc(std::max<size_t>(bytes, 1));
  if (memory == nullptr) std::abort();
  return memory;
}
}  // namespace
void* operator new(size_t bytes) { return Allocate(bytes); }
void* operator new[](size_t bytes) { return Allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace slice::gmg {
namespace {

constexpr uint32_t kLayers = 32, kOps = kLayers + 2;

class Load {
 public:
  explicit Load(uint32_t live_ops)
      : graph_(testing::SymbolicLlama(kLayers, 4096, 4096)),
        capacity_(Capacity::For(2, 2, live_ops)),
        memory_(static_cast<std::byte*>(std::aligned_alloc(4096, Gmg::Bytes(capacity_))),
                std::free),
        ledger_(std::array<DomainLimits, 2>{{{int64_t{1} << 40, 1}, {int64_t{1} << 40, 1}}},
                std::array<DomainIndex, 2>{0, 1}),
        random_(5) {
    std::fill_n(memory_.get(), Gmg::Bytes(capacity_), std::byte{});
    gmg_ = std::make_unique<Gmg>(std::span(memory_.get(), Gmg::Bytes(capacity_)), capacity_, 1, 1);
  }
  // One more instance, with its entries in the queues of its pieces and its reservation.
  bool Add() {
    tokens_ = 1 + (tokens_ * 31 + 7) % 4096;
    EXPECT_TRUE(graph_->Bind({&tokens_, 1}, &sizes_).ok());
    const uint32_t slot = gmg_->AddInstance(*graph_, sizes_);
    if (slot == RangeAllocator::kNone) return false;
    gmg_->CloseWrites();
    AccessEntry entry;
    entry.owner = slot;
    entry.write = true;
    for (AccessQueue& queue : queues_) queue.Append(entry);
    ledger_.Charge({1}, MemoryKind::kReservation, slot % 2, sizes_.crossing_bytes(0));
    live_.push_back({slot, sizes_.crossing_bytes(0)});
    return true;
  }
  // A random one runs to its end and is freed.
  void Remove() {
    std::swap(live_[random_() % live_.size()], live_.back());
    const auto [slot, bytes] = live_.back();
    live_.pop_back();
    for (const OpState to :
         {OpState::kPlaced, OpState::kIssued, OpState::kLaunched, OpState::kDone}) {
      for (uint32_t op = 0; op < kOps; ++op) gmg_->SetOpState(slot, *graph_, op, to);
    }
    for (AccessQueue& queue : queues_) queue.UseDone(AccessEntry::Kind::kInstance, slot);
    ledger_.Release({1}, MemoryKind::kReservation, slot % 2, bytes);
    gmg_->FreeInstance(slot);
    gmg_->CloseWrites();
  }
  size_t live() const { return live_.size(); }
  Gmg& gmg() { return *gmg_; }

 private:
  std::shared_ptr<const graph::Template> graph_;
  Capacity capacity_;
  std::unique_ptr<std::byte, void (*)(void*)> memory_;
  std::unique_ptr<Gmg> gmg_;
  Ledger ledger_;
  std::array<AccessQueue, 8> queues_;
  graph::BoundSizes sizes_;
  struct Live {
    uint32_t slot;
    int64_t bytes;
  };
  std::vector<Live> live_;
  std::mt19937_64 random_;
  int64_t tokens_ = 1;
};

TEST(GmgAllocation, Happy_100000_live_ops_and_none_after_warm_up) {
  Load load(100'000);
  while (load.Add()) {
  }
  EXPECT_GE(load.gmg().ops_live(), 100'000u - kOps);
  // Warm: at full load, then with as many holes as there can be.
  const size_t all = load.live();
  for (int round = 0; round < 2; ++round) {
    while (load.live() > all / 3) load.Remove();
    while (load.Add()) {
    }
  }
  const uint64_t before = allocations.load();
  for (int i = 0; i < 20'000; ++i) {
    load.Remove();
    if (i % 100 == 99) {
      for (int n = 0; n < 100; ++n) ASSERT_TRUE(load.Add());
    }
  }
  EXPECT_EQ(allocations.load() - before, 0u);
}

}  // namespace
}  // namespace slice::gmg
