// slicectl: looks at a running sliced and tells it what to do.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "libclient/control_channel.h"
#include "tools/slicectl/commands.h"

int main(int argc, char** argv) {
  namespace ctl = slice::slicectl;
  using Answer = slice::Result<std::string>;
  ctl::Context context;
  std::string socket, text;
  bool with_ops = false;
  size_t newest_max = 20;
  std::function<Answer()> run;

  CLI::App app{"slicectl: inspects and controls the scheduler daemon sliced"};
  app.require_subcommand(1);
  app.fallthrough();  // options may follow the command
  app.add_option("--socket", socket,
                 "Control socket; default: $SLICE_SOCKET, else /run/slicescheduler/sliced.sock");
  app.add_flag("--json", context.json, "Print JSON");
  double timeout_s = 0;
  app.add_option("--timeout", timeout_s,
                 "Seconds to wait for the daemon; default: 5, and 300 for `timeline stop`")
      ->check(CLI::Range(0.001, 86400.0))
      ->check([](const std::string& number) -> std::string {  // the range lets NaN pass
        return std::isnan(std::strtod(number.c_str(), nullptr)) ? "not a number: " + number : "";
      });
  const auto command = [&](CLI::App* parent, const char* name, const char* help,
                           std::function<Answer()> action) {
    CLI::App* made = parent->add_subcommand(name, help);
    made->fallthrough();
    made->callback([&run, action = std::move(action)] { run = action; });
    return made;
  };
  command(&app, "status", "Daemon, executor, scheduler at a glance",
          [&] { return ctl::DaemonStatus(context); });
  command(&app, "devices", "Devices and memory domains", [&] { return ctl::Devices(context); });
  command(&app, "tenants", "Sessions and what they hold", [&] { return ctl::Tenants(context); });
  command(&app, "estimators", "What is known of durations: by operator, link and load",
          [&] { return ctl::Estimators(context); });
  command(&app, "graphs", "Live instances, read from shared memory (works while sliced is stopped)",
          [&] { return ctl::Graphs(context, with_ops); })
      ->add_flag("--ops", with_ops, "Every op of every instance");
  command(&app, "explain", "The last placement decisions: candidates and scores", [&] {
    return ctl::Explain(context, newest_max);
  })->add_option("-n,--count", newest_max, "How many, newest first");
  ctl::WhatIfOptions what_if;
  CLI::App* whatif = command(&app, "whatif", "When a graph would end if it was submitted now",
                             [&] { return ctl::WhatIf(context, what_if); });
  whatif->add_option("GRAPH", what_if.graph, "Its name, or the beginning of its content hash")
      ->required();
  whatif->add_option("--tenant", what_if.session, "Session whose binding of it is meant");
  whatif->add_option("--symbol", what_if.symbols,
                     "Its symbols in order; default: those of its latest submit");
  whatif->add_option("--class", what_if.service_class, "As the first step of a new sequence")
      ->check(CLI::IsMember({"online", "offline"}));
  CLI::App* policy =
      app.add_subcommand("policy", "Scheduling policy")->require_subcommand(1)->fallthrough();
  command(policy, "get", "Print its name", [&] { return ctl::PolicyGet(context); });
  command(policy, "set", "Switch to another one", [&] { return ctl::PolicySet(context, text); })
      ->add_option("NAME", text, "slice, pin, greedy-eft, fifo, priority, ...")
      ->required();
  CLI::App* timeline =
      app.add_subcommand("timeline", "Record what runs when")->require_subcommand(1)->fallthrough();
  command(timeline, "start", "Start recording", [&] { return ctl::TimelineStart(context); });
  command(timeline, "stop", "Stop, and write Chrome/Perfetto trace JSON",
          [&] { return ctl::TimelineStop(context, text); })
      ->add_option("FILE", text, "Where to")
      ->required();
  command(timeline, "mark", "Put a label into the recording",
          [&] { return ctl::TimelineMark(context, text); })
      ->add_option("LABEL", text, "Text")
      ->required();
  CLI11_PARSE(app, argc, argv);

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
