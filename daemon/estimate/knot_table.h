// Piecewise table of a signature's durations over its cost. Inside of OpEstimator. PURE.
//
// Knots are measured shapes. Between two of them a duration is read off in one of two ways, and the
// caller keeps count of which one does better: a ramp (linear in cost), or a step. Kernels work in
// tiles: their time stays level and jumps just after a round size. So a step goes up behind the
// roundest size between the two knots: the one divisible by the largest power of two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace slice::estimate {

struct Knot {
  double cost = 0;  // the table's axis: a duration by data sheet
  double ns = 0;
  int64_t flops = 0, bytes = 0, size = 0;
  float deviation = 0;  // mean absolute, ns
  uint32_t samples = 0;
};

class KnotTable {
 public:
  // `lower`, `upper`: the knots around a cost, null where there is none. A knot of that very cost
  // is both, unless it was to be left out.
  struct Reading {
    const Knot* lower = nullptr;
    const Knot* upper = nullptr;
    double ramp = 0, step = 0;  // ns; only between two knots
    bool inside() const { return lower != nullptr && upper != nullptr; }
  };
  Reading Read(double cost, int64_t size, bool leave_out_equal) const;

  // Adds a knot, or replaces the one of the same cost; drops a neighbour that this makes out to be
  // an outlier. Past `knots_max` the knot that its neighbours explain best goes, so that knots
  // gather where the curve bends.
  void Set(const Knot& knot, size_t knots_max);

  const std::vector<Knot>& knots() const { return knots_; }  // ascending cost

 private:
  double Level(const Knot& lower, const Knot& upper, int64_t size, double ramp) const;
  bool IsSpike(size_t place) const;
  void DropPlainest();

  std::vector<Knot> knots_;
  int64_t unit_ = 0;  // greatest common divisor of the sizes
};

}  // namespace slice::estimate
