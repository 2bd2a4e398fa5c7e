#include "libclient/tenant_rings.h"

#include <atomic>
#include <cstring>

#include "common/checked.h"

namespace slice::client {
namespace {

using wire::kArgumentAreaBytes;
using wire::kRingSlots;

template <typename T>
std::atomic_ref<T> Shared(std::byte* memory, size_t offset) {
  return std::atomic_ref<T>(*reinterpret_cast<T*>(memory + offset));
}

}  // namespace

Status SubmitRing::TakeConsumed() {
  // Acquire: pairs with the daemon's release after it copied the slots, so that we may overwrite
  // them.
  const uint64_t head =
      Shared<uint64_t>(daemon_memory_, wire::kSubmitHeadOffset).load(std::memory_order_acquire);
  if (head < head_ || head > tail_) {
    return Error(StatusCode::kProtocol,
                 "submit ring: sliced says it took %llu slots, %llu were taken before and %llu "
                 "written: session closed",
                 static_cast<unsigned long long>(head), static_cast<unsigned long long>(head_),
                 static_cast<unsigned long long>(tail_));
  }
  if (head != head_) {
    head_ = head;
    arguments_head_ = arguments_end_[(head - 1) % kRingSlots];
  }
  return Status::Ok();
}

Status SubmitRing::Push(wire::SubmitSlot slot, std::span<const wire::Argument> arguments) {
  if (arguments.size_bytes() > kArgumentAreaBytes) {
    return Error(StatusCode::kInvalid,
                 "%zu arguments (symbols, inputs and outputs) take %zu bytes, at most %u fit",
                 arguments.size(), arguments.size_bytes(), kArgumentAreaBytes);
  }
  const uint64_t bytes = arguments.size_bytes();
  SLICE_RETURN_IF_ERROR(TakeConsumed());
  if (tail_ - head_ >= kRingSlots) {
    return Error(StatusCode::kWouldBlock,
                 "submit ring: all %u slots wait for sliced to take them: wait for a completion "
                 "and try again",
                 kRingSlots);
  }
  uint64_t begin = arguments_tail_;
  if (begin % kArgumentAreaBytes + bytes > kArgumentAreaBytes)
    begin = RoundUp(begin, kArgumentAreaBytes);
  // Nothing in flight: the skipped rest of the area counts for nobody.
  const uint64_t head = tail_ == head_ ? begin : arguments_head_;
  if (begin + bytes - head > kArgumentAreaBytes) {
    return Error(StatusCode::kWouldBlock,
                 "submit ring: %llu bytes of arguments do not fit beside those that sliced has not "
                 "taken yet (area of %u "
                 "bytes): wait for a completion and try again",
                 static_cast<unsigned long long>(bytes), kArgumentAreaBytes);
  }
  arguments_head_ = head;
  slot.args_offset = static_cast<uint32_t>(begin % kArgumentAreaBytes);
  slot.args_bytes = static_cast<uint32_t>(bytes);
  if (bytes != 0) {
    std::memcpy(tenant_memory_ + wire::kArgumentsOffset + slot.args_offset, arguments.data(),
                bytes);
  }
  const uint64_t index = tail_ % kRingSlots;
  std::memcpy(tenant_memory_ + wire::kSlotsOffset + index * sizeof slot, &slot, sizeof slot);
  arguments_tail_ = begin + bytes;
  arguments_end_[index] = arguments_tail_;
  ++tail_;
  Shared<uint64_t>(tenant_memory_, wire::kSubmitTailOffset).store(tail_, std::memory_order_release);
  return Status::Ok();
}

bool SubmitRing::SlotsWait() const {
  return Shared<uint64_t>(daemon_memory_, wire::kSubmitHeadOffset)
             .load(std::memory_order_relaxed) != tail_;
}

bool SubmitRing::DaemonSleeps() const {
  // Pairs with the daemon's seq_cst store of daemon_sleeping: either we see it, or it sees our
  // tail, or the completion head that we stored.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return Shared<uint32_t>(daemon_memory_, wire::kDaemonSleepingOffset)
             .load(std::memory_order_relaxed) != 0;
}

bool CompletionRing::Empty() const {
  return Shared<uint64_t>(daemon_memory_, wire::kCompletionTailOffset)
             .load(std::memory_order_acquire) == head_;
}

Result<bool> CompletionRing::Pop(wire::CompletionSlot* slot) {
  // Acquire: pairs with the daemon's release after it wrote the slot.
  const uint64_t tail =
      Shared<uint64_t>(daemon_memory_, wire::kCompletionTailOffset).load(std::memory_order_acquire);
  if (tail - head_ > kRingSlots) {
    return Error(StatusCode::kProtocol,
                 "completion ring: sliced says it wrote %llu slots, we took %llu, the ring has %u: "
                 "session closed",
                 static_cast<unsigned long long>(tail), static_cast<unsigned long long>(head_),
                 kRingSlots);
  }
  if (tail == head_) return false;
  std::memcpy(slot, daemon_memory_ + wire::kSlotsOffset + head_ % kRingSlots * sizeof *slot,
              sizeof *slot);
  ++head_;
  return true;
}

void CompletionRing::Publish() {
  // Release: our copies are made before the daemon may overwrite the slots.
  Shared<uint64_t>(tenant_memory_, wire::kCompletionHeadOffset)
      .store(head_, std::memory_order_release);
}

}  // namespace slice::client
