// Speed of what-ifs and of rounds. Prints {"figures": [{"name", "value", "unit"}]}; medians of
// repeated batches, one thread.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "daemon/sched/policy.h"
#include "tests/sim/snapshot_builder.h"

namespace slice {
namespace {

using sim::kMs;
using sim::kUs;

struct Figure {
  std::string name;
  double value;
  const char* unit;
};

// Instances of chained layers: each layer reads its weights (a few tensors), its KV piece and the
// activation before it.
sim::SnapshotBuilder Layers(size_t devices, size_t instances, size_t layers, bool placed) {
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
      if (placed) {
        spec.state = sim::OpState::kPlaced;
        // A hand-over now and then: one transfer every 32 ops or so.
        spec.device = static_cast<DeviceIndex>((home + (layer % 16 == 15 ? 1 : 0)) % devices);
      }
      before = builder.Op(spec);
    }
  }
  return builder;
}

template <typename Function>
double MedianMicroseconds(Function function) {
  // CPU time: a busy machine should not change the figure.
  const auto now_us = [] {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
  };
  std::vector<double> samples;
  for (int i = 0; i < 10; ++i) function();
  for (int i = 0; i < 31; ++i) {
    const double start = now_us();
    for (int k = 0; k < 20; ++k) function();
    samples.push_back((now_us() - start) / 20);
  }
  std::nth_element(samples.begin(), samples.begin() + 15, samples.end());
  return samples[15];
}

void OpsPerMs(size_t devices, size_t instances, size_t layers, bool placed, const char* name,
              std::vector<Figure>* figures) {
  const estimate::TransferEstimator transfers(devices);
  sim::Simulator simulator(transfers, {.horizon = 3600 * kSecond});
  sim::SnapshotBuilder builder = Layers(devices, instances, layers, placed);
  const sim::Snapshot& snapshot = builder.Build();
  sim::Timeline timeline;
  const double us = MedianMicroseconds([&] { simulator.Run(snapshot, {}, &timeline); });
  figures->push_back({name, static_cast<double>(snapshot.ops.size()) / us * 1000, "ops/ms"});
}

void Round(size_t devices, size_t instances, size_t layers, const char* name,
           std::vector<Figure>* figures) {
  const estimate::TransferEstimator transfers(devices);
  sim::Simulator simulator(transfers, {});
  std::unique_ptr<sched::Policy> policy = std::move(sched::MakePolicy("slice", &simulator).value());
  sim::SnapshotBuilder builder = Layers(devices, instances, layers, true);
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
  figures->push_back(
      {name, MedianMicroseconds([&] { (void)policy->Decide(snapshot, batch, 0); }), "us"});
}

}  // namespace
}  // namespace slice

int main() {
  using slice::Figure;
  std::vector<Figure> figures;
  slice::Round(2, 4, 8, "round_us_2_devices_40_ops", &figures);
  slice::Round(8, 31, 8, "round_us_8_devices_256_ops", &figures);
  slice::OpsPerMs(2, 8, 32, true, "simulated_ops_per_ms_256", &figures);
  slice::OpsPerMs(8, 32, 32, true, "simulated_ops_per_ms_1024", &figures);
  slice::OpsPerMs(2, 8, 32, false, "rollout_ops_per_ms_256", &figures);
  std::printf("{\"figures\": [");
  for (size_t i = 0; i < figures.size(); ++i) {
    std::printf("%s\n  {\"name\": \"%s\", \"value\": %.1f, \"unit\": \"%s\"}", i == 0 ? "" : ",",
                figures[i].name.c_str(), figures[i].value, figures[i].unit);
  }
  std::printf("\n]}\n");
  return 0;
}
