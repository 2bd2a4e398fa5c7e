#include "tests/sim/random_snapshot.h"

#include <algorithm>

#include "tests/sim/snapshot_builder.h"

namespace slice::sim {
namespace {

class Maker {
 public:
  explicit Maker(uint64_t seed) : rng_(seed) {}

  RandomCase Make() {
    const size_t devices = Chance(5) ? Between(5, 64) : Between(1, 4);
    SnapshotBuilder builder(devices, 1'000 * kMs, int64_t{Between(0, 3) == 0 ? 20'000 : 1 << 30});
    Snapshot& raw = builder.raw();
    if (Chance(30)) {  // some devices share a domain
      for (SnapDevice& device : raw.devices)
        device.domain = static_cast<DomainIndex>(Between(0, devices - 1));
    }
    if (Chance(40)) {
      raw.kind_scale = {1.0, 0.37, 2.5};
      for (SnapDevice& device : raw.devices) device.kind = static_cast<uint8_t>(Between(0, 3));
    }
    for (SnapDevice& device : raw.devices) {
      if (Chance(20)) {
        device.phantom_from = raw.now + Time(0, 3);
        device.phantom_until = device.phantom_from + Time(0, 5);
      }
      if (Chance(10)) device.free_at = raw.now + Time(0, 4);
    }
    Retained(&builder, devices);
    const size_t instances = Between(1, 8);
    for (size_t i = 0; i < instances; ++i) Instance(&builder, devices);
    builder.Build();
    RandomCase result;
    result.rules.classes = !Chance(20);
    Copies(&raw, devices, result.rules.classes);
    result.snapshot = raw;
    for (OpIndex i = 0; i < raw.ops.size(); ++i) {
      if (raw.ops[i].state != OpState::kUnscheduled || !Chance(25)) continue;
      const DeviceIndex device =
          Chance(30) ? kNoDevice : static_cast<DeviceIndex>(Between(0, devices - 1));
      result.batch.push_back({i, device, Chance(30) ? raw.now + Time(0, 6) : 0});
      if (Chance(3)) result.batch.back().earliest = kNever;
    }
    result.rules.slices = !Chance(20);
    if (Chance(20)) result.options.horizon = Time(1, 20);
    if (Chance(20)) result.options.transfer_overhead = 0;
    result.options.memory_curve = true;
    return result;
  }

 private:
  uint64_t Between(uint64_t low, uint64_t high) {
    return std::uniform_int_distribution<uint64_t>(low, high)(rng_);
  }
  bool Chance(uint64_t percent) { return Between(1, 100) <= percent; }
  // Coarse steps make ties common.
  DurationNs Time(uint64_t low_ms, uint64_t high_ms) {
    return static_cast<DurationNs>(Between(low_ms * 4, high_ms * 4)) * 250 * kUs;
  }
  uint64_t Mask(size_t devices) {
    const uint64_t all = devices >= 64 ? ~uint64_t{0} : (uint64_t{1} << devices) - 1;
    if (Chance(2)) return 0;
    if (Chance(50)) return all;
    const uint64_t some = Between(0, UINT64_MAX) & all;
    return some != 0 ? some : all;
  }

