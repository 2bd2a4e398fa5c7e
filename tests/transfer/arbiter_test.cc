// The arbiter of transfers: admission by sides, class, age; no deadlock in random traffic.
#include "daemon/transfer/arbiter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace slice::transfer {
namespace {

constexpr ServiceClass kOn = ServiceClass::kOnline, kOff = ServiceClass::kOffline;

std::vector<uint64_t> Admit(Arbiter* arbiter) {
  std::vector<TransferId> admitted;
  arbiter->Admit(&admitted);
  std::vector<uint64_t> ids;
  for (const TransferId id : admitted) ids.push_back(id.value);
  return ids;
}
using Ids = std::vector<uint64_t>;

TEST(Arbiter, Happy_disjoint_transfers_run_together) {
  Arbiter arbiter(4);
  arbiter.Add({1}, 0, 1, kOn);
  arbiter.Add({2}, 2, 3, kOn);
  arbiter.Add({3}, 1, 0, kOn);  // the other way: other sides
  for (const uint64_t id : {1, 2, 3}) EXPECT_TRUE(arbiter.Intent({id}));
  EXPECT_EQ(Admit(&arbiter), (Ids{1, 2, 3}));
}

TEST(Arbiter, Happy_shared_sides_wait_in_order_of_age) {
  Arbiter arbiter(3);
  arbiter.Add({1}, 0, 1, kOn);
  arbiter.Add({2}, 0, 2, kOn);  // same source
  arbiter.Add({3}, 2, 1, kOn);  // same destination
  EXPECT_TRUE(arbiter.Intent({3}));
  EXPECT_TRUE(arbiter.Intent({1}));
  EXPECT_TRUE(arbiter.Intent({2}));
  EXPECT_EQ(Admit(&arbiter), (Ids{3, 2})) << "1 waits for 3's destination, 2 has sides of its own";
  EXPECT_EQ(arbiter.pending(), 1u);
  EXPECT_TRUE(arbiter.Remove({3}));
  EXPECT_EQ(Admit(&arbiter), Ids{}) << "2 still sends from 0";
  EXPECT_TRUE(arbiter.Remove({2}));
  EXPECT_EQ(Admit(&arbiter), Ids{1});
}

TEST(Arbiter, Happy_online_never_waits_for_offline) {
  Arbiter arbiter(2);
  arbiter.Add({1}, 0, 1, kOff);
  arbiter.Add({2}, 0, 1, kOff);
  arbiter.Add({3}, 0, 1, kOn);
  EXPECT_TRUE(arbiter.Intent({1}));
  EXPECT_EQ(Admit(&arbiter), Ids{1});
  EXPECT_TRUE(arbiter.Intent({2}));
  EXPECT_TRUE(arbiter.Intent({3}));
  EXPECT_EQ(Admit(&arbiter), Ids{3}) << "shares the link chunk by chunk; offline 2 waits";
  EXPECT_TRUE(arbiter.Remove({1}));
  EXPECT_EQ(Admit(&arbiter), Ids{}) << "2 waits for the online one too";
  EXPECT_TRUE(arbiter.Remove({3}));
  EXPECT_EQ(Admit(&arbiter), Ids{2});
}

TEST(Arbiter, Edge_repeated_and_unknown_ids_are_ignored) {
  Arbiter arbiter(2);
  EXPECT_FALSE(arbiter.Intent({1}));
  EXPECT_FALSE(arbiter.Remove({1}));
  arbiter.Add({1}, 0, 1, kOn);
  State state{};
  EXPECT_TRUE(arbiter.Find({1}, &state));
  EXPECT_EQ(state, State::kWatching);
  EXPECT_EQ(Admit(&arbiter), Ids{}) << "no intent yet";
  EXPECT_TRUE(arbiter.Intent({1}));
  EXPECT_FALSE(arbiter.Intent({1}));
  EXPECT_EQ(Admit(&arbiter), Ids{1});
  EXPECT_FALSE(arbiter.Intent({1})) << "admitted";
  EXPECT_TRUE(arbiter.Remove({1}));
  EXPECT_FALSE(arbiter.Find({1}, &state));
  EXPECT_EQ(arbiter.size(), 0u);
}

TEST(Arbiter, Happy_random_traffic_never_conflicts_and_never_stops) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    std::mt19937_64 random(seed);
    Arbiter arbiter(5);
    struct T {
      DomainIndex source, destination;
      ServiceClass service_class;
    };
    std::map<uint64_t, T> all, admitted;
    uint64_t next = 1;
    for (int step = 0; step < 2000 || !all.empty(); ++step) {
      ASSERT_LT(step, 100'000) << "traffic stopped";
      if (step < 2000 && random() % 3 == 0) {
        const auto source = static_cast<DomainIndex>(random() % 5);
        const auto destination = static_cast<DomainIndex>((source + 1 + random() % 4) % 5);
        const ServiceClass service_class = random() % 2 == 0 ? kOn : kOff;
        all[next] = {source, destination, service_class};
        arbiter.Add({next}, source, destination, service_class);
        arbiter.Intent({next});
        ++next;
      }
      for (const uint64_t id : Admit(&arbiter)) {
        const T& t = all[id];
        for (const auto& [other_id, other] : admitted) {
          if (other.source != t.source && other.destination != t.destination) continue;
          ASSERT_TRUE(t.service_class == kOn && other.service_class == kOff) << "conflict admitted";
        }
        admitted[id] = t;
      }
      ASSERT_TRUE(all.empty() || !admitted.empty()) << "something waits and nothing runs";
      if (!admitted.empty() && random() % 2 == 0) {
        auto it = admitted.begin();
        std::advance(it, static_cast<ptrdiff_t>(random() % admitted.size()));
        arbiter.Remove({it->first});
        all.erase(it->first);
        admitted.erase(it);
      }
    }
  }
}

}  // namespace
}  // namespace slice::transfer
