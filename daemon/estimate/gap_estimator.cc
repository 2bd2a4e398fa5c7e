// Gaps between the steps of a sequence: see estimator.h. Quantiles are taken at bucket edges, on
// the cautious side (p10 at the lower edge, p90 at the upper), so a gap is never thought to be
// safer than it is by more than a quarter octave.
#include "daemon/estimate/gap_estimator.h"

#include <algorithm>
#include <cmath>

namespace slice::estimate {
namespace {

constexpr float kDecay = 0.98f;  // per observation: a memory of about 50 steps
constexpr float kKnown = 4;      // weight from which the histogram is believed
constexpr int kPerOctave = 4;

size_t BucketOf(DurationNs gap) {
  if (gap <= kMicrosecond) return 0;
  const double octaves = std::log2(static_cast<double>(gap) / static_cast<double>(kMicrosecond));
  return static_cast<size_t>(std::clamp(octaves * kPerOctave, 0.0, 63.0));
}
DurationNs LowerEdge(size_t bucket) {
  if (bucket == 0) return 0;
  return static_cast<DurationNs>(static_cast<double>(kMicrosecond) *
                                 std::exp2(static_cast<double>(bucket) / kPerOctave));
}

}  // namespace

GapEstimator::Histogram* GapEstimator::Touch(uint64_t service) {
  if (services_.size() >= kServicesMax && !services_.contains(service)) {
    auto oldest = services_.begin();
    for (auto it = services_.begin(); it != services_.end(); ++it) {
      if (it->second.last_use < oldest->second.last_use) oldest = it;
    }
    services_.erase(oldest);
  }
  Histogram& histogram = services_[service];
  histogram.last_use = ++clock_;
  for (float& bucket : histogram.buckets) bucket *= kDecay;
  histogram.total *= kDecay;
  histogram.ends *= kDecay;
  return &histogram;
}

void GapEstimator::ObserveNext(uint64_t service, DurationNs gap) {
  Histogram* histogram = Touch(service);
  histogram->buckets[BucketOf(gap)] += 1;
  histogram->total += 1;
}

void GapEstimator::ObserveEnd(uint64_t service) { Touch(service)->ends += 1; }

GapEstimator::Gap GapEstimator::Predict(uint64_t service) const {
  Gap gap;
  gap.p90 = kUnknownP90;
  const auto found = services_.find(service);
  if (found == services_.end()) return gap;
  const Histogram& histogram = found->second;
  if (histogram.total + histogram.ends >= kKnown * 0.9f) {
    gap.continues = static_cast<double>(histogram.total) /
                    static_cast<double>(histogram.total + histogram.ends);
  }
  if (histogram.total < kKnown * 0.9f) return gap;
  gap.known = true;
  float sum = 0;
  bool low = false;
  for (size_t i = 0; i < histogram.buckets.size(); ++i) {
    if (histogram.buckets[i] <= 0) continue;
    sum += histogram.buckets[i];
    if (!low && sum >= 0.1f * histogram.total) {
      gap.p10 = LowerEdge(i);
      low = true;
    }
    gap.p90 =
        LowerEdge(i + 1);  // stays at the last filled bucket if rounding keeps the sum below 90 %
    if (sum >= 0.9f * histogram.total) break;
  }
  return gap;
}

}  // namespace slice::estimate
