#include "daemon/transfer/arbiter.h"

#include <algorithm>

#include "common/check.h"

namespace slice::transfer {

Arbiter::Arbiter(size_t domain_count) : sending_(domain_count), receiving_(domain_count) {}

Arbiter::Entry* Arbiter::At(TransferId id) {
  for (Entry& entry : entries_) {
    if (entry.id == id) return &entry;
  }
  return nullptr;
}

void Arbiter::Add(TransferId id, DomainIndex source, DomainIndex destination,
                  ServiceClass service_class) {
  SLICE_CHECK(source < sending_.size() && destination < receiving_.size() && source != destination,
              "transfer between unknown or equal domains");
  SLICE_CHECK(At(id) == nullptr, "transfer id used twice");
  entries_.push_back({id, source, destination, service_class, State::kWatching, 0});
}

bool Arbiter::Intent(TransferId id) {
  Entry* const entry = At(id);
  if (entry == nullptr || entry->state != State::kWatching) return false;
  entry->state = State::kIntent;
  entry->age = next_age_++;
  ++pending_;
  return true;
}

void Arbiter::Admit(std::vector<TransferId>* admitted) {
  if (pending_ == 0) return;
  order_.clear();
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].state == State::kIntent) order_.push_back(i);
  }
  std::sort(order_.begin(), order_.end(), [this](size_t a, size_t b) {
    return CopiesBefore({entries_[a].service_class, entries_[a].age},
                        {entries_[b].service_class, entries_[b].age});
  });
  for (const size_t i : order_) {
    Entry& entry = entries_[i];
    LinkSide& source = sending_[entry.source];
    LinkSide& destination = receiving_[entry.destination];
    if (source.Blocks(entry.service_class) || destination.Blocks(entry.service_class)) continue;
    source.Enter(entry.service_class);
    destination.Enter(entry.service_class);
    entry.state = State::kAdmitted;
    --pending_;
    admitted->push_back(entry.id);
  }
}

bool Arbiter::Remove(TransferId id) {
  Entry* const entry = At(id);
  if (entry == nullptr) return false;
  if (entry->state == State::kAdmitted) {
    sending_[entry->source].Leave(entry->service_class);
    receiving_[entry->destination].Leave(entry->service_class);
  } else if (entry->state == State::kIntent) {
    --pending_;
  }
  *entry = entries_.back();
  entries_.pop_back();
  return true;
}

bool Arbiter::Find(TransferId id, State* state) const {
  const Entry* const entry = const_cast<Arbiter*>(this)->At(id);
  if (entry == nullptr) return false;
  *state = entry->state;
  return true;
}

}  // namespace slice::transfer
