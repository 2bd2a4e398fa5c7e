// EngineLoop's fast path from a tenant's slot to Engine::Handle: every check of tenant data on the
// hot path is here.
#include <sys/epoll.h>

#include <algorithm>

#include "common/checked.h"
#include "daemon/server/engine_loop.h"

namespace slice::server {
namespace {

constexpr size_t kTextsMax = 64;  // per tenant
constexpr size_t kTextBytesMax = 4096;
constexpr uint64_t kSlotAlignment = 64;
constexpr DurationNs kThrottleLookMin = kMillisecond;
constexpr DurationNs kThrottleLookMax = 60 * kSecond;

unsigned long long Ull(uint64_t value) { return value; }

// A tenant's absolute deadline; beyond the clock's range is never.
TimeNs ToDeadline(uint64_t deadline_ns) {
  return deadline_ns > static_cast<uint64_t>(INT64_MAX) ? kNever : static_cast<TimeNs>(deadline_ns);
}

bool HasCompletion(uint32_t opcode) {
  return opcode == wire::kSubmitGraph || opcode == wire::kTensorCommand;
}

}  // namespace

// ---- tables
// ---------------------------------------------------------------------------------------------------------

Status EngineLoop::AddTenant(const engine::TenantConfig& config, std::unique_ptr<TenantRing> ring) {
  SLICE_RETURN_IF_ERROR(engine_->AddTenant(config, now_));
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, ring->submit_event().get(), &event) != 0) {
    engine_->RemoveTenant(config.id, now_);
    return ErrnoError(StatusCode::kNoMemory, errno, "cannot watch the submit eventfd");
  }
  auto tenant = std::make_unique<Tenant>();
  tenant->config = config;
  tenant->ring = std::move(ring);
  timeline_.NameTenant(config.id, config.name);
  tenants_.emplace(config.id.value, std::move(tenant));
  return Status::Ok();
}

void EngineLoop::RemoveTenant(TenantId id, StatusCode complete_with) {
  const auto found = tenants_.find(id.value);
  if (found == tenants_.end()) return;
  Tenant* tenant = found->second.get();
  while (!tenant->live.empty()) {
    const uint64_t cookie = tenant->live.begin()->first;
    ReleaseLive(tenant, cookie);
    wire::CompletionSlot slot{};
    slot.cookie = cookie;
    slot.status = static_cast<int32_t>(complete_with);
    slot.failed_op = 0xffffffff;
    tenant->ring->Complete(slot);
  }
  tenant->ring->PublishCompleted();
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, tenant->ring->submit_event().get(), nullptr);
  timeline_.ForgetTenant(id);
  tenants_.erase(found);
  engine_->RemoveTenant(id, now_);
}

void EngineLoop::TakeSubmitted(TenantId tenant) {
  const auto found = tenants_.find(tenant.value);
  if (found != tenants_.end()) DrainSubmissions(found->second.get(), wire::kRingSlots);
}

void EngineLoop::AddBinding(TenantId tenant, uint64_t handle, RingBinding binding) {
  const auto found = tenants_.find(tenant.value);
  if (found != tenants_.end()) found->second->bindings.emplace(handle, std::move(binding));
}

void EngineLoop::RemoveBinding(TenantId tenant, uint64_t handle) {
  const auto found = tenants_.find(tenant.value);
  if (found != tenants_.end()) found->second->bindings.erase(handle);
}

bool EngineLoop::TryRemoveBinding(TenantId tenant, BindingId binding) {
  const auto found = tenants_.find(tenant.value);
  if (found == tenants_.end()) return engine_->TenantGone(tenant);
  const bool in_use =
      std::any_of(found->second->live.begin(), found->second->live.end(),
                  [binding](const auto& item) { return item.second.binding == binding; });
  // The engine may hold it a little longer than its last completion, until the executor has ended
  // the instance.
  return !in_use && engine_->RemoveBinding(binding).ok();
}

void EngineLoop::AddTensor(TenantId tenant, uint64_t handle, RingTensor tensor) {
  const auto found = tenants_.find(tenant.value);
  if (found != tenants_.end()) found->second->tensors.emplace(handle, tensor);
}

void EngineLoop::RemoveTensor(TenantId tenant, uint64_t handle) {
  const auto found = tenants_.find(tenant.value);
  if (found != tenants_.end()) found->second->tensors.erase(handle);
}

std::string EngineLoop::ErrorText(TenantId tenant, uint32_t token) const {
  const auto found = tenants_.find(tenant.value);
  if (found == tenants_.end()) return "";
  const auto text = found->second->texts.find(token);
  return text == found->second->texts.end() ? "" : text->second;
}

