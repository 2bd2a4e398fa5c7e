// A line (plane) through noisy samples, updated one by one: recursive least squares with relative
// weights, forgetting, clipped residuals, and a restart after a step change. Inside of OpEstimator
// and TransferEstimator.
//
// Relative: both sides are divided by the sample, so that a 10 us and a 10 ms sample count alike.
// Clipped: once warm, a sample is believed up to kClip away from the prediction; kSurprisesMax in a
// row farther off on one side restart the fit from there. Bounded: forgetting never makes a weight
// less certain than it was at the (re)start.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace slice::estimate {

template <size_t N>
class RecursiveFit {
 public:
  static constexpr double kClip = 0.2;
  static constexpr uint32_t kWarm = 8;
  static constexpr int32_t kSurprisesMax = 5;
  static constexpr double kNoise = 1.0 / 400;  // variance of a sample: 5 %
  static constexpr double kForget = 0.98;      // a memory of about 50 samples

  RecursiveFit() = default;
  explicit RecursiveFit(const std::array<double, N>& start) : weights(start) {}

  std::array<double, N> weights{};
  uint32_t samples = 0;  // since the (re)start

  double Value(const std::array<double, N>& x) const {
    double value = 0;
    for (size_t i = 0; i < N; ++i) value += weights[i] * x[i];
    return value;
  }

  // `sample` > 0; x[0] is the constant 1.
  void Observe(const std::array<double, N>& x, double sample) {
    const double predicted = std::max(1.0, Value(x));
    double target = sample;
    if (samples > kWarm && std::abs(sample - predicted) > kClip * predicted) {
      const int32_t side = sample > predicted ? 1 : -1;
      surprises_ = surprises_ * side > 0 ? surprises_ + side : side;
      if (std::abs(surprises_) >= kSurprisesMax) {
        samples = 0;
      } else {
        target = std::clamp(sample, predicted * (1 - kClip), predicted * (1 + kClip));
      }
    } else {
      surprises_ = 0;
    }
    if (samples == 0) Restart(x, target);
    ++samples;
    Update(x, target);
  }

 private:
  // As uncertain as if each weight alone might explain the sample twice over. What the weights say
  // stays: a start.
  void Restart(const std::array<double, N>& x, double target) {
    surprises_ = 0;
    covariance_ = {};
    for (size_t i = 0; i < N; ++i) {
      const double deviation = 2 * target / std::max(x[i], 1e-3);
      limit_[i] = std::max(limit_[i], deviation * deviation);
      covariance_[i * N + i] = deviation * deviation;
    }
  }

  void Update(const std::array<double, N>& x, double target) {
    std::array<double, N> gain{};
    double scale = kForget * kNoise;
    double residual = 1;
    for (size_t i = 0; i < N; ++i) {
      for (size_t j = 0; j < N; ++j) gain[i] += covariance_[i * N + j] * x[j] / target;
      scale += gain[i] * x[i] / target;
      residual -= weights[i] * x[i] / target;
    }
    std::array<double, N> updated = weights;
    for (size_t i = 0; i < N; ++i) {
      updated[i] += gain[i] / scale * residual;
      if (!std::isfinite(updated[i])) {
        samples = 0;  // start again with the next sample
        return;
      }
    }
    weights = updated;
    for (size_t i = 0; i < N; ++i) {
      for (size_t j = 0; j < N; ++j) {
        covariance_[i * N + j] = (covariance_[i * N + j] - gain[i] * gain[j] / scale) / kForget;
      }
    }
    for (size_t i = 0; i < N; ++i) {
      double& variance = covariance_[i * N + i];
      if (!(variance >= 0)) variance = 0;  // rounding
      if (variance <= limit_[i]) continue;
      const double shrink = std::sqrt(limit_[i] / variance);
      for (size_t j = 0; j < N; ++j) {
        covariance_[i * N + j] *= shrink;
        covariance_[j * N + i] *= shrink;
      }
    }
  }

  std::array<double, N * N> covariance_{};
  std::array<double, N> limit_{};
  int32_t surprises_ = 0;
};

}  // namespace slice::estimate
