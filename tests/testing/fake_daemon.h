// FakeDaemon: the daemon's end of the tenant protocol, for tests of libslice and of programs on top
// of it. One thread; it answers every control request, completes every submit, and does what a test
// tells it to do wrong.
//
// Threads: hooks run on the fake's thread and are set before Start. The other methods may be called
// from any thread.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/fd.h"
#include "common/wire/control.h"
#include "common/wire/tenant_ring.h"
#include "slice/proto/control.pb.h"
#include "slice/slice.h"

namespace slice::testing {

// A slot taken from the submit ring, with its arguments.
struct FakeSubmit {
  wire::SubmitSlot slot;
  std::vector<wire::Argument> arguments;
  std::span<std::byte> arena;
};
struct FakeDaemonHooks {
  // Sees every request with the descriptors that came with it, before it is answered.
  std::function<void(const proto::Request&, const std::vector<Fd>&)> received = nullptr;
  // Edits the reply and its descriptors before it is sent.
  std::function<void(const proto::Request&, proto::Reply*, std::vector<Fd>*)> reply = nullptr;
  // True: the hook has answered on the socket itself (or not at all).
  std::function<bool(int socket, const proto::Request&)> raw = nullptr;
  // Completion of a graph submit or tensor command; nullopt: none now, see Complete. Null hook:
  // OK at once.
  std::function<std::optional<wire::CompletionSlot>(const FakeSubmit&)> submit = nullptr;
};

class FakeDaemon {
 public:
  using Submit = FakeSubmit;
  using Hooks = FakeDaemonHooks;

  explicit FakeDaemon(Hooks hooks = {}) : hooks_(std::move(hooks)) {
    std::string folder = (std::filesystem::temp_directory_path() / "slice-fake-XXXXXX").string();
    SLICE_CHECK(::mkdtemp(folder.data()) != nullptr, "mkdtemp");
    folder_ = folder;
    path_ = folder + "/sliced.sock";
    listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.c_str(), path_.size() + 1);
    SLICE_CHECK(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0,
                "bind");
    SLICE_CHECK(::listen(listener_.get(), 16) == 0, "listen");
    wake_ = CreateEventFd().value();
    thread_ = std::thread([this] { Run(); });
  }
  ~FakeDaemon() {
    Die();
    std::filesystem::remove_all(folder_);
  }
  FakeDaemon(const FakeDaemon&) = delete;
  FakeDaemon& operator=(const FakeDaemon&) = delete;

  const std::string& path() const { return path_; }

  // Closes every connection and the listener, as a killed process would.
  void Die() {
    stop_ = true;
    SignalEventFd(wake_);
    if (thread_.joinable()) thread_.join();
  }
  // A paused daemon takes nothing from the submit rings; it still answers on the socket.
  void Pause() {
    Ask([this] { paused_ = true; });
  }
  void Resume() {
    Ask([this] { paused_ = false; });
  }
  // Returns when every slot that is published now was taken (unless paused).
  void Settle() {
    Ask([] {});
  }
  // Posts completions in this order to the first session.
  void Complete(std::vector<wire::CompletionSlot> slots) {
    Ask([this, slots = std::move(slots)] { Post(*sessions_.front(), slots); });
  }
  // Lets `corrupt` scribble over the first session's daemon ring, and wakes the tenant.
  void Corrupt(std::function<void(std::byte* daemon_ring)> corrupt) {
    Ask([this, corrupt = std::move(corrupt)] {
      corrupt(sessions_.front()->daemon_ring.data());
      SignalEventFd(sessions_.front()->client_event);
    });
  }
  // Every slot taken so far.
  std::vector<Submit> taken() const {
    std::lock_guard lock(mutex_);
    return taken_;
  }
  std::vector<proto::Request> requests() const {
    std::lock_guard lock(mutex_);
    return requests_;
  }

  static wire::CompletionSlot Completion(uint64_t cookie, int32_t status = SLICE_OK) {
    wire::CompletionSlot slot{};
    slot.cookie = cookie;
    slot.status = status;
    slot.failed_op = UINT32_MAX;
    return slot;
  }

