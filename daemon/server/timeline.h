// Recorder of what ran when, for `slicectl timeline` and the paper's figures: collects the engine's
// TraceEvents while it is on and writes them as Chrome trace JSON (opens in Perfetto and
// chrome://tracing).
//
// Tracks: one thread per device in process 1 "devices", one per link in process 2 "links", one for
// decisions without a device in process 3 "scheduler", requests as asynchronous events in process 4
// "requests". Every op carries tenant, class, sequence, instance, op, predicted start and end.
//
// Owner: the engine loop. Threads: the engine thread records, starts and stops; a finished
// Recording belongs to whoever took it. Memory is bounded: past the limit events are counted and
// dropped.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/status.h"
#include "common/units.h"
#include "daemon/engine/engine.h"

namespace slice::server {

// A finished recording, independent of the engine.
struct Recording {
  struct Event {
    engine::TraceEvent event;  // event.name is not used: it may be gone
    std::string name;
  };
  std::deque<Event> events;  // grows without moving what is there: the engine thread records
  std::vector<std::string> device_names, domain_names;
  std::unordered_map<uint32_t, std::string> tenant_names;
  TimeNs start = 0, stop = 0;
  uint64_t dropped = 0;

  // Chrome trace JSON, handed out piece by piece (it may have hundreds of megabytes). Times are
  // microseconds since the recording's start. Errors: those of `write`.
  Status WriteJson(const std::function<Status(std::string_view)>& write) const;
  std::string ToJson() const;
};

class Timeline {
 public:
  Timeline(std::vector<std::string> device_names, std::vector<std::string> domain_names,
           size_t events_max)
      : device_names_(std::move(device_names)),
        domain_names_(std::move(domain_names)),
        events_max_(events_max) {}

  bool on() const { return on_; }
  // A running recording starts again.
  void Start(TimeNs now);
  void NameTenant(TenantId tenant, const std::string& name) { tenant_names_[tenant.value] = name; }
  void ForgetTenant(TenantId tenant) {
    if (!on_) tenant_names_.erase(tenant.value);
  }
  void Add(const engine::TraceEvent& event);
  void Mark(const std::string& label, TimeNs now);
  // Errors: INVALID when it is off.
  Result<Recording> Stop(TimeNs now);

 private:
  std::vector<std::string> device_names_, domain_names_;
  std::unordered_map<uint32_t, std::string> tenant_names_;
  size_t events_max_;
  bool on_ = false;
  Recording recording_;
};

}  // namespace slice::server
