// Sequences and what tenants ask about them; commands on pieces as entries of the access queues;
// cancel.
#include <algorithm>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {

using gmg::AccessEntry;

Tenant* EngineImpl::FindTenant(TenantId id) const {
  const auto found = tenants_.find(id);
  return found == tenants_.end() ? nullptr : found->second.get();
}

Sequence* EngineImpl::FindSequence(TenantId tenant, uint64_t number) const {
  const auto found = sequences_.find({tenant, number});
  return found == sequences_.end() ? nullptr : found->second.get();
}

void EngineImpl::Handle(const OpenSequence& open, TimeNs now) {
  now_ = now;
  Tenant* const tenant = FindTenant(open.tenant);
  if (tenant == nullptr || tenant->removing || open.sequence == 0) return;
  if (FindSequence(open.tenant, open.sequence) != nullptr)
    return;  // said twice; its submits go on as they are
  const uint32_t record = gmg_.AllocateRecord(gmg::kSequences);
  if (record == gmg::RangeAllocator::kNone) return;  // its submits are refused: not open
  auto sequence = std::make_unique<Sequence>();
  sequence->id = {next_sequence_++};
  sequence->number = open.sequence;
  sequence->tenant = tenant;
  // May lower, never raise.
  sequence->service_class = std::max(open.service_class, tenant->config.class_max);
  sequence->priority = open.priority;
  sequence->arrival = now;
  sequence->deadline = open.deadline == 0 ? kNever : open.deadline;
  sequence->record = record;
  PublishSequence(*sequence);
  sequences_.emplace(SequenceKey{open.tenant, open.sequence}, std::move(sequence));
}

void EngineImpl::PublishSequence(const Sequence& sequence) {
  auto* const record = gmg_.At<gmg::SequenceRecord>(gmg::kSequences, sequence.record);
  gmg::Gmg::UpdateRecord(record, [&] {
    record->tenant = sequence.tenant->config.id.value;
    record->id = sequence.id.value;
    record->number = sequence.number;
    record->service_class = static_cast<uint8_t>(sequence.service_class);
    record->device = sequence.last_device;
    record->priority = sequence.priority;
    record->arrival_ns = sequence.arrival;
    record->deadline_ns = sequence.deadline;
    record->steps = sequence.steps;
    record->live = sequence.live;
  });
}

void EngineImpl::CloseSequence(TenantId tenant, uint64_t number, TimeNs now) {
  now_ = now;
  Sequence* const sequence = FindSequence(tenant, number);
  if (sequence == nullptr || !sequence->open) return;
  sequence->open = false;
  if (sequence->last_completion > 0 && sequence->live == 0)
    gap_estimator_.ObserveEnd(sequence->service);
  deferral_event_ = work_dirty_ = true;  // its phantom vanishes
  ReapSequence(sequence);
}

void EngineImpl::ReapSequence(Sequence* sequence) {
  if (sequence->open || sequence->live > 0) return;
  std::erase(between_, sequence);
  auto* const record = gmg_.At<gmg::SequenceRecord>(gmg::kSequences, sequence->record);
  gmg::Gmg::UpdateRecord(record, [&] { record->id = uint64_t{0}; });
  gmg_.FreeRecord(gmg::kSequences, sequence->record);
  sequences_.erase({sequence->tenant->config.id, sequence->number});
}

void EngineImpl::Cancel(TenantId id, uint64_t cookie, TimeNs now) {
  now_ = now;
  Tenant* const tenant = FindTenant(id);
  if (tenant == nullptr) return;
  for (Instance* const instance : tenant->instances) {
    if (instance->cookie != cookie || instance->completed) continue;
    FailInstance(instance, StatusCode::kCancelled, "cancelled", 0xffffffff, now);
    gmg_.CloseWrites();
    return;
  }
  for (Command* const command : tenant->commands) {
    if (command->cookie != cookie || command->completed) continue;
    // One that began anywhere runs to its end: half a fill helps nobody.
    if (command->parts_running == 0 && command->first_start == 0)
      DropWaitingParts(command, StatusCode::kCancelled, now);
    return;
  }
}

// ---- commands
// -----------------------------------------------------------------------------------------------------

