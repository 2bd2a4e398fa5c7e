// Client end of the control socket: one Request out, one Reply in, with descriptors. Used by
// libslice and slicectl.
//
// Owner: whoever connects. Threads: Call may be used by several threads; they take turns. Once the
// connection is gone or the protocol is broken the channel stays broken: every later Call returns
// the same status. Must not depend on: anything but common/ and the control messages.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "common/fd.h"
#include "common/status.h"
#include "common/units.h"
#include "slice/proto/control.pb.h"

namespace slice::client {

// Time limits, by what is asked; slice.h repeats them.
// Connecting and Hello together.
inline constexpr DurationNs kOpenTimeout = 10 * kSecond;
// What a person at a terminal asks (status, policy, timeline start and mark).
inline constexpr DurationNs kAdminTimeout = 5 * kSecond;
// Everything else: registering a large graph waits for the executor, replicating for copies of a
// whole model, and any request may have to wait for another session's.
inline constexpr DurationNs kCallTimeout = 300 * kSecond;
// A daemon that is stopped (SIGSTOP, a debugger) is not waited for any longer than this.
inline constexpr DurationNs kStoppedTimeout = 5 * kSecond;

// `option` when not null, else $SLICE_SOCKET, else the default path.
std::string ResolveSocketPath(const char* option);

class ControlChannel {
 public:
  // Blocks: at most `timeout`. Errors: kDaemonLost (text: path, errno, how to start the daemon),
  // kTimeout (it does not accept connections), kInvalid (path too long), kNoMemory.
  static Result<std::unique_ptr<ControlChannel>> Connect(const std::string& path,
                                                         DurationNs timeout = kOpenTimeout);

  // Sends `request` (its id is set here) with descriptors and waits for the reply to it.
  // `reply_fds` may be null: descriptors that come are closed then. Blocks: at most `timeout`,
  // other callers' turns included; at most kStoppedTimeout when the daemon is stopped. Errors: the
  // reply's own status and text when that is not OK; kTimeout (text: the daemon's pid, whether it
  // is stopped, what to try; it may still carry the request out, a late reply is dropped by its
  // id); kDaemonLost, kProtocol and what the daemon says when it ends the connection, after which
  // the channel is broken; kInvalid when the message is too long.
  Result<proto::Reply> Call(proto::Request request, std::span<const int> fds = {},
                            std::vector<Fd>* reply_fds = nullptr,
                            DurationNs timeout = kCallTimeout);

  bool broken() const { return broken_.load(std::memory_order_acquire); }
  // Hung up by the other side? A poll without waiting; does not mark the channel.
  bool HungUp() const;
  // Ends the connection for both sides: calls that wait return, polls see a hang-up.
  void Shutdown();
  // Status of a connection that ended, with the path and what to do.
  Status LostStatus() const;
  int fd() const { return socket_.get(); }
  const std::string& path() const { return path_; }

 private:
  ControlChannel(Fd socket, std::string path, pid_t daemon_pid)
      : socket_(std::move(socket)), path_(std::move(path)), daemon_pid_(daemon_pid) {}
  // Takes the turn, waits for it at most until `deadline_ns`.
  Status BeginTurn(TimeNs deadline_ns);
  void EndTurn();
  Result<proto::Reply> CallInTurn(proto::Request request, std::span<const int> fds,
                                  std::vector<Fd>* reply_fds, TimeNs deadline_ns);
  Status Break(Status status);
  Status Send(const std::string& bytes, std::span<const int> fds, TimeNs deadline_ns);
  // kTimeout leaves the channel usable.
  Status Receive(TimeNs deadline_ns, proto::Reply* reply, std::vector<Fd>* fds);
  // What to tell when nothing came for `waited`.
  Status NoAnswer(DurationNs waited) const;
  // The daemon's last word, if it still lies in the socket of a connection that ended; else
  // LostStatus.
  Status LastWord();

  Fd socket_;
  std::string path_;
  pid_t daemon_pid_;  // 0: not known (another pid namespace)
  // One call at a time. Not a std::timed_mutex: ThreadSanitizer does not know its timed lock.
  std::mutex mutex_;
  std::condition_variable turn_;
  bool calling_ = false;  // under mutex_
  uint64_t next_id_ = 1;  // in a turn
  Status broken_status_;  // written once in a turn, before broken_
  std::atomic<bool> broken_{false};
};

}  // namespace slice::client
