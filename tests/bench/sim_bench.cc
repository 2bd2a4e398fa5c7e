// Speed of what-ifs and of rounds. Prints {"figures": [{"name", "value", "unit"}]}; medians of
// repeated batches, one thread.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "daemon/sched/policy.h"
#include "daemon/sched/score.h"
#include "tests/sim/naive_simulator.h"
#include "tests/sim/recorded_rounds.h"
#include "tests/sim/snapshot_builder.h"
#include "tests/sim/workload.h"

namespace slice {
namespace {

using sim::kMs;
using sim::kUs;

struct Figure {
  std::string name;
  double value;
  const char* unit;
};

// CPU time: a busy machine should not change the figure.
double NowUs() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

double Median(std::vector<double> samples) {
  std::nth_element(samples.begin(),
                   samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2),
                   samples.end());
  return samples[samples.size() / 2];
}

double TimeUs(const std::function<void()>& function, size_t times) {
  const double start = NowUs();
  for (size_t i = 0; i < times; ++i) function();
  return (NowUs() - start) / static_cast<double>(times);
}

double MedianUs(const std::function<void()>& function) {
  std::vector<double> samples;
  TimeUs(function, 5);
  for (int i = 0; i < 31; ++i) samples.push_back(TimeUs(function, 20));
  return Median(samples);
}

struct Pair {
  double a, b, ratio;  // microseconds, and the median of b / a
};
// Interleaved, so that a slow moment of the machine meets both.
Pair MedianPair(const std::function<void()>& a, const std::function<void()>& b, size_t times) {
  std::vector<double> as, bs, ratios;
  TimeUs(a, times);
  TimeUs(b, times);
  for (int i = 0; i < 21; ++i) {
    as.push_back(TimeUs(a, times));
    bs.push_back(TimeUs(b, times));
    ratios.push_back(bs.back() / as.back());
  }
  return {Median(as), Median(bs), Median(ratios)};
}

constexpr uint64_t kSeed = 1;

// Three ways to say how fast one timeline is. `sim`: a prepared snapshot, as a round's candidates
// meet it. `sim_run`: the whole call with its preparation and its timeline, as a prediction of
// everything that is queued makes it. `naive`: the same call of the naive simulator.
void OpsPerMs(uint32_t ops, const std::string& size, std::vector<Figure>* figures) {
  constexpr uint32_t kDevices = 8;
  const estimate::TransferEstimator transfers(kDevices);
  sim::Options options;
  options.horizon = 3600 * kSecond;
  sim::Simulator simulator(transfers, options);
  const sim::Snapshot snapshot = sim::MakeWorkload(ops, kDevices, kSeed);
  const auto count = static_cast<double>(snapshot.ops.size());
  std::vector<sim::Outcome> outcomes;
  const std::vector<sim::Candidate> as_it_is(1);
  sim::Timeline timeline;
  simulator.Prepare(snapshot, {}, {});
  const size_t times = std::max<uint32_t>(1, 20'000 / ops);
  const auto naive = [&] { sim::NaiveRun(snapshot, {}, {}, options, transfers, &timeline); };
  const Pair pair =
      MedianPair([&] { simulator.Evaluate(as_it_is, nullptr, &outcomes); }, naive, times);
  sim::Timeline run_timeline;
  const Pair run = MedianPair([&] { simulator.Run(snapshot, {}, &run_timeline); }, naive, times);
  figures->push_back({"sim_ops_per_ms_" + size, count / pair.a * 1000, "ops/ms"});
  figures->push_back({"naive_ops_per_ms_" + size, count / pair.b * 1000, "ops/ms"});
  figures->push_back({"sim_over_naive_ratio_" + size, pair.ratio, "x"});
  figures->push_back({"sim_run_ops_per_ms_" + size, count / run.a * 1000, "ops/ms"});
  figures->push_back({"run_over_naive_ratio_" + size, run.ratio, "x"});
  if (ops == 1'000) {
    const double us = MedianUs([&] { simulator.Prepare(snapshot, {}, {}); });
    figures->push_back({"sim_prepare_ns_per_op", us / count * 1000, "ns"});
  }
  if (ops == 100'000)
    figures->push_back(
        {"sim_bytes_per_op_100k", static_cast<double>(simulator.bytes()) / count, "bytes"});
}

// Windows that nobody has scheduled yet: the rollout chooses the device of each op.
void Rollouts(std::vector<Figure>* figures) {
  constexpr uint32_t kDevices = 8;
  const estimate::TransferEstimator transfers(kDevices);
  sim::Options options;
  options.horizon = 3600 * kSecond;
  sim::Simulator simulator(transfers, options);
  sim::Snapshot snapshot = sim::MakeWorkload(1'000, kDevices, kSeed);
  for (sim::SnapOp& op : snapshot.ops) {
    op.state = sim::OpState::kUnscheduled;
    op.device = kNoDevice;
  }
  const auto count = static_cast<double>(snapshot.ops.size());
  std::vector<sim::Outcome> outcomes;
  const std::vector<sim::Candidate> as_it_is(1);
  sim::Timeline timeline;
  simulator.Prepare(snapshot, {}, {});
  const Pair pair =
      MedianPair([&] { simulator.Evaluate(as_it_is, nullptr, &outcomes); },
                 [&] { sim::NaiveRun(snapshot, {}, {}, options, transfers, &timeline); }, 10);
  figures->push_back({"sim_rollout_ops_per_ms_1k", count / pair.a * 1000, "ops/ms"});
  figures->push_back({"rollout_over_naive_ratio_1k", pair.ratio, "x"});
}

// Cost per op of 64 devices over that of 8.
void Devices(std::vector<Figure>* figures) {
  const estimate::TransferEstimator transfers(64);
  sim::Options options;
  options.horizon = 3600 * kSecond;
  sim::Simulator few(transfers, options), many(transfers, options);
  const sim::Snapshot on_8 = sim::MakeWorkload(10'000, 8, kSeed);
  const sim::Snapshot on_64 = sim::MakeWorkload(10'000, 64, kSeed);
  few.Prepare(on_8, {}, {});
  many.Prepare(on_64, {}, {});
  std::vector<sim::Outcome> outcomes;
  const std::vector<sim::Candidate> as_it_is(1);
  const Pair pair = MedianPair([&] { few.Evaluate(as_it_is, nullptr, &outcomes); },
                               [&] { many.Evaluate(as_it_is, nullptr, &outcomes); }, 4);
  figures->push_back({"sim_cost_64_over_8_devices", pair.ratio, "x"});
}

// A round of the scheduler as the measurements see it.
struct WhatIf {
  sched::Round round;
  std::vector<sim::Candidate> candidates;
  std::vector<uint8_t> moves;
};

void Evaluate(const WhatIf& what_if, sim::Simulator* simulator, sched::Scorer* scorer,
              std::vector<sim::Outcome>* outcomes) {
  const sim::Snapshot& snapshot = what_if.round.snapshot;
  scorer->Start(snapshot, what_if.round.batch, snapshot.now + simulator->options().horizon,
                what_if.moves);
  simulator->Evaluate(what_if.candidates, scorer, outcomes);
}

// What-ifs a millisecond over a window of `ops` operators: a batch of up to eight, ready at once
// (so there is no common prefix to share), goes to one of five devices or waits.
void WhatIfs(uint32_t ops, std::vector<Figure>* figures) {
  constexpr uint32_t kDevices = 8, kCandidates = 5, kBatch = 8;
  const estimate::TransferEstimator transfers(kDevices);
  sim::Simulator simulator(transfers, {});
  WhatIf what_if;
  sim::Snapshot& snapshot = what_if.round.snapshot;
  snapshot = sim::MakeWorkload(ops, kDevices, kSeed);
  // The head of the last chain, an offline one, is what is to be placed.
  const auto first = static_cast<sim::OpIndex>(snapshot.ops.size() - snapshot.ops.size() / 64);
  for (uint32_t i = 0; i < std::min<uint32_t>(kBatch, ops / 64); ++i) {
    snapshot.ops[first + i].state = sim::OpState::kUnscheduled;
    what_if.round.batch.push_back(first + i);
  }
  for (DeviceIndex d = 0; d < kCandidates; ++d) what_if.candidates.push_back({d, 0});
  what_if.candidates.push_back({kNoDevice, snapshot.now + kMs});
  what_if.moves.assign(what_if.candidates.size(), 0);
  sched::Scorer scorer;
  std::vector<sim::Outcome> outcomes;
  simulator.Prepare(snapshot, what_if.round.batch, {});
  const double us = MedianUs([&] { Evaluate(what_if, &simulator, &scorer, &outcomes); });
  const double to_end_us =
      MedianUs([&] { simulator.Evaluate(what_if.candidates, nullptr, &outcomes); });
  const auto count = static_cast<double>(what_if.candidates.size());
  const std::string size = std::to_string(ops);
  figures->push_back({"whatifs_per_ms_" + size, count / us * 1000, "what-ifs/ms"});
  figures->push_back({"whatifs_to_end_per_ms_" + size, count / to_end_us * 1000, "what-ifs/ms"});
}

// How much faster than cloning the snapshot for each candidate and simulating it naively to its
// end, in the demo's rounds with windows of 1,024 ops; the preparation counts.
void OverClone(std::vector<Figure>* figures) {
  const estimate::TransferEstimator transfers(kDevicesMax);
  sim::Simulator simulator(transfers, {});
  std::vector<WhatIf> what_ifs;
  for (const sched::Round& round : sched::RecordedRounds()) {
    const std::vector<sim::Candidate> candidates = sched::CandidatesOf(round);
    if (candidates.size() < 2) continue;
    what_ifs.push_back(
        {sched::Widen(round, 1'024), candidates, std::vector<uint8_t>(candidates.size(), 0)});
  }
  sched::Scorer scorer;
  std::vector<sim::Outcome> outcomes;
  sim::Timeline timeline;
  std::vector<sim::Placement> placements;
  const Pair pair = MedianPair(
      [&] {
        for (const WhatIf& what_if : what_ifs) {
          simulator.Prepare(what_if.round.snapshot, what_if.round.batch, {});
          Evaluate(what_if, &simulator, &scorer, &outcomes);
        }
      },
      [&] {
        for (const WhatIf& what_if : what_ifs) {
          for (const sim::Candidate& candidate : what_if.candidates) {
            const sim::Snapshot clone = what_if.round.snapshot;
            placements.clear();
            for (const sim::OpIndex op : what_if.round.batch)
              placements.push_back({op, candidate.device, candidate.earliest});
            sim::NaiveRun(clone, placements, {}, simulator.options(), transfers, &timeline);
          }
        }
      },
      1);
  figures->push_back({"whatif_over_clone_ratio_1024", pair.ratio, "x"});
}

// The policy's whole decision in the demo's rounds as they were recorded.
void DemoRounds(std::vector<Figure>* figures) {
  const estimate::TransferEstimator transfers(kDevicesMax);
  sim::Simulator simulator(transfers, {});
  std::unique_ptr<sched::Policy> policy = std::move(sched::MakePolicy("slice", &simulator).value());
  const std::vector<sched::Round> rounds = sched::RecordedRounds();
  const double us = MedianUs([&] {
    for (const sched::Round& round : rounds)
      (void)policy->Decide(round.snapshot, round.batch, round.home);
  });
  figures->push_back(
      {"round_us_demo", us / static_cast<double>(std::max<size_t>(1, rounds.size())), "us"});
}

// Instances of chained layers: each layer reads its weights (a few tensors), its KV piece and the
// activation before it.
sim::SnapshotBuilder Layers(size_t devices, size_t instances, size_t layers) {
  sim::SnapshotBuilder builder(devices);
  const uint64_t all = devices >= 64 ? ~uint64_t{0} : (uint64_t{1} << devices) - 1;
  std::vector<std::vector<sim::TensorIndex>> weights(layers);
  for (size_t layer = 0; layer < layers; ++layer) {
    for (int i = 0; i < 4; ++i) weights[layer].push_back(builder.Tensor(4 << 20, all));
  }
  for (size_t i = 0; i < instances; ++i) {
    const auto home = static_cast<DeviceIndex>(i % devices);
    const uint32_t instance =
        i % 2 == 0 ? builder.Online(builder.now() + 50 * kMs) : builder.Offline();
    builder.instance(instance).reserved_domains = uint64_t{1} << home;
    sim::TensorIndex activation = builder.Activation(64 << 10, instance, uint64_t{1} << home);
    sim::OpIndex before = 0;
    for (size_t layer = 0; layer < layers; ++layer) {
      sim::OpSpec spec;
      spec.instance = instance;
      spec.duration = (i % 2 == 0 ? 200 : 500) * kUs + static_cast<DurationNs>(layer * 37 + i * 11);
      spec.reads = weights[layer];
      spec.reads.push_back(builder.Managed(1 << 20, home));
      spec.writes.push_back(spec.reads.back());
      spec.reads.push_back(activation);
      activation = builder.Activation(64 << 10, instance);
      spec.writes.push_back(activation);
      spec.memory_bytes = 64 << 10;
      if (layer > 0) spec.after = {before};
      spec.state = sim::OpState::kPlaced;
      // A hand-over now and then: one transfer every 32 ops or so.
      spec.device = static_cast<DeviceIndex>((home + (layer % 16 == 15 ? 1 : 0)) % devices);
      before = builder.Op(spec);
    }
  }
  return builder;
}

void Round(size_t devices, size_t instances, size_t layers, const char* name,
           std::vector<Figure>* figures) {
  const estimate::TransferEstimator transfers(devices);
  sim::Simulator simulator(transfers, {});
  std::unique_ptr<sched::Policy> policy = std::move(sched::MakePolicy("slice", &simulator).value());
  sim::SnapshotBuilder builder = Layers(devices, instances, layers);
  const uint32_t offline = builder.Offline();
  std::vector<sim::OpIndex> batch;
  for (int i = 0; i < 8; ++i) {
    sim::OpSpec spec;
    spec.instance = offline;
    spec.duration = 2 * kMs;
    spec.reads = {builder.Managed(1 << 20, 0)};
    spec.writes = spec.reads;
    if (i > 0) spec.after = {batch.back()};
    batch.push_back(builder.Op(spec));
  }
  const sim::Snapshot& snapshot = builder.Build();
  figures->push_back({name, MedianUs([&] { (void)policy->Decide(snapshot, batch, 0); }), "us"});
}

}  // namespace
}  // namespace slice

int main() {
  using slice::Figure;
  std::vector<Figure> figures;
  slice::OpsPerMs(1'000, "1k", &figures);
  slice::OpsPerMs(10'000, "10k", &figures);
  slice::OpsPerMs(100'000, "100k", &figures);
  slice::Rollouts(&figures);
  slice::Devices(&figures);
  slice::WhatIfs(256, &figures);
  slice::WhatIfs(1'024, &figures);
  slice::OverClone(&figures);
  slice::DemoRounds(&figures);
  slice::Round(2, 4, 8, "round_us_2_devices_40_ops", &figures);
  slice::Round(8, 31, 8, "round_us_8_devices_256_ops", &figures);
  std::printf("{\"figures\": [");
  for (size_t i = 0; i < figures.size(); ++i) {
    std::printf("%s\n  {\"name\": \"%s\", \"value\": %.2f, \"unit\": \"%s\"}", i == 0 ? "" : ",",
                figures[i].name.c_str(), figures[i].value, figures[i].unit);
  }
  std::printf("\n]}\n");
  return 0;
}
