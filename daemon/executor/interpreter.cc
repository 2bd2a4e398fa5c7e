#include "daemon/executor/interpreter.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <new>

namespace slice::executor {
namespace {

c10::IValue PatchedValue(const ArgPatch& patch, const int64_t* integers,
                         const c10::IValue* locals) {
  switch (patch.kind) {
    case ArgPatch::Kind::kTensor:
      return locals[patch.locals[0]];
    case ArgPatch::Kind::kTensorList: {
      c10::List<at::Tensor> list;
      list.reserve(patch.locals.size());
      for (const uint32_t local : patch.locals) list.push_back(locals[local].toTensor());
      return list;
    }
    case ArgPatch::Kind::kOptionalTensorList: {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(patch.locals.size());
      for (const uint32_t local : patch.locals) {
        list.push_back(local == kNoLocal ? std::optional<at::Tensor>() : locals[local].toTensor());
      }
      return list;
    }
    case ArgPatch::Kind::kInteger:
      return patch.integers[0].Get(integers);
    case ArgPatch::Kind::kIntegerList: {
      c10::List<int64_t> list;
      list.reserve(patch.integers.size());
      for (const IntSource& source : patch.integers) list.push_back(source.Get(integers));
      return list;
    }
    case ArgPatch::Kind::kWrappedInteger: {
      at::Tensor tensor = at::scalar_tensor(patch.integers[0].Get(integers), at::kLong);
      tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
      return tensor;
    }
  }
  return {};
}

void TakeResults(const PreparedNode& node, std::vector<c10::IValue>* stack, c10::IValue* locals) {
  if (node.returns_list) {
    const c10::List<at::Tensor> list = stack->front().toTensorList();
    TORCH_CHECK(list.size() >= node.outputs.size(), "the operator returned ", list.size(),
                " tensors, the template has ", node.outputs.size());
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] != kNoLocal) locals[node.outputs[i]] = list.get(i);
    }
    return;
  }
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.outputs[i] != kNoLocal) locals[node.outputs[i]] = std::move((*stack)[i]);
  }
}

void RunNode(const PreparedNode& node, const int64_t* integers, Frame* frame) {
  c10::IValue* locals = frame->locals.data();
  if (node.thunk != nullptr) {
    node.thunk(node, integers, locals);
  } else {
    std::vector<c10::IValue>& stack = frame->stack;
    stack.clear();
    auto patch = node.patches.begin();
    for (size_t position = 0; position < node.stack.size(); ++position) {
      if (patch != node.patches.end() && patch->position == position) {
        stack.push_back(PatchedValue(*patch, integers, locals));
        ++patch;
      } else {
        stack.push_back(node.stack[position]);
      }
    }
    node.handle.callBoxed(&stack);
    TakeResults(node, &stack, locals);
    stack.clear();
  }
  for (const uint32_t local : node.releases) locals[local] = c10::IValue();
}

std::string NodeText(const Program& program, uint32_t index, const char* what) {
  const proto::GraphTemplate& source = program.source().program();
  const proto::Node& node = source.nodes(static_cast<int>(index));
  std::string text = "node " + std::to_string(index) + " (" +
                     source.operators(static_cast<int>(node.operator_index())) + "): " + what;
  const size_t line = text.find('\n');
  if (line != std::string::npos) text.resize(line);
  return text;
}

// Turns torch's exceptions into a Status. what() would symbolise a backtrace (milliseconds): never
// called.
template <typename Run>
Status Guarded(const Program& program, const uint32_t& node_index, Run run) {
  try {
    run();
    return Status::Ok();
  } catch (const c10::OutOfMemoryError& error) {
    return {StatusCode::kNoMemory, NodeText(program, node_index, error.what_without_backtrace())};
  } catch (const c10::Error& error) {
    return {StatusCode::kOpFailed, NodeText(program, node_index, error.what_without_backtrace())};
  } catch (const std::bad_alloc&) {
    return {StatusCode::kNoMemory, NodeText(program, node_index, "out of memory")};
  } catch (const std::exception& error) {
    return {StatusCode::kOpFailed, NodeText(program, node_index, error.what())};
  }
}

}  // namespace

void PrepareFrame(const PreparedGroup& group, Frame* frame) {
  frame->locals.clear();
  frame->locals.resize(group.local_count);
}

Status RunGroup(const Program& program, const PreparedGroup& group, const int64_t* integers,
                Frame* frame, RunTrace* trace) {
  uint32_t index = 0;
  Status status = Guarded(program, index, [&] {
    for (const PreparedNode& node : group.nodes) {
      index = node.index;
      trace->began_write |= node.writes_static;
      RunNode(node, integers, frame);
    }
  });
  if (!status.ok()) frame->stack.clear();
  return status;
}

Result<at::Tensor> RunHoisted(const Program& program, const HoistedView& view,
                              const at::Tensor& source) {
  Frame frame;
  frame.locals.resize(2);
  frame.locals[0] = source;
  const uint32_t index = view.node.index;
  SLICE_RETURN_IF_ERROR(Guarded(program, index, [&] { RunNode(view.node, nullptr, &frame); }));
  return frame.locals[1].toTensor();
}

}  // namespace slice::executor
