// The executor's records. Every one is checked for sense first; late and repeated ones are ignored
// by (instance, op, attempt); nonsense is PROTOCOL, on which the shell restarts the executor.
#include <algorithm>
#include <cstring>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {

using gmg::AccessEntry;
using gmg::MemoryKind;
using gmg::OpState;

namespace {
constexpr double kSlip = 1.2;
constexpr size_t kErrorRing = 512;

template <typename Record>
bool Decode(std::span<const std::byte> payload, Record* record) {
  if (payload.size() != sizeof(Record)) return false;
  std::memcpy(record, payload.data(), sizeof(Record));
  return true;
}
Status Garbage(const char* what, uint64_t a, uint64_t b) {
  return Error(StatusCode::kProtocol, "executor report: %s (%llu, %llu)", what,
               static_cast<unsigned long long>(a), static_cast<unsigned long long>(b));
}
}  // namespace

Status EngineImpl::HandleReport(uint32_t type, std::span<const std::byte> payload, TimeNs now) {
  now_ = now;
  const auto dispatch = [&]<typename Record>(Record record,
                                             Status (EngineImpl::*on)(const Record&, TimeNs)) {
    if (!Decode(payload, &record))
      return Garbage("a record of the wrong size", type, payload.size());
    Status status = (this->*on)(record, now);
    gmg_.CloseWrites();
    return status;
  };
  switch (type) {
    case wire::kStarted:
      return dispatch(wire::Started{}, &EngineImpl::OnStarted);
    case wire::kFinished:
      return dispatch(wire::Finished{}, &EngineImpl::OnFinished);
    case wire::kFailed:
      return dispatch(wire::Failed{}, &EngineImpl::OnFailed);
    case wire::kRecalled:
      return dispatch(wire::Recalled{}, &EngineImpl::OnRecalled);
    case wire::kIntent:
      return dispatch(wire::Intent{}, &EngineImpl::OnIntent);
    case wire::kTransferDone:
      return dispatch(wire::TransferDone{}, &EngineImpl::OnTransferDone);
    case wire::kCommandDone:
      return dispatch(wire::CommandDone{}, &EngineImpl::OnCommandDone);
    case wire::kInstanceEnded:
      return dispatch(wire::InstanceEnded{}, &EngineImpl::OnInstanceEnded);
    default:
      return Garbage("unknown type", type, payload.size());
  }
}

// *found stays null for a report that is late: of an instance that is gone or of an earlier
// attempt.
Status EngineImpl::FindOp(uint64_t id, uint32_t attempt, uint32_t op, Instance** found) {
  *found = nullptr;
  Instance* const instance = FindInstance(id);
  if (instance == nullptr || attempt < instance->attempt) return Status::Ok();
  if (attempt > instance->attempt) return Garbage("an attempt that was never made", id, attempt);
  if (op >= instance->ops.size()) return Garbage("an op that does not exist", id, op);
  *found = instance;
  return Status::Ok();
}

void EngineImpl::Launch(Instance* instance, uint32_t op, TimeNs start) {
  OpExtra& extra = instance->ops[op];
  gmg::OpRecord& record = Op(*instance, op);
  SetState(instance, op, OpState::kLaunched);
  record.start_ns = start;
  DeviceState& device = devices_[record.device];
  std::erase(device.issued, OpRef{instance, op});
  if (device.launched.empty()) device.started = start;
  device.launched.push_back({instance, op});
  extra.recall_sent = extra.want_unplace = false;  // too late: that is the answer
  device.busy_beside = -1;
  if (instance->first_start == 0) {
    instance->first_start = start;
    gmg_.Write(instance->slot).start_ns = start;
  }
  for (const PieceUse& use : instance->binding->group_pieces[op])
    instance->began_write |= use.write;
  work_dirty_ = true;
}

Status EngineImpl::OnStarted(const wire::Started& report, TimeNs now) {
  Instance* instance = nullptr;
  SLICE_RETURN_IF_ERROR(FindOp(report.instance, report.attempt, report.op, &instance));
  if (instance == nullptr) return Status::Ok();
  const gmg::OpRecord& record = Op(*instance, report.op);
  if (record.state >= OpState::kLaunched) return Status::Ok();  // repeated
  if (record.state != OpState::kIssued)
    return Garbage("started an op that was not issued", report.instance, report.op);
  if (report.device != record.device)
    return Garbage("an op on another device than its own", report.instance, report.device);
  if (report.start_ns < 0 || report.start_ns > now + kSecond)
    return Garbage("a start in the future", report.instance, report.op);
  Launch(instance, report.op, report.start_ns);
  DeviceState& device = devices_[record.device];
  if (device.launched.size() == 1) device.busy_beside = BusyBeside(record.device, report.start_ns);
  if (instance->phase == Phase::kStarted) UnplaceWanted(instance, now);
  return Status::Ok();
}

