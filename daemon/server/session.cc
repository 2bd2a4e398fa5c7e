#include "daemon/server/session.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "common/clock.h"
#include "common/wire/control.h"

namespace slice::server {
namespace {

constexpr size_t kNameBytesMax = 64;

// Names are for people and logs: printable ASCII stays, the rest is replaced.
std::string CleanName(const std::string& name) {
  std::string clean = name.substr(0, kNameBytesMax);
  for (char& c : clean) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return clean;
}

uint32_t ClassNumber(ServiceClass service_class) {
  return service_class == ServiceClass::kOnline ? SLICE_CLASS_ONLINE : SLICE_CLASS_OFFLINE;
}

bool IsAdministration(const proto::Request& request) {
  return request.has_status() || request.has_set_policy() || request.has_timeline() ||
         request.has_what_if();
}

}  // namespace

void SendFarewell(const Fd& socket, const Status& why) {
  proto::Reply reply;  // id 0: no request's
  reply.set_status(static_cast<int32_t>(why.code()));
  reply.set_text(why.text().substr(0, wire::kControlMessageBytesMax / 2));
  // Whoever does not read his socket misses it.
  [[maybe_unused]] const Status sent = SendPacket(socket, reply.SerializeAsString(), {}, true);
}

Session::Session(Services* services, uint32_t number, Fd socket, Peer peer)
    : services_(services),
      number_(number),
      socket_(std::move(socket)),
      peer_(std::move(peer)),
      hello_deadline_(MonotonicNow() + services->config.hello_timeout) {}

Session::~Session() {
  services_->poller.Remove(socket_.get());
  services_->admin_poller.Remove(socket_.get());
  if (peer_.pidfd.valid()) services_->poller.Remove(peer_.pidfd.get());
  if (!is_tenant_) return;
  --services_->home_counts[home_];
  // It counts until nothing is left of it: else sessions that are opened, given a long op and
  // closed again would pile up without a limit.
  ++services_->tenants_leaving;
  // References on templates: of graphs, of bindings, and of bindings whose last request has not
  // ended (their own task).
  std::vector<TemplateId> templates;
  graphs_.ForEach([&](const Graph& graph) { templates.push_back(graph.id); });
  bindings_.ForEach([&](const Binding& binding) { templates.push_back(binding.graph); });
  Services* services = services_;
  const TenantId id = tenant();
  const uid_t uid = peer_.uid;
  services->loop.Call([&] {
    services->loop.RemoveTenant(id, farewell_);
    services->loop.WhenTrue([services, id] { return services->loop.engine().TenantGone(id); },
                            [services, id, uid, templates] {
                              services->mailbox.Post([services, id, uid, templates] {
                                --services->tenants_leaving;
                                --services->tenant_count;
                                if (--services->tenants_of_uid[uid] == 0)
                                  services->tenants_of_uid.erase(uid);
                                services->supervisor.DropTenant(id);
                                for (const TemplateId graph : templates)
                                  services->templates.Release(graph);
                              });
                            });
  });
}

Status Session::Start() {
  if (peer_.pidfd.valid()) {
    // A forked child may keep the socket open: the session ends with the process that made it.
    SLICE_RETURN_IF_ERROR(services_->poller.Add(peer_.pidfd.get(), EPOLLIN, [this](uint32_t) {
      services_->poller.Remove(peer_.pidfd.get());
      End(Error(StatusCode::kDaemonLost, "process %d has ended", peer_.pid));
    }));
  }
  if (IsAdministrator(peer_, services_->config.admin_group)) {
    SLICE_RETURN_IF_ERROR(services_->admin_poller.Add(
        socket_.get(), EPOLLIN, [this](uint32_t) { OnReadableWhileExecutorIsAwaited(); }));
  }
  return services_->poller.Add(socket_.get(), EPOLLIN, [this](uint32_t) { OnReadable(); });
}

void Session::End(const Status& why) {
  if (ending_) return;
  ending_ = true;
  services_->poller.Remove(socket_.get());
  services_->admin_poller.Remove(socket_.get());
  if (why.code() != StatusCode::kDaemonLost) SendFarewell(socket_, why);
  if (is_tenant_) {
    const bool is_fault = why.code() == StatusCode::kProtocol;
    const std::string text = "session " + std::to_string(number_) + " '" + name_ + "' (uid " +
                             std::to_string(peer_.uid) + ", pid " + std::to_string(peer_.pid) +
                             ") ends: " + why.text();
    if (is_fault) {
      services_->fault_log.Warn(text);
    } else {
      SLICE_LOG_INFO("server", "%s", text.c_str());
    }
  }
  services_->end_session(number_);
}

// Some request of this thread is with the executor, so one that may need the executor itself must
// wait: it is left in the socket.
void Session::OnReadableWhileExecutorIsAwaited() {
  std::string bytes(wire::kControlMessageBytesMax, '\0');
  const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT);
  proto::Request request;
  if (got > 0 && request.ParseFromArray(bytes.data(), static_cast<int>(got)) &&
      !IsAdministration(request)) {
    services_->admin_poller.Remove(socket_.get());
    return;
  }
  OnReadable();  // or garbage, or a hang-up
}

