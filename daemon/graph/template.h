// A registered graph template, parsed and structurally checked: what every torch-free part knows of
// a tenant's program.
//
// Input is tenant data (proto.GraphTemplate). Parse() trusts nothing: it bounds every count and
// index, refuses cycles and dangling references by construction (values are defined before use,
// groups partition the nodes in order), compiles size expressions, and derives the DAG at group
// grain. Operator schemas and aliasing are checked by the executor, which has torch. A Template is
// immutable and shared; safe to read from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "common/units.h"
#include "slice/proto/template.pb.h"

namespace slice::graph {

inline constexpr uint32_t kTemplateFormat = 1;

struct Limits {
  uint64_t template_bytes_max = 64u << 20;
  uint32_t values_max = 1u << 20;
  uint32_t nodes_max = 200'000;
  uint32_t groups_max = 20'000;
  uint32_t symbols_max = 64;
  uint32_t name_bytes_max = 512;  // of a graph, symbol, input or group
  uint32_t inputs_max = 20'000;
  uint32_t expr_nodes_max = 256;
  uint32_t expr_depth_max = 32;
  uint32_t constant_bytes_max = 64 * 1024;
  int64_t tensor_bytes_max = int64_t{1} << 46;
};

// A size expression as a postfix program over the symbols. Index into Template's expression table.
using ExprIndex = uint32_t;
inline constexpr ExprIndex kNoExpr = 0xffffffff;

// Compiled expressions of one template.
class ExprTable {
 public:
  // Errors: OVERFLOW (limits), GRAPH (unknown kind, symbol not declared).
  Result<ExprIndex> Add(const proto::Expr& expr, uint32_t symbol_count, const Limits& limits);
  // Errors: OVERFLOW (arithmetic, division by zero). `symbols` has the template's symbol count.
  Result<int64_t> Evaluate(ExprIndex index, std::span<const int64_t> symbols) const;

 private:
  struct Instruction {
    uint8_t kind = 0;  // proto::Expr::Kind, or kConstant/kSymbol
    uint8_t arg_count = 0;
    int64_t operand = 0;
  };
  struct Program {
    uint32_t begin = 0;
    uint32_t end = 0;
  };
  Status Compile(const proto::Expr& expr, uint32_t symbol_count, const Limits& limits,
                 uint32_t depth, uint32_t* node_count);
  std::vector<Instruction> code_;
  std::vector<Program> programs_;
};

struct ValueShape {
  proto::DType dtype = proto::DTYPE_UNSPECIFIED;
  uint8_t item_bytes = 0;   // 0: the value has no tensor
  bool is_integer = false;  // integer or bool: checked indices; copied before use
  std::vector<ExprIndex> sizes;
  std::vector<ExprIndex> strides;
  ExprIndex storage_offset = kNoExpr;  // kNoExpr = 0
};

inline constexpr uint32_t kNoGroup = 0xffffffff;
inline constexpr uint32_t kNoIndex = 0xffffffff;

struct Input {
  std::string name;
  proto::Input::Kind kind = proto::Input::KIND_UNSPECIFIED;
  uint32_t value = kNoIndex;
  ExprIndex expr = kNoExpr;
  bool written = false;
  uint32_t static_index = kNoIndex;  // position among static inputs (order of slice_binding_create)
  uint32_t dynamic_index = kNoIndex;  // position among DYNAMIC inputs
  bool is_static() const { return static_index != kNoIndex; }
};

// One schedulable operator.
struct Group {
  std::string name;
  uint64_t signature = 0;
  std::vector<uint32_t> values_in;   // values made by *other groups* that this one uses
  std::vector<uint32_t> dynamic_in;  // dynamic input positions it uses
  std::vector<uint32_t>
      values_out;                 // values it makes that later groups use (not graph outputs only)
  std::vector<uint32_t> results;  // result positions (among value outputs) whose value it makes
  std::vector<uint32_t> reads;    // static positions it reads (constants too)
  std::vector<uint32_t> writes;   // static positions it writes
  std::vector<uint32_t>
      predecessors;  // groups, ascending, no duplicates: data and write hazards on statics
  std::vector<uint32_t> successors;
  ExprIndex workspace_bytes = kNoExpr;
  ExprIndex flops = kNoExpr;
  ExprIndex bytes = kNoExpr;
};

struct ValueUse {  // of a value that crosses groups
  uint32_t value = 0;
  uint32_t producer = kNoGroup;
  std::vector<uint32_t> consumers;  // groups, ascending
};

// What a bind evaluates: each distinct shape and number once, however many values and groups share
// it (the layers of a model are alike). Part of its template.
struct BindPlan {
  struct Number {
    const char* what;
    uint32_t group;  // the first that asks for it
    ExprIndex expr;
    int64_t value_max;
  };
  std::vector<uint32_t> shapes;  // a value of each distinct shape, in the order of first use
  std::vector<Number> numbers;   // their values follow those of the shapes in BoundSizes
  std::vector<uint32_t> crossing, dynamic, result;      // slot of the bytes, by index
  std::vector<uint32_t> workspace_bytes, flops, bytes;  // slot of the number, by group
};

// Numbers of one instance: the template with its symbols bound. Empty until a bind succeeds; must
// not outlive the template.
class BoundSizes {
 public:
  // Exact bytes of storage extents, unrounded: by crossing index, dynamic and result position.
  int64_t crossing_bytes(size_t crossing) const { return slots_[plan_->crossing[crossing]]; }
  int64_t dynamic_bytes(size_t dynamic) const { return slots_[plan_->dynamic[dynamic]]; }
  int64_t result_bytes(size_t result) const { return slots_[plan_->result[result]]; }
  size_t dynamic_count() const { return plan_->dynamic.size(); }
  size_t result_count() const { return plan_->result.size(); }

