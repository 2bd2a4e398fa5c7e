// Judges what a virtual executor ran: each op once, precedence inside instances and between them,
// one op per device, finish not before the critical path. (Presence of inputs, pieces and memory is
// judged by the executor while it runs.)
#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "tests/testing/virtual_executor.h"

namespace slice::testing {

// "" when all is well. Instances whose op runs were cut short by a death or a failure are only
// checked for overlap.
inline std::string CheckSchedule(Simulation& sim, bool complete = true) {
  using OpRun = VirtualExecutor::OpRun;
  std::map<DeviceIndex, std::vector<const OpRun*>> by_device;
  std::map<std::pair<uint64_t, uint32_t>, std::map<uint32_t, const OpRun*>> by_instance;
  for (const OpRun& run : sim.executor().ops) {
    by_device[run.device].push_back(&run);
    if (!by_instance[{run.instance, run.attempt}].emplace(run.op, &run).second) {
      return "op " + std::to_string(run.op) + " of instance " + std::to_string(run.instance) +
             " ran twice in one attempt";
    }
  }
  for (auto& [device, runs] : by_device) {
    std::sort(runs.begin(), runs.end(),
              [](const OpRun* a, const OpRun* b) { return a->start < b->start; });
    for (size_t i = 1; i < runs.size(); ++i) {
      if (runs[i]->start < runs[i - 1]->finish)
        return "device " + std::to_string(device) + " ran two ops at once";
    }
  }
  if (!complete) return "";
  for (const auto& [key, runs] : by_instance) {
    const std::shared_ptr<const graph::Template> graph = sim.executor().GraphOf(key.first);
    if (graph == nullptr) continue;
    if (runs.size() != graph->groups().size()) continue;
    std::vector<DurationNs> path(graph->groups().size(), 0);
    TimeNs first = kNever, last = 0;
    DurationNs longest = 0;
    for (uint32_t g = 0; g < graph->groups().size(); ++g) {
      const OpRun* const run = runs.at(g);
      first = std::min(first, run->start);
      last = std::max(last, run->finish);
      for (const uint32_t before : graph->groups()[g].predecessors) {
        const OpRun* const earlier = runs.at(before);
        if (run->start < earlier->finish) {
          return "op " + std::to_string(g) + " of instance " + std::to_string(key.first) +
                 " started before op " + std::to_string(before) + " ended";
        }
        path[g] = std::max(path[g], path[before]);
      }
      path[g] += run->finish - run->start;
      longest = std::max(longest, path[g]);
    }
    if (last - first < longest)
      return "instance " + std::to_string(key.first) + " finished before its critical path";
  }
  return "";
}

}  // namespace slice::testing
