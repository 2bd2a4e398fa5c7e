// Opening a session and everything that goes over the control socket. Rings and tickets:
// session_run.cc.
#include "libclient/session.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "common/checked.h"
#include "common/clock.h"
#include "common/wire/control.h"

namespace slice::client {
namespace {

constexpr uint64_t kDefaultArenaBytes = uint64_t{64} * kMiB;
constexpr uint64_t kPageBytes = 4096;
constexpr size_t kNameBytesMax = 128;        // names are for people; longer ones are cut
constexpr size_t kReleasePerMessage = 4096;  // 10 bytes each at most: fits kControlMessageBytesMax
constexpr size_t kNamesDroppedAbove = 48 * 1024;  // leave room for the rest of the message

std::string CutName(std::string name) {
  size_t bytes = std::min(name.size(), kNameBytesMax);
  while (bytes < name.size() && bytes > 0 &&
         (static_cast<unsigned char>(name[bytes]) & 0xc0) == 0x80)
    --bytes;
  name.resize(bytes);
  return name;
}

template <typename Repeated>
void FillTensorSpecs(const std::vector<TensorSpec>& specs, Repeated* out) {
  size_t name_bytes = 0;
  for (const TensorSpec& spec : specs) name_bytes += std::min(spec.name.size(), kNameBytesMax) + 32;
  for (const TensorSpec& spec : specs) {
    proto::TensorSpec* tensor = out->Add();
    // Thousands of tensors in one message have no room for names.
    if (name_bytes <= kNamesDroppedAbove) tensor->set_name(CutName(spec.name));
    tensor->set_dtype(spec.dtype);
    tensor->mutable_sizes()->Add(spec.sizes.begin(), spec.sizes.end());
    tensor->mutable_strides()->Add(spec.strides.begin(), spec.strides.end());
    tensor->set_offset(spec.offset);
  }
}

// Seals a segment that the tenant shares with the daemon: its size is final and no seal can be
// added any more (a later F_SEAL_FUTURE_WRITE would take the executor's write access away).
Result<Fd> CreateSharedSegment(const char* name, size_t bytes) {
  SLICE_ASSIGN_OR_RETURN(Fd memfd, CreateMemfd(name, bytes));
  if (::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SEAL) != 0) {
    return ErrnoError(StatusCode::kInternal, errno, "memfd '%s': cannot seal", name);
  }
  return memfd;
}

Status CheckOptions(const slice_session_options_t& options) {
  if (options.service_class > SLICE_CLASS_OFFLINE) {
    return Error(StatusCode::kInvalid,
                 "service_class is %u: it must be one of SLICE_CLASS_* (0..%u)",
                 options.service_class, SLICE_CLASS_OFFLINE);
  }
  if (options.reserved != 0)
    return Error(StatusCode::kInvalid, "reserved is %u: it must be 0", options.reserved);
  if (!std::isfinite(options.weight) || options.weight < 0) {
    return Error(StatusCode::kInvalid,
                 "weight is %g: it must be finite and at least 0 (0 = as configured)",
                 options.weight);
  }
  if (options.arena_bytes > uint64_t{1} << 46) {
    return Error(StatusCode::kInvalid, "arena_bytes is %llu: at most 2^46 are possible",
                 static_cast<unsigned long long>(options.arena_bytes));
  }
  return Status::Ok();
}

}  // namespace

Result<std::unique_ptr<Session>> Session::Open(const slice_session_options_t& options) {
  SLICE_RETURN_IF_ERROR(CheckOptions(options));
  std::unique_ptr<Session> session(new Session());
  session->pid_ = ::getpid();
  const TimeNs deadline_ns = MonotonicNow() + kOpenTimeout;
  SLICE_ASSIGN_OR_RETURN(
      session->channel_,
      ControlChannel::Connect(ResolveSocketPath(options.socket_path), kOpenTimeout));
  SLICE_RETURN_IF_ERROR(session->SayHello(options, deadline_ns));
  return session;
}

