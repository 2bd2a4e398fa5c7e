// Builds graph templates for tests: rows of "y = op(a, b)" over 2-D float32 values, one group per
// call of Group().
#pragma once

#include <google/protobuf/text_format.h>

#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"
#include "slice/proto/template.pb.h"

namespace slice::testing {

class TemplateBuilder {
 public:
  TemplateBuilder() { program.set_format(1); }

  static proto::Expr Constant(int64_t value) {
    proto::Expr expr;
    expr.set_constant(value);
    return expr;
  }
  static proto::Expr Symbol(uint32_t index) {
    proto::Expr expr;
    expr.set_symbol(index);
    return expr;
  }

  uint32_t AddSymbol(const std::string& name, int64_t min, int64_t max) {
    proto::Symbol* symbol = program.add_symbols();
    symbol->set_name(name);
    symbol->set_min(min);
    symbol->set_max(max);
    return static_cast<uint32_t>(program.symbols_size() - 1);
  }
  // Dense value. Sizes: constants; use the Expr overload for symbols.
  uint32_t Value(std::initializer_list<int64_t> sizes, proto::DType dtype = proto::FLOAT32) {
    std::vector<proto::Expr> exprs;
    for (const int64_t size : sizes) exprs.push_back(Constant(size));
    return Value(exprs, dtype);
  }
  uint32_t Value(const std::vector<proto::Expr>& sizes, proto::DType dtype = proto::FLOAT32) {
    proto::TensorMeta* meta = program.add_values()->mutable_meta();
    meta->set_dtype(dtype);
    for (size_t d = 0; d < sizes.size(); ++d) {
      *meta->add_sizes() = sizes[d];
      proto::Expr* stride = meta->add_strides();
      if (d + 1 == sizes.size()) {
        stride->set_constant(1);
        continue;
      }
      stride->mutable_call()->set_kind(proto::Expr::MUL);
      for (size_t k = d + 1; k < sizes.size(); ++k) *stride->mutable_call()->add_args() = sizes[k];
    }
    return static_cast<uint32_t>(program.values_size() - 1);
  }
  uint32_t Input(const std::string& name, proto::Input::Kind kind, uint32_t value,
                 bool written = false) {
    proto::Input* input = program.add_inputs();
    input->set_name(name);
    input->set_kind(kind);
    input->set_value(value);
    input->set_written(written);
    return static_cast<uint32_t>(program.inputs_size() - 1);
  }
  uint32_t Operator(const std::string& name) {
    for (int i = 0; i < program.operators_size(); ++i) {
      if (program.operators(i) == name) return static_cast<uint32_t>(i);
    }
    program.add_operators(name);
    return static_cast<uint32_t>(program.operators_size() - 1);
  }
  // Tensor arguments by schema name.
  proto::Node* Node(const std::string& op,
                    std::initializer_list<std::pair<const char*, uint32_t>> args,
                    std::initializer_list<int64_t> outputs) {
    proto::Node* node = program.add_nodes();
    node->set_operator_index(Operator(op));
    for (const auto& [name, value] : args) {
      proto::Argument* arg = node->add_args();
      arg->set_name(name);
      arg->set_value(value);
    }
    for (const int64_t output : outputs) node->add_outputs(output);
    return node;
  }
  static void Integer(proto::Node* node, const std::string& name, int64_t value) {
    proto::Argument* arg = node->add_args();
    arg->set_name(name);
    arg->mutable_integer()->set_constant(value);
  }
  // Closes a group over the nodes added since the last one. reads, writes: input indices.
  proto::Group* Group(const std::string& name, std::vector<uint32_t> reads = {},
                      std::vector<uint32_t> writes = {}) {
    proto::Group* group = program.add_groups();
    group->set_name(name);
    group->set_signature(1 + static_cast<uint64_t>(program.groups_size()));
    group->set_first_node(next_node_);
    group->set_node_count(static_cast<uint32_t>(program.nodes_size()) - next_node_);
    next_node_ = static_cast<uint32_t>(program.nodes_size());
    for (const uint32_t input : reads) group->add_reads(input);
    for (const uint32_t input : writes) group->add_writes(input);
    return group;
  }
  void Output(uint32_t value) { program.add_outputs()->set_value(value); }
  std::string Serialize() const { return program.SerializeAsString(); }

  proto::GraphTemplate program;

 private:
  uint32_t next_node_ = 0;
};

inline proto::GraphTemplate ReadTextTemplate(const std::string& path) {
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  proto::GraphTemplate program;
  SLICE_CHECK(google::protobuf::TextFormat::ParseFromString(text, &program), path.c_str());
  return program;
}

}  // namespace slice::testing
