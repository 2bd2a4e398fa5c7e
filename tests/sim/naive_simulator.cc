#include "tests/sim/naive_simulator.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <vector>

namespace slice::sim {
namespace {

enum class What : uint8_t { kOpEnds, kCopyEnds, kOpDue, kLook };
struct Event {
  TimeNs at;
  What what;
  uint32_t index;  // device, copy, op, device
};
struct Later {
  bool operator()(const Event& a, const Event& b) const {
    if (a.at != b.at) return a.at > b.at;
    return a.what != b.what ? a.what > b.what : a.index > b.index;
  }
};
struct NaiveTensor {
  uint64_t resident = 0, held = 0;  // domains; held: whose free bytes hold it
  uint32_t consumers = 0;
  bool transient = false;
};
struct NaiveCopy {
  TensorIndex tensor = 0;
  DomainIndex source = 0, destination = 0;
  ServiceClass service_class = ServiceClass::kOffline;
  enum { kWaits, kRuns, kDone } state = kWaits;
  TimeNs finish = kNever;
  std::vector<OpIndex> waiters;
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
        curve_(options.memory_curve),
        now_(snapshot.now) {
    rules_.slices = rules.slices && rules.classes;
    out_->start.assign(s.ops.size(), kNever);
    out_->finish.assign(s.ops.size(), kNever);
    out_->device.assign(s.ops.size(), kNoDevice);
    out_->instance_finish.assign(s.instances.size(), s.now);
    out_->instance_left.assign(s.instances.size(), 0);
    out_->bytes_moved = 0;
    out_->memory_feasible = true;
    out_->infeasible_domain = kNoDomain;
    out_->infeasible = {};
    out_->makespan = 0;
    out_->memory.assign(curve_ ? s.domains.size() : 0, {});
    out_->free_bytes_min.clear();
    for (const SnapDomain& domain : s.domains) {
      free_.push_back(domain.free_bytes);
      out_->free_bytes_min.push_back(domain.free_bytes);
    }
    for (size_t d = 0; curve_ && d < free_.size(); ++d) out_->memory[d] = {{s.now, free_[d]}};
    Tensors();
    Ops(batch);
    for (const SnapTransfer& from : s.transfers) {
      NaiveCopy copy;
      copy.tensor = from.tensor;
      copy.source = from.source;
      copy.destination = from.destination;
      copy.service_class = from.service_class;
      copies_.push_back(copy);
      if (from.finish == kNever) {
        waiting_.push_back(copies_.size() - 1);
      } else {
        CopyRuns(copies_.size() - 1, std::max(from.finish, s.now));
      }
    }
    Devices();
    for (OpIndex op = 0; op < s.ops.size(); ++op) {
      if (pending_[op] == 0 && out_->start[op] == kNever) PredecessorsDone(op);
    }
  }

  void Run() {
    const TimeNs end = s.now + options_.horizon;
    for (;;) {
      while (!events_.empty() && events_.top().at <= now_) Take();
      ReleaseOps();
      StartCopies();
      for (size_t d = 0; d < running_.size(); ++d) StartOp(d);
      if (curve_) Curve();
      if (events_.empty() || events_.top().at > end) break;
      now_ = events_.top().at;
    }
    for (size_t d = 0; d < running_.size(); ++d) {
      if (running_[d] != kNone) out_->finish[running_[d]] = busy_until_[d];
    }
    for (size_t i = 0; i < s.ops.size(); ++i) {
      const TimeNs finish = out_->finish[i];
      TimeNs& instance = out_->instance_finish[s.ops[i].instance];
      instance = std::max(instance, finish);
      if (finish == kNever) {
        out_->instance_left[s.ops[i].instance] += s.ops[i].duration;
      } else {
        out_->makespan = std::max(out_->makespan, finish);
      }
    }
  }

 private:
  struct Before {  // for a priority_queue: whether b goes before a
    const Naive* n;
    bool operator()(OpIndex a, OpIndex b) const { return n->GoesBefore(b, a); }
  };
  using ReadyQueue = std::priority_queue<OpIndex, std::vector<OpIndex>, Before>;

