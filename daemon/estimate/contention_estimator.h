// How much slower operators get while the other devices of the host are busy.
//
// PURE. CPU devices share memory bandwidth, GPUs the path to host memory. Activity is the share of
// the other devices' time that they spent running ops: one number, not one per pair. A duration
// was learned at some average activity; at another one it is expected to be
//
//     duration * (1 + coefficient * activity) / (1 + coefficient * activity when learned)
//
// with one coefficient per class of operators (device kind, and how much they compute per byte).
// The coefficient is tested on every sample before it learns from it, and answers only where it has
// lowered the error. Where it does, durations should be learned with its factor taken out: Learn().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/units.h"
#include "daemon/estimate/op_estimator.h"

namespace slice::estimate {

class ContentionEstimator {
 public:
  enum class Class : uint8_t { kSmall, kMemory, kMixed, kCompute };
  static constexpr size_t kClasses = 4;
  static constexpr size_t kKinds = 16;  // device kinds from here on share the last one's

  static Class ClassOf(const OpFeatures& features, DurationNs duration);
  // Factor on a prediction; 1 where contention is off or an activity is not known.
  double Slowdown(const OpFeatures& features, const Prediction& prediction, double activity) const;
  // Learns from a measured duration, and has `ops` learn what is left without the factor. Only
  // shapes that `ops` knows exactly count here: others are off for other reasons. `activity` < 0:
  // not known.
  void Learn(OpEstimator* ops, const OpFeatures& features, double activity, DurationNs duration);

  struct Report {
    uint8_t device_kind = 0;
    Class op_class = Class::kSmall;
    uint64_t samples = 0;
    bool on = false;
    double slowdown = 0;  // of a host all busy against one all idle; 0.2 = 20 % longer
    double error_without = 0, error_with = 0;
  };
  std::vector<Report> Reports() const;  // classes with samples
  static const char* ClassName(Class op_class);

 private:
  struct Model {
    double xx = 0, xy = 0;  // decaying sums over distance of activity, and excess
    double error_without = 0, error_with = 0;
    uint64_t samples = 0;
    double coefficient() const;
    double Factor(double activity, double learned) const;
    bool on() const;
  };
  void Observe(const OpFeatures& features, const Prediction& prediction, double activity,
               DurationNs duration);
  static size_t Place(const OpFeatures& features, const Prediction& prediction);

  std::array<Model, kKinds * kClasses> models_{};  // by kind and class
};

}  // namespace slice::estimate
