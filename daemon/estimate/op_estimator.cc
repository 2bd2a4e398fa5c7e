// See op_estimator.h. The constants of the robust steps come from the bounds that the tests state.
#include "daemon/estimate/op_estimator.h"

#include <algorithm>
#include <cmath>

namespace slice::estimate {
namespace {

using Level = Prediction::Level;

constexpr double kOverheadNs = 2'000;  // of any op: dispatch, one cache miss chain
constexpr double kFeature = 1e-6;      // flops, bytes, size in millions: keeps the fit well scaled
constexpr uint32_t kLinearShapes = 3;  // fewer distinct shapes do not carry the weights
constexpr uint32_t kTeachEvery = 8;    // a warm shape teaches the others only so often
constexpr double kLinearRange = 4;     // factor around ratio * prior
constexpr double kReach = 2;           // factor of cost past its ends in which the table answers
constexpr uint32_t kTested = 4;        // tests from which a record of errors is believed
constexpr double kTrusted = 0.25;      // error up to which a level vouches for a new shape
constexpr double kNoResidual = 1e-5;   // below: rounding says where the mean went
constexpr double kMeanError = 0.35;    // error of a warm mean, in deviations: the rate of the mean
constexpr size_t kWays = 8;
constexpr size_t kLookedAt = 16;  // signatures, to find one to drop
constexpr double kRecordRate = 1.0 / 16, kStepRate = 1.0 / 32, kReportRate = 1.0 / 32;
constexpr double kDriftBias = 0.1;                          // mean error of one sign
constexpr double kDriftSteps = 0.3, kDriftFade = 1.0 / 64;  // a step change is shown for 80 samples
constexpr double kDurationMax = 3.6e12;  // an hour: sums of predictions never come near overflow

// Folded 64 x 64 -> 128 bit product: mixes both arguments into every bit.
uint64_t Mix(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a ^ 0x9e3779b97f4a7c15ull) * (b ^ 0xbf58476d1ce4e5b9ull);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}
uint64_t SignatureKey(const OpFeatures& features) {
  return Mix(features.signature, features.device_kind);
}
uint64_t ShapeKey(uint64_t signature_key, const OpFeatures& features) {
  const uint64_t key =
      Mix(Mix(signature_key, static_cast<uint64_t>(features.flops)),
          Mix(static_cast<uint64_t>(features.bytes), static_cast<uint64_t>(features.size)));
  return key != 0 ? key : 1;
}
double Positive(int64_t value) { return value > 0 ? static_cast<double>(value) : 0.0; }

DurationNs ToDuration(double ns) {
  if (!(ns >= 1)) return 1;
  return static_cast<DurationNs>(std::min(ns, kDurationMax) + 0.5);
}
double RelativeError(double predicted, double actual) {
  return std::abs(predicted - actual) / actual;
}

std::array<double, 4> Row(const OpFeatures& features) {
  return {1, Positive(features.flops) * kFeature, Positive(features.bytes) * kFeature,
          Positive(features.size) * kFeature};
}
OpFeatures FeaturesOf(const Knot& knot) { return {0, 0, knot.flops, knot.bytes, knot.size}; }

}  // namespace

const char* LevelName(Level level) {
  constexpr const char* kNames[] = {"prior", "linear", "table", "exact"};
  return kNames[static_cast<size_t>(level)];
}

void ErrorRecord::Add(double relative_error) {
  ++samples;
  const double rate = std::max(1.0 / samples, kRecordRate);
  error += static_cast<float>(rate * (std::min(relative_error, 1.0) - static_cast<double>(error)));
}

OpEstimator::OpEstimator(double flops_per_second, double bytes_per_second)
    : OpEstimator(flops_per_second, bytes_per_second, Limits{}) {}

OpEstimator::OpEstimator(double flops_per_second, double bytes_per_second, const Limits& limits)
    : flops_per_second_(flops_per_second > 0 ? flops_per_second : 2e10),
      bytes_per_second_(bytes_per_second > 0 ? bytes_per_second : 8e9),
      limits_(limits),
      shapes_(limits.shapes) {}

double OpEstimator::Prior(const OpFeatures& features) const {
  return kOverheadNs + std::max(Positive(features.flops) / flops_per_second_ * 1e9,
                                Positive(features.bytes) / bytes_per_second_ * 1e9);
}

