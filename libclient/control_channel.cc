#include "libclient/control_channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/clock.h"
#include "common/fd_passing.h"
#include "common/process.h"
#include "common/wire/control.h"

namespace slice::client {
namespace {

constexpr int kStatusMax = SLICE_ERR_TIMEOUT;

// Between two looks at whether the daemon is stopped.
constexpr DurationNs kStoppedPoll = kSecond;

// "5000 ms"; of less than 10 ms the parts too.
std::string Milliseconds(DurationNs duration) {
  char text[32];
  std::snprintf(text, sizeof text, duration < 10 * kMillisecond ? "%.2g ms" : "%.0f ms",
                static_cast<double>(duration) / 1e6);
  return text;
}

timespec ToTimespec(DurationNs duration) {
  return {.tv_sec = duration / kSecond, .tv_nsec = duration % kSecond};
}

bool IsLastWord(const proto::Reply& reply) {
  return reply.id() == 0 && reply.status() > SLICE_OK && reply.status() <= kStatusMax;
}

const char* ConnectAdvice(int errno_value) {
  switch (errno_value) {
    case EACCES:
    case EPERM:
      return "this user may not use the socket: ask to be admitted to its group";
    case EPROTOTYPE:
      return "that is another program's socket: set SLICE_SOCKET to that of sliced";
    default:
      return "is sliced running? start it with `sliced --config FILE`, or set SLICE_SOCKET to its "
             "socket";
  }
}

}  // namespace

std::string ResolveSocketPath(const char* option) {
  if (option != nullptr && *option != '\0') return option;
  const char* from_environment = std::getenv(wire::kSocketEnvironment);
  if (from_environment != nullptr && *from_environment != '\0') return from_environment;
  return wire::kDefaultSocketPath;
}

Result<std::unique_ptr<ControlChannel>> ControlChannel::Connect(const std::string& path,
                                                                DurationNs timeout) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return Error(StatusCode::kInvalid,
                 "socket path '%.*s...' has %zu bytes, at most %zu fit: use a shorter path",
                 static_cast<int>(sizeof address.sun_path), path.c_str(), path.size(),
                 sizeof address.sun_path - 1);
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid())
    return ErrnoError(StatusCode::kNoMemory, errno, "cannot make a socket for '%s'", path.c_str());
  // Bounds connect (a full backlog) and sendmsg (a daemon that does not read).
  const DurationNs limit_ns = std::max(timeout, kMillisecond);  // 0 would be for ever
  const timeval limit{.tv_sec = limit_ns / kSecond, .tv_usec = limit_ns % kSecond / kMicrosecond};
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0) {
    return ErrnoError(StatusCode::kInternal, errno, "cannot limit the time to send on '%s'",
                      path.c_str());
  }
  int rc = 0;
  do {
    rc = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  } while (rc != 0 && errno == EINTR);
  if (rc != 0 && errno != EISCONN) {
    const int error = errno;
    if (error == EAGAIN) {
      return Error(StatusCode::kTimeout,
                   "sliced at '%s' accepts no connection: %s passed, and its queue is full: "
                   "it is stopped or stuck (its pid is the first number in '%s.gmg'); see its log",
                   path.c_str(), Milliseconds(timeout).c_str(), path.c_str());
    }
    return Error(StatusCode::kDaemonLost, "cannot connect to sliced at '%s': %s (errno %d): %s",
                 path.c_str(), std::strerror(error), error, ConnectAdvice(error));
  }
  ucred daemon{};  // of the process that listens
  socklen_t bytes = sizeof daemon;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &daemon, &bytes) != 0) daemon.pid = 0;
  return std::unique_ptr<ControlChannel>(new ControlChannel(std::move(socket), path, daemon.pid));
}

Status ControlChannel::LostStatus() const {
  return Error(StatusCode::kDaemonLost,
               "connection to sliced at '%s' is gone: the daemon stopped or ended this session "
               "(its log says why); what "
               "was in flight is lost; start it with `sliced --config FILE` if it is not running "
               "and open a new session",
               path_.c_str());
}

