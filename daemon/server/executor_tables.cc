#include "daemon/server/executor_tables.h"

#include <utility>

namespace slice::server {

std::vector<int> ExecutorTables::Entry::raw_fds() const {
  std::vector<int> raw;
  for (const Fd& fd : fds) raw.push_back(fd.get());
  return raw;
}

ExecutorTables::Kind ExecutorTables::KindOf(const proto::ExecutorRequest& request, uint32_t* id,
                                            uint32_t* tenant) {
  switch (request.kind_case()) {
    case proto::ExecutorRequest::kAddTenant:
      *id = *tenant = request.add_tenant().tenant();
      return kTenant;
    case proto::ExecutorRequest::kAddTemplate:
      *id = request.add_template().template_id();
      *tenant = 0;
      return kTemplate;
    case proto::ExecutorRequest::kAddSet:
      *id = request.add_set().set_id();
      *tenant = request.add_set().tenant();
      return kSet;
    case proto::ExecutorRequest::kAddBinding:
      *id = request.add_binding().binding();
      *tenant = request.add_binding().tenant();
      return kBinding;
    default:
      return kKindCount;
  }
}

void ExecutorTables::Insert(Entry entry) {
  uint32_t id = 0;
  const Kind kind = KindOf(entry.request, &id, &entry.tenant);
  SLICE_CHECK(kind != kKindCount, "only add requests are kept");
  entries_[kind].insert_or_assign(id, std::move(entry));
}

void ExecutorTables::Erase(Kind kind, uint32_t id) { entries_[kind].erase(id); }

void ExecutorTables::EraseTenant(uint32_t tenant) {
  for (const Kind kind : {kTenant, kSet, kBinding}) {
    std::erase_if(entries_[kind],
                  [tenant](const auto& item) { return item.second.tenant == tenant; });
  }
}

size_t ExecutorTables::size() const {
  size_t total = 0;
  for (const auto& table : entries_) total += table.size();
  return total;
}

Status ExecutorTables::Replay(ExecutorLink* link, DurationNs timeout,
                              std::vector<Failure>* refused) const {
  for (int kind = 0; kind < kKindCount; ++kind) {
    for (const auto& [id, entry] : entries_[kind]) {
      const Status status = link->Call(entry.request, entry.raw_fds(), timeout);
      if (status.ok()) continue;
      refused->push_back({status, static_cast<Kind>(kind), id, entry.tenant});
      if (link->broken()) return status;
    }
  }
  return Status::Ok();
}

}  // namespace slice::server
