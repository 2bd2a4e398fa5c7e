#include "tools/slicectl/commands.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "common/clock.h"
#include "libclient/control_channel.h"
#include "tools/slicectl/ask.h"
#include "tools/slicectl/gmg_access.h"
#include "tools/slicectl/table.h"

namespace slice::slicectl {
namespace {

using nlohmann::json;

enum What : uint32_t { kStatus = 0, kDevices = 1, kTenants = 2, kEstimators = 3 };

Result<json> AskStatus(const Context& context, What what) {
  proto::Request request;
  request.mutable_status()->set_what(what);
  return AskJson(context, std::move(request));
}

// What a policy, or a timeline's start or mark, answers.
std::string Done(const Context& context, const json& object, const std::string& sentence) {
  return context.json ? Pretty(object) : sentence + "\n";
}

void AddFlat(const json& object, const std::string& prefix, Table* table) {
  for (const auto& [key, value] : object.items()) {
    const std::string name = prefix.empty() ? key : prefix + "." + key;
    if (value.is_object()) {
      AddFlat(value, name, table);
    } else if (key.size() > 3 && key.compare(key.size() - 3, 3, "_ns") == 0 && key != "now_ns") {
      table->Add({name.substr(0, name.size() - 3), FormatDuration(value.get<int64_t>())});
    } else if (key.find("_ns_p") != std::string::npos) {
      table->Add({name, FormatDuration(value.get<int64_t>())});
    } else if (!value.is_array() && key != "now_ns" && key != "epoch") {
      table->Add({name, Text(object, key.c_str())});
    }
  }
}

}  // namespace

Result<std::string> DaemonStatus(const Context& context) {
  SLICE_ASSIGN_OR_RETURN(const json status, AskStatus(context, kStatus));
  if (context.json) return Pretty(status);
  Table table({"WHAT", "VALUE"});
  AddFlat(status, "", &table);
  return table.Render();
}

Result<std::string> Devices(const Context& context) {
  SLICE_ASSIGN_OR_RETURN(const json answer, AskStatus(context, kDevices));
  if (context.json) return Pretty(answer.contains("devices") ? answer : json{{"devices", answer}});
  Table devices({"DEVICE", "DOMAIN", "STATE", "RUNNING", "ELAPSED>", "ISSUED>", "PLACED>", "DONE>",
                 "BUSY>", "CPU>", "ONLINE"});
  for (const json& device : answer.value("devices", json::array())) {
    const json running = device.value("running", json::object());
    devices.Add({Text(device, "name"), Text(device, "domain"), Text(device, "state"),
                 Text(running, "name"), Duration(running, "elapsed_ns"), Text(device, "issued"),
                 Text(device, "placed"), Text(device, "ops_done"), Duration(device, "busy_ns"),
                 Duration(device, "cpu_ns"), Text(device, "hosts_online")});
  }
  Table domains({"DOMAIN", "POOL>", "LANE>", "RESERVED>", "GRANTED>", "FREE>", "RETAINED>", "OF>"});
  for (const json& domain : answer.value("domains", json::array())) {
    domains.Add({Text(domain, "name"), Bytes(domain, "pool_bytes"), Bytes(domain, "lane_bytes"),
                 Bytes(domain, "reserved_bytes"), Bytes(domain, "granted_bytes"),
                 Bytes(domain, "pool_free_bytes"), Bytes(domain, "retained_bytes"),
                 Bytes(domain, "retained_bytes_max")});
  }
  return devices.Render() + "\n" + domains.Render();
}

Result<std::string> Tenants(const Context& context) {
  SLICE_ASSIGN_OR_RETURN(const json answer, AskStatus(context, kTenants));
  if (context.json) return Pretty(answer);
  Table table({"SESSION>", "NAME", "UID>", "PID>", "CLASS", "WEIGHT>", "HOME", "RUNNING>",
               "WAITING>", "PARKED>", "SUBMITS>", "DONE>", "POOL>", "RETAINED>"});
  for (const json& tenant : answer.value("tenants", json::array())) {
    table.Add({Text(tenant, "tenant"), Text(tenant, "name"), Text(tenant, "uid"),
               Text(tenant, "pid"), Text(tenant, "class"), Text(tenant, "weight"),
               Text(tenant, "home"), Text(tenant, "instances_running"),
               Text(tenant, "instances_waiting"), Text(tenant, "instances_parked"),
               Text(tenant, "submits"), Text(tenant, "completions"), Bytes(tenant, "pool_bytes"),
               Bytes(tenant, "retained_bytes")});
  }
  return table.size() == 0 ? std::string("no sessions\n") : table.Render();
}

Result<std::string> Estimators(const Context& context) {
  SLICE_ASSIGN_OR_RETURN(const json answer, AskStatus(context, kEstimators));
  if (context.json) return Pretty(answer);
  Table signatures({"SIGNATURE", "OPERATOR", "KIND>", "LEVEL", "SAMPLES>", "SHAPES>", "ERROR>",
                    "NEW SHAPES>", "DRIFT", "MEMORY>"});
  for (const json& item : answer.value("signatures", json::array())) {
    const bool measured = Number(item, "memory_samples") > 0;
    signatures.Add({Text(item, "signature"), Text(item, "name"), Text(item, "device_kind"),
                    Text(item, "level"), Text(item, "samples"), Text(item, "shapes"),
                    Percent(item, "error"), Percent(item, "table_error"), Text(item, "drift"),
                    measured ? "x " + Text(item, "memory_ratio") : "-"});
  }
  Table links({"FROM", "TO", "SAMPLES>", "ERROR>", "LATENCY>", "PER SECOND>"});
  for (const json& item : answer.value("links", json::array())) {
    links.Add({Text(item, "source"), Text(item, "destination"), Text(item, "samples"),
               Percent(item, "error"), Duration(item, "latency_ns"),
               Bytes(item, "bytes_per_second")});
  }
  Table classes(
      {"KIND>", "OPERATORS", "SAMPLES>", "CONTENTION", "SLOWDOWN>", "ERROR WITHOUT>", "WITH>"});
  for (const json& item : answer.value("contention", json::array())) {
    classes.Add({Text(item, "device_kind"), Text(item, "class"), Text(item, "samples"),
                 item.value("on", false) ? "on" : "off", Percent(item, "slowdown"),
                 Percent(item, "error_without"), Percent(item, "error_with")});
  }
  std::string text = signatures.size() == 0 ? "no operators measured yet\n" : signatures.Render();
  if (const int64_t left = Number(answer, "signatures_left_out"); left > 0)
    text += "and " + std::to_string(left) + " signatures used longer ago\n";
  if (links.size() != 0) text += "\n" + links.Render();
  if (const int64_t left = Number(answer, "links_left_out"); left > 0)
    text += "and " + std::to_string(left) + " more links\n";
  if (classes.size() != 0) text += "\n" + classes.Render();
  return text;
}

namespace {
// Who waits for whom at each piece that somebody uses: the entries of its access queue in order.
std::string QueueTable(const std::vector<gmg::PieceView>& pieces) {
  Table queues({"SET>", "TENSOR>", "DOMAIN>", "VERSION>", "PLACE>", "ENTRY", "ID>", "ACCESS",
                "USES LEFT>", "WAITS FOR>"});
  for (const gmg::PieceView& piece : pieces) {
    const std::string state = piece.lost ? " lost" : piece.moving ? " moving" : "";
    const auto row = [&](const std::string& place, const std::vector<std::string>& entry) {
      std::vector<std::string> cells{std::to_string(piece.set), std::to_string(piece.tensor),
                                     std::to_string(piece.domain),
                                     std::to_string(piece.version) + state, place};
      cells.insert(cells.end(), entry.begin(), entry.end());
      queues.Add(cells);
    };
    for (size_t e = 0; e < piece.queue.size(); ++e) {
      const gmg::QueueEntryView& entry = piece.queue[e];
      row(std::to_string(e + 1),
          {std::string(gmg::AccessKindName(entry.kind)), std::to_string(entry.owner),
           std::string(gmg::AccessName(entry)), std::to_string(entry.uses_left),
           entry.waits_for == 0 ? "-" : std::to_string(entry.waits_for) + " before"});
    }
    const size_t hidden = piece.queue_length - piece.queue.size();
    if (hidden > 0) row("...", {std::to_string(hidden) + " more", "", "", "", ""});
    if (piece.queue.empty() && (piece.lost || piece.moving)) row("-", {"-", "-", "-", "-", "-"});
  }
  return queues.size() == 0 ? "" : "\n" + queues.Render();
}
}  // namespace

Result<std::string> Graphs(const Context& context, bool with_ops) {
  SLICE_ASSIGN_OR_RETURN(const GmgAccess access, GmgAccess::Open(context.socket_path));
  const gmg::Reader& reader = access.reader();
  if (context.json) {
    const json whole = json::parse(reader.GraphsJson(with_ops), nullptr, false);
    if (whole.is_discarded())
      return Error(StatusCode::kInternal, "the GMG reader made text that is no JSON");
    return Pretty(whole);
  }
  std::vector<gmg::TemplateView> templates = reader.Templates();
  const auto template_of = [&](uint32_t id) -> const gmg::TemplateView* {
    for (const gmg::TemplateView& item : templates) {
      if (item.id == id) return &item;
    }
    return nullptr;
  };
  const int64_t now = MonotonicNow();
  Table instances({"INSTANCE>", "STATE", "TENANT>", "CLASS", "GRAPH", "SEQUENCE>", "DONE>", "OPS>",
                   "FRONTIER", "AGE>", "DEADLINE IN>"});
  Table ops({"INSTANCE>", "OP>", "NAME", "STATE", "DEVICE>", "PENDING>", "DURATION>", "START IN>"});
  for (const gmg::InstanceView& item : reader.Instances()) {
    const gmg::TemplateView* graph = template_of(item.template_id);
    instances.Add(
        {std::to_string(item.id), std::string(gmg::InstanceStateName(item.state)),
         std::to_string(item.tenant), item.online ? "online" : "offline",
         graph == nullptr ? "-" : graph->name, std::to_string(item.sequence_id),
         std::to_string(item.ops_done), std::to_string(item.ops.size()),
         std::to_string(item.frontier_scheduled) + "/" + std::to_string(item.frontier_unscheduled),
         FormatDuration(now - item.submit_ns),
         item.deadline_ns == 0 || item.deadline_ns == kNever
             ? "-"
             : FormatDuration(item.deadline_ns - now)});
    for (size_t op = 0; with_ops && op < item.ops.size(); ++op) {
      const gmg::OpView& view = item.ops[op];
      const bool has_name = graph != nullptr && op < graph->group_names.size();
      ops.Add({std::to_string(item.id), std::to_string(op), has_name ? graph->group_names[op] : "-",
               std::string(gmg::OpStateName(view.state)),
               view.device == kNoDevice ? "-" : std::to_string(view.device),
               std::to_string(view.pending), FormatDuration(view.duration_ns),
               view.predicted_start_ns == 0 ? "-" : FormatDuration(view.predicted_start_ns - now)});
    }
  }
  std::string text = "sliced " + std::to_string(reader.daemon_pid()) + ", policy " +
                     reader.policy() + ", written " + FormatDuration(now - reader.updated_ns()) +
                     " ago, " + std::to_string(templates.size()) + " graphs, " +
                     std::to_string(reader.Sequences().size()) + " sequences, " +
                     std::to_string(reader.Transfers().size()) + " transfers\n";
  text += instances.size() == 0 ? "no instances\n" : "\n" + instances.Render();
  if (ops.size() != 0) text += "\n" + ops.Render();
  return text + QueueTable(reader.Pieces());
}

Result<std::string> Explain(const Context& context, size_t newest_max) {
  SLICE_ASSIGN_OR_RETURN(const GmgAccess access, GmgAccess::Open(context.socket_path));
  const gmg::Reader& reader = access.reader();
  if (context.json) {
    const json whole = json::parse(reader.DecisionsJson(newest_max), nullptr, false);
    if (whole.is_discarded())
      return Error(StatusCode::kInternal, "the GMG reader made text that is no JSON");
    return Pretty(whole);
  }
  const int64_t now = MonotonicNow();
  Table table({"DECISION>", "AGO>", "INSTANCE>", "CLASS", "OPS", "CANDIDATE", "CHOSEN", "FEASIBLE",
               "LATENESS>", "ONLINE ADDED>", "FINISH>", "BYTES MOVED>"});
  for (const gmg::DecisionView& decision : reader.Decisions(newest_max)) {
    bool is_first = true;
    for (const gmg::CandidateView& item : decision.candidates) {
      table.Add(
          {is_first ? std::to_string(decision.number) : "",
           is_first ? FormatDuration(now - decision.time_ns) : "",
           is_first ? std::to_string(decision.instance) : "",
           is_first ? (decision.online ? "online" : "offline") : "",
           is_first ? std::to_string(decision.op) + "+" + std::to_string(decision.op_count) : "",
           item.defer ? "defer" : "device " + std::to_string(item.device), item.chosen ? "yes" : "",
           item.feasible ? "yes" : "no", std::to_string(item.lateness_bucket),
           std::to_string(item.online_added_bucket),
           FormatDuration(item.batch_finish_ns - decision.time_ns), FormatBytes(item.bytes_moved)});
      is_first = false;
    }
  }
  return table.size() == 0 ? std::string("no decisions yet\n") : table.Render();
}

Result<std::string> PolicyGet(const Context& context) {
  SLICE_ASSIGN_OR_RETURN(const json status, AskStatus(context, kStatus));
  const std::string policy = Text(status, "policy");
  return Done(context, {{"policy", policy}}, policy);
}

Result<std::string> PolicySet(const Context& context, const std::string& name) {
  proto::Request request;
  request.mutable_set_policy()->set_policy(name);
  SLICE_RETURN_IF_ERROR(Ask(context, std::move(request)).status());
  return Done(context, {{"policy", name}}, "policy is now " + name);
}

Result<std::string> TimelineStart(const Context& context) {
  proto::Request request;
  request.mutable_timeline()->set_action(0);
  SLICE_RETURN_IF_ERROR(Ask(context, std::move(request)).status());
  return Done(context, {{"recording", true}}, "recording; `slicectl timeline stop FILE` ends it");
}

// The file is opened here, with the caller's rights; sliced only gets the descriptor. It takes its
// name when it is whole.
Result<std::string> TimelineStop(const Context& context, const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode))  // it would be replaced
    return Error(StatusCode::kInvalid, "'%s' is not a regular file", path.c_str());
  const std::string partial = path + ".partial";
  const Fd file(
      ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!file.valid())
    return ErrnoError(StatusCode::kInvalid, errno, "cannot write '%s'", partial.c_str());
  proto::Request request;
  request.mutable_timeline()->set_action(1);
  request.mutable_timeline()->set_path(path);
  const int fd = file.get();
  // Answered when it is written: a long recording takes its time.
  Result<proto::Reply> reply =
      Ask(context, std::move(request), std::span(&fd, 1), client::kCallTimeout);
  if (!reply.ok()) {
    ::unlink(partial.c_str());
    return reply.status();
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) {
    return ErrnoError(StatusCode::kInvalid, errno, "cannot rename '%s' to '%s'", partial.c_str(),
                      path.c_str());
  }
  json summary = json::parse(reply->body().text(), nullptr, false);
  if (!summary.is_object()) summary = json::object();
  summary["file"] = path;
  const std::string dropped =
      Number(summary, "dropped") == 0 ? "" : ", " + Text(summary, "dropped") + " dropped";
  return Done(context, summary,
              path + ": " + Text(summary, "events") + " events in " +
                  Duration(summary, "duration_ns") + dropped +
                  "; open it in ui.perfetto.dev or chrome://tracing");
}

Result<std::string> TimelineMark(const Context& context, const std::string& label) {
  proto::Request request;
  request.mutable_timeline()->set_action(2);
  request.mutable_timeline()->set_path(label);
  SLICE_RETURN_IF_ERROR(Ask(context, std::move(request)).status());
  return Done(context, {{"mark", label}}, "marked '" + label + "'");
}

}  // namespace slice::slicectl
