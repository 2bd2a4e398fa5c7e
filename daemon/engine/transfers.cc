// Transfers: Watch -> Intent -> Recv + Send -> TransferDone, for values of instances, moves of
// pieces and replicas of constants. The arbiter says what may run.
#include <algorithm>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {

using gmg::AccessEntry;
using gmg::MemoryKind;

namespace {
constexpr DurationNs kRemakeDelay = 10 * kMillisecond;
constexpr uint32_t kReplicationWindow =
    32;  // tensors of one replica under way: keeps the pipe full, the slab small
}  // namespace

Transfer* EngineImpl::NewTransfer(Tenant* tenant, DomainIndex source, DomainIndex destination,
                                  ServiceClass service_class, int64_t bytes, TimeNs now) {
  if (free_transfers_.empty()) {
    free_transfers_.push_back(static_cast<uint32_t>(transfers_.size()));
    transfers_.push_back(std::make_unique<Transfer>());
    transfers_.back()->slot = free_transfers_.back();
  }
  Transfer* const transfer = transfers_[free_transfers_.back()].get();
  free_transfers_.pop_back();
  const uint32_t slot = transfer->slot, generation = transfer->generation + 1;
  *transfer = Transfer{};
  transfer->slot = slot;
  transfer->generation = generation;
  transfer->id = {MakeId(generation, slot)};
  transfer->live = true;
  transfer->tenant = tenant;
  transfer->source = source;
  transfer->destination = destination;
  transfer->service_class = service_class;
  transfer->bytes = bytes;
  transfer->requested = now;
  transfer->record = gmg_.AllocateRecord(gmg::kTransfers);  // kNone: not shown, works all the same
  ++tenant->transfers;
  arbiter_.Add(transfer->id, source, destination, service_class);
  return transfer;
}

Transfer* EngineImpl::FindTransfer(uint64_t id) {
  const uint64_t slot = SlotOf(id);
  if (slot >= transfers_.size()) return nullptr;
  Transfer* const transfer = transfers_[slot].get();
  return transfer->live && transfer->id.value == id ? transfer : nullptr;
}

void EngineImpl::PublishTransfer(const Transfer& transfer, gmg::TransferState state) {
  if (transfer.record == gmg::RangeAllocator::kNone) return;
  auto* const record = gmg_.At<gmg::TransferRecord>(gmg::kTransfers, transfer.record);
  gmg::Gmg::UpdateRecord(record, [&] {
    record->id = transfer.live ? transfer.id.value : uint64_t{0};
    record->instance = transfer.instance != nullptr ? transfer.instance->id.value : uint64_t{0};
    record->set = transfer.set != nullptr ? transfer.set->config.id.value : 0u;
    record->value = transfer.instance != nullptr
                        ? transfer.instance->graph->crossing()[transfer.crossing].value
                        : transfer.tensor;
    record->state = state;
    record->source_domain = transfer.source;
    record->destination_domain = transfer.destination;
    record->service_class = static_cast<uint8_t>(transfer.service_class);
    record->bytes = transfer.bytes;
    record->requested_ns = transfer.requested;
    record->admitted_ns = transfer.admitted;
  });
}

void EngineImpl::SendWatch(const Transfer& transfer) {
  wire::Watch watch{};
  watch.transfer = transfer.id.value;
  if (transfer.instance != nullptr) {
    watch.instance = transfer.instance->id.value;
    watch.attempt = transfer.instance->attempt;
    watch.value = transfer.instance->graph->crossing()[transfer.crossing].value;
  } else {
    watch.value = transfer.tensor;
    watch.set = transfer.set->config.id.value;
  }
  watch.source_domain = transfer.source;
  watch.destination_domain = transfer.destination;
  watch.service_class = static_cast<uint8_t>(transfer.service_class);
  watch.move = uint8_t{transfer.move};
  Send(wire::kWatch, watch);
}

