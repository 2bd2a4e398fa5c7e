// Turns tenant bytes into a checked Template. Every count and index is bounded before it is used;
// every refusal says which node, value, group or input is wrong.
#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "daemon/graph/template.h"
#include "daemon/graph/template_counts.h"

namespace slice::graph {
namespace {

constexpr int kDimensionsMax = 64;
constexpr size_t kOperatorNameMax = 128;

bool IsInteger(proto::DType dtype) {
  switch (dtype) {
    case proto::INT64:
    case proto::INT32:
    case proto::INT16:
    case proto::INT8:
    case proto::UINT8:
    case proto::BOOL:
      return true;
    default:
      return false;
  }
}

bool IsStaticKind(proto::Input::Kind kind) {
  return kind == proto::Input::STATIC_CONSTANT || kind == proto::Input::STATIC_MUTABLE ||
         kind == proto::Input::MANAGED;
}

void SortUnique(std::vector<uint32_t>* list) {
  std::sort(list->begin(), list->end());
  list->erase(std::unique(list->begin(), list->end()), list->end());
}

}  // namespace

class TemplateParser {
 public:
  explicit TemplateParser(const Limits& limits) : limits_(limits) {}

  Result<std::shared_ptr<const Template>> Run(std::string_view serialized) {
    if (serialized.size() > limits_.template_bytes_max || serialized.size() > INT32_MAX) {
      return Error(StatusCode::kOverflow, "template has %zu bytes, the limit is %llu",
                   serialized.size(), static_cast<unsigned long long>(limits_.template_bytes_max));
    }
    SLICE_RETURN_IF_ERROR(CheckCounts(serialized, limits_));
    out_ = std::shared_ptr<Template>(new Template());
    out_->limits_ = limits_;
    if (!out_->program_.ParseFromArray(serialized.data(), static_cast<int>(serialized.size()))) {
      return Error(StatusCode::kGraph,
                   "template is not a GraphTemplate message, or nests too deep");
    }
    if (program().format() != kTemplateFormat) {
      return Error(StatusCode::kGraph, "template format is %u, this daemon reads %u",
                   program().format(), kTemplateFormat);
    }
    SLICE_RETURN_IF_ERROR(CheckNames(program(), limits_));
    out_->name_ = program().metadata().model();
    SLICE_RETURN_IF_ERROR(ReadSymbols());
    SLICE_RETURN_IF_ERROR(ReadValues());
    SLICE_RETURN_IF_ERROR(ReadConstants());
    SLICE_RETURN_IF_ERROR(ReadInputs());
    SLICE_RETURN_IF_ERROR(CheckOperators());
    SLICE_RETURN_IF_ERROR(ReadGroups());
    SLICE_RETURN_IF_ERROR(ReadNodes());
    SLICE_RETURN_IF_ERROR(ReadOutputs());
    CollectCrossing();
    CollectEdges();
    out_->PlanBind();
    out_->content_hash_ = ContentHash(serialized);
    return std::shared_ptr<const Template>(std::move(out_));
  }

 private:
  const proto::GraphTemplate& program() const { return out_->program_; }
  std::string NodeName(uint32_t node) const {
    const uint32_t op = program().nodes(static_cast<int>(node)).operator_index();
    std::string text = "node " + std::to_string(node);
    if (op < static_cast<uint32_t>(program().operators_size())) {
      text += " (" + program().operators(static_cast<int>(op)) + ")";
    }
    return text;
  }
  std::string GroupName(uint32_t group) const {
    return "group " + std::to_string(group) + " '" +
           program().groups(static_cast<int>(group)).name() + "'";
  }
  std::string InputName(uint32_t input) const {
    return "input " + std::to_string(input) + " '" +
           program().inputs(static_cast<int>(input)).name() + "'";
  }
  uint32_t value_count() const { return static_cast<uint32_t>(out_->values_.size()); }

  // Equal expressions are compiled once: most sizes of a template repeat.
  Result<ExprIndex> Compile(const proto::Expr& expr) {
    expr.SerializeToString(&key_);
    const auto found = compiled_.find(key_);
    if (found != compiled_.end()) return found->second;
    SLICE_ASSIGN_OR_RETURN(const ExprIndex index,
                           out_->expressions_.Add(expr, out_->symbol_count(), limits_));
    compiled_.emplace(key_, index);
    return index;
  }
  Result<ExprIndex> Compile(const std::string& where, const proto::Expr& expr) {
    Result<ExprIndex> index = Compile(expr);
    if (!index.ok())
      return Error(index.status().code(), "%s: %s", where.c_str(), index.status().text().c_str());
    return index;
  }

