#include "daemon/executor/launch_queue.h"

#include <algorithm>

#include "common/checked.h"
#include "common/queue_rules.h"

namespace slice::executor {
namespace {

// When an offline op could start at the soonest.
TimeNs StartOf(const QueuedOp& op, TimeNs now, bool behind_online) {
  if (op.service_class == ServiceClass::kOnline || (op.after_online_finish && behind_online))
    return now;
  return std::max(now, op.earliest_ns);
}

bool WindowHolds(const QueuedOp& op, TimeNs start) {
  if (op.service_class == ServiceClass::kOnline || op.end_by_ns == kNever) return true;
  TimeNs end = 0;
  return CheckedAdd(start, op.duration_ns, &end) && end <= op.end_by_ns;
}

RunKey KeyOf(const QueuedOp& op) {
  return {op.service_class, op.priority, op.order, op.key.instance, op.key.op};
}

}  // namespace

QueuedOp* LaunchQueue::Find(const OpKey& key) {
  const auto found =
      std::find_if(ops_.begin(), ops_.end(), [&](const QueuedOp& op) { return op.key == key; });
  return found == ops_.end() ? nullptr : &*found;
}

bool LaunchQueue::Remove(const OpKey& key) {
  return std::erase_if(ops_, [&](const QueuedOp& op) { return op.key == key; }) != 0;
}

void LaunchQueue::RemoveInstance(uint64_t instance, uint32_t attempt) {
  std::erase_if(ops_, [&](const QueuedOp& op) {
    return op.key.instance == instance && op.key.attempt == attempt;
  });
}

LaunchQueue::Decision LaunchQueue::Next(TimeNs now, bool behind_online) {
  Decision decision;
  std::erase_if(ops_, [&](const QueuedOp& op) {
    if (WindowHolds(op, StartOf(op, now, behind_online))) return false;
    decision.out_of_window.push_back(op);
    return true;
  });
  const QueuedOp* best = nullptr;
  for (const QueuedOp& op : ops_) {
    if (!op.ready) continue;
    const TimeNs start = StartOf(op, now, behind_online);
    if (start > now) {
      decision.wake_ns = std::min(decision.wake_ns, start);
    } else if (best == nullptr || RunsBefore(KeyOf(op), KeyOf(*best))) {
      best = &op;
    }
  }
  // An op that is not ready may leave its window meanwhile: then it must be given back.
  for (const QueuedOp& op : ops_) {
    if (!op.ready && op.service_class == ServiceClass::kOffline && op.end_by_ns != kNever) {
      decision.wake_ns = std::min(decision.wake_ns, op.end_by_ns - op.duration_ns + 1);
    }
  }
  if (best != nullptr) {
    decision.launch = *best;
    Remove(decision.launch->key);
  }
  return decision;
}

}  // namespace slice::executor