Status ControlChannel::NoAnswer(DurationNs waited) const {
  const bool stopped = IsStopped(daemon_pid_);
  const std::string pid = std::to_string(daemon_pid_);
  const std::string advice =
      stopped ? "it is stopped by a signal or a debugger: `kill -CONT " + pid + "` lets it go on"
              : "it is busy or stuck: try again, and see its log";
  return Error(StatusCode::kTimeout, "sliced%s at '%s' did not answer within %s: %s",
               daemon_pid_ == 0 ? "" : (" (pid " + pid + ")").c_str(), path_.c_str(),
               Milliseconds(waited).c_str(), advice.c_str());
}

Status ControlChannel::LastWord() {
  for (;;) {
    proto::Reply reply;
    std::vector<Fd> fds;
    // Everything that can be read is there already.
    if (!Receive(MonotonicNow(), &reply, &fds).ok()) return LostStatus();
    if (IsLastWord(reply)) return {static_cast<StatusCode>(reply.status()), reply.text()};
  }
}

bool ControlChannel::HungUp() const {
  pollfd item{.fd = socket_.get(), .events = POLLRDHUP, .revents = 0};
  return ::poll(&item, 1, 0) > 0;
}

Status ControlChannel::Break(Status status) {
  broken_status_ = status;
  broken_.store(true, std::memory_order_release);
  Shutdown();
  return status;
}

void ControlChannel::Shutdown() { ::shutdown(socket_.get(), SHUT_RDWR); }

Status ControlChannel::BeginTurn(TimeNs deadline_ns) {
  std::unique_lock lock(mutex_);
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::nanoseconds(deadline_ns - MonotonicNow());
  if (!turn_.wait_until(lock, deadline, [this] { return !calling_; })) {
    return Error(StatusCode::kTimeout, "an earlier request on '%s' is not answered yet: try again",
                 path_.c_str());
  }
  calling_ = true;
  return Status::Ok();
}

void ControlChannel::EndTurn() {
  {
    std::lock_guard lock(mutex_);
    calling_ = false;
  }
  turn_.notify_one();
}

Result<proto::Reply> ControlChannel::Call(proto::Request request, std::span<const int> fds,
                                          std::vector<Fd>* reply_fds, DurationNs timeout) {
  const TimeNs deadline_ns = MonotonicNow() + timeout;
  SLICE_RETURN_IF_ERROR(BeginTurn(deadline_ns));
  struct Turn {  // ends when CallInTurn throws, too
    ControlChannel* channel;
    ~Turn() { channel->EndTurn(); }
  } turn{this};
  return CallInTurn(std::move(request), fds, reply_fds, deadline_ns);
}

Result<proto::Reply> ControlChannel::CallInTurn(proto::Request request, std::span<const int> fds,
                                                std::vector<Fd>* reply_fds, TimeNs deadline_ns) {
  if (broken()) return broken_status_;
  request.set_id(next_id_++);
  const std::string bytes = request.SerializeAsString();
  if (bytes.size() > wire::kControlMessageBytesMax || fds.size() > wire::kControlFdsMax) {
    return Error(StatusCode::kInvalid,
                 "request of %zu bytes and %zu descriptors: at most %zu bytes and %zu descriptors "
                 "fit in one message; "
                 "split the call",
                 bytes.size(), fds.size(), wire::kControlMessageBytesMax, wire::kControlFdsMax);
  }
  SLICE_RETURN_IF_ERROR(Send(bytes, fds, deadline_ns));
  for (;;) {
    proto::Reply reply;
    std::vector<Fd> received;
    SLICE_RETURN_IF_ERROR(Receive(deadline_ns, &reply, &received));
    if (IsLastWord(reply))
      return Break(Status(static_cast<StatusCode>(reply.status()), reply.text()));
    if (reply.id() < request.id()) continue;  // late answer to a call that timed out
    if (reply.id() > request.id() || reply.status() < 0 || reply.status() > kStatusMax) {
      return Break(Error(StatusCode::kProtocol,
                         "sliced at '%s' answered request %llu with id %llu and status %d: session "
                         "closed; are client and "
                         "daemon of one release?",
                         path_.c_str(), static_cast<unsigned long long>(request.id()),
                         static_cast<unsigned long long>(reply.id()), reply.status()));
    }
    if (reply.status() != SLICE_OK) {
      return Status(static_cast<StatusCode>(reply.status()),
                    reply.text().empty() ? "refused by sliced without a text (its log may say more)"
                                         : reply.text());
    }
    if (reply_fds != nullptr) *reply_fds = std::move(received);
    return reply;
  }
}

