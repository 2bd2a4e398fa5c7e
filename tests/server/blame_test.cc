#include "daemon/server/blame.h"

#include <gtest/gtest.h>

namespace slice::server {
namespace {

using engine::TenantUser;

constexpr TimeNs kStart = 1000 * kSecond;

class BlameTest : public ::testing::Test {
 protected:
  // The number of the session that must go; 0: none.
  uint32_t Died(const std::vector<TenantUser>& suspects) {
    now += kSecond;
    const auto convicted = blame.Died(suspects, now);
    return convicted.has_value() ? convicted->tenant.value : 0;
  }

  const TenantUser a{TenantId{1}, 1000}, b{TenantId{2}, 1001}, c{TenantId{3}, 1002};
  Blame blame{3};
  TimeNs now = kStart;
};

TEST_F(BlameTest, Happy_TheThirdDeathOfASessionIsTheLastOne) {
  EXPECT_EQ(Died({a}), 0u);
  EXPECT_EQ(Died({b}), 0u);
  EXPECT_EQ(Died({a}), 0u);
  EXPECT_EQ(Died({}), 0u);
  EXPECT_EQ(Died({a}), 1u);
  EXPECT_EQ(Died({b}), 0u);
}

TEST_F(BlameTest, Happy_WhoMerelyRanBesideItIsNotCountedForIt) {
  EXPECT_EQ(Died({a, b}), 0u);
  EXPECT_EQ(Died({b, a}), 0u);
  EXPECT_EQ(Died({a, b}), 1u);  // as often as the other, and likelier
  EXPECT_EQ(Died({b}), 0u);
  EXPECT_EQ(Died({b}), 0u);
  EXPECT_EQ(Died({b}), 2u);
}

TEST_F(BlameTest, Happy_TheOneWithTheMostDeathsGoes) {
  EXPECT_EQ(Died({a, b}), 0u);
  EXPECT_EQ(Died({b, a}), 0u);
  EXPECT_EQ(Died({b, c}), 2u);
  EXPECT_EQ(Died({a}), 0u) << "the second time: what the other explains is forgotten";
}

// Two at once: one goes for each death.
TEST_F(BlameTest, Edge_ConvictingTheWrongOneFirstDoesNotSaveTheOther) {
  EXPECT_EQ(Died({b, a}), 0u);
  EXPECT_EQ(Died({b, a}), 0u);
  EXPECT_EQ(Died({b, a}), 2u);
  EXPECT_EQ(Died({a}), 0u);
  EXPECT_EQ(Died({a}), 0u);
  EXPECT_EQ(Died({a}), 1u);
}

TEST_F(BlameTest, Edge_OldDeathsDoNotCount) {
  EXPECT_EQ(Died({a}), 0u);
  EXPECT_EQ(Died({a}), 0u);
  now += Blame::kWindow;
  EXPECT_EQ(Died({a}), 0u);
  EXPECT_EQ(Died({a}), 0u);
  EXPECT_EQ(Died({a}), 1u);
}

TEST_F(BlameTest, Malicious_AnotherSessionIsNoNewStart) {
  EXPECT_EQ(Died({a}), 0u);
  blame.Ended(a.tenant);
  EXPECT_EQ(Died({{TenantId{7}, a.uid}}), 0u);
  blame.Ended(TenantId{7});
  EXPECT_EQ(Died({b}), 0u) << "another user";
  EXPECT_EQ(Died({{TenantId{8}, a.uid}}), 8u);
}

TEST_F(BlameTest, Edge_SessionsOfAUserThatLiveAreCountedEachByItself) {
  const TenantUser other{TenantId{7}, a.uid};
  EXPECT_EQ(Died({a}), 0u);
  EXPECT_EQ(Died({other}), 0u);
  EXPECT_EQ(Died({a}), 0u);
  EXPECT_EQ(Died({other}), 0u);
  EXPECT_EQ(Died({other}), 7u);
}

TEST_F(BlameTest, Malicious_TheUserWaitsLongerEachTime) {
  Blame strict(1);
  EXPECT_LE(strict.WaitsUntil(a.uid), now);
  for (DurationNs wait = Blame::kWaitMin; wait < Blame::kWaitMax; wait *= 2) {
    ASSERT_TRUE(strict.Died({a}, now).has_value());
    EXPECT_EQ(strict.WaitsUntil(a.uid), now + wait);
    now += wait;
  }
  ASSERT_TRUE(strict.Died({a}, now).has_value());
  EXPECT_EQ(strict.WaitsUntil(a.uid), now + Blame::kWaitMax);
  EXPECT_LE(strict.WaitsUntil(b.uid), now) << "nobody else";
  now += Blame::kWaitMax + Blame::kWindow + 1;
  ASSERT_TRUE(strict.Died({a}, now).has_value());
  EXPECT_EQ(strict.WaitsUntil(a.uid), now + Blame::kWaitMin) << "long ago: a new start";
}

}  // namespace
}  // namespace slice::server
