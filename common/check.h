// SLICE_CHECK: our own invariants, always on. Never for tenant data: a tenant fault is a Status.
#pragma once

namespace slice {
[[noreturn]] void CheckFailed(const char* condition, const char* text, const char* file, int line);
}  // namespace slice

#define SLICE_CHECK(condition, text)                              \
  do {                                                            \
    if (!(condition)) [[unlikely]]                                \
      ::slice::CheckFailed(#condition, text, __FILE__, __LINE__); \
  } while (false)
