#include "tests/sched/world.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <memory>
#include <random>
#include <set>

#include "daemon/sched/policy.h"
#include "tests/sim/snapshot_builder.h"

namespace slice::sched {
namespace {

using sim::OpState;

constexpr TimeNs kStart = kSecond;
constexpr size_t kBatchOps = 8;
constexpr DurationNs kBatchTime = 20 * kMillisecond;

struct Sequence {
  size_t tenant = 0;
  TimeNs arrival = 0;
  TimeNs deadline = kNever;
  uint32_t steps_left = 0;
  bool between = false;
  DeviceIndex last_device = kNoDevice;
  TimeNs last_completion = 0;
  std::vector<uint64_t> kv;  // residency by layer
};
struct Op {
  OpState state = OpState::kUnscheduled;
  bool done = false;
  DeviceIndex device = kNoDevice;
  TimeNs ready_at = kNever;  // inputs there
  TimeNs finish = kNever;
};
struct Instance {
  size_t sequence = 0;
  TimeNs submit = 0;
  DurationNs layer = 0;
  uint64_t creation = 0;
  std::vector<Op> ops;
  TimeNs retry_at = 0;
  bool over = false;
  std::vector<sim::OpIndex> index;  // in the snapshot
};

class World {
 public:
  explicit World(const WorldConfig& config)
      : config_(config), rng_(config.seed), transfers_(config.devices), simulator_(transfers_, {}) {
    policy_ = std::move(MakePolicy(config.policy, &simulator_).value());
    running_.assign(config.devices, {SIZE_MAX, 0});
    link_free_.assign(config.devices, 0);
    report_.busy.assign(config.devices, 0);
    // Arrivals do not depend on what the policy does: the same for all policies.
    for (size_t t = 0; t < config.tenants.size(); ++t) {
      const WorldTenant& tenant = config.tenants[t];
      if (tenant.sequences_per_second <= 0) {
        arrivals_.insert({kStart, t});
        continue;
      }
      std::exponential_distribution<double> wait(tenant.sequences_per_second);
      for (double at = wait(rng_); at < static_cast<double>(config.length) / 1e9;
           at += wait(rng_)) {
        arrivals_.insert({kStart + static_cast<TimeNs>(at * 1e9), t});
      }
    }
  }

  WorldReport Run() {
    while (now_ < kStart + config_.length) {
      Finish();
      Arrive();
      Rounds();
      for (size_t d = 0; d < config_.devices; ++d) StartOn(static_cast<DeviceIndex>(d));
      const TimeNs next = NextTime();
      if (next == kNever) break;
      now_ = next;
    }
    std::sort(report_.online_steps.begin(), report_.online_steps.end());
    std::sort(report_.online_sequences.begin(), report_.online_sequences.end());
    return report_;
  }

 private:
  const WorldTenant& Tenant(const Instance& instance) const {
    return config_.tenants[sequences_[instance.sequence].tenant];
  }
  bool Online(const Instance& instance) const {
    return Tenant(instance).service_class == ServiceClass::kOnline;
  }

  OrderKey Key(const Instance& instance) const {
    const Sequence& sequence = sequences_[instance.sequence];
    WorkItem item;
    item.service_class = Tenant(instance).service_class;
    item.arrival = sequence.arrival;
    item.deadline = sequence.deadline;
    item.creation = instance.creation;
    for (const Op& op : instance.ops) item.work_left += op.done ? 0 : instance.layer;
    return policy_->Key(item, now_);
  }
  // Live instances, best first: their place is the `order` of their ops.
  std::vector<size_t> Order() const {
    std::vector<std::pair<OrderKey, size_t>> keyed;
    for (size_t i = 0; i < instances_.size(); ++i) {
      if (!instances_[i].over) keyed.emplace_back(Key(instances_[i]), i);
    }
    std::sort(keyed.begin(), keyed.end(),
              [](const auto& a, const auto& b) { return Less(a.first, b.first); });
    std::vector<size_t> order;
    for (const auto& [key, i] : keyed) order.push_back(i);
    return order;
  }

