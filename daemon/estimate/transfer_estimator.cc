// Transfer durations: see estimator.h. Each segment is a line fitted by recursive least squares with relative weights
// over (1, bytes / split), started from the prior, with clipped residuals and a quick restart after a step change.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "daemon/estimate/estimator.h"

namespace slice::estimate {
namespace {

constexpr double kSplit = static_cast<double>(TransferEstimator::kSplitBytes);
constexpr double kForget = 0.97;         // a memory of about 30 transfers
constexpr double kVarianceStart = 1e12;  // of both weights (ns^2): hardly more than a tie-break against the first samples
constexpr double kVarianceMax = 1e14;
constexpr double kClip = 0.25;           // largest residual believed, relative
constexpr uint32_t kWarm = 8;
constexpr int32_t kSurprisesMax = 5;

}  // namespace

TransferEstimator::TransferEstimator(size_t domain_count)
    : domain_count_(domain_count), links_(domain_count * domain_count) {}

DurationNs TransferEstimator::Predict(DomainIndex source, DomainIndex destination, int64_t bytes) const {
  if (source == destination) return 0;
  const double size = static_cast<double>(std::max<int64_t>(bytes, 0));
  static const Link kPrior;
  const bool known = source < domain_count_ && destination < domain_count_;
  const Link& link = known ? links_[source * domain_count_ + destination] : kPrior;
  // A segment that never saw a transfer borrows the other's line.
  const Segment& small = link.small.samples > 0 || link.large.samples == 0 ? link.small : link.large;
  const Segment& large = link.large.samples > 0 || link.small.samples == 0 ? link.large : link.small;
  const double ns = size <= kSplit ? small.Ns(size) : std::max(large.Ns(size), small.Ns(kSplit));
  return std::max<DurationNs>(1, std::llround(std::min(ns, 3.6e12)));
}

void TransferEstimator::Observe(DomainIndex source, DomainIndex destination, int64_t bytes, DurationNs duration) {
  if (duration <= 0 || bytes < 0 || source >= domain_count_ || destination >= domain_count_ || source == destination) {
    return;
  }
  Link& link = links_[source * domain_count_ + destination];
  Segment& segment = bytes <= kSplitBytes ? link.small : link.large;
  segment.Observe(static_cast<double>(bytes), static_cast<double>(duration));
}

void TransferEstimator::Segment::Observe(double bytes, double sample) {
  if (samples == 0) covariance = {kVarianceStart, 0, kVarianceStart};
  ++samples;
  const double predicted = std::max(1.0, Ns(bytes));
  double target = sample;
  if (samples > kWarm && std::abs(sample - predicted) > kClip * predicted) {
    const int32_t side = sample > predicted ? 1 : -1;
    surprises = surprises * side > 0 ? surprises + side : side;
    if (std::abs(surprises) >= kSurprisesMax) {
      covariance = {kVarianceStart, 0, kVarianceStart};
    } else {
      target = std::clamp(sample, predicted * (1 - kClip), predicted * (1 + kClip));
    }
  } else {
    surprises = 0;
  }

  // Features divided by the target: relative errors. Covariance stays in ns^2 of the two weights.
  const double size = bytes / kSplit;
  const double x0 = 1 / target, x1 = size / target;
  const double w0 = latency_ns, w1 = ns_per_byte * kSplit;
  const double g0 = covariance[0] * x0 + covariance[1] * x1;
  const double g1 = covariance[1] * x0 + covariance[2] * x1;
  // Measurement noise of 5 % (1 / 400), so that the first samples do not wipe out what came before.
  const double scale = kForget / 400 + g0 * x0 + g1 * x1;
  const double residual = 1 - w0 * x0 - w1 * x1;
  double latency = w0 + g0 / scale * residual;
  double slope = w1 + g1 / scale * residual;
  covariance = {std::min((covariance[0] - g0 * g0 / scale) / kForget, kVarianceMax),
                (covariance[1] - g0 * g1 / scale) / kForget,
                std::min((covariance[2] - g1 * g1 / scale) / kForget, kVarianceMax)};
  if (!std::isfinite(latency) || !std::isfinite(slope)) return;
  // A line that dips below zero is bent back, through its value at the point that it should explain.
  const double at_point = std::max(1.0, latency + slope * size);
  if (slope < 0) {
    slope = 0;
    latency = at_point;
  } else if (latency < 0) {
    latency = 0;
    slope = size > 0 ? at_point / size : slope;
  }
  latency_ns = latency;
  ns_per_byte = slope / kSplit;
}

}  // namespace slice::estimate