Status Session::SayHello(const slice_session_options_t& options, TimeNs deadline_ns) {
  const uint64_t arena_bytes =
      RoundUp(options.arena_bytes == 0 ? kDefaultArenaBytes : options.arena_bytes, kPageBytes);
  SLICE_ASSIGN_OR_RETURN(Fd ring, CreateSharedSegment("slice-tenant-ring", wire::kTenantRingBytes));
  SLICE_ASSIGN_OR_RETURN(Fd arena, CreateSharedSegment("slice-arena", arena_bytes));
  SLICE_ASSIGN_OR_RETURN(tenant_ring_, Mapping::Map(ring, wire::kTenantRingBytes, true));
  SLICE_ASSIGN_OR_RETURN(arena_memory_, Mapping::Map(arena, arena_bytes, true));
  arena_ = std::make_unique<Arena>(arena_bytes);

  proto::Request request;
  proto::Hello* hello = request.mutable_hello();
  hello->set_abi_major(SLICE_ABI_MAJOR);
  hello->set_abi_minor(SLICE_ABI_MINOR);
  hello->set_ring_version(wire::kTenantRingVersion);
  hello->set_name(
      CutName(ToUtf8(options.name != nullptr ? options.name : program_invocation_short_name)));
  hello->set_service_class(options.service_class);
  hello->set_weight(options.weight);
  hello->set_arena_bytes(arena_bytes);
  hello->set_home_device(ToUtf8(options.home_device));
  const int fds[wire::kHelloFdCount] = {ring.get(), arena.get()};
  std::vector<Fd> reply_fds;
  SLICE_ASSIGN_OR_RETURN(const proto::Reply reply,
                         Call(std::move(request), fds, &reply_fds, deadline_ns - MonotonicNow()));
  if (!reply.has_hello()) return BreakProtocol("the answer to Hello is no HelloReply");
  return AcceptHello(reply.hello(), std::move(reply_fds));
}

Status Session::AcceptHello(const proto::HelloReply& hello, std::vector<Fd> fds) {
  if (hello.abi_major() != SLICE_ABI_MAJOR) {
    return Error(StatusCode::kVersion,
                 "sliced at '%s' speaks ABI %u.%u, this libslice speaks %u.%u: install the "
                 "libslice of the daemon's release",
                 channel_->path().c_str(), hello.abi_major(), hello.abi_minor(), SLICE_ABI_MAJOR,
                 SLICE_ABI_MINOR);
  }
  if (fds.size() != wire::kHelloReplyFdCount) {
    return BreakProtocol("HelloReply came with " + std::to_string(fds.size()) +
                         " descriptors, expected " + std::to_string(wire::kHelloReplyFdCount));
  }
  const Fd& ring = fds[wire::kHelloReplyDaemonRingFd];
  if (const Result<size_t> bytes = CheckForeignMemfd(ring, wire::kDaemonRingBytes); !bytes.ok()) {
    return BreakProtocol("daemon ring: " + bytes.status().text());
  }
  SLICE_ASSIGN_OR_RETURN(daemon_ring_, Mapping::Map(ring, wire::kDaemonRingBytes, false));
  daemon_event_ = std::move(fds[wire::kHelloReplyDaemonEventFd]);
  client_event_ = std::move(fds[wire::kHelloReplyClientEventFd]);
  for (const Fd* event :
       {&daemon_event_, &client_event_}) {  // reading and signalling must never block
    const int flags = ::fcntl(event->get(), F_GETFL);
    if (flags < 0 || ::fcntl(event->get(), F_SETFL, flags | O_NONBLOCK) != 0) {
      return ErrnoError(StatusCode::kInternal, errno,
                        "cannot make an eventfd of sliced nonblocking");
    }
  }
  submits_ = std::make_unique<SubmitRing>(tenant_ring_.data(), daemon_ring_.data());
  completions_ = std::make_unique<CompletionRing>(tenant_ring_.data(), daemon_ring_.data());
  limits_.size = sizeof limits_;
  limits_.service_class = hello.service_class();
  limits_.queue_slots = wire::kRingSlots;
  limits_.memory_bytes_max = hello.memory_bytes_max();
  limits_.arena_bytes = arena_->bytes();
  limits_.offline_op_ns_max = hello.offline_op_ns_max();
  limits_.deadline_ns_min = hello.deadline_ns_min();
  limits_.daemon_epoch = hello.daemon_epoch();
  limits_.device_count = static_cast<uint32_t>(hello.devices_size());
  limits_.session_number = hello.session();
  return Status::Ok();
}

