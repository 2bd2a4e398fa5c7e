#include "tests/sim/naive_simulator.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace slice::sim {
namespace {

struct NaiveOp {
  TimeNs earliest = 0;
  DeviceIndex device = kNoDevice;
  bool released = false, started = false, finished = false;
};
struct NaiveTensor {
  std::set<DomainIndex> resident;
  std::set<DomainIndex> held;  // domains whose free bytes hold it
  int64_t consumers = 0;
  bool transient = false;
};
struct NaiveCopy {
  TensorIndex tensor = 0;
  DomainIndex source = 0, destination = 0;
  ServiceClass service_class = ServiceClass::kOffline;
  size_t age = 0;
  std::optional<TimeNs> finish;
};
struct NaiveDevice {
  std::optional<OpIndex> running;
  std::optional<TimeNs> busy_until;
  int64_t refund = 0;
  TimeNs phantom_from = kNever, phantom_until = 0;
};

class Naive {
 public:
  Naive(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules,
        const Options& options, const estimate::TransferEstimator& transfers, Timeline* out)
      : s(snapshot),
        rules_(rules),
        options_(options),
        transfers_(transfers),
        out_(out),
        t(snapshot.now) {
    rules_.slices = rules.slices && rules.classes;
    out_->start.assign(s.ops.size(), kNever);
    out_->finish.assign(s.ops.size(), kNever);
    out_->device.assign(s.ops.size(), kNoDevice);
    out_->instance_finish.assign(s.instances.size(), s.now);
    out_->instance_left.assign(s.instances.size(), 0);
    out_->bytes_moved = 0;
    out_->memory_feasible = true;
    out_->infeasible_domain = kNoDomain;
    out_->makespan = 0;
    for (const SnapOp& op : s.ops) {
      ops_.push_back({op.earliest, op.state == OpState::kUnscheduled ? kNoDevice : op.device});
    }
    for (const Placement& placement : batch) {
      ops_[placement.op].device = placement.device;
      ops_[placement.op].earliest = std::max(ops_[placement.op].earliest, placement.earliest);
    }
    for (const SnapTensor& from : s.tensors) {
      NaiveTensor tensor;
      for (size_t d = 0; d < s.domains.size(); ++d) {
        const auto domain = static_cast<DomainIndex>(d);
        if (((from.resident >> d) & 1) == 0) continue;
        tensor.resident.insert(domain);
        if (!ReservedFor(from.instance, domain)) tensor.held.insert(domain);
      }
      tensor.transient =
          !from.managed && !from.pinned && (from.instance != kNone || from.resident == 0);
      if (!tensor.transient) tensor.held.clear();
      tensor.consumers = from.consumers;
      tensors_.push_back(tensor);
    }
    for (const SnapDomain& domain : s.domains) free_.push_back(domain.free_bytes);
    for (const SnapTransfer& from : s.transfers) {
      NaiveCopy copy{from.tensor,        from.source, from.destination,
                     from.service_class, age_++,      std::nullopt};
      if (from.finish != kNever) copy.finish = std::max(from.finish, s.now);
      copies_.push_back(copy);
    }
    for (size_t d = 0; d < s.devices.size(); ++d) {
      NaiveDevice device;
      device.phantom_from = s.devices[d].phantom_from;
      device.phantom_until = s.devices[d].phantom_until;
      if (s.devices[d].running != kNone) {
        const OpIndex op = s.devices[d].running;
        device.running = op;
        device.busy_until = std::max(s.now, s.devices[d].free_at);
        ops_[op].released = ops_[op].started = true;
        ops_[op].device = static_cast<DeviceIndex>(d);
        out_->start[op] = s.now;
        out_->device[op] = static_cast<DeviceIndex>(d);
      } else if (s.devices[d].free_at > s.now) {
        device.busy_until = s.devices[d].free_at;
      }
      devices_.push_back(device);
    }
  }

