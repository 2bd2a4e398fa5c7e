// One SOCK_SEQPACKET packet with descriptors: what the control socket and the executor's socket
// share. Errors name the errno; nothing here trusts the other side. Threads: any.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "common/fd.h"
#include "common/status.h"

namespace slice::server {

inline constexpr size_t kPacketFdsMax = 128;

// Never raises SIGPIPE. Errors: WOULD_BLOCK (only with `dont_wait`), EXECUTOR_LOST is never used
// here: a peer that is gone is DAEMON_LOST.
Status SendPacket(const Fd& socket, const std::string& bytes, std::span<const int> fds,
                  bool dont_wait);

struct Packet {
  std::string bytes;
  std::vector<Fd> fds;
  bool end = false;        // the other side hung up
  bool truncated = false;  // longer than allowed, or more descriptors than allowed
};
// Errors: WOULD_BLOCK (only with `dont_wait`), DAEMON_LOST.
Result<Packet> ReceivePacket(const Fd& socket, size_t bytes_max, size_t fds_max, bool dont_wait);

}  // namespace slice::server
