// Online estimators of durations (paper part 2): operators by signature, transfers by link, gaps between steps by service.
//
// PURE: fed with measured times by the engine. Every predictor is robust (one outlier moves it little) and never stuck.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "common/units.h"

namespace slice::estimate {

struct OpFeatures {
  uint64_t signature = 0;
  uint8_t device_kind = 0;
  int64_t flops = 0;
  int64_t bytes = 0;
};

struct Prediction {
  DurationNs duration = 0;      // > 0 always
  DurationNs spread = 0;        // typical absolute error
  enum class Level : uint8_t { kPrior, kLinear, kExact } level = Level::kPrior;
};

// Levels: robust running mean of the exact (signature, flops, bytes); linear fit over (1, flops, bytes) per signature by
// recursive least squares with relative weights, forgetting and clipping; roofline prior.
class OpEstimator {
 public:
  // Roofline prior of a CPU core: 2e10 flop/s, 8e9 byte/s.
  OpEstimator(double flops_per_second, double bytes_per_second);
  Prediction Predict(const OpFeatures& features) const;
  // Ignores non-positive durations. Bounded: oldest exact shapes are dropped beyond shapes_max.
  void Observe(const OpFeatures& features, DurationNs duration);
  size_t signature_count() const { return signatures_.size(); }

 private:
  struct Exact {
    double mean = 0;
    double deviation = 0;
    uint32_t samples = 0;
    uint32_t surprises = 0;     // outliers in a row: a step change is believed after a few
    uint64_t last_use = 0;
  };
  struct Linear {
    std::array<double, 3> weights{};
    std::array<double, 9> covariance{};
    uint32_t samples = 0;
  };
  struct Signature {
    Linear linear;
    std::unordered_map<uint64_t, Exact> shapes;
  };
  double flops_per_second_;
  double bytes_per_second_;
  uint64_t clock_ = 0;
  std::unordered_map<uint64_t, Signature> signatures_;
};

// Per ordered pair of domains: duration = max over two segments of latency + bytes / bandwidth.
class TransferEstimator {
 public:
  explicit TransferEstimator(size_t domain_count);
  DurationNs Predict(DomainIndex source, DomainIndex destination, int64_t bytes) const;
  void Observe(DomainIndex source, DomainIndex destination, int64_t bytes, DurationNs duration);

 private:
  struct Segment {
    double latency_ns = 0;
    double ns_per_byte = 0;
    uint32_t samples = 0;
  };
  struct Link {
    Segment small, large;       // split at 256 KiB
  };
  size_t domain_count_;
  std::vector<Link> links_;
};

// Per service (session + bindings): time between a completion and the next submit of the same sequence, and the
// probability that a next step comes. Log-bucketed, decaying histogram.
class GapEstimator {
 public:
  struct Gap {
    DurationNs p10 = 0, p90 = 0;
    double continues = 1.0;     // probability of a next step
    bool known = false;         // false until some samples are there: assume p10 0, p90 2 ms
  };
  Gap Predict(uint64_t service) const;
  void ObserveNext(uint64_t service, DurationNs gap);
  void ObserveEnd(uint64_t service);   // sequence closed without another step

 private:
  struct Histogram {
    std::array<float, 64> buckets{};   // quarter-octaves from 1 us
    float total = 0;
    float ends = 0;
  };
  std::unordered_map<uint64_t, Histogram> services_;
};

}  // namespace slice::estimate
