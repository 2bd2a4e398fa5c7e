// Loss and return of the executor (scheduling rules, sections 3 and 8). Values in pools are gone;
// managed segments and imported tensors survive; replicas are made again.
#include <algorithm>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {

using gmg::MemoryKind;
using gmg::OpState;

std::vector<TenantUser> EngineImpl::LaunchedTenants() const {
  std::vector<OpRef> launched;
  for (const DeviceState& device : devices_)
    launched.insert(launched.end(), device.launched.begin(), device.launched.end());
  std::stable_sort(launched.begin(), launched.end(), [this](const OpRef& a, const OpRef& b) {
    return Op(*a.instance, a.op).start_ns > Op(*b.instance, b.op).start_ns;
  });
  std::vector<TenantUser> tenants;
  for (const OpRef& ref : launched) {
    const TenantConfig& config = ref.instance->tenant->config;
    const bool known = std::any_of(tenants.begin(), tenants.end(), [&](const TenantUser& other) {
      return other.tenant == config.id;
    });
    if (!known) tenants.push_back({config.id, config.uid});
  }
  return tenants;
}

void EngineImpl::ExecutorLost(TimeNs now) {
  now_ = now;
  if (!executor_up_) return;
  executor_up_ = false;
  SettleEverythingInFlight(now);
  // Those that began no write run again, unnoticed. The list changes while others fail.
  const std::vector<Instance*> live = started_;
  for (Instance* const instance : live) {
    if (std::find(started_.begin(), started_.end(), instance) == started_.end())
      continue;  // failed with another's pieces
    if (instance->phase == Phase::kEnding) {
      Finalise(instance, now);
    } else if (instance->began_write) {
      const bool half = instance->writing_ops_left > 0;
      FailInstance(instance, StatusCode::kStateLost,
                   half ? "the executor died while it wrote its tensors; reset them and start the "
                          "sequence again"
                        : "the executor died after it wrote its tensors and before its results; "
                          "reset them and start again",
                   0xffffffff, now);
    } else {
      RestartInstance(instance);
    }
  }
  for (DeviceState& device : devices_) {
    device.placed.clear();
    device.issued.clear();
    device.launched.clear();
    device.idle_since = now;
  }
  Publish();
}

// Every transfer counts as failed, every running command as not begun.
void EngineImpl::SettleEverythingInFlight(TimeNs now) {
  for (size_t i = 0; i < transfers_.size(); ++i) {
    Transfer* const transfer = transfers_[i].get();
    if (!transfer->live) continue;
    if (transfer->set != nullptr && !transfer->move) {
      FreeTransfer(transfer);  // its replication starts over
      continue;
    }
    SettleTransfer(transfer, StatusCode::kExecutorLost, now);
  }
  for (size_t r = replications_.size(); r-- > 0;) {
    replications_[r].next = replications_[r].in_flight = replications_[r].done = 0;
    if (replications_[r].failed) EndReplication(r);
  }
  for (const auto& [id, set] : sets_) {
    const uint64_t home = uint64_t{1} << set->config.home;
    for (uint64_t mask = set->resident & ~home; mask != 0; mask &= mask - 1) {
      replications_.push_back(
          {set.get(), static_cast<DomainIndex>(__builtin_ctzll(mask)), 0, 0, 0, false, true, 0});
      ++set->uses;
    }
    set->resident = home;
  }
  std::vector<CommandPart*> gone;
  for (const auto& part : parts_) {
    if (!part->live || !part->running) continue;
    part->running = false;
    --part->command->parts_running;
    if (part->command->tenant->removing) gone.push_back(part.get());
  }
  for (CommandPart* const part : gone) FinishPart(part, StatusCode::kCancelled, now);
}

// Back to the queue for a new attempt: its home may have lost its replicas, so it reserves anew.
// Its entries in the access queues keep their places.
void EngineImpl::RestartInstance(Instance* instance) {
  ReleaseAllMemory(instance);
  ReleaseReservation(instance);
  instance->phase = Phase::kWaiting;
  instance->parked = !policy_->Admits(instance->service_class);
  if (instance->parked) ++counters_.parked;
  InsertWaiting(instance);
  gmg_.Write(instance->slot).state = gmg::InstanceState::kQueued;
  gmg_.ResetInstance(instance->slot, *instance->graph);
  ++instance->attempt;
  instance->started_sent = false;
  instance->first_unfinished = 0;
  instance->unfinished = instance->unscheduled = static_cast<uint32_t>(instance->ops.size());
  instance->work_left = 0;
  instance->retry_at = 0;
  instance->first_start = instance->last_finish = 0;
  instance->last_device = kNoDevice;
  const TemplateEntry& entry = *instance->binding->graph;
  for (size_t d = 0; d < instance->dynamics.size(); ++d)
    instance->dynamics[d] = {0, 0, entry.dynamic_uses[d]};
  instance->snapshot = sim::kNone;
  std::fill(instance->ops.begin(), instance->ops.end(), OpExtra{});
  for (uint32_t op = 0; op < instance->ops.size(); ++op)
    instance->work_left += Duration(*instance, op);
  // What it had read and left comes back to it, unless a later entry has written it since.
  const auto kind = gmg::AccessEntry::Kind::kInstance;
  bool overwritten = false;
  for (const PieceUse& use : instance->binding->pieces) {
    const bool left = !use.piece->queue.Contains(kind, instance->slot);
    SLICE_CHECK(!left || !use.write, "an instance that wrote a piece runs again");
    overwritten |= left && (use.piece->lost || static_cast<uint32_t>(use.piece->version) !=
                                                   instance->read_versions[use.read_slot]);
    use.piece->queue.Restore(kind, instance->slot, use.ops, use.write);
    PublishPiece(*use.piece);
  }
  if (overwritten) {
    FailInstance(instance, StatusCode::kStateLost,
                 "the executor died, and a tensor it had read has been written since", 0xffffffff,
                 now_);
  }
}

void EngineImpl::ExecutorReady(TimeNs now) {
  now_ = now;
  given_up_ = false;
  if (executor_up_) return;
  executor_up_ = true;
  for (const auto& [id, set] : sets_) {
    for (Piece& piece : set->pieces) PumpCommands(&piece, now);
  }
  PumpReplications(now);
  admission_dirty_ = work_dirty_ = deferral_event_ = true;
  Publish();
}

void EngineImpl::ExecutorGivenUp(TimeNs now) {
  now_ = now;
  ExecutorLost(now);
  given_up_ = true;
  const auto fail_all = [&](std::vector<Instance*> list) {
    for (size_t i = list.size(); i-- > 0;) {
      const bool there = list[i]->phase == Phase::kWaiting || list[i]->phase == Phase::kStarted;
      if (there && !list[i]->completed) {
        FailInstance(list[i], StatusCode::kExecutorLost,
                     "the executor died and could not be restarted; try again", 0xffffffff, now);
      }
    }
  };
  fail_all(waiting_);
  fail_all(started_);
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i]->live) FinishPart(parts_[i].get(), StatusCode::kExecutorLost, now);
  }
  Publish();
}

}  // namespace slice::engine
