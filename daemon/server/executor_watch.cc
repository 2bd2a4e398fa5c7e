#include "daemon/server/executor_watch.h"

#include <algorithm>

namespace slice::server {

void ExecutorWatch::Reset() {
  std::fill(running_since_.begin(), running_since_.end(), 0);
  heard_ = silent_ = false;
  taken_ = stuck_ = 0;
  waiting_since_ = 0;
}

void ExecutorWatch::Started(uint32_t device, TimeNs now) {
  if (device < running_since_.size()) running_since_[device] = now;
}

void ExecutorWatch::Finished(uint32_t device) {
  if (device < running_since_.size()) running_since_[device] = 0;
}

void ExecutorWatch::Failed() { std::fill(running_since_.begin(), running_since_.end(), 0); }

void ExecutorWatch::Look(uint64_t taken, uint64_t pushed, uint64_t overrun_devices, TimeNs now) {
  const bool sign_of_life = heard_ || taken != taken_;
  heard_ = false;
  taken_ = taken;
  // A thread that runs an op takes no commands until the op ends, and may be the only one awake.
  bool busy = false;
  stuck_ = 0;
  for (size_t device = 0; device < running_since_.size(); ++device) {
    if (running_since_[device] == 0) continue;
    if ((overrun_devices >> device & 1) == 0) {
      busy = true;
    } else if (now - running_since_[device] >= limits_.silence) {
      stuck_ |= uint64_t{1} << device;
    }
  }
  if (busy || taken == pushed) {
    waiting_since_ = 0;
  } else if (waiting_since_ == 0 || sign_of_life) {
    waiting_since_ = now;
  }
  silent_ = waiting_since_ != 0 && now - waiting_since_ >= limits_.silence;
}

bool ExecutorWatch::busy() const {
  return std::any_of(running_since_.begin(), running_since_.end(),
                     [](TimeNs since) { return since != 0; });
}

std::optional<std::string> ExecutorWatch::Hang(TimeNs now) const {
  if (limits_.hang <= 0) return std::nullopt;
  const std::string limit = std::to_string(limits_.hang / kMillisecond);
  for (size_t device = 0; device < running_since_.size(); ++device) {
    if (running_since_[device] == 0 || now - running_since_[device] < limits_.hang) continue;
    return "device " + std::to_string(device) + ": an op has been running for " +
           std::to_string((now - running_since_[device]) / kMillisecond) + " ms, the limit is " +
           limit;
  }
  if (waiting_since_ != 0 && now - waiting_since_ >= limits_.hang) {
    return "no command was taken for " + std::to_string((now - waiting_since_) / kMillisecond) +
           " ms, the limit is " + limit;
  }
  return std::nullopt;
}

TimeNs ExecutorWatch::NextLook(TimeNs now) const {
  TimeNs next = kNever;
  const auto at = [&next, now](TimeNs since, DurationNs limit) {
    // What is past was seen by the last Look; a limit that is not set never comes.
    if (since != 0 && limit > 0 && since + limit > now) next = std::min(next, since + limit);
  };
  at(waiting_since_, limits_.silence);
  at(waiting_since_, limits_.hang);
  for (const TimeNs since : running_since_) {
    at(since, limits_.hang);
    // An op past its prediction is noticed by looking, now and then.
    if (since != 0) next = std::min(next, std::max(since, now) + limits_.silence);
  }
  return next;
}

}  // namespace slice::server
