#include "daemon/server/executor_link.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "common/clock.h"
#include "common/log.h"
#include "common/wire/executor_ring.h"
#include "common/wire/zygote.h"
#include "daemon/server/packet.h"

#ifndef P_PIDFD
#define P_PIDFD 3
#endif

extern char** environ;

namespace slice::server {
namespace {

constexpr DurationNs kZygoteStartTimeout = 120 * kSecond;  // loading torch from a cold disk
constexpr DurationNs kForkTimeout = 10 * kSecond;
constexpr DurationNs kDyingTimeout = kSecond;  // closing what it had takes a moment
constexpr int kSocketBytes = 4 << 20;
constexpr size_t kAckBytesMax = size_t{256} * 1024;

// A pair whose second end is inheritable only by explicit dup2.
Status MakePair(Fd* ours, Fd* theirs) {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    return ErrnoError(StatusCode::kNoMemory, errno, "socketpair");
  }
  // A set of thousands of tensors is one message; FORCE is for root, the other as far as the system
  // allows.
  for (const int fd : pair) {
    for (const int option : {SO_SNDBUF, SO_SNDBUFFORCE}) {
      [[maybe_unused]] const int rc =
          ::setsockopt(fd, SOL_SOCKET, option, &kSocketBytes, sizeof kSocketBytes);
    }
  }
  *ours = Fd(pair[0]);
  *theirs = Fd(pair[1]);
  return Status::Ok();
}

// Environment of the executor: ours, with one thread per kernel and small oneDNN caches.
class Environment {
 public:
  Environment() {
    const std::array<const char*, 6> fixed = {
        "OMP_NUM_THREADS=1",     "MKL_NUM_THREADS=1",     "ONEDNN_PRIMITIVE_CACHE_CAPACITY=64",
        "LRU_CACHE_CAPACITY=64", "MKL_DISABLE_FAST_MM=1", "KMP_BLOCKTIME=0"};
    for (char** item = environ; *item != nullptr; ++item) {
      const std::string_view text(*item);
      const bool replaced = std::any_of(fixed.begin(), fixed.end(), [text](std::string_view own) {
        const size_t name = own.find('=') + 1;
        return text.substr(0, name) == own.substr(0, name);
      });
      if (!replaced) pointers_.push_back(*item);
    }
    for (const char* item : fixed) pointers_.push_back(const_cast<char*>(item));
    pointers_.push_back(nullptr);
  }
  char** data() { return pointers_.data(); }

 private:
  std::vector<char*> pointers_;
};

}  // namespace

bool WaitReadable(const Fd& fd, DurationNs timeout) {
  const TimeNs end = MonotonicNow() + timeout;
  for (;;) {
    pollfd item{.fd = fd.get(), .events = POLLIN, .revents = 0};
    const DurationNs left = std::max<DurationNs>(0, end - MonotonicNow());
    const int got = ::poll(&item, 1, static_cast<int>((left + kMillisecond - 1) / kMillisecond));
    if (got > 0) return true;
    if (got == 0 || errno != EINTR) return false;
  }
}

// ---- zygote
// ---------------------------------------------------------------------------------------------------------

ZygoteLauncher::~ZygoteLauncher() {
  socket_.Close();  // it exits by itself then
  ReapZygote();
}

