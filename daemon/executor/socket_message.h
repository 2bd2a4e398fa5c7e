// One SEQPACKET message with the descriptors that travel beside it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "common/fd.h"
#include "common/fd_passing.h"
#include "common/status.h"

namespace slice::executor {

inline constexpr size_t kMessageBytesMax = size_t{16} << 20;
inline constexpr size_t kMessageFdsMax = kPassedFdsMax;

struct SocketMessage {
  std::string bytes;
  std::vector<Fd> fds;  // close-on-exec
};

// Blocks. False = the other side closed. Errors: PROTOCOL (too long, control data cut), INTERNAL
// (socket).
Result<bool> ReceiveMessage(const Fd& socket, SocketMessage* message);
// Blocks. Errors: INTERNAL.
Status SendMessage(const Fd& socket, const std::string& bytes, std::span<const int> fds = {});

}  // namespace slice::executor
