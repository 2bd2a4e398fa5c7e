#include "daemon/executor/zygote.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <linux/sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "common/log.h"
#include "common/wire/executor_ring.h"
#include "common/wire/zygote.h"
#include "daemon/executor/service.h"
#include "daemon/executor/socket_message.h"

namespace slice::executor {
namespace {

// One kernel thread per device thread; caches of oneDNN and MKL bounded (500 shapes would hold 280
// MB).
constexpr std::pair<const char*, const char*> kSettings[] = {
    {"OMP_NUM_THREADS", "1"},
    {"MKL_NUM_THREADS", "1"},
    {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"},
    {"LRU_CACHE_CAPACITY", "64"},
    {"MKL_DISABLE_FAST_MM", "1"},
};

class SilentWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// First calls load kernels and build tables: done once here, shared by every executor that is
// forked.
void Warm() {
  const c10::InferenceMode inference;
  const at::Tensor a = at::ones({64, 64});
  const at::Tensor b = at::softmax(at::mm(a, a), -1);
  const at::Tensor q = at::ones({1, 2, 8, 32});
  static_cast<void>(at::scaled_dot_product_attention(q, q, q));
  static_cast<void>(at::layer_norm(b, {64}));
  const at::Tensor half = b.to(at::kBFloat16);
  static_cast<void>(at::mm(half, half));
}

// The child of sliced (CLONE_PARENT): an executor on `control`.
[[noreturn]] void BecomeExecutor(Fd control, Fd* zygote_socket, pid_t parent) {
  zygote_socket->Close();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(0);  // sliced died meanwhile
  ::prctl(PR_SET_NAME, "slice-executor");
  int status = 0;
  // On a thread of its own: a raw clone leaves the libc's notion of the first thread's id behind.
  std::thread([&] { status = RunService(control.release()); }).join();
  ::_exit(status);
}

}  // namespace

void PrepareEnvironment(char** argv) {
  bool changed = false;
  for (const auto& [name, value] : kSettings) {
    const char* now = std::getenv(name);
    if (now != nullptr && std::strcmp(now, value) == 0) continue;
    ::setenv(name, value, 1);
    changed = true;
  }
  if (!changed) return;
  if (std::getenv("SLICE_EXECUTOR_RESTARTED") != nullptr)
    return;  // something resets the environment: go on without
  ::setenv("SLICE_EXECUTOR_RESTARTED", "1", 1);
  ::execv("/proc/self/exe", argv);
}

void PrepareThread() {
  static SilentWarnings silent;
  at::set_num_threads(1);
  c10::WarningUtils::set_warning_handler(&silent);
}

void PrepareTorch() {
  PrepareThread();
  at::set_num_interop_threads(1);
}

int RunZygote(int control_fd) {
  const pid_t parent = ::getppid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) return 0;
  Fd socket(control_fd);
  Warm();
  const wire::ZygoteHello hello{wire::kZygoteVersion, wire::kExecutorRingVersion};
  if (!SendMessage(socket, std::string(reinterpret_cast<const char*>(&hello), sizeof hello)).ok())
    return 1;
  SocketMessage message;
  for (;;) {
    const Result<bool> received = ReceiveMessage(socket, &message);
    if (!received.ok()) {
      SLICE_LOG_ERROR("zygote", "%s", received.status().ToString().c_str());
      return 1;
    }
    if (!*received) return 0;
    if (message.bytes.size() != 1 || message.bytes[0] != wire::kZygoteFork ||
        message.fds.size() != 1) {
      SLICE_LOG_ERROR("zygote", "request of %zu bytes with %zu descriptors", message.bytes.size(),
                      message.fds.size());
      return 1;
    }
    int pidfd = -1;
    clone_args args{};
    args.flags = CLONE_PARENT | CLONE_PIDFD;
    args.pidfd = reinterpret_cast<uint64_t>(&pidfd);
    const auto pid = static_cast<pid_t>(::syscall(SYS_clone3, &args, sizeof args));
    if (pid == 0) BecomeExecutor(std::move(message.fds[0]), &socket, parent);
    const wire::ZygoteReply reply{pid, pid < 0 ? errno : 0};
    message.fds.clear();
    const Fd child(pidfd);
    const int fds[] = {child.get()};
    const Status sent =
        SendMessage(socket, std::string(reinterpret_cast<const char*>(&reply), sizeof reply),
                    pid < 0 ? std::span<const int>() : std::span<const int>(fds));
    if (!sent.ok()) return 1;
  }
}

}  // namespace slice::executor
