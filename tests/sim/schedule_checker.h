// What must hold of any timeline, whatever the scheduling rules: asked of the simulator's output,
// and usable on others.
#pragma once

#include <string>

#include "daemon/sim/simulator.h"

namespace slice::sim {

// Empty when all holds; else what is wrong. Each op at most once and whole, only where it may run
// or was placed; after its predecessors and not before its window; one op at a time per device; no
// offline op across a phantom of the snapshot.
std::string CheckSchedule(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules,
                          const Timeline& timeline);

}  // namespace slice::sim
