// Finds the backend library of a kind of device. Call before device threads exist.
#pragma once

#include <memory>
#include <string>

#include "common/status.h"
#include "daemon/executor/device_backend.h"

namespace slice::executor {

// Loads libslice_backend_<kind>.so from the directory of the executable. For "cuda" the driver
// (libcuda.so.1) is looked for first. Ownership: the library stays loaded for ever. Errors: INVALID
// (unknown kind), INTERNAL (driver or library is not there, or does not start; says which).
Result<std::unique_ptr<DeviceBackend>> LoadBackend(const std::string& kind);

}  // namespace slice::executor