  Status ReadSymbols() {
    for (int i = 0; i < program().symbols_size(); ++i) {
      const proto::Symbol& symbol = program().symbols(i);
      if (symbol.min() > symbol.max()) {
        return Error(StatusCode::kGraph, "symbol %d '%s': range %lld to %lld is empty", i,
                     symbol.name().c_str(), static_cast<long long>(symbol.min()),
                     static_cast<long long>(symbol.max()));
      }
    }
    return Status::Ok();
  }

  Status ReadValues() {
    out_->values_.resize(static_cast<size_t>(program().values_size()));
    producer_.assign(value_count(), kNoGroup);
    defined_.assign(value_count(), false);
    for (uint32_t v = 0; v < value_count(); ++v) {
      const proto::Value& value = program().values(static_cast<int>(v));
      if (!value.has_meta()) continue;
      const proto::TensorMeta& meta = value.meta();
      ValueShape& shape = out_->values_[v];
      const std::string where = "value " + std::to_string(v);
      shape.dtype = meta.dtype();
      shape.item_bytes = ItemBytes(meta.dtype());
      shape.is_integer = IsInteger(meta.dtype());
      if (shape.item_bytes == 0) {
        return Error(StatusCode::kGraph, "%s: unknown dtype %d", where.c_str(),
                     static_cast<int>(meta.dtype()));
      }
      if (meta.sizes_size() != meta.strides_size()) {
        return Error(StatusCode::kGraph, "%s: %d sizes but %d strides", where.c_str(),
                     meta.sizes_size(), meta.strides_size());
      }
      if (meta.sizes_size() > kDimensionsMax) {
        return Error(StatusCode::kOverflow, "%s: %d dimensions, the limit is %d", where.c_str(),
                     meta.sizes_size(), kDimensionsMax);
      }
      for (const proto::Expr& size : meta.sizes()) {
        SLICE_ASSIGN_OR_RETURN(const ExprIndex index, Compile(where + ", size", size));
        shape.sizes.push_back(index);
      }
      for (const proto::Expr& stride : meta.strides()) {
        SLICE_ASSIGN_OR_RETURN(const ExprIndex index, Compile(where + ", stride", stride));
        shape.strides.push_back(index);
      }
      if (meta.has_storage_offset()) {
        SLICE_ASSIGN_OR_RETURN(shape.storage_offset,
                               Compile(where + ", storage offset", meta.storage_offset()));
      }
    }
    return Status::Ok();
  }

  // Marks a value as defined. Errors: GRAPH (index, second definition, no tensor).
  Status Define(const std::string& where, uint64_t value, bool needs_tensor) {
    if (value >= value_count()) {
      return Error(StatusCode::kGraph, "%s defines value %llu, there are %u", where.c_str(),
                   static_cast<unsigned long long>(value), value_count());
    }
    if (defined_[value]) {
      return Error(StatusCode::kGraph, "%s defines value %llu, which is defined already",
                   where.c_str(), static_cast<unsigned long long>(value));
    }
    if (needs_tensor && out_->values_[value].item_bytes == 0) {
      return Error(StatusCode::kGraph, "%s defines value %llu, which has no tensor type",
                   where.c_str(), static_cast<unsigned long long>(value));
    }
    defined_[value] = true;
    return Status::Ok();
  }

