// CPU devices: a device is a thread, a domain is a MemoryPool. Copies are memcpy.
#pragma once

#include <memory>

#include "daemon/executor/device_backend.h"

namespace slice::executor {
// Installs the pools under torch's CPU allocator; at most one in a process, never destroyed before
// its threads.
std::unique_ptr<DeviceBackend> CreateCpuBackend();
}  // namespace slice::executor
