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

  // Not valid: nobody waits (any more).
  Fd Accept() const;
  const Fd& fd() const { return fd_; }

 private:
  Listener(Fd fd, Fd lock, std::string path, unsigned long inode)
      : fd_(std::move(fd)), lock_(std::move(lock)), path_(std::move(path)), inode_(inode) {}
  Fd fd_;
  Fd lock_;  // flock on PATH.lock: two daemons that start at once
  std::string path_;
  unsigned long inode_ = 0;
};

}  // namespace slice::server
