// See transfer_estimator.h.
#include "daemon/estimate/transfer_estimator.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace slice::estimate {
namespace {

constexpr double kRate = 1.0 / 8;
constexpr double kStepMax = 0.04;  // of one sample, once a knot is warm
constexpr float kWarm = 5, kWeightMax = 8;
constexpr double kFar = 0.2;
constexpr double kShareMin = 0.05;  // of a knot in a sample, to learn from it
constexpr int kSurprisesMax = 5;
constexpr double kLineRange = 8;  // factor around the line in which a step change moves a knot
constexpr double kDurationMax = 3.6e12;
constexpr double kReportRate = 1.0 / 32;
constexpr int kMantissaBits = 52, kExponentBias = 1023;

DurationNs ToDuration(double ns) {
  if (!(ns >= 1)) return 1;
  return static_cast<DurationNs>(std::min(ns, kDurationMax) + 0.5);
}

// Samples far off on one side in a row, with the sign of the side.
int CountSurprise(double ratio, int before) {
  if (std::abs(ratio - 1) <= kFar) return 0;
  const int side = ratio > 1 ? 1 : -1;
  return before * side > 0 ? before + side : side;
}

}  // namespace

TransferEstimator::TransferEstimator(size_t domain_count)
    : domain_count_(domain_count), links_(domain_count * domain_count) {}

// The knots cut each octave into equal parts: exponent and first mantissa bits of the number.
size_t TransferEstimator::KnotBelow(double bytes) {
  constexpr int kBits = std::countr_zero(static_cast<unsigned>(kPerOctave));
  const auto bits = std::bit_cast<uint64_t>(std::max(bytes, 1.0));
  const auto part = static_cast<int64_t>(bits >> (kMantissaBits - kBits)) -
                    (int64_t{kExponentBias + kOctaveMin} << kBits);
  return static_cast<size_t>(std::clamp<int64_t>(part, 0, static_cast<int64_t>(kKnots) - 2));
}

double TransferEstimator::KnotBytes(size_t knot) {
  const auto octave = static_cast<int>(knot / kPerOctave) + kOctaveMin;
  return std::ldexp(1 + static_cast<double>(knot % kPerOctave) / kPerOctave, octave);
}

const TransferEstimator::Link* TransferEstimator::Find(DomainIndex source,
                                                       DomainIndex destination) const {
  static const Link kPrior;
  if (source >= domain_count_ || destination >= domain_count_) return &kPrior;
  const Link* const link = links_[source * domain_count_ + destination].get();
  return link != nullptr ? link : &kPrior;
}

// A line that never saw a transfer borrows the other. Never smaller for a large transfer than for
// one at the split.
double TransferEstimator::LineNs(const Link& link, double bytes) {
  const Segment& small =
      link.small.fit.samples > 0 || link.large.fit.samples == 0 ? link.small : link.large;
  const Segment& large =
      link.large.fit.samples > 0 || link.small.fit.samples == 0 ? link.large : link.small;
  const double ns =
      bytes <= kSplitBytes ? small.Ns(bytes) : std::max(large.Ns(bytes), small.Ns(kSplitBytes));
  return std::max(ns, 1.0);
}

double TransferEstimator::TableNs(const Link& link, double bytes) {
  const size_t knot = KnotBelow(bytes);
  // The next knots with something in them, below and above.
  const auto below = [&]() -> size_t {
    for (size_t word = knot / 64 + 1; word-- > 0;) {
      uint64_t bits = link.filled[word];
      if (word == knot / 64) bits &= ~uint64_t{0} >> (63 - knot % 64);
      if (bits != 0) return word * 64 + 63 - static_cast<size_t>(std::countl_zero(bits));
    }
    return kKnots;
  }();
  const auto above = [&]() -> size_t {
    const size_t from = knot + 1;
    for (size_t word = from / 64; word < link.filled.size(); ++word) {
      uint64_t bits = link.filled[word];
      if (word == from / 64) bits &= ~uint64_t{0} << from % 64;
      if (bits != 0) return word * 64 + static_cast<size_t>(std::countr_zero(bits));
    }
    return kKnots;
  }();
  if (below == kKnots && above == kKnots) return LineNs(link, bytes);
  const bool inside =
      below != kKnots && above != kKnots && bytes >= KnotBytes(below) && bytes <= KnotBytes(above);
  if (!inside) {  // on as the line goes, from the last knot's value
    const size_t end =
        below != kKnots && (above == kKnots || bytes >= KnotBytes(above)) ? below : above;
    return link.ns[end] * LineNs(link, bytes) / LineNs(link, KnotBytes(end));
  }
  const double low = KnotBytes(below), high = KnotBytes(above);
  return link.ns[below] + (link.ns[above] - link.ns[below]) * (bytes - low) / (high - low);
}

