#include "tests/sched/exhaustive_policy.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "tests/sim/naive_simulator.h"

namespace slice::sched {
namespace {

struct Choice {
  DeviceIndex device = kNoDevice;  // kNoDevice: deferred
  TimeNs retry_at = kNever;
  bool feasible = true;
  int64_t lateness = 0, online = 0, finish = 0, bytes = 0;
  TimeNs batch_finish = 0;
  int64_t balance = 0;
};

class Exhaustive {
 public:
  Exhaustive(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch, DeviceIndex home,
             const sim::Options& options, const estimate::TransferEstimator& transfers)
      : s(snapshot),
        batch_(batch),
        home_(home),
        options_(options),
        transfers_(transfers),
        horizon_end_(snapshot.now + options.horizon) {}

  Decision Decide() {
    Decision decision;
    std::vector<DeviceIndex> devices;
    while (!batch_.empty() && (devices = Common(batch_)).empty())
      batch_ = batch_.first(batch_.size() - 1);
    if (batch_.empty()) {
      decision.retry_at = s.now + 10 * kMillisecond;
      return decision;
    }
    offline_ = s.ops[batch_[0]].service_class == ServiceClass::kOffline;
    std::vector<Choice> choices;
    for (const DeviceIndex device : Few(Quiet(devices))) choices.push_back(Try(device, 0));
    if (offline_ && OnlineAround()) {
      const TimeNs opening = Opening(devices);
      if (opening != kNever) choices.push_back(Try(kNoDevice, opening));
    }
    int64_t online_best = kNever, finish_best = kNever;
    for (const Choice& choice : choices) {
      online_best = std::min(online_best, choice.online);
      finish_best = std::min(finish_best, choice.finish);
    }
    const auto levels = [&](const Choice& c) {
      return std::tuple(!c.feasible, c.lateness / kMillisecond, Percent(c.online, online_best),
                        Percent(c.finish, finish_best), c.bytes, c.device == kNoDevice, c.balance,
                        c.device != home_, c.device);
    };
    const Choice* best = &choices[0];
    for (const Choice& choice : choices) {
      if (levels(choice) < levels(*best)) best = &choice;
    }
    if (!best->feasible) {
      for (const Choice& choice : choices) {
        if (choice.device == home_) best = &choice;
      }
    }
    decision.placed = best->device != kNoDevice;
    decision.device = best->device;
    decision.op_count = static_cast<uint32_t>(batch_.size());
    decision.retry_at = best->retry_at;
    decision.predicted_finish = best->batch_finish;
    for (const Choice& choice : choices) {
      CandidateScore score;
      score.defer = choice.device == kNoDevice;
      score.device = choice.device;
      decision.candidates.push_back(score);
    }
    return decision;
  }

 private:
  static int64_t Percent(int64_t value, int64_t best) {
    return (value - best) / std::max<int64_t>(1, best / 100);
  }
  uint64_t Here(DeviceIndex device) const { return uint64_t{1} << s.devices[device].domain; }

  std::vector<DeviceIndex> Common(std::span<const sim::OpIndex> ops) const {
    std::vector<DeviceIndex> result;
    for (size_t d = 0; d < s.devices.size(); ++d) {
      bool all = true;
      for (const sim::OpIndex op : ops) all &= (s.ops[op].allowed_devices >> d & 1) != 0;
      if (all) result.push_back(static_cast<DeviceIndex>(d));
    }
    return result;
  }

  // Long offline ops keep off devices with online tenants, if they can.
  std::vector<DeviceIndex> Quiet(const std::vector<DeviceIndex>& devices) const {
    if (!offline_ || s.offline_op_max == kNever) return devices;
    std::vector<DeviceIndex> quiet;
    for (const DeviceIndex device : devices) {
      bool longer = false;
      for (const sim::OpIndex op : batch_)
        longer |= sim::OpDuration(s, op, device) > s.offline_op_max;
      if (!s.devices[device].hosts_online || !longer) quiet.push_back(device);
    }
    return quiet.empty() ? devices : quiet;
  }

