#include "daemon/server/timeline.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

namespace slice::server {
namespace {

using engine::TraceEvent;
using nlohmann::json;

constexpr int kDevicesProcess = 1;
constexpr int kLinksProcess = 2;
constexpr int kSchedulerProcess = 3;
constexpr int kRequestsProcess = 4;

const char* KindName(TraceEvent::Kind kind) {
  switch (kind) {
    case TraceEvent::Kind::kOp:
      return "op";
    case TraceEvent::Kind::kTransfer:
      return "transfer";
    case TraceEvent::Kind::kDefer:
      return "defer";
    case TraceEvent::Kind::kRecall:
      return "recall";
    case TraceEvent::Kind::kPolicy:
      return "policy";
    case TraceEvent::Kind::kMark:
      return "mark";
    case TraceEvent::Kind::kSubmit:
      return "submit";
    case TraceEvent::Kind::kComplete:
      return "complete";
    case TraceEvent::Kind::kCommand:
      return "command";
  }
  return "event";
}

const char* ClassName(ServiceClass service_class) {
  return service_class == ServiceClass::kOnline ? "online" : "offline";
}

double Microseconds(DurationNs time) { return static_cast<double>(time) / 1000.0; }

json NameRecord(const char* what, int process, uint32_t thread, const std::string& name) {
  return {
      {"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", {{"name", name}}}};
}

}  // namespace

void Timeline::Start(TimeNs now) {
  recording_ = Recording{};
  recording_.start = now;
  on_ = true;
}

void Timeline::Add(const TraceEvent& event) {
  if (!on_) return;
  if (recording_.events.size() >= events_max_) {
    ++recording_.dropped;
    return;
  }
  Recording::Event& copy = recording_.events.emplace_back();
  copy.event = event;
  copy.event.name = nullptr;
  if (event.name != nullptr) copy.name = event.name;
}

void Timeline::Mark(const std::string& label, TimeNs now) {
  TraceEvent event;
  event.kind = TraceEvent::Kind::kMark;
  event.start = event.finish = now;
  event.text = label;
  Add(event);
}

Result<Recording> Timeline::Stop(TimeNs now) {
  if (!on_)
    return Error(StatusCode::kInvalid,
                 "no timeline is being recorded: start one with `slicectl timeline start`");
  on_ = false;
  recording_.stop = now;
  recording_.device_names = device_names_;
  recording_.domain_names = domain_names_;
  recording_.tenant_names = tenant_names_;
  return std::exchange(recording_, Recording{});
}

namespace {

// One JSON array, written in pieces of about a megabyte.
class EventWriter {
 public:
  explicit EventWriter(const std::function<Status(std::string_view)>& write) : write_(write) {}
  void Raw(std::string_view text) {
    buffer_ += text;
    if (buffer_.size() >= kPieceBytes) Flush();
  }
  void Add(const json& event) {
    if (!std::exchange(is_first_, false)) buffer_ += ",\n";
    // Tenants choose names: what is not UTF-8 is replaced.
    Raw(event.dump(-1, ' ', false, json::error_handler_t::replace));
  }
  Status Finish() {
    Flush();
    return status_;
  }

