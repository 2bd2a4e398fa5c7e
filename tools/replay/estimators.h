// How well the daemon's estimators predict a profile: `slice-replay estimators`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "tools/replay/profile.h"

namespace slice::replay {

struct EvaluationOptions {
  uint64_t seed = 1;
  size_t folds = 5;
  double flops_per_second = 3e14, bytes_per_second = 2e12;  // roofline of the profiled device
};

// Mean absolute relative errors; 0.01 is one percent. Negative: there was nothing to measure.
struct Accuracy {
  std::string name;  // operator, or link
  size_t rows = 0;
  double cov = -1;      // mean deviation of the samples of one shape: what nobody can predict
  double seen = -1;     // shapes that were measured before
  double heldout = -1;  // shapes that were not
  double table = -1, linear = -1, prior = -1;  // the same, by the estimator's levels alone
  double plain = -1;                           // the same, least squares over (1, tokens or bytes)
};
struct Evaluation {
  std::vector<Accuracy> ops, links;
  Accuracy op_mean, link_mean;  // of the above
};

// Runs are drawn anew from each row's statistics and fed in a shuffled order, as a daemon would
// meet them. Folds hold out whole shapes: all rows of a token count, or of a size.
// Errors: INVALID (fewer shapes than folds).
Result<Evaluation> Evaluate(const Profile& profile, const EvaluationOptions& options);

std::string TextOf(const Evaluation& evaluation);       // a table for people
std::string FiguresJson(const Evaluation& evaluation);  // {"figures": [{"name", "value", "unit"}]}

}  // namespace slice::replay
