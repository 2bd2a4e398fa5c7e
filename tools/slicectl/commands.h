// What slicectl can be asked. Each returns the text for standard output.
//
// Threads: one. Blocks: for the daemon's answer, at most Context::timeout (TIMEOUT then), except
// Graphs and Explain, which read shared memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "common/units.h"

namespace slice::slicectl {

struct Context {
  std::string socket_path;
  bool json = false;
  // How long the daemon may take to answer; 0 = as the command needs.
  DurationNs timeout = 0;
};

Result<std::string> DaemonStatus(const Context& context);
Result<std::string> Devices(const Context& context);
Result<std::string> Tenants(const Context& context);
Result<std::string> Estimators(const Context& context);
Result<std::string> Graphs(const Context& context, bool with_ops);
Result<std::string> Explain(const Context& context, size_t newest_max);
struct WhatIfOptions {
  std::string graph;             // name, or what its content hash begins with
  uint32_t session = 0;          // 0: the only one that has bound it
  std::vector<int64_t> symbols;  // empty: those of its latest submit
  std::string service_class;     // "online", "offline", or "": as a submit without a sequence
};
// What would become of the graph if it was submitted now; nothing runs.
Result<std::string> WhatIf(const Context& context, const WhatIfOptions& options);
Result<std::string> PolicyGet(const Context& context);
Result<std::string> PolicySet(const Context& context, const std::string& name);
Result<std::string> TimelineStart(const Context& context);
Result<std::string> TimelineStop(const Context& context, const std::string& path);
Result<std::string> TimelineMark(const Context& context, const std::string& label);

}  // namespace slice::slicectl
