// What slicectl can be asked. Each returns the text for standard output.
//
// Threads: one. Blocks: for the daemon's answer, at most Context::timeout (TIMEOUT then), except
// Graphs and Explain, which read shared memory.
#pragma once

#include <string>

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
Result<std::string> PolicyGet(const Context& context);
Result<std::string> PolicySet(const Context& context, const std::string& name);
Result<std::string> TimelineStart(const Context& context);
Result<std::string> TimelineStop(const Context& context, const std::string& path);
Result<std::string> TimelineMark(const Context& context, const std::string& label);

}  // namespace slice::slicectl
