// One packet with descriptors beside it (SCM_RIGHTS): the only place that packs and unpacks them.
// What an errno means is for the callers to say, so both functions return it as it is, EINTR and
// EAGAIN too. Threads: any. Nothing that is received is trusted.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "common/fd.h"

namespace slice {

// Descriptors in one packet; the kernel allows 253.
inline constexpr size_t kPassedFdsMax = 128;

// One sendmsg(), with MSG_NOSIGNAL and `flags`; `fds` (at most kPassedFdsMax) stay the caller's.
// Returns 0, or its errno.
[[nodiscard]] int SendWithFds(const Fd& socket, std::string_view bytes, std::span<const int> fds,
                              int flags);

struct ReceivedPacket {
  size_t bytes = 0;         // written to the buffer; 0: the other side hung up
  std::vector<Fd> fds;      // close-on-exec; none when `excess_fds`
  bool cut = false;         // was longer than the buffer
  bool excess_fds = false;  // more descriptors than allowed: all that came are closed
};
// One recvmsg() with `flags` into `buffer`. Returns 0, or its errno; *packet is written on success
// only. EMFILE: this process has no room for the descriptors that came; the packet is gone.
[[nodiscard]] int ReceiveWithFds(const Fd& socket, std::span<char> buffer, size_t fds_max,
                                 int flags, ReceivedPacket* packet);

}  // namespace slice
