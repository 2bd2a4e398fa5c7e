// Submits: every check of a request, and its instance.
#include <algorithm>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {

using gmg::AccessEntry;

namespace {
constexpr uint32_t kNoOp = 0xffffffff;
long long Number(int64_t n) { return static_cast<long long>(n); }
bool Overlap(const wire::ArenaRange& a, const wire::ArenaRange& b) {
  return a.bytes > 0 && b.bytes > 0 && a.offset < b.offset + b.bytes &&
         b.offset < a.offset + a.bytes;
}
}  // namespace

void EngineImpl::Refuse(Tenant* tenant, uint64_t cookie, const Status& status, TimeNs now) {
  ++counters_.refused;
  wire::CompletionSlot completion{};
  completion.cookie = cookie;
  completion.status = static_cast<int32_t>(status.code());
  completion.failed_op = kNoOp;
  completion.submit_ns = now;
  CompleteCookie(tenant, completion, status.text());
}

Status EngineImpl::CheckRanges(const Tenant& tenant,
                               std::span<const wire::ArenaRange> outputs) const {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto refuse = [&](const char* what) {
      return Error(StatusCode::kBounds,
                   "output slot %zu at offset %llu, %llu bytes, overlaps %s; wait for its "
                   "completion or use another slot",
                   i, static_cast<unsigned long long>(outputs[i].offset),
                   static_cast<unsigned long long>(outputs[i].bytes), what);
    };
    for (size_t j = 0; j < i; ++j) {
      if (Overlap(outputs[i], outputs[j])) return refuse("another output of the same submit");
    }
    for (const Instance* const live : tenant.instances) {
      if (live->completed) continue;
      for (const wire::ArenaRange& other : live->outputs) {
        if (Overlap(outputs[i], other)) return refuse("an output of a submit in flight");
      }
    }
    for (const Command* const command : tenant.commands) {
      const bool writes = command->kind == wire::kTensorRead && !command->completed;
      if (writes && Overlap(outputs[i], command->range)) return refuse("a tensor read in flight");
    }
  }
  return Status::Ok();
}

Tenant* EngineImpl::CountSubmit(TenantId id, TimeNs now) {
  now_ = now;
  Tenant* const tenant = FindTenant(id);
  if (tenant == nullptr || tenant->removing) return nullptr;
  ++counters_.submits;
  ++tenant->submits;
  return tenant;
}

Status EngineImpl::CheckQueue(const Tenant& tenant) const {
  if (given_up_)
    return Error(StatusCode::kExecutorLost,
                 "the executor is down and could not be restarted; try again later");
  const size_t in_flight = tenant.instances.size() + tenant.commands.size();
  if (in_flight >= config_.tenant_queue_max) {
    return Error(StatusCode::kWouldBlock,
                 "%zu submits are in flight, the limit is %u; wait for a completion", in_flight,
                 config_.tenant_queue_max);
  }
  return Status::Ok();
}

Status EngineImpl::CheckSubmit(Tenant* tenant, const Submit& submit, Binding** found_binding,
                               Sequence** found_sequence) {
  SLICE_RETURN_IF_ERROR(CheckQueue(*tenant));
  const auto binding = bindings_.find(submit.binding);
  if (binding == bindings_.end() || binding->second->removing ||
      binding->second->tenant != tenant) {
    return Error(StatusCode::kStale, "binding %u is gone", submit.binding.value);
  }
  for (const TensorSet* const set : binding->second->sets) {
    if (set->removing)
      return Error(StatusCode::kStale, "a tensor of binding %u was released", submit.binding.value);
  }
  Sequence* sequence = nullptr;
  if (submit.sequence != 0) {
    sequence = FindSequence(tenant->config.id, submit.sequence);
    if (sequence == nullptr || !sequence->open) {
      return Error(StatusCode::kInvalid, "sequence %llu is not open",
                   static_cast<unsigned long long>(submit.sequence));
    }
  }
  const graph::Template& graph = *binding->second->graph->graph;
  if (binding->second->last_sizes != nullptr &&
      std::ranges::equal(submit.symbols, binding->second->last_symbols)) {
    bound_ = binding->second->last_sizes;
  } else {
    auto sizes = std::make_shared<graph::BoundSizes>();
    SLICE_RETURN_IF_ERROR(graph.Bind(submit.symbols, sizes.get()));
    bound_ = std::move(sizes);
  }
  const auto check_sizes = [](const char* what, std::span<const wire::ArenaRange> given,
                              size_t count, auto bytes_of) -> Status {
    if (given.size() != count) {
      return Error(StatusCode::kInvalid, "%zu %s slots given, the graph has %zu", given.size(),
                   what, count);
    }
    for (size_t i = 0; i < count; ++i) {
      if (given[i].bytes != static_cast<uint64_t>(bytes_of(i))) {
        return Error(StatusCode::kBounds,
                     "%s slot %zu has %llu bytes, its shape needs exactly %lld", what, i,
                     static_cast<unsigned long long>(given[i].bytes), Number(bytes_of(i)));
      }
    }
    return Status::Ok();
  };
  SLICE_RETURN_IF_ERROR(check_sizes("input", submit.inputs, bound_->dynamic_count(),
                                    [this](size_t i) { return bound_->dynamic_bytes(i); }));
  SLICE_RETURN_IF_ERROR(check_sizes("output", submit.outputs, bound_->result_count(),
                                    [this](size_t i) { return bound_->result_bytes(i); }));
  SLICE_RETURN_IF_ERROR(CheckRanges(*tenant, submit.outputs));
  for (const PieceUse& use : binding->second->pieces) {
    if (use.piece->queue.LostAtTail(use.piece->lost)) {
      return Error(StatusCode::kStateLost,
                   "tensor '%s' is lost; reset it and start the sequence again",
                   use.piece->set->config.tensors[use.piece->tensor].name.c_str());
    }
  }
  *found_binding = binding->second.get();
  *found_sequence = sequence;
  return Status::Ok();
}

