// What the kernel says about another process of this host. Threads: any.
#pragma once

#include <sys/types.h>

namespace slice {

// Stopped by a signal (SIGSTOP, SIGTSTP, ...) or by a debugger: it runs no instruction until it is
// continued. False too when nothing is known of `pid`, 0 included.
bool IsStopped(pid_t pid);

}  // namespace slice