  static bool In(uint64_t domains, DomainIndex domain) { return (domains >> domain & 1) != 0; }
  bool Reserved(uint32_t instance, DomainIndex domain) const {
    return instance != kNone && In(s.instances[instance].reserved_domains, domain);
  }
  bool Online(OpIndex op) const { return s.ops[op].service_class == ServiceClass::kOnline; }
  DomainIndex DomainOf(size_t device) const { return s.devices[device].domain; }
  DurationNs Duration(OpIndex op, size_t device) const {
    const uint8_t kind = s.devices[device].kind;
    if (kind >= s.kind_scale.size()) return std::max<DurationNs>(1, s.ops[op].duration);
    const double scaled = static_cast<double>(s.ops[op].duration) * s.kind_scale[kind];
    return std::max<DurationNs>(1, std::llround(scaled));
  }
  DurationNs CopyTime(TensorIndex tensor, DomainIndex source, DomainIndex destination) const {
    return options_.transfer_overhead +
           transfers_.Predict(source, destination, s.tensors[tensor].bytes);
  }
  bool GoesBefore(OpIndex a, OpIndex b) const {
    const SnapOp &x = s.ops[a], &y = s.ops[b];
    if (rules_.classes && x.service_class != y.service_class)
      return x.service_class < y.service_class;
    if (rules_.classes && x.priority != y.priority) return x.priority > y.priority;
    return x.order != y.order ? x.order < y.order : a < b;
  }

  // ---- what the snapshot says ----

  void Tensors() {
    tensors_.reserve(s.tensors.size());
    for (const SnapTensor& from : s.tensors) {
      NaiveTensor tensor;
      tensor.resident = from.resident;
      tensor.consumers = from.consumers;
      tensor.transient =
          !from.managed && !from.pinned && (from.instance != kNone || from.resident == 0);
      if (tensor.transient) {
        tensor.held = from.resident;
        if (from.instance != kNone) tensor.held &= ~s.instances[from.instance].reserved_domains;
      }
      tensors_.push_back(tensor);
    }
  }

  void Ops(std::span<const Placement> batch) {
    for (const SnapOp& op : s.ops) {
      pending_.push_back(op.pending);
      device_.push_back(op.state == OpState::kUnscheduled ? kNoDevice : op.device);
      earliest_.push_back(op.earliest);
    }
    missing_.assign(s.ops.size(), 0);
    for (const Placement& placement : batch) {
      device_[placement.op] = placement.device;
      earliest_[placement.op] = std::max(earliest_[placement.op], placement.earliest);
    }
    instance_ops_.assign(s.instances.size(), 0);
    for (const SnapOp& op : s.ops) ++instance_ops_[op.instance];
  }

  void Devices() {
    const size_t count = s.devices.size();
    running_.assign(count, kNone);
    busy_until_.assign(count, 0);
    refund_.assign(count, 0);
    backlog_online_.assign(count, 0);
    backlog_offline_.assign(count, 0);
    ready_.assign(count, ReadyQueue(Before{this}));
    for (uint32_t d = 0; d < count; ++d) {
      const SnapDevice& device = s.devices[d];
      phantom_from_.push_back(device.phantom_from);
      phantom_until_.push_back(device.phantom_until);
      if (device.phantom_until > s.now) events_.push({device.phantom_until, What::kLook, d});
      busy_.push_back(device.running != kNone || device.free_at > s.now);
      if (!busy_[d]) continue;
      busy_until_[d] = std::max(device.free_at, s.now);
      events_.push({busy_until_[d], What::kOpEnds, d});
      running_[d] = device.running;
      if (device.running == kNone) continue;
      out_->start[device.running] = s.now;
      out_->device[device.running] = static_cast<DeviceIndex>(d);
    }
  }

  // ---- what happens ----

  void Take() {
    const Event event = events_.top();
    events_.pop();
    switch (event.what) {
      case What::kOpEnds:
        EndOp(event.index);
        break;
      case What::kCopyEnds:
        EndCopy(event.index);
        break;
      case What::kOpDue:
        released_.push_back(event.index);
        break;
      case What::kLook:
        break;  // devices are asked anyhow
    }
  }