// Like the prior, but it grows with each feature, so that different shapes lie apart.
double OpEstimator::Cost(const OpFeatures& features) const {
  return kOverheadNs + Positive(features.flops) / flops_per_second_ * 1e9 +
         Positive(features.bytes) / bytes_per_second_ * 1e9;
}

// Only inside a factor of the scaled prior, so that it cannot run away.
double OpEstimator::LinearNs(const Signature& signature, const OpFeatures& features) const {
  const double scaled = Prior(features) * static_cast<double>(signature.ratio);
  if (signature.shapes_seen < kLinearShapes) return scaled;
  const double fit = signature.fit.Value(Row(features));
  if (!std::isfinite(fit)) return scaled;
  return std::clamp(fit, scaled / kLinearRange, scaled * kLinearRange);
}

// Past its ends the table goes on as the linear fit does, from the last knot's value.
double OpEstimator::TableNs(const Signature& signature, const OpFeatures& features,
                            const KnotTable::Reading& reading) const {
  if (reading.inside()) return signature.step_gain > 0 ? reading.step : reading.ramp;
  const Knot& end = reading.lower != nullptr ? *reading.lower : *reading.upper;
  return end.ns * LinearNs(signature, features) / LinearNs(signature, FeaturesOf(end));
}

OpEstimator::Unseen OpEstimator::PredictUnseen(const Signature& signature,
                                               const OpFeatures& features,
                                               bool leave_out_equal) const {
  Unseen answer{Level::kLinear, LinearNs(signature, features),
                static_cast<double>(signature.linear.error)};
  if (signature.knots.knots().size() < (leave_out_equal ? 3 : 2)) return answer;
  const double cost = Cost(features);
  const KnotTable::Reading reading = signature.knots.Read(cost, features.size, leave_out_equal);
  const bool near = (reading.lower != nullptr && cost <= kReach * reading.lower->cost) ||
                    (reading.upper != nullptr && cost >= reading.upper->cost / kReach);
  if (!reading.inside() && !near) return answer;
  const bool both_tested =
      signature.table.samples >= kTested && signature.linear.samples >= kTested;
  if (both_tested && signature.table.error > signature.linear.error) return answer;
  return {Level::kTable, TableNs(signature, features, reading),
          static_cast<double>(signature.table.error)};
}

// Expected relative error of the mean of a shape's own samples.
double OpEstimator::ExactError(const Signature& signature, const Shape& shape) const {
  const RobustMean& mean = shape.mean;
  const double noise =
      static_cast<double>(mean.deviation) / std::max(1.0, static_cast<double>(mean.mean));
  if (mean.samples >= kWarm) return kMeanError * noise;
  return std::max(noise, static_cast<double>(signature.first_error) / mean.samples);
}

const OpEstimator::Shape* OpEstimator::FindShape(uint64_t key) const {
  const Shape* const set = &shapes_[key & (limits_.shapes - kWays)];
  for (size_t way = 0; way < kWays && set[way].key != 0; ++way) {
    if (set[way].key == key) return &set[way];
  }
  return nullptr;
}

OpEstimator::Shape* OpEstimator::TouchShape(uint64_t key, bool* is_new) {
  Shape* const set = &shapes_[key & (limits_.shapes - kWays)];
  const auto now = static_cast<uint32_t>(clock_);
  Shape* oldest = set;
  *is_new = false;
  for (Shape* shape = set; shape != set + kWays; ++shape) {
    if (shape->key == key) {
      shape->last_use = now;
      return shape;
    }
    if (shape->key == 0) {
      ++shape_count_;
      oldest = shape;
      break;
    }
    if (now - shape->last_use > now - oldest->last_use) oldest = shape;
  }
  *oldest = Shape{};
  oldest->key = key;
  oldest->last_use = now;
  *is_new = true;
  return oldest;
}

const OpEstimator::Signature* OpEstimator::FindSignature(uint64_t key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : &signatures_[found->second];
}

