#include <tuple>

#include "daemon/sched/policies.h"

namespace slice::sched {

bool Less(const OrderKey& a, const OrderKey& b) {
  // Higher priority first, so its sides are swapped.
  return std::tie(a.service_class, b.priority, a.late, a.slack_bucket, a.arrival, a.creation) <
         std::tie(b.service_class, a.priority, b.late, b.slack_bucket, b.arrival, b.creation);
}

OrderKey SlackFirstKey(const WorkItem& item, TimeNs now) {
  OrderKey key;
  key.service_class = item.service_class;
  key.priority = item.priority;
  key.arrival = item.arrival;
  key.creation = item.creation;
  if (item.deadline == kNever) {
    key.slack_bucket = kNever / kMillisecond;
    return key;
  }
  const TimeNs latest_start = item.deadline - item.work_left;
  key.late = latest_start < now;
  // Floor also below zero: the same bucket width everywhere.
  key.slack_bucket = latest_start / kMillisecond - (latest_start % kMillisecond < 0 ? 1 : 0);
  return key;
}

OrderKey ArrivalKey(const WorkItem& item) {
  OrderKey key;
  key.service_class = ServiceClass::kOnline;  // one class for all
  key.arrival = item.arrival;
  key.creation = item.creation;
  return key;
}

}  // namespace slice::sched
