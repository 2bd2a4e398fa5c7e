// The load on which simulators are measured: chains of layers over devices, seeded.
#pragma once

#include <cstdint>

#include "daemon/sim/snapshot.h"

namespace slice::sim {

// About `ops` placed operators in 64 instances, half of them online, each a chain of layers with
// weights (everywhere), a KV piece of its own and an activation to the next. Every 32nd operator or
// so runs on another device than the one before it, which costs a copy. No memory is reserved: all
// activations are counted against their domain.
Snapshot MakeWorkload(uint32_t ops, uint32_t devices, uint64_t seed);

}  // namespace slice::sim
