// Durations of operators, by signature and device kind.
//
// PURE: fed with measured times by the engine. Robust (a bad sample moves a prediction little) and
// never stuck (good samples always win in the end). Memory is bounded, and after a warm-up nothing
// is allocated for shapes that come back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "common/units.h"
#include "daemon/estimate/knot_table.h"
#include "daemon/estimate/recursive_fit.h"
#include "daemon/estimate/robust_mean.h"
#include "daemon/estimate/saved.h"

namespace slice::estimate {

// What an operator's duration may depend on. All from the bound shape; unknown = 0.
struct OpFeatures {
  uint64_t signature = 0;
  uint8_t device_kind = 0;
  int64_t flops = 0;
  int64_t bytes = 0;  // moved, weights included
  int64_t size = 0;   // bytes of its outputs: what grows with the symbolic sizes alone
};

struct Prediction {
  // From the least to the most specific; which one answers is decided by evidence.
  enum class Level : uint8_t { kPrior, kLinear, kTable, kExact };
  static constexpr size_t kLevels = 4;
  DurationNs duration = 0;  // > 0 always
  DurationNs spread = 0;    // typical absolute error
  float activity = -1;      // of the other devices when it was learned, 0 to 1; < 0: not known
  Level level = Level::kPrior;
};
const char* LevelName(Prediction::Level level);

// A running record of relative errors; more recent ones count more.
struct ErrorRecord {
  float error = 0.5f;  // mean, each at most 1
  uint32_t samples = 0;
  void Add(double relative_error);
};

// Four levels answer for a shape:
//   exact   robust mean of this very shape
//   table   piecewise over the cost of the signature's shapes, a ramp or a step between two
//   linear  recursive least squares over (1, flops, bytes, size), relative weights, forgetting
//   prior   roofline of the device kind; scaled by the signature's typical ratio to it, once known
// Each new shape tests the table and the fit before it teaches them, and again when it is warm.
// The level with the least expected error answers: those records against what the shape's own
// samples promise (their number and deviation; and for young shapes, how far the first samples of
// this signature have been off before).
class OpEstimator {
 public:
  static constexpr uint32_t kWarm = RobustMean::kWarm;
  static constexpr uint32_t kSurprisesMax = RobustMean::kSurprisesMax;

  struct Limits {
    size_t shapes = 65'536;      // of all signatures; a power of two, at least 8
    size_t signatures = 16'384;  // by device kind
    size_t knots = 512;          // of a signature's table, at least 3
  };

  // The roofline of the prior; not above 0: that of a CPU core.
  OpEstimator(double flops_per_second, double bytes_per_second);
  OpEstimator(double flops_per_second, double bytes_per_second, const Limits& limits);

  Prediction Predict(const OpFeatures& features) const;
  // What one level alone says; false if it has nothing to say. The prior always has.
  bool PredictWith(Prediction::Level level, const OpFeatures& features,
                   Prediction* prediction) const;

  // Ignores durations not above 0. `activity`: see Prediction.
  void Observe(const OpFeatures& features, DurationNs duration, double activity = -1);

  size_t signature_count() const { return index_.size(); }  // by device kind
  size_t shape_count() const { return shape_count_; }

  struct SignatureReport {
    uint64_t signature = 0;
    uint8_t device_kind = 0;
    Prediction::Level level = Prediction::Level::kPrior;  // that answered last
    uint64_t samples = 0;
    size_t shapes = 0;
    double error = 0;  // mean relative error of the predictions that were made
    double bias = 0;   // the same with its sign; > 0: the ops take longer than predicted
    double table_error = 0, linear_error = 0;  // on shapes not seen before
    bool drift = false;                        // durations have changed lately
    uint64_t last_use = 0;
  };
  // The `count_max` most recently used signatures.
  std::vector<SignatureReport> Report(size_t count_max) const;

  // The shapes of the most recently used signatures, at most `shapes_max` in all.
  std::vector<SavedSignature> Export(size_t shapes_max) const;
  // Learns what was saved; numbers that cannot be are left out. Returns how many shapes counted.
  size_t Import(std::span<const SavedSignature> saved);

 private:
  struct Shape {
    uint64_t key = 0;  // 0: free
    RobustMean mean;
    float activity = -1;
    uint32_t signature = 0;
    Prediction::Level level = Prediction::Level::kExact;  // what the evidence says, once warm
    uint32_t last_use = 0;
  };
  static_assert(sizeof(Shape) <= 64);

  struct Signature {
    uint64_t key = 0;
    uint64_t id = 0;
    uint8_t device_kind = 0;
    Prediction::Level last_level = Prediction::Level::kPrior;
    uint64_t last_use = 0;
    uint64_t samples = 0;
    uint32_t shapes_seen = 0;
    float ratio = 1;  // typical duration / prior
    float error = 0, bias = 0, drift = 0;
    float first_error = 0.3f;  // of a shape's first sample, as it turned out later
    ErrorRecord table, linear;
    float step_gain = 0;  // how much better steps have done than ramps where they differ
    uint32_t step_samples = 0;
    RecursiveFit<4> fit;  // ns over (1, flops / 1e6, bytes / 1e6, size / 1e6)
    KnotTable knots;
  };

  double Prior(const OpFeatures& features) const;
  double Cost(const OpFeatures& features) const;
  double LinearNs(const Signature& signature, const OpFeatures& features) const;
  struct Unseen {  // a shape by its neighbours
    Prediction::Level level = Prediction::Level::kPrior;
    double ns = 0, error = 1;
  };
  Unseen PredictUnseen(const Signature& signature, const OpFeatures& features,
                       bool leave_out_equal) const;
  double TableNs(const Signature& signature, const OpFeatures& features,
                 const KnotTable::Reading& reading) const;
  double ExactError(const Signature& signature, const Shape& shape) const;

  std::vector<const Signature*> Newest(size_t count_max) const;
  static Prediction OwnMean(const Shape& shape);
  const Shape* FindShape(uint64_t key) const;
  Shape* TouchShape(uint64_t key, bool* is_new);
  const Signature* FindSignature(uint64_t key) const;
  uint32_t TouchSignature(uint64_t key, const OpFeatures& features);
  void Test(Signature* signature, const OpFeatures& features, double actual);
  void Teach(Signature* signature, const OpFeatures& features, const RobustMean& mean);
  static void FollowActivity(Shape* shape, double activity, double rate);
  static void Record(Signature* signature, double predicted, double sample);
  void LearnShape(Signature* signature, Shape* shape, const OpFeatures& features, double sample);

  double flops_per_second_;
  double bytes_per_second_;
  Limits limits_;
  uint64_t clock_ = 0;
  size_t shape_count_ = 0;
  size_t hand_ = 0;            // of the search for a signature to drop
  std::vector<Shape> shapes_;  // sets of 8 ways; the way not used for longest goes
  std::vector<Signature> signatures_;
  std::unordered_map<uint64_t, uint32_t> index_;  // signature key -> place
};

}  // namespace slice::estimate
