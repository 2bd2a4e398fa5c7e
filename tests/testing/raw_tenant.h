// RawTenant: the tenant's end of the protocol with no manners: sends any bytes and descriptors,
// writes anything into its ring. For Malicious_ tests of sliced. The polite methods exist to get
// into the state that a test then spoils.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/clock.h"
#include "common/fd.h"
#include "common/wire/control.h"
#include "common/wire/tenant_ring.h"
#include "daemon/server/packet.h"
#include "slice/proto/control.pb.h"
#include "slice/slice.h"

namespace slice::testing {

class RawTenant {
 public:
  static constexpr uint64_t kArenaBytes = 1 << 20;
  static constexpr DurationNs kPatience = 20 * kSecond;  // only ever reached by a failing test

  explicit RawTenant(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    socket_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    connected_ =
        ::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  bool connected() const { return connected_; }

  // ---- control ----
  bool SendBytes(const std::string& bytes, std::span<const int> fds = {}) {
    return server::SendPacket(socket_, bytes, fds, false).ok();
  }
  bool Send(proto::Request request, std::span<const int> fds = {}) {
    request.set_id(next_id_++);
    return SendBytes(request.SerializeAsString(), fds);
  }
  // nullopt: hung up.
  std::optional<proto::Reply> Receive() {
    fds_.clear();
    pollfd item{socket_.get(), POLLIN, 0};
    SLICE_CHECK(::poll(&item, 1, static_cast<int>(kPatience / kMillisecond)) == 1,
                "sliced does not answer");
    Result<server::Packet> packet =
        server::ReceivePacket(socket_, wire::kControlMessageBytesMax, wire::kControlFdsMax, true);
    if (!packet.ok() || packet->end) return std::nullopt;
    proto::Reply reply;
    SLICE_CHECK(reply.ParseFromString(packet->bytes), "reply");
    fds_ = std::move(packet->fds);
    return reply;
  }
  std::optional<proto::Reply> Call(proto::Request request, std::span<const int> fds = {}) {
    if (!Send(std::move(request), fds)) return std::nullopt;
    return Receive();
  }
  // The session was ended by sliced.
  bool WaitHangUp() {
    while (Receive().has_value()) {
    }
    return true;
  }

  static proto::Request HelloRequest() {
    proto::Request request;
    proto::Hello* hello = request.mutable_hello();
    hello->set_abi_major(SLICE_ABI_MAJOR);
    hello->set_ring_version(wire::kTenantRingVersion);
    hello->set_name("raw");
    hello->set_arena_bytes(kArenaBytes);
    return request;
  }
  std::optional<proto::Reply> Hello(proto::Request request = HelloRequest()) {
    ring_fd_ = CreateMemfd("raw-ring", wire::kTenantRingBytes).value();
    arena_fd_ = CreateMemfd("raw-arena", kArenaBytes).value();
    ring_ = Mapping::Map(ring_fd_, wire::kTenantRingBytes, true).value();
    const int fds[] = {ring_fd_.get(), arena_fd_.get()};
    std::optional<proto::Reply> reply = Call(std::move(request), fds);
    if (reply.has_value() && reply->status() == SLICE_OK) {
      SLICE_CHECK(fds_.size() == wire::kHelloReplyFdCount, "descriptors of HelloReply");
      daemon_fd_ = std::move(fds_[wire::kHelloReplyDaemonRingFd]);
      submit_event_ = std::move(fds_[wire::kHelloReplyDaemonEventFd]);
      completion_event_ = std::move(fds_[wire::kHelloReplyClientEventFd]);
      daemon_ring_ = Mapping::Map(daemon_fd_, wire::kDaemonRingBytes, false).value();
    }
    return reply;
  }

  // Registers, binds and returns the handle. `serialized` is a template without static inputs.
  uint64_t Bind(const std::string& serialized) {
    const Fd memfd = MemfdOf(serialized);
    const int fd = memfd.get();
    proto::Request request;
    request.mutable_register_graph()->set_bytes(serialized.size());
    const std::optional<proto::Reply> graph = Call(std::move(request), std::span(&fd, 1));
    SLICE_CHECK(graph.has_value() && graph->status() == SLICE_OK, "register");
    proto::Request bind;
    bind.mutable_create_binding()->set_graph(graph->graph().graph());
    const std::optional<proto::Reply> binding = Call(std::move(bind));
    SLICE_CHECK(binding.has_value() && binding->status() == SLICE_OK, "bind");
    return binding->binding().binding();
  }
  static Fd MemfdOf(const std::string& content) {
    Fd memfd = CreateMemfd("raw-bytes", content.size()).value();
    SLICE_CHECK(::pwrite(memfd.get(), content.data(), content.size(), 0) ==
                    static_cast<ssize_t>(content.size()),
                "pwrite");
    return memfd;
  }

  // ---- rings ----
  wire::SubmitSlot* slot(uint64_t index) {
    return ring_.as<wire::SubmitSlot>(wire::kSlotsOffset +
                                      index % wire::kRingSlots * sizeof(wire::SubmitSlot));
  }
  wire::Argument* arguments(uint64_t offset) {
    return ring_.as<wire::Argument>(wire::kArgumentsOffset + offset);
  }
  uint64_t tail() const { return tail_; }
  void PublishTail(uint64_t tail) {
    tail_ = tail;
    std::atomic_ref<uint64_t>(*ring_.as<uint64_t>(wire::kSubmitTailOffset))
        .store(tail, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint32_t sleeping =
        std::atomic_ref<uint32_t>(*daemon_ring_.as<uint32_t>(wire::kDaemonSleepingOffset)).load();
    if (sleeping != 0) SignalEventFd(submit_event_);
  }
  void Push(const wire::SubmitSlot& value) {
    *slot(tail_) = value;
    PublishTail(tail_ + 1);
  }
  void Submit(uint64_t cookie, uint64_t binding, std::span<const wire::Argument> args) {
    const uint64_t offset = tail_ % wire::kRingSlots * 1024;
    SLICE_CHECK(args.size_bytes() <= 1024, "arguments");
    if (!args.empty())
      std::memcpy(ring_.data() + wire::kArgumentsOffset + offset, args.data(), args.size_bytes());
    wire::SubmitSlot value{};
    value.cookie = cookie;
    value.binding = binding;
    value.args_offset = static_cast<uint32_t>(offset);
    value.args_bytes = static_cast<uint32_t>(args.size_bytes());
    Push(value);
  }
  bool CompletionWaits() const {
    return std::atomic_ref<uint64_t>(*daemon_ring_.as<uint64_t>(wire::kCompletionTailOffset))
               .load(std::memory_order_acquire) != consumed_;
  }
  // nullopt: the session ended first.
  std::optional<wire::CompletionSlot> WaitCompletion(bool consume = true) {
    const TimeNs end = MonotonicNow() + kPatience;
    while (!CompletionWaits()) {
      pollfd items[2] = {{completion_event_.get(), POLLIN, 0},
                         {socket_.get(), POLLIN | POLLRDHUP, 0}};
      ::poll(items, 2, 1000);
      if (items[0].revents != 0) ClearEventFd(completion_event_);
      if (items[1].revents != 0 && !CompletionWaits()) return std::nullopt;
      SLICE_CHECK(MonotonicNow() < end, "no completion came");
    }
    const wire::CompletionSlot value = *daemon_ring_.as<wire::CompletionSlot>(
        wire::kSlotsOffset + consumed_ % wire::kRingSlots * sizeof(wire::CompletionSlot));
    ++consumed_;
    if (consume) PublishConsumed(consumed_);
    return value;
  }
  void PublishConsumed(uint64_t head) {
    std::atomic_ref<uint64_t>(*ring_.as<uint64_t>(wire::kCompletionHeadOffset))
        .store(head, std::memory_order_release);
  }
  uint64_t SubmitHead() const {
    return std::atomic_ref<uint64_t>(*daemon_ring_.as<uint64_t>(wire::kSubmitHeadOffset))
        .load(std::memory_order_acquire);
  }

  const Fd& socket() const { return socket_; }
  void CloseSocket() { socket_.Close(); }
  std::vector<Fd>& fds() { return fds_; }  // of the last reply
  const Fd& submit_event() const { return submit_event_; }
  const Fd& completion_event() const { return completion_event_; }
  const Fd& daemon_fd() const { return daemon_fd_; }
  const Fd& ring_fd() const { return ring_fd_; }

 private:
  Fd socket_;
  bool connected_ = false;
  uint64_t next_id_ = 1;
  std::vector<Fd> fds_;
  Fd ring_fd_, arena_fd_, daemon_fd_, submit_event_, completion_event_;
  Mapping ring_, daemon_ring_;
  uint64_t tail_ = 0, consumed_ = 0;
};

}  // namespace slice::testing
