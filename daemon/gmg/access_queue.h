// The access queue of one piece (a tensor of a managed or mutable set): who may touch it, in submit
// order.
//
// A read waits for earlier writes, a write for all earlier accesses. An entry is one instance's
// whole use of the piece (several of its ops may touch it), a tenant command, or a move to another
// domain.
//
//   Append ──► [ entry | entry | move | entry ] ──► gone at its last UseDone or Remove
//
// Owner: the engine; its thread only. An entry names its owner by its slot in the engine's table of
// such things; the owner takes its entry out before the slot is used again.
#pragma once

#include <cstdint>
#include <vector>

#include "common/units.h"
#include "daemon/gmg/segment.h"

namespace slice::gmg {

struct AccessEntry {
  using Kind = AccessKind;
  uint32_t owner = 0;      // slot of the instance, command part or transfer
  uint16_t uses_left = 1;  // ops of the instance that touch the piece and are not done
  Kind kind = Kind::kInstance;
  bool write : 1 = false;   // any of its uses writes
  bool resets : 1 = false;  // a command that makes a lost piece usable again
};
static_assert(sizeof(AccessEntry) == 8, "there is one for each piece of each live instance");

class AccessQueue {
 public:
  void Append(const AccessEntry& entry) { entries_.push_back(entry); }
  // Directly before the owner's entry, which must be there.
  void InsertBefore(AccessEntry::Kind kind, uint32_t owner, const AccessEntry& entry);

  // Whether `owner`'s use may begin now. False when it has no entry.
  bool MayRead(AccessEntry::Kind kind, uint32_t owner) const;
  bool MayWrite(AccessEntry::Kind kind, uint32_t owner) const;
  bool IsFirst(AccessEntry::Kind kind, uint32_t owner) const;
  // One use is over; the entry goes with its last.
  void UseDone(AccessEntry::Kind kind, uint32_t owner);
  void Remove(AccessEntry::Kind kind, uint32_t owner);  // nothing happens without an entry

  // The owner starts over: all its uses count again. An entry that is gone already comes back at
  // the front.
  void Restore(AccessEntry::Kind kind, uint32_t owner, uint32_t uses, bool write);

  // Whether something appended now would find the piece lost: `lost` unless a reset is on its way.
  bool LostAtTail(bool lost) const;

  bool Contains(AccessEntry::Kind kind, uint32_t owner) const {
    return Find(kind, owner) < entries_.size();
  }
  const std::vector<AccessEntry>& entries() const { return entries_; }
  bool empty() const { return entries_.empty(); }

 private:
  size_t Find(AccessEntry::Kind kind, uint32_t owner) const;
  std::vector<AccessEntry> entries_;  // short: overlapping chunks and decode steps of one sequence
};

}  // namespace slice::gmg
