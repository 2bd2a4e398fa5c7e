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

void OpsPerMs(uint32_t ops, const std::string& size, std::vector<Figure>* figures) {
  constexpr uint32_t kDevices = 8;
  const estimate::TransferEstimator transfers(kDevices);
  const sim::Options options{3600 * kSecond, 30 * kMicrosecond, {}};
  sim::Simulator simulator(transfers, options);
  const sim::Snapshot snapshot = sim::MakeWorkload(ops, kDevices, kSeed);
  const auto count = static_cast<double>(snapshot.ops.size());
  std::vector<sim::Outcome> outcomes;
  const std::vector<sim::Candidate> as_it_is(1);
  sim::Timeline timeline;
  simulator.Prepare(snapshot, {}, {});
  const Pair pair =
      MedianPair([&] { simulator.Evaluate(as_it_is, nullptr, &outcomes); },
                 [&] { sim::NaiveRun(snapshot, {}, {}, options, transfers, &timeline, false); },
                 std::max<uint32_t>(1, 20'000 / ops));
  figures->push_back({"sim_ops_per_ms_" + size, count / pair.a * 1000, "ops/ms"});
  figures->push_back({"naive_ops_per_ms_" + size, count / pair.b * 1000, "ops/ms"});
  figures->push_back({"sim_over_naive_ratio_" + size, pair.ratio, "x"});
  if (ops == 1'000) {
    const double us = MedianUs([&] { simulator.Prepare(snapshot, {}, {}); });
    figures->push_back({"sim_prepare_ns_per_op", us / count * 1000, "ns"});
  }
  if (ops == 100'000)
    figures->push_back(
        {"sim_bytes_per_op_100k", static_cast<double>(simulator.bytes()) / count, "bytes"});
}

// Cost per op of 64 devices over that of 8.
void Devices(std::vector<Figure>* figures) {
  const estimate::TransferEstimator transfers(64);
  const sim::Options options{3600 * kSecond, 30 * kMicrosecond, {}};
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

// What-ifs a millisecond in the demo's rounds, each in a window of about `ops` ops; and how much
// faster than cloning the snapshot for each candidate and simulating it naively to its end, with
// the preparation counted.
void WhatIfs(size_t ops, bool against_clone, std::vector<Figure>* figures) {
  const estimate::TransferEstimator transfers(kDevicesMax);
  const sim::Options options;
  sim::Simulator simulator(transfers, options);
  std::vector<sched::Round> rounds;
  std::vector<std::vector<sim::Candidate>> candidates;
  std::vector<std::vector<uint8_t>> moves;
  size_t count = 0, live = 0;
  for (const sched::Round& round : sched::RecordedRounds()) {
    if (sched::CandidatesOf(round).size() < 2) continue;
    rounds.push_back(sched::Widen(round, ops));
    candidates.push_back(sched::CandidatesOf(round));
    moves.emplace_back(candidates.back().size(), uint8_t{0});
    count += candidates.back().size();
    live += rounds.back().snapshot.ops.size();
  }
  if (rounds.empty()) return;
  sched::Scorer scorer;
  std::vector<sim::Outcome> outcomes;
  const auto evaluate = [&](size_t i, const sched::Round& round) {
    scorer.Start(round.snapshot, round.batch, round.snapshot.now + options.horizon, moves[i]);
    simulator.Evaluate(candidates[i], &scorer, &outcomes);
  };
  double us = 0;
  for (size_t i = 0; i < rounds.size(); ++i) {
    simulator.Prepare(rounds[i].snapshot, rounds[i].batch, {});
    us += MedianUs([&] { evaluate(i, rounds[i]); });
  }
  const std::string size = std::to_string(ops);
  figures->push_back(
      {"whatifs_per_ms_" + size, static_cast<double>(count) / us * 1000, "what-ifs/ms"});
  figures->push_back({"whatif_live_ops_" + size,
                      static_cast<double>(live) / static_cast<double>(rounds.size()), "ops"});
  if (!against_clone) return;
  sim::Timeline timeline;
  std::vector<sim::Placement> placements;
  const Pair pair = MedianPair(
      [&] {
        for (size_t i = 0; i < rounds.size(); ++i) {
          simulator.Prepare(rounds[i].snapshot, rounds[i].batch, {});
          evaluate(i, rounds[i]);
        }
      },
      [&] {
        for (size_t i = 0; i < rounds.size(); ++i) {
          for (const sim::Candidate& candidate : candidates[i]) {
            const sim::Snapshot clone = rounds[i].snapshot;
            placements.clear();
            for (const sim::OpIndex op : rounds[i].batch)
              placements.push_back({op, candidate.device, candidate.earliest});
            sim::NaiveRun(clone, placements, {}, options, transfers, &timeline, false);
          }
        }
      },
      1);
  figures->push_back({"whatif_over_clone_ratio_" + size, pair.ratio, "x"});
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
  slice::Devices(&figures);
  slice::WhatIfs(256, false, &figures);
  slice::WhatIfs(1'024, true, &figures);
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
