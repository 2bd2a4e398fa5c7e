// Process start: environment, torch settings, and the fork server (protocol: common/wire/zygote.h).
#pragma once

namespace slice::executor {

// Thread and cache settings that torch's libraries read when they are loaded: executes the program
// again with them set, unless they are. Started by sliced with the same settings, it returns at
// once.
void PrepareEnvironment(char** argv);
// One intra-op thread; before any thread exists.
void PrepareTorch();
// First thing on every thread that runs operators: one intra-op thread, no warnings (tenants could
// fill the log).
void PrepareThread();
// Serves forks until the other side closes. Stays single-threaded. Returns the exit status.
int RunZygote(int control_fd);

}  // namespace slice::executor
