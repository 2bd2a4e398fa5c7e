#include "tests/testing/virtual_executor.h"

#include <algorithm>
#include <cstring>

namespace slice::testing {

VirtualExecutor::VirtualExecutor(const engine::Config& config, const VirtualOptions& options)
    : pool_used(config.domains.size(), 0),
      pool_peak(config.domains.size(), 0),
      config_(config),
      options_(options),
      random_(options.seed),
      devices_(config.devices.size()) {}

void VirtualExecutor::AddSet(const engine::TensorSetConfig& set) {
  SetState& state = sets_[set.id.value];
  state.config = set;
  state.resident.assign(set.tensors.size(), uint64_t{1} << set.home);
  const bool managed = set.kind == engine::TensorKind::kManaged;
  state.zero.assign(set.tensors.size(), managed);
  state.dirty.assign(set.tensors.size(), 0);
  state.writers.assign(set.tensors.size(), 0);
  state.readers.assign(set.tensors.size(), 0);
}

void VirtualExecutor::At(TimeNs at, std::function<void()> run) {
  const uint64_t life = life_;
  events_.push({at, next_event_++, [this, life, run = std::move(run)] {
                  if (life == life_) run();
                }});
}

void VirtualExecutor::AdvanceTo(TimeNs at) {
  while (!events_.empty() && events_.top().at <= at) {
    Event event = events_.top();
    events_.pop();
    now_ = std::max(now_, event.at);
    event.run();
  }
  now_ = std::max(now_, at);
}

bool VirtualExecutor::idle() const { return events_.empty(); }

void VirtualExecutor::Die() {
  ++life_;
  while (!events_.empty()) events_.pop();
  instances_.clear();
  transfers_.clear();
  for (Device& device : devices_) device = Device{};
  std::fill(pool_used.begin(), pool_used.end(), 0);
  running_ops_ = 0;
  for (auto& [id, set] : sets_) {
    std::fill(set.writers.begin(), set.writers.end(), 0);
    std::fill(set.readers.begin(), set.readers.end(), 0);
    if (set.config.kind == engine::TensorKind::kConstant) {
      std::fill(set.resident.begin(), set.resident.end(), uint64_t{1} << set.config.home);
    }
  }
  for (OpRun& run : ops) {
    if (!run.ended) run.finish = now_;
    run.ended = true;
  }
}

void VirtualExecutor::ToExecutor(uint32_t type, std::span<const std::byte> payload, DeviceIndex) {
  if (on_command) on_command(type, payload);
  At(std::max(now_, now_) + options_.command_latency,
     [this, type, copy = std::vector<std::byte>(payload.begin(), payload.end())] {
       Command(type, copy);
     });
}

void VirtualExecutor::Complete(TenantId tenant, const wire::CompletionSlot& completion,
                               const std::string& text) {
  const bool fresh =
      completions
          .emplace(std::pair{tenant.value, completion.cookie}, Completion{completion, text, now_})
          .second;
  if (!fresh) Violate("cookie " + std::to_string(completion.cookie) + " completed twice");
}

void VirtualExecutor::Trace(const engine::TraceEvent& event) { trace.push_back(event); }

template <typename Record>
void VirtualExecutor::Report(wire::ReportType type, const Record& record) {
  std::vector<std::byte> payload(sizeof(record));
  std::memcpy(payload.data(), &record, sizeof(record));
  At(now_ + options_.report_latency, [this, type, payload = std::move(payload)] {
    if (on_report) on_report(type, payload);
    const Status status = engine_->HandleReport(type, payload, now_);
    if (!status.ok()) Violate("report " + std::to_string(type) + " refused: " + status.ToString());
  });
}

VirtualExecutor::Instance* VirtualExecutor::Find(uint64_t id, uint32_t attempt) {
  const auto found = instances_.find({id, attempt});
  return found == instances_.end() ? nullptr : &found->second;
}

void VirtualExecutor::Use(DomainIndex domain, int64_t bytes) {
  pool_used[domain] += bytes;
  pool_peak[domain] = std::max(pool_peak[domain], pool_used[domain]);
  if (pool_used[domain] < 0) Violate("pool below zero");
  if (options_.check_memory && pool_used[domain] > config_.domains[domain].pool_bytes) {
    Violate("pool of domain " + std::to_string(domain) + " holds " +
            std::to_string(pool_used[domain]) + " of " +
            std::to_string(config_.domains[domain].pool_bytes));
  }
}

void VirtualExecutor::Command(uint32_t type, const std::vector<std::byte>& payload) {
  const auto decode = [&](auto record, auto call) {
    if (payload.size() != sizeof(record))
      return Violate("command " + std::to_string(type) + " of a wrong size");
    std::memcpy(&record, payload.data(), sizeof(record));
    call(record);
  };
  switch (type) {
    case wire::kStartInstance:
      return OnStart(payload);
    case wire::kEndInstance:
      return decode(wire::EndInstance{}, [this](const auto& r) { OnEnd(r); });
    case wire::kIssue:
      return decode(wire::Issue{}, [this](const auto& r) { OnIssue(r); });
    case wire::kRecall:
      return decode(wire::Recall{}, [this](const auto& r) { OnRecall(r); });
    case wire::kWatch:
      return decode(wire::Watch{}, [this](const auto& r) { OnWatch(r); });
    case wire::kRecv:
      return decode(wire::TransferRef{}, [this](const auto& r) {
        const auto found = transfers_.find(r.transfer);
        if (found != transfers_.end()) found->second.recv = true;
      });
    case wire::kSend:
      return decode(wire::TransferRef{}, [this](const auto& r) { StartCopy(r.transfer); });
    case wire::kCancelTransfer:
      return decode(wire::TransferRef{}, [this](const auto& r) {
        const auto found = transfers_.find(r.transfer);
        if (found == transfers_.end()) return;
        found->second.cancelled = true;
        if (!found->second.running) FinishTransfer(r.transfer, StatusCode::kCancelled);
      });
    case wire::kTensorCommandRun:
      return decode(wire::TensorCommandRun{}, [this](const auto& r) { OnCommandRun(r); });
    case wire::kDropReplica:
      return decode(wire::DropReplica{}, [this](const auto& r) {
        ++drops;
        const auto found = sets_.find(r.set);
        if (found == sets_.end()) return;
        for (size_t t = 0; t < found->second.resident.size(); ++t) {
          if (r.tensor != 0xffffffff && r.tensor != t) continue;
          found->second.resident[t] &= ~(uint64_t{1} << r.domain);
          found->second.dirty[t] &= ~(uint64_t{1} << r.domain);
        }
      });
    default:
      Violate("command " + std::to_string(type) + " is unknown");
  }
}

void VirtualExecutor::OnStart(const std::vector<std::byte>& payload) {
  wire::StartInstance start;
  if (payload.size() < sizeof(start)) return Violate("short StartInstance");
  std::memcpy(&start, payload.data(), sizeof(start));
  const size_t expected =
      sizeof(start) + start.symbol_count * sizeof(int64_t) +
      (size_t{start.input_count} + start.output_count) * sizeof(wire::ArenaRange);
  if (payload.size() != expected) return Violate("StartInstance of a wrong size");
  const auto binding = bindings_.find(start.binding);
  if (binding == bindings_.end()) return Violate("StartInstance with an unknown binding");
  if (!instances_.emplace(std::pair{start.instance, start.attempt}, Instance{}).second)
    return Violate("started twice");
  Instance& instance = instances_[{start.instance, start.attempt}];
  instance.start = start;
  instance.binding = &binding->second;
  graphs_[start.instance] = instance.binding->graph;
  const graph::Template& graph = *instance.binding->graph;
  std::vector<int64_t> symbols(start.symbol_count);
  if (!symbols.empty())
    std::memcpy(symbols.data(), payload.data() + sizeof(start), symbols.size() * sizeof(int64_t));
  const Status bound = graph.Bind(symbols, &instance.sizes);
  if (!bound.ok()) Violate("symbols do not bind: " + bound.ToString());
  instance.ops.assign(graph.groups().size(), OpState::kNone);
  instance.values.assign(graph.crossing().size(), 0);
  for (const graph::ValueUse& use : graph.crossing())
    instance.left.push_back(static_cast<uint32_t>(use.consumers.size()));
  instance.dynamics.assign(graph.dynamics().size(), 0);
  instance.dynamics_left.assign(graph.dynamics().size(), 0);
  for (const graph::Group& group : graph.groups()) {
    for (const uint32_t d : group.dynamic_in) ++instance.dynamics_left[d];
  }
}

bool VirtualExecutor::IsReady(const Instance& instance, uint32_t op, DomainIndex domain) const {
  const graph::Group& group = instance.binding->graph->groups()[op];
  for (const uint32_t before : group.predecessors) {
    if (instance.ops[before] != OpState::kFinished) return false;
  }
  for (const uint32_t value : group.values_in) {
    if ((instance.values[instance.binding->graph->crossing_index(value)] >> domain & 1) == 0)
      return false;
  }
  return true;
}

void VirtualExecutor::OnIssue(const wire::Issue& issue) {
  Instance* const instance = Find(issue.instance, issue.attempt);
  if (instance == nullptr) return Violate("issue for an unknown instance");
  if (instance->ending) return;
  if (issue.op >= instance->ops.size() || issue.device >= devices_.size())
    return Violate("issue of a bad op or device");
  if (instance->failed) return;
  if (instance->ops[issue.op] != OpState::kNone) return Violate("op issued twice");
  if (refuse_issue && refuse_issue(issue.instance, issue.op)) {
    return Report(wire::kRecalled, wire::Recalled{issue.instance, issue.attempt, issue.op, 2, 0});
  }
  if (issue.duration_ns <= 0) Violate("issue without a duration");
  instance->ops[issue.op] = OpState::kIssued;
  executor::QueuedOp op;
  op.key = {issue.instance, issue.attempt, issue.op};
  op.service_class = issue.service_class == 0 ? ServiceClass::kOnline : ServiceClass::kOffline;
  op.after_online_finish = (issue.flags & wire::kAfterOnlineFinish) != 0;
  op.priority = issue.priority;
  op.order = issue.order;
  op.earliest_ns = issue.earliest_ns;
  op.end_by_ns = issue.end_by_ns;
  op.duration_ns = issue.duration_ns;
  op.ready = IsReady(*instance, issue.op, config_.devices[issue.device].domain);
  devices_[issue.device].queue.Add(op);
  RunDevice(issue.device);
}

void VirtualExecutor::RunDevice(DeviceIndex index) {
  Device& device = devices_[index];
  if (device.running) return;
  const auto recalled = [this](const executor::QueuedOp& op) {
    ++recalled_by_window;
    if (Instance* const instance = Find(op.key.instance, op.key.attempt))
      instance->ops[op.key.op] = OpState::kNone;
    Report(wire::kRecalled, wire::Recalled{op.key.instance, op.key.attempt, op.key.op, 1, 0});
  };
  const executor::LaunchQueue::Decision decision = device.queue.Next(now_, device.behind_online);
  for (const executor::QueuedOp& op : decision.out_of_window) recalled(op);
  if (!decision.launch.has_value()) {
    if (decision.wake_ns != kNever && decision.wake_ns != device.wake) {
      device.wake = decision.wake_ns;
      At(decision.wake_ns, [this, index] {
        devices_[index].wake = kNever;
        RunDevice(index);
      });
    }
    return;
  }
  const executor::OpKey key = decision.launch->key;
  Instance* const instance = Find(key.instance, key.attempt);
  const DomainIndex domain = config_.devices[index].domain;
  const bool online = decision.launch->service_class == ServiceClass::kOnline;
  if (instance == nullptr) return Violate("launched an op of nobody");
  instance->ops[key.op] = OpState::kLaunched;
  ++instance->running;
  ++running_ops_;
  device.running = true;
  const graph::Group& group = instance->binding->graph->groups()[key.op];
  for (const uint32_t d : group.dynamic_in) {
    if ((instance->dynamics[d] >> domain & 1) != 0) continue;
    instance->dynamics[d] |= uint64_t{1} << domain;
    Use(domain, Rounded(instance->sizes.dynamic_bytes(d)));
  }
  for (const uint32_t value : group.values_out)
    Use(domain,
        Rounded(instance->sizes.crossing_bytes(instance->binding->graph->crossing_index(value))));
  int64_t scratch = instance->sizes.workspace_bytes(key.op);
  for (const uint32_t result : group.results) {
    if (instance->binding->graph->crossing_index(instance->binding->graph->results()[result]) ==
        graph::kNoIndex) {
      scratch += Rounded(instance->sizes.result_bytes(result));
    }
  }
  Use(domain, scratch);
  CheckPieces(*instance, key.op, domain, true);
  DurationNs planned = std::max<DurationNs>(instance->sizes.flops(key.op) / 20, 1);
  double factor = options_.scale;
  const auto uniform = [this] { return static_cast<double>(random_() >> 11) / 9007199254740992.0; };
  if (options_.noise > 0) factor *= 1 + options_.noise * (2 * uniform() - 1);
  if (options_.outlier_rate > 0 && uniform() < options_.outlier_rate) factor *= 10;
  DurationNs duration =
      std::max<DurationNs>(static_cast<DurationNs>(static_cast<double>(planned) * factor), 1);
  if (duration_of) duration = duration_of(key.instance, key.op, duration);
  Report(wire::kStarted, wire::Started{key.instance, key.attempt, key.op, now_, index, 0});
  ops.push_back({key.instance, key.attempt, key.op, index, now_, now_ + duration, false,
                 instance->start.tenant != 0 && online, instance->start.tenant});
  const size_t record = ops.size() - 1;
  const InstanceKey who{key.instance, key.attempt};
  At(now_ + duration, [this, who, op = key.op, index, record, online, scratch, domain] {
    Use(domain, -scratch);
    FinishOp(who, op, index, record, online);
  });
}

void VirtualExecutor::CheckPieces(const Instance& instance, uint32_t op, DomainIndex domain,
                                  bool begin) {
  const graph::Group& group = instance.binding->graph->groups()[op];
  const auto touch = [&](uint32_t position, bool write) {
    const engine::TensorRef& ref = instance.binding->statics[position];
    SetState& set = sets_[ref.set.value];
    uint32_t& writers = set.writers[ref.tensor];
    uint32_t& readers = set.readers[ref.tensor];
    if (begin) {
      if (!set.Valid(ref.tensor, domain)) {
        Violate("op " + std::to_string(op) + ": tensor " + std::to_string(ref.tensor) + " of set " +
                std::to_string(ref.set.value) + " is not in domain " + std::to_string(domain));
      }
      if (writers > 0 || (write && readers > 0)) Violate("two ops at a written piece");
    }
    if (write && set.config.kind == engine::TensorKind::kManaged) {
      set.zero[ref.tensor] = false;
      set.resident[ref.tensor] = uint64_t{1} << domain;
      set.dirty[ref.tensor] |= uint64_t{1} << domain;
    }
    (write ? writers : readers) += begin ? 1 : static_cast<uint32_t>(-1);
  };
  for (const uint32_t p : group.writes) touch(p, true);
  for (const uint32_t p : group.reads) {
    if (std::find(group.writes.begin(), group.writes.end(), p) == group.writes.end())
      touch(p, false);
  }
}

void VirtualExecutor::FinishOp(InstanceKey key, uint32_t op, DeviceIndex index, size_t record,
                               bool online) {
  Device& device = devices_[index];
  device.running = false;
  device.behind_online = online;
  --running_ops_;
  ops[record].ended = true;
  Instance* const instance = Find(key.first, key.second);
  if (instance == nullptr) return Violate("op finished for nobody");
  --instance->running;
  const DomainIndex domain = config_.devices[index].domain;
  CheckPieces(*instance, op, domain, false);
  const graph::Template& graph = *instance->binding->graph;
  const graph::Group& group = graph.groups()[op];
  int fate = fail_op ? fail_op(key.first, op) : -1;
  if (options_.fail_rate > 0 &&
      static_cast<double>(random_() % 100'000) < options_.fail_rate * 100'000)
    fate = SLICE_ERR_OP_FAILED;
  if (fate >= 0) {
    for (const uint32_t value : group.values_out)
      Use(domain, -Rounded(instance->sizes.crossing_bytes(graph.crossing_index(value))));
    instance->failed = true;
    for (Device& other : devices_) other.queue.RemoveInstance(key.first, key.second);
    wire::Failed failed{};
    failed.instance = key.first;
    failed.attempt = key.second;
    failed.op = op;
    failed.status = fate;
    failed.began_write = group.writes.empty() ? 0 : 1;
    std::strncpy(failed.text, "made to fail", sizeof(failed.text) - 1);
    Report(wire::kFailed, failed);
  } else {
    instance->ops[op] = OpState::kFinished;
    for (const uint32_t value : group.values_out)
      instance->values[graph.crossing_index(value)] |= uint64_t{1} << domain;
    for (const uint32_t value : group.values_in) --instance->left[graph.crossing_index(value)];
    for (const uint32_t d : group.dynamic_in) --instance->dynamics_left[d];
    FreeDead(instance);
    wire::Finished finished{};
    finished.instance = key.first;
    finished.attempt = key.second;
    finished.op = op;
    finished.start_ns = ops[record].start;
    finished.end_ns = now_;
    finished.cpu_ns = now_ - ops[record].start;
    finished.device = index;
    if (peak_of) finished.peak_bytes = peak_of(key.first, op);
    Report(wire::kFinished, finished);
    if (!instance->ending) Refresh(key, instance);
  }
  EndIfIdle(key);
  RunDevice(index);
}

void VirtualExecutor::FreeDead(Instance* instance) {
  for (uint32_t v = 0; v < instance->values.size(); ++v) {
    bool in_use = instance->left[v] > 0;
    for (const auto& [id, transfer] : transfers_) {
      in_use |= transfer.running && transfer.watch.instance == instance->start.instance &&
                transfer.watch.attempt == instance->start.attempt &&
                instance->binding->graph->crossing_index(transfer.watch.value) == v;
    }
    if (in_use) continue;
    for (uint64_t mask = instance->values[v]; mask != 0; mask &= mask - 1) {
      Use(static_cast<DomainIndex>(__builtin_ctzll(mask)),
          -Rounded(instance->sizes.crossing_bytes(v)));
    }
    instance->values[v] = 0;
  }
  for (size_t d = 0; d < instance->dynamics.size(); ++d) {
    if (instance->dynamics_left[d] > 0) continue;
    for (uint64_t mask = instance->dynamics[d]; mask != 0; mask &= mask - 1) {
      Use(static_cast<DomainIndex>(__builtin_ctzll(mask)),
          -Rounded(instance->sizes.dynamic_bytes(d)));
    }
    instance->dynamics[d] = 0;
  }
}

void VirtualExecutor::Clear(Instance* instance) {
  std::fill(instance->left.begin(), instance->left.end(), 0);
  std::fill(instance->dynamics_left.begin(), instance->dynamics_left.end(), 0);
  FreeDead(instance);
}

void VirtualExecutor::Refresh(InstanceKey key, Instance* instance) {
  for (DeviceIndex index = 0; index < devices_.size(); ++index) {
    bool changed = false;
    for (executor::QueuedOp& op : devices_[index].queue.ops()) {
      if (op.ready || op.key.instance != key.first || op.key.attempt != key.second) continue;
      op.ready = IsReady(*instance, op.key.op, config_.devices[index].domain);
      changed |= op.ready;
    }
    if (changed) At(now_, [this, index] { RunDevice(index); });
  }
  for (auto& [id, transfer] : transfers_) {
    if (transfer.intent || transfer.watch.instance != key.first ||
        transfer.watch.attempt != key.second)
      continue;
    const size_t crossing = instance->binding->graph->crossing_index(transfer.watch.value);
    if ((instance->values[crossing] >> transfer.watch.source_domain & 1) == 0) continue;
    transfer.intent = true;
    Report(wire::kIntent, wire::Intent{id, now_});
  }
}

void VirtualExecutor::OnRecall(const wire::Recall& recall) {
  ++recalls;
  Instance* const instance = Find(recall.instance, recall.attempt);
  if (instance != nullptr) {
    const OpState state = instance->ops[recall.op];
    if (state == OpState::kLaunched || state == OpState::kFinished) return;
    instance->ops[recall.op] = OpState::kNone;
  }
  for (Device& device : devices_) device.queue.Remove({recall.instance, recall.attempt, recall.op});
  Report(wire::kRecalled, wire::Recalled{recall.instance, recall.attempt, recall.op, 0, 0});
}

void VirtualExecutor::OnEnd(const wire::EndInstance& end) {
  ++ends;
  Instance* const instance = Find(end.instance, end.attempt);
  if (instance == nullptr) {
    Violate("end of an unknown instance");
    return;
  }
  instance->ending = true;
  for (Device& device : devices_) device.queue.RemoveInstance(end.instance, end.attempt);
  std::vector<uint64_t> idle_transfers;
  for (auto& [id, transfer] : transfers_) {
    if (transfer.watch.instance != end.instance || transfer.watch.attempt != end.attempt) continue;
    transfer.cancelled = true;
    if (!transfer.running) idle_transfers.push_back(id);
  }
  for (const uint64_t id : idle_transfers) FinishTransfer(id, StatusCode::kCancelled);
  EndIfIdle({end.instance, end.attempt});
}

void VirtualExecutor::EndIfIdle(InstanceKey key) {
  Instance* const instance = Find(key.first, key.second);
  if (instance == nullptr || !instance->ending || instance->running > 0) return;
  for (const auto& [id, transfer] : transfers_) {
    if (transfer.watch.instance == key.first && transfer.watch.attempt == key.second) return;
  }
  Clear(instance);
  instances_.erase(key);
  Report(wire::kInstanceEnded, wire::InstanceEnded{key.first, key.second, 0});
}

void VirtualExecutor::OnWatch(const wire::Watch& watch) {
  if (transfers_.contains(watch.transfer)) return Violate("transfer id used twice");
  Transfer transfer;
  transfer.watch = watch;
  if (watch.source_domain == watch.destination_domain) Violate("transfer inside a domain");
  if (watch.instance != 0) {
    Instance* const instance = Find(watch.instance, watch.attempt);
    if (instance == nullptr || instance->ending || instance->failed) {
      transfers_[watch.transfer] = transfer;
      return FinishTransfer(watch.transfer, StatusCode::kCancelled);
    }
    const uint32_t crossing = instance->binding->graph->crossing_index(watch.value);
    transfer.bytes = instance->sizes.crossing_bytes(crossing);
    transfer.intent = (instance->values[crossing] >> watch.source_domain & 1) != 0;
  } else {
    const SetState& set = sets_[watch.set];
    if (watch.value >= set.resident.size()) return Violate("watch of an unknown tensor");
    if (!set.Valid(watch.value, watch.source_domain))
      Violate("watch of a tensor that is not there");
    transfer.bytes = set.config.tensors[watch.value].bytes;
    transfer.intent = true;
  }
  transfers_[watch.transfer] = transfer;
  if (transfer.intent) Report(wire::kIntent, wire::Intent{watch.transfer, now_});
}

void VirtualExecutor::StartCopy(uint64_t id) {
  const auto found = transfers_.find(id);
  if (found == transfers_.end()) return;
  Transfer& transfer = found->second;
  if (!transfer.intent || !transfer.recv || transfer.running)
    return Violate("send before intent and recv, or twice");
  transfer.running = true;
  transfer.start = now_;
  if (transfer.watch.instance != 0) {
    Instance* const instance = Find(transfer.watch.instance, transfer.watch.attempt);
    const size_t crossing = instance->binding->graph->crossing_index(transfer.watch.value);
    if ((instance->values[crossing] >> transfer.watch.source_domain & 1) == 0) {
      transfer.running = false;
      return FinishTransfer(id, StatusCode::kCancelled);  // all its consumers ran meanwhile
    }
    ++instance->running;
    transfer.charged = Rounded(transfer.bytes);
    Use(transfer.watch.destination_domain, transfer.charged);
  } else if (transfer.watch.move != 0) {
    const SetState& set = sets_[transfer.watch.set];
    if (set.writers[transfer.watch.value] > 0 || set.readers[transfer.watch.value] > 0)
      Violate("a piece moves while it is used");
  }
  for (const auto& [other_id, other] : transfers_) {
    if (other_id == id || !other.running ||
        other.watch.service_class != transfer.watch.service_class)
      continue;
    if (other.watch.source_domain == transfer.watch.source_domain ||
        other.watch.destination_domain == transfer.watch.destination_domain) {
      Violate("two copies of a class share a side");
    }
  }
  const auto time =
      options_.copy_latency +
      static_cast<DurationNs>(options_.copy_ns_per_byte * static_cast<double>(transfer.bytes));
  copies.push_back({id, transfer.watch.instance, transfer.watch.value, transfer.watch.set,
                    transfer.watch.source_domain, transfer.watch.destination_domain, now_,
                    now_ + time});
  At(now_ + time, [this, id] {
    const auto it = transfers_.find(id);
    if (it == transfers_.end()) return;
    const int fate = fail_transfer ? fail_transfer(id) : SLICE_OK;
    FinishTransfer(id,
                   it->second.cancelled ? StatusCode::kCancelled : static_cast<StatusCode>(fate));
  });
}

void VirtualExecutor::FinishTransfer(uint64_t id, StatusCode status) {
  const Transfer transfer = transfers_[id];
  transfers_.erase(id);
  const InstanceKey key{transfer.watch.instance, transfer.watch.attempt};
  Instance* const instance = transfer.watch.instance != 0 ? Find(key.first, key.second) : nullptr;
  const DomainIndex to = transfer.watch.destination_domain;
  if (instance != nullptr) {
    if (transfer.running) --instance->running;
    const size_t crossing = instance->binding->graph->crossing_index(transfer.watch.value);
    if (status == StatusCode::kOk && !instance->ending && instance->left[crossing] > 0) {
      instance->values[crossing] |= uint64_t{1} << to;
    } else if (transfer.charged > 0) {
      Use(to, -transfer.charged);
    }
    FreeDead(instance);
  } else if (transfer.watch.instance == 0 && status == StatusCode::kOk) {
    SetState& set = sets_[transfer.watch.set];
    set.resident[transfer.watch.value] |= uint64_t{1} << to;
    if (set.config.kind == engine::TensorKind::kManaged)
      set.dirty[transfer.watch.value] |= uint64_t{1} << to;
  }
  Report(wire::kTransferDone, wire::TransferDone{id, transfer.start, now_, transfer.bytes,
                                                 static_cast<int32_t>(status), 0});
  if (instance != nullptr) {
    if (!instance->ending) Refresh(key, instance);
    EndIfIdle(key);
  }
}

void VirtualExecutor::OnCommandRun(const wire::TensorCommandRun& run) {
  SetState& set = sets_[run.set];
  if (run.tensor >= set.resident.size()) return Violate("command on an unknown tensor");
  const uint64_t bit = uint64_t{1} << run.domain;
  if (run.kind != wire::kTensorReset && !set.Valid(run.tensor, run.domain))
    Violate("a command where its piece is not");
  if (run.kind != wire::kTensorRead) {
    set.resident[run.tensor] = bit;
    set.zero[run.tensor] = run.kind == wire::kTensorReset;
    if (run.kind == wire::kTensorReset) {
      set.dirty[run.tensor] &= ~bit;
    } else {
      set.dirty[run.tensor] |= bit;
    }
  }
  if (set.writers[run.tensor] > 0 ||
      (run.kind != wire::kTensorRead && set.readers[run.tensor] > 0)) {
    Violate("a command runs while an op uses the piece");
  }
  At(now_ + options_.command_time, [this, run] {
    Report(wire::kCommandDone, wire::CommandDone{run.command, SLICE_OK, 0});
  });
}

}  // namespace slice::testing
