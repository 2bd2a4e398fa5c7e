// The executor's end of the report ring. Never blocks: what does not fit waits in private memory
// and goes first. Threads: any.
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "common/fd.h"
#include "common/wire/record_ring.h"

namespace slice::executor {

class ReportSink {
 public:
  // `engine_event` is signalled when the engine sleeps.
  ReportSink(Mapping ring_memory, size_t capacity_bytes, Fd engine_event);

  // wake = false: the engine may learn of it with the next report.
  template <typename T>
  void Push(uint32_t type, const T& report, bool wake = true) {
    PushBytes(type, std::as_bytes(std::span(&report, 1)), wake);
  }
  // Writes it into the ring now, or not at all (false): for reports that promise something.
  template <typename T>
  [[nodiscard]] bool TryPush(uint32_t type, const T& report, bool wake = true) {
    return TryPushBytes(type, std::as_bytes(std::span(&report, 1)), wake);
  }
  // Tries to write what is waiting. Returns whether something still waits: call again soon.
  bool Flush();

 private:
  void PushBytes(uint32_t type, std::span<const std::byte> payload, bool wake);
  bool TryPushBytes(uint32_t type, std::span<const std::byte> payload, bool wake);
  bool FlushLocked();

  std::mutex mutex_;
  Mapping memory_;
  RecordRing ring_;
  Fd engine_event_;
  std::deque<std::pair<uint32_t, std::vector<std::byte>>> waiting_;
};

}  // namespace slice::executor
