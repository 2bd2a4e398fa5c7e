// slicectl: looks at a running sliced and tells it what to do.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "libclient/control_channel.h"
#include "tools/slicectl/commands.h"

namespace {

constexpr int kUsage = 2;  // exit status of a command line that is wrong; other errors: 1

constexpr const char* kEverywhere =
    "Every command takes --socket PATH, --timeout SECONDS and --json (times in ns, sizes in "
    "bytes,\n"
    "shares from 0 to 1, and more than the tables show).";

constexpr const char* kStatusHelp =
    "Times, sizes and shares carry their units. FINISH PREDICTED, OFF BY: the median relative "
    "error\n"
    "of the last finishes that were predicted when a request was submitted.";
constexpr const char* kDevicesHelp =
    "Per device: RUNNING and ELAPSED, the operator on it and for how long; ISSUED and PLACED, ops\n"
    "handed to it and not started, and ops to be handed to it; DONE, ops so far; BUSY and CPU, "
    "time\n"
    "in operators so far, wall and CPU; ONLINE, whether an online session has its home here.\n"
    "Per memory domain, in B to TiB (powers of 1024): POOL, for values and workspaces, of which "
    "LANE\n"
    "(workspaces), RESERVED (started requests), GRANTED (work away from home) and FREE; RETAINED,\n"
    "weights and state, OF at most.";
constexpr const char* kTenantsHelp =
    "CLASS: the highest that the session may ask for. WEIGHT: a number without a unit, as "
    "granted.\n"
    "RUNNING, WAITING, PARKED: its requests now; parked ones wait for another policy. SUBMITS, "
    "DONE:\n"
    "requests so far. POOL, RETAINED: memory that it holds now, in B to TiB (powers of 1024).";
constexpr const char* kEstimatorsHelp =
    "Per operator signature and device KIND, the ones used last: LEVEL, what answers (prior, "
    "linear,\n"
    "table, exact: from nothing known to this very shape measured); ERROR and NEW SHAPES, mean\n"
    "relative errors in percent, all told and on shapes not seen before; DRIFT, whether its times\n"
    "are changing; MEMORY, measured peak as a multiple of what was declared.\n"
    "Per link: LATENCY of a copy, and bytes PER SECOND (powers of 1024).\n"
    "Per kind of operator: SLOWDOWN when all other devices are busy, and the errors of "
    "predictions\n"
    "WITHOUT and WITH it.";
constexpr const char* kGraphsHelp =
    "GRAPH: the content hash, as whatif and the log have it; beside an instance its first digits.\n"
    "FRONTIER: ops placed whose successors are not, and ops that may be placed now. AGE, DEADLINE "
    "IN,\n"
    "START IN, DURATION: times from now or long, with units; negative: ago. PENDING: predecessors\n"
    "that are not done. WAITS FOR: earlier entries of the tensor's queue.";
constexpr const char* kExplainHelp =
    "Rows of one decision are the places that a batch could go to. OPS: its first op, and how "
    "many\n"
    "more. BY, what decided:\n"
    "  levels      simulated outcomes, compared from left to right: FEASIBLE (memory), LATENESS "
    "of\n"
    "              online requests in ms, ONLINE ADDED, FINISH ADDED, BYTES MOVED, QUEUED\n"
    "  finish      the simulated FINISH      queue       the work QUEUED on the device, in ms\n"
    "  one device  nothing: it could run nowhere else, and nothing was compared\n"
    "ONLINE ADDED, FINISH ADDED: by how many percent online work, and the batch, would end later "
    "than\n"
    "with the best candidate. FINISH: of the batch, after the decision. BYTES MOVED: B to TiB.\n"
    "\">=\": beaten, so not simulated to its end; the figures are the least that they would have "
    "been.\n"
    "defer: leave it unplaced for the time shown, if chosen.";
constexpr const char* kWhatIfHelp =
    "Nothing runs. Times are from now, with units; LATENESS in ms, ONLINE ADDED in percent, sizes "
    "in\n"
    "B to TiB (powers of 1024); work +- spread: what its ops take alone, and the typical error.";

// CLI11's own numbers let NaN pass.
std::string IsNumber(const std::string& text) {
  return std::isnan(std::strtod(text.c_str(), nullptr)) ? "not a number: " + text : "";
}

std::string IsCount(const std::string& text) {
  return text.find_first_not_of("0123456789") == std::string::npos &&
                 text.find_first_not_of('0') != std::string::npos
             ? ""
             : "not a whole number above 0: " + text;
}

// What is wrong with the command line. CLI11 only says that a command is missing, also where one
// is not known.
int UsageError(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) return app.exit(error);  // --help
  const CLI::App* at = &app;
  std::string path = "slicectl";
  while (!at->get_subcommands().empty()) {
    at = at->get_subcommands().front();
    path += " " + at->get_name();
  }
  std::string names, what = error.what();
  for (const CLI::App* command : at->get_subcommands([](const CLI::App*) { return true; }))
    names += (names.empty() ? "" : ", ") + command->get_name();
  if (!names.empty() && error.get_name() == "RequiredError") {
    what = "a command is missing";
    for (const std::string& word : app.remaining(true)) {
      if (!word.empty() && word[0] != '-') what = "no command '" + word + "'";
    }
    what += ": there are " + names;
  }
  std::fprintf(stderr, "slicectl: %s\nsee `%s --help`\n", what.c_str(), path.c_str());
  return kUsage;
}

}  // namespace

