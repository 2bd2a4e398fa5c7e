#include "daemon/server/handle_table.h"

#include <gtest/gtest.h>

namespace slice::server {
namespace {

TEST(HandleTableTest, Happy_FindsWhatWasInserted) {
  HandleTable<int> table;
  const uint64_t a = table.Insert(1), b = table.Insert(2);
  EXPECT_NE(a, b);
  EXPECT_EQ(*table.Find(a), 1);
  EXPECT_EQ(*table.Find(b), 2);
  EXPECT_EQ(table.size(), 2u);
}

TEST(HandleTableTest, Edge_StaleHandleNeverMatchesReusedSlot) {
  HandleTable<int> table;
  const uint64_t old = table.Insert(1);
  EXPECT_TRUE(table.Erase(old));
  EXPECT_FALSE(table.Erase(old));
  const uint64_t fresh = table.Insert(2);
  EXPECT_EQ(fresh & 0xffffffff, old & 0xffffffff);
  EXPECT_EQ(table.Find(old), nullptr);
  EXPECT_EQ(*table.Find(fresh), 2);
}

TEST(HandleTableTest, Malicious_ForgedHandlesFindNothing) {
  HandleTable<int> table;
  const uint64_t handle = table.Insert(1);
  for (const uint64_t forged :
       {uint64_t{0}, handle + 1, handle ^ (uint64_t{1} << 32), ~uint64_t{0}, uint64_t{1} << 63}) {
    EXPECT_EQ(table.Find(forged), nullptr) << forged;
  }
}

}  // namespace
}  // namespace slice::server