Status ControlChannel::Send(const std::string& bytes, std::span<const int> fds,
                            TimeNs deadline_ns) {
  const TimeNs begin_ns = MonotonicNow();
  for (;;) {
    const int error = SendWithFds(socket_, bytes, fds, 0);
    if (error == 0) return Status::Ok();
    if (error == EINTR && MonotonicNow() < deadline_ns) continue;
    if (error == EAGAIN || error == EINTR) {
      return NoAnswer(MonotonicNow() - begin_ns);
    }
    if (error == EPIPE || error == ECONNRESET || error == ENOTCONN) return Break(LastWord());
    return ErrnoError(error == EBADF ? StatusCode::kInvalid : StatusCode::kInternal, error,
                      "cannot send %zu bytes and %zu descriptors to '%s'", bytes.size(), fds.size(),
                      path_.c_str());
  }
}

Status ControlChannel::Receive(TimeNs deadline_ns, proto::Reply* reply, std::vector<Fd>* fds) {
  std::vector<char> buffer(wire::kControlMessageBytesMax);
  ReceivedPacket packet;
  bool was_reset = false;
  const TimeNs begin_ns = MonotonicNow();
  TimeNs stopped_check_ns = begin_ns + kStoppedTimeout;
  for (;;) {
    const int error = ReceiveWithFds(socket_, buffer, wire::kControlFdsMax, MSG_DONTWAIT, &packet);
    if (error == 0) break;
    if (error == EINTR) continue;
    if (error == ECONNRESET && !was_reset) {  // reported once, before replies that are still queued
      was_reset = true;
      continue;
    }
    if (error == EMFILE) {
      return Break(Error(StatusCode::kNoMemory,
                         "no descriptor left for those that sliced at '%s' sent (ulimit -n): "
                         "session closed",
                         path_.c_str()));
    }
    if (error != EAGAIN) return Break(LostStatus());
    const TimeNs now = MonotonicNow();
    if (now >= deadline_ns) return NoAnswer(now - begin_ns);
    if (now >= stopped_check_ns) {
      if (IsStopped(daemon_pid_)) return NoAnswer(now - begin_ns);
      stopped_check_ns = now + kStoppedPoll;
    }
    pollfd item{.fd = socket_.get(), .events = POLLIN | POLLRDHUP, .revents = 0};
    const timespec wait = ToTimespec(std::min(deadline_ns, stopped_check_ns) - now);
    ::ppoll(&item, 1, &wait, nullptr);
  }
  if (packet.bytes == 0) return Break(LostStatus());
  if (packet.cut || packet.excess_fds ||
      !reply->ParseFromArray(buffer.data(), static_cast<int>(packet.bytes))) {
    return Break(Error(StatusCode::kProtocol,
                       "sliced at '%s' sent %zu bytes that are no Reply%s: session closed; are "
                       "client and daemon of one "
                       "release?",
                       path_.c_str(), packet.bytes,
                       packet.excess_fds ? " (too many descriptors)" : ""));
  }
  *fds = std::move(packet.fds);
  return Status::Ok();
}

}  // namespace slice::client