Status Session::CheckNotForked() const {
  const pid_t pid = ::getpid();
  if (pid == pid_) return Status::Ok();
  return Error(StatusCode::kInvalid,
               "session was opened by process %d, this is process %d: a session cannot be used "
               "after fork; open one in the "
               "child",
               pid_, pid);
}

Status Session::CheckNotLost() const {
  std::lock_guard lock(mutex_);
  return broken_;
}

int Session::EventLoopFd() {
  std::lock_guard lock(mutex_);
  if (event_loop_.valid()) return event_loop_.get();
  Result<Fd> unclaimed = CreateEventFd();
  Fd loop(::epoll_create1(EPOLL_CLOEXEC));
  if (!unclaimed.ok() || !loop.valid()) return -1;
  const auto add = [&](int fd, uint32_t events) {
    epoll_event event{};
    event.events = events;
    return ::epoll_ctl(loop.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  };
  if (!add(client_event_.get(), EPOLLIN) || !add(channel_->fd(), EPOLLRDHUP) ||
      !add(unclaimed->get(), EPOLLIN)) {
    return -1;
  }
  event_loop_ = std::move(loop);
  unclaimed_event_ = std::move(unclaimed).value();
  if (unclaimed_ > 0 || !broken_.ok()) SignalEventFd(unclaimed_event_);
  return event_loop_.get();
}

Status Session::ArenaAlloc(uint64_t bytes, uint64_t* offset, void** pointer) {
  SLICE_RETURN_IF_ERROR(CheckNotLost());
  SLICE_ASSIGN_OR_RETURN(*offset, arena_->Allocate(bytes));
  if (pointer != nullptr) *pointer = arena_memory_.data() + *offset;
  return Status::Ok();
}

Status Session::ArenaFree(uint64_t offset) {
  SLICE_RETURN_IF_ERROR(CheckNotLost());
  return arena_->Free(offset);
}

Result<proto::Reply> Session::Call(proto::Request request, std::span<const int> fds,
                                   std::vector<Fd>* reply_fds, DurationNs timeout) {
  SLICE_RETURN_IF_ERROR(CheckNotLost());
  Result<proto::Reply> reply = channel_->Call(std::move(request), fds, reply_fds, timeout);
  if (!reply.ok() && channel_->broken()) {
    std::lock_guard lock(mutex_);
    BreakLocked(reply.status());
  }
  return reply;
}

Status Session::BreakProtocol(const std::string& text) {
  std::lock_guard lock(mutex_);
  BreakLocked(
      Status(StatusCode::kProtocol, "sliced at '" + channel_->path() + "': " + text +
                                        ": session closed; are client and daemon of one release?"));
  return broken_;
}

Status Session::CheckHandlesLive(std::span<const slice_tensor_t> handles) const {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < handles.size(); ++i) {
    if (!tensors_.contains(handles[i])) {
      return Error(StatusCode::kStale,
                   "tensor %zu of %zu: handle %#llx is released or of another session", i,
                   handles.size(), static_cast<unsigned long long>(handles[i]));
    }
  }
  return Status::Ok();
}

