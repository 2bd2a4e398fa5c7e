// Transfer durations: see estimator.h.
#include <algorithm>
#include <cmath>

#include "daemon/estimate/estimator.h"

namespace slice::estimate {
TransferEstimator::TransferEstimator(size_t domain_count)
    : domain_count_(domain_count), links_(domain_count * domain_count) {}

DurationNs TransferEstimator::Predict(DomainIndex source, DomainIndex destination,
                                      int64_t bytes) const {
  if (source == destination) return 0;
  const double size = static_cast<double>(std::max<int64_t>(bytes, 0));
  static const Link kPrior;
  const bool known = source < domain_count_ && destination < domain_count_;
  const Link& link = known ? links_[source * domain_count_ + destination] : kPrior;
  // A segment that never saw a transfer borrows the other's line.
  const Segment& small =
      link.small.fit.samples > 0 || link.large.fit.samples == 0 ? link.small : link.large;
  const Segment& large =
      link.large.fit.samples > 0 || link.small.fit.samples == 0 ? link.large : link.small;
  const double ns =
      bytes <= kSplitBytes ? small.Ns(size) : std::max(large.Ns(size), small.Ns(kSplitBytes));
  return std::max<DurationNs>(1, std::llround(std::min(ns, 3.6e12)));
}

void TransferEstimator::Observe(DomainIndex source, DomainIndex destination, int64_t bytes,
                                DurationNs duration) {
  if (duration <= 0 || bytes < 0 || source >= domain_count_ || destination >= domain_count_ ||
      source == destination) {
    return;
  }
  Link& link = links_[source * domain_count_ + destination];
  Segment& segment = bytes <= kSplitBytes ? link.small : link.large;
  segment.Observe(static_cast<double>(bytes), static_cast<double>(duration));
}

void TransferEstimator::Segment::Observe(double bytes, double sample) {
  const std::array<double, 2> x = {1, bytes / kSplitBytes};
  fit.Observe(x, sample);
  // A line that dips below zero is bent back, through its value at the point that it should
  // explain.
  auto& [latency, slope] = fit.weights;
  const double at_point = std::max(1.0, fit.Value(x));
  if (slope < 0) {
    slope = 0;
    latency = at_point;
  } else if (latency < 0) {
    latency = 0;
    if (x[1] > 0) slope = at_point / x[1];
  }
}

}  // namespace slice::estimate
