#include "libclient/arena.h"

#include <iterator>

#include "common/checked.h"

namespace slice::client {

Arena::Arena(uint64_t bytes) : bytes_(bytes / kAlignment * kAlignment) {
  if (bytes_ > 0) InsertFree(0, bytes_);
}

void Arena::InsertFree(uint64_t offset, uint64_t bytes) {
  free_by_offset_.emplace(offset, bytes);
  free_by_bytes_.emplace(bytes, offset);
  free_bytes_ += bytes;
}

void Arena::EraseFree(std::map<uint64_t, uint64_t>::iterator by_offset) {
  free_bytes_ -= by_offset->second;
  free_by_bytes_.erase({by_offset->second, by_offset->first});
  free_by_offset_.erase(by_offset);
}

uint64_t Arena::free_bytes() const {
  std::lock_guard lock(mutex_);
  return free_bytes_;
}

Result<uint64_t> Arena::Allocate(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  const uint64_t largest = free_by_bytes_.empty() ? 0 : free_by_bytes_.rbegin()->first;
  if (bytes > largest) {  // before rounding up, which could overflow
    return Error(StatusCode::kNoMemory,
                 "arena: %llu bytes wanted, %llu of %llu bytes are free, the largest free range "
                 "has %llu: free slots, or "
                 "open the session with a larger arena_bytes",
                 static_cast<unsigned long long>(bytes),
                 static_cast<unsigned long long>(free_bytes_),
                 static_cast<unsigned long long>(bytes_), static_cast<unsigned long long>(largest));
  }
  const uint64_t rounded = bytes == 0 ? kAlignment : RoundUp(bytes, kAlignment);
  const auto best = free_by_bytes_.lower_bound({rounded, 0});
  if (best == free_by_bytes_.end()) {
    return Error(StatusCode::kNoMemory,
                 "arena: all %llu bytes are in use: free slots, or open the session with a larger "
                 "arena_bytes",
                 static_cast<unsigned long long>(bytes_));
  }
  const auto [range_bytes, offset] = *best;
  live_.emplace(offset, rounded);
  EraseFree(free_by_offset_.find(offset));
  if (range_bytes > rounded) InsertFree(offset + rounded, range_bytes - rounded);
  return offset;
}

Status Arena::Free(uint64_t offset) {
  std::lock_guard lock(mutex_);
  const auto live = live_.find(offset);
  if (live == live_.end()) {
    return Error(StatusCode::kInvalid,
                 "arena: offset %llu is not the start of a live slot (of %zu): freed twice, or not "
                 "from slice_arena_alloc",
                 static_cast<unsigned long long>(offset), live_.size());
  }
  uint64_t begin = offset;
  uint64_t bytes = live->second;
  live_.erase(live);
  auto next = free_by_offset_.lower_bound(begin);
  if (next != free_by_offset_.end() && next->first == begin + bytes) {
    bytes += next->second;
    EraseFree(next++);
  }
  if (next != free_by_offset_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      bytes += previous->second;
      EraseFree(previous);
    }
  }
  InsertFree(begin, bytes);
  return Status::Ok();
}

}  // namespace slice::client
