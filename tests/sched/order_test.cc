#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "daemon/sched/policy.h"

namespace slice::sched {
namespace {

constexpr TimeNs kNow = 10 * kSecond;

class OrderTest : public ::testing::Test {
 protected:
  std::unique_ptr<Policy> Make(const char* name) {
    Result<std::unique_ptr<Policy>> policy = MakePolicy(name, &simulator_);
    return policy.ok() ? std::move(policy).value() : nullptr;
  }
  // Creation numbers in the order in which the policy takes the items.
  std::vector<uint64_t> Order(const char* name, std::vector<WorkItem> items, TimeNs now = kNow) {
    const std::unique_ptr<Policy> policy = Make(name);
    std::vector<OrderKey> keys;
    for (const WorkItem& item : items) keys.push_back(policy->Key(item, now));
    std::sort(keys.begin(), keys.end(), Less);
    std::vector<uint64_t> order;
    for (const OrderKey& key : keys) order.push_back(key.creation);
    return order;
  }
  static WorkItem Item(uint64_t creation, ServiceClass service_class, TimeNs deadline = kNever,
                       DurationNs work = 10 * kMillisecond) {
    WorkItem item;
    item.creation = creation;
    item.service_class = service_class;
    item.deadline = deadline;
    item.work_left = work;
    item.arrival = kNow - 1000;
    return item;
  }
  estimate::TransferEstimator transfers_{1};
  sim::Simulator simulator_{transfers_, {}};
};

constexpr ServiceClass kOnline = ServiceClass::kOnline, kOffline = ServiceClass::kOffline;

TEST_F(OrderTest, Happy_ClassBeforePriorityBeforeDeadline) {
  WorkItem urgent_offline = Item(1, kOffline, kNow + kMillisecond);
  urgent_offline.priority = 9;
  WorkItem high = Item(2, kOnline);
  high.priority = 1;
  const WorkItem soon = Item(3, kOnline, kNow + 20 * kMillisecond);
  EXPECT_EQ(Order("slice", {urgent_offline, soon, high}), (std::vector<uint64_t>{2, 3, 1}));
}

TEST_F(OrderTest, Happy_FeasibleBeforeLateThenLeastSlack) {
  const WorkItem late = Item(1, kOnline, kNow + 5 * kMillisecond);  // 10 ms of work
  const WorkItem loose = Item(2, kOnline, kNow + 90 * kMillisecond);
  const WorkItem tight = Item(3, kOnline, kNow + 15 * kMillisecond);
  const WorkItem none = Item(4, kOnline);
  const WorkItem offline = Item(5, kOffline);
  EXPECT_EQ(Order("slice", {late, loose, tight, none, offline}),
            (std::vector<uint64_t>{3, 2, 4, 1, 5}));
}

TEST_F(OrderTest, Happy_SameMillisecondOfSlackIsArrivalOrder) {
  WorkItem first = Item(2, kOnline, kNow + 20 * kMillisecond + 900'000);
  WorkItem second = Item(1, kOnline, kNow + 20 * kMillisecond + 100'000);
  first.arrival = kNow - 2'000;
  EXPECT_EQ(Order("slice", {second, first}), (std::vector<uint64_t>{2, 1}));
}

TEST_F(OrderTest, Edge_KeysOfDifferentTimesCompareWhileBothAreFeasible) {
  const std::unique_ptr<Policy> policy = Make("slice");
  const WorkItem tight = Item(1, kOnline, kNow + 50 * kMillisecond);
  const WorkItem loose = Item(2, kOnline, kNow + 60 * kMillisecond);
  EXPECT_TRUE(Less(policy->Key(tight, kNow), policy->Key(loose, kNow + 30 * kMillisecond)));
  EXPECT_TRUE(Less(policy->Key(tight, kNow + 30 * kMillisecond), policy->Key(loose, kNow)));
}

TEST_F(OrderTest, Edge_NegativeLatestStartIsFloored) {
  EXPECT_EQ(Make("slice")->Key(Item(1, kOnline, 0, 1), 0).slack_bucket, -1);
  EXPECT_EQ(Make("slice")->Key(Item(1, kOnline, 0, kMillisecond), 0).slack_bucket, -1);
}

TEST_F(OrderTest, Happy_FifoIsArrivalAcrossClasses) {
  WorkItem offline = Item(1, kOffline);
  WorkItem online = Item(2, kOnline, kNow + 11 * kMillisecond);
  online.priority = 7;
  offline.arrival = kNow - 5'000;
  EXPECT_EQ(Order("fifo", {online, offline}), (std::vector<uint64_t>{1, 2}));
  online.arrival = offline.arrival;
  EXPECT_EQ(Order("fifo", {online, offline}), (std::vector<uint64_t>{1, 2})) << "then creation";
}

TEST_F(OrderTest, Happy_LessIsAStrictOrder) {
  const std::unique_ptr<Policy> policy = Make("slice");
  std::vector<OrderKey> keys;
  for (uint64_t i = 0; i < 32; ++i) {
    WorkItem item = Item(i, i % 2 == 0 ? kOnline : kOffline,
                         i % 3 == 0 ? kNever : kNow + static_cast<TimeNs>(i) * 700'000);
    item.priority = static_cast<int32_t>(i % 4);
    keys.push_back(policy->Key(item, kNow));
  }
  for (const OrderKey& a : keys) {
    EXPECT_FALSE(Less(a, a));
    for (const OrderKey& b : keys) {
      if (&a == &b) continue;
      EXPECT_NE(Less(a, b), Less(b, a));
      for (const OrderKey& c : keys) {
        EXPECT_TRUE(!Less(a, b) || !Less(b, c) || Less(a, c));
      }
    }
  }
}

TEST_F(OrderTest, Happy_PoliciesSayWhatTheyAre) {
  struct Row {
    const char* name;
    bool admits_offline, slices, classes;
  };
  for (const Row& row : {Row{"slice", true, true, true}, Row{"online-only", false, true, true},
                         Row{"fifo", true, false, false}, Row{"priority", true, false, true}}) {
    const std::unique_ptr<Policy> policy = Make(row.name);
    ASSERT_NE(policy, nullptr) << row.name;
    EXPECT_EQ(policy->name(), row.name);
    EXPECT_TRUE(policy->Admits(kOnline));
    EXPECT_EQ(policy->Admits(kOffline), row.admits_offline) << row.name;
    EXPECT_EQ(policy->RespectsSlices(), row.slices) << row.name;
    EXPECT_EQ(policy->ClassesOrderQueues(), row.classes) << row.name;
  }
}

TEST_F(OrderTest, Edge_UnknownPolicyListsTheNames) {
  const Result<std::unique_ptr<Policy>> policy = MakePolicy("best", &simulator_);
  ASSERT_FALSE(policy.ok());
  EXPECT_EQ(policy.status().code(), StatusCode::kInvalid);
  for (const char* name : {"best", "slice", "fifo", "online-only", "priority"}) {
    EXPECT_NE(policy.status().text().find(name), std::string::npos) << name;
  }
  EXPECT_LT(MakePolicy(std::string(100'000, 'x'), &simulator_).status().text().size(), 300u);
}

}  // namespace
}  // namespace slice::sched
