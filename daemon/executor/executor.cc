// Cold path: setup of threads and rings, tables of templates, sets, tenants, bindings.
#include "daemon/executor/executor.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/resource.h>

#include <cerrno>
#include <utility>

#include "common/log.h"
#include "daemon/executor/backend_loader.h"
#include "daemon/executor/cpu_backend.h"

namespace slice::executor {
namespace {

Status Watch(const Fd& poll, const Fd& event, uint32_t events) {
  epoll_event entry{};
  entry.events = events;
  if (::epoll_ctl(poll.get(), EPOLL_CTL_ADD, event.get(), &entry) != 0) {
    return ErrnoError(StatusCode::kInternal, errno, "watching an eventfd");
  }
  return Status::Ok();
}

Result<Fd> CreatePoll() {
  Fd poll(::epoll_create1(EPOLL_CLOEXEC));
  if (!poll.valid()) return ErrnoError(StatusCode::kInternal, errno, "making an epoll descriptor");
  return poll;
}

}  // namespace

Status Executor::Setup(const proto::ExecutorSetup& request, std::vector<Fd>* fds) {
  if (ring_.has_value()) return Error(StatusCode::kInvalid, "set up already");
  if (request.ring_version() != wire::kExecutorRingVersion) {
    return Error(StatusCode::kVersion, "ring version %u, this executor speaks %u",
                 request.ring_version(), wire::kExecutorRingVersion);
  }
  const auto device_count = static_cast<size_t>(request.devices_size());
  if (device_count == 0 || device_count > kDevicesMax || request.domains_size() == 0 ||
      request.domains_size() > kDevicesMax || fds->size() != 3 + device_count) {
    return Error(StatusCode::kInvalid,
                 "%zu devices, %d domains, %zu descriptors (needs 3 + devices)", device_count,
                 request.domains_size(), fds->size());
  }
  const size_t capacity = request.ring_capacity_bytes();
  if (capacity < 4096 || capacity > (size_t{1} << 30) || (capacity & (capacity - 1)) != 0) {
    return Error(StatusCode::kInvalid, "ring capacity of %zu bytes is no power of two from 4096",
                 capacity);
  }
  std::string kind;
  for (const proto::ExecutorDevice& device : request.devices()) {
    if (device.domain() >= static_cast<uint32_t>(request.domains_size())) {
      return Error(StatusCode::kInvalid, "device '%s' is in domain %u, there are %d",
                   device.name().c_str(), device.domain(), request.domains_size());
    }
    if (!kind.empty() && kind != device.backend()) {
      return Error(StatusCode::kInvalid, "devices of kinds '%s' and '%s' in one executor",
                   kind.c_str(), device.backend().c_str());
    }
    kind = device.backend();
  }
  if (kind == "cpu" || kind.empty()) {
    backend_ = CreateCpuBackend();
  } else {
    SLICE_ASSIGN_OR_RETURN(backend_, LoadBackend(kind));
  }
  domains_.assign(request.domains().begin(), request.domains().end());
  for (size_t d = 0; d < domains_.size(); ++d) {
    SLICE_RETURN_IF_ERROR(
        backend_->OpenDomain(static_cast<uint32_t>(d), 0, domains_[d].pool_bytes()));
  }
  const size_t ring_bytes = RecordRing::MemoryBytes(capacity);
  for (size_t i = 0; i < 2; ++i) {
    const Result<size_t> size = CheckForeignMemfd((*fds)[i], ring_bytes);
    if (!size.ok()) return size.status();
  }
  SLICE_ASSIGN_OR_RETURN(ring_memory_, Mapping::Map((*fds)[0], ring_bytes, true));
  SLICE_ASSIGN_OR_RETURN(Mapping report_memory, Mapping::Map((*fds)[1], ring_bytes, true));
  reports_ = std::make_unique<ReportSink>(std::move(report_memory), capacity, std::move((*fds)[2]));
  SLICE_ASSIGN_OR_RETURN(copier_event_, CreateEventFd());
  SLICE_ASSIGN_OR_RETURN(copier_poll_, CreatePoll());
  SLICE_RETURN_IF_ERROR(Watch(copier_poll_, copier_event_, EPOLLIN));
  for (size_t i = 0; i < device_count; ++i) {
    auto device = std::make_unique<Device>();
    device->index = static_cast<uint32_t>(i);
    device->config = request.devices(static_cast<int>(i));
    device->event = std::move((*fds)[3 + i]);
    SLICE_ASSIGN_OR_RETURN(device->poll, CreatePoll());
    // Order matters: the device's own thread is asked first, the copy thread when that one does not
    // wait.
    SLICE_RETURN_IF_ERROR(Watch(device->poll, device->event, EPOLLIN | EPOLLEXCLUSIVE));
    SLICE_RETURN_IF_ERROR(Watch(copier_poll_, device->event, EPOLLIN | EPOLLET | EPOLLEXCLUSIVE));
    devices_.push_back(std::move(device));
  }
  ring_.emplace(ring_memory_.data(), capacity);
  may_spin_ = std::thread::hardware_concurrency() > device_count + 2;
  for (const std::unique_ptr<Device>& device : devices_) {
    device->thread = std::thread([this, raw = device.get()] { RunDevice(raw); });
  }
  copier_ = std::thread([this] { RunCopier(); });
  prefault_ = std::thread([this] {
    ::setpriority(PRIO_PROCESS, 0, 10);  // this thread only
    for (uint32_t domain = 0; domain < domains_.size(); ++domain) backend_->Prefault(domain);
  });
  return Status::Ok();
}

Status Executor::AddTemplate(const proto::ExecutorTemplate& request, const std::vector<Fd>& fds) {
  if (fds.size() != 1)
    return Error(StatusCode::kInvalid, "a template needs 1 descriptor, got %zu", fds.size());
  SLICE_ASSIGN_OR_RETURN(const size_t size, CheckForeignMemfd(fds[0], request.bytes()));
  static_cast<void>(size);
  std::string bytes;
  if (request.bytes() > 0) {
    SLICE_ASSIGN_OR_RETURN(const Mapping mapping, Mapping::Map(fds[0], request.bytes(), false));
    bytes.assign(mapping.as<const char>(),
                 request.bytes());  // once; whatever happens to the memfd later
  }
  SLICE_ASSIGN_OR_RETURN(std::shared_ptr<const graph::Template> source,
                         graph::Template::Parse(bytes));
  SLICE_ASSIGN_OR_RETURN(std::shared_ptr<const Program> program,
                         Program::Prepare(std::move(source)));
  const std::lock_guard lock(mutex_);
  templates_[request.template_id()] = std::move(program);
  return Status::Ok();
}

Status Executor::AddSet(const proto::ExecutorTensorSet& request, std::vector<Fd>* fds) {
  for (const uint32_t domain : request.domains()) {
    if (domain >= domains_.size()) {
      return Error(StatusCode::kInvalid, "set %u in domain %u, there are %zu", request.set_id(),
                   domain, domains_.size());
    }
  }
  SLICE_ASSIGN_OR_RETURN(std::shared_ptr<TensorSet> set, TensorSet::Create(request, fds));
  const std::lock_guard lock(mutex_);
  const auto [entry, inserted] = sets_.try_emplace(request.set_id(), set);
  return inserted ? Status::Ok() : entry->second->AddDomains(set.get());
}

Status Executor::AddTenant(const proto::ExecutorTenant& request, const std::vector<Fd>& fds) {
  if (fds.size() != 1)
    return Error(StatusCode::kInvalid, "a tenant needs 1 descriptor, got %zu", fds.size());
  if (request.tenant() == 0) return Error(StatusCode::kInvalid, "tenant 0");
  auto tenant = std::make_shared<TenantMemory>();
  tenant->id = request.tenant();
  tenant->arena_bytes = request.arena_bytes();
  tenant->pool_bytes_max = request.pool_bytes_max();
  SLICE_ASSIGN_OR_RETURN(const size_t size, CheckForeignMemfd(fds[0], request.arena_bytes()));
  static_cast<void>(size);
  if (request.arena_bytes() > 0) {
    SLICE_ASSIGN_OR_RETURN(tenant->arena, Mapping::Map(fds[0], request.arena_bytes(), true));
  }
  for (uint32_t domain = 0; domain < domains_.size(); ++domain) {
    backend_->SetTenantCap(domain, request.tenant(), request.pool_bytes_max());
  }
  const std::lock_guard lock(mutex_);
  tenants_[request.tenant()] = std::move(tenant);
  return Status::Ok();
}

Status Executor::AddBinding(const proto::ExecutorBinding& request) {
  std::shared_ptr<const Program> program;
  std::shared_ptr<TenantMemory> tenant;
  std::vector<StaticRef> statics;
  {
    const std::lock_guard lock(mutex_);
    const auto found_template = templates_.find(request.template_id());
    const auto found_tenant = tenants_.find(request.tenant());
    if (found_template == templates_.end() || found_tenant == tenants_.end()) {
      return Error(StatusCode::kStale, "binding %u: template %u or tenant %u is not there",
                   request.binding(), request.template_id(), request.tenant());
    }
    program = found_template->second;
    tenant = found_tenant->second;
    for (const proto::StaticBinding& ref : request.statics()) {
      const auto set = sets_.find(ref.set_id());
      if (set == sets_.end()) {
        return Error(StatusCode::kStale, "binding %u: set %u is not there", request.binding(),
                     ref.set_id());
      }
      statics.push_back({set->second, ref.tensor()});
    }
  }
  SLICE_ASSIGN_OR_RETURN(
      std::shared_ptr<Binding> binding,
      Binding::Create(std::move(program), std::move(tenant), std::move(statics)));
  const std::lock_guard lock(mutex_);
  bindings_[request.binding()] = std::move(binding);
  return Status::Ok();
}

Status Executor::DropTemplate(uint32_t id) {
  const std::lock_guard lock(mutex_);
  return templates_.erase(id) != 0 ? Status::Ok()
                                   : Error(StatusCode::kStale, "template %u is not there", id);
}

Status Executor::DropSet(uint32_t id) {
  const std::lock_guard lock(mutex_);
  return sets_.erase(id) != 0 ? Status::Ok() : Error(StatusCode::kStale, "set %u is not there", id);
}

Status Executor::DropBinding(uint32_t id) {
  const std::lock_guard lock(mutex_);
  return bindings_.erase(id) != 0 ? Status::Ok()
                                  : Error(StatusCode::kStale, "binding %u is not there", id);
}

Status Executor::DropTenant(uint32_t id) {
  {
    const std::lock_guard lock(mutex_);
    if (tenants_.erase(id) == 0) return Error(StatusCode::kStale, "tenant %u is not there", id);
    std::erase_if(bindings_, [&](const auto& entry) { return entry.second->tenant()->id == id; });
    std::erase_if(sets_, [&](const auto& entry) { return entry.second->tenant() == id; });
  }
  for (uint32_t domain = 0; domain < domains_.size(); ++domain) backend_->DropTenant(domain, id);
  return Status::Ok();
}

void Executor::Describe(proto::ExecutorAck* ack) const {
  for (uint32_t domain = 0; domain < domains_.size(); ++domain) {
    ack->add_pool_bytes_used(backend_->BytesUsed(domain));
  }
  const std::lock_guard lock(mutex_);
  ack->set_description(
      std::string("torch " SLICE_TORCH_VERSION ", ") + std::to_string(devices_.size()) +
      " devices, " + std::to_string(templates_.size()) + " templates, " +
      std::to_string(bindings_.size()) + " bindings, " + std::to_string(instances_.size()) +
      " instances, " + std::to_string(transfers_.size()) + " transfers");
}

}  // namespace slice::executor
