#include "common/fd_passing.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace slice {
namespace {

struct ControlBuffer {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kPassedFdsMax)> bytes{};
};

}  // namespace

int SendWithFds(const Fd& socket, std::string_view bytes, std::span<const int> fds, int flags) {
  SLICE_CHECK(fds.size() <= kPassedFdsMax, "too many descriptors for one packet");
  iovec part{.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  ControlBuffer control;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.bytes.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  return ::sendmsg(socket.get(), &message, MSG_NOSIGNAL | flags) < 0 ? errno : 0;
}

int ReceiveWithFds(const Fd& socket, std::span<char> buffer, size_t fds_max, int flags,
                   ReceivedPacket* packet) {
  SLICE_CHECK(fds_max <= kPassedFdsMax, "too many descriptors for one packet");
  iovec part{.iov_base = buffer.data(), .iov_len = buffer.size()};
  ControlBuffer control;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes.data();
  message.msg_controllen = CMSG_SPACE(sizeof(int) * fds_max);
  const ssize_t got = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | flags);
  if (got < 0) return errno;
  ReceivedPacket received;
  received.bytes = static_cast<size_t>(got);
  received.cut = (message.msg_flags & MSG_TRUNC) != 0;
  // Own every descriptor that came before anything else is decided, so that none leaks.
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      received.fds.emplace_back(fd);
    }
  }
  // Less than asked for, and yet some were left out: there was no number for them.
  if ((message.msg_flags & MSG_CTRUNC) != 0 && received.fds.size() < fds_max) return EMFILE;
  // CMSG_SPACE rounds up, so one more than asked for may have come without MSG_CTRUNC.
  received.excess_fds = (message.msg_flags & MSG_CTRUNC) != 0 || received.fds.size() > fds_max;
  if (received.excess_fds) received.fds.clear();
  *packet = std::move(received);
  return 0;
}

}  // namespace slice
