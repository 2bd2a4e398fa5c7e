#include "tools/slicectl/commands.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "libclient/control_channel.h"
#include "tools/slicectl/ask.h"
#include "tools/slicectl/table.h"

namespace slice::slicectl {
namespace {

using nlohmann::json;

// What a policy, or a timeline's start or mark, answers.
std::string Done(const Context& context, const json& object, const std::string& sentence) {
  return context.json ? Pretty(object) : sentence + "\n";
}

}  // namespace

Result<std::string> Devices(const Context& context) {
  SLICE_ASSIGN_OR_RETURN(const json answer, AskStatus(context, What::kDevices));
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
  SLICE_ASSIGN_OR_RETURN(const json answer, AskStatus(context, What::kTenants));
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
  SLICE_ASSIGN_OR_RETURN(const json answer, AskStatus(context, What::kEstimators));
  if (context.json) return Pretty(answer);
  Table signatures({"SIGNATURE", "OPERATOR", "KIND", "LEVEL", "SAMPLES>", "SHAPES>", "ERROR>",
                    "NEW SHAPES>", "DRIFT", "MEMORY>"});
  for (const json& item : answer.value("signatures", json::array())) {
    const bool measured = Number(item, "memory_samples") > 0;
    signatures.Add({Text(item, "signature"), Text(item, "name"), Text(item, "device_kind"),
                    Text(item, "level"), Text(item, "samples"), Text(item, "shapes"),
                    Percent(item, "error"), Percent(item, "table_error"), Text(item, "drift"),
                    measured ? Text(item, "memory_ratio") + " x" : "-"});
  }
  Table links({"FROM", "TO", "SAMPLES>", "ERROR>", "LATENCY>", "PER SECOND>"});
  for (const json& item : answer.value("links", json::array())) {
    links.Add({Text(item, "source"), Text(item, "destination"), Text(item, "samples"),
               Percent(item, "error"), Duration(item, "latency_ns"),
               Bytes(item, "bytes_per_second")});
  }
  Table classes(
      {"KIND", "OPERATORS", "SAMPLES>", "CONTENTION", "SLOWDOWN>", "ERROR WITHOUT>", "WITH>"});
  for (const json& item : answer.value("contention", json::array())) {
    classes.Add({Text(item, "device_kind"), Text(item, "class"), Text(item, "samples"),
                 item.value("on", false) ? "on" : "off", Percent(item, "slowdown"),
                 Percent(item, "error_without"), Percent(item, "error_with")});
  }
  std::string text = signatures.size() == 0 ? "no operators measured yet\n" : signatures.Render();
  if (const int64_t left = Number(answer, "signatures_left_out"); left > 0)
    text += "and " + std::to_string(left) + " signatures used longer ago\n";
  text += links.Section();
  if (const int64_t left = Number(answer, "links_left_out"); left > 0)
    text += "and " + std::to_string(left) + " more links\n";
  text += classes.Section();
  return text;
}

Result<std::string> PolicyGet(const Context& context) {
  SLICE_ASSIGN_OR_RETURN(const json status, AskStatus(context, What::kStatus));
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
  std::string dropped;
  if (Number(summary, "dropped") != 0)
    dropped.append(", ").append(Text(summary, "dropped")).append(" dropped");
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
