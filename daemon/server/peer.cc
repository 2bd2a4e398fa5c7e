#include "daemon/server/peer.h"

#include <grp.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace slice::server {
namespace {
constexpr size_t kGroupBufferBytes = 16384;
}  // namespace

Result<Peer> IdentifyPeer(const Fd& socket) {
  ucred credentials{};
  socklen_t bytes = sizeof credentials;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) {
    return ErrnoError(StatusCode::kInternal, errno, "SO_PEERCRED");
  }
  Peer peer;
  peer.pid = credentials.pid;
  peer.uid = credentials.uid;
  peer.gid = credentials.gid;
  std::vector<gid_t> groups(64);
  bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
  int rc = ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes);
  if (rc != 0 && errno == ERANGE) {
    groups.resize(bytes / sizeof(gid_t));
    rc = ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes);
  }
  if (rc == 0) {
    groups.resize(bytes / sizeof(gid_t));
    peer.groups = std::move(groups);
  }
  int pidfd = -1;
  bytes = sizeof pidfd;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERPIDFD, &pidfd, &bytes) != 0) {
    // Before 6.5: by number. The process connected just now; should it be gone and the number
    // reused, the session ends later than it could, with the hang-up of its socket.
    pidfd = static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0));
  }
  if (pidfd >= 0) peer.pidfd = Fd(pidfd);
  return peer;
}

bool IsAdministrator(const Peer& peer, const std::string& admin_group) {
  if (peer.uid == 0 || peer.uid == ::geteuid()) return true;
  if (admin_group.empty()) return false;
  group entry{};
  group* found = nullptr;
  std::vector<char> buffer(kGroupBufferBytes);
  if (::getgrnam_r(admin_group.c_str(), &entry, buffer.data(), buffer.size(), &found) != 0 ||
      found == nullptr)
    return false;
  return peer.gid == found->gr_gid ||
         std::find(peer.groups.begin(), peer.groups.end(), found->gr_gid) != peer.groups.end();
}

}  // namespace slice::server