  void Run() {
    const TimeNs end = s.now + options_.horizon;
    for (;;) {
      for (size_t d = 0; d < devices_.size(); ++d) EndOp(d);
      for (size_t d = 0; d < s.domains.size(); ++d) EndCopy(static_cast<DomainIndex>(d));
      ReleaseOps();
      StartCopies();
      for (size_t d = 0; d < devices_.size(); ++d) StartOp(d);
      const TimeNs next = NextTime();
      if (next == kNever || next > end) break;
      t = next;
    }
    for (const NaiveDevice& device : devices_) {
      if (device.running) out_->finish[*device.running] = *device.busy_until;
    }
    for (size_t i = 0; i < s.ops.size(); ++i) {
      if (out_->finish[i] != kNever) out_->makespan = std::max(out_->makespan, out_->finish[i]);
      TimeNs& instance = out_->instance_finish[s.ops[i].instance];
      instance = std::max(instance, out_->finish[i]);
      if (out_->finish[i] == kNever) out_->instance_left[s.ops[i].instance] += s.ops[i].duration;
    }
  }

 private:
  std::vector<TensorIndex> Reads(OpIndex op) const {
    return {s.uses.begin() + s.ops[op].reads_begin, s.uses.begin() + s.ops[op].reads_end};
  }
  std::vector<TensorIndex> Writes(OpIndex op) const {
    return {s.uses.begin() + s.ops[op].writes_begin, s.uses.begin() + s.ops[op].writes_end};
  }
  bool ReservedFor(uint32_t instance, DomainIndex domain) const {
    return instance != kNone && ((s.instances[instance].reserved_domains >> domain) & 1) != 0;
  }
  bool Online(OpIndex op) const { return s.ops[op].service_class == ServiceClass::kOnline; }
  DurationNs Duration(OpIndex op, size_t device) const {
    const uint8_t kind = s.devices[device].kind;
    const double scale = kind < s.kind_scale.size() ? s.kind_scale[kind] : 1.0;
    return std::max<DurationNs>(1, std::llround(static_cast<double>(s.ops[op].duration) * scale));
  }
  DurationNs CopyTime(TensorIndex tensor, DomainIndex source, DomainIndex destination) const {
    return options_.transfer_overhead +
           transfers_.Predict(source, destination, s.tensors[tensor].bytes);
  }
  DomainIndex BestSource(TensorIndex tensor, DomainIndex destination) const {
    DomainIndex best = kNoDomain;
    for (const DomainIndex source : tensors_[tensor].resident) {
      if (best == kNoDomain ||
          CopyTime(tensor, source, destination) < CopyTime(tensor, best, destination))
        best = source;
    }
    return best;
  }
  bool Before(OpIndex a, OpIndex b) const {
    const SnapOp &x = s.ops[a], &y = s.ops[b];
    if (rules_.classes && x.service_class != y.service_class)
      return x.service_class < y.service_class;
    if (rules_.classes && x.priority != y.priority) return x.priority > y.priority;
    return x.order != y.order ? x.order < y.order : a < b;
  }
  bool Missing(OpIndex op, DomainIndex domain) const {
    for (const TensorIndex tensor : Reads(op)) {
      if (!tensors_[tensor].resident.empty() && !tensors_[tensor].resident.contains(domain))
        return true;
    }
    return false;
  }
  void Infeasible(DomainIndex domain) {
    if (!out_->memory_feasible) return;
    out_->memory_feasible = false;
    out_->infeasible_domain = domain;
  }
  void Take(DomainIndex domain, int64_t bytes) {
    free_[domain] -= bytes;
    if (free_[domain] < 0) Infeasible(domain);
  }
  void EndOfTensor(TensorIndex tensor) {
    for (const DomainIndex domain : tensors_[tensor].held) free_[domain] += s.tensors[tensor].bytes;
    tensors_[tensor].held.clear();
  }

  void EndOp(size_t d) {
    NaiveDevice& device = devices_[d];
    if (!device.busy_until || *device.busy_until > t) return;
    device.busy_until.reset();
    if (!device.running) return;
    const OpIndex op = *device.running;
    device.running.reset();
    ops_[op].finished = true;
    out_->finish[op] = t;
    const DomainIndex domain = s.devices[d].domain;
    free_[domain] += device.refund;
    device.refund = 0;
    for (const TensorIndex index : Writes(op)) {
      NaiveTensor& tensor = tensors_[index];
      if (tensor.transient && tensor.resident.empty() && !ReservedFor(s.ops[op].instance, domain)) {
        tensor.held.insert(domain);
      }
      const std::set<DomainIndex> held = tensor.held;
      for (const DomainIndex elsewhere : held) {
        if (elsewhere == domain) continue;
        free_[elsewhere] += s.tensors[index].bytes;
        tensor.held.erase(elsewhere);
      }
      tensor.resident = {domain};
      if (tensor.transient && tensor.consumers == 0) EndOfTensor(index);
    }
    for (const TensorIndex index : Reads(op)) {
      if (--tensors_[index].consumers == 0 && tensors_[index].transient) EndOfTensor(index);
    }
    const SnapInstance& instance = s.instances[s.ops[op].instance];
    for (size_t i = 0; i < s.ops.size(); ++i) {
      if (s.ops[i].instance == s.ops[op].instance && !ops_[i].finished) return;
    }
    if (instance.service_class != ServiceClass::kOnline || instance.gap_p90 <= 0) return;
    const bool open = device.phantom_until > t;
    device.phantom_from =
        open ? std::min(device.phantom_from, t + instance.gap_p10) : t + instance.gap_p10;
    device.phantom_until =
        open ? std::max(device.phantom_until, t + instance.gap_p90) : t + instance.gap_p90;
  }

