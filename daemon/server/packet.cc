#include "daemon/server/packet.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "common/fd_passing.h"

namespace slice::server {

Status SendPacket(const Fd& socket, const std::string& bytes, std::span<const int> fds,
                  bool dont_wait) {
  for (;;) {
    const int error = SendWithFds(socket, bytes, fds, dont_wait ? MSG_DONTWAIT : 0);
    if (error == 0) return Status::Ok();
    if (error == EINTR) continue;
    if (error == EAGAIN)
      return Error(StatusCode::kWouldBlock, "the other side does not read its socket");
    if (error == EMSGSIZE) {
      return Error(StatusCode::kInvalid, "a message of %zu bytes is more than the socket takes",
                   bytes.size());
    }
    return ErrnoError(StatusCode::kDaemonLost, error, "send of %zu bytes", bytes.size());
  }
}

Result<Packet> ReceivePacket(const Fd& socket, size_t bytes_max, size_t fds_max, bool dont_wait) {
  Packet packet;
  packet.bytes.resize(bytes_max);
  ReceivedPacket received;
  int error = 0;
  do {
    error = ReceiveWithFds(socket, packet.bytes, fds_max, dont_wait ? MSG_DONTWAIT : 0, &received);
  } while (error == EINTR);
  if (error == EAGAIN) return Error(StatusCode::kWouldBlock, "nothing to read");
  if (error == EMFILE) {
    return Error(StatusCode::kNoMemory, "process %d has no descriptor left for those of a message",
                 ::getpid());
  }
  if (error != 0) return ErrnoError(StatusCode::kDaemonLost, error, "receive");
  packet.fds = std::move(received.fds);
  packet.truncated = received.cut || received.excess_fds;
  // An empty packet is no message of ours either: to a SEQPACKET reader it is the end.
  packet.end = received.bytes == 0;
  packet.bytes.resize(received.bytes);
  return packet;
}

}  // namespace slice::server
