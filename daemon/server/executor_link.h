// The cold path to one executor process: requests of executor.proto over its socket, each waited
// for.
//
// ExecutorLauncher makes such processes; ZygoteLauncher is the real one (fork server
// `slice-executor --zygote`), tests have their own. Start both from a thread that lives as long as
// sliced: the children die with it (PR_SET_PDEATHSIG).
//
// Owner and thread: the supervisor, on the server thread. Blocks: Call and Launch, at most their
// timeouts, in the WaitFunction that they are given.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "common/fd.h"
#include "common/status.h"
#include "common/units.h"
#include "slice/proto/executor.pb.h"

namespace slice::server {

// True when `fd` is readable, or hung up, in time. The server's keeps administration going
// meanwhile.
using WaitFunction = std::function<bool(const Fd& fd, DurationNs timeout)>;
// One that does nothing else.
bool WaitReadable(const Fd& fd, DurationNs timeout);

struct ExecutorProcess {
  pid_t pid = 0;
  Fd pidfd;    // readable when it has died
  Fd control;  // our end
};

class ExecutorLauncher {
 public:
  virtual ~ExecutorLauncher() = default;
  // Errors: EXECUTOR_LOST (why, and what to do), TIMEOUT.
  virtual Result<ExecutorProcess> Launch(const WaitFunction& wait) = 0;
};

class ZygoteLauncher final : public ExecutorLauncher {
 public:
  explicit ZygoteLauncher(std::string executor_path) : executor_path_(std::move(executor_path)) {}
  ~ZygoteLauncher() override;
  Result<ExecutorProcess> Launch(const WaitFunction& wait) override;

 private:
  Status EnsureZygote(const WaitFunction& wait);
  void ReapZygote();

  std::string executor_path_;
  pid_t pid_ = -1;
  Fd socket_;
};

class ExecutorLink {
 public:
  ExecutorLink(ExecutorProcess process, WaitFunction wait)
      : process_(std::move(process)), wait_(std::move(wait)) {}
  // Kills the process if it lives, and reaps it.
  ~ExecutorLink();

  // Waits for the acknowledgement. Errors: the acknowledgement's own (the executor lives);
  // EXECUTOR_LOST (it is gone), TIMEOUT (it does not answer), PROTOCOL (nonsense): the link is
  // broken() then.
  Status Call(proto::ExecutorRequest request, std::span<const int> fds, DurationNs timeout,
              proto::ExecutorAck* ack = nullptr);
  bool broken() const { return broken_; }
  void Kill();
  // After its death, or a call that broke the link: whether somebody else ended it (an
  // administrator, the kernel when memory is short) by a signal that no op raises. Blocks: while it
  // is dying, at most a second.
  bool EndedFromOutside();
  pid_t pid() const { return process_.pid; }
  const Fd& pidfd() const { return process_.pidfd; }

 private:
  void Reap();

  ExecutorProcess process_;
  const WaitFunction wait_;
  uint64_t next_id_ = 1;
  bool broken_ = false;
  bool killed_ = false;  // by us
  bool reaped_ = false;
  int end_signal_ = 0;  // that ended it; 0: it exited, or has not been reaped
};

}  // namespace slice::server
