#include "common/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace slice {
namespace {

std::string Format(const char* format, va_list args) {
  va_list copy;
  va_copy(copy, args);
  const int size = std::vsnprintf(nullptr, 0, format, copy);
  va_end(copy);
  std::string text(size > 0 ? static_cast<size_t>(size) : 0, '\0');
  if (size > 0) std::vsnprintf(text.data(), text.size() + 1, format, args);
  return text;
}

}  // namespace

std::string_view StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "OK";
    case StatusCode::kInvalid:
      return "INVALID";
    case StatusCode::kGraph:
      return "GRAPH";
    case StatusCode::kOpNotAllowed:
      return "OP_NOT_ALLOWED";
    case StatusCode::kOverflow:
      return "OVERFLOW";
    case StatusCode::kBounds:
      return "BOUNDS";
    case StatusCode::kStale:
      return "STALE";
    case StatusCode::kQuota:
      return "QUOTA";
    case StatusCode::kNeverFits:
      return "NEVER_FITS";
    case StatusCode::kWouldBlock:
      return "WOULD_BLOCK";
    case StatusCode::kDeadline:
      return "DEADLINE";
    case StatusCode::kCancelled:
      return "CANCELLED";
    case StatusCode::kOpFailed:
      return "OP_FAILED";
    case StatusCode::kExecutorLost:
      return "EXECUTOR_LOST";
    case StatusCode::kStateLost:
      return "STATE_LOST";
    case StatusCode::kDaemonLost:
      return "DAEMON_LOST";
    case StatusCode::kVersion:
      return "VERSION";
    case StatusCode::kProtocol:
      return "PROTOCOL";
    case StatusCode::kNoMemory:
      return "NO_MEMORY";
    case StatusCode::kInternal:
      return "INTERNAL";
    case StatusCode::kTimeout:
      return "TIMEOUT";
  }
  return "UNKNOWN";
}

std::string Status::ToString() const {
  std::string out(StatusCodeName(code_));
  if (!text_.empty()) out.append(": ").append(text_);
  return out;
}

Status Error(StatusCode code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string text = Format(format, args);
  va_end(args);
  return Status(code, std::move(text));
}

Status ErrnoError(StatusCode code, int errno_value, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string text = Format(format, args);
  va_end(args);
  text.append(": ").append(std::strerror(errno_value));
  return Status(code, std::move(text));
}

void CheckFailed(const char* condition, const char* text, const char* file, int line) {
  std::fprintf(stderr, "slice: CHECK failed at %s:%d: %s (%s)\n", file, line, condition, text);
  std::abort();
}

}  // namespace slice
