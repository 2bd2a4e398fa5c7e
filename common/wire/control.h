// What both ends of the control socket agree on besides control.proto: where the socket is, how
// long a message may be, and in which order descriptors travel. One SOCK_SEQPACKET packet is one
// Request or one Reply.
#pragma once

#include <cstddef>

namespace slice::wire {

inline constexpr char kDefaultSocketPath[] = "/run/slicescheduler/sliced.sock";
inline constexpr char kSocketEnvironment[] =
    "SLICE_SOCKET";  // overrides the default path for clients

// A longer packet is a broken protocol (MSG_TRUNC). Fits the default socket buffer (about 200 KiB)
// three times.
inline constexpr size_t kControlMessageBytesMax = size_t{64} * 1024;
// Descriptors per packet; more is a broken protocol (MSG_CTRUNC).
inline constexpr size_t kControlFdsMax = 4;

// Descriptors of a Hello request ...
inline constexpr size_t kHelloTenantRingFd = 0;
inline constexpr size_t kHelloArenaFd = 1;
inline constexpr size_t kHelloFdCount = 2;
// ... and of its reply.
inline constexpr size_t kHelloReplyDaemonRingFd = 0;  // read-only for the tenant
inline constexpr size_t kHelloReplyDaemonEventFd =
    1;  // the client signals: slots wait in the submit ring
inline constexpr size_t kHelloReplyClientEventFd = 2;  // the daemon signals: completions wait
inline constexpr size_t kHelloReplyFdCount = 3;

}  // namespace slice::wire