void EngineImpl::Handle(const Submit& submit, TimeNs now) {
  Tenant* const tenant = CountSubmit(submit.tenant, now);
  if (tenant == nullptr) return;
  Binding* binding = nullptr;
  Sequence* sequence = nullptr;
  const Status status = CheckSubmit(tenant, submit, &binding, &sequence);
  if (!status.ok()) return Refuse(tenant, submit.cookie, status, now);
  Instance* const instance = NewInstance(*binding->graph->graph, *bound_);
  if (instance == nullptr) {
    return Refuse(tenant, submit.cookie,
                  Error(StatusCode::kWouldBlock,
                        "%u operators are live, the daemon's limit is %u; wait for completions",
                        gmg_.ops_live(), config_.live_ops_max),
                  now);
  }
  FillInstance(instance, tenant, binding, sequence, submit, now);
  AssignHome(instance);
  Status fits = CheckFits(*instance);
  if (fits.ok() && config_.drop_late && instance->deadline != kNever &&
      now + instance->work_left > instance->deadline) {
    fits = Error(StatusCode::kDeadline, "it needs %lld us alone, its deadline is in %lld us",
                 Number(instance->work_left / kMicrosecond),
                 Number((instance->deadline - now) / kMicrosecond));
  }
  if (!fits.ok()) {
    instance->phase = Phase::kFree;
    gmg_.FreeInstance(instance->slot);
    gmg_.CloseWrites();
    return Refuse(tenant, submit.cookie, fits, now);
  }
  binding->last_symbols.assign(submit.symbols.begin(), submit.symbols.end());
  binding->last_sizes = instance->sizes;
  if (sequence != nullptr) {
    if (sequence->last_completion > 0 && sequence->live == 0) {
      gap_estimator_.ObserveNext(sequence->service, now - sequence->last_completion);
    }
    ++sequence->live;
    PublishSequence(*sequence);
  }
  ++class_counters_[static_cast<size_t>(instance->service_class)].submits;
  Enqueue(instance);
  TraceEvent event;
  event.kind = TraceEvent::Kind::kSubmit;
  event.tenant = submit.tenant;
  event.service_class = instance->service_class;
  if (sequence != nullptr) event.sequence = sequence->id;
  event.instance = instance->id;
  event.start = event.finish = now;
  sink_->Trace(event);
  gmg_.CloseWrites();
}

Instance* EngineImpl::NewInstance(const graph::Template& graph, const graph::BoundSizes& sizes) {
  const uint32_t slot = gmg_.AddInstance(graph, sizes);
  if (slot == gmg::RangeAllocator::kNone) return nullptr;
  if (slot >= instances_.size()) instances_.resize(slot + 1);
  if (instances_[slot] == nullptr) instances_[slot] = std::make_unique<Instance>();
  Instance* const instance = instances_[slot].get();
  instance->slot = slot;
  ++instance->generation;
  instance->id = {MakeId(instance->generation, slot)};
  return instance;
}

