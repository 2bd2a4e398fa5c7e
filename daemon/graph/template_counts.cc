#include "daemon/graph/template_counts.h"

#include <google/protobuf/io/coded_stream.h>

namespace slice::graph {

Status CheckCounts(std::string_view serialized, const Limits& limits) {
  struct Bound {
    int field;
    const char* what;
    uint64_t max;
    uint64_t seen;
  };
  Bound bounds[] = {
      {proto::GraphTemplate::kSymbolsFieldNumber, "symbols", limits.symbols_max, 0},
      {proto::GraphTemplate::kValuesFieldNumber, "values", limits.values_max, 0},
      {proto::GraphTemplate::kConstantsFieldNumber, "constants", limits.inputs_max, 0},
      {proto::GraphTemplate::kInputsFieldNumber, "inputs", limits.inputs_max, 0},
      {proto::GraphTemplate::kOperatorsFieldNumber, "operators", limits.nodes_max, 0},
      {proto::GraphTemplate::kNodesFieldNumber, "nodes", limits.nodes_max, 0},
      {proto::GraphTemplate::kGroupsFieldNumber, "groups", limits.groups_max, 0},
      {proto::GraphTemplate::kOutputsFieldNumber, "outputs", limits.inputs_max, 0}};
  google::protobuf::io::CodedInputStream stream(reinterpret_cast<const uint8_t*>(serialized.data()),
                                                static_cast<int>(serialized.size()));
  while (const uint32_t tag = stream.ReadTag()) {
    for (Bound& bound : bounds) {
      if (bound.field == static_cast<int>(tag >> 3) && ++bound.seen > bound.max) {
        return Error(StatusCode::kOverflow, "template has more than %llu %s",
                     static_cast<unsigned long long>(bound.max), bound.what);
      }
    }
    uint64_t number = 0;
    uint32_t length = 0;
    bool ok = false;
    switch (tag & 7) {
      case 0:
        ok = stream.ReadVarint64(&number);
        break;
      case 1:
        ok = stream.Skip(8);
        break;
      case 2:
        ok = stream.ReadVarint32(&length) && length <= INT32_MAX &&
             stream.Skip(static_cast<int>(length));
        break;
      case 5:
        ok = stream.Skip(4);
        break;
      default:
        break;
    }
    if (!ok)
      return Error(StatusCode::kGraph, "template is not a GraphTemplate message (byte %d)",
                   stream.CurrentPosition());
  }
  return Status::Ok();
}

Status CheckNames(const proto::GraphTemplate& program, const Limits& limits) {
  const auto check = [&limits](const char* what, int index, const std::string& name) {
    if (name.size() <= limits.name_bytes_max) return Status::Ok();
    return Error(StatusCode::kGraph, "the name of %s %d has %zu bytes, the limit is %u", what,
                 index, name.size(), limits.name_bytes_max);
  };
  SLICE_RETURN_IF_ERROR(check("graph", 0, program.metadata().model()));
  for (int i = 0; i < program.symbols_size(); ++i)
    SLICE_RETURN_IF_ERROR(check("symbol", i, program.symbols(i).name()));
  for (int i = 0; i < program.inputs_size(); ++i)
    SLICE_RETURN_IF_ERROR(check("input", i, program.inputs(i).name()));
  for (int i = 0; i < program.groups_size(); ++i)
    SLICE_RETURN_IF_ERROR(check("group", i, program.groups(i).name()));
  return Status::Ok();
}

}  // namespace slice::graph
