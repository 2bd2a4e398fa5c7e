// Registered templates, shared between the sessions of one user by content (bytes are compared, the
// hash only finds candidates). Users do not share: whether another one has a program must not show.
//
// Owner and thread: the server, on the server thread. Blocks: Acquire, for the executor's check.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <string>

#include "common/fd.h"
#include "common/status.h"
#include "daemon/graph/template.h"
#include "daemon/server/engine_loop.h"
#include "daemon/server/mailbox.h"
#include "daemon/server/supervisor.h"

namespace slice::server {

class TemplateStore {
 public:
  TemplateStore(EngineLoop* loop, Supervisor* supervisor, Mailbox* mailbox)
      : loop_(loop), supervisor_(supervisor), mailbox_(mailbox) {}

  // Takes a reference. Errors: GRAPH, OVERFLOW (structure), OP_NOT_ALLOWED, EXECUTOR_LOST, the
  // engine's.
  Result<TemplateId> Acquire(const engine::TenantUser& asker, const std::string& serialized,
                             bool* known);
  void AddReference(TemplateId id) { ++entries_.at(id.value).references; }
  void Release(TemplateId id);
  std::shared_ptr<const graph::Template> Find(TemplateId id) const {
    return entries_.at(id.value).graph;
  }
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    uid_t uid = 0;
    std::shared_ptr<const graph::Template> graph;
    Mapping bytes;  // of the memfd that the executor gets
    uint32_t references = 0;
  };
  EngineLoop* loop_;
  Supervisor* supervisor_;
  Mailbox* mailbox_;  // to the server thread
  std::map<uint32_t, Entry> entries_;
  uint32_t next_id_ = 1;
};

}  // namespace slice::server
