// A round as text: the snapshot, the op batch and its home, for regression tests and benchmarks of
// decisions (tests/sim/rounds, `sliced --record-rounds`).
//
// Lines of a letter and integers, times relative to the snapshot's now, "-" for never, none, or all
// bits of a mask. A round begins with "round <version> ..." and ends with "end".
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "daemon/sim/snapshot.h"

namespace slice::sched {

struct Round {
  sim::Snapshot snapshot;
  std::vector<sim::OpIndex> batch;
  DeviceIndex home = 0;
};

std::string RoundText(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                      DeviceIndex home);
// All rounds of a text. Lines that begin with # are comments. Errors: INVALID, with the line;
// indices are checked, so that what was parsed can be simulated.
Result<std::vector<Round>> ParseRounds(std::string_view text);

}  // namespace slice::sched