  void Submit(size_t sequence_index, bool prefill) {
    Sequence& sequence = sequences_[sequence_index];
    const WorldTenant& tenant = config_.tenants[sequence.tenant];
    if (sequence.between) gaps_.ObserveNext(sequence.tenant, now_ - sequence.last_completion);
    sequence.between = false;
    Instance instance;
    instance.sequence = sequence_index;
    instance.submit = now_;
    instance.layer = prefill ? tenant.prefill_layer : tenant.step_layer;
    instance.creation = created_++;
    instance.ops.resize(tenant.layers);
    instances_.push_back(instance);
    if (tenant.service_class == ServiceClass::kOnline) Replace();
  }

  // An online arrival re-places what offline work has not started.
  void Replace() {
    for (Instance& instance : instances_) {
      if (instance.over || Online(instance)) continue;
      instance.retry_at = 0;
      for (Op& op : instance.ops) {
        if (op.state == OpState::kPlaced && op.ready_at == kNever) op.state = OpState::kUnscheduled;
      }
    }
  }

  void Arrive() {
    while (!arrivals_.empty() && arrivals_.begin()->first <= now_) {
      const size_t t = arrivals_.begin()->second;
      arrivals_.erase(arrivals_.begin());
      const WorldTenant& tenant = config_.tenants[t];
      Sequence sequence;
      sequence.tenant = t;
      sequence.arrival = now_;
      sequence.deadline = tenant.deadline > 0 ? now_ + tenant.deadline : kNever;
      sequence.steps_left = tenant.steps;
      sequence.kv.assign(tenant.layers, uint64_t{1} << tenant.home);
      sequences_.push_back(sequence);
      Submit(sequences_.size() - 1, true);
    }
    while (!submits_.empty() && submits_.begin()->first <= now_) {
      const size_t sequence = submits_.begin()->second;
      submits_.erase(submits_.begin());
      Submit(sequence, false);
    }
  }

  void Finish() {
    for (size_t d = 0; d < config_.devices; ++d) {
      if (running_[d].first == SIZE_MAX) continue;
      const auto [i, k] = running_[d];
      Instance& instance = instances_[i];
      Op& op = instance.ops[k];
      if (op.finish > now_) continue;
      running_[d].first = SIZE_MAX;
      op.done = true;
      sequences_[instance.sequence].kv[k] = uint64_t{1} << d;
      if (k + 1 == instance.ops.size()) EndOf(&instance, static_cast<DeviceIndex>(d));
    }
  }

  void EndOf(Instance* instance, DeviceIndex device) {
    instance->over = true;
    Sequence& sequence = sequences_[instance->sequence];
    const WorldTenant& tenant = config_.tenants[sequence.tenant];
    const bool online = tenant.service_class == ServiceClass::kOnline;
    if (online) {
      report_.online_steps.push_back(now_ - instance->submit);
    } else {
      ++report_.offline_steps;
    }
    if (sequence.steps_left > 0) {
      --sequence.steps_left;
      std::lognormal_distribution<double> gap(std::log(static_cast<double>(tenant.gap)), 0.3);
      sequence.between = true;
      sequence.last_completion = now_;
      sequence.last_device = device;
      submits_.insert({now_ + static_cast<TimeNs>(gap(rng_)), instance->sequence});
      return;
    }
    gaps_.ObserveEnd(sequence.tenant);
    if (online) {
      report_.online_sequences.push_back(now_ - sequence.arrival);
      report_.online_late += now_ > sequence.deadline ? 1 : 0;
    }
    if (tenant.sequences_per_second <= 0) arrivals_.insert({now_ + kMillisecond, sequence.tenant});
  }

  std::pair<TimeNs, TimeNs> Phantom(DeviceIndex device) const {
    std::pair<TimeNs, TimeNs> phantom{kNever, 0};
    for (const Sequence& sequence : sequences_) {
      if (!sequence.between || sequence.last_device != device) continue;
      if (config_.tenants[sequence.tenant].service_class != ServiceClass::kOnline) continue;
      const estimate::GapEstimator::Gap gap = gaps_.Predict(sequence.tenant);
      if (sequence.last_completion + gap.p90 <= now_) continue;
      phantom.first = std::min(phantom.first, sequence.last_completion + gap.p10);
      phantom.second = std::max(phantom.second, sequence.last_completion + gap.p90);
    }
    return phantom;
  }

