// Typed fast paths for the views and elementwise operators that make up most of a model's calls. A
// boxed call costs 50-100 ns more; views are half of a decoder layer's nodes.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <unordered_map>

#include "daemon/executor/program.h"

namespace slice::executor {
namespace {

constexpr size_t kNumbersMax = 16;

const at::Tensor& First(const PreparedNode& node, c10::IValue* locals) {
  return locals[node.in[0]].toTensor();
}
const at::Tensor& Second(const PreparedNode& node, c10::IValue* locals) {
  return node.in[1] == kNoLocal ? node.constant : locals[node.in[1]].toTensor();
}
int64_t Number(const PreparedNode& node, size_t index, const int64_t* integers) {
  return node.numbers[index].Get(integers);
}

// The list argument; `scratch` holds it when it is symbolic. Large negative numbers would be taken
// for pointers by the unchecked conversion: constants are checked when the node is prepared,
// symbolic ones here.
c10::SymIntArrayRef Numbers(const PreparedNode& node, const int64_t* integers,
                            std::array<int64_t, kNumbersMax>* scratch) {
  if (node.numbers_constant.size() == node.numbers.size()) {
    return c10::fromIntArrayRefUnchecked(node.numbers_constant);
  }
  for (size_t i = 0; i < node.numbers.size(); ++i) (*scratch)[i] = node.numbers[i].Get(integers);
  return c10::fromIntArrayRefSlow(at::IntArrayRef(scratch->data(), node.numbers.size()));
}

void Put(const PreparedNode& node, c10::IValue* locals, at::Tensor&& result) {
  if (node.outputs[0] != kNoLocal) locals[node.outputs[0]] = std::move(result);
}

void View(const PreparedNode& node, const int64_t* integers, c10::IValue* locals) {
  std::array<int64_t, kNumbersMax> scratch;
  Put(node, locals, at::_ops::view::call(First(node, locals), Numbers(node, integers, &scratch)));
}
void UnsafeView(const PreparedNode& node, const int64_t* integers, c10::IValue* locals) {
  std::array<int64_t, kNumbersMax> scratch;
  Put(node, locals,
      at::_ops::_unsafe_view::call(First(node, locals), Numbers(node, integers, &scratch)));
}
void Transpose(const PreparedNode& node, const int64_t* integers, c10::IValue* locals) {
  Put(node, locals,
      at::_ops::transpose_int::call(First(node, locals), Number(node, 0, integers),
                                    Number(node, 1, integers)));
}
void T(const PreparedNode& node, const int64_t*, c10::IValue* locals) {
  Put(node, locals, at::_ops::t::call(First(node, locals)));
}
void Unsqueeze(const PreparedNode& node, const int64_t* integers, c10::IValue* locals) {
  Put(node, locals, at::_ops::unsqueeze::call(First(node, locals), Number(node, 0, integers)));
}
void Slice(const PreparedNode& node, const int64_t* integers, c10::IValue* locals) {
  Put(node, locals,
      at::_ops::slice_Tensor::call(
          First(node, locals), Number(node, 0, integers), c10::SymInt(Number(node, 1, integers)),
          c10::SymInt(Number(node, 2, integers)), c10::SymInt(Number(node, 3, integers))));
}
void Expand(const PreparedNode& node, const int64_t* integers, c10::IValue* locals) {
  std::array<int64_t, kNumbersMax> scratch;
  Put(node, locals,
      at::_ops::expand::call(First(node, locals), Numbers(node, integers, &scratch), false));
}
void MatrixMultiply(const PreparedNode& node, const int64_t*, c10::IValue* locals) {
  Put(node, locals, at::_ops::mm::call(First(node, locals), Second(node, locals)));
}
void Multiply(const PreparedNode& node, const int64_t*, c10::IValue* locals) {
  Put(node, locals, at::_ops::mul_Tensor::call(First(node, locals), Second(node, locals)));
}
void Add(const PreparedNode& node, const int64_t*, c10::IValue* locals) {
  Put(node, locals,
      at::_ops::add_Tensor::call(First(node, locals), Second(node, locals), node.scalar));
}

struct Form {
  Thunk thunk;
  int tensors;   // leading tensor arguments
  bool list;     // then one list of integers
  int integers;  // or this many integers
};
const std::unordered_map<std::string, Form>& Forms() {
  static const std::unordered_map<std::string, Form> forms = {
      {"aten::view", {View, 1, true, 0}},
      {"aten::_unsafe_view", {UnsafeView, 1, true, 0}},
      {"aten::expand", {Expand, 1, true, 0}},
      {"aten::transpose.int", {Transpose, 1, false, 2}},
      {"aten::t", {T, 1, false, 0}},
      {"aten::unsqueeze", {Unsqueeze, 1, false, 1}},
      {"aten::slice.Tensor", {Slice, 1, false, 4}},
      {"aten::mm", {MatrixMultiply, 2, false, 0}},
      {"aten::mul.Tensor", {Multiply, 2, false, 0}},
      {"aten::add.Tensor", {Add, 2, false, 0}},
  };
  return forms;
}

const ArgPatch* PatchAt(const PreparedNode& node, size_t position) {
  for (const ArgPatch& patch : node.patches) {
    if (patch.position == position) return &patch;
  }
  return nullptr;
}

// Integer argument at `position`: constant or patched; None takes what slice means by it.
bool ReadInteger(PreparedNode* node, size_t position, int64_t none) {
  if (const ArgPatch* patch = PatchAt(*node, position)) {
    if (patch->kind != ArgPatch::Kind::kInteger) return false;
    node->numbers.push_back(patch->integers[0]);
    return true;
  }
  const c10::IValue& constant = node->stack[position];
  if (!constant.isInt() && !constant.isNone()) return false;
  node->numbers.push_back({constant.isNone() ? none : constant.toInt(), -1});
  return true;
}

bool ReadList(PreparedNode* node, size_t position) {
  if (const ArgPatch* patch = PatchAt(*node, position)) {
    if (patch->kind != ArgPatch::Kind::kIntegerList || patch->integers.size() > kNumbersMax)
      return false;
    node->numbers = patch->integers;
    return true;
  }
  if (!node->stack[position].isIntList()) return false;
  for (const int64_t number : node->stack[position].toIntVector()) {
    if (!c10::SymInt::check_range(number)) return false;
    node->numbers.push_back({number, -1});
    node->numbers_constant.push_back(number);
  }
  return true;
}

bool Fill(const std::string& name, const Form& form, PreparedNode* node) {
  if (node->outputs.size() != 1) return false;
  for (int i = 0; i < form.tensors; ++i) {
    const auto position = static_cast<size_t>(i);
    const ArgPatch* patch = PatchAt(*node, position);
    if (patch != nullptr && patch->kind == ArgPatch::Kind::kTensor) {
      node->in[position] = patch->locals[0];
    } else if (patch == nullptr && i == 1 && node->stack[position].isTensor()) {
      node->constant = node->stack[position].toTensor();
    } else {
      return false;
    }
  }
  const auto next = static_cast<size_t>(form.tensors);
  if (form.list && !ReadList(node, next)) return false;
  for (int i = 0; i < form.integers; ++i) {
    if (!ReadInteger(node, next + static_cast<size_t>(i), i == 2 ? INT64_MAX : 0)) return false;
  }
  if (name == "aten::add.Tensor") {
    if (PatchAt(*node, 2) != nullptr || !node->stack[2].isScalar()) return false;
    node->scalar = node->stack[2].toScalar();
  }
  if (name == "aten::expand") return !(node->stack[2].isBool() && node->stack[2].toBool());
  return true;
}

}  // namespace

Thunk FindThunk(const std::string& name, PreparedNode* node) {
  const auto form = Forms().find(name);
  if (form == Forms().end()) return nullptr;
  if (Fill(name, form->second, node)) return form->second.thunk;
  node->in[0] = node->in[1] = kNoLocal;
  node->numbers.clear();
  node->numbers_constant.clear();
  return nullptr;
}

}  // namespace slice::executor
