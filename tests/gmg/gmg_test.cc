// The GMG's store: the table of state transitions, frontiers kept incrementally, slabs that are
// given back.
#include "daemon/gmg/gmg.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "tests/testing/graph_builder.h"

namespace slice::gmg {
namespace {

struct Store {
  explicit Store(uint32_t live_ops = 256) {
    const Capacity capacity = Capacity::For(1, 1, live_ops);
    memory.resize(Gmg::Bytes(capacity) + 64);
    const size_t shift = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    gmg = std::make_unique<Gmg>(std::span(memory).subspan(shift), capacity, 1, 1);
  }
  std::vector<std::byte> memory;
  std::unique_ptr<Gmg> gmg;
};

TEST(GmgStates, Happy_table_of_legal_transitions) {
  using S = OpState;
  const S states[] = {S::kUnscheduled, S::kPlaced, S::kIssued,   S::kLaunched,
                      S::kDone,        S::kFailed, S::kCancelled};
  //                       un pl is la do fa ca
  const bool kLegal[7][7] = {{0, 1, 0, 0, 0, 0, 1},   // unscheduled
                             {1, 0, 1, 0, 0, 0, 1},   // placed
                             {0, 1, 0, 1, 0, 1, 1},   // issued
                             {0, 0, 0, 0, 1, 1, 1},   // launched
                             {0, 0, 0, 0, 0, 0, 0},   // done
                             {0, 0, 0, 0, 0, 0, 0},   // failed
                             {0, 0, 0, 0, 0, 0, 0}};  // cancelled
  for (size_t from = 0; from < kOpStateCount; ++from) {
    for (size_t to = 0; to < kOpStateCount; ++to)
      EXPECT_EQ(IsLegal(states[from], states[to]), kLegal[from][to]) << from << " " << to;
  }
}

TEST(GmgStatesDeathTest, Edge_illegal_transition_is_a_bug_of_ours) {
  Store store;
  const auto graph = testing::Chain(2, 1000, 256);
  graph::BoundSizes sizes;
  ASSERT_TRUE(graph->Bind({}, &sizes).ok());
  const uint32_t slot = store.gmg->AddInstance(*graph, sizes);
  EXPECT_DEATH(store.gmg->SetOpState(slot, *graph, 0, OpState::kIssued), "transition");
  EXPECT_DEATH(store.gmg->SetOpState(slot, *graph, 1, OpState::kPlaced), "predecessors");
}

// Frontiers by their definition, to compare with the counts.
void CheckFrontiers(Gmg& gmg, uint32_t slot, const graph::Template& graph) {
  uint32_t unscheduled = 0, scheduled = 0;
  const OpRecord* const ops = gmg.ops(slot);
  for (uint32_t op = 0; op < graph.groups().size(); ++op) {
    uint32_t unplaced = 0, pending = 0, left = 0;
    for (const uint32_t p : graph.groups()[op].predecessors) {
      unplaced += !IsPlacedOrLater(ops[p].state);
      pending += ops[p].state != OpState::kDone;
    }
    for (const uint32_t s : graph.groups()[op].successors)
      left += ops[s].state == OpState::kUnscheduled;
    ASSERT_EQ(ops[op].unplaced, unplaced);
    ASSERT_EQ(ops[op].pending, pending);
    ASSERT_EQ(ops[op].successors_unscheduled, left);
    unscheduled += ops[op].state == OpState::kUnscheduled && unplaced == 0;
    scheduled += IsPlacedOrLater(ops[op].state) && left > 0;
  }
  ASSERT_EQ(gmg.instance(slot).frontier_unscheduled, unscheduled);
  ASSERT_EQ(gmg.instance(slot).frontier_scheduled, scheduled);
}

TEST(GmgStates, Happy_frontiers_match_their_definition_in_random_walks) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    std::mt19937_64 random(seed);
    const auto graph = testing::RandomDag(&random, 12, 4096, 1000);
    Store store;
    graph::BoundSizes sizes;
    ASSERT_TRUE(graph->Bind({}, &sizes).ok());
    const uint32_t slot = store.gmg->AddInstance(*graph, sizes);
    for (int step = 0; step < 400; ++step) {
      const auto op = static_cast<uint32_t>(random() % 12);
      const OpRecord& record = store.gmg->ops(slot)[op];
      const auto to = static_cast<OpState>(random() % (step < 300 ? 5 : kOpStateCount));
      if (!IsLegal(record.state, to)) continue;
      if (to == OpState::kPlaced && record.unplaced > 0) continue;  // never before its predecessors
      if (to == OpState::kLaunched && record.pending > 0) continue;
      if (to == OpState::kUnscheduled) {
        bool held = false;
        for (const uint32_t s : graph->groups()[op].successors)
          held |= store.gmg->ops(slot)[s].state != OpState::kUnscheduled;
        if (held) continue;
      }
      store.gmg->SetOpState(slot, *graph, op, to);
      CheckFrontiers(*store.gmg, slot, *graph);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(GmgSlabs, Edge_full_slab_refuses_and_freed_ranges_merge) {
  Store store(32);
  const auto graph = testing::Chain(10, 1000, 256);
  graph::BoundSizes sizes;
  ASSERT_TRUE(graph->Bind({}, &sizes).ok());
  std::vector<uint32_t> slots;
  for (;;) {
    const uint32_t slot = store.gmg->AddInstance(*graph, sizes);
    if (slot == RangeAllocator::kNone) break;
    slots.push_back(slot);
  }
  EXPECT_EQ(slots.size(), 3u);
  EXPECT_EQ(store.gmg->ops_free(), 2u);
  store.gmg->FreeInstance(slots[0]);
  store.gmg->FreeInstance(slots[2]);
  store.gmg->FreeInstance(slots[1]);
  EXPECT_EQ(store.gmg->ops_free(), 32u);
  const auto large = testing::Chain(32, 1000, 256);
  ASSERT_TRUE(large->Bind({}, &sizes).ok());
  EXPECT_NE(store.gmg->AddInstance(*large, sizes), RangeAllocator::kNone) << "one range again";
}

TEST(GmgSlabs, Happy_ranges_never_overlap_in_random_use) {
  std::mt19937_64 random(7);
  RangeAllocator allocator(1000);
  std::vector<std::pair<uint32_t, uint32_t>> held;
  std::vector<int> owner(1000, 0);
  for (int step = 0; step < 20'000; ++step) {
    if (random() % 2 == 0) {
      const auto count = static_cast<uint32_t>(1 + random() % 60);
      const uint32_t begin = allocator.Allocate(count);
      if (begin == RangeAllocator::kNone) continue;
      for (uint32_t i = 0; i < count; ++i) ASSERT_EQ(owner[begin + i]++, 0);
      held.emplace_back(begin, count);
    } else if (!held.empty()) {
      const size_t i = random() % held.size();
      for (uint32_t k = 0; k < held[i].second; ++k) --owner[held[i].first + k];
      allocator.Free(held[i].first, held[i].second);
      held[i] = held.back();
      held.pop_back();
    }
  }
  for (const auto& [begin, count] : held) allocator.Free(begin, count);
  EXPECT_EQ(allocator.free_count(), 1000u);
  EXPECT_EQ(allocator.Allocate(1000), 0u);
}

}  // namespace
}  // namespace slice::gmg
