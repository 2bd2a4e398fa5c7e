// Mean of one measured quantity that outliers hardly move and that nothing can get stuck. Inside of
// OpEstimator and TransferEstimator. PURE.
//
// Young (up to kWarm samples): a median. Warm: an exponential mean whose single step is at most
// kStepMax, for a sample far off kSurpriseStepMax; kSurprisesMax samples in a row far off on one
// side are a step change and are believed at once.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <utility>

namespace slice::estimate {

// What a sample is believed to be before it is seen: of a shape's neighbours, for instance.
struct Expected {
  double value = 0;  // <= 0: nothing is expected
  double error = 0;  // typical relative error of `value`
};

struct RobustMean {
  static constexpr uint32_t kWarm = 5;
  static constexpr int kSurprisesMax = 5;
  static constexpr double kStepMax = 0.04;
  static constexpr double kSurpriseStepMax = 0.01;
  static constexpr double kRate = 1.0 / 8;    // 25 % off becomes 1.7 % after 20 samples
  static constexpr double kFar = 0.25;        // relative distance of a surprise...
  static constexpr double kFarNoisy = 0.60;   // ...at most, when the quantity itself is noisy
  static constexpr uint32_t kNeedsCheck = 3;  // samples that outvote what was expected

  float mean = 0;
  float deviation = 0;            // mean absolute
  std::array<float, 5> recent{};  // ring: its median starts the mean, and starts it anew
  uint32_t samples = 0;
  int32_t surprises = 0;  // in a row; the sign is the side

  // `sample` > 0. True when a step change was taken over.
  bool Observe(double sample, const Expected& expected = {}) {
    recent[samples % recent.size()] = static_cast<float>(sample);
    if (++samples <= kWarm) {
      Start(YoungMean(sample, expected), samples);
      return false;
    }
    const double center = mean, spread = deviation, residual = sample - center;
    const double far = std::min(kFarNoisy * center, std::max(kFar * center, 4 * spread));
    if (std::abs(residual) > far) {
      const int side = residual > 0 ? 1 : -1;
      surprises = surprises * side > 0 ? surprises + side : side;
      if (std::abs(surprises) >= kSurprisesMax) {
        Start(LowerMedian(recent, recent.size()), recent.size());
        surprises = 0;
        return true;
      }
    } else {
      surprises = 0;
    }
    // Surprises widen it more slowly, or a step change would come to look like noise.
    const double rate = surprises == 0 ? kRate : kRate / 4;
    deviation = static_cast<float>(spread + rate * (std::min(std::abs(residual), far) - spread));
    const double step_max = (surprises == 0 ? kStepMax : kSurpriseStepMax) * center;
    mean = static_cast<float>(center + std::clamp(kRate * residual, -step_max, step_max));
    return false;
  }

 private:
  void Start(double at, size_t count) {
    mean = static_cast<float>(at);
    double sum = 0;
    for (size_t i = 0; i < count; ++i)
      sum += static_cast<double>(std::min(std::abs(recent[i] - mean), mean));
    deviation = static_cast<float>(sum / static_cast<double>(count));
  }
  // Lower median of the first `count` values: the first runs of an op are slow, never fast.
  static double LowerMedian(std::array<float, 5> values, size_t count) {
    for (size_t i = 1; i < count; ++i) {
      for (size_t j = i; j > 0 && values[j] < values[j - 1]; --j)
        std::swap(values[j], values[j - 1]);
    }
    return static_cast<double>(values[(count - 1) / 2]);
  }
  // A first sample counts as far as it is credible; two must agree against what was expected.
  double YoungMean(double sample, const Expected& expected) const {
    if (expected.value <= 0 || samples >= kNeedsCheck) return LowerMedian(recent, samples);
    if (samples == 1) {
      const double room = expected.value * std::clamp(3 * expected.error, 0.05, 0.5);
      return std::clamp(sample, expected.value - room, expected.value + room);
    }
    return LowerMedian({recent[0], recent[1], static_cast<float>(expected.value)}, 3);
  }
};

}  // namespace slice::estimate
