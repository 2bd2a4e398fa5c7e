// Issued ops of one device that are not launched yet, and the rule that chooses among them. Pure:
// the caller brings the clock and says which ops are ready. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/units.h"

namespace slice::executor {

struct OpKey {
  uint64_t instance = 0;
  uint32_t attempt = 0;
  uint32_t op = 0;
  bool operator==(const OpKey&) const = default;
};

struct QueuedOp {
  OpKey key;
  ServiceClass service_class = ServiceClass::kOnline;
  bool after_online_finish = false;  // may start directly behind an online op, before earliest_ns
  bool ready = false;                // inputs are in the device's domain and predecessors are done
  int32_t priority = 0;              // higher first
  uint64_t order = 0;                // engine order: lower first
  TimeNs earliest_ns = 0;            // offline only
  TimeNs end_by_ns = kNever;         // offline only
  DurationNs duration_ns = 0;        // predicted
};

class LaunchQueue {
 public:
  void Add(const QueuedOp& op) { ops_.push_back(op); }
  QueuedOp* Find(const OpKey& key);
  bool Remove(const OpKey& key);
  void RemoveInstance(uint64_t instance, uint32_t attempt);
  bool empty() const { return ops_.empty(); }
  std::vector<QueuedOp>& ops() { return ops_; }

  struct Decision {
    std::optional<QueuedOp> launch;       // removed from the queue
    std::vector<QueuedOp> out_of_window;  // offline ops whose window no longer holds; removed
    TimeNs wake_ns = kNever;              // when nothing is to launch: look again then
  };
  // `behind_online`: the op that the device finished last was online, and nothing ran since.
  Decision Next(TimeNs now, bool behind_online);

 private:
  std::vector<QueuedOp> ops_;  // short: the engine issues only what starts within its horizon
};

}  // namespace slice::executor
