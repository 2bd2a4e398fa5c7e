// Cold calls: tenants, templates, tensor sets, bindings. Each checks everything first and changes
// nothing on error.
#include <algorithm>

#include "common/tensor_meta.h"
#include "daemon/engine/engine_impl.h"

namespace slice::engine {

using gmg::MemoryKind;

namespace {
MemoryKind KindOf(TensorKind kind) {
  switch (kind) {
    case TensorKind::kConstant:
      return MemoryKind::kWeights;
    case TensorKind::kMutable:
      return MemoryKind::kMutable;
    case TensorKind::kManaged:
      return MemoryKind::kManaged;
  }
  return MemoryKind::kManaged;
}
const char* KindName(TensorKind kind) {
  switch (kind) {
    case TensorKind::kConstant:
      return "a constant";
    case TensorKind::kMutable:
      return "a mutable tensor";
    case TensorKind::kManaged:
      return "a managed tensor";
  }
  return "?";
}
}  // namespace

Status EngineImpl::AddTenant(const TenantConfig& config, TimeNs now) {
  now_ = now;
  if (!config.id || tenants_.contains(config.id))
    return Error(StatusCode::kInvalid, "session %u is there already", config.id.value);
  if (config.home >= devices_.size()) {
    return Error(StatusCode::kInvalid, "home device %u does not exist, there are %zu", config.home,
                 devices_.size());
  }
  auto tenant = std::make_unique<Tenant>();
  tenant->config = config;
  const uint64_t all = devices_.size() == 64 ? ~uint64_t{0} : (uint64_t{1} << devices_.size()) - 1;
  if (tenant->config.device_mask == 0) tenant->config.device_mask = all;
  tenant->config.device_mask &= all;
  if ((tenant->config.device_mask >> config.home & 1) == 0) {
    return Error(StatusCode::kInvalid, "home device '%s' is not among the session's devices",
                 config_.devices[config.home].name.c_str());
  }
  tenant->record = gmg_.AllocateRecord(gmg::kTenants);
  if (tenant->record == gmg::RangeAllocator::kNone) {
    return Error(StatusCode::kQuota, "%u sessions are open, the daemon's limit",
                 gmg_.count(gmg::kTenants));
  }
  tenants_.emplace(config.id, std::move(tenant));
  work_dirty_ = true;
  Publish();
  return Status::Ok();
}

Status EngineImpl::AddTemplate(TemplateId id, std::shared_ptr<const graph::Template> graph) {
  if (!id || graph == nullptr || templates_.contains(id)) {
    return Error(StatusCode::kInvalid, "template %u is there already", id.value);
  }
  SLICE_RETURN_IF_ERROR(gmg::Gmg::Fits(*graph));
  auto entry = std::make_unique<TemplateEntry>();
  entry->id = id;
  entry->graph = std::move(graph);
  const graph::Template& source = *entry->graph;
  entry->record = gmg_.AddTemplate(id, source);
  if (entry->record == gmg::RangeAllocator::kNone) {
    return Error(StatusCode::kQuota, "%u templates are registered, the daemon's limit",
                 gmg_.count(gmg::kTemplates));
  }
  entry->groups.resize(source.groups().size());
  entry->last_use.assign(source.crossing().size(), 0);
  entry->dynamic_uses.assign(source.dynamics().size(), 0);
  entry->dynamic_last.assign(source.dynamics().size(), graph::kNoGroup);
  for (uint32_t g = 0; g < source.groups().size(); ++g) {
    const graph::Group& group = source.groups()[g];
    TemplateEntry::GroupPlan& plan = entry->groups[g];
    for (const uint32_t value : group.values_in) plan.in.push_back(source.crossing_index(value));
    for (const uint32_t value : group.values_out) plan.out.push_back(source.crossing_index(value));
    for (const uint32_t result : group.results) {
      if (source.crossing_index(source.results()[result]) == graph::kNoIndex)
        plan.scratch.push_back(result);
    }
    for (const uint32_t dynamic : group.dynamic_in) {
      ++entry->dynamic_uses[dynamic];
      entry->dynamic_last[dynamic] = g;
    }
  }
  for (uint32_t c = 0; c < source.crossing().size(); ++c)
    entry->last_use[c] = source.crossing()[c].consumers.back();
  templates_.emplace(id, std::move(entry));
  return Status::Ok();
}

Status EngineImpl::RemoveTemplate(TemplateId id) {
  const auto found = templates_.find(id);
  if (found == templates_.end()) return Error(StatusCode::kStale, "template %u is gone", id.value);
  const TemplateEntry* const entry = found->second.get();
  const auto bindings =
      std::count_if(bindings_.begin(), bindings_.end(),
                    [entry](const auto& item) { return item.second->graph == entry; });
  if (bindings > 0) {
    return Error(StatusCode::kStale, "template %u is used by %td bindings; destroy them first",
                 id.value, bindings);
  }
  gmg_.RemoveTemplate(found->second->record);
  templates_.erase(found);
  return Status::Ok();
}

Status EngineImpl::AddTensorSet(const TensorSetConfig& config, TimeNs now) {
  now_ = now;
  Tenant* const tenant = FindTenant(config.tenant);
  if (tenant == nullptr || tenant->removing)
    return Error(StatusCode::kStale, "session %u is gone", config.tenant.value);
  if (!config.id || sets_.contains(config.id))
    return Error(StatusCode::kInvalid, "tensor set %u is there already", config.id.value);
  if (config.home >= config_.domains.size()) {
    return Error(StatusCode::kInvalid, "memory domain %u does not exist, there are %zu",
                 config.home, config_.domains.size());
  }
  int64_t bytes = 0;
  for (const auto& tensor : config.tensors) {
    if (tensor.bytes < 0 || __builtin_add_overflow(bytes, tensor.bytes, &bytes)) {
      return Error(StatusCode::kOverflow, "tensor '%s': the set's bytes do not fit in 63 bits",
                   tensor.name.c_str());
    }
  }
  const char* const domain = config_.domains[config.home].name.c_str();
  const auto number = [](int64_t n) { return static_cast<long long>(n); };
  if (bytes > ledger_.retained_capacity(config.home)) {
    return Error(StatusCode::kNeverFits,
                 "%lld bytes of tensors; domain '%s' has %lld bytes for weights and state",
                 number(bytes), domain, number(ledger_.retained_capacity(config.home)));
  }
  if (bytes > ledger_.retained_free(config.home)) {
    return Error(StatusCode::kQuota,
                 "%lld bytes of tensors; domain '%s' has %lld of %lld bytes free; held by %s",
                 number(bytes), domain, number(ledger_.retained_free(config.home)),
                 number(ledger_.retained_capacity(config.home)),
                 ledger_.Holders(config.home, false).c_str());
  }
  const int64_t held = ledger_.retained_used(config.tenant) + ledger_.pool_used(config.tenant);
  if (tenant->config.memory_bytes_max > 0 && bytes > tenant->config.memory_bytes_max - held) {
    return Error(StatusCode::kQuota,
                 "%lld bytes of tensors; the session holds %lld of its %lld bytes; release some",
                 number(bytes), number(held), number(tenant->config.memory_bytes_max));
  }
  const bool has_pieces = config.kind != TensorKind::kConstant;
  auto set = std::make_unique<TensorSet>();
  set->config = config;
  set->config.segment_domains |= uint64_t{1} << config.home;
  set->tenant = tenant;
  set->bytes = bytes;
  set->resident = uint64_t{1} << config.home;
  if (has_pieces) set->pieces.resize(config.tensors.size());
  for (uint32_t t = 0; t < set->pieces.size(); ++t) {
    Piece& piece = set->pieces[t];
    piece.set = set.get();
    piece.tensor = t;
    piece.bytes = config.tensors[t].bytes;
    piece.domain = config.home;
    piece.managed = config.kind == TensorKind::kManaged;
    piece.record = gmg_.AllocateRecord(gmg::kPieces);
    if (piece.record == gmg::RangeAllocator::kNone) {
      for (uint32_t before = 0; before < t; ++before)
        gmg_.FreeRecord(gmg::kPieces, set->pieces[before].record);
      return Error(StatusCode::kQuota,
                   "%u mutable and managed tensors are registered, the daemon's limit",
                   gmg_.count(gmg::kPieces));
    }
  }
  for (const Piece& piece : set->pieces) PublishPiece(piece);
  ledger_.Charge(config.tenant, KindOf(config.kind), config.home, bytes);
  sets_.emplace(config.id, std::move(set));
  Publish();
  return Status::Ok();
}

void EngineImpl::PublishPiece(const Piece& piece) {
  auto* const record = gmg_.At<gmg::PieceRecord>(gmg::kPieces, piece.record);
  gmg::Gmg::UpdateRecord(record, [&] {
    record->set = piece.set->config.id.value;
    record->tensor = piece.tensor;
    record->tenant = piece.set->config.tenant.value;
    record->domain = piece.domain;
    record->lost = uint8_t{piece.lost};
    record->managed = uint8_t{piece.managed};
    record->moving = uint8_t{piece.moving};
    record->version = piece.version;
    record->bytes = piece.bytes;
    const std::vector<gmg::AccessEntry>& entries = piece.queue.entries();
    record->queue_length = static_cast<uint32_t>(entries.size());
    for (size_t e = 0; e < std::min<size_t>(entries.size(), gmg::kQueueEntriesShown); ++e)
      ShowEntry(entries[e], &record->queue[e]);
  });
}

// After an Append: nothing else of the piece has changed.
void EngineImpl::PublishLastEntry(const Piece& piece) {
  auto* const record = gmg_.At<gmg::PieceRecord>(gmg::kPieces, piece.record);
  const std::vector<gmg::AccessEntry>& entries = piece.queue.entries();
  gmg::Gmg::UpdateRecord(record, [&] {
    record->queue_length = static_cast<uint32_t>(entries.size());
    if (entries.size() <= gmg::kQueueEntriesShown)
      ShowEntry(entries.back(), &record->queue[entries.size() - 1]);
  });
}

void EngineImpl::ShowEntry(const gmg::AccessEntry& entry, gmg::QueueEntryRecord* shown) const {
  shown->owner = OwnerId(entry);
  shown->kind = static_cast<uint8_t>(entry.kind);
  shown->write = uint8_t{entry.write};
  shown->resets = uint8_t{entry.resets};
  shown->uses_left = entry.uses_left;
}

uint64_t EngineImpl::OwnerId(const gmg::AccessEntry& entry) const {
  switch (entry.kind) {
    case gmg::AccessKind::kInstance:
      return instances_[entry.owner]->id.value;
    case gmg::AccessKind::kCommand:
      return parts_[entry.owner]->id.value;
    case gmg::AccessKind::kMove:
      return transfers_[entry.owner]->id.value;
  }
  return 0;
}

Status EngineImpl::RemoveTensorSet(TensorSetId id, TimeNs now) {
  now_ = now;
  const auto found = sets_.find(id);
  if (found == sets_.end()) return Error(StatusCode::kStale, "tensor set %u is gone", id.value);
  TensorSet* const set = found->second.get();
  set->removing = true;
  ++set->uses;  // keeps it until the end of this function
  for (const auto& transfer : transfers_) {
    if (transfer->live && transfer->set == set) CancelTransfer(transfer.get());
  }
  for (size_t r = replications_.size(); r-- > 0;) {
    if (replications_[r].set != set) continue;
    replications_[r].failed = true;
    if (replications_[r].in_flight == 0) EndReplication(r);
  }
  --set->uses;
  ReapSet(set);
  Publish();
  return Status::Ok();
}

bool EngineImpl::TensorSetGone(TensorSetId id) const { return !sets_.contains(id); }

void EngineImpl::ReapSet(TensorSet* set) {
  if (!set->removing || set->uses > 0) return;
  for (const Piece& piece : set->pieces) {
    if (!piece.queue.empty()) return;
  }
  const TenantId tenant = set->config.tenant;
  if (set->pieces.empty()) {
    for (DomainIndex d = 0; d < config_.domains.size(); ++d) {
      if ((set->resident >> d & 1) == 0) continue;
      ledger_.Release(tenant, d == set->config.home ? MemoryKind::kWeights : MemoryKind::kReplica,
                      d, set->bytes);
    }
  }
  for (const Piece& piece : set->pieces) {
    ledger_.Release(tenant, KindOf(set->config.kind), piece.domain, piece.bytes);
    auto* const record = gmg_.At<gmg::PieceRecord>(gmg::kPieces, piece.record);
    gmg::Gmg::UpdateRecord(record, [&] { record->set = 0u; });
    gmg_.FreeRecord(gmg::kPieces, piece.record);
  }
  gap_estimator_.Forget(ServiceOf(set->config.tenant, set->config.id));
  sets_.erase(set->config.id);
  admission_dirty_ = true;
}

Status EngineImpl::AddBinding(const BindingConfig& config) {
  Tenant* const tenant = FindTenant(config.tenant);
  if (tenant == nullptr || tenant->removing)
    return Error(StatusCode::kStale, "session %u is gone", config.tenant.value);
  const auto graph = templates_.find(config.graph);
  if (graph == templates_.end())
    return Error(StatusCode::kStale, "template %u is gone", config.graph.value);
  if (!config.id || bindings_.contains(config.id))
    return Error(StatusCode::kInvalid, "binding %u is there already", config.id.value);
  auto binding = std::make_unique<Binding>();
  binding->config = config;
  binding->tenant = tenant;
  binding->graph = graph->second.get();
  SLICE_RETURN_IF_ERROR(PlanBinding(binding.get()));
  for (TensorSet* const set : binding->sets) ++set->uses;
  bindings_.emplace(config.id, std::move(binding));
  return Status::Ok();
}

namespace {
// The hash of a static input's declared meta data. False: it depends on symbols.
bool DeclaredMeta(const graph::Template& graph, uint32_t value, uint64_t* hash) {
  const graph::ValueShape& shape = graph.values()[value];
  std::vector<int64_t> sizes, strides, unset(graph.symbol_count(), 0);
  // A size that depends on a symbol differs between two assignments of the symbols.
  for (const int64_t symbol : {int64_t{0}, int64_t{7}}) {
    std::fill(unset.begin(), unset.end(), symbol);
    std::vector<int64_t> size_values, stride_values;
    for (size_t d = 0; d < shape.sizes.size(); ++d) {
      const Result<int64_t> size = graph.expressions().Evaluate(shape.sizes[d], unset);
      const Result<int64_t> stride = graph.expressions().Evaluate(shape.strides[d], unset);
      if (!size.ok() || !stride.ok()) return false;
      size_values.push_back(*size);
      stride_values.push_back(*stride);
    }
    if (symbol == 0) {
      sizes = std::move(size_values);
      strides = std::move(stride_values);
    } else if (sizes != size_values || strides != stride_values) {
      return false;
    }
  }
  *hash = TensorMetaHash(static_cast<uint32_t>(shape.dtype), sizes, strides);
  return true;
}
}  // namespace

Status EngineImpl::PlanBinding(Binding* binding) {
  const graph::Template& graph = *binding->graph->graph;
  const std::vector<TensorRef>& statics = binding->config.statics;
  if (statics.size() != graph.statics().size()) {
    return Error(StatusCode::kGraph, "%zu tensors given, the graph has %zu static inputs",
                 statics.size(), graph.statics().size());
  }
  std::vector<TensorSet*> sets(statics.size());
  for (size_t i = 0; i < statics.size(); ++i) {
    const graph::Input& input = graph.inputs()[graph.statics()[i]];
    const auto found = sets_.find(statics[i].set);
    if (found == sets_.end() || found->second->removing ||
        found->second->tenant != binding->tenant ||
        statics[i].tensor >= found->second->config.tensors.size()) {
      return Error(StatusCode::kStale, "static input %zu '%s': its tensor is gone", i,
                   input.name.c_str());
    }
    sets[i] = found->second.get();
    const TensorKind needed = input.kind == proto::Input::STATIC_CONSTANT  ? TensorKind::kConstant
                              : input.kind == proto::Input::STATIC_MUTABLE ? TensorKind::kMutable
                                                                           : TensorKind::kManaged;
    // A graph that only reads a mutable or managed input accepts a constant no more than the
    // reverse: who may write differs.
    if (sets[i]->config.kind != needed) {
      return Error(StatusCode::kGraph, "static input %zu '%s' needs %s, it got %s", i,
                   input.name.c_str(), KindName(needed), KindName(sets[i]->config.kind));
    }
    uint64_t declared = 0;
    if (!DeclaredMeta(graph, input.value, &declared)) {
      return Error(StatusCode::kGraph, "static input %zu '%s': its shape depends on symbols", i,
                   input.name.c_str());
    }
    if (sets[i]->config.tensors[statics[i].tensor].meta_hash != declared) {
      return Error(
          StatusCode::kGraph,
          "static input %zu '%s': dtype, sizes or strides differ from the bound tensor '%s'", i,
          input.name.c_str(), sets[i]->config.tensors[statics[i].tensor].name.c_str());
    }
    for (size_t j = 0; j < i; ++j) {
      if (statics[j].set == statics[i].set && statics[j].tensor == statics[i].tensor &&
          (input.written || graph.inputs()[graph.statics()[j]].written)) {
        return Error(StatusCode::kGraph,
                     "static inputs %zu and %zu '%s' are the same tensor, and one is written", j, i,
                     input.name.c_str());
      }
    }
    if (std::find(binding->sets.begin(), binding->sets.end(), sets[i]) == binding->sets.end())
      binding->sets.push_back(sets[i]);
  }
  binding->group_pieces.resize(graph.groups().size());
  binding->group_constants.resize(graph.groups().size());
  for (uint32_t g = 0; g < graph.groups().size(); ++g) {
    std::vector<PieceUse>& pieces = binding->group_pieces[g];
    std::vector<TensorSet*>& constants = binding->group_constants[g];
    const auto touch = [&](uint32_t position, bool write) {
      TensorSet* const set = sets[position];
      if (set->pieces.empty()) {
        if (std::find(constants.begin(), constants.end(), set) == constants.end())
          constants.push_back(set);
        return;
      }
      Piece* const piece = &set->pieces[statics[position].tensor];
      const auto same = [piece](const PieceUse& use) { return use.piece == piece; };
      auto use = std::find_if(pieces.begin(), pieces.end(), same);
      if (use == pieces.end()) {
        auto whole = std::find_if(binding->pieces.begin(), binding->pieces.end(), same);
        if (whole == binding->pieces.end())
          whole = binding->pieces.insert(whole, {piece, false, 0, 0, 0, {}});
        ++whole->ops;
        whole->groups.push_back(g);
        const auto index = static_cast<uint32_t>(whole - binding->pieces.begin());
        use = pieces.insert(pieces.end(), {piece, false, index, 1, 0, {}});
      }
      use->write |= write;
      binding->pieces[use->whole].write |= write;
    };
    for (const uint32_t position : graph.groups()[g].reads) touch(position, false);
    for (const uint32_t position : graph.groups()[g].writes) touch(position, true);
  }
  TensorSetId weights{};
  for (const TensorSet* const set : binding->sets) {
    if (set->pieces.empty() && (!weights || set->config.id.value < weights.value))
      weights = set->config.id;
  }
  binding->service = ServiceOf(binding->config.tenant, weights);
  for (PieceUse& use : binding->pieces) {
    if (!use.write) use.read_slot = binding->read_only_pieces++;
  }
  return Status::Ok();
}

Status EngineImpl::RemoveBinding(BindingId id) {
  const auto found = bindings_.find(id);
  if (found == bindings_.end() || found->second->removing)
    return Error(StatusCode::kStale, "binding %u is gone", id.value);
  found->second->removing = true;
  ReapBinding(found->second.get());
  return Status::Ok();
}

void EngineImpl::ReapBinding(Binding* binding) {
  if (!binding->removing || binding->uses > 0) return;
  const std::vector<TensorSet*> sets = std::move(binding->sets);
  bindings_.erase(binding->config.id);
  for (TensorSet* const set : sets) {
    --set->uses;
    ReapSet(set);
  }
}

bool EngineImpl::TenantGone(TenantId id) const { return !tenants_.contains(id); }

void EngineImpl::RemoveTenant(TenantId id, TimeNs now) {
  now_ = now;
  Tenant* const tenant = FindTenant(id);
  if (tenant == nullptr || tenant->removing) return;
  tenant->removing = true;
  ++tenant->transfers;  // keeps it until the end of this function
  // Failing changes the list: newest first, so that queued ones never start in between.
  const std::vector<Instance*> live = tenant->instances;
  for (size_t i = live.size(); i-- > 0;) {
    if (live[i]->phase == Phase::kEnding) continue;
    FailInstance(live[i], StatusCode::kCancelled, "the session was closed", 0xffffffff, now);
  }
  const std::vector<Command*> commands = tenant->commands;
  for (Command* const command : commands) DropWaitingParts(command, StatusCode::kCancelled, now);
  for (auto it = bindings_.begin(); it != bindings_.end();) {
    Binding* const binding = (it++)->second.get();
    if (binding->tenant == tenant && !binding->removing) {
      binding->removing = true;
      ReapBinding(binding);
    }
  }
  std::vector<TensorSetId> sets;
  for (const auto& [set_id, set] : sets_) {
    if (set->tenant == tenant && !set->removing) sets.push_back(set_id);
  }
  for (const TensorSetId set : sets) {
    const Status status = RemoveTensorSet(set, now);
    SLICE_CHECK(status.ok(), "a set of the tenant is gone");
  }
  --tenant->transfers;
  ReapTenant(tenant);
  work_dirty_ = true;
  Publish();
}

void EngineImpl::ReapTenant(Tenant* tenant) {
  if (!tenant->removing || !tenant->instances.empty() || !tenant->commands.empty() ||
      tenant->transfers > 0)
    return;
  for (const auto& [id, set] : sets_) {
    if (set->tenant == tenant) return;
  }
  for (const auto& [id, binding] : bindings_) {
    if (binding->tenant == tenant) return;
  }
  for (auto it = sequences_.begin(); it != sequences_.end();) {
    if (it->second->tenant != tenant) {
      ++it;
      continue;
    }
    const uint32_t index = it->second->record;
    auto* const record = gmg_.At<gmg::SequenceRecord>(gmg::kSequences, index);
    gmg::Gmg::UpdateRecord(record, [&] { record->id = uint64_t{0}; });
    gmg_.FreeRecord(gmg::kSequences, index);
    std::erase(between_, it->second.get());
    it = sequences_.erase(it);
  }
  auto* const record = gmg_.At<gmg::TenantRecord>(gmg::kTenants, tenant->record);
  gmg::Gmg::UpdateRecord(record, [&] { record->id = 0u; });
  gmg_.FreeRecord(gmg::kTenants, tenant->record);
  gap_estimator_.Forget(ServiceOf(tenant->config.id, {}));
  ledger_.DropTenant(tenant->config.id);
  tenants_.erase(tenant->config.id);
}

}  // namespace slice::engine