Status EngineImpl::CheckCommand(Tenant* tenant, const TensorCommand& command) {
  SLICE_RETURN_IF_ERROR(CheckQueue(*tenant));
  if (command.kind > wire::kTensorRead)
    return Error(StatusCode::kInvalid, "tensor command %u is unknown",
                 static_cast<unsigned>(command.kind));
  const bool has_range = command.kind == wire::kTensorWrite || command.kind == wire::kTensorRead;
  if (command.tensors.empty() ||
      (has_range && (command.tensors.size() != 1 || command.ranges.size() != 1))) {
    return Error(
        StatusCode::kInvalid,
        "a tensor command names at least one tensor; write and read name one, with its slot");
  }
  for (const TensorRef& ref : command.tensors) {
    const auto found = sets_.find(ref.set);
    if (found == sets_.end() || found->second->tenant != tenant || found->second->removing ||
        ref.tensor >= found->second->config.tensors.size()) {
      return Error(StatusCode::kStale, "a tensor of the command is gone");
    }
    const TensorSet& set = *found->second;
    const std::string& name = set.config.tensors[ref.tensor].name;
    if (set.config.kind != TensorKind::kManaged) {
      return Error(StatusCode::kInvalid, "tensor '%s' is not managed: the session writes it itself",
                   name.c_str());
    }
    const Piece& piece = set.pieces[ref.tensor];
    if (has_range && command.ranges[0].bytes != static_cast<uint64_t>(piece.bytes)) {
      return Error(StatusCode::kBounds, "the slot has %llu bytes, tensor '%s' needs exactly %lld",
                   static_cast<unsigned long long>(command.ranges[0].bytes), name.c_str(),
                   static_cast<long long>(piece.bytes));
    }
    if (command.kind != wire::kTensorReset && piece.queue.LostAtTail(piece.lost)) {
      return Error(StatusCode::kStateLost, "tensor '%s' is lost; reset it first", name.c_str());
    }
  }
  if (command.kind == wire::kTensorRead)
    SLICE_RETURN_IF_ERROR(CheckRanges(*tenant, command.ranges));
  return Status::Ok();
}

void EngineImpl::Handle(const TensorCommand& request, TimeNs now) {
  Tenant* const tenant = CountSubmit(request.tenant, now);
  if (tenant == nullptr) return;
  const Status status = CheckCommand(tenant, request);
  if (!status.ok()) return Refuse(tenant, request.cookie, status, now);
  commands_.push_back(std::make_unique<Command>());
  Command* const command = commands_.back().get();
  command->tenant = tenant;
  command->cookie = request.cookie;
  command->kind = request.kind;
  command->dimension = request.dimension;
  command->parameter = request.parameter;
  command->submitted = now;
  if (!request.ranges.empty()) command->range = request.ranges[0];
  command->parts_left = static_cast<uint32_t>(request.tensors.size());
  tenant->commands.push_back(command);
  // All entries first: a part that ends at once must not complete the command before the others are
  // in.
  for (const TensorRef& ref : request.tensors) {
    TensorSet* const set = sets_.find(ref.set)->second.get();
    CommandPart* const part = NewPart();
    part->command = command;
    part->piece = &set->pieces[ref.tensor];
    ++set->uses;
    AccessEntry entry;
    entry.kind = AccessEntry::Kind::kCommand;
    entry.write = command->kind != wire::kTensorRead;
    entry.resets = command->kind == wire::kTensorReset;
    entry.owner = part->slot;
    part->piece->queue.Append(entry);
  }
  for (const TensorRef& ref : request.tensors)
    PumpCommands(&sets_.find(ref.set)->second->pieces[ref.tensor], now);
}

CommandPart* EngineImpl::NewPart() {
  if (free_parts_.empty()) {
    free_parts_.push_back(static_cast<uint32_t>(parts_.size()));
    parts_.push_back(std::make_unique<CommandPart>());
    parts_.back()->slot = free_parts_.back();
  }
  CommandPart* const part = parts_[free_parts_.back()].get();
  free_parts_.pop_back();
  ++part->generation;
  part->id = {MakeId(part->generation, part->slot)};
  part->live = true;
  part->running = false;
  return part;
}

CommandPart* EngineImpl::FindPart(uint64_t id) {
  const uint64_t slot = SlotOf(id);
  if (slot >= parts_.size()) return nullptr;
  CommandPart* const part = parts_[slot].get();
  return part->live && part->id.value == id ? part : nullptr;
}