  // Home and the four with the least lower bound.
  std::vector<DeviceIndex> Few(const std::vector<DeviceIndex>& devices) const {
    if (devices.size() <= 5) return devices;
    std::vector<std::pair<DurationNs, DeviceIndex>> bounds;
    for (const DeviceIndex device : devices) {
      int64_t managed = 0;
      const int64_t bytes = Moved(device, &managed);
      const DomainIndex here = s.devices[device].domain;
      const DomainIndex from = home_ < s.devices.size() ? s.devices[home_].domain : here;
      const DurationNs copy = bytes > 0 ? transfers_.Predict(from, here, bytes) : 0;
      DurationNs bound = std::max(s.devices[device].free_at - s.now, copy);
      for (const sim::OpIndex op : batch_) bound += sim::OpDuration(s, op, device);
      bounds.emplace_back(bound, device);
    }
    std::sort(bounds.begin(), bounds.end());
    std::vector<DeviceIndex> few;
    for (const DeviceIndex device : devices) {
      bool kept = device == home_;
      for (size_t i = 0; i < 4; ++i) kept |= bounds[i].second == device;
      if (kept) few.push_back(device);
    }
    return few;
  }

  int64_t Moved(DeviceIndex device, int64_t* managed) const {
    int64_t bytes = 0;
    for (const sim::OpIndex op : batch_) {
      for (uint32_t u = s.ops[op].reads_begin; u < s.ops[op].reads_end; ++u) {
        const sim::SnapTensor& tensor = s.tensors[s.uses[u]];
        if (tensor.resident == 0 || (tensor.resident & Here(device)) != 0) continue;
        bytes += tensor.bytes;
        *managed += tensor.managed ? tensor.bytes : 0;
      }
    }
    return bytes;
  }

  bool OnlineAround() const {
    for (const sim::SnapInstance& instance : s.instances) {
      if (instance.service_class == ServiceClass::kOnline) return true;
    }
    for (const sim::SnapDevice& device : s.devices) {
      if (device.phantom_until > s.now) return true;
    }
    return false;
  }

  sim::Timeline Simulate(DeviceIndex device, TimeNs earliest) const {
    std::vector<sim::Placement> placements;
    for (const sim::OpIndex op : batch_) placements.push_back({op, device, earliest});
    sim::Timeline timeline;
    sim::NaiveRun(s, placements, {}, options_, transfers_, &timeline);
    return timeline;
  }

  Choice Try(DeviceIndex device, TimeNs earliest) const {
    const sim::Timeline timeline = Simulate(device, earliest);
    Choice choice;
    choice.device = device;
    if (device == kNoDevice) choice.retry_at = earliest;
    choice.feasible = timeline.memory_feasible;
    choice.bytes = timeline.bytes_moved;
    DurationNs left = 0;
    for (const sim::OpIndex op : batch_) {
      if (timeline.finish[op] == kNever) {
        left += s.ops[op].duration;
      } else {
        choice.batch_finish = std::max(choice.batch_finish, timeline.finish[op]);
      }
    }
    if (left > 0) choice.batch_finish = std::max(choice.batch_finish, horizon_end_) + left;
    choice.finish = std::max<DurationNs>(0, choice.batch_finish - s.now);
    int64_t managed = 0;
    if (device != kNoDevice) Moved(device, &managed);
    if (managed > 0) choice.finish += choice.finish / 20;
    Online(timeline, &choice);
    if (device != kNoDevice) choice.balance = Queued(device) / kMillisecond;
    return choice;
  }