  void EndCopy(DomainIndex destination) {
    for (size_t i = 0; i < copies_.size();) {
      if (copies_[i].destination != destination || !copies_[i].finish || *copies_[i].finish > t) {
        ++i;
        continue;
      }
      tensors_[copies_[i].tensor].resident.insert(destination);
      copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  bool PredecessorsDone(OpIndex op) const {
    for (size_t i = 0; i < s.ops.size(); ++i) {
      for (uint32_t e = s.ops[i].successors_begin; e < s.ops[i].successors_end; ++e) {
        if (s.edges[e] == op && !ops_[i].finished) return false;
      }
    }
    return true;
  }

  void ReleaseOps() {
    std::vector<OpIndex> due;
    for (OpIndex i = 0; i < s.ops.size(); ++i) {
      if (!ops_[i].released && ops_[i].earliest <= t && PredecessorsDone(i)) due.push_back(i);
    }
    std::sort(due.begin(), due.end(), [this](OpIndex a, OpIndex b) { return Before(a, b); });
    for (const OpIndex op : due) {
      ops_[op].released = true;
      if (ops_[op].device == kNoDevice) ops_[op].device = Rollout(op);
      if (ops_[op].device == kNoDevice) continue;
      const DomainIndex domain = s.devices[ops_[op].device].domain;
      for (const TensorIndex tensor : Reads(op)) {
        if (tensors_[tensor].resident.empty() || tensors_[tensor].resident.contains(domain))
          continue;
        if (s.tensors[tensor].pinned) Infeasible(domain);
        Request(tensor, domain, s.ops[op].service_class);
      }
    }
  }

  DeviceIndex Rollout(OpIndex op) const {
    DeviceIndex best = kNoDevice;
    TimeNs best_finish = kNever;
    for (size_t d = 0; d < devices_.size(); ++d) {
      if (((s.ops[op].allowed_devices >> d) & 1) == 0) continue;
      const DomainIndex domain = s.devices[d].domain;
      DurationNs copies = 0;
      bool possible = true;
      for (const TensorIndex tensor : Reads(op)) {
        if (tensors_[tensor].resident.empty() || tensors_[tensor].resident.contains(domain))
          continue;
        if (s.tensors[tensor].pinned) possible = false;
        copies += CopyTime(tensor, BestSource(tensor, domain), domain);
      }
      if (!possible) continue;
      TimeNs start = devices_[d].busy_until.value_or(t);
      for (OpIndex i = 0; i < s.ops.size(); ++i) {
        if (!ops_[i].released || ops_[i].started || ops_[i].device != d) continue;
        if (i == op) continue;
        if (!rules_.classes || !Online(op) || Online(i)) start += Duration(i, d);
      }
      const DurationNs duration = Duration(op, d);
      if (rules_.slices && !Online(op) && start < devices_[d].phantom_until &&
          start + duration > devices_[d].phantom_from) {
        start = devices_[d].phantom_until;
      }
      const TimeNs finish = std::max(start, t + copies) + duration;
      if (finish < best_finish) {
        best_finish = finish;
        best = static_cast<DeviceIndex>(d);
      }
    }
    return best;
  }

  void Request(TensorIndex tensor, DomainIndex destination, ServiceClass service_class) {
    for (NaiveCopy& copy : copies_) {
      if (copy.tensor != tensor || copy.destination != destination) continue;
      if (!copy.finish && rules_.classes)
        copy.service_class = std::min(copy.service_class, service_class);
      return;
    }
    copies_.push_back({tensor, BestSource(tensor, destination), destination, service_class, age_++,
                       std::nullopt});
  }

  void StartCopies() {
    std::vector<NaiveCopy*> waiting;
    for (NaiveCopy& copy : copies_) {
      if (!copy.finish) waiting.push_back(&copy);
    }
    std::sort(waiting.begin(), waiting.end(), [this](const NaiveCopy* a, const NaiveCopy* b) {
      if (rules_.classes && a->service_class != b->service_class)
        return a->service_class < b->service_class;
      return a->age < b->age;
    });
    for (NaiveCopy* copy : waiting) {
      // Better and equal classes under way stand in the way; worse ones are overtaken and go on
      // afterwards.
      const auto rank = [this](const NaiveCopy& c) {
        return rules_.classes ? static_cast<int>(c.service_class) : 0;
      };
      const auto shares = [copy](const NaiveCopy& c) {
        return c.finish && (c.source == copy->source || c.destination == copy->destination);
      };
      bool blocked = false;
      for (const NaiveCopy& other : copies_) blocked |= shares(other) && rank(other) <= rank(*copy);
      if (blocked) continue;
      const DurationNs duration =
          std::max<DurationNs>(1, CopyTime(copy->tensor, copy->source, copy->destination));
      for (NaiveCopy& other : copies_) {
        if (shares(other)) other.finish = *other.finish + duration;
      }
      const SnapTensor& tensor = s.tensors[copy->tensor];
      if (!ReservedFor(tensor.instance, copy->destination) &&
          ((tensor.slots >> copy->destination) & 1) == 0) {
        Take(copy->destination, tensor.bytes);
        tensors_[copy->tensor].held.insert(copy->destination);
      }
      out_->bytes_moved += tensor.bytes;
      copy->finish = t + duration;
    }
  }

  void StartOp(size_t d) {
    NaiveDevice& device = devices_[d];
    if (device.busy_until) return;
    const DomainIndex domain = s.devices[d].domain;
    std::optional<OpIndex> best;
    for (OpIndex i = 0; i < s.ops.size(); ++i) {
      if (!ops_[i].released || ops_[i].started || ops_[i].device != d || Missing(i, domain))
        continue;
      const bool gap = rules_.slices && !Online(i) && t < device.phantom_until;
      if (gap && t + Duration(i, d) > device.phantom_from) continue;
      if (!best || Before(i, *best)) best = i;
    }
    if (!best) return;
    const OpIndex op = *best;
    ops_[op].started = true;
    device.running = op;
    device.busy_until = t + Duration(op, d);
    out_->start[op] = t;
    out_->device[op] = static_cast<DeviceIndex>(d);
    device.refund = 0;
    if (ReservedFor(s.ops[op].instance, domain)) return;
    int64_t made = 0;
    for (const TensorIndex tensor : Writes(op)) {
      if (tensors_[tensor].transient && tensors_[tensor].resident.empty())
        made += s.tensors[tensor].bytes;
    }
    Take(domain, std::max(made, s.ops[op].memory_bytes));
    device.refund = std::max(made, s.ops[op].memory_bytes) - made;
  }

  TimeNs NextTime() const {
    TimeNs next = kNever;
    const auto consider = [&next, this](TimeNs at) {
      if (at > t) next = std::min(next, at);
    };
    for (const NaiveDevice& device : devices_) {
      if (device.busy_until) consider(*device.busy_until);
      consider(device.phantom_until);
    }
    for (const NaiveCopy& copy : copies_) {
      if (copy.finish) consider(*copy.finish);
    }
    for (size_t i = 0; i < ops_.size(); ++i) {
      if (!ops_[i].released) consider(ops_[i].earliest);
    }
    return next;
  }

  const Snapshot& s;
  Rules rules_;
  const Options& options_;
  const estimate::TransferEstimator& transfers_;
  Timeline* out_;
  TimeNs t;
  size_t age_ = 0;
  std::vector<NaiveOp> ops_;
  std::vector<NaiveTensor> tensors_;
  std::vector<NaiveDevice> devices_;
  std::vector<NaiveCopy> copies_;
  std::vector<int64_t> free_;
};

}  // namespace

void NaiveRun(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules,
              const Options& options, const estimate::TransferEstimator& transfers, Timeline* out) {
  Naive(snapshot, batch, rules, options, transfers, out).Run();
}

}  // namespace slice::sim
