// Rounds of the demo, recorded with `sliced --record-rounds` (tests/sim/rounds/README.md): what the
// scheduler really asks the simulator.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/sched/round_text.h"
#include "daemon/sim/simulator.h"

namespace slice::sched {

// The checked-in rounds. Empty, with a line on standard error, when the file is missing or wrong.
std::vector<Round> RecordedRounds();

// The round in a window of at least `ops` ops on eight devices: copies of it side by side, the
// first ones on devices of their own, the others queued there. Batch and candidates are the first
// copy's.
Round Widen(const Round& round, size_t ops);

// What `slice` would simulate for it: home, the other devices that may run the batch, a deferral
// for an offline one.
std::vector<sim::Candidate> CandidatesOf(const Round& round);

}  // namespace slice::sched
