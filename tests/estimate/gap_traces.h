// Gaps to test and measure GapEstimator with: from recorded request traces, and from a generator.
#pragma once

#include <algorithm>
#include <cmath>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "daemon/estimate/gap_estimator.h"

namespace slice::estimate {

// Times between the arrivals of a trace (arrival_ms,...). The file's clock ticks in milliseconds;
// arrivals are spread inside their tick, or a tenth of all gaps would be exactly 0. Empty if there
// is no such file.
inline std::vector<DurationNs> TraceGaps(const std::string& path, uint64_t seed) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<DurationNs> inside(0, kMillisecond - 1);
  std::vector<DurationNs> times;
  while (std::getline(file, line))
    times.push_back(std::stoll(line) * kMillisecond + inside(random));
  std::sort(times.begin(), times.end());
  std::vector<DurationNs> gaps;
  for (size_t i = 1; i < times.size(); ++i) gaps.push_back(times[i] - times[i - 1]);
  return gaps;
}

// Decode-like gaps: log-normal around `median`, one in twenty ten times as long (a slow client),
// the median drifting by half up and down over the run.
inline std::vector<DurationNs> GeneratedGaps(DurationNs median, size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::lognormal_distribution<double> spread(0, 0.5);
  std::bernoulli_distribution slow(0.05);
  std::vector<DurationNs> gaps;
  for (size_t i = 0; i < count; ++i) {
    const double drift = 1 + 0.5 * std::sin(static_cast<double>(i) / 200);
    gaps.push_back(static_cast<DurationNs>(static_cast<double>(median) * drift * spread(random) *
                                           (slow(random) ? 10 : 1)));
  }
  return gaps;
}

// Shares of the gaps below what was predicted for each from those before it.
struct Coverage {
  double p10 = 0, p90 = 0;
};
inline Coverage Replay(const std::vector<DurationNs>& gaps) {
  GapEstimator estimator;
  size_t below_p10 = 0, below_p90 = 0, predicted = 0;
  for (const DurationNs gap : gaps) {
    const GapEstimator::Gap expected = estimator.Predict(1);
    if (expected.known) {
      ++predicted;
      below_p10 += gap < expected.p10;
      below_p90 += gap < expected.p90;
    }
    estimator.ObserveNext(1, gap);
  }
  const auto share = [&](size_t count) {
    return static_cast<double>(count) / static_cast<double>(std::max<size_t>(predicted, 1));
  };
  return {share(below_p10), share(below_p90)};
}

}  // namespace slice::estimate
