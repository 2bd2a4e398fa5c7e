// Operator durations: see estimator.h. The constants of the robust steps come from the bounds that
// the tests state: one outlier <= 5 %, a step change within 5 % after at most 20 samples.
#include <algorithm>
#include <cmath>

#include "daemon/estimate/estimator.h"

namespace slice::estimate {
namespace {

constexpr double kOverheadNs = 2'000;  // of any op: dispatch, one cache miss chain
constexpr double kRate = 1.0 / 8;   // of the running mean: 25 % off becomes 1.7 % after 20 samples
constexpr double kFar = 0.25;       // relative distance from which a sample is a surprise...
constexpr double kFarNoisy = 0.60;  // ...at most, when the shape itself is noisy
constexpr double kFeature = 1e-6;   // flops and bytes in millions: keeps the fit well scaled
constexpr uint32_t kLinearShapes = 3;  // fewer distinct shapes do not carry three weights
constexpr uint32_t kLinearEvery =
    8;                              // a shape beyond its first samples feeds the fit only so often
constexpr double kLinearRange = 4;  // factor around ratio * prior

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a ^ (b + 0x9e3779b97f4a7c15ull + (a << 6) + (a >> 2));
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
uint64_t SignatureKey(const OpFeatures& features) {
  return Mix(features.signature, features.device_kind);
}
uint64_t ShapeKey(const OpFeatures& features) {
  return Mix(static_cast<uint64_t>(features.flops), static_cast<uint64_t>(features.bytes));
}
double Positive(int64_t value) { return value > 0 ? static_cast<double>(value) : 0.0; }

// Lower median of the first `count` values: the first runs of an op are slow, never fast.
double LowerMedian(std::array<float, 5> values, size_t count) {
  std::sort(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count));
  return static_cast<double>(values[(count - 1) / 2]);
}

template <typename Map>
void DropOldest(Map* map) {
  auto oldest = map->begin();
  for (auto it = map->begin(); it != map->end(); ++it) {
    if (it->second.last_use < oldest->second.last_use) oldest = it;
  }
  if (oldest != map->end()) map->erase(oldest);
}

DurationNs ToDuration(double ns) {
  constexpr double kMax = 3.6e12;  // an hour: sums of predictions never come near overflow
  if (!(ns >= 1)) return 1;
  return static_cast<DurationNs>(std::llround(std::min(ns, kMax)));
}

}  // namespace

OpEstimator::OpEstimator(double flops_per_second, double bytes_per_second)
    : flops_per_second_(flops_per_second > 0 ? flops_per_second : 2e10),
      bytes_per_second_(bytes_per_second > 0 ? bytes_per_second : 8e9) {}

double OpEstimator::Prior(const OpFeatures& features) const {
  return kOverheadNs + std::max(Positive(features.flops) / flops_per_second_ * 1e9,
                                Positive(features.bytes) / bytes_per_second_ * 1e9);
}

double OpEstimator::LinearNs(const Signature& signature, const OpFeatures& features) const {
  const Linear& linear = signature.linear;
  const double scaled = Prior(features) * linear.ratio;
  if (signature.shapes_seen < kLinearShapes) return scaled;
  const double fit = linear.fit.Value(
      {1, Positive(features.flops) * kFeature, Positive(features.bytes) * kFeature});
  if (!std::isfinite(fit)) return scaled;
  return std::clamp(fit, scaled / kLinearRange, scaled * kLinearRange);
}

Prediction OpEstimator::Predict(const OpFeatures& features) const {
  Prediction prediction;
  const auto signature = signatures_.find(SignatureKey(features));
  if (signature == signatures_.end()) {
    prediction.duration = ToDuration(Prior(features));
    prediction.spread = prediction.duration;
    return prediction;
  }
  const auto exact = signature->second.shapes.find(ShapeKey(features));
  if (exact != signature->second.shapes.end()) {
    prediction.level = Prediction::Level::kExact;
    prediction.duration = ToDuration(exact->second.mean);
    prediction.spread = static_cast<DurationNs>(exact->second.deviation);
    return prediction;
  }
  prediction.level = Prediction::Level::kLinear;
  prediction.duration = ToDuration(LinearNs(signature->second, features));
  prediction.spread = static_cast<DurationNs>(static_cast<double>(prediction.duration) *
                                              std::min(1.0, signature->second.linear.error));
  return prediction;
}

