#include "daemon/executor/program.h"

#include <ATen/ATen.h>
#include <ATen/core/function_schema.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "common/checked.h"
#include "daemon/executor/allowed_operators.h"
#include "daemon/executor/arguments.h"
#include "daemon/executor/tensors.h"

namespace slice::executor {
namespace {

// Results share their argument's memory although the schema does not say so.
bool AliasesSilently(const std::string& name) { return name == "aten::_unsafe_view"; }

// Views with one tensor argument and one result that may be computed once per binding.
bool IsHoistable(const std::string& name) {
  static const std::unordered_set<std::string> views = {
      "aten::view",         "aten::t",          "aten::transpose.int", "aten::permute",
      "aten::slice.Tensor", "aten::expand",     "aten::detach",        "aten::unsqueeze",
      "aten::squeeze.dim",  "aten::select.int", "aten::alias"};
  return views.contains(name);
}

// Whose memory a value is.
struct Root {
  enum class Kind : uint8_t { kFresh, kStatic, kDynamic, kConstant, kMixed };
  Kind kind = Kind::kFresh;
  uint32_t index = 0;  // kFresh: group that made it; kStatic: position
  bool operator==(const Root&) const = default;
};

std::pair<std::string, std::string> SplitName(const std::string& name) {
  const size_t colons = name.find("::");
  const size_t dot = name.find('.', colons == std::string::npos ? 0 : colons);
  return dot == std::string::npos ? std::pair(name, std::string())
                                  : std::pair(name.substr(0, dot), name.substr(dot + 1));
}

bool Contains(const std::vector<uint32_t>& sorted, uint32_t value) {
  return std::binary_search(sorted.begin(), sorted.end(), value);
}

}  // namespace

class ProgramBuilder {
 public:
  explicit ProgramBuilder(std::shared_ptr<const graph::Template> source) : out_(new Program()) {
    out_->source_ = std::move(source);
  }

  Result<std::shared_ptr<const Program>> Run() {
    SLICE_RETURN_IF_ERROR(CheckAllowed());
    SLICE_RETURN_IF_ERROR(FindOperators());
    ReadConstants();
    FindInputs();
    out_->groups_.resize(source().groups().size());
    for (uint32_t g = 0; g < source().groups().size(); ++g) SLICE_RETURN_IF_ERROR(ReadGroup(g));
    return std::shared_ptr<const Program>(std::move(out_));
  }

 private:
  const graph::Template& source() const { return *out_->source_; }
  const proto::GraphTemplate& program() const { return source().program(); }
  std::string NodeName(uint32_t n) const {
    return "node " + std::to_string(n) + " (" +
           program().operators(
               static_cast<int>(program().nodes(static_cast<int>(n)).operator_index())) +
           ")";
  }

  Status CheckAllowed() const {
    std::string refused;
    size_t count = 0;
    for (const std::string& name : program().operators()) {
      if (AllowedOperators().contains(name)) continue;
      if (++count > 32) continue;
      if (!refused.empty()) refused += ", ";
      refused += name;
    }
    if (count == 0) return Status::Ok();
    return Error(StatusCode::kOpNotAllowed, "%zu operators are not on the allow-list: %s", count,
                 refused.c_str());
  }

  Status FindOperators() {
    for (int i = 0; i < program().operators_size(); ++i) {
      const auto [name, overload] = SplitName(program().operators(i));
      const auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
      if (!handle.has_value()) {
        return Error(StatusCode::kGraph, "operator %d '%s' does not exist in this torch", i,
                     program().operators(i).c_str());
      }
      operators_.push_back(*handle);
    }
    return Status::Ok();
  }

  void ReadConstants() {
    root_.resize(source().values().size());
    for (const proto::Constant& constant : program().constants()) {
      const graph::ValueShape& shape = source().values()[constant.value()];
      std::vector<int64_t> sizes;
      for (const graph::ExprIndex size : shape.sizes) {
        sizes.push_back(source().expressions().Evaluate(size, {}).value());  // the parser found it
                                                                             // free of symbols
      }
      at::Tensor tensor = at::empty(sizes, *ToScalarType(shape.dtype));
      if (!constant.data().empty())
        std::memcpy(tensor.data_ptr(), constant.data().data(), constant.data().size());
      origin_[constant.value()] = {External::Kind::kConstant,
                                   static_cast<uint32_t>(out_->constants_.size()), 0};
      root_[constant.value()] = {Root::Kind::kConstant, 0};
      out_->constants_.push_back(std::move(tensor));
    }
  }