Status Session::AddTensors(const proto::Reply& reply, const std::vector<TensorSpec>& specs,
                           std::shared_ptr<Mapping> view, bool managed, slice_tensor_t* handles) {
  const auto& made = reply.tensors().handles();
  if (static_cast<size_t>(made.size()) != specs.size() ||
      std::find(made.begin(), made.end(), uint64_t{0}) != made.end()) {
    return BreakProtocol(std::to_string(made.size()) + " tensor handles came, " +
                         std::to_string(specs.size()) + " other than 0 were expected");
  }
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < specs.size(); ++i) {
    tensors_[made[static_cast<int>(i)]] =
        Tensor{.view = view,
               .dense_bytes = specs[i].dense_bytes,
               .dim_count = static_cast<uint32_t>(specs[i].sizes.size()),
               .managed = managed};
  }
  std::copy(made.begin(), made.end(), handles);
  return Status::Ok();
}

Status Session::ImportTensors(int memfd, uint32_t kind, const std::vector<TensorSpec>& specs,
                              slice_tensor_t* handles) {
  if (kind != SLICE_TENSOR_CONSTANT && kind != SLICE_TENSOR_MUTABLE) {
    return Error(StatusCode::kInvalid,
                 "kind is %u: it must be SLICE_TENSOR_CONSTANT (1) or SLICE_TENSOR_MUTABLE (2)",
                 kind);
  }
  Fd duplicate(::fcntl(memfd, F_DUPFD_CLOEXEC, 0));
  if (!duplicate.valid()) return ErrnoError(StatusCode::kInvalid, errno, "descriptor %d", memfd);
  SLICE_ASSIGN_OR_RETURN(const size_t segment_bytes, CheckForeignMemfd(duplicate, 1));
  SLICE_RETURN_IF_ERROR(CheckTensorsInSegment(specs, segment_bytes));
  proto::Request request;
  proto::ImportTensors* import = request.mutable_import_tensors();
  import->set_kind(kind == SLICE_TENSOR_CONSTANT ? proto::IMPORTED_CONSTANT
                                                 : proto::IMPORTED_MUTABLE);
  import->set_segment_bytes(segment_bytes);
  FillTensorSpecs(specs, import->mutable_tensors());
  const int fds[] = {memfd};
  SLICE_ASSIGN_OR_RETURN(const proto::Reply reply, Call(std::move(request), fds));
  return AddTensors(reply, specs, nullptr, false, handles);
}

Status Session::ReplicateTensors(std::span<const slice_tensor_t> handles,
                                 std::span<const char* const> devices) {
  SLICE_RETURN_IF_ERROR(CheckHandlesLive(handles));
  proto::Request request;
  request.mutable_replicate_tensors()->mutable_handles()->Add(handles.begin(), handles.end());
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i] == nullptr)
      return Error(StatusCode::kInvalid, "device %zu of %zu is NULL", i, devices.size());
    request.mutable_replicate_tensors()->add_devices(ToUtf8(devices[i]));
  }
  return Call(std::move(request)).status();
}

Status Session::AllocTensors(const std::vector<TensorSpec>& specs, slice_tensor_t* handles,
                             const void** views) {
  proto::Request request;
  FillTensorSpecs(specs, request.mutable_alloc_tensors()->mutable_tensors());
  std::vector<Fd> fds;
  SLICE_ASSIGN_OR_RETURN(const proto::Reply reply, Call(std::move(request), {}, &fds));
  const proto::TensorsReply& made = reply.tensors();
  std::shared_ptr<Mapping> view;
  if (!fds.empty()) {  // no descriptor: the daemon shows no view of the home memory
    if (static_cast<size_t>(made.offsets_size()) != specs.size()) {
      return BreakProtocol(std::to_string(made.offsets_size()) + " tensor offsets came, " +
                           std::to_string(specs.size()) + " were expected");
    }
    if (const Result<size_t> bytes = CheckForeignMemfd(fds[0], made.segment_bytes()); !bytes.ok()) {
      return BreakProtocol("segment of managed tensors: " + bytes.status().text());
    }
    for (size_t i = 0; i < specs.size(); ++i) {
      if (!RangeFits(made.offsets(static_cast<int>(i)), specs[i].extent_bytes,
                     made.segment_bytes())) {
        return BreakProtocol("managed tensor " + std::to_string(i) + " lies outside its segment");
      }
    }
    if (views != nullptr && made.segment_bytes() > 0) {
      SLICE_ASSIGN_OR_RETURN(Mapping mapping, Mapping::Map(fds[0], made.segment_bytes(), false));
      view = std::make_shared<Mapping>(std::move(mapping));
    }
  }
  SLICE_RETURN_IF_ERROR(AddTensors(reply, specs, view, true, handles));
  for (size_t i = 0; views != nullptr && i < specs.size(); ++i) {
    views[i] = view == nullptr ? nullptr : view->data() + made.offsets(static_cast<int>(i));
  }
  return Status::Ok();
}