DurationNs TransferEstimator::Predict(DomainIndex source, DomainIndex destination,
                                      int64_t bytes) const {
  if (source == destination) return 0;
  return ToDuration(
      TableNs(*Find(source, destination), static_cast<double>(std::max<int64_t>(bytes, 0))));
}

DurationNs TransferEstimator::PredictLine(DomainIndex source, DomainIndex destination,
                                          int64_t bytes) const {
  if (source == destination) return 0;
  return ToDuration(
      LineNs(*Find(source, destination), static_cast<double>(std::max<int64_t>(bytes, 0))));
}

void TransferEstimator::Observe(DomainIndex source, DomainIndex destination, int64_t bytes,
                                DurationNs duration) {
  if (duration <= 0 || bytes < 0 || source >= domain_count_ || destination >= domain_count_ ||
      source == destination) {
    return;
  }
  std::unique_ptr<Link>& link = links_[source * domain_count_ + destination];
  if (link == nullptr) link = std::make_unique<Link>();
  const double size = static_cast<double>(bytes), sample = static_cast<double>(duration);
  const double predicted = TableNs(*link, size);
  const double rate = std::max(1.0 / static_cast<double>(++link->samples), kReportRate);
  const double miss = std::min(1.0, std::abs(sample - predicted) / sample);
  link->error += static_cast<float>(rate * (miss - static_cast<double>(link->error)));
  (bytes <= kSplitBytes ? link->small : link->large).Observe(size, sample);
  if (!TakeStep(link.get(), sample / predicted)) Bend(link.get(), size, sample);
}

// Moves the two knots around a size so that the line between them comes nearer to the sample: all
// the way at first and after samples far off on one side in a row, by bounded steps once warm.
void TransferEstimator::Bend(Link* link, double bytes, double sample) {
  const size_t below = KnotBelow(bytes);
  const double low = KnotBytes(below), high = KnotBytes(below + 1);
  const double up = std::clamp((bytes - low) / (high - low), 0.0, 1.0);
  const std::array<double, 2> share = {1 - up, up};
  std::array<double, 2> value{};
  float weight = kWeightMax;
  for (size_t i = 0; i < 2; ++i) {
    value[i] = TableNs(*link, KnotBytes(below + i));
    if (share[i] >= kShareMin) weight = std::min(weight, link->weight[below + i]);
  }
  // Past the ends of the knots' range only the last knot counts, by its ratio to the line.
  const double predicted = bytes < low || bytes > high ? TableNs(*link, bytes)
                                                       : share[0] * value[0] + share[1] * value[1];
  auto& surprises = link->knot_surprises[below + (up < 0.5 ? 0 : 1)];
  surprises = static_cast<int8_t>(CountSurprise(sample / predicted, surprises));
  if (std::abs(surprises) >= kSurprisesMax) {
    surprises = 0;
    weight = 0;
  }
  double residual = (sample - predicted) / std::max(1.0, static_cast<double>(weight) + 1);
  if (weight >= kWarm) {
    const double step_max = kStepMax * predicted;
    residual = std::clamp(kRate * (sample - predicted), -step_max, step_max);
  }
  const double norm = share[0] * share[0] + share[1] * share[1];
  for (size_t i = 0; i < 2; ++i) {
    if (share[i] < kShareMin) continue;  // says nothing about this knot
    const size_t knot = below + i;
    link->ns[knot] = std::max(1.0, value[i] + residual * share[i] / norm);
    link->weight[knot] =
        std::min(kWeightMax, (weight == 0 ? 0 : link->weight[knot]) + static_cast<float>(share[i]));
    link->filled[knot / 64] |= uint64_t{1} << knot % 64;
  }
}