  // By group.
  int64_t workspace_bytes(size_t group) const { return slots_[plan_->workspace_bytes[group]]; }
  int64_t flops(size_t group) const { return slots_[plan_->flops[group]]; }
  int64_t bytes(size_t group) const { return slots_[plan_->bytes[group]]; }

 private:
  friend class Template;
  const BindPlan* plan_ = nullptr;
  std::vector<int64_t> slots_;  // one for each distinct shape and number
};

class Template {
 public:
  // Errors: GRAPH (structure: says which node, value, group), OVERFLOW (limits), OP_NOT_ALLOWED
  // never (executor's).
  static Result<std::shared_ptr<const Template>> Parse(std::string_view serialized,
                                                       const Limits& limits = {});

  uint64_t content_hash() const { return content_hash_; }  // of the serialized bytes
  const proto::GraphTemplate& program() const { return program_; }
  const std::string& name() const { return name_; }  // metadata.model
  const std::vector<ValueShape>& values() const { return values_; }
  const std::vector<Input>& inputs() const { return inputs_; }
  const std::vector<uint32_t>& statics() const {
    return statics_;
  }  // input index by static position
  const std::vector<uint32_t>& dynamics() const {
    return dynamics_;
  }  // input index by dynamic position
  const std::vector<uint32_t>& results() const {
    return results_;
  }  // value by result position (value outputs)
  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<ValueUse>& crossing() const { return crossing_; }  // values that cross groups
  uint32_t crossing_index(uint32_t value) const {
    return crossing_of_value_[value];
  }  // kNoIndex if it does not
  uint32_t symbol_count() const { return static_cast<uint32_t>(program_.symbols_size()); }
  const ExprTable& expressions() const { return expressions_; }

  // Evaluates every size. Errors: OVERFLOW (a count of symbols that is not the template's, a symbol
  // outside its range, arithmetic, a size below 0 or above limits). *out is reused (no allocation
  // once warm). Written only on success.
  Status Bind(std::span<const int64_t> symbols, BoundSizes* out) const;
  // Bytes of a value's storage extent: item_bytes * (1 + sum (size-1)*stride + offset), 0 if any
  // size is 0.
  Result<int64_t> ValueBytes(uint32_t value, std::span<const int64_t> symbols) const;

 private:
  friend class TemplateParser;
  Template() = default;
  void PlanBind();
  uint64_t content_hash_ = 0;
  std::string name_;
  proto::GraphTemplate program_;
  Limits limits_;
  ExprTable expressions_;
  std::vector<ValueShape> values_;
  std::vector<Input> inputs_;
  std::vector<uint32_t> statics_, dynamics_, results_;
  std::vector<Group> groups_;
  std::vector<ValueUse> crossing_;
  std::vector<uint32_t> crossing_of_value_;
  BindPlan plan_;
};

// 64-bit FNV-1a. Not collision-resistant against an attacker: compare the bytes before sharing by
// hash.
uint64_t ContentHash(std::string_view bytes);

// Bytes per element; 0 for DTYPE_UNSPECIFIED.
uint8_t ItemBytes(proto::DType dtype);

}  // namespace slice::graph
