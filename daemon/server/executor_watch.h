// Whether the executor does what it is told, judged from what the engine thread sees: commands that
// nobody takes, ops that run, reports that come. PURE: time comes with each call.
//
// The executor is silent when commands wait in its ring, nothing has come from it for a while, and
// no device is busy with an op that may still take its time. A device is stuck when its op has run
// for a while and far longer than predicted. Both are shown and logged; only past the hang limit is
// the executor given up.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/units.h"

namespace slice::server {

class ExecutorWatch {
 public:
  struct Limits {
    DurationNs silence = 2 * kSecond;
    DurationNs hang = 0;  // 0 = never
  };
  ExecutorWatch(size_t device_count, Limits limits)
      : limits_(limits), running_since_(device_count) {}

  // Another executor, or none: nothing is overdue.
  void Reset();
  // Reports. Devices that do not exist are ignored.
  void Started(uint32_t device, TimeNs now);
  void Finished(uint32_t device);
  void Failed();  // does not say its device; the next Started of each one corrects this
  void Reported() { heard_ = true; }  // any report, these too

  // Some device runs an op, as far as reports have said.
  bool busy() const;

  // After each turn. `taken` and `pushed`: bytes of the command ring. Bit d of `overrun_devices`:
  // the engine has given up its prediction for the op on device d.
  void Look(uint64_t taken, uint64_t pushed, uint64_t overrun_devices, TimeNs now);

  // Since when it is silent; 0 when it is not. As of the last Look.
  TimeNs silent_since() const { return silent_ ? waiting_since_ : 0; }
  // Since when its op runs, if the device is stuck; else 0. As of the last Look.
  TimeNs stuck_since(size_t device) const {
    return (stuck_ >> device & 1) != 0 ? running_since_[device] : 0;
  }
  // Why it must be given up now, if it must.
  std::optional<std::string> Hang(TimeNs now) const;
  // When Look must be called again without an event; kNever if not.
  TimeNs NextLook(TimeNs now) const;

 private:
  const Limits limits_;
  std::vector<TimeNs> running_since_;  // by device; 0 = idle
  bool heard_ = false;                 // since the last Look
  uint64_t taken_ = 0;
  TimeNs waiting_since_ = 0;  // the last sign of life, while commands wait for nobody; 0 = none do
  bool silent_ = false;
  uint64_t stuck_ = 0;
};

}  // namespace slice::server