  void Online(const sim::Timeline& timeline, Choice* choice) const {
    // Where each online sequence of the window will go on, and how many share that device.
    std::vector<DeviceIndex> last(s.instances.size(), kNoDevice);
    std::map<DeviceIndex, int64_t> sharing;
    for (size_t i = 0; i < s.ops.size(); ++i) {
      const sim::SnapOp& op = s.ops[i];
      if (op.service_class == ServiceClass::kOnline &&
          timeline.finish[i] == timeline.instance_finish[op.instance])
        last[op.instance] = timeline.device[i];
    }
    for (size_t i = 0; i < s.instances.size(); ++i) {
      if (last[i] != kNoDevice && s.instances[i].rest_of_sequence > 0) ++sharing[last[i]];
    }
    for (size_t d = 0; d < s.devices.size(); ++d) {
      if (s.devices[d].phantom_until > s.now) ++sharing[static_cast<DeviceIndex>(d)];
    }
    for (size_t i = 0; i < s.instances.size(); ++i) {
      const sim::SnapInstance& instance = s.instances[i];
      if (instance.service_class != ServiceClass::kOnline) continue;
      TimeNs finish = timeline.instance_finish[i];
      if (finish == kNever) finish = horizon_end_ + timeline.instance_left[i];
      DurationNs rest = instance.rest_of_sequence;
      if (!offline_ && last[i] != kNoDevice) rest *= std::max<int64_t>(1, sharing[last[i]]);
      choice->online += finish - s.now + (offline_ ? 0 : rest);
      if (instance.deadline != kNever)
        choice->lateness += std::max<DurationNs>(0, finish + rest - instance.deadline);
    }
  }

  DurationNs Queued(DeviceIndex device) const {
    DurationNs queued = std::max<DurationNs>(0, s.devices[device].free_at - s.now);
    for (sim::OpIndex i = 0; i < s.ops.size(); ++i) {
      const sim::OpState state = s.ops[i].state;
      if ((state == sim::OpState::kPlaced || state == sim::OpState::kIssued) &&
          s.ops[i].device == device)
        queued += sim::OpDuration(s, i, device);
    }
    return queued;
  }

  // The first gap between online ops that holds the first op of the batch.
  TimeNs Opening(const std::vector<DeviceIndex>& devices) const {
    const sim::Timeline timeline = Simulate(kNoDevice, kNever);
    TimeNs opening = kNever;
    for (const DeviceIndex device : devices) {
      const sim::SnapDevice& from = s.devices[device];
      std::vector<std::pair<TimeNs, TimeNs>> busy;
      if (from.free_at > s.now) busy.emplace_back(s.now, from.free_at);
      if (from.phantom_until > s.now) busy.emplace_back(from.phantom_from, from.phantom_until);
      for (size_t i = 0; i < s.ops.size(); ++i) {
        const sim::SnapOp& op = s.ops[i];
        if (op.service_class != ServiceClass::kOnline || timeline.device[i] != device) continue;
        const TimeNs end = timeline.finish[i];
        busy.emplace_back(timeline.start[i], end);
        const sim::SnapInstance& instance = s.instances[op.instance];
        if (instance.gap_p90 > 0 && timeline.instance_finish[op.instance] == end)
          busy.emplace_back(end + instance.gap_p10, end + instance.gap_p90);
      }
      std::sort(busy.begin(), busy.end());
      TimeNs open = s.now;
      for (const auto& [begin, end] : busy) {
        if (open + sim::OpDuration(s, batch_[0], device) <= begin) break;
        open = std::max(open, end);
      }
      opening = std::min(opening, open);
    }
    if (opening <= s.now || opening == kNever) return kNever;
    return std::clamp(opening, s.now + 100 * kMicrosecond, s.now + 100 * kMillisecond);
  }

  const sim::Snapshot& s;
  std::span<const sim::OpIndex> batch_;
  DeviceIndex home_;
  const sim::Options& options_;
  const estimate::TransferEstimator& transfers_;
  TimeNs horizon_end_;
  bool offline_ = false;
};

}  // namespace

Decision DecideExhaustively(const sim::Snapshot& snapshot, std::span<const sim::OpIndex> batch,
                            DeviceIndex home, const sim::Options& options,
                            const estimate::TransferEstimator& transfers) {
  return Exhaustive(snapshot, batch, home, options, transfers).Decide();
}

}  // namespace slice::sched
