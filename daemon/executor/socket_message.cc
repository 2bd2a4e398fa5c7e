#include "daemon/executor/socket_message.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace slice::executor {

Result<bool> ReceiveMessage(const Fd& socket, SocketMessage* message) {
  message->fds.clear();
  ssize_t length = 0;
  do {
    length = ::recv(socket.get(), nullptr, 0, MSG_PEEK | MSG_TRUNC);
  } while (length < 0 && errno == EINTR);
  if (length < 0 && errno == ECONNRESET) return false;
  if (length < 0)
    return ErrnoError(StatusCode::kInternal, errno, "receiving from the control socket");
  if (length == 0) return false;
  if (static_cast<size_t>(length) > kMessageBytesMax) {
    return Error(StatusCode::kProtocol, "message of %zd bytes, the limit is %zu", length,
                 kMessageBytesMax);
  }
  message->bytes.resize(static_cast<size_t>(length));
  ReceivedPacket packet;
  int error = 0;
  do {
    error = ReceiveWithFds(socket, message->bytes, kMessageFdsMax, 0, &packet);
  } while (error == EINTR);
  if (error != 0)
    return ErrnoError(StatusCode::kInternal, error, "receiving from the control socket");
  if (packet.bytes == 0) return false;
  if (packet.cut || packet.excess_fds) {
    return Error(StatusCode::kProtocol, "message with more than %zu descriptors", kMessageFdsMax);
  }
  message->fds = std::move(packet.fds);
  message->bytes.resize(packet.bytes);
  return true;
}

Status SendMessage(const Fd& socket, const std::string& bytes, std::span<const int> fds) {
  if (fds.size() > kMessageFdsMax)
    return Error(StatusCode::kInternal, "%zu descriptors in a message", fds.size());
  int error = 0;
  do {
    error = SendWithFds(socket, bytes, fds, 0);
  } while (error == EINTR);
  if (error != 0)
    return ErrnoError(StatusCode::kInternal, error, "sending %zu bytes on the control socket",
                      bytes.size());
  return Status::Ok();
}

}  // namespace slice::executor
