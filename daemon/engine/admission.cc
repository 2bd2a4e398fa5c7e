// Life of an instance: checked, queued, started when all its memory is reserved at once, completed,
// ended.
#include <algorithm>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {

using gmg::AccessEntry;
using gmg::MemoryKind;
using gmg::OpState;

namespace {
constexpr uint32_t kNoOp = 0xffffffff;
long long Number(int64_t n) { return static_cast<long long>(n); }
}  // namespace

Instance* EngineImpl::FindInstance(uint64_t id) const {
  Instance* const instance = InstanceAt(static_cast<uint32_t>(SlotOf(id)));
  return instance != nullptr && instance->id.value == id ? instance : nullptr;
}

Instance* EngineImpl::InstanceAt(uint32_t slot) const {
  if (slot >= instances_.size() || instances_[slot] == nullptr) return nullptr;
  Instance* const instance = instances_[slot].get();
  return instance->phase != Phase::kFree ? instance : nullptr;
}

void EngineImpl::CompleteCookie(Tenant* tenant, const wire::CompletionSlot& completion,
                                const std::string& text) {
  ++tenant->completions;
  ++counters_.completions;
  if (completion.status != SLICE_OK) ++counters_.failures;
  if (!tenant->removing) sink_->Complete(tenant->config.id, completion, text);
}

// Where each op runs if nothing better turns up: with its pieces; else where its constants are, the
// tenant's home first.
void EngineImpl::AssignHome(Instance* instance) {
  const DomainIndex preferred = DomainOf(instance->tenant->config.home);
  for (uint32_t op = 0; op < instance->ops.size(); ++op) {
    DomainIndex home = kNoDomain;
    for (const PieceUse& use : instance->binding->group_pieces[op]) {
      if (home == kNoDomain || use.write) home = use.piece->domain;
    }
    if (home == kNoDomain) {
      uint64_t resident = ~uint64_t{0};
      for (const TensorSet* const set : instance->binding->group_constants[op])
        resident &= set->resident;
      home = preferred;
      if ((resident >> preferred & 1) == 0 && resident != 0)
        home = static_cast<DomainIndex>(__builtin_ctzll(resident));
    }
    if (Op(*instance, op).home_domain == home) continue;
    gmg_.Write(instance->slot);
    Op(*instance, op).home_domain = home;
  }
}

Status EngineImpl::CheckFits(const Instance& instance) {
  ComputePeaks(instance, &peaks_, &lanes_);
  int64_t total = 0;
  for (DomainIndex d = 0; d < config_.domains.size(); ++d) {
    if (peaks_[d] == 0) continue;
    int64_t lane = 0;
    uint64_t usable = 0;
    for (DeviceIndex device = 0; device < devices_.size(); ++device) {
      if (DomainOf(device) != d) continue;
      lane += lanes_[device];
      usable |= uint64_t{1} << device;
    }
    const char* const name = config_.domains[d].name.c_str();
    if ((usable & instance.tenant->config.device_mask) == 0) {
      return Error(StatusCode::kNeverFits,
                   "its tensors are in domain '%s', where the session may use no device", name);
    }
    if (peaks_[d] > ledger_.pool_capacity(d) - lane) {
      return Error(StatusCode::kNeverFits,
                   "it needs %lld bytes and %lld bytes of workspace in domain '%s', which has %lld "
                   "in all (now held by %s); "
                   "submit smaller chunks",
                   Number(peaks_[d]), Number(lane), name, Number(ledger_.pool_capacity(d)),
                   ledger_.Holders(d, true).c_str());
    }
    total += peaks_[d];
  }
  const int64_t quota = instance.tenant->config.memory_bytes_max;
  const int64_t retained = ledger_.retained_used(instance.tenant->config.id);
  if (quota > 0 && total > quota - retained) {
    return Error(
        StatusCode::kNeverFits,
        "it needs %lld bytes; the session's limit is %lld and its weights and state hold %lld",
        Number(total), Number(quota), Number(retained));
  }
  return Status::Ok();
}