  void EndOp(size_t d) {
    busy_[d] = false;
    const OpIndex op = running_[d];
    if (op == kNone) return;
    running_[d] = kNone;
    out_->finish[op] = now_;
    const DomainIndex domain = DomainOf(d);
    free_[domain] += refund_[d];
    refund_[d] = 0;
    const SnapOp& from = s.ops[op];
    for (uint32_t u = from.writes_begin; u < from.writes_end; ++u) {
      NaiveTensor& tensor = tensors_[s.uses[u]];
      if (tensor.transient && tensor.resident == 0 && !Reserved(from.instance, domain))
        tensor.held |= uint64_t{1} << domain;
      for (DomainIndex other = 0; tensor.held != 0 && other < free_.size(); ++other) {
        if (other == domain || !In(tensor.held, other)) continue;
        free_[other] += s.tensors[s.uses[u]].bytes;
        tensor.held &= ~(uint64_t{1} << other);
      }
      tensor.resident = uint64_t{1} << domain;
      if (tensor.transient && tensor.consumers == 0) EndTensor(s.uses[u]);
    }
    for (uint32_t u = from.reads_begin; u < from.reads_end; ++u) {
      NaiveTensor& tensor = tensors_[s.uses[u]];
      if (tensor.consumers > 0 && --tensor.consumers == 0 && tensor.transient) EndTensor(s.uses[u]);
    }
    for (uint32_t e = from.successors_begin; e < from.successors_end; ++e) {
      if (--pending_[s.edges[e]] == 0) PredecessorsDone(s.edges[e]);
    }
    if (--instance_ops_[from.instance] == 0) EndInstance(s.instances[from.instance], d);
  }

  void EndInstance(const SnapInstance& instance, size_t d) {
    if (instance.service_class != ServiceClass::kOnline || instance.gap_p90 <= 0) return;
    const TimeNs from = now_ + instance.gap_p10, until = now_ + instance.gap_p90;
    const bool open = phantom_until_[d] > now_;
    phantom_from_[d] = open ? std::min(phantom_from_[d], from) : from;
    phantom_until_[d] = open ? std::max(phantom_until_[d], until) : until;
    events_.push({phantom_until_[d], What::kLook, static_cast<uint32_t>(d)});
  }

  void PredecessorsDone(OpIndex op) {
    if (earliest_[op] <= now_) {
      released_.push_back(op);
    } else if (earliest_[op] != kNever) {
      events_.push({earliest_[op], What::kOpDue, op});
    }
  }

  void ReleaseOps() {
    std::sort(released_.begin(), released_.end(),
              [this](OpIndex a, OpIndex b) { return GoesBefore(a, b); });
    for (const OpIndex op : released_) {
      if (device_[op] == kNoDevice) device_[op] = Rollout(op);
      if (device_[op] == kNoDevice) continue;
      const DeviceIndex d = device_[op];
      const DomainIndex domain = DomainOf(d);
      const SnapOp& from = s.ops[op];
      for (uint32_t u = from.reads_begin; u < from.reads_end; ++u) {
        const TensorIndex tensor = s.uses[u];
        if (tensors_[tensor].resident == 0 || In(tensors_[tensor].resident, domain)) continue;
        if (s.tensors[tensor].pinned)
          Fails({Infeasible::Cause::kPinned, domain, now_, op, tensor, 0});
        Request(tensor, domain, op);
      }
      (Online(op) ? backlog_online_ : backlog_offline_)[d] += Duration(op, d);
      if (missing_[op] == 0) ready_[d].push(op);
    }
    released_.clear();
  }

  DeviceIndex Rollout(OpIndex op) const {
    DeviceIndex best = kNoDevice;
    TimeNs best_finish = kNever;
    const SnapOp& from = s.ops[op];
    for (size_t d = 0; d < running_.size(); ++d) {
      if ((from.allowed_devices >> d & 1) == 0) continue;
      const DomainIndex domain = DomainOf(d);
      DurationNs copies = 0;
      bool possible = true;
      for (uint32_t u = from.reads_begin; u < from.reads_end; ++u) {
        const TensorIndex tensor = s.uses[u];
        if (tensors_[tensor].resident == 0 || In(tensors_[tensor].resident, domain)) continue;
        if (s.tensors[tensor].pinned) possible = false;
        copies += CopyTime(tensor, BestSource(tensor, domain), domain);
      }
      if (!possible) continue;
      TimeNs start = busy_[d] ? busy_until_[d] : now_;
      start += backlog_online_[d];
      if (!rules_.classes || !Online(op)) start += backlog_offline_[d];
      const DurationNs duration = Duration(op, d);
      if (rules_.slices && !Online(op) && start < phantom_until_[d] &&
          start + duration > phantom_from_[d]) {
        start = phantom_until_[d];
      }
      const TimeNs finish = std::max(start, now_ + copies) + duration;
      if (finish < best_finish) {
        best_finish = finish;
        best = static_cast<DeviceIndex>(d);
      }
    }
    return best;
  }