// The in-flight bit is set already (TakeGrant).
void EngineImpl::WatchValue(Instance* instance, uint32_t crossing, DomainIndex destination,
                            TimeNs now) {
  const gmg::TensorRecord& value = Value(*instance, crossing);
  const uint64_t residency = value.residency;
  const DomainIndex source =
      residency != 0
          ? static_cast<DomainIndex>(__builtin_ctzll(residency))
          : DomainOf(Op(*instance, instance->graph->crossing()[crossing].producer).device);
  Transfer* const transfer =
      NewTransfer(instance->tenant, source, destination, QueueClass(*instance), value.bytes(), now);
  transfer->instance = instance;
  transfer->crossing = crossing;
  PublishTransfer(*transfer, gmg::TransferState::kWatching);
  SendWatch(*transfer);
}

bool EngineImpl::IsAdmitted(const Instance& instance, uint32_t crossing,
                            DomainIndex destination) const {
  for (const auto& transfer : transfers_) {
    if (transfer->live && transfer->instance == &instance && transfer->crossing == crossing &&
        transfer->destination == destination) {
      return transfer->admitted != 0;
    }
  }
  return false;
}

// A piece goes where `instance`'s op was placed; the caller checked CanMove and that the entry is
// first. On commit the new place is the piece's only one: its charge moves with it. A reset piece
// is copied like any other: what an earlier stay left in the new place is not zero.
void EngineImpl::StartMove(Piece* piece, Instance* instance, DomainIndex destination, TimeNs now) {
  const TenantId tenant = instance->tenant->config.id;
  ledger_.Charge(tenant, MemoryKind::kManaged, destination, piece->bytes);
  Transfer* const transfer = NewTransfer(instance->tenant, piece->domain, destination,
                                         QueueClass(*instance), piece->bytes, now);
  transfer->set = piece->set;
  transfer->tensor = piece->tensor;
  transfer->move = true;
  ++piece->set->uses;
  piece->moving = true;
  AccessEntry entry;
  entry.kind = AccessEntry::Kind::kMove;
  entry.write = true;
  entry.owner = transfer->slot;
  piece->queue.InsertBefore(AccessEntry::Kind::kInstance, instance->slot, entry);
  PublishPiece(*piece);
  PublishTransfer(*transfer, gmg::TransferState::kWatching);
  SendWatch(*transfer);
}

void EngineImpl::RunArbiter(TimeNs now) {
  admitted_.clear();
  arbiter_.Admit(&admitted_);
  for (const TransferId id : admitted_) {
    Transfer* const transfer = FindTransfer(id.value);
    SLICE_CHECK(transfer != nullptr, "the arbiter admitted a transfer that is gone");
    transfer->admitted = std::max<TimeNs>(now, 1);
    PublishTransfer(*transfer, gmg::TransferState::kAdmitted);
    Send(wire::kRecv, wire::TransferRef{id.value});
    Send(wire::kSend, wire::TransferRef{id.value});
    work_dirty_ = true;
  }
}

// Not yet admitted ones are withdrawn; the executor answers TransferDone either way.
void EngineImpl::CancelTransfer(Transfer* transfer) {
  if (transfer->cancel_sent || transfer->admitted != 0 || !executor_up_) return;
  transfer->cancel_sent = true;
  Send(wire::kCancelTransfer, wire::TransferRef{transfer->id.value});
}

void EngineImpl::FreeTransfer(Transfer* transfer) {
  arbiter_.Remove(transfer->id);
  transfer->live = false;
  PublishTransfer(*transfer, gmg::TransferState::kWatching);
  if (transfer->record != gmg::RangeAllocator::kNone)
    gmg_.FreeRecord(gmg::kTransfers, transfer->record);
  free_transfers_.push_back(transfer->slot);
  --transfer->tenant->transfers;
}