void Session::OnReadable() {
  if (busy_) {
    // Not reading: only a hang-up can be reported.
    End(Error(StatusCode::kDaemonLost, "connection closed"));
    return;
  }
  Result<Packet> packet =
      ReceivePacket(socket_, wire::kControlMessageBytesMax, wire::kControlFdsMax, true);
  if (!packet.ok()) {
    if (packet.status().code() != StatusCode::kWouldBlock) End(packet.status());
    return;
  }
  if (packet->end) {
    End(Error(StatusCode::kDaemonLost, "connection closed"));
    return;
  }
  request_id_ = 0;
  proto::Request request;
  if (packet->truncated || !request.ParseFromString(packet->bytes)) {
    const Status status =
        packet->truncated ? Error(StatusCode::kProtocol,
                                  "message longer than %zu bytes or with more than %zu descriptors",
                                  wire::kControlMessageBytesMax, wire::kControlFdsMax)
                          : Error(StatusCode::kProtocol, "message of %zu bytes is not a Request",
                                  packet->bytes.size());
    ReplyError(status);
    End(status);
    return;
  }
  Dispatch(request, std::move(packet->fds));
}

void Session::Pause() {
  busy_ = true;
  services_->admin_poller.Remove(socket_.get());
  services_->poller.SetEvents(socket_.get(), EPOLLRDHUP);
}

bool Session::Resume() {
  if (ending_) return false;
  busy_ = false;
  services_->poller.SetEvents(socket_.get(), EPOLLIN);
  return true;
}

void Session::Dispatch(const proto::Request& request, std::vector<Fd> fds) {
  using Kind = proto::Request::KindCase;
  request_id_ = request.id();
  const Kind kind = request.kind_case();
  const bool is_administration = IsAdministration(request);
  // What needs the executor must not be started again while it waits.
  if (!is_administration) services_->admin_poller.Remove(socket_.get());
  Status status;
  if (!is_tenant_ && !is_administration && kind != Kind::kHello) {
    status = Error(StatusCode::kProtocol, "request of kind %d before Hello", kind);
  } else {
    switch (kind) {
      case Kind::kHello:
        status = Hello(request.hello(), &fds);
        break;
      case Kind::kRegisterGraph:
        status = RegisterGraph(request.register_graph(), &fds);
        break;
      case Kind::kUnregisterGraph:
        status = UnregisterGraph(request.unregister_graph());
        break;
      case Kind::kImportTensors:
        status = ImportTensors(request.import_tensors(), &fds);
        break;
      case Kind::kReplicateTensors:
        status = ReplicateTensors(request.replicate_tensors());
        break;
      case Kind::kAllocTensors:
        status = AllocTensors(request.alloc_tensors());
        break;
      case Kind::kReleaseTensors:
        status = ReleaseTensors(request.release_tensors());
        break;
      case Kind::kCreateBinding:
        status = CreateBinding(request.create_binding());
        break;
      case Kind::kDestroyBinding:
        status = DestroyBinding(request.destroy_binding());
        break;
      case Kind::kErrorText: {
        proto::Reply reply;
        services_->loop.Call([&] {
          reply.mutable_body()->set_text(
              services_->loop.ErrorText(tenant(), request.error_text().token()));
        });
        ReplyWith(std::move(reply));
        break;
      }
      case Kind::kStatus:
      case Kind::kSetPolicy:
      case Kind::kTimeline:
      case Kind::kWhatIf:
        status = Administer(request, &fds);
        break;
      default:
        status = Error(StatusCode::kProtocol,
                       "request of an unknown kind: is the client newer than sliced?");
    }
  }
  if (status.ok()) {
    if (is_administration) hello_deadline_ = MonotonicNow() + services_->config.hello_timeout;
    return;
  }
  ReplyError(status);
  if (status.code() == StatusCode::kProtocol) Fault(status);
}