Status EngineImpl::OnFinished(const wire::Finished& report, TimeNs now) {
  Instance* instance = nullptr;
  SLICE_RETURN_IF_ERROR(FindOp(report.instance, report.attempt, report.op, &instance));
  if (instance == nullptr) return Status::Ok();
  gmg::OpRecord& record = Op(*instance, report.op);
  if (record.state > OpState::kLaunched) return Status::Ok();  // repeated
  if (record.state < OpState::kIssued)
    return Garbage("finished an op that was not issued", report.instance, report.op);
  if (report.device != record.device)
    return Garbage("an op on another device than its own", report.instance, report.device);
  const bool sane =
      report.start_ns >= 0 && report.end_ns >= report.start_ns && report.end_ns <= now + kSecond;
  if (!sane || report.cpu_ns < 0 || report.peak_bytes < 0)
    return Garbage("times or bytes that cannot be", report.instance, report.op);
  for (const uint32_t before : instance->graph->groups()[report.op].predecessors) {
    if (Op(*instance, before).state != OpState::kDone)
      return Garbage("finished before a predecessor", report.instance, report.op);
  }
  if (record.state == OpState::kIssued) Launch(instance, report.op, report.start_ns);
  RecordOp(instance, report.op, report, now);
  OpDone(instance, report.op, now);
  return Status::Ok();
}

// Measurements: estimators, device time, latency of reports, the timeline.
void EngineImpl::RecordOp(Instance* instance, uint32_t op, const wire::Finished& report,
                          TimeNs now) {
  gmg::OpRecord& record = Op(*instance, op);
  DeviceState& device = devices_[record.device];
  const DurationNs duration = report.end_ns - report.start_ns;
  LearnOp(*instance, op, report);
  // A p99 that follows: up by 99 parts for a sample above, down by one for a sample below.
  const DurationNs latency = std::clamp<DurationNs>(now - report.end_ns, 0, 5 * kMillisecond);
  constexpr DurationNs kStep = 2 * kMicrosecond;
  report_latency_p99_ = latency > report_latency_p99_
                            ? std::min(latency, report_latency_p99_ + 99 * kStep)
                            : std::max<DurationNs>(report_latency_p99_ - kStep, 0);
  counters_.device_busy[device.index] += duration;
  counters_.device_cpu[device.index] += report.cpu_ns;
  ++counters_.ops_executed;
  if (instance->service_class == ServiceClass::kOffline) {
    ++counters_.offline_ops;
    if (device.domain != DomainOf(instance->tenant->config.home)) ++counters_.offline_ops_off_home;
  }
  TraceEvent event;
  event.kind = TraceEvent::Kind::kOp;
  event.tenant = instance->tenant->config.id;
  event.service_class = instance->service_class;
  if (instance->sequence != nullptr) event.sequence = instance->sequence->id;
  event.instance = instance->id;
  event.op = op;
  event.name = instance->graph->groups()[op].name.c_str();
  event.device = device.index;
  event.start = report.start_ns;
  event.finish = report.end_ns;
  event.predicted_start = record.predicted_start_ns;
  event.predicted_finish = record.predicted_start_ns + record.duration_ns;
  event.cpu = report.cpu_ns;
  event.bytes = report.peak_bytes;
  sink_->Trace(event);
  record.start_ns = report.start_ns;
  record.finish_ns = report.end_ns;
  instance->last_finish = std::max<TimeNs>(instance->last_finish, report.end_ns);
  instance->last_device = device.index;
  const bool slipped =
      static_cast<double>(duration) > kSlip * static_cast<double>(record.duration_ns) &&
      duration - record.duration_ns > kMillisecond;
  if (slipped && policy_->RespectsSlices()) RecallOffline(uint64_t{1} << device.index, now);
}