void EngineImpl::SettleTransfer(Transfer* transfer, StatusCode status, TimeNs now) {
  const bool ok = status == StatusCode::kOk;
  const uint64_t bit = uint64_t{1} << transfer->destination;
  Instance* const instance = transfer->instance;
  TensorSet* const set = transfer->set;
  FreeTransfer(transfer);
  work_dirty_ = true;
  if (instance != nullptr) {
    gmg_.Write(instance->slot);
    gmg::TensorRecord& value = Value(*instance, transfer->crossing);
    value.in_flight = value.in_flight & ~bit;
    if (ok) {
      value.residency = value.residency | bit;
    } else {
      if ((value.granted & bit) != 0) {
        value.granted = value.granted & ~bit;
        ledger_.Release(instance->tenant->config.id, MemoryKind::kGrant, transfer->destination,
                        Charged(value.bytes()));
        admission_dirty_ = true;
      }
      // Issued ops that count on it come back and ask again.
      for (const uint32_t consumer : instance->graph->crossing()[transfer->crossing].consumers) {
        const gmg::OpRecord& record = Op(*instance, consumer);
        const bool waits = record.state == gmg::OpState::kIssued &&
                           DomainOf(record.device) == transfer->destination;
        if (waits && instance->phase == Phase::kStarted) {
          WantUnplace(instance, consumer);
          UnplaceWanted(instance, now);
          RecallOp(instance, consumer, now);  // also one that has to stay on its device
        }
      }
    }
    ReleaseValueIfDead(instance, transfer->crossing);
  } else if (transfer->move) {
    Piece* const piece = &set->pieces[transfer->tensor];
    const DomainIndex left = ok ? piece->domain : transfer->destination;
    ledger_.Release(set->config.tenant, MemoryKind::kManaged, left, piece->bytes);
    Send(wire::kDropReplica, wire::DropReplica{set->config.id.value, piece->tensor, left, {}});
    if (ok) piece->domain = transfer->destination;
    piece->moving = false;
    admission_dirty_ = true;
    piece->queue.Remove(AccessEntry::Kind::kMove, transfer->slot);
    PublishPiece(*piece);
    if (!ok) ForgetMove(piece, now);
    PumpCommands(piece, now);
    --set->uses;
    ReapSet(set);
  } else {
    for (size_t r = 0; r < replications_.size(); ++r) {
      Replication& replication = replications_[r];
      if (replication.set != set || replication.domain != transfer->destination) continue;
      --replication.in_flight;
      ++replication.done;
      replication.failed |= !ok;
      const bool over = replication.failed ? replication.in_flight == 0
                                           : replication.done == set->config.tensors.size();
      if (over && replication.failed && replication.remake && !set->removing) {
        // Requests count on it: again, a little later.
        replication = {set, replication.domain, 0, 0, 0, false, true, now + kRemakeDelay};
      } else if (over) {
        EndReplication(r);
      }
      break;
    }
  }
  ReapTenant(transfer->tenant);
}

// The op that asked for a move that failed goes back to be placed anew.
void EngineImpl::ForgetMove(Piece* piece, TimeNs now) {
  for (const AccessEntry& entry : piece->queue.entries()) {
    if (entry.kind != AccessEntry::Kind::kInstance) continue;
    Instance* const instance = InstanceAt(entry.owner);
    if (instance == nullptr || instance->phase != Phase::kStarted) return;
    for (uint32_t op = instance->first_unfinished; op < instance->ops.size(); ++op) {
      if (!instance->ops[op].moved_piece || Op(*instance, op).state != gmg::OpState::kPlaced)
        continue;
      const auto& uses = instance->binding->group_pieces[op];
      const DomainIndex placed = DomainOf(Op(*instance, op).device);
      const bool touches = std::any_of(uses.begin(), uses.end(),
                                       [piece](const PieceUse& use) { return use.piece == piece; });
      // Another piece of it may have arrived or be on its way: then the op stays and asks for this
      // one again.
      const bool others = std::any_of(uses.begin(), uses.end(), [&](const PieceUse& use) {
        return use.piece != piece && (use.piece->moving || use.piece->domain == placed);
      });
      if (!touches) continue;
      SetRetryAt(instance, op, now + kMillisecond);
      instance->ops[op].prepared = false;
      ReleaseOutputs(instance, op);
      if (others) continue;
      instance->ops[op].moved_piece = false;
      instance->ops[op].home_only = true;
      WantUnplace(instance, op);
      UnplaceWanted(instance, now);
    }
    return;
  }
}

