// One-line log records: "2026-01-31T12:00:00.123456 W server: text". Thread-safe; to stderr or a
// file.
#pragma once

#include <string>

#include "common/status.h"

namespace slice {
enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };

// Call once, before threads. Empty path = stderr. Errors: file cannot be opened for appending.
Status OpenLog(const std::string& path, LogLevel level_min);
[[gnu::format(printf, 3, 4)]] void Log(LogLevel level, const char* area, const char* format, ...);
#define SLICE_LOG_INFO(area, ...) ::slice::Log(::slice::LogLevel::kInfo, area, __VA_ARGS__)
#define SLICE_LOG_WARN(area, ...) ::slice::Log(::slice::LogLevel::kWarning, area, __VA_ARGS__)
#define SLICE_LOG_ERROR(area, ...) ::slice::Log(::slice::LogLevel::kError, area, __VA_ARGS__)

// At most `per_second` lines a second from this place; the next one says how many were dropped. For
// tenant faults.
class RateLimitedLog {
 public:
  RateLimitedLog(const char* area, int per_second) : area_(area), per_second_(per_second) {}
  void Warn(const std::string& text);

 private:
  const char* area_;
  int per_second_;
  int64_t window_ = 0;
  int in_window_ = 0;
  int dropped_ = 0;
};
}  // namespace slice