void ZygoteLauncher::ReapZygote() {
  socket_.Close();
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

Status ZygoteLauncher::EnsureZygote(const WaitFunction& wait) {
  if (pid_ > 0 && ::waitpid(pid_, nullptr, WNOHANG) == 0) return Status::Ok();
  pid_ = -1;
  if (::access(executor_path_.c_str(), X_OK) != 0) {
    return ErrnoError(StatusCode::kExecutorLost, errno,
                      "cannot start '%s': set `executor` in the config or --executor",
                      executor_path_.c_str());
  }
  Fd theirs;
  SLICE_RETURN_IF_ERROR(MakePair(&socket_, &theirs));
  Environment environment;
  std::string control_fd = std::to_string(wire::kControlFdDefault);
  std::string zygote_flag = "--zygote", control_flag = "--control-fd";
  std::array<char*, 5> arguments = {executor_path_.data(), zygote_flag.data(), control_flag.data(),
                                    control_fd.data(), nullptr};
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return ErrnoError(StatusCode::kNoMemory, errno, "fork for slice-executor");
  if (pid == 0) {
    // Only async-signal-safe calls: other threads may have held locks.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(126);
    ::setpgid(0, 0);  // Ctrl-C in a terminal is for sliced, which lets running ops end
    sigset_t none;
    ::sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    if (theirs.get() == wire::kControlFdDefault) {
      ::fcntl(theirs.get(), F_SETFD, 0);
    } else if (::dup2(theirs.get(), wire::kControlFdDefault) < 0) {
      ::_exit(126);
    }
    ::execve(arguments[0], arguments.data(), environment.data());
    ::_exit(127);
  }
  pid_ = pid;
  theirs.Close();
  Status status;
  if (!wait(socket_, kZygoteStartTimeout)) {
    status = Error(StatusCode::kTimeout, "'%s --zygote' did not get ready within %lld s",
                   executor_path_.c_str(), static_cast<long long>(kZygoteStartTimeout / kSecond));
  } else {
    const Result<Packet> packet = ReceivePacket(socket_, sizeof(wire::ZygoteHello), 1, true);
    wire::ZygoteHello hello{};
    if (!packet.ok() || packet->end || packet->bytes.size() != sizeof hello) {
      status = Error(StatusCode::kExecutorLost,
                     "'%s --zygote' ended before it was ready: run it by hand to see why",
                     executor_path_.c_str());
    } else {
      std::memcpy(&hello, packet->bytes.data(), sizeof hello);
      if (hello.version != wire::kZygoteVersion ||
          hello.ring_version != wire::kExecutorRingVersion) {
        status = Error(StatusCode::kVersion,
                       "'%s' speaks zygote %u, ring %u; sliced %u, %u: install both of one release",
                       executor_path_.c_str(), hello.version, hello.ring_version,
                       wire::kZygoteVersion, wire::kExecutorRingVersion);
      }
    }
  }
  if (!status.ok()) ReapZygote();
  return status;
}

Result<ExecutorProcess> ZygoteLauncher::Launch(const WaitFunction& wait) {
  SLICE_RETURN_IF_ERROR(EnsureZygote(wait));
  ExecutorProcess process;
  Fd theirs;
  SLICE_RETURN_IF_ERROR(MakePair(&process.control, &theirs));
  const int fd = theirs.get();
  Status status = SendPacket(socket_, std::string(1, wire::kZygoteFork), std::span(&fd, 1), false);
  if (status.ok() && !wait(socket_, kForkTimeout)) {
    status = Error(StatusCode::kTimeout, "the zygote did not fork within %lld s",
                   static_cast<long long>(kForkTimeout / kSecond));
  }
  wire::ZygoteReply reply{};
  if (status.ok()) {
    Result<Packet> packet = ReceivePacket(socket_, sizeof reply, 1, true);
    if (!packet.ok() || packet->bytes.size() != sizeof reply) {
      status =
          Error(StatusCode::kExecutorLost, "the zygote died while it was asked for an executor");
    } else {
      std::memcpy(&reply, packet->bytes.data(), sizeof reply);
      if (reply.error != 0 || packet->fds.size() != 1) {
        return ErrnoError(StatusCode::kExecutorLost, reply.error,
                          "the zygote could not fork an executor");
      }
      process.pid = reply.pid;
      process.pidfd = std::move(packet->fds[0]);
    }
  }
  if (!status.ok()) {
    ReapZygote();  // the next Launch starts another
    return status;
  }
  return process;
}

// ---- link
// -----------------------------------------------------------------------------------------------------------

ExecutorLink::~ExecutorLink() {
  Kill();
  Reap();
}

void ExecutorLink::Reap() {
  if (reaped_) return;
  reaped_ = true;
  // One that has closed its socket is dying: how tells more than our signal would.
  if (!killed_ && !WaitReadable(process_.pidfd, kDyingTimeout)) Kill();
  // A fork of the zygote with exit signal 0: __WALL. It is dead or dying.
  siginfo_t info{};
  while (::waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(process_.pidfd.get()), &info,
                  WEXITED | __WALL) != 0 &&
         errno == EINTR) {
  }
  if (info.si_pid != 0) {
    const bool by_signal = info.si_code == CLD_KILLED || info.si_code == CLD_DUMPED;
    SLICE_LOG_INFO("server", "executor %d ended by %s %d", process_.pid,
                   by_signal ? "signal" : "exit status", info.si_status);
    if (by_signal) end_signal_ = info.si_status;
  }
}

bool ExecutorLink::EndedFromOutside() {
  Reap();
  constexpr std::array<int, 5> kFromOutside = {SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGQUIT};
  return !killed_ &&
         std::find(kFromOutside.begin(), kFromOutside.end(), end_signal_) != kFromOutside.end();
}

void ExecutorLink::Kill() {
  broken_ = true;
  if (reaped_) return;  // the pidfd stands for nobody
  killed_ = true;
  ::syscall(SYS_pidfd_send_signal, process_.pidfd.get(), SIGKILL, nullptr, 0);
}

Status ExecutorLink::Call(proto::ExecutorRequest request, std::span<const int> fds,
                          DurationNs timeout, proto::ExecutorAck* ack) {
  if (broken_) return Error(StatusCode::kExecutorLost, "the executor is gone");
  request.set_id(next_id_++);
  const Status sent = SendPacket(process_.control, request.SerializeAsString(), fds, false);
  if (sent.code() == StatusCode::kInvalid) return sent;  // too long: nothing was sent
  if (!sent.ok()) {
    broken_ = true;
    return Error(StatusCode::kExecutorLost, "the executor (pid %d) is gone: %s", process_.pid,
                 sent.text().c_str());
  }
  if (!wait_(process_.control, timeout)) {
    Kill();
    return Error(StatusCode::kTimeout, "the executor (pid %d) did not answer within %lld ms",
                 process_.pid, static_cast<long long>(timeout / kMillisecond));
  }
  const Result<Packet> packet = ReceivePacket(process_.control, kAckBytesMax, 1, true);
  if (!packet.ok() || packet->end) {
    broken_ = true;
    return Error(StatusCode::kExecutorLost, "the executor (pid %d) died during a request",
                 process_.pid);
  }
  proto::ExecutorAck answer;
  if (packet->truncated || !answer.ParseFromString(packet->bytes) || answer.id() != request.id() ||
      answer.status() < 0 || answer.status() > SLICE_ERR_TIMEOUT) {
    Kill();
    return Error(StatusCode::kProtocol, "the executor (pid %d) answered nonsense", process_.pid);
  }
  if (ack != nullptr) *ack = answer;
  if (answer.status() != SLICE_OK)
    return Status(static_cast<StatusCode>(answer.status()), answer.text());
  return Status::Ok();
}

}  // namespace slice::server