  Status ReadConstants() {
    for (int i = 0; i < program().constants_size(); ++i) {
      const proto::Constant& constant = program().constants(i);
      const std::string where = "constant " + std::to_string(i);
      SLICE_RETURN_IF_ERROR(Define(where, constant.value(), true));
      if (constant.data().size() > limits_.constant_bytes_max) {
        return Error(StatusCode::kOverflow, "%s has %zu bytes, the limit is %u", where.c_str(),
                     constant.data().size(), limits_.constant_bytes_max);
      }
      const proto::TensorMeta& meta = program().values(static_cast<int>(constant.value())).meta();
      // Symbol-free and dense: its bytes are in the template.
      ExprTable scratch;
      int64_t elements = 1;
      for (int d = meta.sizes_size() - 1; d >= 0; --d) {
        const Result<ExprIndex> size = scratch.Add(meta.sizes(d), 0, limits_);
        const Result<ExprIndex> stride = scratch.Add(meta.strides(d), 0, limits_);
        if (!size.ok() || !stride.ok()) {
          return Error(StatusCode::kGraph, "%s: its shape must not depend on symbols",
                       where.c_str());
        }
        SLICE_ASSIGN_OR_RETURN(const int64_t size_value, scratch.Evaluate(*size, {}));
        SLICE_ASSIGN_OR_RETURN(const int64_t stride_value, scratch.Evaluate(*stride, {}));
        if (size_value < 0 || size_value > limits_.constant_bytes_max) {
          return Error(StatusCode::kOverflow, "%s: size %lld is out of range", where.c_str(),
                       static_cast<long long>(size_value));
        }
        if (size_value > 1 && stride_value != elements) {
          return Error(StatusCode::kGraph, "%s: stride %lld is not the dense %lld", where.c_str(),
                       static_cast<long long>(stride_value), static_cast<long long>(elements));
        }
        elements *= std::max<int64_t>(size_value, 0);
        if (elements > limits_.constant_bytes_max) break;
      }
      const uint64_t bytes =
          static_cast<uint64_t>(elements) * out_->values_[constant.value()].item_bytes;
      if (meta.has_storage_offset() &&
          !(meta.storage_offset().node_case() == proto::Expr::kConstant &&
            meta.storage_offset().constant() == 0)) {
        return Error(StatusCode::kGraph, "%s: storage offset must be 0", where.c_str());
      }
      if (bytes != constant.data().size()) {
        return Error(StatusCode::kGraph, "%s: its shape needs %llu bytes, %zu are there",
                     where.c_str(), static_cast<unsigned long long>(bytes), constant.data().size());
      }
    }
    return Status::Ok();
  }

  Status ReadInputs() {
    static_of_value_.clear();
    for (uint32_t i = 0; i < static_cast<uint32_t>(program().inputs_size()); ++i) {
      const proto::Input& source = program().inputs(static_cast<int>(i));
      Input input;
      input.name = source.name();
      input.kind = source.kind();
      input.written = source.written();
      if (input.kind == proto::Input::SYMBOL) {
        SLICE_ASSIGN_OR_RETURN(input.expr, Compile(InputName(i), source.expr()));
      } else if (input.kind == proto::Input::DYNAMIC || IsStaticKind(input.kind)) {
        SLICE_RETURN_IF_ERROR(Define(InputName(i), source.value(), true));
        input.value = source.value();
        dynamic_of_value_.erase(source.value());
        if (input.kind == proto::Input::DYNAMIC) {
          input.dynamic_index = static_cast<uint32_t>(out_->dynamics_.size());
          out_->dynamics_.push_back(i);
          dynamic_of_value_[input.value] = input.dynamic_index;
        } else {
          input.static_index = static_cast<uint32_t>(out_->statics_.size());
          out_->statics_.push_back(i);
          static_of_value_[input.value] = input.static_index;
        }
      } else {
        return Error(StatusCode::kGraph, "%s: unknown kind %d", InputName(i).c_str(),
                     static_cast<int>(input.kind));
      }
      const bool may_be_written =
          input.kind == proto::Input::STATIC_MUTABLE || input.kind == proto::Input::MANAGED;
      if (input.written && !may_be_written) {
        return Error(StatusCode::kGraph,
                     "%s is written, but only mutable and managed tensors may be",
                     InputName(i).c_str());
      }
      out_->inputs_.push_back(std::move(input));
    }
    return Status::Ok();
  }

  Status CheckOperators() {
    for (int i = 0; i < program().operators_size(); ++i) {
      const std::string& name = program().operators(i);
      const bool characters = std::all_of(name.begin(), name.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               c == '_' || c == ':' || c == '.';
      });
      if (!characters || name.size() > kOperatorNameMax || name.find("::") == std::string::npos) {
        return Error(StatusCode::kGraph,
                     "operator %d: not a name of the form namespace::name.overload", i);
      }
    }
    return Status::Ok();
  }

