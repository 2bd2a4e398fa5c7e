// Gaps between the steps of sequences, by service.
//
// PURE. A decaying histogram of the times between a completion and the next submit, four buckets
// per octave from 1 us to an hour, and the probability that a next step comes at all. Nothing here
// holds a point in time, so a clock step costs one odd sample.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>

#include "common/units.h"

namespace slice::estimate {

class GapEstimator {
 public:
  GapEstimator() = default;
  GapEstimator(const GapEstimator&) = delete;  // megabytes
  GapEstimator& operator=(const GapEstimator&) = delete;

  static constexpr size_t kServicesMax = 16'384;  // beyond it the one least used of late goes
  static constexpr DurationNs kUnknownP90 = 2 * kMillisecond;

  struct Gap {
    DurationNs p10 = 0, p90 = kUnknownP90;
    double continues = 1.0;  // probability of a next step
    bool known = false;      // false until some samples are there: assume p10 0, p90 2 ms
  };
  Gap Predict(uint64_t service) const;
  void ObserveNext(uint64_t service, DurationNs gap);  // negative gaps count as 0
  void ObserveEnd(uint64_t service);                   // sequence closed without another step
  void Forget(uint64_t service);
  size_t service_count() const { return index_.size(); }

 private:
  static constexpr size_t kPerOctave = 4, kBuckets = kPerOctave * 32 + 1;

  struct Service {
    uint64_t id = 0;
    std::array<float, kBuckets> buckets{};  // the first ends at 1 us, the last one is open
    float total = 0;
    float ends = 0;
    // Shares of the histogram at which p10 and p90 are read. They follow how many gaps really fell
    // short of the predictions, so that these hold where gaps come in bursts, too.
    float low = 0.1f, high = 0.9f;
    Gap gap;  // what Predict answers
  };
  static size_t BucketOf(DurationNs gap);
  static DurationNs EdgeBelow(size_t bucket);
  static DurationNs Quantile(const Service& service, float share);
  Service* Touch(uint64_t service);
  static void Refresh(Service* service);

  std::list<Service> services_;  // by last use, the latest first
  std::unordered_map<uint64_t, std::list<Service>::iterator> index_;
};

}  // namespace slice::estimate
