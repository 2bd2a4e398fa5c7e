// The simulator in the plainest words: no heaps, no counters, everything looked up again at every
// point in time. Slow and obviously right; the fast one must equal it to the nanosecond.
#pragma once

#include <span>

#include "daemon/sim/simulator.h"

namespace slice::sim {

void NaiveRun(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules,
              const Options& options, const estimate::TransferEstimator& transfers, Timeline* out);

}  // namespace slice::sim
