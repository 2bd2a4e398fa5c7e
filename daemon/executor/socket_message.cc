#include "daemon/executor/socket_message.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

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
  iovec part{message->bytes.data(), message->bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMessageFdsMax)];
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  do {
    length = ::recvmsg(socket.get(), &header, MSG_CMSG_CLOEXEC);
  } while (length < 0 && errno == EINTR);
  if (length < 0)
    return ErrnoError(StatusCode::kInternal, errno, "receiving from the control socket");
  if (length == 0) return false;
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= c->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + at, sizeof fd);
      message->fds.emplace_back(fd);
    }
  }
  if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return Error(StatusCode::kProtocol, "message with more than %zu descriptors", kMessageFdsMax);
  }
  message->bytes.resize(static_cast<size_t>(length));
  return true;
}

Status SendMessage(const Fd& socket, const std::string& bytes, std::span<const int> fds) {
  if (fds.size() > kMessageFdsMax)
    return Error(StatusCode::kInternal, "%zu descriptors in a message", fds.size());
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMessageFdsMax)] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(c), fds.data(), fds.size_bytes());
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket.get(), &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0)
    return ErrnoError(StatusCode::kInternal, errno, "sending %zu bytes on the control socket",
                      bytes.size());
  return Status::Ok();
}

}  // namespace slice::executor