void Session::Fault(const Status& status) {
  services_->fault_log.Warn("connection " + std::to_string(number_) + " (uid " +
                            std::to_string(peer_.uid) + ", pid " + std::to_string(peer_.pid) +
                            "): " + status.ToString());
  if (++faults_ >= services_->config.limits.faults_max) {
    End(Error(StatusCode::kProtocol, "%u malformed messages", faults_));
  }
}

void Session::ReplyError(const Status& status) {
  proto::Reply reply;
  reply.set_status(static_cast<int32_t>(status.code()));
  reply.set_text(status.text().substr(0, wire::kControlMessageBytesMax / 2));
  ReplyWith(std::move(reply));
}

void Session::ReplyWith(proto::Reply reply, std::span<const int> fds) {
  reply.set_id(request_id_);
  std::string bytes = reply.SerializeAsString();
  if (bytes.size() > wire::kControlMessageBytesMax && reply.has_body() && ReplyWithMemfd(reply))
    return;
  if (bytes.size() > wire::kControlMessageBytesMax) {
    proto::Reply shorter;
    shorter.set_id(request_id_);
    shorter.set_status(SLICE_ERR_INTERNAL);
    shorter.set_text("the answer has " + std::to_string(bytes.size()) + " bytes, a message holds " +
                     std::to_string(wire::kControlMessageBytesMax));
    bytes = shorter.SerializeAsString();
    fds = {};
  }
  const Status sent = SendPacket(socket_, bytes, fds, true);
  if (!sent.ok()) End(sent);  // it does not read what it asked for
}

