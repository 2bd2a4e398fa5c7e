// Keeps the CPUs awake while online requests come. A request goes through two sleeping threads (the
// engine's and a device's), and a CPU that has gone idle takes tens of microseconds to be back:
// most of the way from a submit to its start. The kernel's PM QoS interface bounds that for whoever
// holds /dev/cpu_dma_latency open (Documentation/power/pm_qos_interface.rst); it lets go when the
// process ends, however it ends. Idle CPUs use more power meanwhile, so it is held only from an
// online request until `kHold` without another.
//
// Engine thread only. Never fails: without the device (a container) it says so once and does
// nothing.
#pragma once

#include <cstdint>
#include <string>

#include "common/fd.h"
#include "common/units.h"

namespace slice::server {

class WakeLatency {
 public:
  static constexpr DurationNs kHold = kSecond;

  // `latency_us`: what idle CPUs may take to wake; below 0: the kernel decides, nothing is held.
  explicit WakeLatency(int32_t latency_us, std::string path = "/dev/cpu_dma_latency")
      : latency_us_(latency_us), path_(std::move(path)) {}

  void OnlineRequest(TimeNs now) { last_request_ = now; }
  // After a turn: holds or lets go. Two system calls at a change, none otherwise.
  void Update(TimeNs now);
  // When to call Update again if nothing happens.
  TimeNs NextLook() const { return held() ? last_request_ + kHold : kNever; }
  bool held() const { return device_.valid(); }

 private:
  int32_t latency_us_;
  std::string path_;
  Fd device_;
  TimeNs last_request_ = -kHold;
};

}  // namespace slice::server