  Status ReadGroups() {
    if (program().nodes_size() == 0) return Error(StatusCode::kGraph, "template has no nodes");
    uint64_t next = 0;
    group_of_node_.resize(static_cast<size_t>(program().nodes_size()));
    for (uint32_t g = 0; g < static_cast<uint32_t>(program().groups_size()); ++g) {
      const proto::Group& source = program().groups(static_cast<int>(g));
      if (source.first_node() != next || source.node_count() == 0) {
        return Error(StatusCode::kGraph,
                     "%s: %u nodes from node %u; groups must partition the nodes, next is %llu",
                     GroupName(g).c_str(), source.node_count(), source.first_node(),
                     static_cast<unsigned long long>(next));
      }
      next += source.node_count();
      if (next > group_of_node_.size()) {
        return Error(StatusCode::kGraph, "%s: ends behind node %zu, the last one",
                     GroupName(g).c_str(), group_of_node_.size() - 1);
      }
      std::fill_n(group_of_node_.begin() + source.first_node(), source.node_count(), g);
      SLICE_RETURN_IF_ERROR(ReadGroup(g, source));
    }
    if (next != group_of_node_.size()) {
      return Error(StatusCode::kGraph, "groups cover %llu of %zu nodes",
                   static_cast<unsigned long long>(next), group_of_node_.size());
    }
    return Status::Ok();
  }

  Status ReadGroup(uint32_t g, const proto::Group& source) {
    Group group;
    group.name = source.name();
    group.signature = source.signature();
    for (const auto* list : {&source.inputs(), &source.outputs()}) {
      for (const uint32_t value : *list) {
        if (value >= value_count()) {
          return Error(StatusCode::kGraph, "%s lists value %u, there are %u", GroupName(g).c_str(),
                       value, value_count());
        }
      }
    }
    for (const bool writes : {false, true}) {
      for (const uint32_t input : writes ? source.writes() : source.reads()) {
        if (input >= out_->inputs_.size()) {
          return Error(StatusCode::kGraph, "%s %s input %u, there are %zu", GroupName(g).c_str(),
                       writes ? "writes" : "reads", input, out_->inputs_.size());
        }
        const Input& target = out_->inputs_[input];
        if (!target.is_static() || (writes && !target.written)) {
          return Error(StatusCode::kGraph, "%s lists %s as %s, but it is not %s",
                       GroupName(g).c_str(), InputName(input).c_str(), writes ? "written" : "read",
                       writes ? "declared written" : "a static input");
        }
        (writes ? group.writes : group.reads).push_back(target.static_index);
      }
    }
    SortUnique(&group.reads);
    SortUnique(&group.writes);
    struct Feature {
      bool there;
      const proto::Expr& expr;
      const char* what;
      ExprIndex* index;
    };
    const Feature features[] = {{source.has_workspace_bytes(), source.workspace_bytes(),
                                 ", workspace_bytes", &group.workspace_bytes},
                                {source.has_flops(), source.flops(), ", flops", &group.flops},
                                {source.has_bytes(), source.bytes(), ", bytes", &group.bytes}};
    for (const Feature& feature : features) {
      if (!feature.there) continue;
      SLICE_ASSIGN_OR_RETURN(*feature.index, Compile(GroupName(g) + feature.what, feature.expr));
    }
    out_->groups_.push_back(std::move(group));
    return Status::Ok();
  }

  Status ReadNodes() {
    // Who will define each value, to tell "defined later" from "never defined".
    for (uint32_t n = 0; n < static_cast<uint32_t>(program().nodes_size()); ++n) {
      const proto::Node& node = program().nodes(static_cast<int>(n));
      if (node.operator_index() >= static_cast<uint32_t>(program().operators_size())) {
        return Error(StatusCode::kGraph, "node %u calls operator %u, there are %d", n,
                     node.operator_index(), program().operators_size());
      }
      names_.clear();
      for (const proto::Argument& arg : node.args()) SLICE_RETURN_IF_ERROR(ReadArgument(n, arg));
      for (const int64_t output : node.outputs()) {
        if (output == -1) continue;
        if (output < -1) {
          return Error(StatusCode::kGraph, "%s: output %lld is neither a value nor -1",
                       NodeName(n).c_str(), static_cast<long long>(output));
        }
        SLICE_RETURN_IF_ERROR(Define(NodeName(n), static_cast<uint64_t>(output), false));
        producer_[static_cast<size_t>(output)] = group_of_node_[n];
      }
    }
    return Status::Ok();
  }

