// `slicectl status`: the daemon at a glance. --json has every counter.
#include "tools/slicectl/ask.h"
#include "tools/slicectl/table.h"

namespace slice::slicectl {
namespace {

using nlohmann::json;

std::string Summary(const json& status) {
  const auto count = [&status](const char* key) { return Text(status, key); };
  const json counters = status.value("counters", json::object());
  Table table({"WHAT", "VALUE"});
  table.Add({"sliced", "pid " + count("pid") + " on '" + count("socket") + "', up " +
                           Duration(status, "uptime_ns")});
  const json executor_pid = status.value("executor_pid", json());
  table.Add({"executor", count("executor") +
                             (executor_pid.is_number() ? ", pid " + executor_pid.dump() : "") +
                             ", restarts " + count("executor_restarts")});
  if (status.contains("executor_silent_ns"))
    table.Add({"executor silent for", Duration(status, "executor_silent_ns")});
  const json overrun = status.value("overrun", json::object());
  for (const auto& [key, value] : overrun.items()) {
    const std::string device = key.substr(0, key.rfind("_ns"));
    table.Add({"stuck", device + " in an operator for " + Duration(overrun, key.c_str())});
  }
  table.Add({"policy", count("policy")});
  if (status.contains("parked_because")) table.Add({"parked", count("parked_because")});
  table.Add({"sessions", count("sessions") + "; graphs " + count("templates") + ", bindings " +
                             count("bindings") + ", tensor sets " + count("tensor_sets") +
                             ", sequences " + count("sequences")});
  table.Add({"requests now", "started " + count("instances_started") + ", waiting " +
                                 count("instances_waiting") + ", parked " +
                                 count("instances_parked")});
  table.Add({"ops now", count("ops_live") + " of at most " + count("ops_live_max")});
  table.Add({"copies now", "transfers " + count("transfers_live") + " (waiting " +
                               count("transfers_waiting") + "), replications " +
                               count("replications") + ", tensor commands " +
                               count("tensor_commands")});
  table.Add({"ops so far", Text(counters, "ops_executed") + "; offline " +
                               Text(counters, "offline_ops") + ", of them away from home " +
                               Text(counters, "offline_ops_off_home")});
  table.Add({"so far",
             "decisions " + Text(counters, "rounds") + " (deferred " + Text(counters, "deferrals") +
                 "), ops recalled " + Text(counters, "recalls") + ", transfers " +
                 Text(counters, "transfers") + ", submits refused " + Text(counters, "refused")});
  table.Add({"an engine turn", Duration(status, "round_ns_p50") + " (median), " +
                                   Duration(status, "round_ns_p99") + " (p99)"});
  table.Add({"reports take",
             Duration(status, "report_latency_p99_ns") + " (p99) from the executor to the engine"});
  table.Add({"estimators", "operator signatures known " + count("signatures")});
  table.Add({"timeline", status.value("timeline_on", false) ? "recording" : "off"});
  return table.Render();
}

std::string Classes(const json& status) {
  Table table({"CLASS", "SUBMITS>", "DONE>", "FAILED>", "LATE>", "FINISH PREDICTED, OFF BY>"});
  const json classes = status.value("classes", json::object());
  for (const char* const name : {"online", "offline"}) {
    const json counters = classes.value(name, json::object());
    const bool measured = Number(counters, "prediction_samples") > 0;
    table.Add({name, Text(counters, "submits"), Text(counters, "completions"),
               Text(counters, "failures"), Text(counters, "late"),
               measured ? Percent(counters, "prediction_error_median") : "-"});
  }
  return table.Render();
}

}  // namespace

Result<std::string> DaemonStatus(const Context& context) {
  SLICE_ASSIGN_OR_RETURN(const json status, AskStatus(context, What::kStatus));
  if (context.json) return Pretty(status);
  return Summary(status) + "\n" + Classes(status);
}

}  // namespace slice::slicectl
