#include "daemon/executor/report_sink.h"

namespace slice::executor {

ReportSink::ReportSink(Mapping ring_memory, size_t capacity_bytes, Fd engine_event)
    : memory_(std::move(ring_memory)),
      ring_(memory_.data(), capacity_bytes),
      engine_event_(std::move(engine_event)) {}

void ReportSink::PushBytes(uint32_t type, std::span<const std::byte> payload, bool wake) {
  const std::lock_guard lock(mutex_);
  if (FlushLocked() || !ring_.Push(type, payload)) {
    waiting_.emplace_back(type, std::vector<std::byte>(payload.begin(), payload.end()));
  }
  if (wake && ring_.ConsumerSleeps()) SignalEventFd(engine_event_);
}

bool ReportSink::TryPushBytes(uint32_t type, std::span<const std::byte> payload, bool wake) {
  const std::lock_guard lock(mutex_);
  if (FlushLocked() || !ring_.Push(type, payload)) return false;
  if (wake && ring_.ConsumerSleeps()) SignalEventFd(engine_event_);
  return true;
}

bool ReportSink::Flush() {
  const std::lock_guard lock(mutex_);
  const bool some = !waiting_.empty();
  const bool still = FlushLocked();
  if (some && ring_.ConsumerSleeps()) SignalEventFd(engine_event_);
  return still;
}

bool ReportSink::FlushLocked() {
  while (!waiting_.empty() && ring_.Push(waiting_.front().first, waiting_.front().second))
    waiting_.pop_front();
  return !waiting_.empty();
}

}  // namespace slice::executor
