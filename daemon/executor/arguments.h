// Matches one template argument to one schema argument. Used while preparing a program.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <string>

#include "common/status.h"
#include "daemon/executor/program.h"
#include "slice/proto/template.pb.h"

namespace slice::executor {

struct ArgumentContext {
  // Local slot of a value inside the group (loads it if it comes from outside).
  std::function<uint32_t(uint32_t value)> local_of;
  // A constant, or a slot of the instance's integers.
  std::function<Result<IntSource>(const proto::Expr&)> integer;
};

// Fills `constant` (for the stack), or `patch` with *patched = true. Errors: GRAPH, text without
// the node's name.
Status MatchArgument(const c10::Argument& schema, const proto::Argument& arg,
                     const ArgumentContext& context, c10::IValue* constant, ArgPatch* patch,
                     bool* patched);

}  // namespace slice::executor
