// See contention_estimator.h.
#include "daemon/estimate/contention_estimator.h"

#include <algorithm>
#include <cmath>

namespace slice::estimate {
namespace {

constexpr double kForget = 0.998;   // a memory of 500 samples
constexpr double kRidge = 0.5;      // in samples at the largest distance: keeps a first guess small
constexpr double kExcessMax = 0.5;  // one sample counts as at most this far off
constexpr double kCoefficientMax = 2;
constexpr double kErrorRate = 1.0 / 128;
constexpr uint64_t kTested = 64;  // samples before it may answer
constexpr double kGain = 0.98;    // on while the error with is below this part of that without
constexpr DurationNs kSmallOp = 20 * kMicrosecond;
constexpr double kMemoryBound = 4, kComputeBound = 64;  // flops per byte

}  // namespace

ContentionEstimator::Class ContentionEstimator::ClassOf(const OpFeatures& features,
                                                        DurationNs duration) {
  if (duration < kSmallOp) return Class::kSmall;
  const double intensity = static_cast<double>(std::max<int64_t>(features.flops, 0)) /
                           static_cast<double>(std::max<int64_t>(features.bytes, 1));
  if (intensity < kMemoryBound) return Class::kMemory;
  return intensity < kComputeBound ? Class::kMixed : Class::kCompute;
}

const char* ContentionEstimator::ClassName(Class op_class) {
  constexpr const char* kNames[] = {"small", "memory", "mixed", "compute"};
  return kNames[static_cast<size_t>(op_class)];
}

double ContentionEstimator::Model::coefficient() const {
  return std::clamp(xy / (xx + kRidge), 0.0, kCoefficientMax);
}

double ContentionEstimator::Model::Factor(double activity, double learned) const {
  return (1 + coefficient() * std::min(activity, 1.0)) / (1 + coefficient() * learned);
}

bool ContentionEstimator::Model::on() const {
  return samples >= kTested && coefficient() > 0 && error_with < kGain * error_without;
}

size_t ContentionEstimator::Place(const OpFeatures& features, const Prediction& prediction) {
  const size_t kind = std::min<size_t>(features.device_kind, kKinds - 1);
  return kind * kClasses + static_cast<size_t>(ClassOf(features, prediction.duration));
}

double ContentionEstimator::Slowdown(const OpFeatures& features, const Prediction& prediction,
                                     double activity) const {
  if (!(activity >= 0) || prediction.activity < 0) return 1;
  const Model& model = models_[Place(features, prediction)];
  if (!model.on()) return 1;
  return model.Factor(activity, static_cast<double>(prediction.activity));
}

void ContentionEstimator::Learn(OpEstimator* ops, const OpFeatures& features, double activity,
                                DurationNs duration) {
  if (!(activity >= 0)) return ops->Observe(features, duration);
  const Prediction prediction = ops->Predict(features);
  const double slowdown = Slowdown(features, prediction, activity);
  Observe(features, prediction, activity, duration);
  if (slowdown == 1) return ops->Observe(features, duration, activity);
  // As it would have been at the activity that the shape was learned at.
  const auto alone = static_cast<DurationNs>(static_cast<double>(duration) / slowdown);
  ops->Observe(features, alone, static_cast<double>(prediction.activity));
}

void ContentionEstimator::Observe(const OpFeatures& features, const Prediction& prediction,
                                  double activity, DurationNs duration) {
  if (duration <= 0 || !(activity >= 0) || prediction.activity < 0 ||
      prediction.level != Prediction::Level::kExact) {
    return;
  }
  Model& model = models_[Place(features, prediction)];
  const double learned = static_cast<double>(prediction.activity);
  const double distance = std::min(activity, 1.0) - learned;
  const double excess =
      std::clamp(static_cast<double>(duration) / static_cast<double>(prediction.duration) - 1,
                 -kExcessMax, kExcessMax);
  const double rate = std::max(1.0 / static_cast<double>(++model.samples), kErrorRate);
  model.error_without += rate * (std::abs(excess) - model.error_without);
  model.error_with +=
      rate * (std::abs(excess + 1 - model.Factor(activity, learned)) - model.error_with);
  model.xx = kForget * model.xx + distance * distance;
  model.xy = kForget * model.xy + distance * excess * (1 + model.coefficient() * learned);
}

std::vector<ContentionEstimator::Report> ContentionEstimator::Reports() const {
  std::vector<Report> reports;
  for (size_t place = 0; place < models_.size(); ++place) {
    const Model& model = models_[place];
    if (model.samples == 0) continue;
    reports.push_back({static_cast<uint8_t>(place / kClasses), static_cast<Class>(place % kClasses),
                       model.samples, model.on(), model.coefficient(), model.error_without,
                       model.error_with});
  }
  return reports;
}

}  // namespace slice::estimate
