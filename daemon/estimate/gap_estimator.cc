// See gap_estimator.h.
#include "daemon/estimate/gap_estimator.h"

#include <algorithm>
#include <cmath>

namespace slice::estimate {
namespace {

constexpr float kDecay = 0.98f;    // per observation: a memory of about 50 steps
constexpr float kKnown = 3.6f;     // weight from which the histogram is believed: four samples
constexpr float kFollow = 0.005f;  // of the shares, per gap
constexpr float kP10 = 0.1f, kP90 = 0.9f, kShareMin = 0.01f, kShareMax = 0.99f;

}  // namespace

size_t GapEstimator::BucketOf(DurationNs gap) {
  if (gap < kMicrosecond) return 0;
  const double octaves = std::log2(static_cast<double>(gap) / static_cast<double>(kMicrosecond));
  return std::min(static_cast<size_t>(octaves * kPerOctave) + 1, kBuckets - 1);
}

DurationNs GapEstimator::EdgeBelow(size_t bucket) {
  if (bucket == 0) return 0;
  return static_cast<DurationNs>(static_cast<double>(kMicrosecond) *
                                 std::exp2(static_cast<double>(bucket - 1) / kPerOctave));
}

// Inside a bucket gaps are taken to be spread evenly.
DurationNs GapEstimator::Quantile(const Service& service, float share) {
  const float wanted = share * service.total;
  float sum = 0;
  size_t last = 0;
  for (size_t i = 0; i < kBuckets; ++i) {
    const float here = service.buckets[i];
    if (here <= 0) continue;
    last = i;
    if (sum + here >= wanted) {
      const double part = static_cast<double>((wanted - sum) / here);
      const auto below = static_cast<double>(EdgeBelow(i));
      return static_cast<DurationNs>(below +
                                     part * (static_cast<double>(EdgeBelow(i + 1)) - below));
    }
    sum += here;
  }
  return EdgeBelow(last + 1);  // rounding kept the sum below the total
}

GapEstimator::Service* GapEstimator::Touch(uint64_t id) {
  const auto found = index_.find(id);
  if (found != index_.end()) {
    services_.splice(services_.begin(), services_, found->second);
  } else {
    if (index_.size() >= kServicesMax) Forget(services_.back().id);
    services_.emplace_front().id = id;
    index_.emplace(id, services_.begin());
  }
  Service& service = services_.front();
  for (float& bucket : service.buckets) bucket *= kDecay;
  service.total *= kDecay;
  service.ends *= kDecay;
  return &service;
}

void GapEstimator::Forget(uint64_t id) {
  const auto found = index_.find(id);
  if (found == index_.end()) return;
  services_.erase(found->second);
  index_.erase(found);
}

void GapEstimator::Refresh(Service* service) {
  Gap& gap = service->gap;
  const float all = service->total + service->ends;
  gap.continues = all >= kKnown ? static_cast<double>(service->total / all) : 1.0;
  gap.known = service->total >= kKnown;
  gap.p10 = gap.known ? Quantile(*service, service->low) : 0;
  gap.p90 = gap.known ? Quantile(*service, service->high) : kUnknownP90;
}

void GapEstimator::ObserveNext(uint64_t id, DurationNs gap) {
  Service* const service = Touch(id);
  if (service->gap.known) {
    const auto follow = [&](float* share, float wanted, bool below) {
      *share =
          std::clamp(*share + kFollow * (wanted - (below ? 1.0f : 0.0f)), kShareMin, kShareMax);
    };
    follow(&service->low, kP10, gap < service->gap.p10);
    follow(&service->high, kP90, gap < service->gap.p90);
    service->high = std::max(service->high, service->low);
  }
  service->buckets[BucketOf(gap)] += 1;
  service->total += 1;
  Refresh(service);
}

void GapEstimator::ObserveEnd(uint64_t id) {
  Service* const service = Touch(id);
  service->ends += 1;
  Refresh(service);
}

GapEstimator::Gap GapEstimator::Predict(uint64_t id) const {
  const auto found = index_.find(id);
  return found == index_.end() ? Gap{} : found->second->gap;
}

}  // namespace slice::estimate
