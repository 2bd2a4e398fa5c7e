// What an executor must know: tenants, templates, tensor sets, bindings, each as the request that
// made it and the descriptors that go beside it. Kept so that a new executor can be brought to the
// same state after a death.
//
// Owner and thread: the supervisor, on the server thread. Blocks: Replay, for the acknowledgements.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "common/fd.h"
#include "common/status.h"
#include "common/units.h"
#include "daemon/server/executor_link.h"
#include "slice/proto/executor.pb.h"

namespace slice::server {

class ExecutorTables {
 public:
  struct Entry {
    proto::ExecutorRequest request;
    std::vector<Fd> fds;
    uint32_t tenant =
        0;  // who goes when the entry cannot be replayed; 0 = nobody (templates are shared)
    std::vector<int> raw_fds() const;
  };
  // Order of replay: each kind refers only to earlier ones.
  enum Kind { kTenant = 0, kTemplate = 1, kSet = 2, kBinding = 3, kKindCount = 4 };

  // Kind, id and tenant of an add request; kKindCount when it is none.
  static Kind KindOf(const proto::ExecutorRequest& request, uint32_t* id, uint32_t* tenant);
  // `request` is one of the add requests.
  void Insert(Entry entry);
  void Erase(Kind kind, uint32_t id);
  // The tenant, its sets and its bindings.
  void EraseTenant(uint32_t tenant);
  bool Contains(Kind kind, uint32_t id) const { return entries_[kind].contains(id); }
  size_t size() const;

  struct Failure {
    Status status;
    Kind kind = kKindCount;
    uint32_t id = 0;
    uint32_t tenant = 0;
  };
  // Sends everything. An entry that is refused by a living executor is reported in *refused and
  // left out; a death or timeout ends the replay with its status, and *refused holds the entry at
  // which it happened as the last one.
  Status Replay(ExecutorLink* link, DurationNs timeout, std::vector<Failure>* refused) const;

 private:
  std::map<uint32_t, Entry> entries_[kKindCount];
};

}  // namespace slice::server
