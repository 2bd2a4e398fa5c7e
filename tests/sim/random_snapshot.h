// Random but legal snapshots: every access hazard has its edge, links carry one copy at a time,
// running ops have no predecessors. Everything else is anything goes.
#pragma once

#include <random>
#include <vector>

#include "daemon/sim/simulator.h"

namespace slice::sim {

struct RandomCase {
  Snapshot snapshot;
  std::vector<Placement> batch;
  Rules rules;
  Options options;
};

RandomCase MakeRandomCase(uint64_t seed);
// Links with different speeds, learned from clean samples.
estimate::TransferEstimator MakeRandomTransfers(uint64_t seed, size_t domain_count);

}  // namespace slice::sim
