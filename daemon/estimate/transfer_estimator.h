// Durations of copies, per ordered pair of memory domains (link and direction).
//
// PURE. Two robust lines (latency + bytes / bandwidth) cover the small and the large sizes, for
// sizes far from any seen; over them lies a table with sixteen knots per octave, linear between
// knots, that each sample bends where it falls. Samples far off on one side in a row are a change
// of the link and scale the whole table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/units.h"
#include "daemon/estimate/recursive_fit.h"
#include "daemon/estimate/saved.h"

namespace slice::estimate {

class TransferEstimator {
 public:
  static constexpr int64_t kSplitBytes = 256 * 1024;  // between the two lines
  static constexpr double kLatencyNsPrior = 20'000;
  static constexpr double kNsPerBytePrior = 0.25;  // 4 GB/s

  explicit TransferEstimator(size_t domain_count);
  // > 0, except 0 within a domain. Domains out of range: the prior.
  DurationNs Predict(DomainIndex source, DomainIndex destination, int64_t bytes) const;
  // The same without the table.
  DurationNs PredictLine(DomainIndex source, DomainIndex destination, int64_t bytes) const;
  // Ignores durations not above 0, negative sizes and unknown domains.
  void Observe(DomainIndex source, DomainIndex destination, int64_t bytes, DurationNs duration);

  std::vector<SavedLink> Export() const;
  // Learns what was saved; numbers that cannot be are left out. Returns how many points counted.
  size_t Import(std::span<const SavedLink> saved);

  struct LinkReport {
    DomainIndex source = 0, destination = 0;
    uint64_t samples = 0;
    double error = 0;  // mean relative error of the predictions that were made
    double latency_ns = 0, bytes_per_second = 0;  // of the line of large sizes
  };
  std::vector<LinkReport> Report() const;  // links with samples

 private:
  static constexpr int kPerOctave = 16, kOctaveMin = 8, kOctaves = 28;  // 256 B to 64 GiB
  static constexpr size_t kKnots = kPerOctave * kOctaves + 1;

  struct Segment {
    static constexpr std::array<double, 2> kStart = {kLatencyNsPrior, kNsPerBytePrior* kSplitBytes};
    RecursiveFit<2> fit{kStart};  // ns over (1, bytes / split)
    double Ns(double bytes) const { return fit.Value({1, bytes / kSplitBytes}); }
    void Observe(double bytes, double sample);
  };
  struct Link {
    Segment small, large;
    std::array<double, kKnots> ns{};                    // by knot; 0: nothing known
    std::array<float, kKnots> weight{};                 // samples, at most kWeightMax
    std::array<uint64_t, (kKnots + 63) / 64> filled{};  // knots with something in them
    std::array<int8_t, kKnots> knot_surprises{};
    std::array<float, 5> recent{};  // last samples / predictions
    int surprises = 0;              // in a row; the sign is the side
    uint64_t samples = 0;
    float error = 0;
  };
  static size_t KnotBelow(double bytes);
  static double KnotBytes(size_t knot);
  static double LineNs(const Link& link, double bytes);
  static double TableNs(const Link& link, double bytes);
  static void Bend(Link* link, double bytes, double sample);
  static bool TakeStep(Link* link, double ratio);
  const Link* Find(DomainIndex source, DomainIndex destination) const;

  size_t domain_count_;
  std::vector<std::unique_ptr<Link>> links_;  // made by the first sample
};

}  // namespace slice::estimate