  void FindInputs() {
    for (const graph::Input& input : source().inputs()) {
      if (input.is_static()) {
        origin_[input.value] = {External::Kind::kStatic, input.static_index, 0};
        root_[input.value] = {Root::Kind::kStatic, input.static_index};
      } else if (input.kind == proto::Input::DYNAMIC) {
        origin_[input.value] = {External::Kind::kDynamic, input.dynamic_index, 0};
        root_[input.value] = {Root::Kind::kDynamic, input.dynamic_index};
      }
    }
    for (uint32_t r = 0; r < source().results().size(); ++r)
      results_of_[source().results()[r]].push_back(r);
  }

  Status ReadGroup(uint32_t g) {
    group_index_ = g;
    group_ = &out_->groups_[g];
    locals_.clear();
    exported_.clear();
    const proto::Group& group = program().groups(static_cast<int>(g));
    for (uint32_t n = group.first_node(); n < group.first_node() + group.node_count(); ++n) {
      SLICE_RETURN_IF_ERROR(ReadNode(n));
    }
    const graph::Group& derived = source().groups()[g];
    for (const uint32_t value : derived.values_out) AddExport(value);
    for (const uint32_t result : derived.results) AddExport(source().results()[result]);
    for (Export& exported : group_->exports) {
      exported.crossing = source().crossing_index(exported.value);
      const auto results = results_of_.find(exported.value);
      if (results != results_of_.end()) exported.results = results->second;
    }
    FindReleases();
    return Status::Ok();
  }

  void AddExport(uint32_t value) {
    if (!exported_.insert(value).second) return;
    Export exported;
    exported.value = value;
    exported.local = LocalOf(value);
    group_->exports.push_back(std::move(exported));
  }

  // A value from outside gets a local the first time it is used.
  uint32_t LocalOf(uint32_t value) {
    const auto [found, inserted] = locals_.try_emplace(value, group_->local_count);
    if (inserted) {
      ++group_->local_count;
      External external{External::Kind::kCrossing, source().crossing_index(value), found->second};
      if (const auto origin = origin_.find(value); origin != origin_.end()) {
        external.kind = origin->second.kind;
        external.index = origin->second.index;
      }
      group_->externals.push_back(external);
    }
    return found->second;
  }

  Result<IntSource> Integer(const proto::Expr& expr) {
    if (expr.node_case() == proto::Expr::kConstant) return IntSource{expr.constant(), -1};
    expr.SerializeToString(&key_);
    if (const auto found = slot_of_.find(key_); found != slot_of_.end())
      return IntSource{0, found->second};
    SLICE_ASSIGN_OR_RETURN(const graph::ExprIndex index,
                           out_->expressions_.Add(expr, source().symbol_count(), graph::Limits{}));
    const auto slot = static_cast<int32_t>(out_->integers_.size());
    out_->integers_.push_back(index);
    slot_of_.emplace(key_, slot);
    return IntSource{0, slot};
  }

  // Uses `value` in node n: its memory must be listed by the group. Written: must be the group's to
  // write.
  Status CheckAccess(uint32_t n, const c10::Argument& schema, uint32_t value, bool write,
                     bool* writes_static) {
    const Root root = root_[value];
    const graph::Group& group = source().groups()[group_index_];
    const auto refuse = [&](const std::string& why) {
      return Error(StatusCode::kGraph, "%s: argument '%s' (value %u) %s", NodeName(n).c_str(),
                   schema.name().c_str(), value, why.c_str());
    };
    const auto input_name = [&] {
      const uint32_t input = source().statics()[root.index];
      return "input " + std::to_string(input) + " '" + source().inputs()[input].name + "'";
    };
    if (root.kind == Root::Kind::kStatic) {
      const bool listed = Contains(group.writes, root.index) || Contains(group.reads, root.index);
      if (!listed)
        return refuse("is memory of " + input_name() +
                      ", which the group lists neither in reads nor in writes");
      if (write && !Contains(group.writes, root.index)) {
        return refuse("writes " + input_name() + ", which the group does not list in writes");
      }
      if (write) *writes_static = true;
      return Status::Ok();
    }
    if (!write) return Status::Ok();
    if (root.kind == Root::Kind::kFresh && root.index == group_index_) return Status::Ok();
    switch (root.kind) {
      case Root::Kind::kDynamic:
        return refuse("writes a dynamic input");
      case Root::Kind::kConstant:
        return refuse("writes a constant of the template");
      case Root::Kind::kMixed:
        return refuse("writes memory that may belong to several values");
      default:
        return refuse("writes memory of another group");
    }
  }