  sim::SnapshotBuilder Snapshot() {
    sim::SnapshotBuilder builder(config_.devices, now_);
    for (size_t d = 0; d < config_.devices; ++d) {
      const auto [from, until] = Phantom(static_cast<DeviceIndex>(d));
      builder.device(d).phantom_from = from;
      builder.device(d).phantom_until = until;
    }
    uint64_t place = 0;
    for (const size_t i : Order()) {
      Instance& instance = instances_[i];
      const Sequence& sequence = sequences_[instance.sequence];
      const WorldTenant& tenant = Tenant(instance);
      const uint32_t index = builder.Instance(tenant.service_class, sequence.deadline);
      sim::SnapInstance& settings = builder.instance(index);
      settings.arrival = sequence.arrival;
      settings.reserved_domains = uint64_t{1} << tenant.home;
      settings.rest_of_sequence =
          sequence.steps_left * (tenant.layers * tenant.step_layer + tenant.gap);
      if (sequence.steps_left > 0) {
        const estimate::GapEstimator::Gap gap = gaps_.Predict(sequence.tenant);
        settings.gap_p10 = gap.p10;
        settings.gap_p90 = gap.p90;
      }
      instance.index.assign(instance.ops.size(), sim::kNone);
      for (size_t k = 0; k < instance.ops.size(); ++k) {
        const Op& op = instance.ops[k];
        if (op.done) continue;
        sim::OpSpec spec;
        spec.instance = index;
        spec.duration = instance.layer;
        spec.state = op.state;
        spec.device = op.state == OpState::kUnscheduled ? kNoDevice : op.device;
        spec.order = place;
        spec.reads = spec.writes = {builder.Managed(tenant.kv_bytes, tenant.home)};
        builder.tensor(spec.reads[0]).resident = sequence.kv[k];
        if (k > 0 && !instance.ops[k - 1].done) spec.after = {instance.index[k - 1]};
        instance.index[k] = builder.Op(spec);
        if (op.state == OpState::kRunning) {
          builder.Running(instance.index[k], op.device,
                          std::max<DurationNs>(0, started_[op.device] + instance.layer - now_));
        }
      }
      ++place;
    }
    return builder;
  }

  void Rounds() {
    for (bool again = true; again;) {
      again = false;
      std::vector<DurationNs> placed(config_.devices, 0);
      for (const Instance& instance : instances_) {
        if (instance.over) continue;
        for (const Op& op : instance.ops) {
          if (op.state == OpState::kPlaced && !op.done) placed[op.device] += instance.layer;
        }
      }
      if (*std::min_element(placed.begin(), placed.end()) >= 2 * kBatchTime) return;
      for (const size_t i : Order()) {
        Instance& instance = instances_[i];
        if (!policy_->Admits(Tenant(instance).service_class) || instance.retry_at > now_) continue;
        std::vector<size_t> batch;
        DurationNs time = 0;
        for (size_t k = 0; k < instance.ops.size() && batch.size() < kBatchOps && time < kBatchTime;
             ++k) {
          if (instance.ops[k].state != OpState::kUnscheduled) continue;
          batch.push_back(k);
          time += instance.layer;
        }
        if (batch.empty()) continue;
        sim::SnapshotBuilder builder = Snapshot();
        std::vector<sim::OpIndex> ops;
        for (const size_t k : batch) ops.push_back(instance.index[k]);
        const Decision decision = policy_->Decide(builder.Build(), ops, Tenant(instance).home);
        ++report_.rounds;
        if (!decision.placed) {
          ++report_.deferrals;
          instance.retry_at = decision.retry_at;
          continue;
        }
        for (const size_t k : batch) {
          instance.ops[k].state = OpState::kPlaced;
          instance.ops[k].device = decision.device;
        }
        again = true;
        break;
      }
    }
  }

