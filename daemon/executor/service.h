// The executor process on its control socket.
#pragma once

namespace slice::executor {
// Serves executor.proto until the other side closes; then ends the process. Returns the exit
// status.
int RunService(int control_fd);
}  // namespace slice::executor
