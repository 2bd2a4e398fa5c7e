// Online estimators of durations (paper part 2): operators by signature, transfers by link, gaps
// between steps by service.
//
// PURE: fed with measured times by the engine. Every predictor is robust (one outlier moves it
// little) and never stuck.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "common/units.h"
#include "daemon/estimate/recursive_fit.h"

namespace slice::estimate {

struct OpFeatures {
  uint64_t signature = 0;
  uint8_t device_kind = 0;
  int64_t flops = 0;
  int64_t bytes = 0;
};

struct Prediction {
  DurationNs duration = 0;  // > 0 always
  DurationNs spread = 0;    // typical absolute error
  enum class Level : uint8_t { kPrior, kLinear, kExact } level = Level::kPrior;
};

// Levels: robust running mean of the exact (signature, flops, bytes); linear fit over (1, flops,
// bytes) per signature by recursive least squares with relative weights, forgetting and clipping;
// roofline prior. The linear level answers only inside a factor of four of the prior scaled by the
// signature's typical ratio to it, so it cannot run away. Once warm (kWarm samples of a shape), one
// sample moves the mean by at most kStepMax; kSurprisesMax samples in a row far off on the same
// side are a step change and are believed at once.
class OpEstimator {
 public:
  static constexpr uint32_t kWarm = 5;
  static constexpr uint32_t kSurprisesMax = 5;
  static constexpr double kStepMax = 0.04;
  static constexpr size_t kShapesMax = 256;  // per signature and device kind
  static constexpr size_t kSignaturesMax = 16'384;

  // Roofline prior of a CPU core: 2e10 flop/s, 8e9 byte/s.
  OpEstimator(double flops_per_second, double bytes_per_second);
  Prediction Predict(const OpFeatures& features) const;
  // Ignores non-positive durations. Bounded: the shape, or signature, not seen for longest is
  // dropped.
  void Observe(const OpFeatures& features, DurationNs duration);
  size_t signature_count() const { return signatures_.size(); }  // by device kind

 private:
  struct Exact {
    double mean = 0;
    double deviation = 0;           // mean absolute
    std::array<float, 5> recent{};  // ring of the last samples: the median starts it, and starts it
                                    // again after a step
    uint32_t samples = 0;
    int32_t surprises = 0;  // in a row; the sign is the side
    uint64_t last_use = 0;
  };
  struct Linear {
    RecursiveFit<3> fit;  // ns over (1, flops / 1e6, bytes / 1e6)
    double ratio = 1;     // typical duration / prior
    double error = 0.5;   // mean relative
    bool started = false;
  };
  struct Signature {
    Linear linear;
    std::unordered_map<uint64_t, Exact> shapes;
    uint32_t shapes_seen = 0;
    uint64_t last_use = 0;
  };
  double Prior(const OpFeatures& features) const;
  double LinearNs(const Signature& signature, const OpFeatures& features) const;
  // True when the shape took a step change.
  bool ObserveExact(Exact* exact, double sample);
  void ObserveLinear(Signature* signature, const OpFeatures& features, double sample);

  double flops_per_second_;
  double bytes_per_second_;
  uint64_t clock_ = 0;
  std::unordered_map<uint64_t, Signature> signatures_;
};

// Per ordered pair of domains: latency + bytes / bandwidth, in two segments by size (latency rules
// the small, bandwidth the large), each a robust line. Never smaller for a large transfer than for
// one at the split.
class TransferEstimator {
 public:
  static constexpr int64_t kSplitBytes = 256 * 1024;
  static constexpr double kLatencyNsPrior = 20'000;
  static constexpr double kNsPerBytePrior = 0.25;  // 4 GB/s

  explicit TransferEstimator(size_t domain_count);
  // > 0, except 0 within a domain. Domains out of range: the prior.
  DurationNs Predict(DomainIndex source, DomainIndex destination, int64_t bytes) const;
  // Ignores non-positive durations, negative sizes and unknown domains.
  void Observe(DomainIndex source, DomainIndex destination, int64_t bytes, DurationNs duration);

 private:
  struct Segment {
    static constexpr std::array<double, 2> kStart = {kLatencyNsPrior, kNsPerBytePrior* kSplitBytes};
    RecursiveFit<2> fit{kStart};  // ns over (1, bytes / split)
    double Ns(double bytes) const { return fit.Value({1, bytes / kSplitBytes}); }
    void Observe(double bytes, double sample);
  };
  struct Link {
    Segment small, large;
  };
  size_t domain_count_;
  std::vector<Link> links_;
};

// Per service (session + bindings): time between a completion and the next submit of the same
// sequence, and the probability that a next step comes. Log-bucketed, decaying histogram.
class GapEstimator {
 public:
  static constexpr size_t kServicesMax = 16'384;
  static constexpr DurationNs kUnknownP90 = 2 * kMillisecond;

  struct Gap {
    DurationNs p10 = 0, p90 = 0;
    double continues = 1.0;  // probability of a next step
    bool known = false;      // false until some samples are there: assume p10 0, p90 2 ms
  };
  Gap Predict(uint64_t service) const;
  void ObserveNext(uint64_t service, DurationNs gap);  // negative gaps count as 0
  void ObserveEnd(uint64_t service);                   // sequence closed without another step
  void Forget(uint64_t service) { services_.erase(service); }

 private:
  struct Histogram {
    std::array<float, 64> buckets{};  // quarter-octaves from 1 us; the last one is open
    float total = 0;
    float ends = 0;
    uint64_t last_use = 0;
  };
  Histogram* Touch(uint64_t service);
  uint64_t clock_ = 0;
  std::unordered_map<uint64_t, Histogram> services_;
};

}  // namespace slice::estimate