// ---- replicas of constants
// ----------------------------------------------------------------------------------------

Status EngineImpl::Replicate(TensorSetId id, DomainIndex domain, TimeNs now) {
  now_ = now;
  const auto found = sets_.find(id);
  if (found == sets_.end() || found->second->removing)
    return Error(StatusCode::kStale, "tensor set %u is gone", id.value);
  TensorSet* const set = found->second.get();
  if (set->config.kind != TensorKind::kConstant)
    return Error(StatusCode::kInvalid, "only constants are replicated");
  if (domain >= config_.domains.size())
    return Error(StatusCode::kInvalid, "memory domain %u does not exist", domain);
  if ((set->resident >> domain & 1) != 0) return Status::Ok();
  for (const Replication& other : replications_) {
    if (other.set == set && other.domain == domain) return Status::Ok();
  }
  const auto number = [](int64_t n) { return static_cast<long long>(n); };
  if (set->bytes > ledger_.retained_free(domain)) {
    const bool never = set->bytes > ledger_.retained_capacity(domain);
    return Error(never ? StatusCode::kNeverFits : StatusCode::kQuota,
                 "%lld bytes of weights; domain '%s' has %lld of %lld bytes free; held by %s",
                 number(set->bytes), config_.domains[domain].name.c_str(),
                 number(ledger_.retained_free(domain)), number(ledger_.retained_capacity(domain)),
                 ledger_.Holders(domain, false).c_str());
  }
  ledger_.Charge(set->config.tenant, MemoryKind::kReplica, domain, set->bytes);
  ++set->uses;
  replications_.push_back({set, domain, 0, 0, 0, false, false, 0});
  if (set->config.tensors.empty()) {
    EndReplication(replications_.size() - 1);
  } else {
    PumpReplications(now);
  }
  return Status::Ok();
}

bool EngineImpl::ReplicasReady(TensorSetId id, DomainIndex domain) const {
  const auto found = sets_.find(id);
  return found != sets_.end() && domain < 64 && (found->second->resident >> domain & 1) != 0;
}

void EngineImpl::PumpReplications(TimeNs now) {
  if (!executor_up_) return;
  for (Replication& replication : replications_) {
    TensorSet* const set = replication.set;
    while (!replication.failed && now >= replication.retry_at &&
           replication.in_flight < kReplicationWindow &&
           replication.next < set->config.tensors.size()) {
      Transfer* const transfer =
          NewTransfer(set->tenant, set->config.home, replication.domain, ServiceClass::kOffline,
                      set->config.tensors[replication.next].bytes, now);
      transfer->set = set;
      transfer->tensor = replication.next++;
      ++replication.in_flight;
      PublishTransfer(*transfer, gmg::TransferState::kWatching);
      SendWatch(*transfer);
    }
  }
}

void EngineImpl::EndReplication(size_t index) {
  const Replication replication = replications_[index];
  replications_.erase(replications_.begin() + static_cast<ptrdiff_t>(index));
  TensorSet* const set = replication.set;
  if (replication.failed) {
    ledger_.Release(set->config.tenant, MemoryKind::kReplica, replication.domain, set->bytes);
    Send(wire::kDropReplica,
         wire::DropReplica{set->config.id.value, 0xffffffff, replication.domain, {}});
  } else {
    set->resident |= uint64_t{1} << replication.domain;
  }
  deferral_event_ = work_dirty_ = true;
  --set->uses;
  ReapSet(set);
}

}  // namespace slice::engine