uint32_t EngineLoop::KeepText(Tenant* tenant, const std::string& text) {
  if (tenant->texts.size() >= kTextsMax) tenant->texts.erase(tenant->texts.begin());
  if (tenant->next_token == 0) tenant->next_token = 1;
  const uint32_t token = tenant->next_token++;
  tenant->texts[token] = text.substr(0, kTextBytesMax);
  return token;
}

// ---- faults
// ---------------------------------------------------------------------------------------------------------

void EngineLoop::Break(Tenant* tenant, const Status& status) {
  if (tenant->broken) return;
  tenant->broken = true;
  events_.tenant_fault(tenant->config.id, status);
}

void EngineLoop::Fault(Tenant* tenant, const Status& status) {
  ++tenant->faults;
  fault_log_.Warn("session " + std::to_string(tenant->config.id.value) + " (uid " +
                  std::to_string(tenant->config.uid) + ", pid " +
                  std::to_string(tenant->config.pid) + "): " + status.ToString());
  if (tenant->faults >= options_.faults_max) {
    Break(tenant, Error(StatusCode::kProtocol, "%u malformed slots; the last: %s", tenant->faults,
                        status.text().c_str()));
  }
}

// For a slot that was promised a completion and did not reach the engine.
void EngineLoop::CompleteWithError(Tenant* tenant, uint64_t cookie, const Status& status) {
  wire::CompletionSlot slot{};
  slot.cookie = cookie;
  slot.status = static_cast<int32_t>(status.code());
  slot.failed_op = 0xffffffff;
  slot.submit_ns = now_;
  slot.text_token = KeepText(tenant, status.text());
  tenant->ring->Complete(slot);
  to_publish_.insert(tenant->config.id.value);
}

// ---- slots
// ----------------------------------------------------------------------------------------------------------

bool EngineLoop::DrainSubmissions(Tenant* tenant, uint32_t slots_max) {
  uint32_t taken = 0;
  for (; taken < slots_max && !tenant->broken; ++taken) {
    const Result<bool> got = tenant->ring->Take(&submission_);
    if (!got.ok()) {
      Break(tenant, got.status());
      break;
    }
    if (!*got) break;
    HandleSlot(tenant, submission_);
  }
  if (taken != 0) tenant->ring->PublishTaken();
  NoteThrottle(tenant, taken != 0);
  return taken != 0;
}

void EngineLoop::NoteThrottle(Tenant* tenant, bool worked) {
  Throttle& throttle = tenant->throttle;
  if (worked) throttle.delay = 0;
  if (!tenant->ring->throttled()) {
    throttle.look_at = kNever;
  } else if (throttle.delay == 0 || now_ >= throttle.look_at) {
    throttle.delay = std::clamp(2 * throttle.delay, kThrottleLookMin, kThrottleLookMax);
    throttle.look_at = now_ + throttle.delay;
  }
}

void EngineLoop::HandleSlot(Tenant* tenant, const TenantRing::Submission& submission) {
  const wire::SubmitSlot& slot = submission.slot;
  const uint32_t opcode = slot.flags & wire::kOpcodeMask;
  ++tenant->submits;
  Status status = submission.status;
  if (HasCompletion(opcode)) {
    tenant->ring->Promise();
    if (status.ok() && tenant->live.contains(slot.cookie)) {
      status = Error(StatusCode::kProtocol, "submit slot: cookie %llu is in flight already",
                     Ull(slot.cookie));
    }
    if (status.ok()) {
      status = opcode == wire::kSubmitGraph ? HandleGraph(tenant, submission)
                                            : HandleCommand(tenant, submission);
    }
    if (!status.ok()) CompleteWithError(tenant, slot.cookie, status);
  } else if (status.ok()) {
    switch (opcode) {
      case wire::kSequenceOpen:
        status = HandleSequence(tenant, slot);
        break;
      case wire::kSequenceClose:
        if (tenant->sequences.erase(slot.sequence) != 0)
          engine_->CloseSequence(tenant->config.id, slot.sequence, now_);
        break;
      case wire::kCancel:
        if (tenant->live.contains(slot.binding))
          engine_->Cancel(tenant->config.id, slot.binding, now_);
        break;
      default:
        status = Error(StatusCode::kProtocol, "submit slot: unknown opcode %u", opcode);
    }
  }
  if (status.code() == StatusCode::kProtocol) Fault(tenant, status);
}

