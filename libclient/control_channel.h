// Client end of the control socket: one Request out, one Reply in, with descriptors. Used by
// libslice and slicectl.
//
// Owner: whoever connects. Threads: Call may be used by several threads; they take turns. Once the
// connection is gone or the protocol is broken the channel stays broken: every later Call returns
// the same status. Must not depend on: anything but common/ and the control messages.
#pragma once

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

// Connecting and Hello together; the C ABI promises "at most 10 s".
inline constexpr DurationNs kOpenTimeout = 10 * kSecond;
// Registering waits for the executor, replicating for copies of whole models: minutes, but never
// for ever.
inline constexpr DurationNs kCallTimeout = 300 * kSecond;

// `option` when not null, else $SLICE_SOCKET, else the default path.
std::string ResolveSocketPath(const char* option);

class ControlChannel {
 public:
  // Blocks: at most `timeout`. Errors: kDaemonLost (text: path, errno, how to start the daemon),
  // kInvalid (path too long), kNoMemory.
  static Result<std::unique_ptr<ControlChannel>> Connect(const std::string& path,
                                                         DurationNs timeout = kOpenTimeout);

  // Sends `request` (its id is set here) with descriptors and waits for the reply to it.
  // `reply_fds` may be null: descriptors that come are closed then. Blocks: at most `timeout`,
  // other callers' turns included. Errors: the reply's own status and text when that is not OK;
  // kTimeout (a late reply is dropped by its id); kDaemonLost and kProtocol, after which the
  // channel is broken; kInvalid when the message is too long.
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
  ControlChannel(Fd socket, std::string path)
      : socket_(std::move(socket)), path_(std::move(path)) {}
  // Takes the turn, waits for it at most until `deadline_ns`.
  Status BeginTurn(TimeNs deadline_ns);
  void EndTurn();
  Result<proto::Reply> CallInTurn(proto::Request request, std::span<const int> fds,
                                  std::vector<Fd>* reply_fds, TimeNs deadline_ns);
  Status Break(Status status);
  Status Send(const std::string& bytes, std::span<const int> fds, TimeNs deadline_ns);
  // kTimeout leaves the channel usable.
  Status Receive(TimeNs deadline_ns, proto::Reply* reply, std::vector<Fd>* fds);

  Fd socket_;
  std::string path_;
  // One call at a time. Not a std::timed_mutex: ThreadSanitizer does not know its timed lock.
  std::mutex mutex_;
  std::condition_variable turn_;
  bool calling_ = false;  // under mutex_
  uint64_t next_id_ = 1;  // in a turn
  Status broken_status_;  // written once in a turn, before broken_
  std::atomic<bool> broken_{false};
};

}  // namespace slice::client
