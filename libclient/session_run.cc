// The fast path of a session: submit slots, completions, tickets and waiting. Control calls:
// session.cc.
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "common/checked.h"
#include "common/clock.h"
#include "libclient/options.h"
#include "libclient/session.h"

namespace slice::client {
namespace {

constexpr DurationNs kErrorTextTimeout = 2 * kSecond;  // a text is not worth a longer wait
constexpr DurationNs kSleepMax =
    3600 * kSecond;  // "for ever" in pieces, so that every sleep has a time limit
constexpr uint64_t kArenaAlignment = 64;

timespec ToTimespec(DurationNs duration) {
  return {.tv_sec = duration / kSecond, .tv_nsec = duration % kSecond};
}

DurationNs Remaining(TimeNs deadline_ns) {
  if (deadline_ns == kNever) return kSleepMax;
  return std::clamp<DurationNs>(deadline_ns - MonotonicNow(), 0, kSleepMax);
}

TimeNs DeadlineAfter(int64_t timeout_ns) {
  int64_t deadline_ns = 0;
  if (timeout_ns < 0 || !CheckedAdd(MonotonicNow(), timeout_ns, &deadline_ns)) return kNever;
  return deadline_ns;
}

slice_completion_t ToCompletion(const wire::CompletionSlot& slot) {
  return {.size = sizeof(slice_completion_t),
          .status = static_cast<slice_status_t>(slot.status),
          .failed_op = slot.failed_op,
          .submit_ns = slot.submit_ns,
          .start_ns = slot.start_ns,
          .finish_ns = slot.finish_ns,
          .predicted_finish_ns = slot.predicted_finish_ns};
}

}  // namespace

// ---- submitting
// -----------------------------------------------------------------------------------------------------

Status Session::PushLocked(wire::SubmitSlot slot, std::span<const wire::Argument> arguments,
                           slice_ticket_t* ticket) {
  SLICE_RETURN_IF_ERROR(broken_);
  Status status;
  if (ticket != nullptr) {
    // The completion ring has one slot for each of these, so that the daemon can always post.
    if (in_flight_ >= wire::kRingSlots) DrainLocked();
    SLICE_RETURN_IF_ERROR(broken_);
    slot.cookie = next_ticket_;
    if (in_flight_ >= wire::kRingSlots) {
      status = Error(
          StatusCode::kWouldBlock,
          "%zu requests are in flight, at most %u may be: wait for a completion and try again",
          in_flight_, wire::kRingSlots);
    }
  }
  if (status.ok()) {
    // The ticket first: another thread may drain its completion as soon as the slot is published.
    if (ticket != nullptr) tickets_.emplace(slot.cookie, Ticket{});
    status = submits_->Push(slot, arguments);
    if (status.ok()) {
      if (ticket != nullptr) {
        *ticket = next_ticket_++;
        ++in_flight_;
      }
      return status;
    }
    if (ticket != nullptr) tickets_.erase(slot.cookie);
  }
  if (status.code() == StatusCode::kProtocol) BreakLocked(status);
  // A caller that only tries again would keep the daemon from going on (it stops while its
  // completion ring is full), and would never learn that the daemon is gone.
  if (status.code() == StatusCode::kWouldBlock) DrainLocked();
  if (status.code() == StatusCode::kWouldBlock && channel_->HungUp())
    BreakLocked(channel_->LostStatus());
  return broken_.ok() ? status : broken_;
}

void Session::SignalDaemon() {
  if (submits_->DaemonSleeps()) SignalEventFd(daemon_event_);
}

Status Session::OpenSequence(const slice_sequence_options_t& options, slice_sequence_t* sequence) {
  if (options.service_class > SLICE_CLASS_OFFLINE) {
    return Error(StatusCode::kInvalid,
                 "service_class is %u: it must be one of SLICE_CLASS_* (0..%u)",
                 options.service_class, SLICE_CLASS_OFFLINE);
  }
  {
    std::lock_guard lock(mutex_);
    wire::SubmitSlot slot{};
    slot.sequence = next_sequence_;
    slot.deadline_ns = options.deadline_ns;
    slot.priority = options.priority;
    slot.flags = wire::kSequenceOpen | options.service_class << wire::kClassShift;
    SLICE_RETURN_IF_ERROR(PushLocked(slot, {}, nullptr));
    *sequence = next_sequence_++;
    sequences_.insert(*sequence);
  }
  SignalDaemon();
  return Status::Ok();
}

Status Session::CloseSequence(slice_sequence_t sequence) {
  {
    std::lock_guard lock(mutex_);
    SLICE_RETURN_IF_ERROR(broken_);
    if (!sequences_.contains(sequence)) {
      return Error(StatusCode::kStale, "sequence %llu is closed or was never opened here",
                   static_cast<unsigned long long>(sequence));
    }
    wire::SubmitSlot slot{};
    slot.sequence = sequence;
    slot.flags = wire::kSequenceClose;
    SLICE_RETURN_IF_ERROR(PushLocked(slot, {}, nullptr));
    sequences_.erase(sequence);
  }
  SignalDaemon();
  return Status::Ok();
}

Status Session::Submit(const slice_submit_args_t& args, slice_ticket_t* ticket) {
  const struct {
    const char* name;
    const void* pointer;
    uint32_t count;
  } arrays[] = {{"symbols", args.symbols, args.symbol_count},
                {"inputs", args.inputs, args.input_count},
                {"outputs", args.outputs, args.output_count}};
  for (const auto& array : arrays) {
    if (array.pointer == nullptr && array.count != 0) {
      return Error(StatusCode::kInvalid, "%s is NULL and its count is %u", array.name, array.count);
    }
  }
  {
    std::lock_guard lock(mutex_);
    SLICE_RETURN_IF_ERROR(broken_);
    if (!bindings_.contains(args.binding)) {
      return Error(StatusCode::kStale, "binding %#llx is destroyed or of another session",
                   static_cast<unsigned long long>(args.binding));
    }
    if (args.sequence != 0 && !sequences_.contains(args.sequence)) {
      return Error(StatusCode::kStale, "sequence %llu is closed or was never opened here",
                   static_cast<unsigned long long>(args.sequence));
    }
    const uint64_t count = uint64_t{args.symbol_count} + args.input_count + args.output_count;
    if (count > wire::kArgumentAreaBytes / sizeof(wire::Argument)) {
      return Error(StatusCode::kInvalid,
                   "%u symbols, %u inputs and %u outputs: at most %zu together are possible",
                   args.symbol_count, args.input_count, args.output_count,
                   wire::kArgumentAreaBytes / sizeof(wire::Argument));
    }
    arguments_.clear();
    for (uint32_t i = 0; i < args.symbol_count; ++i) {
      arguments_.push_back({wire::kArgSymbol | i, static_cast<uint64_t>(args.symbols[i]), 0});
    }
    for (uint32_t i = 0; i < args.input_count; ++i) {
      arguments_.push_back({wire::kArgArena, args.inputs[i].offset, args.inputs[i].bytes});
    }
    for (uint32_t i = 0; i < args.output_count; ++i) {
      arguments_.push_back({wire::kArgArena, args.outputs[i].offset, args.outputs[i].bytes});
    }
    wire::SubmitSlot slot{};
    slot.binding = args.binding;
    slot.sequence = args.sequence;
    slot.deadline_ns = args.deadline_ns;
    slot.priority = args.priority;
    slot.flags = wire::kSubmitGraph;
    SLICE_RETURN_IF_ERROR(PushLocked(slot, arguments_, ticket));
  }
  SignalDaemon();
  return Status::Ok();
}

Status Session::CheckCommandLocked(const TensorCommand& command,
                                   std::span<const slice_tensor_t> handles) const {
  const bool copies = command.kind == wire::kTensorWrite || command.kind == wire::kTensorRead;
  for (size_t i = 0; i < handles.size(); ++i) {
    const auto found = tensors_.find(handles[i]);
    if (found == tensors_.end()) {
      return Error(StatusCode::kStale,
                   "tensor %zu of %zu: handle %#llx is released or of another session", i,
                   handles.size(), static_cast<unsigned long long>(handles[i]));
    }
    const Tensor& tensor = found->second;
    if (!tensor.managed) {
      return Error(StatusCode::kInvalid,
                   "tensor %zu of %zu (handle %#llx) is imported: only managed tensors "
                   "(slice_tensor_alloc) take commands",
                   i, handles.size(), static_cast<unsigned long long>(handles[i]));
    }
    if (command.kind == wire::kTensorCrop &&
        (command.dimension < 0 || static_cast<uint32_t>(command.dimension) >= tensor.dim_count)) {
      return Error(StatusCode::kInvalid,
                   "tensor %zu of %zu: dimension is %d, the tensor has %u dimensions", i,
                   handles.size(), command.dimension, tensor.dim_count);
    }
    if (copies && command.arena_bytes != tensor.dense_bytes) {
      return Error(StatusCode::kBounds,
                   "arena slot has %llu bytes, the tensor has %llu: they must be equal",
                   static_cast<unsigned long long>(command.arena_bytes),
                   static_cast<unsigned long long>(tensor.dense_bytes));
    }
  }
  if (copies && (command.arena_offset % kArenaAlignment != 0 ||
                 !RangeFits(command.arena_offset, command.arena_bytes, arena_->bytes()))) {
    return Error(StatusCode::kBounds,
                 "%llu bytes at arena offset %llu: the offset must be a multiple of %llu and the "
                 "end within %llu bytes",
                 static_cast<unsigned long long>(command.arena_bytes),
                 static_cast<unsigned long long>(command.arena_offset),
                 static_cast<unsigned long long>(kArenaAlignment),
                 static_cast<unsigned long long>(arena_->bytes()));
  }
  return Status::Ok();
}

Status Session::CommandTensors(const TensorCommand& command,
                               std::span<const slice_tensor_t> handles, slice_ticket_t* ticket,
                               bool* interrupted) {
  slice_ticket_t own_ticket = 0;
  {
    std::lock_guard lock(mutex_);
    SLICE_RETURN_IF_ERROR(broken_);
    SLICE_RETURN_IF_ERROR(CheckCommandLocked(command, handles));
    arguments_.clear();
    for (const slice_tensor_t handle : handles) {
      arguments_.push_back({handle, command.arena_offset, command.arena_bytes});
    }
    wire::SubmitSlot slot{};
    slot.deadline_ns = command.parameter;
    slot.priority = command.dimension;
    slot.flags = wire::kTensorCommand | static_cast<uint32_t>(command.kind)
                                            << wire::kCommandKindShift;
    SLICE_RETURN_IF_ERROR(PushLocked(slot, arguments_, &own_ticket));
  }
  SignalDaemon();
  if (ticket != nullptr) {
    *ticket = own_ticket;
    return Status::Ok();
  }
  Status status = Wait(own_ticket, -1, nullptr, interrupted);
  if (*interrupted) {  // the caller has no ticket to come back with
    std::lock_guard lock(mutex_);
    const auto found = tickets_.find(own_ticket);
    if (found != tickets_.end() && found->second.done) {
      tickets_.erase(found);
      SetUnclaimedLocked(unclaimed_ - 1);
    } else if (found != tickets_.end()) {
      found->second.abandoned = true;
    }
    return Error(StatusCode::kCancelled,
                 "interrupted by a signal while waiting: the command is queued and will be done");
  }
  return status;
}

Status Session::Cancel(slice_ticket_t ticket) {
  {
    std::lock_guard lock(mutex_);
    SLICE_RETURN_IF_ERROR(broken_);
    DrainLocked();
    const auto found = tickets_.find(ticket);
    if (found == tickets_.end()) {
      return Error(StatusCode::kStale, "ticket %llu was waited for already or never given out",
                   static_cast<unsigned long long>(ticket));
    }
    if (found->second.done) return Status::Ok();
    wire::SubmitSlot slot{};
    slot.binding = ticket;
    slot.flags = wire::kCancel;
    SLICE_RETURN_IF_ERROR(PushLocked(slot, {}, nullptr));
  }
  SignalDaemon();
  return Status::Ok();
}

// ---- completions
// ----------------------------------------------------------------------------------------------------

void Session::DrainLocked() {
  if (!broken_.ok() || completions_->Empty()) return;
  // Before reading the ring, so that a later signal is not lost. A thread that polls needs the
  // signal to wake up: it clears by itself.
  if (!polling_) ClearEventFd(client_event_);
  wire::CompletionSlot slot;
  for (;;) {
    const Result<bool> popped = completions_->Pop(&slot);
    if (!popped.ok()) return BreakLocked(popped.status());
    if (!*popped) break;
    CompleteLocked(slot);
    if (!broken_.ok()) return;
  }
  completions_->Publish();
  // Slots that sliced left because completions were unread: it may sleep until it is told.
  if (submits_->SlotsWait()) SignalDaemon();
}

void Session::CompleteLocked(const wire::CompletionSlot& slot) {
  const auto found = tickets_.find(slot.cookie);
  if (found == tickets_.end() || found->second.done || slot.status < SLICE_OK ||
      slot.status > SLICE_ERR_TIMEOUT) {
    return BreakLocked(Error(StatusCode::kProtocol,
                             "sliced at '%s' completed request %llu with status %d: no such "
                             "request is in flight, or the "
                             "status is unknown: session closed",
                             channel_->path().c_str(), static_cast<unsigned long long>(slot.cookie),
                             slot.status));
  }
  --in_flight_;
  if (found->second.abandoned) {
    tickets_.erase(found);
    return;
  }
  found->second.done = true;
  found->second.completion = slot;
  SetUnclaimedLocked(unclaimed_ + 1);
  for (Waiter* waiter : waiters_) {
    if (waiter->ticket == slot.cookie || waiter->ticket == 0) WakeLocked(waiter);
  }
}

void Session::BreakLocked(const Status& status) {
  if (!broken_.ok()) return;
  // Results that arrived before the daemon died are good.
  if (status.code() == StatusCode::kDaemonLost && completions_ != nullptr) DrainLocked();
  if (!broken_.ok()) return;
  broken_ = status;
  channel_->Shutdown();  // wakes a thread that polls
  for (Waiter* waiter : waiters_) WakeLocked(waiter);
  if (unclaimed_event_.valid()) SignalEventFd(unclaimed_event_);
}

void Session::SetUnclaimedLocked(size_t count) {
  const bool had_some = std::exchange(unclaimed_, count) > 0;
  if (!unclaimed_event_.valid() || had_some == (count > 0)) return;
  if (count > 0) {
    SignalEventFd(unclaimed_event_);
  } else if (broken_.ok()) {
    ClearEventFd(unclaimed_event_);
  }
}

void Session::WakeLocked(Waiter* waiter) {
  waiter->woken.store(1, std::memory_order_relaxed);  // the mutex orders it
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&waiter->woken), FUTEX_WAKE_PRIVATE, 1, nullptr,
            nullptr, 0);
}

