// The control socket: bound so that a stale file of a dead daemon is replaced and a living daemon
// is left alone. Owner and thread: the server, on the server thread.
#pragma once

#include <string>

#include "common/fd.h"
#include "common/status.h"

namespace slice::server {

class Listener {
 public:
  // Errors: INVALID with the reason: a daemon answers there already, the path is too long or not a
  // socket, ...
  static Result<Listener> Listen(const std::string& path);
  Listener(Listener&&) = default;
  Listener& operator=(Listener&&) = delete;
  // Removes the socket file if it is still ours.
  ~Listener();

  struct Accepted {
    Fd socket;  // not valid: nobody waits (any more)
    // This process has no descriptor left but the one that is kept for this case: say so to the
    // peer, close the socket and call KeepSpare. Else who waits would stay in the queue, and this
    // thread would be woken for him again and again.
    bool exhausted = false;
  };
  Accepted Accept();
  void KeepSpare();
  const Fd& fd() const { return fd_; }

 private:
  Listener(Fd fd, Fd lock, std::string path, unsigned long inode)
      : fd_(std::move(fd)), lock_(std::move(lock)), path_(std::move(path)), inode_(inode) {
    KeepSpare();
  }
  Fd fd_;
  Fd lock_;  // flock on PATH.lock: two daemons that start at once
  Fd spare_;
  std::string path_;
  unsigned long inode_ = 0;
};

}  // namespace slice::server