void EngineImpl::PumpCommands(Piece* piece, TimeNs now) {
  if (!executor_up_) return;
  const gmg::AccessQueue& queue = piece->queue;
  for (const AccessEntry& entry : queue.entries()) {
    if (entry.kind != AccessEntry::Kind::kCommand) {
      if (entry.write) break;
      continue;
    }
    CommandPart* const part = parts_[entry.owner].get();
    SLICE_CHECK(part->live, "entry of a command that is gone");
    const bool may = entry.write ? queue.MayWrite(entry.kind, entry.owner)
                                 : queue.MayRead(entry.kind, entry.owner);
    if (may && !part->running) StartPart(part, now);
    if (entry.write) break;
  }
  PublishPiece(*piece);
}

void EngineImpl::StartPart(CommandPart* part, TimeNs now) {
  Command* const command = part->command;
  const Piece& piece = *part->piece;
  part->running = true;
  ++command->parts_running;
  if (command->first_start == 0) command->first_start = now;
  wire::TensorCommandRun run{};
  run.command = part->id.value;
  run.kind = command->kind;
  run.set = piece.set->config.id.value;
  run.tensor = piece.tensor;
  run.domain = piece.domain;
  run.tenant = command->tenant->config.id.value;
  run.dimension = command->dimension;
  run.parameter = command->parameter;
  run.arena_offset = command->range.offset;
  run.arena_bytes = command->range.bytes;
  Send(wire::kTensorCommandRun, run);
}

void EngineImpl::FinishPart(CommandPart* part, StatusCode status, TimeNs now) {
  Command* const command = part->command;
  Piece* const piece = part->piece;
  const bool ran = part->running;
  if (ran) --command->parts_running;
  part->live = false;
  free_parts_.push_back(part->slot);
  if (status == StatusCode::kOk) {
    if (command->kind == wire::kTensorReset) piece->lost = false;
    if (command->kind != wire::kTensorRead) ++piece->version;
  } else {
    if (command->status == StatusCode::kOk) command->status = status;
    // A fill or crop that failed half way leaves nobody knows what.
    if (ran && command->kind != wire::kTensorRead && status != StatusCode::kCancelled)
      piece->lost = true;
  }
  piece->queue.Remove(AccessEntry::Kind::kCommand, part->slot);
  // Half done, or a reset that others counted on was withdrawn.
  if (piece->lost && (ran || command->kind == wire::kTensorReset)) LosePiece(piece, now);
  PumpCommands(piece, now);
  work_dirty_ = true;
  --piece->set->uses;
  ReapSet(piece->set);
  if (--command->parts_left == 0) CompleteCommand(command, now);
}

void EngineImpl::CompleteCommand(Command* command, TimeNs now) {
  Tenant* const tenant = command->tenant;
  wire::CompletionSlot completion{};
  completion.cookie = command->cookie;
  completion.status = static_cast<int32_t>(command->status);
  completion.failed_op = 0xffffffff;
  completion.submit_ns = command->submitted;
  completion.start_ns = command->first_start;
  completion.finish_ns = now;
  command->completed = true;
  TraceEvent event;
  event.kind = TraceEvent::Kind::kCommand;
  event.tenant = tenant->config.id;
  event.start = command->first_start;
  event.finish = now;
  event.text = std::string(StatusCodeName(command->status));
  sink_->Trace(event);
  const StatusCode status = command->status;
  std::erase(tenant->commands, command);
  std::erase_if(commands_, [command](const auto& owned) { return owned.get() == command; });
  CompleteCookie(tenant, completion,
                 status == StatusCode::kOk ? "" : "the tensor command was not carried out");
  ReapTenant(tenant);
}

// Every part that has not begun goes with `status`; running ones end by themselves.
void EngineImpl::DropWaitingParts(Command* command, StatusCode status, TimeNs now) {
  for (size_t i = 0; i < parts_.size(); ++i) {
    CommandPart* const part = parts_[i].get();
    if (!part->live || part->command != command || part->running) continue;
    const bool last = command->parts_left == 1;
    FinishPart(part, status, now);
    if (last) return;  // the command is gone
  }
}

}  // namespace slice::engine
