// Who goes first: the order in which a device takes ready operators, and when a copy may run.
//
// One place for rules that the executor's queue, the engine's arbiter and the what-if simulator
// must agree on: what is simulated is then what happens. docs/simulation.md says them in words.
// Pure; any thread.
#pragma once

#include <cstdint>

#include "common/units.h"

namespace slice {

// What a device orders ready operators by.
struct RunKey {
  ServiceClass service_class = ServiceClass::kOnline;
  int32_t priority = 0;   // higher first
  uint64_t order = 0;     // engine order: lower first
  uint64_t instance = 0;  // ties: lower instance, then lower operator
  uint32_t op = 0;
};

// Whether a ready operator with key `a` is taken before one with key `b`.
inline bool RunsBefore(const RunKey& a, const RunKey& b) {
  if (a.service_class != b.service_class) return a.service_class < b.service_class;
  if (a.priority != b.priority) return a.priority > b.priority;
  if (a.order != b.order) return a.order < b.order;
  if (a.instance != b.instance) return a.instance < b.instance;
  return a.op < b.op;
}

// What waiting copies are ordered by.
struct CopyKey {
  ServiceClass service_class = ServiceClass::kOnline;
  uint64_t age = 0;  // counts up: lower is older
};

// Whether a waiting copy with key `a` is considered before one with key `b`.
inline bool CopiesBefore(const CopyKey& a, const CopyKey& b) {
  if (a.service_class != b.service_class) return a.service_class < b.service_class;
  return a.age < b.age;
}

// The sending or the receiving side of a domain. A copy needs the sending side of its source and
// the receiving side of its destination, both at once, free of copies of its own or a better class.
// Copies of a worse class do not stand in the way: they give way at their next chunk boundary.
class LinkSide {
 public:
  bool Blocks(ServiceClass service_class) const {
    return online_ > 0 || (service_class == ServiceClass::kOffline && offline_ > 0);
  }
  void Enter(ServiceClass service_class) { ++Count(service_class); }
  void Leave(ServiceClass service_class) { --Count(service_class); }

 private:
  uint32_t& Count(ServiceClass service_class) {
    return service_class == ServiceClass::kOnline ? online_ : offline_;
  }
  uint32_t online_ = 0, offline_ = 0;  // admitted copies, by class
};

}  // namespace slice
