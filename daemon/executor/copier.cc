// The copy thread: transfers in chunks, the best class first at every chunk boundary; tensor
// commands; replica drops. It also drains the command ring when every device thread is busy.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <pthread.h>
#include <sys/epoll.h>

#include <algorithm>
#include <tuple>

#include "common/clock.h"
#include "common/log.h"
#include "daemon/executor/executor.h"
#include "daemon/executor/tensors.h"
#include "daemon/executor/zygote.h"

namespace slice::executor {
namespace {

constexpr size_t kChunkBytes = size_t{1} << 20;
constexpr int kReportRetryMs = 1;

}  // namespace

void Executor::RunCopier() {
  ::pthread_setname_np(::pthread_self(), "copier");
  PrepareThread();
  const c10::InferenceMode inference;
  for (;;) {
    std::unique_lock lock(mutex_);
    DrainLocked();
    const bool worked = CopyStepLocked(&lock);
    const bool changed = LeaveLocked(kCopyThread);
    if (worked || changed) continue;
    copier_sleeping_ = true;
    lock.unlock();
    epoll_event event;
    if (::epoll_wait(copier_poll_.get(), &event, 1, reports_->Flush() ? kReportRetryMs : -1) > 0) {
      ClearEventFd(copier_event_);
    }
    lock.lock();
    copier_sleeping_ = false;
    ring_->EndSleep();
  }
}

// One step: a command, a destination to make, or a chunk. False: nothing to do. The lock is held
// again on return.
bool Executor::CopyStepLocked(std::unique_lock<std::mutex>* lock) {
  if (!copy_commands_.empty()) {
    const CopyCommand command = copy_commands_.front();
    copy_commands_.pop_front();
    if (command.tensor.has_value()) RunTensorCommand(lock, *command.tensor);
    if (command.drop.has_value()) DropReplica(lock, *command.drop);
    return true;
  }
  Transfer* best = nullptr;
  for (auto& [id, transfer] : transfers_) {
    if (!transfer.intent || !transfer.recv || (transfer.made && !transfer.send)) continue;
    const auto rank = [](const Transfer& t) {
      return std::tuple(t.made, t.watch.service_class, t.order);
    };
    if (best == nullptr || rank(transfer) < rank(*best)) best = &transfer;
  }
  if (best == nullptr) return false;
  if (!best->made) {
    MakeDestination(lock, best);
  } else {
    CopyChunk(lock, best);
  }
  return true;
}

void Executor::MakeDestination(std::unique_lock<std::mutex>* lock, Transfer* transfer) {
  const wire::Watch watch = transfer->watch;
  if (transfer->instance == nullptr) {
    transfer->bytes = transfer->set->layout(watch.value).bytes();
    transfer->from = transfer->set->Storage(watch.source_domain, watch.value, false);
    transfer->to = transfer->set->Storage(watch.destination_domain, watch.value, true);
    transfer->made = true;
    if (transfer->from == nullptr || transfer->to == nullptr) {
      SLICE_LOG_ERROR("executor", "transfer of set %u: not mapped in domains %u and %u (writable)",
                      watch.set, watch.source_domain, watch.destination_domain);
      FinishTransfer(watch.transfer, StatusCode::kCancelled);
    }
    return;
  }
  const at::Tensor source = transfer->instance->Value(watch.value, watch.source_domain);
  if (!source.defined()) {  // all its consumers ran meanwhile
    FinishTransfer(watch.transfer, StatusCode::kCancelled);
    return;
  }
  const std::shared_ptr<Instance> instance = transfer->instance;
  transfer->busy = true;
  ++instance->running;
  lock->unlock();
  at::Tensor destination;
  backend_->BeginOp({0, watch.destination_domain, instance->tenant()});
  try {
    destination = at::empty_strided(source.sizes(), source.strides(), source.options());
  } catch (const std::exception&) {
    destination = at::Tensor();
  }
  OpTiming timing;
  const Status ended = backend_->EndOp(&timing);
  lock->lock();
  transfer->busy = false;
  --instance->running;
  transfer->source = source;
  transfer->destination = std::move(destination);
  if (transfer->cancelled) {
    FinishTransfer(watch.transfer, StatusCode::kCancelled);
  } else if (!transfer->destination.defined() || !ended.ok()) {
    FinishTransfer(watch.transfer, StatusCode::kNoMemory);
  } else {
    transfer->made = true;
    transfer->bytes = static_cast<size_t>(ExtentBytes(source));
    transfer->from = static_cast<const std::byte*>(source.data_ptr());
    transfer->to = static_cast<std::byte*>(transfer->destination.data_ptr());
  }
  EndIfIdle(instance);
}

void Executor::CopyChunk(std::unique_lock<std::mutex>* lock, Transfer* transfer) {
  const std::shared_ptr<Instance> instance = transfer->instance;
  if (transfer->start_ns == 0) transfer->start_ns = MonotonicNow();
  const size_t bytes = std::min(kChunkBytes, transfer->bytes - transfer->done);
  transfer->busy = true;
  if (instance != nullptr) ++instance->running;
  lock->unlock();
  Status copied;
  if (bytes > 0) {
    copied = backend_->Copy(transfer->watch.destination_domain, transfer->to + transfer->done,
                            transfer->watch.source_domain, transfer->from + transfer->done, bytes);
  }
  lock->lock();
  transfer->busy = false;
  if (instance != nullptr) --instance->running;
  transfer->done += bytes;
  const uint64_t id = transfer->watch.transfer;
  if (transfer->cancelled || !copied.ok()) {
    FinishTransfer(id, StatusCode::kCancelled);
  } else if (transfer->done == transfer->bytes) {
    FinishTransfer(id, StatusCode::kOk);
  }
  if (instance != nullptr) EndIfIdle(instance);
}

void Executor::RunTensorCommand(std::unique_lock<std::mutex>* lock,
                                const wire::TensorCommandRun& command) {
  const auto set_entry = sets_.find(command.set);
  const auto tenant_entry = tenants_.find(command.tenant);
  Status status = Error(StatusCode::kStale, "set or tenant is gone");
  if (set_entry != sets_.end() && tenant_entry != tenants_.end()) {
    const std::shared_ptr<TensorSet> set = set_entry->second;
    const std::shared_ptr<TenantMemory> tenant = tenant_entry->second;
    lock->unlock();
    status = ApplyTensorCommand(command, set.get(), tenant.get());
    lock->lock();
  }
  if (!status.ok()) tenant_faults_.Warn("tensor command: " + status.ToString());
  reports_->Push(wire::kCommandDone,
                 wire::CommandDone{command.command, static_cast<int32_t>(status.code()), 0});
}

void Executor::DropReplica(std::unique_lock<std::mutex>* lock, const wire::DropReplica& command) {
  const auto entry = sets_.find(command.set);
  if (entry == sets_.end()) return;
  const std::shared_ptr<TensorSet> set = entry->second;
  lock->unlock();
  const bool all = command.tensor == 0xffffffff;
  const auto count = static_cast<uint32_t>(set->tensor_count());
  Status status;
  for (uint32_t tensor = all ? 0 : command.tensor;
       tensor < (all ? count : std::min(command.tensor + 1, count)); ++tensor) {
    status = set->DropPages(command.domain, tensor);
    if (!status.ok()) break;
  }
  if (!status.ok()) SLICE_LOG_WARN("executor", "dropping a replica: %s", status.ToString().c_str());
  lock->lock();
}

}  // namespace slice::executor