 private:
  struct Connection {
    Fd socket;
    bool greeted = false;
    Mapping tenant_ring, daemon_ring, arena;
    Fd daemon_event, client_event;
    uint64_t submit_head = 0;
    uint64_t completion_tail = 0;
  };

  template <typename T>
  static std::atomic_ref<T> Shared(const Mapping& mapping, size_t offset) {
    return std::atomic_ref<T>(*mapping.as<T>(offset));
  }

  // Runs `action` on the fake's thread and waits for it.
  void Ask(const std::function<void()>& action) {
    std::promise<void> done;
    {
      std::lock_guard lock(mutex_);
      actions_.push_back([this, &done, &action] {
        action();
        TakeAll();
        done.set_value();
      });
    }
    SignalEventFd(wake_);
    done.get_future().wait();
  }

  void Run() {
    while (!stop_) {
      std::vector<std::function<void()>> actions;
      {
        std::lock_guard lock(mutex_);
        actions.swap(actions_);
      }
      for (const auto& action : actions) action();
      for (const auto& session : sessions_) Sleep(*session, true);
      TakeAll();
      std::vector<pollfd> items = {{listener_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
      for (const auto& session : sessions_) {
        items.push_back({session->socket.get(), POLLIN, 0});
        items.push_back({session->greeted ? session->daemon_event.get() : -1, POLLIN, 0});
      }
      ::poll(items.data(), items.size(), -1);
      for (const auto& session : sessions_) Sleep(*session, false);
      ClearEventFd(wake_);
      std::vector<std::unique_ptr<Connection>> kept;
      for (size_t i = 0; i < sessions_.size(); ++i) {
        if (items[2 + 2 * i + 1].revents != 0) ClearEventFd(sessions_[i]->daemon_event);
        if (items[2 + 2 * i].revents == 0 || Serve(*sessions_[i]))
          kept.push_back(std::move(sessions_[i]));
      }
      sessions_ = std::move(kept);
      if (items[0].revents != 0) {
        Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (socket.valid()) {
          sessions_.push_back(std::make_unique<Connection>());
          sessions_.back()->socket = std::move(socket);
        }
      }
    }
    sessions_.clear();
    listener_.Close();
    std::lock_guard lock(mutex_);
    for (const auto& action : actions_) action();
  }

  static void Sleep(Connection& session, bool sleeping) {
    if (!session.greeted) return;
    Shared<uint32_t>(session.daemon_ring, wire::kDaemonSleepingOffset).store(sleeping ? 1 : 0);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }

  void TakeAll() {
    for (const auto& session : sessions_) {
      if (!paused_) TakeSlots(*session);
    }
  }

  void TakeSlots(Connection& session) {
    if (!session.greeted) return;
    const uint64_t tail = Shared<uint64_t>(session.tenant_ring, wire::kSubmitTailOffset)
                              .load(std::memory_order_acquire);
    SLICE_CHECK(tail - session.submit_head <= wire::kRingSlots,
                "the client wrote more slots than the ring has");
    std::vector<wire::CompletionSlot> completions;
    while (session.submit_head != tail) {
      Submit submit;
      submit.slot = *session.tenant_ring.as<wire::SubmitSlot>(
          wire::kSlotsOffset + session.submit_head % wire::kRingSlots * sizeof(wire::SubmitSlot));
      submit.arguments.resize(submit.slot.args_bytes / sizeof(wire::Argument));
      SLICE_CHECK(submit.slot.args_offset + submit.slot.args_bytes <= wire::kArgumentAreaBytes,
                  "arguments outside");
      if (!submit.arguments.empty()) {
        std::memcpy(submit.arguments.data(),
                    session.tenant_ring.data() + wire::kArgumentsOffset + submit.slot.args_offset,
                    submit.slot.args_bytes);
      }
      submit.arena = {session.arena.data(), session.arena.bytes()};
      ++session.submit_head;
      Shared<uint64_t>(session.daemon_ring, wire::kSubmitHeadOffset)
          .store(session.submit_head, std::memory_order_release);
      {
        std::lock_guard lock(mutex_);
        taken_.push_back(submit);
      }
      const uint32_t opcode = submit.slot.flags & wire::kOpcodeMask;
      if (opcode != wire::kSubmitGraph && opcode != wire::kTensorCommand) continue;
      const auto completion =
          hooks_.submit ? hooks_.submit(submit) : std::optional(Completion(submit.slot.cookie));
      if (completion) completions.push_back(*completion);
    }
    if (!completions.empty()) Post(session, completions);
  }

  void Post(Connection& session, const std::vector<wire::CompletionSlot>& slots) {
    for (const wire::CompletionSlot& slot : slots) {
      // The client promises room for every request in flight.
      const uint64_t head = Shared<uint64_t>(session.tenant_ring, wire::kCompletionHeadOffset)
                                .load(std::memory_order_acquire);
      SLICE_CHECK(session.completion_tail - head < wire::kRingSlots, "completion ring overflows");
      *session.daemon_ring.as<wire::CompletionSlot>(
          wire::kSlotsOffset + session.completion_tail % wire::kRingSlots * sizeof slot) = slot;
      ++session.completion_tail;
      Shared<uint64_t>(session.daemon_ring, wire::kCompletionTailOffset)
          .store(session.completion_tail, std::memory_order_release);
    }
    SignalEventFd(session.client_event);
  }

  // False: the connection is gone.
  bool Serve(Connection& session) {
    std::vector<Fd> fds;
    std::string bytes(wire::kControlMessageBytesMax, '\0');
    const ssize_t got = Receive(session.socket.get(), &bytes, &fds);
    if (got <= 0) return false;
    proto::Request request;
    SLICE_CHECK(request.ParseFromArray(bytes.data(), static_cast<int>(got)),
                "the client sent no Request");
    {
      std::lock_guard lock(mutex_);
      requests_.push_back(request);
    }
    if (hooks_.received) hooks_.received(request, fds);
    if (hooks_.raw && hooks_.raw(session.socket.get(), request)) return true;
    proto::Reply reply;
    std::vector<Fd> reply_fds;
    reply.set_id(request.id());
    Answer(session, request, std::move(fds), &reply, &reply_fds);
    if (hooks_.reply) hooks_.reply(request, &reply, &reply_fds);
    std::vector<int> numbers;
    for (const Fd& fd : reply_fds) numbers.push_back(fd.get());
    Send(session.socket.get(), reply.SerializeAsString(), numbers);
    return true;
  }

  void Answer(Connection& session, const proto::Request& request, std::vector<Fd> fds,
              proto::Reply* reply, std::vector<Fd>* reply_fds) {
    switch (request.kind_case()) {
      case proto::Request::kHello:
        Greet(session, request.hello(), fds, reply->mutable_hello(), reply_fds);
        break;
      case proto::Request::kRegisterGraph: {
        SLICE_CHECK(CheckForeignMemfd(fds.at(0), request.register_graph().bytes()).ok(),
                    "template memfd");
        reply->mutable_graph()->set_graph(next_handle_++);
        break;
      }
      case proto::Request::kImportTensors:
        for (int i = 0; i < request.import_tensors().tensors_size(); ++i) {
          reply->mutable_tensors()->add_handles(next_handle_++);
        }
        break;
      case proto::Request::kAllocTensors: {
        uint64_t offset = 0;
        for (const auto& spec : request.alloc_tensors().tensors()) {
          uint64_t bytes = 16;  // the widest element
          for (const int64_t size : spec.sizes()) bytes *= static_cast<uint64_t>(size);
          reply->mutable_tensors()->add_handles(next_handle_++);
          reply->mutable_tensors()->add_offsets(offset);
          offset += (bytes + 63) / 64 * 64;
        }
        reply->mutable_tensors()->set_segment_bytes(offset);
        reply_fds->push_back(CreateMemfd("managed", offset).value());
        break;
      }
      case proto::Request::kCreateBinding:
        reply->mutable_binding()->set_binding(next_handle_++);
        break;
      case proto::Request::kErrorText:
        reply->mutable_body()->set_text("text of token " +
                                        std::to_string(request.error_text().token()));
        break;
      case proto::Request::kStatus:
        reply->mutable_body()->set_text("{}");
        break;
      default:
        break;
    }
  }

  void Greet(Connection& session, const proto::Hello& hello, const std::vector<Fd>& fds,
             proto::HelloReply* reply, std::vector<Fd>* reply_fds) {
    SLICE_CHECK(fds.size() == wire::kHelloFdCount, "Hello needs two descriptors");
    const Fd& ring = fds[wire::kHelloTenantRingFd];
    const Fd& arena = fds[wire::kHelloArenaFd];
    SLICE_CHECK(CheckForeignMemfd(ring, wire::kTenantRingBytes).ok(), "tenant ring");
    SLICE_CHECK(CheckForeignMemfd(arena, hello.arena_bytes()).ok(), "arena");
    session.tenant_ring = Mapping::Map(ring, wire::kTenantRingBytes, false).value();
    session.arena = Mapping::Map(arena, hello.arena_bytes(), true).value();
    Fd daemon_ring = CreateMemfd("daemon-ring", wire::kDaemonRingBytes).value();
    session.daemon_ring = Mapping::Map(daemon_ring, wire::kDaemonRingBytes, true).value();
    SLICE_CHECK(SealFutureWrite(daemon_ring).ok(), "seal");
    session.daemon_event = CreateEventFd().value();
    session.client_event = CreateEventFd().value();
    session.greeted = true;
    reply->set_abi_major(SLICE_ABI_MAJOR);
    reply->set_abi_minor(SLICE_ABI_MINOR);
    reply->set_session(7);
    reply->set_service_class(hello.service_class() == 0 ? SLICE_CLASS_ONLINE
                                                        : hello.service_class());
    reply->set_memory_bytes_max(uint64_t{1} << 30);
    reply->set_offline_op_ns_max(50'000'000);
    reply->set_deadline_ns_min(1'000'000);
    reply->add_devices("cpu0");
    reply->add_devices("cpu1");
    reply->set_home_device("cpu0");
    reply->set_daemon_epoch(42);
    reply_fds->push_back(std::move(daemon_ring));
    reply_fds->push_back(session.daemon_event.Duplicate().value());
    reply_fds->push_back(session.client_event.Duplicate().value());
  }

  static ssize_t Receive(int socket, std::string* bytes, std::vector<Fd>* fds) {
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * wire::kControlFdsMax)> control{};
    iovec part{bytes->data(), bytes->size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    for (cmsghdr* h = CMSG_FIRSTHDR(&message); got > 0 && h != nullptr;
         h = CMSG_NXTHDR(&message, h)) {
      for (size_t i = 0; i < (h->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(h) + i * sizeof fd, sizeof fd);
        fds->emplace_back(fd);
      }
    }
    return got;
  }

 public:
  // For `raw` hooks: any bytes, any descriptors.
  static void Send(int socket, const std::string& bytes, const std::vector<int>& fds = {}) {
    std::vector<char> control(CMSG_SPACE(sizeof(int) * fds.size()));
    iovec part{const_cast<char*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
      std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
    }
    ::sendmsg(socket, &message, MSG_NOSIGNAL);
  }

 private:
  const Hooks hooks_;
  std::string folder_;
  std::string path_;
  Fd listener_;
  Fd wake_;
  std::atomic<bool> stop_{false};
  std::thread thread_;

  // The fake's thread only.
  std::vector<std::unique_ptr<Connection>> sessions_;
  bool paused_ = false;
  uint64_t next_handle_ = (uint64_t{1} << 32) | 1;

  mutable std::mutex mutex_;
  std::vector<std::function<void()>> actions_;
  std::vector<Submit> taken_;
  std::vector<proto::Request> requests_;
};

}  // namespace slice::testing
