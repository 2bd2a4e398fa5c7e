#include "daemon/server/tenant_ring.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "common/checked.h"

namespace slice::server {
namespace {

using wire::kRingSlots;

template <typename T>
std::atomic_ref<T> Shared(const Mapping& memory, size_t offset) {
  return std::atomic_ref<T>(*memory.as<T>(offset));
}

bool AllZero(const uint8_t* bytes, size_t count) {
  return std::all_of(bytes, bytes + count, [](uint8_t byte) { return byte == 0; });
}

}  // namespace

Result<std::unique_ptr<TenantRing>> TenantRing::Create(const Fd& tenant_memfd, Handout* handout) {
  std::unique_ptr<TenantRing> ring(new TenantRing);
  SLICE_ASSIGN_OR_RETURN([[maybe_unused]] size_t bytes,
                         CheckForeignMemfd(tenant_memfd, wire::kTenantRingBytes));
  SLICE_ASSIGN_OR_RETURN(ring->tenant_, Mapping::Map(tenant_memfd, wire::kTenantRingBytes, false));
  SLICE_ASSIGN_OR_RETURN(handout->daemon_ring,
                         CreateMemfd("slice-daemon-ring", wire::kDaemonRingBytes));
  SLICE_ASSIGN_OR_RETURN(ring->daemon_,
                         Mapping::Map(handout->daemon_ring, wire::kDaemonRingBytes, true));
  SLICE_RETURN_IF_ERROR(SealFutureWrite(handout->daemon_ring));
  SLICE_ASSIGN_OR_RETURN(ring->submit_event_, CreateEventFd());
  SLICE_ASSIGN_OR_RETURN(handout->submit_event, ring->submit_event_.Duplicate());
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
    return ErrnoError(StatusCode::kNoMemory, errno, "socketpair for completions");
  }
  ring->completion_socket_ = Fd(pair[0]);
  handout->completion_event = Fd(pair[1]);
  return ring;
}

Status TenantRing::ReadCompletionHead() {
  // Acquire: the tenant's copies of the slots are made before we overwrite them.
  const uint64_t head =
      Shared<uint64_t>(tenant_, wire::kCompletionHeadOffset).load(std::memory_order_acquire);
  if (head < consumed_ || head > published_completed_) {
    return Error(StatusCode::kProtocol,
                 "completion ring: %llu consumed, but %llu were before and %llu are written",
                 static_cast<unsigned long long>(head), static_cast<unsigned long long>(consumed_),
                 static_cast<unsigned long long>(published_completed_));
  }
  consumed_ = head;
  return Status::Ok();
}

bool TenantRing::HasSubmissions() const {
  const uint64_t tail =
      Shared<uint64_t>(tenant_, wire::kSubmitTailOffset).load(std::memory_order_acquire);
  const uint64_t head =
      Shared<uint64_t>(tenant_, wire::kCompletionHeadOffset).load(std::memory_order_acquire);
  return tail != taken_ && (!throttled_ || head != consumed_);
}

Result<bool> TenantRing::Take(Submission* submission) {
  throttled_ = false;
  const uint64_t tail =
      Shared<uint64_t>(tenant_, wire::kSubmitTailOffset).load(std::memory_order_acquire);
  if (tail == taken_) return false;
  if (tail - taken_ > kRingSlots) {
    return Error(StatusCode::kProtocol,
                 "submit ring: tail %llu, but %llu were taken and the ring has %u slots",
                 static_cast<unsigned long long>(tail), static_cast<unsigned long long>(taken_),
                 kRingSlots);
  }
  SLICE_RETURN_IF_ERROR(ReadCompletionHead());
  if (promised_ - consumed_ >= kRingSlots) {
    throttled_ = true;
    return false;
  }
  wire::SubmitSlot& slot = submission->slot;
  std::memcpy(&slot, tenant_.data() + wire::kSlotsOffset + taken_ % kRingSlots * sizeof slot,
              sizeof slot);
  ++taken_;
  submission->arguments.clear();
  submission->status = Status::Ok();
  if (slot.args_offset % 8 != 0 || slot.args_bytes % sizeof(wire::Argument) != 0 ||
      !RangeFits(slot.args_offset, slot.args_bytes, wire::kArgumentAreaBytes)) {
    submission->status =
        Error(StatusCode::kProtocol,
              "submit slot: arguments of %u bytes at offset %u: must be whole arguments of %zu "
              "bytes at a "
              "multiple of 8 inside %u bytes",
              slot.args_bytes, slot.args_offset, sizeof(wire::Argument), wire::kArgumentAreaBytes);
  } else if (!AllZero(slot.reserved, sizeof slot.reserved)) {
    submission->status = Error(StatusCode::kProtocol, "submit slot: reserved bytes must be zero");
  } else if (slot.args_bytes != 0) {
    submission->arguments.resize(slot.args_bytes / sizeof(wire::Argument));
    std::memcpy(submission->arguments.data(),
                tenant_.data() + wire::kArgumentsOffset + slot.args_offset, slot.args_bytes);
  }
  return true;
}

void TenantRing::PublishTaken() {
  if (published_taken_ == taken_) return;
  published_taken_ = taken_;
  // Release: our copies are made before the tenant may overwrite the slots.
  Shared<uint64_t>(daemon_, wire::kSubmitHeadOffset).store(taken_, std::memory_order_release);
}

void TenantRing::Complete(const wire::CompletionSlot& completion) {
  SLICE_CHECK(completed_ < promised_, "a completion that no slot asked for");
  std::memcpy(daemon_.data() + wire::kSlotsOffset + completed_ % kRingSlots * sizeof completion,
              &completion, sizeof completion);
  ++completed_;
}

bool TenantRing::PublishCompleted() {
  if (published_completed_ == completed_) return false;
  published_completed_ = completed_;
  Shared<uint64_t>(daemon_, wire::kCompletionTailOffset)
      .store(completed_, std::memory_order_release);
  // The tenant reads the wake-up before it looks at the ring: if one is unread, it will see what
  // was published now.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  int unread = 0;
  if (::ioctl(completion_socket_.get(), SIOCOUTQ, &unread) == 0 && unread > 0) return true;
  const uint64_t one = 1;
  // Fails only when the tenant is gone.
  [[maybe_unused]] const ssize_t sent =
      ::send(completion_socket_.get(), &one, sizeof one, MSG_DONTWAIT | MSG_NOSIGNAL);
  return true;
}

void TenantRing::SetSleeping(bool sleeping) {
  // Setting pairs with the tenant's fence between its tail and its look at this flag; the caller
  // looks at the ring after.
  Shared<uint32_t>(daemon_, wire::kDaemonSleepingOffset)
      .store(sleeping ? 1 : 0, sleeping ? std::memory_order_seq_cst : std::memory_order_relaxed);
}

}  // namespace slice::server
