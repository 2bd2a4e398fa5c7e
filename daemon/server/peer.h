// Who is at the other end of a control socket, as the kernel says: nothing in a message counts.
// Threads: any.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "common/fd.h"
#include "common/status.h"

namespace slice::server {

struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;  // supplementary ones
  Fd pidfd;  // readable when the process has died; not valid when the kernel cannot give one
};

// Errors: INTERNAL.
Result<Peer> IdentifyPeer(const Fd& socket);
// Root, the daemon's own user, or a member of `admin_group` ("" = no group).
bool IsAdministrator(const Peer& peer, const std::string& admin_group);

}  // namespace slice::server