  Status ReadArgument(uint32_t n, const proto::Argument& arg) {
    if (!names_.insert(arg.name()).second) {
      return Error(StatusCode::kGraph, "%s: argument '%s' is given twice", NodeName(n).c_str(),
                   arg.name().c_str());
    }
    switch (arg.kind_case()) {
      case proto::Argument::kValue:
        return Use(n, arg, arg.value());
      case proto::Argument::kValues:
        for (const int64_t value : arg.values().value()) {
          if (value == -1) continue;
          if (value < -1) {
            return Error(StatusCode::kGraph, "%s: argument '%s': %lld is neither a value nor -1",
                         NodeName(n).c_str(), arg.name().c_str(), static_cast<long long>(value));
          }
          SLICE_RETURN_IF_ERROR(Use(n, arg, static_cast<uint64_t>(value)));
        }
        return Status::Ok();
      case proto::Argument::kInteger:
        return CheckExpr(n, arg, arg.integer());
      case proto::Argument::kIntegers:
        for (const proto::Expr& expr : arg.integers().value())
          SLICE_RETURN_IF_ERROR(CheckExpr(n, arg, expr));
        return Status::Ok();
      case proto::Argument::KIND_NOT_SET:
        return Error(StatusCode::kGraph, "%s: argument '%s' has no content", NodeName(n).c_str(),
                     arg.name().c_str());
      default:
        return Status::Ok();
    }
  }

  Status CheckExpr(uint32_t n, const proto::Argument& arg, const proto::Expr& expr) {
    const Result<ExprIndex> index = Compile(expr);
    if (index.ok()) return Status::Ok();
    return Error(index.status().code(), "%s: argument '%s': %s", NodeName(n).c_str(),
                 arg.name().c_str(), index.status().text().c_str());
  }

  Status Use(uint32_t n, const proto::Argument& arg, uint64_t value) {
    if (value >= value_count()) {
      return Error(StatusCode::kGraph, "%s: argument '%s' uses value %llu, there are %u",
                   NodeName(n).c_str(), arg.name().c_str(), static_cast<unsigned long long>(value),
                   value_count());
    }
    const auto v = static_cast<uint32_t>(value);
    if (!defined_[v]) {
      return Error(StatusCode::kGraph,
                   "%s: argument '%s' uses value %u before it is defined (a cycle, or dangling)",
                   NodeName(n).c_str(), arg.name().c_str(), v);
    }
    if (out_->values_[v].item_bytes == 0) {
      return Error(StatusCode::kGraph, "%s: argument '%s' uses value %u, which has no tensor type",
                   NodeName(n).c_str(), arg.name().c_str(), v);
    }
    const uint32_t g = group_of_node_[n];
    Group& group = out_->groups_[g];
    if (producer_[v] != kNoGroup) {
      if (producer_[v] != g) group.values_in.push_back(v);
    } else if (const auto dynamic = dynamic_of_value_.find(v); dynamic != dynamic_of_value_.end()) {
      group.dynamic_in.push_back(dynamic->second);
    } else if (const auto fixed = static_of_value_.find(v); fixed != static_of_value_.end()) {
      const bool listed =
          std::binary_search(group.reads.begin(), group.reads.end(), fixed->second) ||
          std::binary_search(group.writes.begin(), group.writes.end(), fixed->second);
      if (!listed) {
        return Error(StatusCode::kGraph,
                     "%s uses %s, but %s lists it neither in reads nor in writes",
                     NodeName(n).c_str(), InputName(out_->statics_[fixed->second]).c_str(),
                     GroupName(g).c_str());
      }
    }
    return Status::Ok();
  }