// ---- waiting
// --------------------------------------------------------------------------------------------------------

// Registers a waiter; at the end passes polling on, so that sleepers are never without a poller.
class Session::WaitScope {
 public:
  WaitScope(Session* session, Waiter* waiter) : session_(session), waiter_(waiter) {
    session_->waiters_.push_back(waiter_);
  }
  ~WaitScope() {  // under mutex_
    std::erase(session_->waiters_, waiter_);
    if (!session_->polling_ && !session_->waiters_.empty())
      session_->WakeLocked(session_->waiters_.front());
  }
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;

 private:
  Session* session_;
  Waiter* waiter_;
};

Status Session::Wait(slice_ticket_t ticket, int64_t timeout_ns, slice_completion_t* completion,
                     bool* interrupted) {
  *interrupted = false;
  const TimeNs deadline_ns = DeadlineAfter(timeout_ns);
  wire::CompletionSlot slot{};
  {
    std::unique_lock lock(mutex_);
    Waiter waiter(ticket);
    const WaitScope scope(this, &waiter);
    for (bool looked_at_socket = false, signalled = false;;) {
      DrainLocked();
      if (ticket == 0) {
        if (unclaimed_ > 0) return Status::Ok();
        SLICE_RETURN_IF_ERROR(broken_);
      } else {
        const auto found = tickets_.find(ticket);
        if (found == tickets_.end()) {
          return Error(StatusCode::kStale, "ticket %llu was waited for already or never given out",
                       static_cast<unsigned long long>(ticket));
        }
        if (found->second.done) {
          slot = found->second.completion;
          tickets_.erase(found);
          SetUnclaimedLocked(unclaimed_ - 1);
          break;
        }
        if (!broken_.ok()) {
          tickets_.erase(found);
          --in_flight_;
          return broken_;
        }
      }
      if (signalled) {
        *interrupted = true;
        return Error(StatusCode::kCancelled,
                     "interrupted by a signal (errno EINTR): ticket %llu stays valid, wait again",
                     static_cast<unsigned long long>(ticket));
      }
      if (Remaining(deadline_ns) == 0 && (looked_at_socket || polling_)) {
        return Error(StatusCode::kTimeout, "ticket %llu is not finished after %lld ns: wait again",
                     static_cast<unsigned long long>(ticket), static_cast<long long>(timeout_ns));
      }
      signalled = polling_ ? SleepUntilWoken(&lock, &waiter, deadline_ns)
                           : PollForCompletions(&lock, deadline_ns);
      looked_at_socket = true;
    }
  }
  if (completion != nullptr) WriteOutput(ToCompletion(slot), completion);
  return StatusOf(ticket, slot);
}