// Best class first, then priority, then arrival.
void EngineImpl::InsertWaiting(Instance* instance) {
  const auto before = [this](const Instance* a, const Instance* b) {
    if (QueueClass(*a) != QueueClass(*b)) return QueueClass(*a) < QueueClass(*b);
    if (policy_->ClassesOrderQueues() && a->priority != b->priority)
      return a->priority > b->priority;
    return a->creation < b->creation;
  };
  waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), instance, before), instance);
}

ServiceClass EngineImpl::QueueClass(const Instance& instance) const {
  return policy_->ClassesOrderQueues() ? instance.boosted_class : ServiceClass::kOnline;
}

// Every earlier instance in its access queues has started: else it could hold what an earlier one
// waits for.
bool EngineImpl::EarlierStarted(const Instance& instance) const {
  for (const PieceUse& use : instance.binding->pieces) {
    for (const AccessEntry& entry : use.piece->queue.entries()) {
      if (entry.kind != AccessEntry::Kind::kInstance) continue;
      if (entry.owner == instance.slot) break;
      const Instance* const earlier = InstanceAt(entry.owner);
      if (earlier != nullptr && earlier->phase == Phase::kWaiting) return false;
    }
  }
  return true;
}

// In admission order. One that waits for memory keeps later ones of no better class out of its
// domains, or a stream of small ones would starve it.
void EngineImpl::AdmitWaiting() {
  if (!admission_dirty_ || !executor_up_) return;
  admission_dirty_ = false;
  uint64_t blocked = 0;
  for (size_t i = 0; i < waiting_.size();) {
    Instance* const instance = waiting_[i];
    if (!instance->parked && EarlierStarted(*instance) && TryStart(instance, &blocked)) {
      waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(i));
      // An earlier entry of somebody's access queue has started: nobody before i can have waited
      // for it, entries are in submit order, except where a better class was queued behind.
      i = 0;
      continue;
    }
    ++i;
  }
}

bool EngineImpl::TryStart(Instance* instance, uint64_t* blocked_domains) {
  for (const PieceUse& use : instance->binding->pieces) {
    if (use.piece->moving) return false;  // its home is not known yet
  }
  AssignHome(instance);
  uint64_t domains = 0;
  for (uint32_t op = 0; op < instance->ops.size(); ++op)
    domains |= uint64_t{1} << Op(*instance, op).home_domain;
  if ((domains & *blocked_domains) != 0) return false;
  ComputePeaks(*instance, &peaks_, &lanes_);
  const TenantId tenant = instance->tenant->config.id;
  const int64_t quota = instance->tenant->config.memory_bytes_max;
  bool fits = true;
  int64_t total = 0;
  for (DomainIndex d = 0; d < config_.domains.size(); ++d) {
    int64_t needed = peaks_[d];
    for (DeviceIndex device = 0; device < devices_.size(); ++device) {
      if (DomainOf(device) == d) needed += ledger_.LaneRaise(device, lanes_[device]);
    }
    fits = fits && needed <= ledger_.pool_free(d);
    total += peaks_[d];
  }
  if (!fits) {
    *blocked_domains |= domains;
    return false;
  }
  // Its own quota is nobody else's concern: later instances of other tenants may pass.
  if (quota > 0 && total > quota - ledger_.pool_used(tenant) - ledger_.retained_used(tenant))
    return false;
  for (DomainIndex d = 0; d < config_.domains.size(); ++d)
    ledger_.Charge(tenant, MemoryKind::kReservation, d, peaks_[d]);
  for (DeviceIndex device = 0; device < devices_.size(); ++device) {
    if (lanes_[device] > ledger_.lane(device)) ledger_.SetLane(device, lanes_[device]);
  }
  instance->reserved = peaks_;
  instance->lanes = lanes_;
  instance->phase = Phase::kStarted;
  instance->retry_at = 0;
  gmg_.Write(instance->slot).state = gmg::InstanceState::kStarted;
  started_.push_back(instance);
  SendStart(instance);
  work_dirty_ = true;
  return true;
}