  // Copies of a placed op whose turn has come start at once, one after the other into each domain.
  void AskForInputs() {
    for (const size_t i : Order()) {
      Instance& instance = instances_[i];
      for (size_t k = 0; k < instance.ops.size(); ++k) {
        Op& op = instance.ops[k];
        if (op.state != OpState::kPlaced || op.ready_at != kNever ||
            (k > 0 && !instance.ops[k - 1].done))
          continue;
        op.ready_at = now_;
        uint64_t& resident = sequences_[instance.sequence].kv[k];
        if ((resident & (uint64_t{1} << op.device)) != 0) continue;
        const int64_t bytes = Tenant(instance).kv_bytes;
        const auto source = static_cast<DomainIndex>(std::countr_zero(resident));
        TimeNs& link = link_free_[op.device];
        link =
            std::max(link, now_) + 30 * kMicrosecond + transfers_.Predict(source, op.device, bytes);
        op.ready_at = link;
        resident = uint64_t{1} << op.device;
        report_.bytes_moved += bytes;
      }
    }
  }

  void StartOn(DeviceIndex device) {
    AskForInputs();
    if (running_[device].first != SIZE_MAX) return;
    const auto [from, until] = Phantom(device);
    uint64_t place = 0;
    std::pair<RunKey, std::pair<size_t, size_t>> best{{}, {SIZE_MAX, 0}};
    for (const size_t i : Order()) {
      const Instance& instance = instances_[i];
      ++place;
      for (size_t k = 0; k < instance.ops.size(); ++k) {
        const Op& op = instance.ops[k];
        if (op.state != OpState::kPlaced || op.done || op.device != device || op.ready_at > now_)
          continue;
        const bool gap = policy_->RespectsSlices() && !Online(instance) && now_ < until;
        if (gap && now_ + instance.layer > from) continue;
        const ServiceClass service_class =
            policy_->ClassesOrderQueues() ? Tenant(instance).service_class : ServiceClass::kOnline;
        const RunKey key{service_class, 0, place, 0, static_cast<uint32_t>(k)};
        if (best.second.first == SIZE_MAX || RunsBefore(key, best.first)) best = {key, {i, k}};
      }
    }
    if (best.second.first == SIZE_MAX) return;
    Instance& instance = instances_[best.second.first];
    Op& op = instance.ops[best.second.second];
    std::normal_distribution<double> noise(1, config_.noise);
    const auto duration =
        static_cast<DurationNs>(static_cast<double>(instance.layer) * std::max(0.5, noise(rng_)));
    op.state = OpState::kRunning;
    op.finish = now_ + duration;
    started_[device] = now_;
    running_[device] = best.second;
    report_.busy[device] += duration;
    if (!Online(instance)) {
      report_.offline_work += duration;
      report_.offline_ops_off_home += device != Tenant(instance).home ? 1 : 0;
    }
  }

  TimeNs NextTime() const {
    TimeNs next = kNever;
    const auto consider = [&](TimeNs at) {
      if (at > now_) next = std::min(next, at);
    };
    if (!arrivals_.empty()) consider(arrivals_.begin()->first);
    if (!submits_.empty()) consider(submits_.begin()->first);
    for (size_t d = 0; d < config_.devices; ++d) {
      if (running_[d].first != SIZE_MAX)
        consider(instances_[running_[d].first].ops[running_[d].second].finish);
      consider(Phantom(static_cast<DeviceIndex>(d)).second);
    }
    for (const Instance& instance : instances_) {
      if (instance.over) continue;
      consider(instance.retry_at);
      for (const Op& op : instance.ops) {
        if (!op.done && op.ready_at != kNever) consider(op.ready_at);
      }
    }
    return next;
  }

  const WorldConfig& config_;
  std::mt19937_64 rng_;
  estimate::TransferEstimator transfers_;
  estimate::GapEstimator gaps_;
  sim::Simulator simulator_;
  std::unique_ptr<Policy> policy_;
  TimeNs now_ = kStart;
  uint64_t created_ = 0;
  std::vector<Sequence> sequences_;
  std::vector<Instance> instances_;
  std::multiset<std::pair<TimeNs, size_t>> arrivals_, submits_;
  std::vector<std::pair<size_t, size_t>> running_;  // instance, op; SIZE_MAX: idle
  std::array<TimeNs, kDevicesMax> started_{};
  std::vector<TimeNs> link_free_;
  WorldReport report_;
};

}  // namespace

WorldReport RunWorld(const WorldConfig& config) { return World(config).Run(); }

}  // namespace slice::sched
