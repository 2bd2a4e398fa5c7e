#include "daemon/server/packet.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace slice::server {

Status SendPacket(const Fd& socket, const std::string& bytes, std::span<const int> fds,
                  bool dont_wait) {
  SLICE_CHECK(fds.size() <= kPacketFdsMax, "too many descriptors for one packet");
  iovec part{};
  part.iov_base = const_cast<char*>(bytes.data());
  part.iov_len = bytes.size();
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kPacketFdsMax)> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  for (;;) {
    if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL | (dont_wait ? MSG_DONTWAIT : 0)) >= 0)
      return Status::Ok();
    if (errno == EINTR) continue;
    if (errno == EAGAIN)
      return Error(StatusCode::kWouldBlock, "the other side does not read its socket");
    return ErrnoError(StatusCode::kDaemonLost, errno, "send of %zu bytes", bytes.size());
  }
}

Result<Packet> ReceivePacket(const Fd& socket, size_t bytes_max, size_t fds_max, bool dont_wait) {
  SLICE_CHECK(fds_max <= kPacketFdsMax, "too many descriptors for one packet");
  Packet packet;
  packet.bytes.resize(bytes_max);
  iovec part{};
  part.iov_base = packet.bytes.data();
  part.iov_len = packet.bytes.size();
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kPacketFdsMax)> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(sizeof(int) * fds_max);
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | (dont_wait ? MSG_DONTWAIT : 0));
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == EAGAIN) return Error(StatusCode::kWouldBlock, "nothing to read");
    return ErrnoError(StatusCode::kDaemonLost, errno, "receive");
  }
  // Take every descriptor that came, so that none leaks whatever happens next.
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      packet.fds.emplace_back(fd);
    }
  }
  packet.truncated =
      (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || packet.fds.size() > fds_max;
  // An empty packet is no message of ours either: to a SEQPACKET reader it is the end.
  packet.end = got == 0;
  packet.bytes.resize(static_cast<size_t>(got));
  return packet;
}

}  // namespace slice::server