  Status ReadOutputs() {
    for (int i = 0; i < program().outputs_size(); ++i) {
      const proto::Output& output = program().outputs(i);
      switch (output.kind_case()) {
        case proto::Output::kValue: {
          const uint32_t value = output.value();
          if (value >= value_count() || producer_[value] == kNoGroup) {
            return Error(StatusCode::kGraph, "output %d is value %u, which no node makes", i,
                         value);
          }
          if (out_->values_[value].item_bytes == 0) {
            return Error(StatusCode::kGraph, "output %d is value %u, which has no tensor type", i,
                         value);
          }
          out_->groups_[producer_[value]].results.push_back(
              static_cast<uint32_t>(out_->results_.size()));
          out_->results_.push_back(value);
          break;
        }
        case proto::Output::kExpr: {
          SLICE_ASSIGN_OR_RETURN(const ExprIndex index,
                                 Compile("output " + std::to_string(i), output.expr()));
          static_cast<void>(index);
          break;
        }
        case proto::Output::kAliasOfInput:
          if (output.alias_of_input() >= out_->inputs_.size()) {
            return Error(StatusCode::kGraph, "output %d is input %u, there are %zu", i,
                         output.alias_of_input(), out_->inputs_.size());
          }
          break;
        case proto::Output::kNone:
          break;
        default:
          return Error(StatusCode::kGraph, "output %d is empty", i);
      }
    }
    return Status::Ok();
  }

  void CollectCrossing() {
    out_->crossing_of_value_.assign(value_count(), kNoIndex);
    for (uint32_t g = 0; g < out_->groups_.size(); ++g) {
      Group& group = out_->groups_[g];
      SortUnique(&group.values_in);
      SortUnique(&group.dynamic_in);
      for (const uint32_t value : group.values_in) {
        uint32_t& index = out_->crossing_of_value_[value];
        if (index == kNoIndex) {
          index = static_cast<uint32_t>(out_->crossing_.size());
          out_->crossing_.push_back({value, producer_[value], {}});
          out_->groups_[producer_[value]].values_out.push_back(value);
        }
        out_->crossing_[index].consumers.push_back(g);
      }
    }
    for (Group& group : out_->groups_) SortUnique(&group.values_out);
  }

  // Data edges, and for each static input read-after-write, write-after-read and write-after-write
  // in group order.
  void CollectEdges() {
    struct Access {
      uint32_t writer = kNoGroup;
      std::vector<uint32_t> readers;  // since the last write
    };
    std::vector<Access> accesses(out_->statics_.size());
    for (uint32_t g = 0; g < out_->groups_.size(); ++g) {
      Group& group = out_->groups_[g];
      for (const uint32_t value : group.values_in) group.predecessors.push_back(producer_[value]);
      for (const uint32_t position : group.reads) {
        if (accesses[position].writer != kNoGroup)
          group.predecessors.push_back(accesses[position].writer);
      }
      for (const uint32_t position : group.writes) {
        Access& access = accesses[position];
        if (access.writer != kNoGroup) group.predecessors.push_back(access.writer);
        group.predecessors.insert(group.predecessors.end(), access.readers.begin(),
                                  access.readers.end());
        access.readers.clear();
        access.writer = g;
      }
      for (const uint32_t position : group.reads) {
        const bool also_writes =
            std::binary_search(group.writes.begin(), group.writes.end(), position);
        const bool matters = out_->inputs_[out_->statics_[position]].written;
        if (matters && !also_writes) accesses[position].readers.push_back(g);
      }
      SortUnique(&group.predecessors);
      for (const uint32_t before : group.predecessors)
        out_->groups_[before].successors.push_back(g);
    }
  }

  const Limits& limits_;
  std::shared_ptr<Template> out_;
  std::vector<bool> defined_;
  std::vector<uint32_t> producer_;  // group by value
  std::vector<uint32_t> group_of_node_;
  std::unordered_map<uint32_t, uint32_t> dynamic_of_value_;
  std::unordered_map<uint32_t, uint32_t> static_of_value_;
  std::unordered_map<std::string, ExprIndex> compiled_;
  std::unordered_set<std::string> names_;
  std::string key_;
};

Result<std::shared_ptr<const Template>> Template::Parse(std::string_view serialized,
                                                        const Limits& limits) {
  // Protobuf would write a line to stderr for every bad string: a tenant could fill the log.
  [[maybe_unused]] static const auto previous = google::protobuf::SetLogHandler(nullptr);
  return TemplateParser(limits).Run(serialized);
}

}  // namespace slice::graph
