// The decisions of `slice` by brute force: every candidate in full by the naive simulator, every
// level written down again. What the policy decides with shared prefixes and early stops must be
// what this decides.
#pragma once

#include <span>

#include "daemon/sched/policy.h"

namespace slice::sched {

// The policy's Decide; candidates are all complete.
Decision DecideExhaustively(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                            DeviceIndex home, const sim::Options& options,
                            const estimate::TransferEstimator& transfers);

}  // namespace slice::sched
