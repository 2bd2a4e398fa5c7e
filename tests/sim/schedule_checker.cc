#include "tests/sim/schedule_checker.h"

#include <algorithm>
#include <vector>

namespace slice::sim {
namespace {

std::string Wrong(const char* what, size_t op) {
  return std::string(what) + ", op " + std::to_string(op);
}

}  // namespace

std::string CheckSchedule(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules,
                          const Timeline& timeline) {
  std::vector<DeviceIndex> placed(snapshot.ops.size(), kNoDevice);
  std::vector<TimeNs> earliest(snapshot.ops.size());
  for (size_t i = 0; i < snapshot.ops.size(); ++i) {
    if (snapshot.ops[i].state != OpState::kUnscheduled) placed[i] = snapshot.ops[i].device;
    earliest[i] = snapshot.ops[i].earliest;
  }
  for (const Placement& placement : batch) {
    placed[placement.op] = placement.device;
    earliest[placement.op] = std::max(earliest[placement.op], placement.earliest);
  }
  for (size_t d = 0; d < snapshot.devices.size(); ++d) {
    std::vector<OpIndex> here;
    const SnapDevice& device = snapshot.devices[d];
    for (OpIndex i = 0; i < snapshot.ops.size(); ++i) {
      if (timeline.start[i] != kNever && timeline.device[i] == d) here.push_back(i);
    }
    std::sort(here.begin(), here.end(), [&](OpIndex a, OpIndex b) {
      return std::pair(timeline.start[a], timeline.finish[a]) <
             std::pair(timeline.start[b], timeline.finish[b]);
    });
    TimeNs free_at = snapshot.now;
    for (const OpIndex op : here) {
      if (timeline.start[op] < free_at) return Wrong("two ops at a time on a device", op);
      free_at = timeline.finish[op];
      if (device.running == op) continue;
      if (timeline.finish[op] - timeline.start[op] !=
          OpDuration(snapshot, op, static_cast<DeviceIndex>(d))) {
        return Wrong("wrong duration", op);
      }
      const bool offline = snapshot.ops[op].service_class == ServiceClass::kOffline;
      if (rules.slices && rules.classes && offline && timeline.start[op] < device.phantom_until &&
          timeline.finish[op] > device.phantom_from) {
        return Wrong("an offline op runs across a phantom", op);
      }
    }
  }
  for (OpIndex i = 0; i < snapshot.ops.size(); ++i) {
    if ((timeline.start[i] == kNever) != (timeline.finish[i] == kNever))
      return Wrong("started but not ended", i);
    if (timeline.start[i] == kNever) continue;
    const DeviceIndex device = timeline.device[i];
    if (device >= snapshot.devices.size()) return Wrong("no such device", i);
    if (snapshot.devices[device].running == i) continue;
    if (placed[i] != kNoDevice && placed[i] != device) return Wrong("not where it was placed", i);
    if (placed[i] == kNoDevice && ((snapshot.ops[i].allowed_devices >> device) & 1) == 0) {
      return Wrong("not allowed there", i);
    }
    if (timeline.start[i] < earliest[i]) return Wrong("before its window", i);
  }
  for (OpIndex i = 0; i < snapshot.ops.size(); ++i) {
    for (uint32_t e = snapshot.ops[i].successors_begin; e < snapshot.ops[i].successors_end; ++e) {
      const OpIndex successor = snapshot.edges[e];
      if (timeline.start[successor] != kNever && timeline.start[successor] < timeline.finish[i]) {
        return Wrong("before its predecessor", successor);
      }
    }
  }
  return {};
}

}  // namespace slice::sim
