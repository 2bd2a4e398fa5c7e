// The central arbiter of transfers (paper part 4): decides which pending copy may run now.
//
// Each transfer is Watch (tell me when the source is ready) -> Intent -> Recv (destination made) +
// Send (copy) -> Done.
//
//   watching ──Intent──► intent ──Admit──► admitted ──Done──► gone
//       └────────────── Cancel ──┘ (asked of the executor; gone when it answers)
//
// Admission: a transfer needs its source domain's sending side and its destination domain's
// receiving side, both at once, against every admitted transfer of the same or a better class
// (common/queue_rules.h, shared with the simulator). Best class first, then age. Nothing is held
// while waiting for something else, so there is no deadlock. Copies of a worse class do not stand
// in the way: the executor orders copies by class at every chunk boundary. PURE: no clock, no IO.
// Deterministic.
#pragma once

#include <cstdint>
#include <vector>

#include "common/queue_rules.h"
#include "common/units.h"

namespace slice::transfer {

enum class State : uint8_t { kWatching, kIntent, kAdmitted };

class Arbiter {
 public:
  explicit Arbiter(size_t domain_count);

  void Add(TransferId id, DomainIndex source, DomainIndex destination, ServiceClass service_class);
  // The source is ready. False: unknown, or said before (ignored).
  bool Intent(TransferId id);
  // Moves what can run to kAdmitted and appends it, in the order of admission. Call after every
  // Intent and Done.
  void Admit(std::vector<TransferId>* admitted);
  // Done, failed or cancelled: frees its sides. False: unknown.
  bool Remove(TransferId id);
  bool Find(TransferId id, State* state) const;
  size_t size() const { return entries_.size(); }
  size_t pending() const { return pending_; }  // intents that wait

 private:
  struct Entry {
    TransferId id;
    DomainIndex source, destination;
    ServiceClass service_class;
    State state;
    uint64_t age;  // of the intent
  };
  Entry* At(TransferId id);

  std::vector<Entry> entries_;  // few: bounded by what placed ops need
  std::vector<LinkSide> sending_, receiving_;
  std::vector<size_t> order_;  // scratch of Admit
  uint64_t next_age_ = 0;
  size_t pending_ = 0;
};

}  // namespace slice::transfer
