// Session's requests on graphs, tensors and bindings. In each: check, then the executor
// (acknowledged), then the engine, so that the engine never names what the executor does not know;
// removal goes the other way round.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/clock.h"
#include "common/wire/control.h"
#include "daemon/server/session.h"

namespace slice::server {
namespace {

using engine::TensorKind;

// Segments of a session may have this many times its memory: imports of parts of one large memfd
// map it several times.
constexpr uint64_t kSegmentFactorMax = 16;

unsigned long long Ull(uint64_t value) { return value; }

// The content of a sealed memfd, copied once. pread, not a mapping: nothing the tenant does can
// fault us.
Result<std::string> ReadAll(const Fd& memfd, uint64_t bytes) {
  std::string content(bytes, '\0');
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t got = ::pread(memfd.get(), content.data() + done, content.size() - done,
                                static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      return ErrnoError(StatusCode::kInvalid, errno, "cannot read the template's memfd at byte %zu",
                        done);
    done += static_cast<size_t>(got);
  }
  return content;
}

Status WrongFdCount(const char* request, size_t got, size_t expected) {
  return Error(StatusCode::kProtocol, "%s with %zu descriptors, %zu are expected", request, got,
               expected);
}

}  // namespace

// ---- graphs
// ---------------------------------------------------------------------------------------------------------

Status Session::RegisterGraph(const proto::RegisterGraph& request, std::vector<Fd>* fds) {
  const SessionLimits& limits = services_->config.limits;
  if (fds->size() != 1) return WrongFdCount("RegisterGraph", fds->size(), 1);
  if (graphs_.size() >= limits.graphs_max) {
    return Error(StatusCode::kQuota,
                 "%zu graphs are registered, a session may have %u: unregister some",
                 graphs_.size(), limits.graphs_max);
  }
  const uint64_t bytes = request.bytes();
  if (bytes == 0 || bytes > graph::Limits{}.template_bytes_max ||
      bytes > limits.graph_bytes_max - graph_bytes_) {
    return Error(
        StatusCode::kQuota,
        "template of %llu bytes: at most %llu each, and %llu of all graphs are left of %llu",
        Ull(bytes), Ull(graph::Limits{}.template_bytes_max),
        Ull(limits.graph_bytes_max - graph_bytes_), Ull(limits.graph_bytes_max));
  }
  SLICE_RETURN_IF_ERROR(CheckTenantSegment((*fds)[0], bytes));
  SLICE_ASSIGN_OR_RETURN(const std::string serialized, ReadAll((*fds)[0], bytes));
  bool known = false;
  SLICE_ASSIGN_OR_RETURN(const TemplateId id,
                         services_->templates.Acquire(tenant_user(), serialized, &known));
  graph_bytes_ += bytes;
  proto::Reply reply;
  reply.mutable_graph()->set_graph(graphs_.Insert({id, bytes}));
  reply.mutable_graph()->set_content_hash(services_->templates.Find(id)->content_hash());
  reply.mutable_graph()->set_known(known);
  ReplyWith(std::move(reply));
  return Status::Ok();
}

Status Session::UnregisterGraph(uint64_t handle) {
  const Graph* graph = graphs_.Find(handle);
  if (graph == nullptr)
    return Error(StatusCode::kStale, "graph %llu does not exist (any more)", Ull(handle));
  // Bindings made of it hold a reference of their own.
  services_->templates.Release(graph->id);
  graph_bytes_ -= graph->bytes;
  graphs_.Erase(handle);
  ReplyWith({});
  return Status::Ok();
}

// ---- tensors
// --------------------------------------------------------------------------------------------------------

std::vector<DomainIndex> Session::DomainsOfTenant() const {
  std::vector<DomainIndex> domains;
  for (size_t d = 0; d < services_->config.devices.size(); ++d) {
    const DomainIndex domain = services_->config.devices[d].domain;
    if ((device_mask_ >> d & 1) != 0 &&
        std::find(domains.begin(), domains.end(), domain) == domains.end()) {
      domains.push_back(domain);
    }
  }
  return domains;
}

Status Session::ImportTensors(const proto::ImportTensors& request, std::vector<Fd>* fds) {
  if (fds->size() != 1) return WrongFdCount("ImportTensors", fds->size(), 1);
  if (request.kind() != proto::IMPORTED_CONSTANT && request.kind() != proto::IMPORTED_MUTABLE) {
    return Error(StatusCode::kInvalid, "import of kind %d: 1 constant, 2 mutable", request.kind());
  }
  const auto kind = static_cast<TensorKind>(request.kind());
  if (request.segment_bytes() == 0)
    return Error(StatusCode::kInvalid, "import of a segment of 0 bytes");
  SLICE_RETURN_IF_ERROR(CheckTenantSegment((*fds)[0], request.segment_bytes()));
  SLICE_ASSIGN_OR_RETURN(const SegmentLayout layout,
                         LayOut(request.tensors(), kind, request.segment_bytes()));
  proto::Reply reply;
  SLICE_RETURN_IF_ERROR(AddSet(layout, kind, std::move((*fds)[0]), reply.mutable_tensors()));
  ReplyWith(std::move(reply));
  return Status::Ok();
}

Status Session::AllocTensors(const proto::AllocTensors& request) {
  SLICE_ASSIGN_OR_RETURN(const SegmentLayout layout,
                         LayOut(request.tensors(), TensorKind::kManaged, 0));
  proto::Reply reply;
  SLICE_RETURN_IF_ERROR(AddSet(layout, TensorKind::kManaged, Fd(), reply.mutable_tensors()));
  ReplyWith(std::move(reply));  // no descriptor: no views, see segments.h
  return Status::Ok();
}

// Before the executor maps anything. The engine's ledger decides exactly; this keeps one tenant
// from using up the executor's address space with sparse segments.
Status Session::CheckSegmentQuota(const SegmentLayout& layout) const {
  uint64_t bytes = 0;  // both terms are below 2^63, so no step overflows
  for (const PlacedTensor& tensor : layout.tensors) {
    bytes += tensor.extent_bytes;
    if (bytes > memory_bytes_max_) {
      return Error(StatusCode::kQuota,
                   "tensor '%s': with it this call registers %llu bytes, the session may have %llu",
                   tensor.name.c_str(), Ull(bytes), Ull(memory_bytes_max_));
    }
  }
  const uint64_t limit =
      kSegmentFactorMax * std::min(memory_bytes_max_, UINT64_MAX / kSegmentFactorMax);
  if (layout.bytes > limit || segment_bytes_ > limit - layout.bytes) {
    return Error(StatusCode::kQuota,
                 "segment of %llu bytes, %llu are mapped already: the session may have %llu (%llu "
                 "times its memory): use a smaller memfd",
                 Ull(layout.bytes), Ull(segment_bytes_), Ull(limit), Ull(kSegmentFactorMax));
  }
  return Status::Ok();
}

Status Session::AddSet(const SegmentLayout& layout, TensorKind kind, Fd home_memfd,
                       proto::TensorsReply* reply) {
  const SessionLimits& limits = services_->config.limits;
  if (sets_.size() >= limits.sets_max ||
      layout.tensors.size() > limits.tensors_max - tensors_.size()) {
    return Error(StatusCode::kQuota,
                 "%zu tensors in %zu sets are registered, %zu more asked for; a session may have "
                 "%u in %u: register more "
                 "tensors per call, or release some",
                 tensors_.size(), sets_.size(), layout.tensors.size(), limits.tensors_max,
                 limits.sets_max);
  }
  SLICE_RETURN_IF_ERROR(CheckSegmentQuota(layout));
  const DomainIndex home = services_->config.devices[home_].domain;
  const TensorSetId id{services_->next_set++};
  const std::vector<DomainIndex> domains = DomainsOfTenant();
  SLICE_ASSIGN_OR_RETURN(SetSegments segments,
                         CreateSegments(layout, kind, std::move(home_memfd), home, domains));
  proto::ExecutorRequest request;
  *request.mutable_add_set() = ToExecutorSet(id, tenant(), kind, layout, segments);
  const engine::TensorSetConfig config = ToEngineSet(id, tenant(), kind, home, layout, segments);
  SLICE_RETURN_IF_ERROR(
      services_->supervisor.Add(std::move(request), std::move(segments.memfds), tenant_user()));
  Status added;
  std::vector<uint64_t> handles;
  services_->loop.Call([&] {
    added = services_->loop.engine().AddTensorSet(config, MonotonicNow());
    for (uint32_t i = 0; i < layout.tensors.size() && added.ok(); ++i) {
      const PlacedTensor& tensor = layout.tensors[i];
      const uint64_t handle = tensors_.Insert({{id, i}, kind});
      handles.push_back(handle);
      services_->loop.AddTensor(
          tenant(), handle,
          {{id, i}, kind, tensor.dense_bytes, static_cast<uint32_t>(tensor.sizes.size())});
    }
  });
  if (!added.ok()) {
    services_->supervisor.DropSet(id);
    return added;
  }
  sets_[id.value] = {kind, home, layout.bytes, static_cast<uint32_t>(layout.tensors.size()), 0};
  segment_bytes_ += layout.bytes;
  for (size_t i = 0; i < handles.size(); ++i) {
    reply->add_handles(handles[i]);
    reply->add_offsets(layout.tensors[i].offset);
  }
  reply->set_segment_bytes(layout.bytes);
  return Status::Ok();
}

Status Session::ReplicateTensors(const proto::ReplicateTensors& request) {
  std::vector<TensorSetId> sets;
  for (const uint64_t handle : request.handles()) {
    const Tensor* tensor = tensors_.Find(handle);
    if (tensor == nullptr)
      return Error(StatusCode::kStale, "tensor %llu does not exist (any more)", Ull(handle));
    if (tensor->kind != TensorKind::kConstant) {
      return Error(StatusCode::kInvalid, "tensor %llu: only imported constants have replicas",
                   Ull(handle));
    }
    if (std::find(sets.begin(), sets.end(), tensor->ref.set) == sets.end())
      sets.push_back(tensor->ref.set);
  }
  std::vector<DomainIndex> domains;
  for (const std::string& name : request.devices()) {
    SLICE_ASSIGN_OR_RETURN(const DeviceIndex device, ChooseHome(name));
    if (name.empty()) return Error(StatusCode::kInvalid, "replicate: a device name is empty");
    domains.push_back(services_->config.devices[device].domain);
  }
  if (domains.empty()) domains = DomainsOfTenant();
  using Target = std::pair<TensorSetId, DomainIndex>;
  std::vector<Target> targets;
  Status status;
  Services* services = services_;
  services->loop.Call([&] {
    for (const TensorSetId set : sets) {
      for (const DomainIndex domain : domains) {
        if (domain == sets_[set.value].home || !status.ok()) continue;
        status = services->loop.engine().Replicate(set, domain, MonotonicNow());
        targets.emplace_back(set, domain);
      }
    }
  });
  SLICE_RETURN_IF_ERROR(status);
  // The answer comes when the copies are there; until then this socket only reports a hang-up.
  Pause();
  const uint32_t number = number_;
  services->loop.Call([&] {
    const auto ready = [services, targets] {
      return std::all_of(targets.begin(), targets.end(), [services](const Target& target) {
        return services->loop.engine().ReplicasReady(target.first, target.second);
      });
    };
    const TenantId id = tenant();
    const auto ready_or_gone = [services, id, ready] {
      return !services->loop.HasTenant(id) || ready();
    };
    services->loop.WhenTrue(ready_or_gone, [services, number] {
      services->mailbox.Post([services, number] {
        Session* session = services->find_session(number);
        if (session != nullptr && session->Resume()) session->ReplyWith({});
      });
    });
  });
  return Status::Ok();
}

Status Session::ReleaseTensors(const proto::ReleaseTensors& request) {
  // All or nothing: a stale handle among them releases none.
  std::vector<uint64_t> handles(request.handles().begin(), request.handles().end());
  std::sort(handles.begin(), handles.end());
  for (size_t i = 0; i < handles.size(); ++i) {
    if (tensors_.Find(handles[i]) == nullptr || (i > 0 && handles[i] == handles[i - 1])) {
      return Error(StatusCode::kStale, "tensor %llu does not exist (any more), or is named twice",
                   Ull(handles[i]));
    }
  }
  std::vector<TensorSetId> touched;
  services_->loop.Call([&] {
    services_->loop.TakeSubmitted(tenant());  // commands on them
    for (const uint64_t handle : handles) services_->loop.RemoveTensor(tenant(), handle);
  });
  for (const uint64_t handle : handles) {
    const TensorSetId set = tensors_.Find(handle)->ref.set;
    tensors_.Erase(handle);
    --sets_[set.value].tensors;
    touched.push_back(set);
  }
  for (const TensorSetId set : touched) ReleaseSetIfUnused(set);
  ReplyWith({});
  return Status::Ok();
}

void Session::ReleaseSetIfUnused(TensorSetId id) {
  const auto found = sets_.find(id.value);
  if (found == sets_.end() || found->second.tensors != 0 || found->second.bindings != 0) return;
  segment_bytes_ -= found->second.segment_bytes;
  sets_.erase(found);
  Services* services = services_;
  const TenantId owner = tenant();
  services->loop.Call([&] {
    const Status removed = services->loop.engine().RemoveTensorSet(id, MonotonicNow());
    if (!removed.ok())
      SLICE_LOG_ERROR("server", "set %u cannot be removed: %s", id.value,
                      removed.ToString().c_str());
    services->loop.WhenTrue(
        [services, id, owner] {
          return services->loop.HasTenant(owner) ? services->loop.engine().TensorSetGone(id)
                                                 : services->loop.engine().TenantGone(owner);
        },
        [services, id] {
          services->mailbox.Post([services, id] { services->supervisor.DropSet(id); });
        });
  });
}

// ---- bindings
// -------------------------------------------------------------------------------------------------------

Status Session::CreateBinding(const proto::CreateBinding& request) {
  const SessionLimits& limits = services_->config.limits;
  if (bindings_.size() >= limits.bindings_max) {
    return Error(StatusCode::kQuota, "%zu bindings exist, a session may have %u: destroy some",
                 bindings_.size(), limits.bindings_max);
  }
  const Graph* graph = graphs_.Find(request.graph());
  if (graph == nullptr)
    return Error(StatusCode::kStale, "graph %llu does not exist (any more)", Ull(request.graph()));
  const std::shared_ptr<const graph::Template> program = services_->templates.Find(graph->id);
  if (static_cast<size_t>(request.tensors_size()) != program->statics().size()) {
    return Error(StatusCode::kInvalid, "%d tensors given, graph '%s' has %zu static inputs",
                 request.tensors_size(), program->name().c_str(), program->statics().size());
  }
  Binding binding;
  binding.id = BindingId{services_->next_binding++};
  binding.graph = graph->id;
  engine::BindingConfig config;
  config.id = binding.id;
  config.tenant = tenant();
  config.graph = graph->id;
  proto::ExecutorRequest to_executor;
  proto::ExecutorBinding* item = to_executor.mutable_add_binding();
  item->set_binding(binding.id.value);
  item->set_template_id(graph->id.value);
  item->set_tenant(number_);
  for (int i = 0; i < request.tensors_size(); ++i) {
    const Tensor* tensor = tensors_.Find(request.tensors(i));
    if (tensor == nullptr) {
      return Error(StatusCode::kStale, "static input %d: tensor %llu does not exist (any more)", i,
                   Ull(request.tensors(i)));
    }
    config.statics.push_back(tensor->ref);
    item->add_statics()->set_set_id(tensor->ref.set.value);
    item->mutable_statics(i)->set_tensor(tensor->ref.tensor);
    if (std::find(binding.sets.begin(), binding.sets.end(), tensor->ref.set) ==
        binding.sets.end()) {
      binding.sets.push_back(tensor->ref.set);
    }
  }
  SLICE_RETURN_IF_ERROR(services_->supervisor.Add(std::move(to_executor), {}, tenant_user()));
  uint64_t handle = 0;
  Status added;
  services_->loop.Call([&] {
    added = services_->loop.engine().AddBinding(config);
    if (!added.ok()) return;
    handle = bindings_.Insert(binding);
    services_->loop.AddBinding(tenant(), handle, {binding.id, program});
  });
  if (!added.ok()) {
    services_->supervisor.DropBinding(binding.id);
    return added;
  }
  services_->templates.AddReference(binding.graph);
  for (const TensorSetId set : binding.sets) ++sets_[set.value].bindings;
  proto::Reply reply;
  reply.mutable_binding()->set_binding(handle);
  reply.mutable_binding()->set_op_count(static_cast<uint32_t>(program->groups().size()));
  ReplyWith(std::move(reply));
  return Status::Ok();
}

Status Session::DestroyBinding(uint64_t handle) {
  const Binding* found = bindings_.Find(handle);
  if (found == nullptr)
    return Error(StatusCode::kStale, "binding %llu does not exist (any more)", Ull(handle));
  const Binding binding = *found;
  bindings_.Erase(handle);
  Services* services = services_;
  const TenantId owner = tenant();
  const uint32_t number = number_;
  services->loop.Call([&] {
    services->loop.TakeSubmitted(owner);
    services->loop.RemoveBinding(owner, handle);  // no new requests; those in flight finish
    services->loop.WhenTrue(
        [services, owner, binding] { return services->loop.TryRemoveBinding(owner, binding.id); },
        [services, number, binding] {
          services->mailbox.Post([services, number, binding] {
            services->supervisor.DropBinding(binding.id);
            services->templates.Release(binding.graph);
            Session* session = services->find_session(number);
            if (session == nullptr) return;  // its sets went with the tenant
            for (const TensorSetId set : binding.sets) {
              --session->sets_[set.value].bindings;
              session->ReleaseSetIfUnused(set);
            }
          });
        });
  });
  ReplyWith({});
  return Status::Ok();
}

}  // namespace slice::server