  Status ReadNode(uint32_t n) {
    const proto::Node& source_node = program().nodes(static_cast<int>(n));
    const std::string& name = program().operators(static_cast<int>(source_node.operator_index()));
    PreparedNode node(operators_[source_node.operator_index()]);
    node.index = n;
    const c10::FunctionSchema& schema = node.handle.schema();
    uint32_t hoist_source = graph::kNoIndex;
    const bool hoist = MayHoist(source_node, name, &hoist_source);
    ArgumentContext context;
    context.local_of = [&](uint32_t value) { return hoist ? 0 : LocalOf(value); };
    context.integer = [this](const proto::Expr& expr) { return Integer(expr); };
    size_t used = 0;
    std::vector<uint32_t> aliased;  // values whose argument may alias a result
    std::vector<uint32_t> tensors;
    for (size_t position = 0; position < schema.arguments().size(); ++position) {
      const c10::Argument& argument = schema.arguments()[position];
      const auto given =
          std::find_if(source_node.args().begin(), source_node.args().end(),
                       [&](const proto::Argument& arg) { return arg.name() == argument.name(); });
      c10::IValue constant;
      if (given == source_node.args().end()) {
        if (!argument.default_value().has_value()) {
          return Error(StatusCode::kGraph, "%s: argument '%s' is missing", NodeName(n).c_str(),
                       argument.name().c_str());
        }
        constant = *argument.default_value();
      } else {
        ++used;
        ArgPatch patch;
        patch.position = static_cast<uint16_t>(position);
        bool patched = false;
        const Status matched =
            MatchArgument(argument, *given, context, &constant, &patch, &patched);
        if (!matched.ok()) {
          return Error(matched.code(), "%s: %s", NodeName(n).c_str(), matched.text().c_str());
        }
        if (patched) node.patches.push_back(std::move(patch));
        const bool write = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
        const auto use = [&](uint32_t value) -> Status {
          tensors.push_back(value);
          if (argument.alias_info() != nullptr) aliased.push_back(value);
          return CheckAccess(n, argument, value, write, &node.writes_static);
        };
        if (given->kind_case() == proto::Argument::kValue)
          SLICE_RETURN_IF_ERROR(use(given->value()));
        for (const int64_t value : given->values().value()) {
          if (value >= 0) SLICE_RETURN_IF_ERROR(use(static_cast<uint32_t>(value)));
        }
        if (write && (given->kind_case() != proto::Argument::kValue)) {
          return Error(StatusCode::kGraph, "%s: argument '%s' is written and must be one tensor",
                       NodeName(n).c_str(), argument.name().c_str());
        }
      }
      node.stack.push_back(std::move(constant));
    }
    if (used != static_cast<size_t>(source_node.args_size())) return UnknownArgument(n, schema);
    if (AliasesSilently(name)) aliased = tensors;
    SLICE_RETURN_IF_ERROR(ReadOutputs(n, schema, aliased, &node));
    if (hoist) {
      Hoist(hoist_source, static_cast<uint32_t>(source_node.outputs(0)), &node);
      return Status::Ok();
    }
    node.thunk = FindThunk(name, &node);
    group_->nodes.push_back(std::move(node));
    return Status::Ok();
  }

