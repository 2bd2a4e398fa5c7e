#include "daemon/gmg/access_queue.h"

#include <algorithm>

#include "common/check.h"

namespace slice::gmg {

size_t AccessQueue::Find(AccessEntry::Kind kind, uint32_t owner) const {
  size_t i = 0;
  while (i < entries_.size() && (entries_[i].kind != kind || entries_[i].owner != owner)) ++i;
  return i;
}

void AccessQueue::InsertBefore(AccessEntry::Kind kind, uint32_t owner, const AccessEntry& entry) {
  const size_t at = Find(kind, owner);
  SLICE_CHECK(at < entries_.size(), "move for an owner without an entry");
  entries_.insert(entries_.begin() + static_cast<ptrdiff_t>(at), entry);
}

bool AccessQueue::MayRead(AccessEntry::Kind kind, uint32_t owner) const {
  for (const AccessEntry& entry : entries_) {
    if (entry.kind == kind && entry.owner == owner) return true;
    if (entry.write) return false;
  }
  return false;
}

bool AccessQueue::MayWrite(AccessEntry::Kind kind, uint32_t owner) const {
  return IsFirst(kind, owner);
}

bool AccessQueue::IsFirst(AccessEntry::Kind kind, uint32_t owner) const {
  return !entries_.empty() && entries_.front().kind == kind && entries_.front().owner == owner;
}

void AccessQueue::UseDone(AccessEntry::Kind kind, uint32_t owner) {
  const size_t at = Find(kind, owner);
  SLICE_CHECK(at < entries_.size() && entries_[at].uses_left > 0, "use of a piece ended twice");
  if (--entries_[at].uses_left == 0) entries_.erase(entries_.begin() + static_cast<ptrdiff_t>(at));
}

void AccessQueue::Remove(AccessEntry::Kind kind, uint32_t owner) {
  const size_t at = Find(kind, owner);
  if (at < entries_.size()) entries_.erase(entries_.begin() + static_cast<ptrdiff_t>(at));
}

void AccessQueue::Restore(AccessEntry::Kind kind, uint32_t owner, uint32_t uses, bool write) {
  const size_t at = Find(kind, owner);
  if (at < entries_.size()) {
    entries_[at].uses_left = static_cast<uint16_t>(uses);
    return;
  }
  AccessEntry entry;
  entry.kind = kind;
  entry.write = write;
  entry.owner = owner;
  entry.uses_left = static_cast<uint16_t>(uses);
  entries_.insert(entries_.begin(), entry);
}

bool AccessQueue::LostAtTail(bool lost) const {
  return lost && std::none_of(entries_.begin(), entries_.end(),
                              [](const AccessEntry& entry) { return entry.resets; });
}

}  // namespace slice::gmg
