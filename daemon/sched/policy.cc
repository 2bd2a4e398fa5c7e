#include "daemon/sched/policy.h"

#include <algorithm>
#include <bit>

#include "daemon/sched/policies.h"

namespace slice::sched {

Result<std::unique_ptr<Policy>> MakePolicy(std::string_view name, sim::Simulator* simulator) {
  std::unique_ptr<Policy> policy;
  if (name == "slice") {
    policy = std::make_unique<SlicePolicy>("slice", true, simulator);
  } else if (name == "online-only") {
    policy = std::make_unique<SlicePolicy>("online-only", false, simulator);
  } else if (name == "fifo") {
    policy = std::make_unique<FifoPolicy>(simulator);
  } else if (name == "priority") {
    policy = std::make_unique<PriorityPolicy>(simulator);
  } else {
    return Error(StatusCode::kInvalid,
                 "policy '%.*s' is unknown: use slice, fifo, online-only or priority",
                 static_cast<int>(std::min<size_t>(name.size(), 64)), name.data());
  }
  return policy;
}

BatchDevices DevicesFor(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch) {
  BatchDevices result;
  const size_t count = snapshot.devices.size();
  uint64_t devices = count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  for (const sim::OpIndex op : batch) {
    devices &= snapshot.ops[op].allowed_devices;
    if (devices == 0) break;
    result.devices = devices;
    ++result.op_count;
  }
  return result;
}

int64_t BytesToMove(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                    DeviceIndex device, int64_t* managed_bytes) {
  const uint64_t here = uint64_t{1} << snapshot.devices[device].domain;
  int64_t bytes = 0;
  *managed_bytes = 0;
  for (const sim::OpIndex index : batch) {
    const sim::SnapOp& op = snapshot.ops[index];
    for (uint32_t i = op.reads_begin; i < op.reads_end; ++i) {
      const sim::SnapTensor& tensor = snapshot.tensors[snapshot.uses[i]];
      if (tensor.resident == 0 || (tensor.resident & here) != 0) continue;
      bytes += tensor.bytes;
      if (tensor.managed) *managed_bytes += tensor.bytes;
    }
  }
  return bytes;
}

void QueuedWork(const sim::Snapshot& snapshot, std::vector<DurationNs>* by_device) {
  by_device->assign(snapshot.devices.size(), 0);
  for (size_t i = 0; i < snapshot.devices.size(); ++i) {
    (*by_device)[i] = std::max<DurationNs>(0, snapshot.devices[i].free_at - snapshot.now);
  }
  for (sim::OpIndex i = 0; i < snapshot.ops.size(); ++i) {
    const sim::SnapOp& op = snapshot.ops[i];
    if (op.state != sim::OpState::kPlaced && op.state != sim::OpState::kIssued) continue;
    if (op.device < by_device->size())
      (*by_device)[op.device] += sim::OpDuration(snapshot, i, op.device);
  }
}

Decision Nowhere(const sim::Snapshot& snapshot) {
  Decision decision;
  decision.retry_at = snapshot.now + kRetry;
  return decision;
}

}  // namespace slice::sched
