// Allocator over the session's arena: offsets only, it never touches the memory. Best fit with
// coalescing; everything is a multiple of 64 bytes. Thread-safe. Must not depend on: sessions,
// sockets.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include "common/status.h"

namespace slice::client {

class Arena {
 public:
  static constexpr uint64_t kAlignment = 64;  // a cache line: two slots never share one

  // `bytes` is rounded down to the alignment.
  explicit Arena(uint64_t bytes);

  // Offset of a range of at least `bytes` (0 counts as one unit, so that empty tensors have a
  // place). Errors: kNoMemory (text: wanted, free, largest free range).
  Result<uint64_t> Allocate(uint64_t bytes);
  // Errors: kInvalid when `offset` is not the start of a live range (freed twice, or never
  // allocated).
  Status Free(uint64_t offset);

  uint64_t bytes() const { return bytes_; }
  uint64_t free_bytes() const;

 private:
  void InsertFree(uint64_t offset, uint64_t bytes);                  // under mutex_
  void EraseFree(std::map<uint64_t, uint64_t>::iterator by_offset);  // under mutex_

  const uint64_t bytes_;
  mutable std::mutex mutex_;
  uint64_t free_bytes_ = 0;
  std::map<uint64_t, uint64_t> free_by_offset_;  // offset -> bytes; neighbours never touch
  std::set<std::pair<uint64_t, uint64_t>> free_by_bytes_;  // the same ranges as (bytes, offset)
  std::unordered_map<uint64_t, uint64_t> live_;            // offset -> bytes
};

}  // namespace slice::client
