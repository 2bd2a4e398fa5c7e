// Single-producer single-consumer ring of variable-length records in shared memory, for sliced <->
// slice-executor.
//
//   0    head  u64  bytes consumed for ever   (consumer writes, release)
//   64   tail  u64  bytes produced for ever   (producer writes, release)
//   128  sleeping u32                         (consumer writes)
//   4096 data, capacity bytes (power of two)
//
// A record is {u32 type, u32 payload bytes} + payload, padded to 8; it never wraps: a record of
// type kPad fills the end. The consumer copies a record out before it looks at it and checks every
// length against its private head: the other side may be a crashed or hostile process. Not
// thread-safe: each end belongs to one thread (or one mutex).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/fd.h"
#include "common/status.h"

namespace slice {

class RecordRing {
 public:
  static constexpr size_t kHeaderBytes = 4096;
  static constexpr uint32_t kPad = 0xffffffff;
  static size_t MemoryBytes(size_t capacity_bytes) { return kHeaderBytes + capacity_bytes; }

  // `memory` is MemoryBytes(capacity) long and outlives the ring. Zeroed memory is an empty ring.
  RecordRing(std::byte* memory, size_t capacity_bytes);

  // Producer. False when there is no room; nothing is written then. Payload of at most capacity/4
  // bytes.
  [[nodiscard]] bool Push(uint32_t type, std::span<const std::byte> payload);
  template <typename T>
  [[nodiscard]] bool PushStruct(uint32_t type, const T& value) {
    return Push(type, std::as_bytes(std::span(&value, 1)));
  }
  // Producer, after pushing: true when the consumer sleeps and must be woken (seq_cst fence
  // inside).
  [[nodiscard]] bool ConsumerSleeps() const;
  // Producer, before pushing: as ConsumerSleeps; from true on the consumer counts as awake, so the
  // caller must wake it.
  [[nodiscard]] bool ClaimSleep();
  // Producer: bytes pushed for ever, and those of them that the consumer says it has taken (it may
  // say anything).
  uint64_t pushed() const { return own_tail_; }
  uint64_t taken() const { return head().load(std::memory_order_acquire); }

  // Consumer. kOk + false = empty. kProtocol: the producer broke the format; give the ring up.
  struct Record {
    uint32_t type = 0;
    std::vector<std::byte> payload;  // reused between calls
  };
  Result<bool> Pop(Record* record);
  // Consumer: announce sleep; returns false (and withdraws) if something arrived meanwhile.
  [[nodiscard]] bool PrepareSleep();
  void EndSleep();

 private:
  std::atomic_ref<uint64_t> head() const;
  std::atomic_ref<uint64_t> tail() const;
  std::atomic_ref<uint32_t> sleeping() const;

  std::byte* memory_;
  uint64_t capacity_;
  uint64_t own_head_ = 0;  // consumer's private copy
  uint64_t own_tail_ = 0;  // producer's private copy
};

}  // namespace slice
