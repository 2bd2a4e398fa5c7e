#include "tests/sim/workload.h"

#include <algorithm>
#include <random>
#include <vector>

#include "tests/sim/snapshot_builder.h"

namespace slice::sim {
namespace {

constexpr uint32_t kChains = 64;
constexpr uint32_t kLayers = 32;
constexpr uint32_t kHandOver = 32;
constexpr int64_t kActivationBytes = 64 << 10;
constexpr int64_t kPieceBytes = 1 << 20;

}  // namespace

Snapshot MakeWorkload(uint32_t ops, uint32_t devices, uint64_t seed) {
  std::mt19937_64 rng(seed);
  SnapshotBuilder builder(devices);
  const uint64_t all = devices >= 64 ? ~uint64_t{0} : (uint64_t{1} << devices) - 1;
  std::vector<TensorIndex> weights;
  for (uint32_t i = 0; i < kLayers; ++i) weights.push_back(builder.Tensor(4 << 20, all));
  const uint32_t length = std::max<uint32_t>(1, ops / kChains);
  for (uint32_t chain = 0; chain < kChains; ++chain) {
    const uint32_t instance = chain % 2 == 0 ? builder.Online() : builder.Offline();
    uint32_t device = chain % devices;
    TensorIndex activation = builder.Activation(kActivationBytes, instance, uint64_t{1} << device);
    OpIndex before = 0;
    for (uint32_t i = 0; i < length; ++i) {
      if (devices > 1 && rng() % kHandOver == 0) device = (device + 1) % devices;
      OpSpec spec;
      spec.instance = instance;
      spec.state = OpState::kPlaced;
      spec.device = static_cast<DeviceIndex>(device);
      spec.duration = static_cast<DurationNs>(20'000 + rng() % 180'000);
      spec.order = uint64_t{chain} << 20 | i;
      const TensorIndex piece = builder.Managed(kPieceBytes, spec.device);
      spec.reads = {activation, weights[i % kLayers], piece};
      activation = builder.Activation(kActivationBytes, instance);
      spec.writes = {activation, piece};
      spec.memory_bytes = kActivationBytes;
      if (i > 0) spec.after = {before};
      before = builder.Op(spec);
    }
  }
  return builder.Build();
}

}  // namespace slice::sim