bool Session::PollForCompletions(std::unique_lock<std::mutex>* lock, TimeNs deadline_ns) {
  pollfd items[2] = {{.fd = client_event_.get(), .events = POLLIN, .revents = 0},
                     {.fd = channel_->fd(), .events = POLLRDHUP, .revents = 0}};
  const timespec timeout = ToTimespec(Remaining(deadline_ns));
  polling_ = true;
  lock->unlock();
  const int ready = ::ppoll(items, 2, &timeout, nullptr);
  const int error = errno;
  lock->lock();
  polling_ = false;
  if (ready > 0 && items[0].revents != 0) ClearEventFd(client_event_);
  if (ready > 0 && items[1].revents != 0) BreakLocked(channel_->LostStatus());
  return ready < 0 && error == EINTR;
}

bool Session::SleepUntilWoken(std::unique_lock<std::mutex>* lock, Waiter* waiter,
                              TimeNs deadline_ns) {
  // With a time limit a futex sleep ends at any signal; without one SA_RESTART would resume it.
  const timespec timeout = ToTimespec(Remaining(deadline_ns));
  waiter->woken.store(0, std::memory_order_relaxed);
  lock->unlock();
  const int64_t result = ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&waiter->woken),
                                   FUTEX_WAIT_PRIVATE, 0, &timeout, nullptr, 0);
  const int error = errno;
  lock->lock();
  return result < 0 && error == EINTR;
}

Status Session::StatusOf(slice_ticket_t ticket, const wire::CompletionSlot& slot) {
  if (slot.status == SLICE_OK) return Status::Ok();
  const auto code = static_cast<StatusCode>(slot.status);
  if (slot.text_token != 0) {
    proto::Request request;
    request.mutable_error_text()->set_token(slot.text_token);
    const Result<proto::Reply> reply = Call(std::move(request), {}, nullptr, kErrorTextTimeout);
    if (reply.ok() && reply.value().has_body() && !reply.value().body().text().empty()) {
      return Status(code, reply.value().body().text());
    }
  }
  const std::string where =
      slot.failed_op == UINT32_MAX ? "" : " at op " + std::to_string(slot.failed_op);
  return Error(code, "request %llu ended with %s%s (the daemon gave no text; its log may say more)",
               static_cast<unsigned long long>(ticket),
               slice_status_name(static_cast<slice_status_t>(slot.status)), where.c_str());
}

}  // namespace slice::client