 private:
  static constexpr size_t kPieceBytes = 1 << 20;
  void Flush() {
    if (status_.ok()) status_ = write_(buffer_);
    buffer_.clear();
  }
  const std::function<Status(std::string_view)>& write_;
  std::string buffer_;
  Status status_;
  bool is_first_ = true;
};

json ArgsOf(const Recording& recording, const Recording::Event& item) {
  const TraceEvent& event = item.event;
  json args = {{"kind", KindName(event.kind)}};
  if (event.tenant) {
    const auto name = recording.tenant_names.find(event.tenant.value);
    args["tenant"] = name == recording.tenant_names.end()
                         ? "tenant " + std::to_string(event.tenant.value)
                         : name->second;
    args["tenant_id"] = event.tenant.value;
    args["class"] = ClassName(event.service_class);
  }
  if (event.sequence) args["sequence"] = event.sequence.value;
  if (event.instance) {
    args["instance"] = event.instance.value;
    args["op"] = event.op;
  }
  if (event.predicted_start != 0)
    args["predicted_start_us"] = Microseconds(event.predicted_start - recording.start);
  if (event.predicted_finish != 0)
    args["predicted_end_us"] = Microseconds(event.predicted_finish - recording.start);
  if (event.cpu != 0) args["cpu_us"] = Microseconds(event.cpu);
  if (event.bytes != 0) args["bytes"] = event.bytes;
  if (!event.text.empty()) args["text"] = event.text;
  return args;
}

std::string NameOf(const Recording::Event& item) {
  if (item.event.kind == TraceEvent::Kind::kOp && !item.name.empty()) return item.name;
  std::string name = KindName(item.event.kind);
  if (!item.name.empty()) name += " " + item.name;
  if (!item.event.text.empty()) name += ": " + item.event.text;
  return name;
}

}  // namespace

Status Recording::WriteJson(const std::function<Status(std::string_view)>& write) const {
  EventWriter out(write);
  out.Raw("{\"traceEvents\":[\n");
  out.Add(NameRecord("process_name", kDevicesProcess, 0, "devices"));
  out.Add(NameRecord("process_name", kLinksProcess, 0, "links"));
  out.Add(NameRecord("process_name", kSchedulerProcess, 0, "scheduler"));
  out.Add(NameRecord("process_name", kRequestsProcess, 0, "requests"));
  out.Add(NameRecord("thread_name", kSchedulerProcess, 0, "decisions"));
  for (uint32_t d = 0; d < device_names.size(); ++d) {
    out.Add(NameRecord("thread_name", kDevicesProcess, d, device_names[d]));
  }
  const auto domain = [this](DomainIndex index) {
    return index < domain_names.size() ? domain_names[index] : std::string("host");
  };
  std::map<std::pair<DomainIndex, DomainIndex>, uint32_t> links;
  for (const Event& item : events) {
    const TraceEvent& event = item.event;
    json args = ArgsOf(*this, item);
    const bool is_span = event.finish > event.start;
    json record = {{"cat", event.tenant ? ClassName(event.service_class) : "daemon"},
                   {"name", NameOf(item)},
                   {"ph", is_span ? "X" : "i"},
                   {"ts", Microseconds(event.start - start)},
                   {"pid", kSchedulerProcess},
                   {"tid", 0}};
    if (is_span) {
      record["dur"] = Microseconds(event.finish - event.start);
    } else {
      // Scope: marks and policy switches cross all tracks, the rest belongs to its own.
      const bool is_global =
          event.kind == TraceEvent::Kind::kMark || event.kind == TraceEvent::Kind::kPolicy;
      record["s"] = is_global ? "g" : "t";
    }
    if (event.kind == TraceEvent::Kind::kTransfer) {
      const auto key = std::pair(event.source, event.destination);
      const auto [link, is_new] = links.try_emplace(key, static_cast<uint32_t>(links.size()));
      if (is_new) {
        out.Add(NameRecord("thread_name", kLinksProcess, link->second,
                           domain(key.first) + " -> " + domain(key.second)));
      }
      record["pid"] = kLinksProcess;
      record["tid"] = link->second;
      args["source"] = domain(event.source);
      args["destination"] = domain(event.destination);
    } else if (event.device < device_names.size()) {
      record["pid"] = kDevicesProcess;
      record["tid"] = event.device;
    }
    record["args"] = std::move(args);
    if (event.kind == TraceEvent::Kind::kComplete && is_span) {
      // Requests overlap: asynchronous pairs instead of slices on one track.
      record.erase("dur");
      record["pid"] = kRequestsProcess;
      record["tid"] = event.tenant.value;
      record["id"] = event.instance.value;
      record["ph"] = "b";
      out.Add(record);
      record["ph"] = "e";
      record["ts"] = Microseconds(event.finish - start);
    }
    out.Add(record);
  }
  const json about = {{"start_ns", start},
                      {"stop_ns", stop},
                      {"events_dropped", dropped},
                      {"clock", "CLOCK_MONOTONIC, microseconds since start_ns"}};
  out.Raw("\n],\"displayTimeUnit\":\"ms\",\"otherData\":" + about.dump() + "}\n");
  return out.Finish();
}

std::string Recording::ToJson() const {
  std::string text;
  const Status status = WriteJson([&text](std::string_view piece) {
    text += piece;
    return Status::Ok();
  });
  SLICE_CHECK(status.ok(), "appending to a string");
  return text;
}

}  // namespace slice::server