  Status UnknownArgument(uint32_t n, const c10::FunctionSchema& schema) const {
    for (const proto::Argument& arg : program().nodes(static_cast<int>(n)).args()) {
      const bool known =
          std::any_of(schema.arguments().begin(), schema.arguments().end(),
                      [&](const c10::Argument& argument) { return argument.name() == arg.name(); });
      if (!known) {
        return Error(StatusCode::kGraph, "%s: the operator has no argument '%s'",
                     NodeName(n).c_str(), arg.name().c_str());
      }
    }
    return Error(StatusCode::kInternal, "%s: arguments do not match", NodeName(n).c_str());
  }

  Status ReadOutputs(uint32_t n, const c10::FunctionSchema& schema,
                     const std::vector<uint32_t>& aliased, PreparedNode* node) {
    const auto& outputs = program().nodes(static_cast<int>(n)).outputs();
    node->returns_list = schema.returns().size() == 1 &&
                         schema.returns()[0].type()->kind() == c10::TypeKind::ListType;
    if (!node->returns_list && static_cast<size_t>(outputs.size()) > schema.returns().size()) {
      return Error(StatusCode::kGraph, "%s: %d outputs, the operator returns %zu",
                   NodeName(n).c_str(), outputs.size(), schema.returns().size());
    }
    for (int i = 0; i < outputs.size(); ++i) {
      if (outputs.Get(i) < 0) {
        node->outputs.push_back(kNoLocal);
        continue;
      }
      const auto value = static_cast<uint32_t>(outputs.Get(i));
      const c10::Argument& returned =
          schema.returns()[node->returns_list ? 0 : static_cast<size_t>(i)];
      const bool tensor =
          node->returns_list || returned.type()->kind() == c10::TypeKind::TensorType;
      if (!tensor || source().values()[value].item_bytes == 0) {
        return Error(StatusCode::kGraph, "%s: output %d (value %u) is not a tensor",
                     NodeName(n).c_str(), i, value);
      }
      root_[value] = {Root::Kind::kFresh, group_index_};
      const bool alias = returned.alias_info() != nullptr || AliasesSilently(NameOf(n));
      bool first = true;
      for (const uint32_t from : alias ? aliased : std::vector<uint32_t>()) {
        root_[value] =
            first || root_[value] == root_[from] ? root_[from] : Root{Root::Kind::kMixed, 0};
        first = false;
      }
      locals_[value] = group_->local_count;
      node->outputs.push_back(group_->local_count++);
    }
    return Status::Ok();
  }
  const std::string& NameOf(uint32_t n) const {
    return program().operators(
        static_cast<int>(program().nodes(static_cast<int>(n)).operator_index()));
  }

  // A view of a static input or constant with constant arguments and one result: computed at bind
  // time.
  bool MayHoist(const proto::Node& node, const std::string& name, uint32_t* argument) const {
    if (!IsHoistable(name) || node.outputs_size() != 1 || node.outputs(0) < 0) return false;
    const auto constant = [](const proto::Expr& expr) {
      return expr.node_case() == proto::Expr::kConstant;
    };
    for (const proto::Argument& arg : node.args()) {
      switch (arg.kind_case()) {
        case proto::Argument::kValue: {
          const auto origin = origin_.find(arg.value());
          if (*argument != graph::kNoIndex || origin == origin_.end()) return false;
          if (origin->second.kind == External::Kind::kDynamic) return false;
          *argument = arg.value();
          break;
        }
        case proto::Argument::kInteger:
          if (!constant(arg.integer())) return false;
          break;
        case proto::Argument::kIntegers:
          if (!std::all_of(arg.integers().value().begin(), arg.integers().value().end(), constant))
            return false;
          break;
        case proto::Argument::kBoolean:
          break;
        default:
          return false;
      }
    }
    return *argument != graph::kNoIndex;
  }
  void Hoist(uint32_t argument, uint32_t value, PreparedNode* node) {
    node->outputs[0] = 1;
    const External source = origin_.at(argument);
    origin_[value] = {External::Kind::kHoisted, static_cast<uint32_t>(out_->hoisted_.size()), 0};
    locals_.erase(value);
    --group_->local_count;
    out_->hoisted_.push_back({std::move(*node), source});
  }