void EngineImpl::OpDone(Instance* instance, uint32_t op, TimeNs now) {
  gmg::OpRecord& record = Op(*instance, op);
  DeviceState& device = devices_[record.device];
  SetState(instance, op, OpState::kDone);
  std::erase(device.launched, OpRef{instance, op});
  device.started = record.finish_ns;
  ++device.done;
  if (device.launched.empty()) {
    device.idle_since = record.finish_ns;
    if (device.issued.empty() && device.placed.empty()) deferral_event_ = true;
  }
  work_dirty_ = true;
  --instance->unfinished;
  instance->work_left = std::max<DurationNs>(instance->work_left - record.duration_ns, 0);
  instance->key_stamp = 0;
  while (instance->first_unfinished < instance->ops.size() &&
         Op(*instance, instance->first_unfinished).state == OpState::kDone) {
    ++instance->first_unfinished;
  }
  bool writes = false;
  for (const PieceUse& use : instance->binding->group_pieces[op]) {
    writes |= use.write;
    if (use.write) {
      ++use.piece->version;
    } else {
      const PieceUse& whole = instance->binding->pieces[use.whole];
      if (!whole.write)
        instance->read_versions[whole.read_slot] = static_cast<uint32_t>(use.piece->version);
    }
    use.piece->queue.UseDone(AccessEntry::Kind::kInstance, instance->slot);
    PumpCommands(use.piece, now);
  }
  if (writes) --instance->writing_ops_left;
  const TemplateEntry::GroupPlan& plan = instance->binding->graph->groups[op];
  const uint64_t bit = uint64_t{1} << device.domain;
  for (const uint32_t crossing : plan.out) {
    gmg::TensorRecord& value = Value(*instance, crossing);
    value.residency = value.residency | bit;
  }
  ReleaseScratch(instance, op);
  for (const uint32_t crossing : plan.in) {
    gmg::TensorRecord& value = Value(*instance, crossing);
    value.set_consumers_left(value.consumers_left() - 1);
    ReleaseValueIfDead(instance, crossing);
  }
  for (const uint32_t dynamic : instance->graph->groups()[op].dynamic_in) {
    --instance->dynamics[dynamic].uses_left;
    ReleaseDynamicIfDead(instance, dynamic);
  }
  if (instance->unfinished > 0 || instance->phase != Phase::kStarted) return;
  RecordLatency(*instance);
  CompleteInstance(instance, StatusCode::kOk, "", 0xffffffff, now);
  EndInstance(instance, now);
}

void EngineImpl::RecordLatency(const Instance& instance) {
  const DurationNs actual = instance.last_finish - instance.submitted;
  if (instance.predicted_finish == 0 || actual <= 0) return;
  const auto which = static_cast<size_t>(instance.service_class);
  std::vector<float>& ring = prediction_errors_[which];
  const double difference = static_cast<double>(instance.predicted_finish - instance.last_finish);
  const auto error = static_cast<float>(std::abs(difference) / static_cast<double>(actual));
  if (ring.size() < kErrorRing) {
    ring.push_back(error);
  } else {
    ring[prediction_next_[which]++ % kErrorRing] = error;
  }
}

Status EngineImpl::OnFailed(const wire::Failed& report, TimeNs now) {
  Instance* instance = nullptr;
  SLICE_RETURN_IF_ERROR(FindOp(report.instance, report.attempt, report.op, &instance));
  if (instance == nullptr) return Status::Ok();
  const gmg::OpRecord& record = Op(*instance, report.op);
  if (record.state > OpState::kLaunched) return Status::Ok();
  if (record.state < OpState::kIssued)
    return Garbage("failed an op that was not issued", report.instance, report.op);
  DeviceState& device = devices_[record.device];
  std::erase(device.issued, OpRef{instance, report.op});
  std::erase(device.launched, OpRef{instance, report.op});
  if (device.launched.empty()) device.idle_since = now;
  instance->began_write |= report.began_write != 0;
  SetState(instance, report.op, OpState::kFailed);
  const std::string text(report.text, strnlen(report.text, sizeof(report.text)));
  const std::string& name = instance->graph->groups()[report.op].name;
  const bool known = report.status > SLICE_OK && report.status <= SLICE_ERR_TIMEOUT;
  FailInstance(instance, known ? static_cast<StatusCode>(report.status) : StatusCode::kOpFailed,
               "operator " + std::to_string(report.op) + " '" + name + "': " + text, report.op,
               now);
  return Status::Ok();
}