void EngineImpl::SendStart(Instance* instance) {
  if (!executor_up_) return;
  const wire::StartInstance start{instance->id.value,
                                  instance->attempt,
                                  instance->binding->config.id.value,
                                  instance->tenant->config.id.value,
                                  static_cast<uint32_t>(instance->symbols.size()),
                                  static_cast<uint32_t>(instance->inputs.size()),
                                  static_cast<uint32_t>(instance->outputs.size())};
  const auto bytes_of = [](const auto& items) { return std::as_bytes(std::span(items)); };
  const std::span<const std::byte> parts[] = {
      std::as_bytes(std::span(&start, 1)), bytes_of(instance->symbols), bytes_of(instance->inputs),
      bytes_of(instance->outputs)};
  size_t size = 0;
  for (const auto& part : parts) size += part.size();
  record_.resize(size);
  auto end = record_.begin();
  for (const auto& part : parts) end = std::copy(part.begin(), part.end(), end);
  sink_->ToExecutor(wire::kStartInstance, record_, kNoDevice);
  instance->started_sent = true;
}

void EngineImpl::CompleteInstance(Instance* instance, StatusCode code, const std::string& text,
                                  uint32_t failed_op, TimeNs now) {
  SLICE_CHECK(!instance->completed, "an instance completes once");
  instance->completed = true;
  wire::CompletionSlot completion{};
  completion.cookie = instance->cookie;
  completion.status = static_cast<int32_t>(code);
  completion.failed_op = failed_op;
  completion.submit_ns = instance->submitted;
  completion.start_ns = instance->first_start;
  completion.finish_ns = code == StatusCode::kOk ? instance->last_finish : now;
  completion.predicted_finish_ns = instance->predicted_finish;
  gmg_.Write(instance->slot).finish_ns = completion.finish_ns;
  ClassCounters& counters = class_counters_[static_cast<size_t>(instance->service_class)];
  ++(code == StatusCode::kOk ? counters.completions : counters.failures);
  if (code == StatusCode::kOk && completion.finish_ns > instance->deadline) ++counters.late;
  if (Sequence* const sequence = instance->sequence) {
    --sequence->live;
    ++sequence->steps;
    sequence->last_completion = now;
    sequence->service = instance->binding->service;
    sequence->last_device = instance->last_device;
    PublishSequence(*sequence);
    if (code != StatusCode::kOk) sequence->last_completion = 0;
    const bool goes_on = code == StatusCode::kOk && sequence->open && sequence->live == 0;
    if (goes_on && sequence->service_class == ServiceClass::kOnline &&
        std::find(between_.begin(), between_.end(), sequence) == between_.end()) {
      between_.push_back(sequence);
    }
    ReapSequence(sequence);
    instance->sequence = nullptr;
  }
  TraceEvent event;
  event.kind = TraceEvent::Kind::kComplete;
  event.tenant = instance->tenant->config.id;
  event.service_class = instance->service_class;
  event.instance = instance->id;
  event.start = instance->submitted;
  event.finish = completion.finish_ns;
  event.predicted_finish = instance->predicted_finish;
  event.text = std::string(StatusCodeName(code));
  sink_->Trace(event);
  CompleteCookie(instance->tenant, completion, text);
}

void EngineImpl::FailInstance(Instance* instance, StatusCode code, const std::string& text,
                              uint32_t failed_op, TimeNs now) {
  if (!instance->completed) CompleteInstance(instance, code, text, failed_op, now);
  if (instance->phase == Phase::kWaiting) {
    std::erase(waiting_, instance);
    if (instance->parked) --counters_.parked;
    Finalise(instance, now);
  } else if (instance->phase == Phase::kStarted) {
    EndInstance(instance, now);
  }
}

