// The simulator in the plainest words: one std::priority_queue of events, one of ready ops for each
// device, flat arrays, everything in snapshot order. Obviously right; the fast one must equal it to
// the nanosecond, and is measured against it (tests/bench/sim_bench.cc), so it does nothing slowly
// on purpose either. Shares no code with daemon/sim.
#pragma once

#include <span>

#include "daemon/sim/simulator.h"

namespace slice::sim {

void NaiveRun(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules,
              const Options& options, const estimate::TransferEstimator& transfers, Timeline* out);

}  // namespace slice::sim