// Samples far off on one side in a row: the link has changed, and all of its table with it.
bool TransferEstimator::TakeStep(Link* link, double ratio) {
  link->recent[link->samples % link->recent.size()] = static_cast<float>(ratio);
  link->surprises = CountSurprise(ratio, link->surprises);
  if (std::abs(link->surprises) < kSurprisesMax || link->samples <= link->recent.size())
    return false;
  link->surprises = 0;
  std::array<float, 5> ratios = link->recent;
  std::sort(ratios.begin(), ratios.end());
  const double factor = static_cast<double>(ratios[ratios.size() / 2]);
  // Only as far as the line vouches for it: a size that jumps up and creeps back would otherwise
  // scale those that are not seen meanwhile again and again.
  for (size_t knot = 0; knot < kKnots; ++knot) {
    if (!(link->filled[knot / 64] >> knot % 64 & 1)) continue;
    const double line = LineNs(*link, KnotBytes(knot));
    link->ns[knot] =
        std::clamp(link->ns[knot] * factor, std::max(1.0, line / kLineRange), line * kLineRange);
  }
  return true;
}

void TransferEstimator::Segment::Observe(double bytes, double sample) {
  const std::array<double, 2> x = {1, bytes / kSplitBytes};
  fit.Observe(x, sample);
  // A line that dips below zero is bent back, through its value at the point that it should
  // explain.
  auto& [latency, slope] = fit.weights;
  const double at_point = std::max(1.0, fit.Value(x));
  if (slope < 0) {
    slope = 0;
    latency = at_point;
  } else if (latency < 0) {
    latency = 0;
    if (x[1] > 0) slope = at_point / x[1];
  }
}

std::vector<SavedLink> TransferEstimator::Export() const {
  std::vector<SavedLink> saved;
  for (size_t i = 0; i < links_.size(); ++i) {
    if (links_[i] == nullptr) continue;
    SavedLink item{static_cast<DomainIndex>(i / domain_count_),
                   static_cast<DomainIndex>(i % domain_count_),
                   {}};
    for (size_t knot = 0; knot < kKnots; ++knot) {
      if (links_[i]->ns[knot] > 0)
        item.points.push_back({static_cast<int64_t>(KnotBytes(knot)), links_[i]->ns[knot]});
    }
    saved.push_back(std::move(item));
  }
  return saved;
}

size_t TransferEstimator::Import(std::span<const SavedLink> saved) {
  size_t counted = 0;
  for (const SavedLink& item : saved) {
    size_t left = kKnots;
    for (const SavedLink::Point& point : item.points) {
      const bool sane = point.ns >= 1 && point.ns <= kDurationMax && point.bytes >= 0 &&
                        item.source < domain_count_ && item.destination < domain_count_ &&
                        item.source != item.destination;
      if (!sane || left == 0) continue;
      --left;
      ++counted;
      Observe(item.source, item.destination, point.bytes, static_cast<DurationNs>(point.ns));
    }
  }
  return counted;
}

std::vector<TransferEstimator::LinkReport> TransferEstimator::Report() const {
  std::vector<LinkReport> reports;
  for (size_t i = 0; i < links_.size(); ++i) {
    if (links_[i] == nullptr) continue;
    const Link& link = *links_[i];
    const auto& [latency, slope] = link.large.fit.weights;
    LinkReport report;
    report.source = static_cast<DomainIndex>(i / domain_count_);
    report.destination = static_cast<DomainIndex>(i % domain_count_);
    report.samples = link.samples;
    report.error = static_cast<double>(link.error);
    report.latency_ns = latency;
    report.bytes_per_second = slope > 0 ? 1e9 * kSplitBytes / slope : 0;
    reports.push_back(report);
  }
  return reports;
}

}  // namespace slice::estimate