Status EngineImpl::OnRecalled(const wire::Recalled& report, TimeNs now) {
  Instance* instance = nullptr;
  SLICE_RETURN_IF_ERROR(FindOp(report.instance, report.attempt, report.op, &instance));
  if (instance == nullptr) return Status::Ok();
  gmg::OpRecord& record = Op(*instance, report.op);
  OpExtra& extra = instance->ops[report.op];
  if (record.state != OpState::kIssued) {
    // The answer to a Recall that crossed with the executor's own: now the op may be issued again.
    if (report.reason == 0 && record.state < OpState::kIssued) extra.recall_sent = false;
    work_dirty_ = true;
    return Status::Ok();
  }
  DeviceState& device = devices_[record.device];
  std::erase(device.issued, OpRef{instance, report.op});
  work_dirty_ = true;
  if (report.reason == 0)
    extra.recall_sent = false;  // else the Recall on its way is still to be answered
  if (instance->phase != Phase::kStarted) {
    SetState(instance, report.op, OpState::kCancelled);
    return Status::Ok();
  }
  SetState(instance, report.op, OpState::kPlaced);
  device.placed.push_back({instance, report.op});
  if (report.reason == 2) {
    // No memory in the executor's pool now: the same place, a little later.
    extra.want_unplace = false;
    SetRetryAt(instance, report.op, now + kMillisecond);
  } else {
    WantUnplace(instance, report.op);
  }
  // Ops issued behind it wait there for nothing.
  for (const uint32_t next : instance->graph->groups()[report.op].successors)
    WantUnplace(instance, next);
  UnplaceWanted(instance, now);
  return Status::Ok();
}

Status EngineImpl::OnIntent(const wire::Intent& report, TimeNs now) {
  Transfer* const transfer = FindTransfer(report.transfer);
  if (transfer == nullptr || transfer->cancel_sent) return Status::Ok();
  if (!arbiter_.Intent(transfer->id)) return Status::Ok();
  PublishTransfer(*transfer, gmg::TransferState::kIntent);
  RunArbiter(now);
  return Status::Ok();
}

Status EngineImpl::OnTransferDone(const wire::TransferDone& report, TimeNs now) {
  Transfer* const transfer = FindTransfer(report.transfer);
  if (transfer == nullptr) return Status::Ok();
  if (report.status == SLICE_OK) {
    if (transfer->admitted == 0) return Garbage("a copy that was not admitted", report.transfer, 0);
    const bool sane =
        report.start_ns >= 0 && report.end_ns >= report.start_ns && report.end_ns <= now + kSecond;
    if (!sane) return Garbage("times that cannot be", report.transfer, 0);
    transfer_estimator_.Observe(transfer->source, transfer->destination, transfer->bytes,
                                report.end_ns - report.start_ns);
    ++counters_.transfers;
    TraceEvent event;
    event.kind = TraceEvent::Kind::kTransfer;
    event.tenant = transfer->tenant->config.id;
    event.service_class = transfer->service_class;
    if (transfer->instance != nullptr) event.instance = transfer->instance->id;
    event.source = transfer->source;
    event.destination = transfer->destination;
    event.start = report.start_ns;
    event.finish = report.end_ns;
    event.bytes = transfer->bytes;
    sink_->Trace(event);
  }
  SettleTransfer(transfer, static_cast<StatusCode>(report.status), now);
  RunArbiter(now);
  PumpReplications(now);
  return Status::Ok();
}

Status EngineImpl::OnCommandDone(const wire::CommandDone& report, TimeNs now) {
  CommandPart* const part = FindPart(report.command);
  if (part == nullptr || !part->running) return Status::Ok();
  const bool known = report.status >= SLICE_OK && report.status <= SLICE_ERR_TIMEOUT;
  FinishPart(part, known ? static_cast<StatusCode>(report.status) : StatusCode::kInternal, now);
  return Status::Ok();
}

Status EngineImpl::OnInstanceEnded(const wire::InstanceEnded& report, TimeNs now) {
  Instance* const instance = FindInstance(report.instance);
  if (instance == nullptr || report.attempt != instance->attempt) return Status::Ok();
  if (instance->phase != Phase::kEnding)
    return Garbage("ended an instance that runs", report.instance, report.attempt);
  for (const DeviceState& device : devices_) {
    for (const OpRef& ref : device.launched) {
      if (ref.instance == instance)
        return Garbage("ended an instance with a launched op", report.instance, ref.op);
    }
  }
  Finalise(instance, now);
  return Status::Ok();
}

}  // namespace slice::engine