  void StartOp(size_t d) {
    if (busy_[d] || ready_[d].empty()) return;
    // Those that would run into a phantom are passed over.
    std::vector<OpIndex> passed;
    OpIndex op = kNone;
    while (op == kNone && !ready_[d].empty()) {
      op = ready_[d].top();
      ready_[d].pop();
      const bool gap = rules_.slices && !Online(op) && now_ < phantom_until_[d];
      if (gap && now_ + Duration(op, d) > phantom_from_[d]) {
        passed.push_back(op);
        op = kNone;
      }
    }
    for (const OpIndex other : passed) ready_[d].push(other);
    if (op == kNone) return;
    const SnapOp& from = s.ops[op];
    const DurationNs duration = Duration(op, d);
    (Online(op) ? backlog_online_ : backlog_offline_)[d] -= duration;
    busy_[d] = true;
    running_[d] = op;
    busy_until_[d] = now_ + duration;
    events_.push({busy_until_[d], What::kOpEnds, static_cast<uint32_t>(d)});
    out_->start[op] = now_;
    out_->device[op] = static_cast<DeviceIndex>(d);
    if (Reserved(from.instance, DomainOf(d))) return;
    int64_t made = 0;
    for (uint32_t u = from.writes_begin; u < from.writes_end; ++u) {
      const NaiveTensor& tensor = tensors_[s.uses[u]];
      if (tensor.transient && tensor.resident == 0) made += s.tensors[s.uses[u]].bytes;
    }
    const int64_t taken = std::max(made, from.memory_bytes);
    TakeBytes(DomainOf(d), taken, op, kNone);
    refund_[d] = taken - made;
  }

  // ---- copies ----

  DomainIndex BestSource(TensorIndex tensor, DomainIndex destination) const {
    DomainIndex best = kNoDomain;
    for (DomainIndex source = 0; source < free_.size(); ++source) {
      if (!In(tensors_[tensor].resident, source)) continue;
      if (best == kNoDomain ||
          CopyTime(tensor, source, destination) < CopyTime(tensor, best, destination))
        best = source;
    }
    return best;
  }

  void Request(TensorIndex tensor, DomainIndex destination, OpIndex op) {
    ++missing_[op];
    for (NaiveCopy& copy : copies_) {
      if (copy.state == NaiveCopy::kDone || copy.tensor != tensor ||
          copy.destination != destination)
        continue;
      copy.waiters.push_back(op);
      if (copy.state == NaiveCopy::kWaits && rules_.classes)
        copy.service_class = std::min(copy.service_class, s.ops[op].service_class);
      return;
    }
    NaiveCopy copy;
    copy.tensor = tensor;
    copy.source = BestSource(tensor, destination);
    copy.destination = destination;
    copy.service_class = s.ops[op].service_class;
    copy.waiters = {op};
    copies_.push_back(copy);
    waiting_.push_back(copies_.size() - 1);
  }

  int RankOf(const NaiveCopy& copy) const {
    return rules_.classes ? static_cast<int>(copy.service_class) : 0;
  }

  void StartCopies() {
    if (waiting_.empty()) return;
    std::sort(waiting_.begin(), waiting_.end(), [this](size_t a, size_t b) {
      const int x = RankOf(copies_[a]), y = RankOf(copies_[b]);
      return x != y ? x < y : a < b;
    });
    std::vector<size_t> still;
    for (const size_t i : waiting_) {
      const NaiveCopy& copy = copies_[i];
      // Better and equal classes under way stand in the way; worse ones are overtaken and go on
      // afterwards.
      std::vector<size_t> overtaken;
      bool blocked = false;
      for (const size_t j : under_way_) {
        const NaiveCopy& other = copies_[j];
        if (other.source != copy.source && other.destination != copy.destination) continue;
        if (RankOf(other) <= RankOf(copy)) {
          blocked = true;
        } else {
          overtaken.push_back(j);
        }
      }
      if (blocked) {
        still.push_back(i);
        continue;
      }
      const DurationNs duration =
          std::max<DurationNs>(1, CopyTime(copy.tensor, copy.source, copy.destination));
      for (const size_t j : overtaken) {
        copies_[j].finish += duration;
        events_.push({copies_[j].finish, What::kCopyEnds, static_cast<uint32_t>(j)});
      }
      const SnapTensor& tensor = s.tensors[copy.tensor];
      if (!Reserved(tensor.instance, copy.destination) && !In(tensor.slots, copy.destination)) {
        TakeBytes(copy.destination, tensor.bytes, kNone, copy.tensor);
        tensors_[copy.tensor].held |= uint64_t{1} << copy.destination;
      }
      out_->bytes_moved += tensor.bytes;
      CopyRuns(i, now_ + duration);
    }
    waiting_ = still;
  }

