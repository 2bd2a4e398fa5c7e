// Gaps between the steps of sequences, by service.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "common/units.h"

namespace slice::estimate {

// Per service (session + bindings): time between a completion and the next submit of the same
// sequence, and the probability that a next step comes. Log-bucketed, decaying histogram.
class GapEstimator {
 public:
  static constexpr size_t kServicesMax = 16'384;
  static constexpr DurationNs kUnknownP90 = 2 * kMillisecond;

  struct Gap {
    DurationNs p10 = 0, p90 = 0;
    double continues = 1.0;  // probability of a next step
    bool known = false;      // false until some samples are there: assume p10 0, p90 2 ms
  };
  Gap Predict(uint64_t service) const;
  void ObserveNext(uint64_t service, DurationNs gap);  // negative gaps count as 0
  void ObserveEnd(uint64_t service);                   // sequence closed without another step
  void Forget(uint64_t service) { services_.erase(service); }

 private:
  struct Histogram {
    std::array<float, 64> buckets{};  // quarter-octaves from 1 us; the last one is open
    float total = 0;
    float ends = 0;
    uint64_t last_use = 0;
  };
  Histogram* Touch(uint64_t service);
  uint64_t clock_ = 0;
  std::unordered_map<uint64_t, Histogram> services_;
};

}  // namespace slice::estimate
