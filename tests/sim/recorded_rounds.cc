#include "tests/sim/recorded_rounds.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace slice::sched {

namespace {
constexpr size_t kWideDevices = 8;
}

std::vector<Round> RecordedRounds() {
  std::ifstream file(SLICE_ROUNDS_FILE);
  std::stringstream text;
  text << file.rdbuf();
  Result<std::vector<Round>> rounds = ParseRounds(text.str());
  if (!file.is_open() || !rounds.ok()) {
    std::fprintf(stderr, "%s: %s\n", SLICE_ROUNDS_FILE,
                 rounds.ok() ? "cannot be read" : rounds.status().ToString().c_str());
    return {};
  }
  return std::move(rounds).value();
}

Round Widen(const Round& round, size_t ops) {
  const sim::Snapshot& one = round.snapshot;
  Round wide = round;
  sim::Snapshot& s = wide.snapshot;
  const auto shift = [](uint64_t mask, size_t by) {
    return mask == ~uint64_t{0} ? mask : mask << by;
  };
  const size_t groups = std::max<size_t>(1, kWideDevices / one.devices.size());
  for (size_t copy_number = 1; s.ops.size() < ops; ++copy_number) {
    const bool own_devices = copy_number < groups;
    const size_t group = copy_number % groups;
    const auto op_base = static_cast<uint32_t>(s.ops.size());
    const auto tensor_base = static_cast<uint32_t>(s.tensors.size());
    const auto instance_base = static_cast<uint32_t>(s.instances.size());
    const auto use_base = static_cast<uint32_t>(s.uses.size());
    const auto edge_base = static_cast<uint32_t>(s.edges.size());
    const size_t device_base = group * one.devices.size();
    const size_t domain_base = group * one.domains.size();
    const auto index = [](uint32_t value, uint32_t base) {
      return value == sim::kNone ? sim::kNone : value + base;
    };
    if (own_devices) {
      for (sim::SnapDevice device : one.devices) {
        device.domain = static_cast<DomainIndex>(device.domain + domain_base);
        device.running = index(device.running, op_base);
        s.devices.push_back(device);
      }
      s.domains.insert(s.domains.end(), one.domains.begin(), one.domains.end());
    }
    for (sim::SnapInstance instance : one.instances) {
      instance.reserved_domains = shift(instance.reserved_domains, domain_base);
      s.instances.push_back(instance);
    }
    for (sim::SnapTensor tensor : one.tensors) {
      tensor.resident = shift(tensor.resident, domain_base);
      tensor.slots = shift(tensor.slots, domain_base);
      tensor.instance = index(tensor.instance, instance_base);
      s.tensors.push_back(tensor);
    }
    for (sim::SnapOp op : one.ops) {
      op.instance = index(op.instance, instance_base);
      if (op.device != kNoDevice) op.device = static_cast<DeviceIndex>(op.device + device_base);
      op.allowed_devices = shift(op.allowed_devices, device_base);
      if (op.state == sim::OpState::kRunning && !own_devices) op.state = sim::OpState::kIssued;
      op.reads_begin += use_base;
      op.reads_end += use_base;
      op.writes_begin += use_base;
      op.writes_end += use_base;
      op.successors_begin += edge_base;
      op.successors_end += edge_base;
      s.ops.push_back(op);
    }
    for (const uint32_t use : one.uses) s.uses.push_back(use + tensor_base);
    for (const uint32_t edge : one.edges) s.edges.push_back(edge + op_base);
    if (!own_devices) continue;
    for (sim::SnapTransfer copy : one.transfers) {
      copy.tensor += tensor_base;
      copy.source = static_cast<DomainIndex>(copy.source + domain_base);
      copy.destination = static_cast<DomainIndex>(copy.destination + domain_base);
      s.transfers.push_back(copy);
    }
  }
  return wide;
}

std::vector<sim::Candidate> CandidatesOf(const Round& round) {
  const sim::Snapshot& s = round.snapshot;
  std::vector<sim::Candidate> candidates;
  uint64_t devices = ~uint64_t{0};
  for (const sim::OpIndex op : round.batch) devices &= s.ops[op].allowed_devices;
  for (size_t d = 0; d < s.devices.size(); ++d) {
    if ((devices >> d & 1) != 0) candidates.push_back({static_cast<DeviceIndex>(d), 0});
  }
  std::stable_sort(candidates.begin(), candidates.end(), [&](const auto& a, const auto& b) {
    return (a.device == round.home) > (b.device == round.home);
  });
  if (s.ops[round.batch[0]].service_class == ServiceClass::kOffline)
    candidates.push_back({kNoDevice, s.now + kMillisecond});
  return candidates;
}

}  // namespace slice::sched
