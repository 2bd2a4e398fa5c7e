#include "common/log.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <ctime>

#include "common/clock.h"

namespace slice {
namespace {
int log_fd = STDERR_FILENO;
LogLevel log_level_min = LogLevel::kInfo;
}  // namespace

Status OpenLog(const std::string& path, LogLevel level_min) {
  log_level_min = level_min;
  if (path.empty()) return Status::Ok();
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
  if (fd < 0)
    return ErrnoError(StatusCode::kInvalid, errno, "cannot open log file '%s'", path.c_str());
  log_fd = fd;
  return Status::Ok();
}

void Log(LogLevel level, const char* area, const char* format, ...) {
  if (level < log_level_min) return;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  ::gmtime_r(&now.tv_sec, &parts);
  char line[2048];
  const size_t stamp = std::strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &parts);
  int used = static_cast<int>(stamp);
  used += std::snprintf(line + used, sizeof line - stamp, ".%06ld %c %s: ", now.tv_nsec / 1000,
                        "DIWE"[static_cast<int>(level)], area);
  va_list args;
  va_start(args, format);
  const int body =
      std::vsnprintf(line + used, sizeof line - static_cast<size_t>(used) - 1, format, args);
  va_end(args);
  used = body < 0 ? used : std::min(used + body, static_cast<int>(sizeof line) - 2);
  line[used++] = '\n';
  // One write per line: lines of several threads and processes do not mix.
  [[maybe_unused]] const ssize_t written = ::write(log_fd, line, static_cast<size_t>(used));
}

void RateLimitedLog::Warn(const std::string& text) {
  const int64_t second = MonotonicNow() / kSecond;
  if (second != window_) {
    if (dropped_ > 0) Log(LogLevel::kWarning, area_, "%d similar lines dropped", dropped_);
    window_ = second;
    in_window_ = dropped_ = 0;
  }
  if (in_window_++ < per_second_) {
    Log(LogLevel::kWarning, area_, "%s", text.c_str());
  } else {
    ++dropped_;
  }
}
}  // namespace slice
