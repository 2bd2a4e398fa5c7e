// One SOCK_SEQPACKET packet with descriptors: what the control socket and the executor's socket
// share. Errors name the errno. Threads: any.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "common/fd.h"
#include "common/status.h"

namespace slice::server {

// Never raises SIGPIPE. Errors: WOULD_BLOCK (only with `dont_wait`, or a send timeout of the
// socket), INVALID (longer than the socket takes: nothing was sent), DAEMON_LOST (the peer is
// gone).
Status SendPacket(const Fd& socket, const std::string& bytes, std::span<const int> fds,
                  bool dont_wait);

struct Packet {
  std::string bytes;
  std::vector<Fd> fds;
  bool end = false;  // the other side hung up
  // Longer than allowed, or more descriptors than allowed (all of them are closed then).
  bool truncated = false;
};
// Errors: WOULD_BLOCK (only with `dont_wait`), DAEMON_LOST.
Result<Packet> ReceivePacket(const Fd& socket, size_t bytes_max, size_t fds_max, bool dont_wait);

}  // namespace slice::server
