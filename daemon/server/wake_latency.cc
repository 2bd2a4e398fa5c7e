#include "daemon/server/wake_latency.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/log.h"

namespace slice::server {

void WakeLatency::Update(TimeNs now) {
  const bool wanted = latency_us_ >= 0 && now < last_request_ + kHold;
  if (wanted == held()) return;
  if (!wanted) {
    device_.Close();
    return;
  }
  device_ = Fd(::open(path_.c_str(), O_WRONLY | O_CLOEXEC));
  if (device_.valid() &&
      ::write(device_.get(), &latency_us_, sizeof latency_us_) == sizeof latency_us_)
    return;
  SLICE_LOG_WARN("server",
                 "cannot keep CPUs awake for online requests: %s: %s; they start some 50 us later "
                 "(cpu_wake_latency_us = -1 in [daemon] says that this is meant)",
                 path_.c_str(), std::strerror(errno));
  device_.Close();
  latency_us_ = -1;
}

}  // namespace slice::server