// A text too long for a message: an empty body, and beside it a sealed memfd that holds the text
// and nothing else.
bool Session::ReplyWithMemfd(const proto::Reply& reply) {
  const std::string& text = reply.body().text();
  const Result<Fd> memfd = CreateMemfd("slice-text", text.size());
  if (!memfd.ok() ||
      ::pwrite(memfd->get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
    return false;
  proto::Reply empty;
  empty.set_id(reply.id());
  empty.mutable_body();
  const int fd = memfd->get();
  const Status sent = SendPacket(socket_, empty.SerializeAsString(), std::span(&fd, 1), true);
  if (!sent.ok()) End(sent);
  return true;
}

// ---- Hello
// ----------------------------------------------------------------------------------------------------------

Status Session::CheckHello(const proto::Hello& hello, const TenantPolicy& policy,
                           size_t fd_count) const {
  const SessionLimits& limits = services_->config.limits;
  if (is_tenant_) return Error(StatusCode::kProtocol, "a second Hello on one connection");
  SLICE_RETURN_IF_ERROR(hello_refusal_);
  if (hello.abi_major() != SLICE_ABI_MAJOR || hello.ring_version() != wire::kTenantRingVersion) {
    return Error(StatusCode::kVersion,
                 "client speaks ABI %u.%u, ring %u; sliced speaks %u.%u, ring %u: update the older",
                 hello.abi_major(), hello.abi_minor(), hello.ring_version(), SLICE_ABI_MAJOR,
                 SLICE_ABI_MINOR, wire::kTenantRingVersion);
  }
  if (fd_count != wire::kHelloFdCount) {
    return Error(StatusCode::kProtocol, "Hello with %zu descriptors, %zu are expected", fd_count,
                 wire::kHelloFdCount);
  }
  if (hello.service_class() > SLICE_CLASS_OFFLINE) {
    return Error(StatusCode::kInvalid, "class %u: 0 default, 1 online, 2 offline",
                 hello.service_class());
  }
  if (!(hello.weight() >= 0.0) || hello.weight() > 1e6) {  // NaN too
    return Error(StatusCode::kInvalid, "weight %g: must be between 0 and 1e6", hello.weight());
  }
  if (hello.arena_bytes() == 0 || hello.arena_bytes() > limits.arena_bytes_max) {
    return Error(StatusCode::kInvalid, "arena of %llu bytes: must be between 1 and %llu",
                 static_cast<unsigned long long>(hello.arena_bytes()),
                 static_cast<unsigned long long>(limits.arena_bytes_max));
  }
  const DurationNs wait = services_->supervisor.WaitsUntil(peer_.uid) - MonotonicNow();
  if (wait > 0) {
    return Error(StatusCode::kExecutorLost,
                 "sessions of uid %u ended the executor again and again: try again in %lld ms",
                 peer_.uid, static_cast<long long>(wait / kMillisecond + 1));
  }
  if (services_->tenant_count >= limits.sessions_max) {
    return Error(StatusCode::kQuota, "%u sessions are open, sliced allows %u",
                 services_->tenant_count, limits.sessions_max);
  }
  const auto open = services_->tenants_of_uid.find(peer_.uid);
  if (open != services_->tenants_of_uid.end() && open->second >= policy.sessions_max) {
    return Error(StatusCode::kQuota,
                 "user %u has %u sessions, the config allows %u: close one (one that was closed "
                 "counts until its last op has ended)",
                 peer_.uid, open->second, policy.sessions_max);
  }
  return Status::Ok();
}

Result<DeviceIndex> Session::ChooseHome(const std::string& name) const {
  const std::vector<DeviceSpec>& devices = services_->config.devices;
  DeviceIndex best = kNoDevice;
  for (size_t d = 0; d < devices.size(); ++d) {
    if ((device_mask_ >> d & 1) == 0) continue;
    if (!name.empty()) {
      if (devices[d].name == name) return static_cast<DeviceIndex>(d);
    } else if (best == kNoDevice || services_->home_counts[d] < services_->home_counts[best]) {
      best = static_cast<DeviceIndex>(d);
    }
  }
  if (best != kNoDevice) return best;
  std::string allowed;
  for (size_t d = 0; d < devices.size(); ++d) {
    if ((device_mask_ >> d & 1) != 0) allowed += (allowed.empty() ? "" : ", ") + devices[d].name;
  }
  return Error(StatusCode::kInvalid, "home device '%s': this user may use: %s",
               CleanName(name).c_str(), allowed.c_str());
}

Status Session::Hello(const proto::Hello& hello, std::vector<Fd>* fds) {
  const ServerConfig& config = services_->config;
  const TenantPolicy& policy = config.PolicyOf(peer_.uid);
  if (services_->tenants_leaving != 0) {
    // Sessions that have ended and of which nothing is left, but the engine thread's word is on its
    // way: who closes one and opens another must not be refused for the first.
    services_->loop.Call([&] { services_->loop.RunWatches(); });
    services_->mailbox.Drain();
  }
  SLICE_RETURN_IF_ERROR(CheckHello(hello, policy, fds->size()));
  device_mask_ = policy.device_mask;
  if (config.devices.size() < 64) device_mask_ &= (uint64_t{1} << config.devices.size()) - 1;
  SLICE_ASSIGN_OR_RETURN(home_, ChooseHome(hello.home_device()));
  SLICE_RETURN_IF_ERROR(
      CheckTenantSegment((*fds)[wire::kHelloTenantRingFd], wire::kTenantRingBytes));
  SLICE_RETURN_IF_ERROR(CheckTenantSegment((*fds)[wire::kHelloArenaFd], hello.arena_bytes()));
  TenantRing::Handout handout;
  SLICE_ASSIGN_OR_RETURN(std::unique_ptr<TenantRing> ring,
                         TenantRing::Create((*fds)[wire::kHelloTenantRingFd], &handout));

  engine::TenantConfig tenant_config;
  tenant_config.id = tenant();
  tenant_config.name = CleanName(hello.name());
  tenant_config.uid = peer_.uid;
  tenant_config.pid = static_cast<uint32_t>(peer_.pid);
  ServiceClass service_class = policy.class_default;
  if (hello.service_class() == SLICE_CLASS_OFFLINE) service_class = ServiceClass::kOffline;
  if (hello.service_class() == SLICE_CLASS_ONLINE)
    service_class = policy.class_max;  // as high as is granted
  tenant_config.class_max = service_class;
  tenant_config.weight =
      hello.weight() == 0.0 ? policy.weight : std::min(hello.weight(), policy.weight);
  int64_t all_bytes = 0;
  int64_t pool_bytes_max = 0;
  for (const engine::DomainConfig& domain : config.engine.domains) {
    all_bytes += domain.pool_bytes + domain.retained_bytes;
    pool_bytes_max = std::max(pool_bytes_max, domain.pool_bytes);
  }
  tenant_config.memory_bytes_max =
      policy.memory_bytes_max == 0 ? all_bytes : std::min(policy.memory_bytes_max, all_bytes);
  tenant_config.device_mask = device_mask_;
  tenant_config.home = home_;
  tenant_config.deadline_min = policy.deadline_min;
  tenant_config.arena_bytes = static_cast<int64_t>(hello.arena_bytes());

  proto::ExecutorRequest request;
  request.mutable_add_tenant()->set_tenant(number_);
  request.mutable_add_tenant()->set_arena_bytes(hello.arena_bytes());
  request.mutable_add_tenant()->set_pool_bytes_max(
      static_cast<uint64_t>(std::min(pool_bytes_max, tenant_config.memory_bytes_max)));
  std::vector<Fd> arena;
  arena.push_back(std::move((*fds)[wire::kHelloArenaFd]));
  SLICE_RETURN_IF_ERROR(
      services_->supervisor.Add(std::move(request), std::move(arena), tenant_user()));
  Status added;
  services_->loop.Call([&] { added = services_->loop.AddTenant(tenant_config, std::move(ring)); });
  if (!added.ok()) {
    services_->supervisor.DropTenant(tenant());
    return added;
  }
  is_tenant_ = true;
  name_ = tenant_config.name;
  memory_bytes_max_ = static_cast<uint64_t>(tenant_config.memory_bytes_max);
  ++services_->home_counts[home_];
  ++services_->tenant_count;
  ++services_->tenants_of_uid[peer_.uid];
  SLICE_LOG_INFO("server", "session %u '%s' (uid %u, pid %d) opens: %s, home %s", number_,
                 name_.c_str(), peer_.uid, peer_.pid,
                 service_class == ServiceClass::kOnline ? "online" : "offline",
                 config.devices[home_].name.c_str());

  proto::Reply reply;
  proto::HelloReply* body = reply.mutable_hello();
  body->set_abi_major(SLICE_ABI_MAJOR);
  body->set_abi_minor(SLICE_ABI_MINOR);
  body->set_session(number_);
  body->set_service_class(ClassNumber(service_class));
  body->set_memory_bytes_max(static_cast<uint64_t>(tenant_config.memory_bytes_max));
  body->set_offline_op_ns_max(static_cast<uint64_t>(config.engine.offline_op_max));
  for (size_t d = 0; d < config.devices.size(); ++d) {
    if ((device_mask_ >> d & 1) != 0) body->add_devices(config.devices[d].name);
  }
  body->set_home_device(config.devices[home_].name);
  body->set_deadline_ns_min(static_cast<uint64_t>(policy.deadline_min));
  body->set_daemon_pid(static_cast<uint32_t>(::getpid()));
  body->set_daemon_epoch(services_->daemon_epoch);
  std::array<int, wire::kHelloReplyFdCount> out{};
  out[wire::kHelloReplyDaemonRingFd] = handout.daemon_ring.get();
  out[wire::kHelloReplyDaemonEventFd] = handout.submit_event.get();
  out[wire::kHelloReplyClientEventFd] = handout.completion_event.get();
  ReplyWith(std::move(reply), out);
  return Status::Ok();
}

}  // namespace slice::server
