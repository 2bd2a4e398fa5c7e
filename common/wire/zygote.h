// The fork server of slice-executor ("zygote") and how sliced asks it for an executor.
//
// sliced starts `slice-executor --zygote [--control-fd N]` (N = 3 by default: one end of a
// SOCK_SEQPACKET pair). The zygote stays single-threaded, loads torch, runs a few kernels on data
// of its own, and never sees tenant data.
//
//   zygote -> sliced   ZygoteHello                          once, when it is warm
//   sliced -> zygote   one byte, kZygoteFork                + SCM_RIGHTS: the executor's end of a
//   fresh SEQPACKET pair zygote -> sliced   ZygoteReply {pid, error}             + SCM_RIGHTS: a
//   pidfd (only when error is 0)
//
// The executor is made with clone3(CLONE_PARENT | CLONE_PIDFD): it is a child of sliced, not of the
// zygote, with exit signal 0, so wait for it with waitid(P_PIDFD, pidfd, ..., WEXITED | __WALL);
// its pidfd becomes readable when it dies. It speaks executor.proto on the socket it was given: the
// first request is ExecutorSetup.
//
// Life: when sliced's end of the zygote's socket closes, the zygote exits. An executor exits when
// its control socket closes. Both ask for SIGKILL when the *thread* that made them ends
// (PR_SET_PDEATHSIG): start them from a thread that lives as long as sliced.
#pragma once

#include <cstdint>

namespace slice::wire {

inline constexpr char kZygoteFork = 'F';
inline constexpr uint32_t kZygoteVersion = 1;
inline constexpr int kControlFdDefault = 3;

struct ZygoteHello {
  uint32_t version;       // kZygoteVersion
  uint32_t ring_version;  // kExecutorRingVersion it was built with
};
struct ZygoteReply {
  int32_t pid;
  int32_t error;  // errno of a failed fork; 0 = OK
};

}  // namespace slice::wire
