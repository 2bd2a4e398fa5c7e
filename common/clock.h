// The one place that reads the clock. CLOCK_MONOTONIC is the same in every process of a host.
#pragma once

#include <time.h>

#include "common/units.h"

namespace slice {
inline TimeNs MonotonicNow() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<TimeNs>(t.tv_sec) * kSecond + t.tv_nsec;
}
// CPU time of the calling thread.
inline DurationNs ThreadCpuNow() {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<DurationNs>(t.tv_sec) * kSecond + t.tv_nsec;
}
}  // namespace slice