uint32_t OpEstimator::TouchSignature(uint64_t key, const OpFeatures& features) {
  const auto [entry, is_new] = index_.try_emplace(key, 0);
  if (!is_new) return entry->second;
  uint32_t place = static_cast<uint32_t>(signatures_.size());
  if (signatures_.size() < limits_.signatures) {
    signatures_.emplace_back();
  } else {  // of the next few, the one not used for longest goes
    place = static_cast<uint32_t>(hand_ % signatures_.size());
    for (size_t i = 1; i < std::min(kLookedAt, signatures_.size()); ++i) {
      const auto other = static_cast<uint32_t>((hand_ + i) % signatures_.size());
      if (signatures_[other].last_use < signatures_[place].last_use) place = other;
    }
    hand_ += kLookedAt;
    index_.erase(signatures_[place].key);
    signatures_[place] = Signature{};
  }
  entry->second = place;
  signatures_[place].key = key;
  signatures_[place].id = features.signature;
  signatures_[place].device_kind = features.device_kind;
  return place;
}

Prediction OpEstimator::Predict(const OpFeatures& features) const {
  const uint64_t key = SignatureKey(features);
  const Shape* const shape = FindShape(ShapeKey(key, features));
  if (shape != nullptr && shape->level == Level::kExact) return OwnMean(*shape);
  Prediction prediction;
  const Signature* const signature = FindSignature(key);
  if (signature == nullptr) {
    if (shape != nullptr) return OwnMean(*shape);
    prediction.duration = prediction.spread = ToDuration(Prior(features));
    return prediction;
  }
  const Unseen answer = PredictUnseen(*signature, features, shape != nullptr);
  // The neighbours that it left the answer to are gone: their signature was dropped and came back.
  if (shape != nullptr && answer.level < shape->level) return OwnMean(*shape);
  prediction.level = answer.level;
  prediction.duration = ToDuration(answer.ns);
  prediction.spread = static_cast<DurationNs>(static_cast<double>(prediction.duration) *
                                              std::min(1.0, answer.error));
  return prediction;
}

Prediction OpEstimator::OwnMean(const Shape& shape) {
  Prediction prediction;
  prediction.duration = ToDuration(static_cast<double>(shape.mean.mean));
  prediction.spread = static_cast<DurationNs>(shape.mean.deviation);
  prediction.activity = shape.activity;
  prediction.level = Level::kExact;
  return prediction;
}

bool OpEstimator::PredictWith(Level level, const OpFeatures& features,
                              Prediction* prediction) const {
  const uint64_t key = SignatureKey(features);
  const Shape* const shape = FindShape(ShapeKey(key, features));
  const Signature* const signature = FindSignature(key);
  double ns = Prior(features), error = 1;
  switch (level) {
    case Level::kPrior:
      break;
    case Level::kLinear:
      if (signature == nullptr) return false;
      ns = LinearNs(*signature, features);
      error = static_cast<double>(signature->linear.error);
      break;
    case Level::kTable: {
      if (signature == nullptr || signature->knots.knots().empty()) return false;
      const auto reading = signature->knots.Read(Cost(features), features.size, false);
      ns = TableNs(*signature, features, reading);
      error = static_cast<double>(signature->table.error);
      break;
    }
    case Level::kExact:
      if (shape == nullptr) return false;
      ns = static_cast<double>(shape->mean.mean);
      error = static_cast<double>(shape->mean.deviation) / ns;
      break;
  }
  *prediction = {};
  prediction->level = level;
  prediction->duration = ToDuration(ns);
  prediction->spread = ToDuration(ns * error);
  return true;
}

void OpEstimator::Observe(const OpFeatures& features, DurationNs duration, double activity) {
  if (duration <= 0) return;
  ++clock_;
  const double sample = static_cast<double>(duration);
  const uint64_t key = SignatureKey(features);
  bool is_new = false;
  Shape* const shape = TouchShape(ShapeKey(key, features), &is_new);
  if (is_new || shape->signature >= signatures_.size() ||
      signatures_[shape->signature].key != key) {
    shape->signature = TouchSignature(key, features);
    shape->level = Level::kExact;  // if its signature was dropped, so were the neighbours
  }
  Signature& signature = signatures_[shape->signature];
  signature.last_use = clock_;
  ++signature.samples;
  const double before = static_cast<double>(shape->mean.mean);
  if (shape->mean.samples < kWarm) {
    LearnShape(&signature, shape, features, sample);
    FollowActivity(shape, activity, 1.0 / shape->mean.samples);
    return;
  }
  Record(&signature, before, sample);
  const bool stepped = shape->mean.Observe(sample);
  // The activity that goes with the mean moves towards the sample's as far as the mean has done.
  const double residual = sample - before;
  FollowActivity(shape, activity,
                 std::abs(residual) < kNoResidual * before
                     ? RobustMean::kRate
                     : (static_cast<double>(shape->mean.mean) - before) / residual);
  signature.drift = (signature.drift + (stepped ? 1 : 0)) * static_cast<float>(1 - kDriftFade);
  if (stepped || shape->mean.samples % kTeachEvery == 0) {
    Teach(&signature, features, shape->mean);
    const Unseen other = PredictUnseen(signature, features, true);
    const bool better = other.level == Level::kTable && signature.table.samples >= kTested &&
                        other.error < ExactError(signature, *shape);
    shape->level = better ? Level::kTable : Level::kExact;
  }
  signature.last_level = shape->level;
}

