#include "daemon/gmg/access_queue.h"

#include <gtest/gtest.h>

namespace slice::gmg {
namespace {

constexpr auto kI = AccessEntry::Kind::kInstance;
constexpr auto kC = AccessEntry::Kind::kCommand;
constexpr auto kM = AccessEntry::Kind::kMove;

AccessEntry Entry(AccessEntry::Kind kind, uint32_t owner, bool write, uint16_t uses = 1) {
  AccessEntry entry;
  entry.kind = kind;
  entry.write = write;
  entry.owner = owner;
  entry.uses_left = uses;
  return entry;
}

TEST(AccessQueue, Happy_reads_share_writes_wait_for_all_before) {
  AccessQueue queue;
  queue.Append(Entry(kI, 1, false));
  queue.Append(Entry(kI, 2, false));
  queue.Append(Entry(kI, 3, true));
  queue.Append(Entry(kI, 4, false));
  EXPECT_TRUE(queue.MayRead(kI, 1));
  EXPECT_TRUE(queue.MayRead(kI, 2));
  EXPECT_FALSE(queue.MayWrite(kI, 3));
  EXPECT_FALSE(queue.MayRead(kI, 4)) << "behind a write";
  queue.UseDone(kI, 2);
  EXPECT_FALSE(queue.MayWrite(kI, 3));
  queue.UseDone(kI, 1);
  EXPECT_TRUE(queue.MayWrite(kI, 3));
  queue.UseDone(kI, 3);
  EXPECT_TRUE(queue.MayRead(kI, 4));
  EXPECT_FALSE(queue.MayRead(kI, 99)) << "no entry";
}

TEST(AccessQueue, Happy_several_uses_hold_the_entry) {
  AccessQueue queue;
  queue.Append(Entry(kI, 1, true, 2));
  queue.Append(Entry(kC, 1, true));
  queue.UseDone(kI, 1);
  EXPECT_FALSE(queue.MayWrite(kC, 1)) << "kinds have numbers of their own";
  queue.UseDone(kI, 1);
  EXPECT_TRUE(queue.MayWrite(kC, 1));
}

TEST(AccessQueue, Happy_a_move_goes_before_its_asker_and_blocks_the_rest) {
  AccessQueue queue;
  queue.Append(Entry(kI, 1, false));
  queue.Append(Entry(kI, 2, false));
  queue.InsertBefore(kI, 1, Entry(kM, 7, true));
  EXPECT_FALSE(queue.MayRead(kI, 1));
  EXPECT_FALSE(queue.MayRead(kI, 2));
  queue.Remove(kM, 7);
  EXPECT_TRUE(queue.MayRead(kI, 1));
  EXPECT_TRUE(queue.MayRead(kI, 2));
}

TEST(AccessQueue, Edge_lost_at_the_tail_unless_a_reset_is_queued) {
  AccessQueue queue;
  EXPECT_TRUE(queue.LostAtTail(true));
  EXPECT_FALSE(queue.LostAtTail(false));
  AccessEntry reset = Entry(kC, 1, true);
  reset.resets = true;
  queue.Append(reset);
  EXPECT_FALSE(queue.LostAtTail(true));
  queue.Remove(kC, 1);
  EXPECT_TRUE(queue.LostAtTail(true));
}

TEST(AccessQueue, Edge_restore_counts_all_uses_again) {
  AccessQueue queue;
  queue.Append(Entry(kI, 1, false, 2));
  queue.Append(Entry(kI, 2, true));
  queue.UseDone(kI, 1);
  queue.Restore(kI, 1, 2, false);
  queue.UseDone(kI, 1);
  EXPECT_TRUE(queue.Contains(kI, 1));
  queue.UseDone(kI, 1);
  EXPECT_FALSE(queue.Contains(kI, 1));
  queue.Restore(kI, 1, 1, false);
  EXPECT_TRUE(queue.IsFirst(kI, 1)) << "back in front of those that came after it";
  EXPECT_FALSE(queue.MayWrite(kI, 2));
}

}  // namespace
}  // namespace slice::gmg
