// Commands of the engine, and the rules that turn them into work for threads. Everything here runs
// under the state mutex.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "common/log.h"
#include "daemon/executor/executor.h"

namespace slice::executor {
namespace {

// Copies a fixed-size payload out. The engine is trusted to mean well, not to be free of bugs.
template <typename T>
bool Read(const std::vector<std::byte>& payload, T* out) {
  if (payload.size() != sizeof(T)) return false;
  std::memcpy(out, payload.data(), sizeof(T));
  return true;
}

template <typename T>
void ReadArray(const std::byte** at, uint32_t count, std::vector<T>* out) {
  out->resize(count);
  if (count > 0) std::memcpy(out->data(), *at, count * sizeof(T));
  *at += count * sizeof(T);
}

}  // namespace

void Executor::DrainLocked() {
  for (;;) {
    const Result<bool> popped = ring_->Pop(&record_);
    if (!popped.ok()) {
      SLICE_LOG_ERROR("executor", "command ring: %s", popped.status().ToString().c_str());
      std::_Exit(3);  // the daemon's bug: it starts another executor
    }
    if (!*popped) return;
    HandleLocked(record_.type, record_.payload);
  }
}

void Executor::HandleLocked(uint32_t type, const std::vector<std::byte>& payload) {
  bool read = true;
  const auto dispatch = [&]<typename T>(void (Executor::*handler)(const T&)) {
    T command;
    read = Read(payload, &command);
    if (read) (this->*handler)(command);
  };
  const auto to_copier = [&]<typename T>(std::optional<T> CopyCommand::*member) {
    T command;
    read = Read(payload, &command);
    if (!read) return;
    copy_commands_.emplace_back().*member = command;
    wake_copier_ = true;
  };
  switch (type) {
    case wire::kStartInstance:
      OnStartInstance(payload);
      break;
    case wire::kEndInstance:
      dispatch(&Executor::OnEndInstance);
      break;
    case wire::kIssue:
      dispatch(&Executor::OnIssue);
      break;
    case wire::kRekey:
      dispatch(&Executor::OnRekey);
      break;
    case wire::kRecall:
      dispatch(&Executor::OnRecall);
      break;
    case wire::kWatch:
      dispatch(&Executor::OnWatch);
      break;
    case wire::kRecv:
      dispatch(&Executor::OnRecv);
      break;
    case wire::kSend:
      dispatch(&Executor::OnSend);
      break;
    case wire::kCancelTransfer:
      dispatch(&Executor::OnCancelTransfer);
      break;
    case wire::kTensorCommandRun:
      to_copier(&CopyCommand::tensor);
      break;
    case wire::kDropReplica:
      to_copier(&CopyCommand::drop);
      break;
    default:
      read = false;
  }
  if (!read)
    SLICE_LOG_ERROR("executor", "command %u with %zu bytes is not understood", type,
                    payload.size());
}

bool Executor::LeaveLocked(int self) {
  bool drained = false;
  while (!ring_->PrepareSleep()) {
    DrainLocked();
    drained = true;
  }
  return WakeLocked(self) || drained;
}

bool Executor::WakeLocked(int self) {
  bool woken = false;
  for (const std::unique_ptr<Device>& device : devices_) {
    const uint64_t bit = uint64_t{1} << device->index;
    if ((wake_devices_ & bit) == 0) continue;
    wake_devices_ &= ~bit;
    if (static_cast<int>(device->index) == self) {
      woken = true;
    } else if (device->sleeping) {
      SignalEventFd(device->event);
    }
  }
  if (wake_copier_) {
    wake_copier_ = false;
    if (self == kCopyThread) {
      woken = true;
    } else if (copier_sleeping_) {
      SignalEventFd(copier_event_);
    }
  }
  return woken;
}

std::shared_ptr<Instance> Executor::ShareInstance(uint64_t id, uint32_t attempt) {
  const auto found = instances_.find({id, attempt});
  return found == instances_.end() ? nullptr : found->second;
}
Instance* Executor::FindInstance(uint64_t id, uint32_t attempt) {
  return ShareInstance(id, attempt).get();
}

void Executor::OnStartInstance(const std::vector<std::byte>& payload) {
  wire::StartInstance command;
  if (payload.size() < sizeof command) {
    SLICE_LOG_ERROR("executor", "StartInstance of %zu bytes", payload.size());
    return;
  }
  std::memcpy(&command, payload.data(), sizeof command);
  const uint64_t expected =
      sizeof command + uint64_t{command.symbol_count} * sizeof(int64_t) +
      (uint64_t{command.input_count} + command.output_count) * sizeof(wire::ArenaRange);
  if (payload.size() != expected) {
    SLICE_LOG_ERROR("executor", "StartInstance of %zu bytes, its counts need %llu", payload.size(),
                    static_cast<unsigned long long>(expected));
    return;
  }
  if (FindInstance(command.instance, command.attempt) != nullptr) return;  // said before
  const std::byte* at = payload.data() + sizeof command;
  std::vector<int64_t> symbols;
  std::vector<wire::ArenaRange> inputs, outputs;
  ReadArray(&at, command.symbol_count, &symbols);
  ReadArray(&at, command.input_count, &inputs);
  ReadArray(&at, command.output_count, &outputs);
  const auto binding = bindings_.find(command.binding);
  Result<std::shared_ptr<Instance>> started =
      binding == bindings_.end() || binding->second->tenant()->id != command.tenant
          ? Error(StatusCode::kStale, "binding %u of tenant %u is not there", command.binding,
                  command.tenant)
          : Instance::Start(binding->second, command.instance, command.attempt, symbols, inputs,
                            outputs);
  instances_[{command.instance, command.attempt}] =
      started.ok() ? *std::move(started)
                   : Instance::Failed(command.instance, command.attempt, started.status());
}

void Executor::OnEndInstance(const wire::EndInstance& command) {
  const std::shared_ptr<Instance> instance = ShareInstance(command.instance, command.attempt);
  if (instance == nullptr) {
    reports_->Push(wire::kInstanceEnded, wire::InstanceEnded{command.instance, command.attempt, 0});
    return;
  }
  instance->ending = true;
  DropQueued(*instance);
  std::vector<uint64_t> idle;
  for (auto& [id, transfer] : transfers_) {
    if (transfer.instance != instance) continue;
    transfer.cancelled = true;
    if (!transfer.busy) idle.push_back(id);
  }
  for (const uint64_t id : idle) FinishTransfer(id, StatusCode::kCancelled);
  EndIfIdle(instance);
}

void Executor::EndIfIdle(const std::shared_ptr<Instance>& instance) {
  if (!instance->ending || instance->running > 0) return;
  const wire::InstanceEnded report{instance->id(), instance->attempt(), 0};
  if (instances_.erase({instance->id(), instance->attempt()}) == 0) return;
  // The report must not overtake the release: the caller's reference is the last one and goes with
  // the next statement of its thread; values are dropped here.
  instance->Clear();
  reports_->Push(wire::kInstanceEnded, report);
}

void Executor::DropQueued(const Instance& instance) {
  for (const std::unique_ptr<Device>& device : devices_) {
    device->queue.RemoveInstance(instance.id(), instance.attempt());
  }
}

void Executor::OnIssue(const wire::Issue& command) {
  const OpKey key{command.instance, command.attempt, command.op};
  Instance* instance = FindInstance(command.instance, command.attempt);
  const auto refuse = [&](const Status& why) {
    wire::Failed report{};
    report.instance = command.instance;
    report.attempt = command.attempt;
    report.op = command.op;
    report.status = static_cast<int32_t>(why.code());
    std::strncpy(report.text, why.text().c_str(), sizeof report.text - 1);
    reports_->Push(wire::kFailed, report);
  };
  if (instance == nullptr)
    return refuse(Error(StatusCode::kStale, "the executor does not know the instance"));
  if (instance->ending) return;
  if (!instance->failure.ok()) return refuse(instance->failure);
  if (command.op >= instance->op_count() || command.device >= devices_.size()) {
    return refuse(Error(StatusCode::kInternal, "op %u of %zu on device %u of %zu", command.op,
                        instance->op_count(), command.device, devices_.size()));
  }
  if (instance->ops[command.op] != OpState::kNone) return;  // said before
  instance->ops[command.op] = OpState::kIssued;
  Device& device = *devices_[command.device];
  QueuedOp op;
  op.key = key;
  op.service_class = command.service_class == 0 ? ServiceClass::kOnline : ServiceClass::kOffline;
  op.after_online_finish = (command.flags & wire::kAfterOnlineFinish) != 0;
  op.priority = command.priority;
  op.order = command.order;
  op.earliest_ns = command.earliest_ns;
  op.end_by_ns = command.end_by_ns;
  op.duration_ns = command.duration_ns;
  op.ready = instance->IsReady(command.op, device.config.domain());
  device.queue.Add(op);
  wake_devices_ |= uint64_t{1} << device.index;
}

void Executor::OnRekey(const wire::Rekey& command) {
  const OpKey key{command.instance, command.attempt, command.op};
  for (const std::unique_ptr<Device>& device : devices_) {
    QueuedOp* op = device->queue.Find(key);
    if (op == nullptr) continue;
    op->priority = command.priority;
    op->order = command.order;
    wake_devices_ |= uint64_t{1} << device->index;
  }
}

void Executor::Recalled(const OpKey& key, uint32_t reason) {
  if (Instance* instance = FindInstance(key.instance, key.attempt);
      instance != nullptr && instance->usable()) {
    instance->ops[key.op] = OpState::kNone;
  }
  reports_->Push(wire::kRecalled, wire::Recalled{key.instance, key.attempt, key.op, reason, 0});
}

void Executor::OnRecall(const wire::Recall& command) {
  const OpKey key{command.instance, command.attempt, command.op};
  const Instance* instance = FindInstance(command.instance, command.attempt);
  if (instance != nullptr && command.op < instance->op_count()) {
    const OpState state = instance->ops[command.op];
    // Started or Finished answers.
    if (state == OpState::kLaunched || state == OpState::kFinished) return;
  } else if (instance != nullptr && instance->usable()) {
    return;
  }
  for (const std::unique_ptr<Device>& device : devices_) device->queue.Remove(key);
  if (instance != nullptr && !instance->usable()) {
    reports_->Push(wire::kRecalled, wire::Recalled{key.instance, key.attempt, key.op, 0, 0});
    return;
  }
  Recalled(key, 0);
}

void Executor::RefreshReady(Instance* instance) {
  for (const std::unique_ptr<Device>& device : devices_) {
    for (QueuedOp& op : device->queue.ops()) {
      if (op.ready || op.key.instance != instance->id() || op.key.attempt != instance->attempt())
        continue;
      op.ready = instance->IsReady(op.key.op, device->config.domain());
      if (op.ready) wake_devices_ |= uint64_t{1} << device->index;
    }
  }
  for (auto& [id, transfer] : transfers_) {
    if (transfer.instance.get() == instance) ReportIntentIfReady(&transfer);
  }
}

void Executor::FailInstance(Instance* instance, uint32_t op, const Status& why, bool began_write) {
  if (instance->failure.ok()) instance->failure = why;
  DropQueued(*instance);
  wire::Failed report{};
  report.instance = instance->id();
  report.attempt = instance->attempt();
  report.op = op;
  report.status = static_cast<int32_t>(why.code());
  report.began_write = began_write ? 1 : 0;
  std::strncpy(report.text, why.text().c_str(), sizeof report.text - 1);
  reports_->Push(wire::kFailed, report);
}

void Executor::OnWatch(const wire::Watch& command) {
  if (transfers_.contains(command.transfer)) return;  // said before
  Transfer transfer;
  transfer.watch = command;
  transfer.order = ++transfer_order_;
  bool valid =
      command.source_domain < domains_.size() && command.destination_domain < domains_.size();
  if (command.instance != 0) {
    transfer.instance = ShareInstance(command.instance, command.attempt);
    valid = valid && transfer.instance != nullptr && transfer.instance->usable() &&
            !transfer.instance->ending &&
            command.value < transfer.instance->source().values().size() &&
            transfer.instance->source().crossing_index(command.value) != graph::kNoIndex;
  } else {
    const auto set = sets_.find(command.set);
    valid = valid && set != sets_.end() && command.value < set->second->tensor_count();
    if (valid) transfer.set = set->second;
  }
  Transfer& entry = transfers_[command.transfer] = std::move(transfer);
  if (!valid) {
    FinishTransfer(command.transfer, StatusCode::kCancelled);
    return;
  }
  ReportIntentIfReady(&entry);
}

void Executor::ReportIntentIfReady(Transfer* transfer) {
  if (transfer->intent) return;
  if (transfer->instance != nullptr &&
      !transfer->instance->Value(transfer->watch.value, transfer->watch.source_domain).defined()) {
    return;
  }
  transfer->intent = true;
  reports_->Push(wire::kIntent, wire::Intent{transfer->watch.transfer, MonotonicNow()});
}

void Executor::OnRecv(const wire::TransferRef& command) {
  const auto found = transfers_.find(command.transfer);
  if (found == transfers_.end()) return;
  found->second.recv = true;
  wake_copier_ = true;
}

void Executor::OnSend(const wire::TransferRef& command) {
  const auto found = transfers_.find(command.transfer);
  if (found == transfers_.end()) return;
  found->second.send = true;
  wake_copier_ = true;
}

void Executor::OnCancelTransfer(const wire::TransferRef& command) {
  const auto found = transfers_.find(command.transfer);
  if (found == transfers_.end()) return;
  found->second.cancelled = true;
  if (!found->second.busy) FinishTransfer(command.transfer, StatusCode::kCancelled);
}

void Executor::FinishTransfer(uint64_t id, StatusCode code) {
  const auto found = transfers_.find(id);
  Transfer transfer = std::move(found->second);
  transfers_.erase(found);
  if (code == StatusCode::kOk && transfer.instance != nullptr) {
    Instance* instance = transfer.instance.get();
    if (!instance->ending && instance->NeedsValue(transfer.watch.value)) {
      instance->PutValue(transfer.watch.value, transfer.watch.destination_domain,
                         transfer.destination);
    }
  }
  const TimeNs now = MonotonicNow();
  const wire::TransferDone report{id,
                                  transfer.start_ns == 0 ? now : transfer.start_ns,
                                  now,
                                  static_cast<int64_t>(transfer.done),
                                  static_cast<int32_t>(code),
                                  0};
  transfer.source = transfer.destination = at::Tensor();
  reports_->Push(wire::kTransferDone, report);
  if (transfer.instance != nullptr && !transfer.instance->ending)
    RefreshReady(transfer.instance.get());
}

}  // namespace slice::executor
