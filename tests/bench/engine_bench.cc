// engine_event_us: thread CPU time of the engine per event (report or submit, with the Run behind
// it) and per Run that placed something, in a live window of two tenants: an online Llama decode of
// 34 groups with 65 pieces and an offline prefill of the same, two devices. Prints {"figures":
// [...]}.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "common/clock.h"
#include "tests/testing/graph_builder.h"
#include "tests/testing/virtual_executor.h"

namespace {

using slice::testing::Simulation;

double Percentile(std::vector<slice::DurationNs> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return static_cast<double>(
             values[static_cast<size_t>(p * static_cast<double>(values.size() - 1))]) /
         1000;
}

}  // namespace

int main() {
  using slice::kMillisecond;
  slice::engine::Config config;
  for (int d = 0; d < 2; ++d) {
    config.devices.push_back({"cpu" + std::to_string(d), static_cast<slice::DomainIndex>(d), 0});
    config.domains.push_back({"d" + std::to_string(d), int64_t{1} << 30, int64_t{1} << 30});
  }
  Simulation sim(config);
  const slice::TenantId online = sim.AddTenant(slice::ServiceClass::kOnline);
  const slice::TenantId offline = sim.AddTenant(slice::ServiceClass::kOffline, 1);
  const Simulation::Service decode =
      sim.AddService(online, slice::testing::Llama(32, kMillisecond, 4096, 4096, "decode"), 0, {1});
  const Simulation::Service bulk = sim.AddService(
      offline, slice::testing::Llama(32, 4 * kMillisecond, 65536, 4096, "prefill"), 1, {0});
  std::vector<slice::DurationNs> runs, rounds, submits;
  sim.run_probe = [&](slice::DurationNs cpu, bool placed) {
    (placed ? rounds : runs).push_back(cpu);
  };
  sim.OpenSequence(online, 1, slice::ServiceClass::kOnline);
  uint64_t cookie = 0;
  for (int step = 0; step < 200; ++step) {
    const slice::DurationNs before = slice::ThreadCpuNow();
    cookie = sim.Submit(decode, 1);
    submits.push_back(slice::ThreadCpuNow() - before);
    if (step % 4 == 0) sim.Submit(bulk);
    sim.RunUntil(sim.now() + 38 * kMillisecond);
  }
  if (!sim.RunAll(200 * slice::kSecond) || !sim.Violations().empty() ||
      sim.StatusOf(online, cookie) != SLICE_OK) {
    std::fprintf(stderr, "the run went wrong: %s\n", sim.Violations().c_str());
    return EXIT_FAILURE;
  }
  std::printf(
      "{\"figures\": [{\"name\": \"engine_run_median\", \"value\": %.2f, \"unit\": \"us\"}, "
      "{\"name\": \"engine_run_p99\", \"value\": %.2f, \"unit\": \"us\"}, "
      "{\"name\": \"engine_placing_run_median\", \"value\": %.2f, \"unit\": \"us\"}, "
      "{\"name\": \"engine_placing_run_p99\", \"value\": %.2f, \"unit\": \"us\"}, "
      "{\"name\": \"engine_rounds_per_placing_run\", \"value\": %.2f, \"unit\": \"count\"}, "
      "{\"name\": \"engine_submit_median\", \"value\": %.2f, \"unit\": \"us\"}]}\n",
      Percentile(runs, 0.5), Percentile(runs, 0.99), Percentile(rounds, 0.5),
      Percentile(rounds, 0.99),
      static_cast<double>(sim.engine().counters().rounds) / static_cast<double>(rounds.size()),
      Percentile(submits, 0.5));
  return EXIT_SUCCESS;
}
