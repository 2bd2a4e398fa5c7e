#include "common/wire/record_ring.h"

#include <cstring>

#include "common/checked.h"

namespace slice {
namespace {
constexpr size_t kRecordHeaderBytes = 8;
}  // namespace

RecordRing::RecordRing(std::byte* memory, size_t capacity_bytes)
    : memory_(memory), capacity_(capacity_bytes) {
  SLICE_CHECK((capacity_bytes & (capacity_bytes - 1)) == 0 && capacity_bytes >= 4096,
              "ring capacity: power of two");
  own_head_ = head().load(std::memory_order_acquire);
  own_tail_ = tail().load(std::memory_order_acquire);
}

std::atomic_ref<uint64_t> RecordRing::head() const {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(memory_));
}
std::atomic_ref<uint64_t> RecordRing::tail() const {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(memory_ + 64));
}
std::atomic_ref<uint32_t> RecordRing::sleeping() const {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(memory_ + 128));
}

bool RecordRing::Push(uint32_t type, std::span<const std::byte> payload) {
  SLICE_CHECK(payload.size() <= capacity_ / 4, "record too large for its ring");
  const uint64_t need = RoundUp(kRecordHeaderBytes + payload.size(), 8);
  const uint64_t used = own_tail_ - head().load(std::memory_order_acquire);
  if (used > capacity_) return false;  // the consumer published nonsense: treat as full
  const uint64_t at = own_tail_ & (capacity_ - 1);
  const uint64_t to_end = capacity_ - at;
  const uint64_t total = need <= to_end ? need : to_end + need;
  if (total > capacity_ - used) return false;
  std::byte* write = memory_ + kHeaderBytes + at;
  if (need > to_end) {
    const uint32_t pad[2] = {kPad, static_cast<uint32_t>(to_end - kRecordHeaderBytes)};
    std::memcpy(write, pad, sizeof pad);
    own_tail_ += to_end;
    write = memory_ + kHeaderBytes;
  }
  const uint32_t header[2] = {type, static_cast<uint32_t>(payload.size())};
  std::memcpy(write, header, sizeof header);
  if (!payload.empty()) std::memcpy(write + kRecordHeaderBytes, payload.data(), payload.size());
  own_tail_ += need;
  tail().store(own_tail_, std::memory_order_release);
  return true;
}

bool RecordRing::ConsumerSleeps() const {
  // Pairs with PrepareSleep: either we see `sleeping`, or the consumer sees our tail.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return sleeping().load(std::memory_order_relaxed) != 0;
}

bool RecordRing::ClaimSleep() { return sleeping().exchange(0, std::memory_order_acq_rel) != 0; }

Result<bool> RecordRing::Pop(Record* record) {
  for (;;) {
    const uint64_t available = tail().load(std::memory_order_acquire) - own_head_;
    if (available == 0) return false;
    if (available > capacity_ || available < kRecordHeaderBytes) {
      return Error(StatusCode::kProtocol, "ring: %llu bytes announced, capacity is %llu",
                   static_cast<unsigned long long>(available),
                   static_cast<unsigned long long>(capacity_));
    }
    const uint64_t at = own_head_ & (capacity_ - 1);
    uint32_t header[2];
    std::memcpy(header, memory_ + kHeaderBytes + at, sizeof header);
    const uint64_t total = RoundUp(kRecordHeaderBytes + uint64_t{header[1]}, 8);
    if (total > available || total > capacity_ - at) {
      return Error(StatusCode::kProtocol,
                   "ring: record of %u bytes does not fit in what was announced", header[1]);
    }
    if (header[0] != kPad) {
      record->type = header[0];
      const std::byte* payload = memory_ + kHeaderBytes + at + kRecordHeaderBytes;
      record->payload.assign(payload, payload + header[1]);
    }
    own_head_ += total;
    head().store(own_head_, std::memory_order_release);
    if (header[0] != kPad) return true;
  }
}

bool RecordRing::PrepareSleep() {
  sleeping().store(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (tail().load(std::memory_order_acquire) != own_head_) {
    EndSleep();
    return false;
  }
  return true;
}

void RecordRing::EndSleep() { sleeping().store(0, std::memory_order_relaxed); }

}  // namespace slice
