// A small world in which a policy's decisions come true: devices that run placed ops, copies,
// sequences that come, pause between steps and end. Virtual time, seeded. It stands in for the
// engine, to see a policy over seconds and not over one decision; rounds, re-placement and the
// slice rule are the engine's in short.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/units.h"

namespace slice::sched {

struct WorldTenant {
  ServiceClass service_class = ServiceClass::kOffline;
  DeviceIndex home = 0;
  double sequences_per_second = 0;  // Poisson; 0: the next one starts when the last has ended
  uint32_t layers = 8;
  uint32_t steps = 16;  // decode steps after the prefill
  DurationNs prefill_layer = 2 * kMillisecond;
  DurationNs step_layer = 500 * kMicrosecond;
  DurationNs gap = 300 * kMicrosecond;  // median time between two steps
  DurationNs deadline = 0;              // of a sequence, from its arrival; 0: none
  int64_t kv_bytes = 1 << 20;           // per layer
};

struct WorldConfig {
  std::string policy;
  size_t devices = 2;
  uint64_t seed = 1;
  DurationNs length = 4 * kSecond;
  double noise = 0.03;  // of durations against their prediction
  std::vector<WorldTenant> tenants;
};

struct WorldReport {
  std::vector<DurationNs> online_steps;      // submit to completion, sorted
  std::vector<DurationNs> online_sequences;  // arrival to the end of the last step, sorted
  uint64_t online_late = 0;
  uint64_t offline_steps = 0;
  DurationNs offline_work = 0;
  uint64_t offline_ops_off_home = 0;
  int64_t bytes_moved = 0;
  uint64_t deferrals = 0, rounds = 0;
  std::vector<DurationNs> busy;  // by device
  double Quantile(const std::vector<DurationNs>& sorted, double q) const {
    return sorted.empty()
               ? 0
               : static_cast<double>(
                     sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1))]);
  }
};

WorldReport RunWorld(const WorldConfig& config);

}  // namespace slice::sched