int main(int argc, char** argv) {
  namespace ctl = slice::slicectl;
  using Answer = slice::Result<std::string>;
  ctl::Context context;
  std::string socket, text;
  bool with_ops = false;
  size_t newest_max = 20;
  std::function<Answer()> run;

  CLI::App app{"Inspects and controls the scheduler daemon sliced", "slicectl"};
  app.require_subcommand(1);
  app.fallthrough();  // options may follow the command; handed down, as is the footer
  // The last one counts: an alias may give one.
  app.footer(std::string(kEverywhere) +
             "\nTables are as wide as what they show: `slicectl explain | less -S`.");
  app.add_option("--socket", socket,
                 "Control socket; default: $SLICE_SOCKET, else /run/slicescheduler/sliced.sock")
      ->type_name("PATH")
      ->take_last();
  app.add_flag("--json", context.json, "Print JSON");
  double timeout_s = 0;
  app.add_option(
         "--timeout", timeout_s,
         "Time that the daemon has to answer, 0.001 to 86400 s; default: 5 s, for `timeline "
         "stop` 300 s")
      ->type_name("SECONDS")
      ->take_last()
      ->check(CLI::Range(0.001, 86400.0).description(""))
      ->check(CLI::Validator(IsNumber, ""));
  const auto command = [&](CLI::App* parent, const char* name, const char* help,
                           std::function<Answer()> action, const char* details = "") {
    CLI::App* made = parent->add_subcommand(name, help);
    made->callback([&run, action = std::move(action)] { run = action; });
    made->footer(*details == 0 ? std::string(kEverywhere)
                               : std::string(details) + "\n\n" + kEverywhere);
    return made;
  };
  command(
      &app, "status", "Daemon, executor, scheduler at a glance",
      [&] { return ctl::DaemonStatus(context); }, kStatusHelp);
  command(
      &app, "devices", "Devices and memory domains", [&] { return ctl::Devices(context); },
      kDevicesHelp);
  command(
      &app, "tenants", "Sessions and what they hold", [&] { return ctl::Tenants(context); },
      kTenantsHelp);
  command(
      &app, "estimators", "What is known of durations: by operator, link and load",
      [&] { return ctl::Estimators(context); }, kEstimatorsHelp);
  command(
      &app, "graphs",
      "Graphs, live requests, queues, read from shared memory (works while sliced is stopped)",
      [&] { return ctl::Graphs(context, with_ops); }, kGraphsHelp)
      ->add_flag("--ops", with_ops, "Every op of every instance");
  command(
      &app, "explain", "The last placement decisions, from shared memory: candidates and scores",
      [&] { return ctl::Explain(context, newest_max); }, kExplainHelp)
      ->add_option("-n,--count", newest_max, "How many decisions, newest first")
      ->type_name("NUMBER")
      ->capture_default_str()
      ->check(CLI::Validator(IsCount, ""));
  ctl::WhatIfOptions what_if;
  CLI::App* whatif = command(
      &app, "whatif", "When a graph would end if it was submitted now",
      [&] { return ctl::WhatIf(context, what_if); }, kWhatIfHelp);
  whatif
      ->add_option("GRAPH", what_if.graph,
                   "Its name, or the beginning of its content hash (see `slicectl graphs`)")
      ->required()
      ->type_name("");
  whatif
      ->add_option("--tenant", what_if.session,
                   "Session whose binding of it is meant (see `slicectl tenants`)")
      ->type_name("SESSION")
      ->check(CLI::Validator(IsCount, ""));
  whatif
      ->add_option("--symbol", what_if.symbols,
                   "Its symbols in order; default: those of its latest submit")
      ->type_name("NUMBER");
  whatif->add_option("--class", what_if.service_class, "As the first step of a new sequence")
      ->type_name("CLASS")
      ->check(CLI::IsMember({"online", "offline"}));
  CLI::App* policy = app.add_subcommand("policy", "Scheduling policy")->require_subcommand(1);
  command(policy, "get", "Print its name", [&] { return ctl::PolicyGet(context); });
  command(policy, "set", "Switch to another one", [&] { return ctl::PolicySet(context, text); })
      ->add_option("NAME", text, "slice, fifo, online-only or priority")
      ->required()
      ->type_name("");
  CLI::App* timeline =
      app.add_subcommand("timeline", "Record what runs when")->require_subcommand(1);
  command(timeline, "start", "Start recording", [&] { return ctl::TimelineStart(context); });
  command(timeline, "stop", "Stop, and write Chrome/Perfetto trace JSON (times in us)",
          [&] { return ctl::TimelineStop(context, text); })
      ->add_option("FILE", text, "Where to; it is replaced when the recording is whole")
      ->required()
      ->type_name("");
  command(timeline, "mark", "Put a label into the recording",
          [&] { return ctl::TimelineMark(context, text); })
      ->add_option("LABEL", text, "At most 256 bytes")
      ->required()
      ->type_name("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return UsageError(app, error);
  }

  context.timeout = static_cast<slice::DurationNs>(timeout_s * 1e9);
  context.socket_path = slice::client::ResolveSocketPath(socket.empty() ? nullptr : socket.c_str());
  const Answer answer = run();
  if (!answer.ok()) {
    std::fprintf(stderr, "slicectl: %s\n", answer.status().ToString().c_str());
    return 1;
  }
  if (std::fputs(answer->c_str(), stdout) == EOF || std::fflush(stdout) != 0) {
    std::perror("slicectl: cannot write the answer");
    return 1;
  }
  return 0;
}