  // Locals die after their last use in the group, unless they are exported.
  void FindReleases() {
    std::vector<bool> alive(group_->local_count, false);
    for (const Export& exported : group_->exports) alive[exported.local] = true;
    for (auto node = group_->nodes.rbegin(); node != group_->nodes.rend(); ++node) {
      const auto touch = [&](uint32_t local) {
        if (local == kNoLocal || alive[local]) return;
        alive[local] = true;
        node->releases.push_back(local);
      };
      for (const ArgPatch& patch : node->patches)
        std::for_each(patch.locals.begin(), patch.locals.end(), touch);
      std::for_each(node->outputs.begin(), node->outputs.end(), touch);
    }
  }

  std::shared_ptr<Program> out_;
  std::vector<c10::OperatorHandle> operators_;
  std::vector<Root> root_;  // by value
  std::unordered_map<uint32_t, External>
      origin_;  // values that no node of a group makes at run time
  std::unordered_map<uint32_t, std::vector<uint32_t>> results_of_;
  std::unordered_map<std::string, int32_t> slot_of_;
  std::string key_;
  std::unordered_set<uint32_t> exported_;  // values of the current group
  uint32_t group_index_ = 0;
  PreparedGroup* group_ = nullptr;
  std::unordered_map<uint32_t, uint32_t> locals_;  // value -> local of the current group
};

Result<std::shared_ptr<const Program>> Program::Prepare(
    std::shared_ptr<const graph::Template> source) {
  try {
    return ProgramBuilder(std::move(source)).Run();
  } catch (const c10::Error& error) {
    return Error(StatusCode::kGraph, "torch refuses the program: %s",
                 error.what_without_backtrace());
  } catch (const std::exception& error) {
    return Error(StatusCode::kInternal, "preparing the program: %s", error.what());
  }
}

Result<BoundProgram::Shape> Program::BindShape(uint32_t value,
                                               std::span<const int64_t> symbols) const {
  const graph::ValueShape& shape = source_->values()[value];
  const graph::ExprTable& table = source_->expressions();
  BoundProgram::Shape bound;
  for (size_t d = 0; d < shape.sizes.size(); ++d) {
    SLICE_ASSIGN_OR_RETURN(const int64_t size, table.Evaluate(shape.sizes[d], symbols));
    SLICE_ASSIGN_OR_RETURN(const int64_t stride, table.Evaluate(shape.strides[d], symbols));
    bound.sizes.push_back(size);
    bound.strides.push_back(stride);
  }
  if (shape.storage_offset != graph::kNoExpr) {
    SLICE_ASSIGN_OR_RETURN(const int64_t offset, table.Evaluate(shape.storage_offset, symbols));
    if (!CheckedMul(offset, shape.item_bytes, &bound.offset_bytes))
      return Error(StatusCode::kOverflow, "value %u: storage offset %lld", value,
                   static_cast<long long>(offset));
  }
  SLICE_ASSIGN_OR_RETURN(bound.extent_bytes,
                         ExtentBytes(bound.sizes, bound.strides, shape.item_bytes));
  return bound;
}

Result<std::shared_ptr<const BoundProgram>> Program::Bind(std::span<const int64_t> symbols) const {
  auto bound = std::make_shared<BoundProgram>();
  SLICE_RETURN_IF_ERROR(source_->Bind(symbols, &bound->sizes));
  bound->symbols.assign(symbols.begin(), symbols.end());
  for (const graph::ExprIndex integer : integers_) {
    SLICE_ASSIGN_OR_RETURN(const int64_t number, expressions_.Evaluate(integer, symbols));
    bound->integers.push_back(number);
  }
  bound->shapes.resize(source_->values().size());
  for (const uint32_t dynamic : source_->dynamics()) {
    const uint32_t value = source_->inputs()[dynamic].value;
    SLICE_ASSIGN_OR_RETURN(bound->shapes[value], BindShape(value, symbols));
  }
  for (const PreparedGroup& group : groups_) {
    for (const Export& exported : group.exports) {
      SLICE_ASSIGN_OR_RETURN(bound->shapes[exported.value], BindShape(exported.value, symbols));
    }
  }
  return std::shared_ptr<const BoundProgram>(std::move(bound));
}

}  // namespace slice::executor
