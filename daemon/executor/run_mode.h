// `slice-executor --run`: one template with random inputs, no daemon, no device threads. For tests
// and bug reports.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "common/status.h"

namespace slice::executor {

struct RunOptions {
  std::string path;                        // binary, or text when it ends in .textproto
  std::map<std::string, int64_t> symbols;  // those not given take their minimum
  int repeat = 1;
  uint64_t seed = 0;
  bool json = false;
  uint64_t pool_bytes = uint64_t{1} << 30;
};
// Prints per-group times (medians, ns) and a checksum of each output to stdout.
Status RunTemplate(const RunOptions& options);

}  // namespace slice::executor
