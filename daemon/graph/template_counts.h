// Bounds on a serialized template that hold before protobuf reads it.
#pragma once

#include <string_view>

#include "common/status.h"
#include "daemon/graph/template.h"

namespace slice::graph {

// Counts the top-level fields before protobuf allocates anything for them: two bytes on the wire
// make an object of fifty, so a small template could otherwise ask for gigabytes.
// Errors: OVERFLOW (too many), GRAPH (not a message).
Status CheckCounts(std::string_view serialized, const Limits& limits);
// Names go into texts for people, some as they are. Errors: GRAPH (a name over its limit).
Status CheckNames(const proto::GraphTemplate& program, const Limits& limits);

}  // namespace slice::graph