Status EngineLoop::HandleSequence(Tenant* tenant, const wire::SubmitSlot& slot) {
  const uint32_t asked = (slot.flags >> wire::kClassShift) & 3;
  if (slot.sequence == 0 || asked == 3) {
    return Error(StatusCode::kProtocol, "sequence open: number %llu, class %u", Ull(slot.sequence),
                 asked);
  }
  if (tenant->sequences.size() >= options_.sequences_max) {
    return Error(StatusCode::kProtocol, "sequence open: %zu sequences are open, the limit is %u",
                 tenant->sequences.size(), options_.sequences_max);
  }
  if (!tenant->sequences.insert(slot.sequence).second) {
    return Error(StatusCode::kProtocol, "sequence open: %llu is open already", Ull(slot.sequence));
  }
  engine::OpenSequence open;
  open.tenant = tenant->config.id;
  open.sequence = slot.sequence;
  // May lower, never raise.
  open.service_class = asked == 2 ? ServiceClass::kOffline : tenant->config.class_max;
  open.priority = slot.priority;
  open.deadline = slot.deadline_ns == 0 ? kNever : ToDeadline(slot.deadline_ns);
  engine_->Handle(open, now_);
  return Status::Ok();
}

Status EngineLoop::ReadRange(const Tenant& tenant, const wire::Argument& argument,
                             wire::ArenaRange* range) const {
  if (argument.offset % kSlotAlignment != 0) {
    return Error(StatusCode::kBounds, "arena slot at offset %llu: must be a multiple of %llu",
                 Ull(argument.offset), Ull(kSlotAlignment));
  }
  if (!RangeFits(argument.offset, argument.bytes,
                 static_cast<uint64_t>(tenant.config.arena_bytes))) {
    return Error(StatusCode::kBounds,
                 "arena slot of %llu bytes at offset %llu: the arena has %llu bytes",
                 Ull(argument.bytes), Ull(argument.offset),
                 Ull(static_cast<uint64_t>(tenant.config.arena_bytes)));
  }
  *range = {argument.offset, argument.bytes};
  return Status::Ok();
}

// All or nothing: refuses an output that overlaps one of a request in flight, or one of the same
// request.
Status EngineLoop::ReserveOutputs(Tenant* tenant, std::span<const wire::ArenaRange> outputs) {
  auto& live = tenant->live_outputs;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const uint64_t begin = outputs[i].offset;
    const uint64_t end = begin + outputs[i].bytes;
    if (begin == end) continue;
    const auto next = live.lower_bound(begin);
    const bool overlaps = (next != live.end() && next->first < end) ||
                          (next != live.begin() && std::prev(next)->second > begin);
    if (overlaps) {
      for (size_t k = 0; k < i; ++k) {
        if (outputs[k].bytes != 0) live.erase(outputs[k].offset);
      }
      return Error(StatusCode::kBounds,
                   "output %zu: %llu bytes at arena offset %llu overlap an output still in flight",
                   i, Ull(outputs[i].bytes), Ull(begin));
    }
    live.emplace(begin, end);
  }
  return Status::Ok();
}

void EngineLoop::ReleaseLive(Tenant* tenant, uint64_t cookie) {
  const auto found = tenant->live.find(cookie);
  if (found == tenant->live.end()) return;
  for (const wire::ArenaRange& range : found->second.outputs) {
    if (range.bytes != 0) tenant->live_outputs.erase(range.offset);
  }
  tenant->live.erase(found);
}

// Waking a sleeping thread takes as long as placing a small request: both at once. The executor's
// thread waits a little for the commands that follow; only while nothing runs, or it would take the
// CPU from what does.
void EngineLoop::WakeAhead(const Tenant& tenant) {
  if (tenant.config.class_max != ServiceClass::kOnline) return;
  wake_latency_.OnlineRequest(now_);
  if (commands_ == nullptr || executor_watch_.busy() || !commands_->ClaimSleep()) return;
  // Claimed: a device that is signalled again before it looks would take the copy thread along.
  woken_ahead_ = tenant.config.home;
  SignalEventFd(executor_->device_events[woken_ahead_]);
}