void EngineImpl::FillInstance(Instance* instance, Tenant* tenant, Binding* binding,
                              Sequence* sequence, const Submit& submit, TimeNs now) {
  const TemplateEntry& entry = *binding->graph;
  instance->attempt = 1;
  instance->phase = Phase::kWaiting;
  instance->tenant = tenant;
  instance->binding = binding;
  instance->graph = entry.graph.get();
  instance->sequence = sequence;
  instance->service_class =
      sequence != nullptr ? sequence->service_class : tenant->config.class_max;
  instance->boosted_class = instance->service_class;
  instance->priority =
      submit.priority != 0 || sequence == nullptr ? submit.priority : sequence->priority;
  instance->arrival = sequence != nullptr ? sequence->arrival : now;
  TimeNs deadline = submit.deadline != 0  ? submit.deadline
                    : sequence != nullptr ? sequence->deadline
                                          : kNever;
  if (deadline != kNever)
    deadline = std::max(deadline, instance->arrival + tenant->config.deadline_min);
  instance->deadline = deadline;
  instance->creation = next_creation_++;
  instance->cookie = submit.cookie;
  instance->submitted = now;
  instance->first_start = instance->last_finish = instance->predicted_finish = 0;
  instance->symbols.assign(submit.symbols.begin(), submit.symbols.end());
  instance->inputs.assign(submit.inputs.begin(), submit.inputs.end());
  instance->outputs.assign(submit.outputs.begin(), submit.outputs.end());
  instance->sizes = std::move(bound_);
  instance->reserved.assign(config_.domains.size(), 0);
  instance->lanes.assign(devices_.size(), 0);
  const auto op_count = static_cast<uint32_t>(entry.groups.size());
  instance->ops = {op_extras_.get() + gmg_.instance(instance->slot).op_begin, op_count};
  std::fill(instance->ops.begin(), instance->ops.end(), OpExtra{});
  instance->read_versions.assign(binding->read_only_pieces, 0);
  instance->snapshot = sim::kNone;
  instance->dynamics.resize(entry.dynamic_uses.size());
  for (size_t d = 0; d < instance->dynamics.size(); ++d)
    instance->dynamics[d] = {0, 0, entry.dynamic_uses[d]};
  instance->unfinished = instance->unscheduled = op_count;
  instance->first_unfinished = 0;
  instance->work_left = 0;
  instance->writing_ops_left = 0;
  instance->retry_at = 0;
  instance->began_write = instance->completed = instance->parked = instance->started_sent = false;
  instance->needs_prediction = true;
  instance->deferral_traced = false;
  instance->last_device = kNoDevice;
  instance->key_stamp = 0;
  gmg::OpRecord* const ops = gmg_.ops(instance->slot);
  const uint8_t kind = config_.devices[tenant->config.home].kind;
  const double activity = ActivityBeside(tenant->config.home);
  for (uint32_t op = 0; op < op_count; ++op) {
    const DurationNs duration = PredictOp(FeaturesOf(*instance, op, kind), activity);
    instance->work_left += duration;
    ops[op].duration_ns = duration;
    for (const PieceUse& use : binding->group_pieces[op]) {
      if (use.write) {
        ++instance->writing_ops_left;
        break;
      }
    }
  }
  gmg::InstanceRecord& record = gmg_.Write(instance->slot);
  record.service_class = static_cast<uint8_t>(instance->service_class);
  record.id = instance->id.value;
  record.tenant = tenant->config.id.value;
  record.template_id = entry.id.value;
  record.binding = binding->config.id.value;
  record.priority = instance->priority;
  record.sequence_id = sequence != nullptr ? sequence->id.value : uint64_t{0};
  record.cookie = instance->cookie;
  record.submit_ns = now;
  record.start_ns = record.finish_ns = record.predicted_finish_ns = 0;
  record.deadline_ns = deadline;
}

void EngineImpl::Enqueue(Instance* instance) {
  Binding* const binding = instance->binding;
  ++binding->uses;
  instance->tenant->instances.push_back(instance);
  for (const PieceUse& use : binding->pieces) {
    AccessEntry entry;
    entry.kind = AccessEntry::Kind::kInstance;
    entry.write = use.write;
    entry.owner = instance->slot;
    entry.uses_left = static_cast<uint16_t>(use.ops);
    use.piece->queue.Append(entry);
    PublishLastEntry(*use.piece);
  }
  BoostEarlier(*instance);
  instance->parked = !policy_->Admits(instance->service_class);
  if (instance->parked) ++counters_.parked;
  InsertWaiting(instance);
  admission_dirty_ = true;
  predict_.push_back(instance->id);
  if (instance->service_class == ServiceClass::kOnline) NoteOnlineArrival(*instance, now_);
}

// An entry inherits the best class queued behind it: no priority inversion through a piece.
void EngineImpl::BoostEarlier(const Instance& instance) {
  for (const PieceUse& use : instance.binding->pieces) {
    for (const AccessEntry& entry : use.piece->queue.entries()) {
      if (entry.kind != AccessEntry::Kind::kInstance || entry.owner == instance.slot) continue;
      Instance* const earlier = InstanceAt(entry.owner);
      if (earlier == nullptr || earlier->boosted_class <= instance.boosted_class) continue;
      earlier->boosted_class = instance.boosted_class;
      earlier->key_stamp = 0;
    }
  }
}

// Ops of offline tenants that have not launched make way on the devices where this instance may
// run.
void EngineImpl::NoteOnlineArrival(const Instance& instance, TimeNs now) {
  work_dirty_ = true;
  if (!policy_->RespectsSlices()) return;
  uint64_t domains = 0;
  for (uint32_t op = 0; op < instance.ops.size(); ++op)
    domains |= uint64_t{1} << Op(instance, op).home_domain;
  uint64_t devices = 0;
  for (; domains != 0; domains &= domains - 1)
    devices |= DomainDevices(static_cast<DomainIndex>(__builtin_ctzll(domains)));
  RecallOffline(devices & instance.tenant->config.device_mask, now);
}

}  // namespace slice::engine
