#include "daemon/executor/launch_queue.h"

#include <gtest/gtest.h>

namespace slice::executor {
namespace {

QueuedOp Op(uint32_t op, ServiceClass service_class, int32_t priority, uint64_t order) {
  QueuedOp queued;
  queued.key = {1, 1, op};
  queued.service_class = service_class;
  queued.priority = priority;
  queued.order = order;
  queued.ready = true;
  queued.duration_ns = 100;
  return queued;
}

TEST(Happy_LaunchQueue, ClassThenPriorityThenOrder) {
  LaunchQueue queue;
  queue.Add(Op(0, ServiceClass::kOffline, 9, 0));
  queue.Add(Op(1, ServiceClass::kOnline, 0, 5));
  queue.Add(Op(2, ServiceClass::kOnline, 0, 4));
  queue.Add(Op(3, ServiceClass::kOnline, 1, 9));
  std::vector<uint32_t> launched;
  while (auto next = queue.Next(10, false).launch) launched.push_back(next->key.op);
  EXPECT_EQ(launched, (std::vector<uint32_t>{3, 2, 1, 0}));
}

TEST(Happy_LaunchQueue, OpsThatAreNotReadyWait) {
  LaunchQueue queue;
  QueuedOp op = Op(0, ServiceClass::kOnline, 0, 0);
  op.ready = false;
  queue.Add(op);
  queue.Add(Op(1, ServiceClass::kOnline, 0, 1));
  EXPECT_EQ(queue.Next(0, false).launch->key.op, 1u);
  EXPECT_FALSE(queue.Next(0, false).launch.has_value());
  queue.Find({1, 1, 0})->ready = true;
  EXPECT_EQ(queue.Next(0, false).launch->key.op, 0u);
}

TEST(Edge_LaunchQueue, OfflineWaitsForItsWindow) {
  LaunchQueue queue;
  QueuedOp op = Op(0, ServiceClass::kOffline, 0, 0);
  op.earliest_ns = 1000;
  op.end_by_ns = 1200;
  queue.Add(op);
  const auto early = queue.Next(500, false);
  EXPECT_FALSE(early.launch.has_value());
  EXPECT_EQ(early.wake_ns, 1000);
  EXPECT_EQ(queue.Next(1100, false).launch->key.op, 0u);
}

TEST(Edge_LaunchQueue, OfflineWhoseWindowNoLongerHoldsIsGivenBack) {
  LaunchQueue queue;
  QueuedOp op = Op(0, ServiceClass::kOffline, 0, 0);
  op.earliest_ns = 1000;
  op.end_by_ns = 1200;
  queue.Add(op);
  const auto late = queue.Next(1101, false);
  EXPECT_FALSE(late.launch.has_value());
  ASSERT_EQ(late.out_of_window.size(), 1u);
  EXPECT_TRUE(queue.empty());
}

TEST(Edge_LaunchQueue, OfflineMayFollowAnOnlineOpBeforeItsWindow) {
  LaunchQueue queue;
  QueuedOp op = Op(0, ServiceClass::kOffline, 0, 0);
  op.earliest_ns = 1000;
  op.end_by_ns = 1200;
  op.after_online_finish = true;
  queue.Add(op);
  EXPECT_FALSE(queue.Next(500, false).launch.has_value());
  EXPECT_TRUE(queue.Next(500, true).launch.has_value());
}

TEST(Edge_LaunchQueue, WaitingOpWakesTheDeviceWhenItsWindowCloses) {
  LaunchQueue queue;
  QueuedOp op = Op(0, ServiceClass::kOffline, 0, 0);
  op.ready = false;
  op.end_by_ns = 1200;
  queue.Add(op);
  EXPECT_EQ(queue.Next(0, false).wake_ns, 1101);
  EXPECT_EQ(queue.Next(1101, false).out_of_window.size(), 1u);
}

TEST(Malicious_LaunchQueue, HugeDurationsDoNotOverflow) {
  LaunchQueue queue;
  QueuedOp op = Op(0, ServiceClass::kOffline, INT32_MIN, 0);
  op.duration_ns = INT64_MAX;
  op.end_by_ns = INT64_MAX - 1;
  queue.Add(op);
  EXPECT_EQ(queue.Next(5, false).out_of_window.size(), 1u);
}

TEST(Happy_LaunchQueue, RemovalIsByInstanceAndAttempt) {
  LaunchQueue queue;
  queue.Add(Op(0, ServiceClass::kOnline, 0, 0));
  queue.Add(Op(1, ServiceClass::kOnline, 0, 0));
  queue.RemoveInstance(1, 2);
  EXPECT_TRUE(queue.Remove({1, 1, 0}));
  EXPECT_FALSE(queue.Remove({1, 1, 0}));
  queue.RemoveInstance(1, 1);
  EXPECT_TRUE(queue.empty());
}

}  // namespace
}  // namespace slice::executor
