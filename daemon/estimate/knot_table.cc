#include "daemon/estimate/knot_table.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace slice::estimate {
namespace {

constexpr double kSpike = 2;
constexpr uint32_t kSpikeSamples = 3;
constexpr double kJump = 0.06;  // neighbours that differ less are on one ramp

double Ramp(const Knot& lower, const Knot& upper, double cost) {
  if (upper.cost <= lower.cost) return lower.ns;
  return lower.ns + (upper.ns - lower.ns) * (cost - lower.cost) / (upper.cost - lower.cost);
}

// The number in [first, last], 0 < first <= last, with the most trailing zero bits.
uint64_t Roundest(uint64_t first, uint64_t last) {
  const int shift = 63 - std::countl_zero((first - 1) ^ last);
  return last >> shift << shift;
}

bool ByCost(const Knot& knot, double cost) { return knot.cost < cost; }

}  // namespace

KnotTable::Reading KnotTable::Read(double cost, int64_t size, bool leave_out_equal) const {
  Reading reading;
  const auto at = std::lower_bound(knots_.begin(), knots_.end(), cost, ByCost);
  const bool equal = at != knots_.end() && at->cost == cost;
  if (equal && !leave_out_equal) {
    reading.lower = reading.upper = &*at;
    reading.ramp = reading.step = at->ns;
    return reading;
  }
  const auto above = equal ? at + 1 : at;
  if (at != knots_.begin()) reading.lower = &*(at - 1);
  if (above != knots_.end()) reading.upper = &*above;
  if (!reading.inside()) return reading;
  reading.ramp = Ramp(*reading.lower, *reading.upper, cost);
  reading.step = Level(*reading.lower, *reading.upper, size, reading.ramp);
  return reading;
}

double KnotTable::Level(const Knot& lower, const Knot& upper, int64_t size, double ramp) const {
  if (std::abs(upper.ns - lower.ns) <= kJump * lower.ns) return ramp;
  if (unit_ <= 0 || lower.size < unit_ || lower.size >= size || size >= upper.size) return ramp;
  const auto units = [this](int64_t value) { return static_cast<uint64_t>(value / unit_); };
  const uint64_t edge = Roundest(units(lower.size), units(upper.size) - 1);
  return size > static_cast<int64_t>(edge) * unit_ ? upper.ns : lower.ns;
}

void KnotTable::Set(const Knot& knot, size_t knots_max) {
  auto at = std::lower_bound(knots_.begin(), knots_.end(), knot.cost, ByCost);
  if (knot.size > 0) unit_ = std::gcd(unit_, knot.size);  // of shapes of equal cost, too
  if (at != knots_.end() && at->cost == knot.cost) {
    *at = knot;
  } else {
    at = knots_.insert(at, knot);
  }
  const auto place = static_cast<size_t>(at - knots_.begin());
  if (IsSpike(place + 1)) knots_.erase(knots_.begin() + static_cast<std::ptrdiff_t>(place) + 1);
  if (place > 0 && IsSpike(place - 1))
    knots_.erase(knots_.begin() + static_cast<std::ptrdiff_t>(place) - 1);
  if (knots_.size() > knots_max) DropPlainest();
}

// A shape that hardly ever ran, far above or far below both neighbours: an outlier that may never
// run again to be put right.
bool KnotTable::IsSpike(size_t place) const {
  if (place == 0 || place + 1 >= knots_.size() || knots_[place].samples >= kSpikeSamples)
    return false;
  const auto [low, high] = std::minmax(knots_[place - 1].ns, knots_[place + 1].ns);
  return knots_[place].ns > kSpike * high || knots_[place].ns < low / kSpike;
}

void KnotTable::DropPlainest() {
  size_t plainest = 0;
  double least = HUGE_VAL;
  for (size_t i = 1; i + 1 < knots_.size(); ++i) {
    const double read = Ramp(knots_[i - 1], knots_[i + 1], knots_[i].cost);
    const double error = std::abs(read / knots_[i].ns - 1);
    if (error < least) {
      least = error;
      plainest = i;
    }
  }
  knots_.erase(knots_.begin() + static_cast<std::ptrdiff_t>(plainest));
}

}  // namespace slice::estimate
