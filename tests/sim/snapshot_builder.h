// Builds snapshots for tests of the simulator and the policies, in the order in which a person
// would describe them.
#pragma once

#include <vector>

#include "daemon/sim/snapshot.h"

namespace slice::sim {

inline constexpr DurationNs kMs = kMillisecond;
inline constexpr DurationNs kUs = kMicrosecond;

struct OpSpec {
  uint32_t instance = 0;
  DurationNs duration = kMs;
  uint64_t allowed = ~uint64_t{0};
  OpState state = OpState::kUnscheduled;
  DeviceIndex device = kNoDevice;
  TimeNs earliest = 0;
  std::vector<OpIndex> after;
  std::vector<TensorIndex> reads, writes;
  int64_t memory_bytes = 0;
  uint64_t order = UINT64_MAX;  // UINT64_MAX: order of creation
};

class SnapshotBuilder {
 public:
  // `devices` devices, each in a domain of its own with `free_bytes`.
  explicit SnapshotBuilder(size_t devices, TimeNs now = 1'000 * kMs,
                           int64_t free_bytes = int64_t{1} << 40) {
    snapshot_.now = now;
    for (size_t i = 0; i < devices; ++i) {
      SnapDevice device;
      device.domain = static_cast<DomainIndex>(i);
      device.free_at = now;
      snapshot_.devices.push_back(device);
      snapshot_.domains.push_back({free_bytes});
    }
  }

  SnapDevice& device(size_t index) { return snapshot_.devices[index]; }
  SnapDomain& domain(size_t index) { return snapshot_.domains[index]; }
  SnapInstance& instance(size_t index) { return snapshot_.instances[index]; }
  SnapOp& op(size_t index) { return snapshot_.ops[index]; }
  SnapTensor& tensor(size_t index) { return snapshot_.tensors[index]; }
  Snapshot& raw() { return snapshot_; }
  TimeNs now() const { return snapshot_.now; }

  uint32_t Instance(ServiceClass service_class, TimeNs deadline = kNever) {
    SnapInstance instance;
    instance.service_class = service_class;
    instance.arrival = snapshot_.now;
    instance.deadline = deadline;
    snapshot_.instances.push_back(instance);
    return static_cast<uint32_t>(snapshot_.instances.size() - 1);
  }
  uint32_t Online(TimeNs deadline = kNever) { return Instance(ServiceClass::kOnline, deadline); }
  uint32_t Offline() { return Instance(ServiceClass::kOffline); }

  TensorIndex Tensor(int64_t bytes, uint64_t resident) {
    SnapTensor tensor;
    tensor.bytes = bytes;
    tensor.resident = resident;
    snapshot_.tensors.push_back(tensor);
    return static_cast<TensorIndex>(snapshot_.tensors.size() - 1);
  }
  TensorIndex Managed(int64_t bytes, DomainIndex home) {
    const TensorIndex index = Tensor(bytes, uint64_t{1} << home);
    snapshot_.tensors[index].managed = true;
    snapshot_.tensors[index].slots = uint64_t{1} << home;
    return index;
  }
  TensorIndex Activation(int64_t bytes, uint32_t instance, uint64_t resident = 0) {
    const TensorIndex index = Tensor(bytes, resident);
    snapshot_.tensors[index].instance = instance;
    return index;
  }

  OpIndex Op(const OpSpec& spec) {
    SnapOp op;
    op.instance = spec.instance;
    op.state = spec.state;
    op.device = spec.device;
    op.service_class = snapshot_.instances[spec.instance].service_class;
    op.priority = snapshot_.instances[spec.instance].priority;
    op.order = spec.order == UINT64_MAX ? snapshot_.ops.size() : spec.order;
    op.earliest = spec.earliest;
    op.duration = spec.duration;
    op.allowed_devices = spec.allowed;
    op.memory_bytes = spec.memory_bytes;
    snapshot_.ops.push_back(op);
    specs_.push_back(spec);
    return static_cast<OpIndex>(snapshot_.ops.size() - 1);
  }
  // A chain of `count` ops of one instance; returns its ops.
  std::vector<OpIndex> Chain(OpSpec spec, size_t count) {
    std::vector<OpIndex> ops;
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) spec.after = {ops.back()};
      ops.push_back(Op(spec));
    }
    return ops;
  }
  // The op runs on the device and ends `left` from now.
  void Running(OpIndex op, DeviceIndex device, DurationNs left) {
    snapshot_.ops[op].state = OpState::kRunning;
    snapshot_.ops[op].device = device;
    snapshot_.devices[device].running = op;
    snapshot_.devices[device].free_at = snapshot_.now + left;
  }

  // Edges, uses and counts from the specs. May be called again after more was added.
  const Snapshot& Build() {
    snapshot_.edges.clear();
    snapshot_.uses.clear();
    for (SnapTensor& tensor : snapshot_.tensors) tensor.consumers = 0;
    std::vector<std::vector<OpIndex>> successors(specs_.size());
    for (size_t i = 0; i < specs_.size(); ++i) {
      SnapOp& op = snapshot_.ops[i];
      op.pending = static_cast<uint32_t>(specs_[i].after.size());
      for (const OpIndex before : specs_[i].after)
        successors[before].push_back(static_cast<OpIndex>(i));
      op.reads_begin = static_cast<uint32_t>(snapshot_.uses.size());
      for (const TensorIndex tensor : specs_[i].reads) {
        snapshot_.uses.push_back(tensor);
        ++snapshot_.tensors[tensor].consumers;
      }
      op.reads_end = op.writes_begin = static_cast<uint32_t>(snapshot_.uses.size());
      snapshot_.uses.insert(snapshot_.uses.end(), specs_[i].writes.begin(), specs_[i].writes.end());
      op.writes_end = static_cast<uint32_t>(snapshot_.uses.size());
    }
    for (size_t i = 0; i < specs_.size(); ++i) {
      snapshot_.ops[i].successors_begin = static_cast<uint32_t>(snapshot_.edges.size());
      snapshot_.edges.insert(snapshot_.edges.end(), successors[i].begin(), successors[i].end());
      snapshot_.ops[i].successors_end = static_cast<uint32_t>(snapshot_.edges.size());
    }
    return snapshot_;
  }

 private:
  Snapshot snapshot_;
  std::vector<OpSpec> specs_;
};

}  // namespace slice::sim