void OpEstimator::Observe(const OpFeatures& features, DurationNs duration) {
  if (duration <= 0) return;
  const double sample = static_cast<double>(duration);
  const uint64_t key = SignatureKey(features);
  if (signatures_.size() >= kSignaturesMax && !signatures_.contains(key)) DropOldest(&signatures_);
  Signature& signature = signatures_[key];
  signature.last_use = ++clock_;

  const uint64_t shape_key = ShapeKey(features);
  if (!signature.shapes.contains(shape_key)) {
    if (signature.shapes.size() >= kShapesMax) DropOldest(&signature.shapes);
    ++signature.shapes_seen;
  }
  Exact& exact = signature.shapes[shape_key];
  exact.last_use = clock_;
  const bool stepped = ObserveExact(&exact, sample);
  // The fit learns from what the shape has settled on, so that an outlier never reaches it; and not
  // from every repeat of one shape, which would make it forget the others.
  if (stepped || exact.samples <= kWarm || exact.samples % kLinearEvery == 0)
    ObserveLinear(&signature, features, exact.mean);
}

bool OpEstimator::ObserveExact(Exact* exact, double sample) {
  exact->recent[exact->samples % exact->recent.size()] = static_cast<float>(sample);
  ++exact->samples;
  if (exact->samples <= kWarm) {
    exact->mean = LowerMedian(exact->recent, exact->samples);
    double sum = 0;
    for (uint32_t i = 0; i < exact->samples; ++i) {
      sum += std::min(std::abs(static_cast<double>(exact->recent[i]) - exact->mean), exact->mean);
    }
    exact->deviation = sum / exact->samples;
    return false;
  }
  const double residual = sample - exact->mean;
  const double far =
      exact->mean * std::min(kFarNoisy, std::max(kFar, 4 * exact->deviation / exact->mean));
  if (std::abs(residual) > far) {
    const int32_t side = residual > 0 ? 1 : -1;
    exact->surprises = exact->surprises * side > 0 ? exact->surprises + side : side;
    if (static_cast<uint32_t>(std::abs(exact->surprises)) >= kSurprisesMax) {
      exact->mean = LowerMedian(exact->recent, exact->recent.size());
      exact->surprises = 0;
      return true;
    }
  } else {
    exact->surprises = 0;
  }
  // Surprises widen it more slowly, or a step change would come to look like noise.
  const double rate = exact->surprises == 0 ? kRate : kRate / 4;
  exact->deviation += rate * (std::min(std::abs(residual), far) - exact->deviation);
  const double step_max = exact->mean * kStepMax;
  exact->mean += std::clamp(kRate * residual, -step_max, step_max);
  return false;
}

void OpEstimator::ObserveLinear(Signature* signature, const OpFeatures& features, double sample) {
  Linear& linear = signature->linear;
  const double prior = Prior(features);
  const double ratio = sample / prior;
  if (!linear.started) {
    linear.started = true;
    linear.ratio = ratio;
    linear.fit.weights = {kOverheadNs * ratio, 1e9 / flops_per_second_ / kFeature * ratio / 2,
                          1e9 / bytes_per_second_ / kFeature * ratio / 2};
  }
  // Typical ratio to the prior, in logarithms, with bounded steps.
  linear.ratio *= std::exp(std::clamp(0.25 * std::log(ratio / linear.ratio), -0.2, 0.2));
  const double predicted = LinearNs(*signature, features);
  linear.error += 0.1 * (std::min(1.0, std::abs(sample - predicted) / sample) - linear.error);
  linear.fit.Observe({1, Positive(features.flops) * kFeature, Positive(features.bytes) * kFeature},
                     sample);
}

}  // namespace slice::estimate
