#include "daemon/server/template_store.h"

#include <cstring>
#include <utility>

namespace slice::server {

Result<TemplateId> TemplateStore::Acquire(const engine::TenantUser& asker,
                                          const std::string& serialized, bool* known) {
  const uint64_t hash = graph::ContentHash(serialized);
  for (auto& [id, entry] : entries_) {
    if (entry.uid == asker.uid && entry.graph->content_hash() == hash &&
        entry.bytes.bytes() == serialized.size() &&
        std::memcmp(entry.bytes.data(), serialized.data(), serialized.size()) == 0) {
      ++entry.references;
      *known = true;
      return TemplateId{id};
    }
  }
  Entry entry;
  entry.uid = asker.uid;
  entry.references = 1;
  SLICE_ASSIGN_OR_RETURN(entry.graph, graph::Template::Parse(serialized));
  SLICE_ASSIGN_OR_RETURN(Fd memfd, CreateMemfd("slice-template", serialized.size()));
  {
    SLICE_ASSIGN_OR_RETURN(Mapping writable, Mapping::Map(memfd, serialized.size(), true));
    std::memcpy(writable.data(), serialized.data(), serialized.size());
  }
  SLICE_RETURN_IF_ERROR(SealFutureWrite(memfd));
  SLICE_ASSIGN_OR_RETURN(entry.bytes, Mapping::Map(memfd, serialized.size(), false));
  const TemplateId id{next_id_++};
  proto::ExecutorRequest request;
  request.mutable_add_template()->set_template_id(id.value);
  request.mutable_add_template()->set_bytes(serialized.size());
  std::vector<Fd> fds;
  fds.push_back(std::move(memfd));
  SLICE_RETURN_IF_ERROR(supervisor_->Add(std::move(request), std::move(fds), asker));
  Status added;
  loop_->Call([&] { added = loop_->engine().AddTemplate(id, entry.graph); });
  if (!added.ok()) {
    supervisor_->DropTemplate(id);
    return added;
  }
  entries_.emplace(id.value, std::move(entry));
  *known = false;
  return id;
}

void TemplateStore::Release(TemplateId id) {
  const auto found = entries_.find(id.value);
  if (found == entries_.end() || --found->second.references != 0) return;
  entries_.erase(found);
  // Its last bindings are removed, but the engine holds them until their instances have ended.
  loop_->Call([this, id] {
    loop_->WhenTrue([this, id] { return loop_->engine().RemoveTemplate(id).ok(); },
                    [this, id] { mailbox_->Post([this, id] { supervisor_->DropTemplate(id); }); });
  });
}

}  // namespace slice::server
