// `slicectl whatif`: the daemon's prediction for a graph, as tables.
#include "tools/slicectl/ask.h"
#include "tools/slicectl/table.h"

namespace slice::slicectl {
namespace {

using nlohmann::json;

// "in 12.3 ms": a time from now; 0 is now.
std::string In(const json& object, const char* key) {
  if (!object.contains(key)) return "-";
  const int64_t ns = Number(object, key);
  return ns == 0 ? "now" : "in " + FormatDuration(ns);
}

std::string Symbols(const json& graph) {
  std::string text;
  const json symbols = graph.value("symbols", json::object());
  for (const auto& [name, value] : symbols.items())
    text += (text.empty() ? ", " : " ") + name + "=" + value.dump();
  return text;
}

std::string Summary(const json& answer) {
  const json graph = answer.value("graph", json::object());
  Table table({"WHAT", "VALUE"});
  table.Add({"graph", Text(graph, "name") + " " + Text(graph, "content_hash") + ", " +
                          Text(graph, "ops") + " ops" + Symbols(graph)});
  table.Add({"binding", Text(answer, "binding") + " of session " + Text(answer, "tenant") + " '" +
                            Text(answer, "tenant_name") + "', home " +
                            Text(answer, "home_device")});
  table.Add({"class", Text(answer, "class") + ", policy " + Text(answer, "policy")});
  const std::string because =
      answer.contains("because") ? ": " + Text(answer, "because") : std::string();
  table.Add({"it would be", Text(answer, "state") + because});
  const bool at_least = answer.value("beyond_horizon", false);
  table.Add({"start", In(answer, "start_in_ns")});
  table.Add({"finish", In(answer, "finish_in_ns") + (at_least ? ", or later" : "")});
  table.Add({"duration", Duration(answer, "duration_ns")});
  std::string devices;
  for (const json& device : answer.value("devices", json::array())) {
    if (!devices.empty()) devices += ", ";
    devices += Text(device, "device") + " " + Text(device, "ops") + " ops";
  }
  table.Add({"devices", devices.empty() ? "-" : devices});
  table.Add({"work", Duration(answer, "work_ns") + " +- " + Duration(answer, "work_spread_ns")});
  const json queues = answer.value("access_queues", json::object());
  table.Add({"before it", Text(queues, "users_before") + " users of its " + Text(queues, "pieces") +
                              " tensors that change"});
  return table.Render();
}

std::string Candidates(const json& answer) {
  if (!answer.contains("decision")) return "";
  const json& decision = answer["decision"];
  const std::string batch = Text(decision, "op_count") + " ops from op " + Text(decision, "op");
  Table table({"CANDIDATE", "CHOSEN", "FEASIBLE", "BATCH ENDS", "GRAPH ENDS", "LATENESS>",
               "ONLINE ADDED>", "BYTES MOVED>", "WHY NOT"});
  for (const json& candidate : decision.value("candidates", json::array())) {
    const bool simulated = candidate.contains("lateness_ms");
    table.Add({candidate.value("defer", false) ? "defer" : Text(candidate, "device"),
               candidate.value("chosen", false) ? "yes" : "", Text(candidate, "feasible"),
               In(candidate, "finish_in_ns"), In(candidate, "graph_finish_in_ns"),
               simulated ? Text(candidate, "lateness_ms") + " ms" : "-",
               simulated ? Text(candidate, "online_added_percent") + " %" : "-",
               simulated ? Bytes(candidate, "bytes_moved") : "-",
               candidate.contains("why_not") ? Text(candidate, "why_not") : ""});
  }
  const std::string verdict = decision.value("placed", false)
                                  ? "go to " + Text(decision, "device")
                                  : "wait, to be looked at again " + In(decision, "retry_in_ns");
  const char* const when =
      decision.value("made_now", false) ? " would " : ", once their turn has come, would ";
  return "\n" + batch + when + verdict + "\n" + table.Render();
}

std::string Estimates(const json& answer) {
  Table table({"LONGEST", "OPS>", "DURATION>", "SPREAD>", "KNOWN BY"});
  for (const json& item : answer.value("estimates", json::array())) {
    table.Add({Text(item, "op"), Text(item, "ops"), Duration(item, "duration_ns"),
               Duration(item, "spread_ns"), Text(item, "level")});
  }
  return table.Section();
}

std::string Memory(const json& answer) {
  Table table({"DOMAIN", "PEAK>", "WORKSPACE>", "FREE>", "OF>", "FITS"});
  for (const json& item : answer.value("memory", json::array())) {
    table.Add({Text(item, "domain"), Bytes(item, "peak_bytes"), Bytes(item, "workspace_bytes"),
               Bytes(item, "free_bytes"), Bytes(item, "pool_bytes"), Text(item, "fits")});
  }
  return table.Section();
}

}  // namespace

Result<std::string> WhatIf(const Context& context, const WhatIfOptions& options) {
  proto::Request request;
  proto::WhatIf* const question = request.mutable_what_if();
  question->set_graph(options.graph);
  question->set_session(options.session);
  for (const int64_t symbol : options.symbols) question->add_symbols(symbol);
  if (!options.service_class.empty())
    question->set_service_class(options.service_class == "online" ? 1 : 2);
  SLICE_ASSIGN_OR_RETURN(const json answer, AskJson(context, std::move(request)));
  if (context.json) return Pretty(answer);
  return Summary(answer) + Candidates(answer) + Estimates(answer) + Memory(answer);
}

}  // namespace slice::slicectl