  void Retained(SnapshotBuilder* builder, size_t devices) {
    for (uint64_t i = Between(0, 6); i > 0; --i) {
      const auto home = static_cast<DomainIndex>(Between(0, devices - 1));
      const auto bytes = static_cast<int64_t>(Between(1, 20'000));
      if (Chance(50)) {
        retained_.push_back(builder->Managed(bytes, home));
      } else {
        retained_.push_back(
            builder->Tensor(bytes, (uint64_t{1} << home) | (Chance(50) ? Mask(devices) : 0)));
        builder->tensor(retained_.back()).pinned = Chance(10);
      }
      if (Chance(10)) builder->tensor(retained_.back()).slots = Mask(devices);
    }
  }

  void Instance(SnapshotBuilder* builder, size_t devices) {
    const uint32_t instance = Chance(50) ? builder->Online() : builder->Offline();
    SnapInstance& settings = builder->instance(instance);
    settings.priority = static_cast<int32_t>(Between(0, 2)) - 1;
    if (Chance(30)) settings.reserved_domains = Mask(devices);
    if (Chance(40)) {
      settings.gap_p10 = Time(0, 1);
      settings.gap_p90 = settings.gap_p10 + Time(0, 3);
    }
    const uint64_t mask = Mask(devices);
    std::vector<TensorIndex> activations;
    std::vector<OpIndex> mine;
    for (uint64_t i = Between(1, 14); i > 0; --i) {
      OpSpec spec;
      spec.instance = instance;
      spec.duration = Time(0, 4) + static_cast<DurationNs>(Between(0, 1));
      spec.allowed = Chance(80) ? mask : Mask(devices);
      spec.order = Between(0, 5);
      spec.memory_bytes = static_cast<int64_t>(Between(0, 4'000));
      if (Chance(15)) spec.earliest = builder->now() + Time(0, 5);
      if (!mine.empty() && Chance(70)) spec.after.push_back(mine.back());
      if (!mine.empty() && Chance(30)) spec.after.push_back(mine[Between(0, mine.size() - 1)]);
      if (!activations.empty() && Chance(80)) {
        spec.reads.push_back(Chance(70) ? activations.back()
                                        : activations[Between(0, activations.size() - 1)]);
      }
      if (!retained_.empty() && Chance(60))
        spec.reads.push_back(retained_[Between(0, retained_.size() - 1)]);
      if (mine.empty() && Chance(50)) {  // made by an op that is done
        activations.push_back(builder->Activation(static_cast<int64_t>(Between(1, 9'000)), instance,
                                                  uint64_t{1} << Between(0, devices - 1)));
        spec.reads.push_back(activations.back());
      }
      if (Chance(80)) {
        activations.push_back(
            builder->Activation(static_cast<int64_t>(Between(1, 9'000)), instance));
        spec.writes.push_back(activations.back());
      }
      for (const TensorIndex tensor : spec.reads) {
        if (builder->tensor(tensor).managed && Chance(60)) spec.writes.push_back(tensor);
      }
      const auto op = static_cast<OpIndex>(builder->raw().ops.size());
      for (const TensorIndex tensor : spec.reads) Hazards(tensor, false, op, &spec.after);
      for (const TensorIndex tensor : spec.writes) Hazards(tensor, true, op, &spec.after);
      std::sort(spec.after.begin(), spec.after.end());
      spec.after.erase(std::unique(spec.after.begin(), spec.after.end()), spec.after.end());
      if (Chance(25)) {
        spec.state = Chance(50) ? OpState::kPlaced : OpState::kIssued;
        spec.device = static_cast<DeviceIndex>(Between(0, devices - 1));
      }
      const bool may_run = spec.after.empty() && Chance(40);
      mine.push_back(builder->Op(spec));
      const auto device = static_cast<DeviceIndex>(Between(0, devices - 1));
      if (may_run && builder->device(device).running == kNone)
        builder->Running(mine.back(), device, Time(0, 4));
    }
  }

  // Read after write, write after read and write after write.
  void Hazards(TensorIndex tensor, bool writes, OpIndex op, std::vector<OpIndex>* after) {
    if (accesses_.size() <= tensor) accesses_.resize(tensor + 1);
    for (const auto& [other, wrote] : accesses_[tensor]) {
      if (other != op && (writes || wrote)) after->push_back(other);
    }
    accesses_[tensor].emplace_back(op, writes);
  }

  // At most one copy of each class out of and into each domain under way (one in all where it gets
  // no class); the others wait.
  void Copies(Snapshot* raw, size_t devices, bool classes) {
    uint64_t sending[2] = {0, 0}, receiving[2] = {0, 0};
    for (TensorIndex tensor = 0; tensor < raw->tensors.size(); ++tensor) {
      if (raw->tensors[tensor].resident == 0 || raw->tensors[tensor].pinned || !Chance(15))
        continue;
      SnapTransfer copy;
      copy.tensor = tensor;
      copy.source = static_cast<DomainIndex>(std::countr_zero(raw->tensors[tensor].resident));
      copy.destination = static_cast<DomainIndex>(Between(0, devices - 1));
      copy.service_class = Chance(50) ? ServiceClass::kOnline : ServiceClass::kOffline;
      if (((raw->tensors[tensor].resident >> copy.destination) & 1) != 0) continue;
      const uint64_t from = uint64_t{1} << copy.source, to = uint64_t{1} << copy.destination;
      const size_t lane = classes ? static_cast<size_t>(copy.service_class) : 0;
      if ((sending[lane] & from) == 0 && (receiving[lane] & to) == 0 && Chance(60)) {
        copy.finish = raw->now + Time(0, 2);
        sending[lane] |= from;
        receiving[lane] |= to;
      }
      raw->transfers.push_back(copy);
    }
  }

  std::mt19937_64 rng_;
  std::vector<TensorIndex> retained_;
  std::vector<std::vector<std::pair<OpIndex, bool>>> accesses_;  // by tensor: op, writes
};

}  // namespace

RandomCase MakeRandomCase(uint64_t seed) { return Maker(seed).Make(); }

estimate::TransferEstimator MakeRandomTransfers(uint64_t seed, size_t domain_count) {
  std::mt19937_64 rng(seed);
  estimate::TransferEstimator transfers(domain_count);
  for (size_t from = 0; from < domain_count; ++from) {
    for (size_t to = 0; to < domain_count; ++to) {
      if (from == to || rng() % 3 == 0) continue;
      const auto scale = static_cast<DurationNs>(1 + rng() % 200);
      for (const int64_t bytes : {1'000, 5'000, 20'000}) {
        transfers.Observe(static_cast<DomainIndex>(from), static_cast<DomainIndex>(to), bytes,
                          10 * kUs + bytes * scale);
      }
    }
  }
  return transfers;
}

}  // namespace slice::sim