void OpEstimator::FollowActivity(Shape* shape, double activity, double rate) {
  if (!(activity >= 0)) return;
  const auto share = static_cast<float>(std::min(activity, 1.0));
  if (shape->activity < 0) shape->activity = share;
  shape->activity += static_cast<float>(std::clamp(rate, 0.0, 1.0)) * (share - shape->activity);
}

// What a prediction was worth.
void OpEstimator::Record(Signature* signature, double predicted, double sample) {
  const double error = std::clamp((sample - predicted) / sample, -1.0, 1.0);
  const double rate = std::max(1.0 / static_cast<double>(signature->samples), kReportRate);
  signature->bias += static_cast<float>(rate * (error - static_cast<double>(signature->bias)));
  signature->error +=
      static_cast<float>(rate * (std::abs(error) - static_cast<double>(signature->error)));
}

// A shape that is not warm yet. Its neighbours are asked before they are told.
void OpEstimator::LearnShape(Signature* signature, Shape* shape, const OpFeatures& features,
                             double sample) {
  const bool first = shape->mean.samples == 0;
  const bool known = signature->samples > 1;
  const Unseen neighbours = PredictUnseen(*signature, features, !first);
  Record(signature,
         !first  ? static_cast<double>(shape->mean.mean)
         : known ? neighbours.ns
                 : Prior(features),
         sample);
  if (first) {
    if (known) Test(signature, features, sample);
    ++signature->shapes_seen;
  }
  const bool tested = neighbours.level == Level::kTable ? signature->table.samples >= kTested
                                                        : signature->linear.samples >= kTested;
  Expected expected;
  if (tested && neighbours.error < kTrusted) expected = {neighbours.ns, neighbours.error};
  shape->mean.Observe(sample, expected);
  const double settled = static_cast<double>(shape->mean.mean);
  if (shape->mean.samples == kWarm) {
    Test(signature, features, settled);
  } else if (shape->mean.samples == RobustMean::kNeedsCheck) {
    const double miss =
        std::min(1.0, RelativeError(static_cast<double>(shape->mean.recent[0]), settled));
    signature->first_error +=
        static_cast<float>(kRecordRate * (miss - static_cast<double>(signature->first_error)));
  }
  Teach(signature, features, shape->mean);
  const bool neighbours_better =
      expected.value > 0 && expected.error < ExactError(*signature, *shape);
  shape->level = neighbours_better ? neighbours.level : Level::kExact;
  signature->last_level = shape->level;
}

// How well table and fit know a shape that they have not been taught, or as if they had not.
void OpEstimator::Test(Signature* signature, const OpFeatures& features, double actual) {
  const KnotTable::Reading reading = signature->knots.Read(Cost(features), features.size, true);
  if (reading.inside()) {
    if (reading.step != reading.ramp) {
      const double gain = std::min(1.0, RelativeError(reading.ramp, actual)) -
                          std::min(1.0, RelativeError(reading.step, actual));
      ++signature->step_samples;
      const double rate = std::max(1.0 / signature->step_samples, kStepRate);
      signature->step_gain +=
          static_cast<float>(rate * (gain - static_cast<double>(signature->step_gain)));
    }
    signature->table.Add(RelativeError(TableNs(*signature, features, reading), actual));
  }
  if (signature->shapes_seen >= kLinearShapes)
    signature->linear.Add(RelativeError(LinearNs(*signature, features), actual));
}