// The executor is told; what was launched and copies under way end there; Finalise follows its
// InstanceEnded.
void EngineImpl::EndInstance(Instance* instance, TimeNs now) {
  instance->phase = Phase::kEnding;
  gmg_.Write(instance->slot).state = gmg::InstanceState::kEnding;
  for (uint32_t op = 0; op < instance->ops.size(); ++op) {
    const OpState state = Op(*instance, op).state;
    if (state == OpState::kUnscheduled || state == OpState::kPlaced)
      SetState(instance, op, OpState::kCancelled);
  }
  for (DeviceState& device : devices_) {
    std::erase_if(device.placed, [instance](const OpRef& ref) { return ref.instance == instance; });
  }
  work_dirty_ = true;
  if (!executor_up_ || !instance->started_sent) return Finalise(instance, now);
  for (const auto& transfer : transfers_) {
    if (transfer->live && transfer->instance == instance) CancelTransfer(transfer.get());
  }
  Send(wire::kEndInstance, wire::EndInstance{instance->id.value, instance->attempt, 0});
}

void EngineImpl::Finalise(Instance* instance, TimeNs now) {
  const auto of_instance = [instance](const OpRef& ref) { return ref.instance == instance; };
  for (DeviceState& device : devices_) {
    std::erase_if(device.placed, of_instance);
    std::erase_if(device.issued, of_instance);
    if (std::erase_if(device.launched, of_instance) > 0 && device.launched.empty())
      device.idle_since = now;
  }
  bool freed_sides = false;
  for (const auto& transfer : transfers_) {
    if (!transfer->live || transfer->instance != instance) continue;
    FreeTransfer(transfer.get());
    freed_sides = true;
  }
  ReleaseAllMemory(instance);
  LeavePieces(instance, now);
  ReleaseReservation(instance);
  Tenant* const tenant = instance->tenant;
  Binding* const binding = instance->binding;
  std::erase(tenant->instances, instance);
  instance->phase = Phase::kFree;
  gmg_.FreeInstance(instance->slot);
  --binding->uses;
  admission_dirty_ = work_dirty_ = deferral_event_ = true;
  ReapBinding(binding);
  if (freed_sides) RunArbiter(now);
  ReapTenant(tenant);
}

// Reservation and lanes.
void EngineImpl::ReleaseReservation(Instance* instance) {
  for (DomainIndex d = 0; d < instance->reserved.size(); ++d) {
    ledger_.Release(instance->tenant->config.id, MemoryKind::kReservation, d,
                    instance->reserved[d]);
    instance->reserved[d] = 0;
  }
  std::erase(started_, instance);
  for (DeviceIndex device = 0; device < instance->lanes.size(); ++device) {
    if (instance->lanes[device] > 0 && instance->lanes[device] == ledger_.lane(device))
      RecomputeLane(device);
    instance->lanes[device] = 0;
  }
  admission_dirty_ = true;
}

// Takes its entries out of the access queues. Half-done writes leave every piece that it writes
// lost.
void EngineImpl::LeavePieces(Instance* instance, TimeNs now) {
  const bool half_written = instance->began_write && instance->writing_ops_left > 0;
  for (const PieceUse& use : instance->binding->pieces) {
    use.piece->queue.Remove(AccessEntry::Kind::kInstance, instance->slot);
    if (half_written && use.write) use.piece->lost = true;
    PublishPiece(*use.piece);
  }
  for (const PieceUse& use : instance->binding->pieces) {
    if (half_written && use.write) LosePiece(use.piece, now);
    PumpCommands(use.piece, now);
  }
  work_dirty_ = true;
}

// Fails everything queued behind the damage, up to the first reset.
void EngineImpl::LosePiece(Piece* piece, TimeNs now) {
  piece->lost = true;
  const std::vector<AccessEntry> entries = piece->queue.entries();  // failing changes the queue
  for (const AccessEntry& entry : entries) {
    if (entry.resets) break;
    if (entry.kind == AccessEntry::Kind::kInstance) {
      Instance* const user = InstanceAt(entry.owner);
      if (user == nullptr || user->phase == Phase::kEnding || user->completed) continue;
      FailInstance(user, StatusCode::kStateLost,
                   "a tensor it uses was half written by a run that failed; reset it", kNoOp, now);
    } else if (entry.kind == AccessEntry::Kind::kCommand) {
      CommandPart* const part = parts_[entry.owner].get();
      if (!part->live || part->running) continue;
      FinishPart(part, StatusCode::kStateLost, now);
    }
  }
}

}  // namespace slice::engine
