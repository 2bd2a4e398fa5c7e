// Status and Result<T>: how every part of SliceScheduler reports failure. No exceptions cross a
// function of ours.
//
// Codes are those of the C ABI (include/slice/slice.h), so that an error keeps its identity from
// the engine to the tenant. The text says what, where, both numbers, and what to do; it never
// carries another tenant's data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "common/check.h"
#include "slice/slice.h"

namespace slice {

enum class StatusCode : int32_t {
  kOk = SLICE_OK,
  kInvalid = SLICE_ERR_INVALID,
  kGraph = SLICE_ERR_GRAPH,
  kOpNotAllowed = SLICE_ERR_OP_NOT_ALLOWED,
  kOverflow = SLICE_ERR_OVERFLOW,
  kBounds = SLICE_ERR_BOUNDS,
  kStale = SLICE_ERR_STALE,
  kQuota = SLICE_ERR_QUOTA,
  kNeverFits = SLICE_ERR_NEVER_FITS,
  kWouldBlock = SLICE_ERR_WOULD_BLOCK,
  kDeadline = SLICE_ERR_DEADLINE,
  kCancelled = SLICE_ERR_CANCELLED,
  kOpFailed = SLICE_ERR_OP_FAILED,
  kExecutorLost = SLICE_ERR_EXECUTOR_LOST,
  kStateLost = SLICE_ERR_STATE_LOST,
  kDaemonLost = SLICE_ERR_DAEMON_LOST,
  kVersion = SLICE_ERR_VERSION,
  kProtocol = SLICE_ERR_PROTOCOL,
  kNoMemory = SLICE_ERR_NO_MEMORY,
  kInternal = SLICE_ERR_INTERNAL,
  kTimeout = SLICE_ERR_TIMEOUT,
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string text) : code_(code), text_(std::move(text)) {}
  static Status Ok() { return {}; }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& text() const { return text_; }
  // "OVERFLOW: input 3 'x': 9223372036854775807 * 8 bytes does not fit in 63 bits"
  std::string ToString() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string text_;
};

// "BOUNDS" for kBounds; the same names as slice_status_name().
std::string_view StatusCodeName(StatusCode code);

// printf-style: Error(StatusCode::kBounds, "input %u: offset %llu", ...)
[[gnu::format(printf, 2, 3)]] Status Error(StatusCode code, const char* format, ...);
// Same, appended with ": " and strerror(errno_value).
[[gnu::format(printf, 3, 4)]] Status ErrnoError(StatusCode code, int errno_value,
                                                const char* format, ...);

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    SLICE_CHECK(!status_.ok(), "a Result made of an OK status has no value");
  }
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & {
    SLICE_CHECK(ok(), status_.ToString().c_str());
    return *value_;
  }
  const T& value() const& {
    SLICE_CHECK(ok(), status_.ToString().c_str());
    return *value_;
  }
  T&& value() && {
    SLICE_CHECK(ok(), status_.ToString().c_str());
    return std::move(*value_);
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  Status status_;
  std::optional<T> value_;
};

#define SLICE_CONCAT_INNER(a, b) a##b
#define SLICE_CONCAT(a, b) SLICE_CONCAT_INNER(a, b)
#define SLICE_RETURN_IF_ERROR(expression)          \
  do {                                             \
    ::slice::Status slice_status_ = (expression);  \
    if (!slice_status_.ok()) return slice_status_; \
  } while (false)
#define SLICE_ASSIGN_OR_RETURN(declaration, expression) \
  SLICE_ASSIGN_OR_RETURN_INNER(SLICE_CONCAT(slice_result_, __LINE__), declaration, expression)
#define SLICE_ASSIGN_OR_RETURN_INNER(result, declaration, expression) \
  auto result = (expression);                                         \
  if (!result.ok()) return result.status();                           \
  declaration = std::move(result).value()

}  // namespace slice