// Table and fit learn from what a shape has settled on, so that an outlier hardly reaches them; and
// not from every repeat of one shape, which would make the fit forget the others.
void OpEstimator::Teach(Signature* signature, const OpFeatures& features, const RobustMean& mean) {
  const double settled = static_cast<double>(mean.mean);
  const double ratio = settled / Prior(features);
  const bool started = !signature->knots.knots().empty();
  if (!started) {
    signature->ratio = static_cast<float>(ratio);
    signature->fit.weights = {kOverheadNs * ratio, 1e9 / flops_per_second_ / kFeature * ratio / 2,
                              1e9 / bytes_per_second_ / kFeature * ratio / 2, 0};
  }
  // In logarithms, with bounded steps.
  const double step = 0.25 * std::log(ratio / static_cast<double>(signature->ratio));
  signature->ratio *= static_cast<float>(std::exp(std::clamp(step, -0.2, 0.2)));
  signature->fit.Observe(Row(features), settled);
  signature->knots.Set({Cost(features), settled, features.flops, features.bytes, features.size,
                        mean.deviation, mean.samples},
                       limits_.knots);
}

std::vector<const OpEstimator::Signature*> OpEstimator::Newest(size_t count_max) const {
  std::vector<const Signature*> newest;
  for (const Signature& signature : signatures_) newest.push_back(&signature);
  const size_t count = std::min(count_max, newest.size());
  std::partial_sort(
      newest.begin(), newest.begin() + static_cast<std::ptrdiff_t>(count), newest.end(),
      [](const Signature* a, const Signature* b) { return a->last_use > b->last_use; });
  newest.resize(count);
  return newest;
}

std::vector<OpEstimator::SignatureReport> OpEstimator::Report(size_t count_max) const {
  std::vector<SignatureReport> reports;
  for (const Signature* const signature : Newest(count_max)) {
    const Signature& s = *signature;
    SignatureReport report;
    report.signature = s.id;
    report.device_kind = s.device_kind;
    report.level = s.last_level;
    report.samples = s.samples;
    report.shapes = s.knots.knots().size();
    report.error = static_cast<double>(s.error);
    report.bias = static_cast<double>(s.bias);
    report.table_error = static_cast<double>(s.table.error);
    report.linear_error = static_cast<double>(s.linear.error);
    report.drift = static_cast<double>(s.drift) > kDriftSteps || std::abs(report.bias) > kDriftBias;
    report.last_use = s.last_use;
    reports.push_back(report);
  }
  return reports;
}

std::vector<SavedSignature> OpEstimator::Export(size_t shapes_max) const {
  std::vector<SavedSignature> saved;
  for (const Signature* const signature : Newest(signatures_.size())) {
    const std::vector<Knot>& knots = signature->knots.knots();
    if (knots.size() > shapes_max) break;
    shapes_max -= knots.size();
    SavedSignature& item = saved.emplace_back();
    item.signature = signature->id;
    item.device_kind = signature->device_kind;
    for (const Knot& knot : knots) {
      item.shapes.push_back({knot.flops, knot.bytes, knot.size, knot.ns,
                             static_cast<double>(knot.deviation), knot.samples});
    }
  }
  return saved;
}

size_t OpEstimator::Import(std::span<const SavedSignature> saved) {
  size_t counted = 0;
  for (const SavedSignature& item : saved) {
    size_t left = limits_.knots;
    for (const SavedShape& shape : item.shapes) {
      const bool sane = shape.ns >= 1 && shape.ns <= kDurationMax && shape.deviation >= 0 &&
                        shape.flops >= 0 && shape.bytes >= 0 && shape.size >= 0 &&
                        shape.samples > 0;
      if (!sane || left == 0) continue;
      --left;
      ++counted;
      const OpFeatures features{item.signature, item.device_kind, shape.flops, shape.bytes,
                                shape.size};
      // As if just warm: what is measured now counts soon. The samples lie around the mean as far
      // as they did.
      const double away = std::min(shape.deviation, RobustMean::kFar * shape.ns);
      for (uint32_t i = 0; i < std::min(shape.samples, kWarm); ++i) {
        const double ns = shape.ns + (i == 0 ? 0 : i % 2 == 0 ? away : -away);
        Observe(features, ToDuration(ns));
      }
    }
  }
  return counted;
}

}  // namespace slice::estimate
