#include "daemon/gmg/ledger.h"

#include <gtest/gtest.h>

namespace slice::gmg {
namespace {

Ledger Make() {
  const DomainLimits limits[] = {{1000, 500}, {2000, 600}};
  const DomainIndex domains[] = {0, 0, 1};
  return Ledger(limits, domains);
}

TEST(Ledger, Happy_free_is_what_is_left_by_all_kinds) {
  Ledger ledger = Make();
  ledger.SetLane(0, 100);
  ledger.SetLane(1, 50);
  ledger.Charge({1}, MemoryKind::kReservation, 0, 300);
  ledger.Charge({2}, MemoryKind::kGrant, 0, 200);
  ledger.Charge({1}, MemoryKind::kManaged, 0, 400);
  EXPECT_EQ(ledger.pool_free(0), 350);
  EXPECT_EQ(ledger.retained_free(0), 100);
  EXPECT_EQ(ledger.pool_free(1), 2000);
  EXPECT_EQ(ledger.LaneRaise(0, 160), 60);
  EXPECT_EQ(ledger.LaneRaise(0, 80), 0);
  EXPECT_EQ(ledger.pool_used({1}), 300);
  EXPECT_EQ(ledger.retained_used({1}), 400);
  EXPECT_EQ(ledger.Holders(0, true),
            "session 1: 300 reservations; session 2: 200 grants; 150 workspace lanes");
  EXPECT_EQ(ledger.Holders(0, false), "session 1: 400 managed");
  EXPECT_EQ(ledger.Holders(1, true), "nobody");
  ledger.Release({1}, MemoryKind::kReservation, 0, 300);
  ledger.Release({2}, MemoryKind::kGrant, 0, 200);
  ledger.Release({1}, MemoryKind::kManaged, 0, 400);
  EXPECT_TRUE(ledger.Empty());
  ledger.DropTenant({1});
  ledger.DropTenant({2});
}

TEST(LedgerDeathTest, Edge_more_than_is_free_or_was_charged_is_a_bug_of_ours) {
  Ledger ledger = Make();
  EXPECT_DEATH(ledger.Charge({1}, MemoryKind::kGrant, 0, 1001), "free");
  EXPECT_DEATH(ledger.Charge({1}, MemoryKind::kManaged, 0, 501), "free");
  ledger.Charge({1}, MemoryKind::kGrant, 0, 10);
  EXPECT_DEATH(ledger.Release({1}, MemoryKind::kGrant, 0, 11), "released");
  EXPECT_DEATH(ledger.DropTenant({1}), "holds");
  EXPECT_DEATH(ledger.SetLane(0, 991), "lane");
}

}  // namespace
}  // namespace slice::gmg