Status EngineLoop::HandleGraph(Tenant* tenant, const TenantRing::Submission& submission) {
  WakeAhead(*tenant);
  const wire::SubmitSlot& slot = submission.slot;
  const auto binding = tenant->bindings.find(slot.binding);
  if (binding == tenant->bindings.end()) {
    return Error(StatusCode::kStale, "submit: binding %llu does not exist (any more)",
                 Ull(slot.binding));
  }
  if (slot.sequence != 0 && !tenant->sequences.contains(slot.sequence)) {
    return Error(StatusCode::kStale, "submit: sequence %llu is not open", Ull(slot.sequence));
  }
  const graph::Template& graph = *binding->second.graph;
  const size_t symbol_count = graph.symbol_count();
  const size_t input_count = graph.dynamics().size();
  const size_t output_count = graph.results().size();
  const std::vector<wire::Argument>& arguments = submission.arguments;
  if (arguments.size() != symbol_count + input_count + output_count) {
    return Error(StatusCode::kInvalid,
                 "submit: %zu arguments; graph '%s' needs %zu symbols, %zu inputs and %zu outputs",
                 arguments.size(), graph.name().c_str(), symbol_count, input_count, output_count);
  }
  symbols_.clear();
  inputs_.clear();
  outputs_.clear();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const wire::Argument& argument = arguments[i];
    if (i < symbol_count) {
      if (argument.handle != (wire::kArgSymbol | i) || argument.bytes != 0) {
        return Error(StatusCode::kProtocol, "submit: argument %zu must be symbol %zu", i, i);
      }
      symbols_.push_back(static_cast<int64_t>(argument.offset));
      continue;
    }
    if (argument.handle != wire::kArgArena) {
      return Error(StatusCode::kProtocol, "submit: argument %zu must be an arena slot", i);
    }
    wire::ArenaRange range{};
    SLICE_RETURN_IF_ERROR(ReadRange(*tenant, argument, &range));
    (i < symbol_count + input_count ? inputs_ : outputs_).push_back(range);
  }
  SLICE_RETURN_IF_ERROR(ReserveOutputs(tenant, outputs_));
  tenant->live.emplace(slot.cookie, LiveSubmit{binding->second.id, outputs_});
  engine::Submit submit;
  submit.tenant = tenant->config.id;
  submit.cookie = slot.cookie;
  submit.binding = binding->second.id;
  submit.sequence = slot.sequence;
  submit.deadline = ToDeadline(slot.deadline_ns);
  submit.priority = slot.priority;
  submit.symbols = symbols_;
  submit.inputs = inputs_;
  submit.outputs = outputs_;
  engine_->Handle(submit, now_);
  return Status::Ok();
}

Status EngineLoop::HandleCommand(Tenant* tenant, const TenantRing::Submission& submission) {
  const wire::SubmitSlot& slot = submission.slot;
  const uint32_t kind = (slot.flags >> wire::kCommandKindShift) & 0xff;
  if (kind > wire::kTensorRead || submission.arguments.empty()) {
    return Error(StatusCode::kProtocol, "tensor command: kind %u with %zu tensors", kind,
                 submission.arguments.size());
  }
  const bool has_range = kind == wire::kTensorWrite || kind == wire::kTensorRead;
  if (has_range && submission.arguments.size() != 1) {
    return Error(StatusCode::kInvalid, "tensor command: write and read take one tensor, not %zu",
                 submission.arguments.size());
  }
  refs_.clear();
  outputs_.clear();
  for (const wire::Argument& argument : submission.arguments) {
    const auto tensor = tenant->tensors.find(argument.handle);
    if (tensor == tenant->tensors.end()) {
      return Error(StatusCode::kStale, "tensor command: tensor %llu does not exist (any more)",
                   Ull(argument.handle));
    }
    const RingTensor& known = tensor->second;
    if (known.kind != engine::TensorKind::kManaged) {
      return Error(StatusCode::kInvalid,
                   "tensor command: tensor %llu is imported; commands are for managed tensors",
                   Ull(argument.handle));
    }
    if (kind == wire::kTensorCrop &&
        (slot.priority < 0 || static_cast<uint32_t>(slot.priority) >= known.dimensions)) {
      return Error(StatusCode::kInvalid,
                   "tensor command: crop along dimension %d of a tensor with %u dimensions",
                   slot.priority, known.dimensions);
    }
    if (has_range) {
      if (argument.bytes != known.dense_bytes) {
        return Error(StatusCode::kBounds, "tensor command: %llu bytes given, the tensor has %llu",
                     Ull(argument.bytes), Ull(known.dense_bytes));
      }
      wire::ArenaRange range{};
      SLICE_RETURN_IF_ERROR(ReadRange(*tenant, argument, &range));
      outputs_.push_back(range);
    }
    refs_.push_back(known.ref);
  }
  LiveSubmit live;
  if (kind == wire::kTensorRead) {
    SLICE_RETURN_IF_ERROR(ReserveOutputs(tenant, outputs_));
    live.outputs = outputs_;
  }
  tenant->live.emplace(slot.cookie, std::move(live));
  engine::TensorCommand command;
  command.tenant = tenant->config.id;
  command.cookie = slot.cookie;
  command.kind = static_cast<wire::TensorCommandKind>(kind);
  command.tensors = refs_;
  command.ranges = outputs_;
  command.dimension = slot.priority;
  command.parameter = slot.deadline_ns;
  engine_->Handle(command, now_);
  return Status::Ok();
}

}  // namespace slice::server
