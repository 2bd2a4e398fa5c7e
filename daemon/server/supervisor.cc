#include "daemon/server/supervisor.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "common/clock.h"
#include "common/log.h"
#include "common/wire/executor_ring.h"
#include "common/wire/record_ring.h"

namespace slice::server {

Supervisor::Supervisor(const ServerConfig& config, std::unique_ptr<ExecutorLauncher> launcher,
                       EngineLoop* loop, Poller* poller, WaitFunction wait,
                       std::function<void(TenantId, Status)> end_tenant)
    : config_(config),
      launcher_(std::move(launcher)),
      loop_(loop),
      poller_(poller),
      wait_(std::move(wait)),
      end_tenant_(std::move(end_tenant)),
      blame_(config.limits.executor_deaths_max) {}

Supervisor::~Supervisor() {
  if (link_ != nullptr) poller_->Remove(link_->pidfd().get());
}

Status Supervisor::Start() {
  const Status status = StartOnce();
  if (!status.ok()) Detach();
  return status;
}

Status Supervisor::SetUp(std::unique_ptr<ExecutorRings>* out) {
  auto rings = std::make_unique<ExecutorRings>();
  const size_t bytes = RecordRing::MemoryBytes(wire::kExecutorRingCapacityBytes);
  SLICE_ASSIGN_OR_RETURN(Fd command_memfd, CreateMemfd("slice-commands", bytes));
  SLICE_ASSIGN_OR_RETURN(rings->commands, Mapping::Map(command_memfd, bytes, true));
  SLICE_ASSIGN_OR_RETURN(Fd report_memfd, CreateMemfd("slice-reports", bytes));
  SLICE_ASSIGN_OR_RETURN(rings->reports, Mapping::Map(report_memfd, bytes, true));
  SLICE_ASSIGN_OR_RETURN(rings->engine_event, CreateEventFd());
  proto::ExecutorRequest request;
  proto::ExecutorSetup* setup = request.mutable_setup();
  setup->set_ring_version(wire::kExecutorRingVersion);
  setup->set_ring_capacity_bytes(wire::kExecutorRingCapacityBytes);
  std::vector<int> fds = {command_memfd.get(), report_memfd.get(), rings->engine_event.get()};
  for (const DeviceSpec& device : config_.devices) {
    proto::ExecutorDevice* item = setup->add_devices();
    item->set_name(device.name);
    item->set_backend(device.backend);
    item->set_ordinal(device.ordinal);
    item->set_domain(device.domain);
    item->set_cpu(device.cpu);
    SLICE_ASSIGN_OR_RETURN(Fd event, CreateEventFd());
    fds.push_back(event.get());
    rings->device_events.push_back(std::move(event));
  }
  for (const engine::DomainConfig& domain : config_.engine.domains) {
    proto::ExecutorDomain* item = setup->add_domains();
    item->set_name(domain.name);
    item->set_pool_bytes(static_cast<uint64_t>(domain.pool_bytes));
  }
  SLICE_RETURN_IF_ERROR(link_->Call(std::move(request), fds, config_.executor_request_timeout));
  *out = std::move(rings);
  return Status::Ok();
}

Status Supervisor::StartOnce() {
  SLICE_ASSIGN_OR_RETURN(ExecutorProcess process, launcher_->Launch(wait_));
  link_ = std::make_unique<ExecutorLink>(std::move(process), wait_);
  const uint64_t generation = ++generation_;
  std::unique_ptr<ExecutorRings> rings;
  SLICE_RETURN_IF_ERROR(SetUp(&rings));
  std::vector<ExecutorTables::Failure> refused;
  const Status replayed = tables_.Replay(link_.get(), config_.executor_request_timeout, &refused);
  for (const ExecutorTables::Failure& failure : refused) {
    // What a living executor refuses will not get better. What kills it may be a coincidence once,
    // not twice.
    const bool again = failure.kind == last_bad_entry_[0] && failure.id == last_bad_entry_[1];
    if (!replayed.ok() && &failure == &refused.back() && !again) {
      last_bad_entry_[0] = failure.kind;
      last_bad_entry_[1] = failure.id;
      continue;
    }
    SLICE_LOG_ERROR("server", "entry %d/%u of session %u cannot be given to a new executor: %s",
                    failure.kind, failure.id, failure.tenant, failure.status.ToString().c_str());
    tables_.Erase(failure.kind, failure.id);
    if (failure.tenant != 0) end_tenant_(TenantId{failure.tenant}, failure.status);
  }
  SLICE_RETURN_IF_ERROR(replayed);
  SLICE_RETURN_IF_ERROR(poller_->Add(link_->pidfd().get(), EPOLLIN, [this, generation](uint32_t) {
    if (generation != generation_) return;
    Recover(Error(StatusCode::kExecutorLost, "it died"));
  }));
  loop_->Call([&] { loop_->AttachExecutor(std::move(rings), generation); });
  up_ = true;
  last_bad_entry_[0] = ExecutorTables::kKindCount;
  SLICE_LOG_INFO("server", "executor %d is ready (%zu table entries)", link_->pid(),
                 tables_.size());
  return Status::Ok();
}

std::vector<engine::TenantUser> Supervisor::Detach() {
  up_ = false;
  std::vector<engine::TenantUser> launched;
  if (link_ == nullptr) return launched;
  poller_->Remove(link_->pidfd().get());
  link_->Kill();
  link_.reset();  // reaps
  loop_->Call([&] { launched = loop_->DetachExecutor(); });
  return launched;
}

bool Supervisor::Recover(const Status& why, const engine::TenantUser& asker) {
  Status last = why;
  bool asker_stays = true;
  for (bool first = true;; first = false) {
    SLICE_LOG_WARN("server", "executor %d is lost: %s", pid(), last.ToString().c_str());
    const bool is_accident = link_ == nullptr || link_->EndedFromOutside();
    std::vector<engine::TenantUser> suspects = Detach();
    if (first && asker.tenant) {  // likelier than what has been running for a while
      std::erase_if(suspects, [&](const auto& other) { return other.tenant == asker.tenant; });
      suspects.insert(suspects.begin(), asker);
    }
    const TimeNs now = MonotonicNow();
    deaths_.push_back(now);
    while (now - deaths_.front() > kDeathWindow) deaths_.pop_front();
    if (!is_accident) {
      const auto ended = Accuse(suspects, now);
      asker_stays = asker_stays && !(ended.has_value() && ended->tenant == asker.tenant);
    }
    if (deaths_.size() >= kDeathsMax) {
      GiveUp(last);
      return asker_stays;
    }
    last = StartOnce();
    if (last.ok()) return asker_stays;
  }
}

std::optional<engine::TenantUser> Supervisor::Accuse(
    const std::vector<engine::TenantUser>& suspects, TimeNs now) {
  const std::optional<engine::TenantUser> ended = blame_.Died(suspects, now);
  if (!ended.has_value()) return ended;
  const Status why =
      Error(StatusCode::kExecutorLost,
            "session %u of uid %u ran operators, or made a request, when the executor died, %u "
            "times in %lld s (sessions of this user that have ended count too; sliced's log says "
            "how it died): the session is ended, and the user's next is let in after %lld ms",
            ended->tenant.value, ended->uid, config_.limits.executor_deaths_max,
            static_cast<long long>(Blame::kWindow / kSecond),
            static_cast<long long>((blame_.WaitsUntil(ended->uid) - now) / kMillisecond));
  SLICE_LOG_ERROR("server", "%s", why.text().c_str());
  tables_.EraseTenant(ended->tenant.value);
  end_tenant_(ended->tenant, why);
  deaths_.clear();
  backoff_ = kBackoffMin;
  return ended;
}

void Supervisor::GiveUp(const Status& why) {
  SLICE_LOG_ERROR("server", "the executor died %zu times in %lld s (%s): next try in %lld ms",
                  deaths_.size(), static_cast<long long>(kDeathWindow / kSecond),
                  why.ToString().c_str(), static_cast<long long>(backoff_ / kMillisecond));
  retry_at_ = MonotonicNow() + backoff_;
  backoff_ = std::min(backoff_ * 2, kBackoffMax);
  loop_->Call([&] { loop_->ExecutorGivenUp(); });
}

void Supervisor::OnTimer(TimeNs now) {
  if (now < retry_at_) return;
  retry_at_ = kNever;
  const Status status = StartOnce();
  if (status.ok()) {
    backoff_ = kBackoffMin;
    deaths_.clear();
    return;
  }
  Detach();
  GiveUp(status);
}

void Supervisor::Distrust(uint64_t generation, const Status& why) {
  if (generation != generation_ || link_ == nullptr || !up_) return;
  link_->Kill();
  Recover(why);
}

Status Supervisor::Add(proto::ExecutorRequest request, std::vector<Fd> fds,
                       const engine::TenantUser& asker) {
  ExecutorTables::Entry entry;
  entry.request = std::move(request);
  entry.fds = std::move(fds);
  for (int attempt = 0;; ++attempt) {
    if (!up_) {
      return Error(StatusCode::kExecutorLost,
                   "the executor is down and being restarted: try again in a moment");
    }
    const Status status =
        link_->Call(entry.request, entry.raw_fds(), config_.executor_request_timeout);
    if (status.ok()) break;
    if (!link_->broken()) return status;
    const bool asker_stays = Recover(status, asker);
    if (attempt == 1 || !asker_stays) {
      return Error(StatusCode::kExecutorLost, "%s died while taking this request: %s",
                   attempt == 1 ? "two executors" : "the executor", status.text().c_str());
    }
  }
  tables_.Insert(std::move(entry));
  return Status::Ok();
}

// The executor need not know what is gone: an error here is logged by whoever notices the death.
void Supervisor::Drop(const proto::ExecutorRequest& request) {
  if (!up_) return;
  const Status status = link_->Call(request, {}, config_.executor_request_timeout);
  if (status.ok()) return;
  if (link_->broken()) {
    Recover(status);
  } else {
    SLICE_LOG_WARN("server", "the executor refused to drop something: %s",
                   status.ToString().c_str());
  }
}

void Supervisor::DropTemplate(TemplateId id) {
  if (!tables_.Contains(ExecutorTables::kTemplate, id.value)) return;
  tables_.Erase(ExecutorTables::kTemplate, id.value);
  proto::ExecutorRequest request;
  request.set_drop_template(id.value);
  Drop(request);
}

void Supervisor::DropSet(TensorSetId id) {
  if (!tables_.Contains(ExecutorTables::kSet, id.value)) return;
  tables_.Erase(ExecutorTables::kSet, id.value);
  proto::ExecutorRequest request;
  request.set_drop_set(id.value);
  Drop(request);
}

void Supervisor::DropBinding(BindingId id) {
  if (!tables_.Contains(ExecutorTables::kBinding, id.value)) return;
  tables_.Erase(ExecutorTables::kBinding, id.value);
  proto::ExecutorRequest request;
  request.set_drop_binding(id.value);
  Drop(request);
}

void Supervisor::DropTenant(TenantId id) {
  blame_.Ended(id);
  if (!tables_.Contains(ExecutorTables::kTenant, id.value)) return;
  tables_.EraseTenant(id.value);
  proto::ExecutorRequest request;
  request.set_drop_tenant(id.value);
  Drop(request);
}

Status Supervisor::Describe(std::string* description) {
  if (!up_) return Error(StatusCode::kExecutorLost, "the executor is down");
  proto::ExecutorRequest request;
  request.set_describe(true);
  proto::ExecutorAck ack;
  SLICE_RETURN_IF_ERROR(link_->Call(request, {}, config_.executor_request_timeout, &ack));
  *description = ack.description();
  return Status::Ok();
}

}  // namespace slice::server