Status Session::ReleaseTensors(std::span<const slice_tensor_t> handles) {
  SLICE_RETURN_IF_ERROR(CheckHandlesLive(handles));
  while (!handles.empty()) {
    const auto part = handles.first(std::min(handles.size(), kReleasePerMessage));
    handles = handles.subspan(part.size());
    proto::Request request;
    request.mutable_release_tensors()->mutable_handles()->Add(part.begin(), part.end());
    SLICE_RETURN_IF_ERROR(Call(std::move(request)).status());
    std::lock_guard lock(mutex_);
    for (const slice_tensor_t handle : part) tensors_.erase(handle);
  }
  return Status::Ok();
}

Status Session::RegisterGraph(std::span<const std::byte> bytes, slice_graph_t* graph) {
  SLICE_ASSIGN_OR_RETURN(Fd memfd, CreateMemfd("slice-template", bytes.size()));
  for (size_t written = 0; written < bytes.size();) {
    const ssize_t count = ::pwrite(memfd.get(), bytes.data() + written, bytes.size() - written,
                                   static_cast<off_t>(written));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0)
      return ErrnoError(StatusCode::kNoMemory, errno, "cannot write a template of %zu bytes",
                        bytes.size());
    written += static_cast<size_t>(count);
  }
  if (::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SEAL) != 0) {
    return ErrnoError(StatusCode::kInternal, errno, "cannot seal the template's memfd");
  }
  proto::Request request;
  request.mutable_register_graph()->set_bytes(bytes.size());
  const int fds[] = {memfd.get()};
  SLICE_ASSIGN_OR_RETURN(const proto::Reply reply, Call(std::move(request), fds));
  if (reply.graph().graph() == 0) return BreakProtocol("a graph was registered without a handle");
  *graph = reply.graph().graph();
  return Status::Ok();
}

Status Session::UnregisterGraph(slice_graph_t graph) {
  proto::Request request;
  request.set_unregister_graph(graph);
  return Call(std::move(request)).status();
}

Status Session::CreateBinding(slice_graph_t graph, std::span<const slice_tensor_t> tensors,
                              slice_binding_t* binding) {
  SLICE_RETURN_IF_ERROR(CheckHandlesLive(tensors));
  proto::Request request;
  request.mutable_create_binding()->set_graph(graph);
  request.mutable_create_binding()->mutable_tensors()->Add(tensors.begin(), tensors.end());
  SLICE_ASSIGN_OR_RETURN(const proto::Reply reply, Call(std::move(request)));
  if (reply.binding().binding() == 0) return BreakProtocol("a binding was made without a handle");
  std::lock_guard lock(mutex_);
  bindings_.insert(reply.binding().binding());
  *binding = reply.binding().binding();
  return Status::Ok();
}

Status Session::DestroyBinding(slice_binding_t binding) {
  proto::Request request;
  request.set_destroy_binding(binding);
  SLICE_RETURN_IF_ERROR(Call(std::move(request)).status());
  std::lock_guard lock(mutex_);
  bindings_.erase(binding);
  return Status::Ok();
}

}  // namespace slice::client