  void CopyRuns(size_t i, TimeNs finish) {
    copies_[i].state = NaiveCopy::kRuns;
    copies_[i].finish = finish;
    under_way_.push_back(i);
    events_.push({finish, What::kCopyEnds, static_cast<uint32_t>(i)});
  }

  void EndCopy(size_t i) {
    if (copies_[i].state != NaiveCopy::kRuns || copies_[i].finish != now_) return;  // was overtaken
    copies_[i].state = NaiveCopy::kDone;
    std::erase(under_way_, i);
    tensors_[copies_[i].tensor].resident |= uint64_t{1} << copies_[i].destination;
    for (const OpIndex op : copies_[i].waiters) {
      if (--missing_[op] == 0) ready_[device_[op]].push(op);
    }
  }

  // ---- memory ----

  void Fails(const Infeasible& infeasible) {
    if (!out_->memory_feasible) return;
    out_->memory_feasible = false;
    out_->infeasible_domain = infeasible.domain;
    out_->infeasible = infeasible;
  }
  void TakeBytes(DomainIndex domain, int64_t bytes, OpIndex op, TensorIndex tensor) {
    if (bytes <= 0) return;
    free_[domain] -= bytes;
    out_->free_bytes_min[domain] = std::min(out_->free_bytes_min[domain], free_[domain]);
    if (free_[domain] < 0)
      Fails({Infeasible::Cause::kMemory, domain, now_, op, tensor, -free_[domain]});
  }
  void EndTensor(TensorIndex tensor) {
    for (DomainIndex domain = 0; tensors_[tensor].held != 0 && domain < free_.size(); ++domain) {
      if (!In(tensors_[tensor].held, domain)) continue;
      free_[domain] += s.tensors[tensor].bytes;
      tensors_[tensor].held &= ~(uint64_t{1} << domain);
    }
  }
  void Curve() {
    for (size_t d = 0; d < free_.size(); ++d) {
      std::vector<MemoryPoint>& curve = out_->memory[d];
      if (curve.back().free_bytes == free_[d]) continue;
      if (curve.back().at == now_) {
        curve.back().free_bytes = free_[d];
      } else {
        curve.push_back({now_, free_[d]});
      }
    }
  }

  const Snapshot& s;
  Rules rules_;
  const Options& options_;
  const estimate::TransferEstimator& transfers_;
  Timeline* out_;
  bool curve_;
  TimeNs now_;
  std::priority_queue<Event, std::vector<Event>, Later> events_;
  std::vector<uint32_t> pending_, missing_;  // by op
  std::vector<DeviceIndex> device_;
  std::vector<TimeNs> earliest_;
  std::vector<OpIndex> released_;
  std::vector<uint32_t> instance_ops_;  // not finished, by instance
  std::vector<NaiveTensor> tensors_;
  std::vector<bool> busy_;  // by device
  std::vector<OpIndex> running_;
  std::vector<TimeNs> busy_until_, phantom_from_, phantom_until_;
  std::vector<int64_t> refund_;
  std::vector<DurationNs> backlog_online_, backlog_offline_;  // released, not started
  std::vector<ReadyQueue> ready_;
  std::vector<NaiveCopy> copies_;  // by age
  std::vector<size_t> waiting_, under_way_;
  std::vector<int64_t> free_;  // by domain
};

}  // namespace

void NaiveRun(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules,
              const Options& options, const estimate::TransferEstimator& transfers, Timeline* out) {
  Naive(snapshot, batch, rules, options, transfers, out).Run();
}

}  // namespace slice::sim
