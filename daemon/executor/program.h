// A graph template prepared for execution: operators resolved, arguments matched to schemas and
// type-checked once, views of static inputs split off, aliases checked. Immutable after Prepare();
// shared by threads.
//
// The template is tenant data. Prepare() refuses: operators outside the allow-list (before any
// look-up), arguments that the schema does not have or of the wrong type, writes to anything but a
// static input that the group declares written or memory made inside the same group, and uses of a
// static input (also through views) that the group does not list.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "daemon/graph/template.h"

namespace slice::executor {

inline constexpr uint32_t kNoLocal = 0xffffffff;

// An integer of a call: a constant, or `slot` of the instance's evaluated integers.
struct IntSource {
  int64_t constant = 0;
  int32_t slot = -1;
  int64_t Get(const int64_t* integers) const { return slot < 0 ? constant : integers[slot]; }
};

// What goes into one stack position at run time.
struct ArgPatch {
  enum class Kind : uint8_t {
    kTensor,
    kTensorList,
    kOptionalTensorList,
    kInteger,
    kIntegerList,
    kWrappedInteger
  };
  Kind kind = Kind::kTensor;
  uint16_t position = 0;
  std::vector<uint32_t> locals;  // kNoLocal = None
  std::vector<IntSource> integers;
};

struct PreparedNode;
// Fast path of one operator: reads and writes `locals` directly. `integers`: the instance's.
using Thunk = void (*)(const PreparedNode& node, const int64_t* integers, c10::IValue* locals);

struct PreparedNode {
  explicit PreparedNode(c10::OperatorHandle op) : handle(op) {}
  Thunk thunk = nullptr;
  c10::OperatorHandle handle;
  std::vector<c10::IValue> stack;  // constants and defaults by position; patched positions are None
  std::vector<ArgPatch> patches;   // by position
  std::vector<uint32_t> outputs;   // locals; kNoLocal = dropped
  std::vector<uint32_t> releases;  // locals dead after this node
  uint32_t index = 0;              // in the template
  bool returns_list = false;
  bool writes_static = false;
  // For thunks.
  uint32_t in[2] = {kNoLocal, kNoLocal};
  at::Tensor constant;  // stands for in[1] where that is kNoLocal
  c10::Scalar scalar;
  std::vector<IntSource> numbers;
  std::vector<int64_t> numbers_constant;  // filled when none of `numbers` is symbolic
};

// Where a local of a group comes from.
struct External {
  enum class Kind : uint8_t { kCrossing, kDynamic, kStatic, kConstant, kHoisted };
  Kind kind = Kind::kCrossing;
  uint32_t index = 0;  // crossing index, dynamic / static position, constant, hoisted view
  uint32_t local = 0;
};
struct Export {
  uint32_t value = 0;
  uint32_t local = 0;
  uint32_t crossing = graph::kNoIndex;
  std::vector<uint32_t> results;  // positions
};
struct PreparedGroup {
  std::vector<External> externals;
  std::vector<PreparedNode> nodes;
  std::vector<Export> exports;
  uint32_t local_count = 0;
};
// A view of static inputs and constants: computed once per binding and domain.
struct HoistedView {
  PreparedNode node;
  External
      source;  // kStatic, kConstant or an earlier kHoisted; loaded as local 0; result is local 1
};

// A program with its symbols bound: what every instance with these symbols shares.
struct BoundProgram {
  struct Shape {
    std::vector<int64_t> sizes, strides;
    int64_t offset_bytes = 0;  // of the first element in its storage
    int64_t extent_bytes = 0;  // from there to the end of the last element
  };
  std::vector<int64_t> symbols;
  graph::BoundSizes sizes;
  std::vector<int64_t> integers;  // what IntSource::slot means
  std::vector<Shape> shapes;      // by value; filled for dynamic inputs and exported values
};

class Program {
 public:
  // Errors: OP_NOT_ALLOWED (names all offenders), GRAPH (says which node and argument).
  static Result<std::shared_ptr<const Program>> Prepare(
      std::shared_ptr<const graph::Template> source);

  const graph::Template& source() const { return *source_; }
  const std::vector<PreparedGroup>& groups() const { return groups_; }
  const std::vector<HoistedView>& hoisted() const { return hoisted_; }
  const std::vector<at::Tensor>& constants() const { return constants_; }

  // Errors: INVALID (count of symbols), OVERFLOW.
  Result<std::shared_ptr<const BoundProgram>> Bind(std::span<const int64_t> symbols) const;

 private:
  friend class ProgramBuilder;
  Program() = default;
  Result<BoundProgram::Shape> BindShape(uint32_t value, std::span<const int64_t> symbols) const;
  std::shared_ptr<const graph::Template> source_;
  std::vector<PreparedGroup> groups_;
  std::vector<HoistedView> hoisted_;
  std::vector<at::Tensor> constants_;
  graph::ExprTable expressions_;
  std::vector<graph::ExprIndex> integers_;
};

// thunks.cc: a typed fast path for `node`, or nullptr. Fills the fields that it needs.
Thunk FindThunk(const std::string& name, PreparedNode* node);

}  // namespace slice::executor
