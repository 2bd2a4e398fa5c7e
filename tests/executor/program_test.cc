// Preparing programs: what is refused, what is hoisted, what runs.
#include "daemon/executor/program.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "daemon/executor/allowed_operators.h"
#include "daemon/executor/cpu_backend.h"
#include "daemon/executor/local_run.h"
#include "daemon/executor/zygote.h"
#include "tests/testing/template_builder.h"

namespace slice::executor {
namespace {

using testing::TemplateBuilder;

Result<std::shared_ptr<const Program>> Prepare(const TemplateBuilder& builder) {
  auto parsed = graph::Template::Parse(builder.Serialize());
  if (!parsed.ok()) return parsed.status();
  return Program::Prepare(*parsed);
}

void ExpectRefused(const TemplateBuilder& builder, StatusCode code, const std::string& text) {
  const auto prepared = Prepare(builder);
  ASSERT_FALSE(prepared.ok());
  EXPECT_EQ(prepared.status().code(), code) << prepared.status().ToString();
  EXPECT_NE(prepared.status().text().find(text), std::string::npos) << prepared.status().ToString();
}

DeviceBackend* Backend() {
  static const std::unique_ptr<DeviceBackend> backend = [] {
    PrepareTorch();
    auto made = CreateCpuBackend();
    SLICE_CHECK(made->OpenDomain(LocalRun::kDomain, 0, uint64_t{64} << 20).ok(), "domain");
    return made;
  }();
  return backend.get();
}

Result<std::unique_ptr<LocalRun>> MakeRun(const TemplateBuilder& builder,
                                          std::vector<int64_t> symbols = {},
                                          uint64_t cap = uint64_t{32} << 20) {
  auto parsed = graph::Template::Parse(builder.Serialize());
  if (!parsed.ok()) return parsed.status();
  return LocalRun::Create(Backend(), *parsed, std::move(symbols), 1, cap);
}

const float* Floats(const LocalRun& run) {
  return reinterpret_cast<const float*>(run.result(0).data());
}

// y = relu(x).t()[1:3] . w.t(): views of both kinds.
struct Views : TemplateBuilder {
  Views() {
    x = Value({4, 4});
    w = Value({4, 4});
    r = Value({4, 4});
    t = Transposed();
    s = Value({2, 4});
    wt = Transposed();
    y = Value({2, 4});
    Input("x", proto::Input::DYNAMIC, x);
    Input("w", proto::Input::STATIC_CONSTANT, w);
    Node("aten::relu", {{"self", x}}, {r});
    Node("aten::t", {{"self", r}}, {t});
    proto::Node* slice = Node("aten::slice.Tensor", {{"self", t}}, {s});
    Integer(slice, "start", 1);
    Integer(slice, "end", 3);
    Node("aten::t", {{"self", w}}, {wt});
    Node("aten::mm", {{"self", s}, {"mat2", wt}}, {y});
    Group("all", {1});
    Output(y);
  }
  uint32_t Transposed() {
    const uint32_t value = Value({4, 4});
    auto* meta = program.mutable_values(static_cast<int>(value))->mutable_meta();
    meta->mutable_strides(0)->set_constant(1);
    meta->mutable_strides(1)->set_constant(4);
    return value;
  }
  uint32_t x, w, r, t, s, wt, y;
};

TEST(Happy_Program, ViewsOfStaticsAreHoistedAndResultsAreRight) {
  const auto prepared = Prepare(Views());
  ASSERT_TRUE(prepared.ok()) << prepared.status().ToString();
  EXPECT_EQ((*prepared)->hoisted().size(), 1u);
  EXPECT_EQ((*prepared)->groups()[0].nodes.size(), 4u);
  for (const PreparedNode& node : (*prepared)->groups()[0].nodes) {
    EXPECT_EQ(node.thunk == nullptr, node.index == 0) << node.index;  // all but relu
  }
  auto run = MakeRun(Views());
  ASSERT_TRUE(run.ok()) << run.status().ToString();
  ASSERT_TRUE((*run)->Run().ok());
  const at::Tensor x = at::from_blob((*run)->input(0), {4, 4});
  const at::Tensor expected = at::relu(x).t().slice(0, 1, 3).mm((*run)->static_tensor(0).t());
  EXPECT_TRUE(at::equal(expected, at::from_blob(const_cast<float*>(Floats(**run)), {2, 4})));
  EXPECT_EQ(Backend()->BytesUsed(LocalRun::kDomain), 0u);
}

TEST(Happy_Program, SymbolicSizesAndPythonNumbers) {
  TemplateBuilder builder;
  builder.AddSymbol("n", 1, 64);
  const uint32_t x = builder.Value({TemplateBuilder::Symbol(0), TemplateBuilder::Constant(2)});
  const uint32_t doubled =
      builder.Value({TemplateBuilder::Symbol(0), TemplateBuilder::Constant(2)});
  const uint32_t flat = builder.Value({TemplateBuilder::Symbol(0), TemplateBuilder::Constant(2)});
  builder.Input("x", proto::Input::DYNAMIC, x);
  proto::Node* multiply = builder.Node("aten::mul.Tensor", {{"self", x}}, {doubled});
  multiply->add_args()->set_name("other");
  multiply->mutable_args(1)->set_floating(2.0);
  proto::Node* view = builder.Node("aten::view", {{"self", doubled}}, {flat});
  proto::Argument* size = view->add_args();
  size->set_name("size");
  *size->mutable_integers()->add_value() = TemplateBuilder::Symbol(0);
  size->mutable_integers()->add_value()->set_constant(2);
  builder.Group("all");
  builder.Output(flat);
  for (const int64_t n : {1, 7, 64}) {
    auto run = MakeRun(builder, {n});
    ASSERT_TRUE(run.ok()) << run.status().ToString();
    ASSERT_TRUE((*run)->Run().ok());
    const auto* input = reinterpret_cast<const float*>((*run)->input(0));
    for (int64_t i = 0; i < 2 * n; ++i) EXPECT_EQ(Floats(**run)[i], input[i] * 2.0f);
  }
}

TEST(Happy_Program, ListsAreSplitAndJoined) {
  TemplateBuilder builder;
  const uint32_t x = builder.Value({4, 2});
  const uint32_t top = builder.Value({2, 2});
  const uint32_t bottom = builder.Value({2, 2});
  const uint32_t y = builder.Value({4, 2});
  builder.Input("x", proto::Input::DYNAMIC, x);
  TemplateBuilder::Integer(builder.Node("aten::split.Tensor", {{"self", x}}, {top, bottom}),
                           "split_size", 2);
  proto::Node* cat = builder.Node("aten::cat", {}, {y});
  proto::Argument* tensors = cat->add_args();
  tensors->set_name("tensors");
  tensors->mutable_values()->add_value(bottom);
  tensors->mutable_values()->add_value(top);
  builder.Group("all");
  builder.Output(y);
  auto run = MakeRun(builder);
  ASSERT_TRUE(run.ok()) << run.status().ToString();
  ASSERT_TRUE((*run)->Run().ok());
  const auto* input = reinterpret_cast<const float*>((*run)->input(0));
  for (int i = 0; i < 8; ++i) EXPECT_EQ(Floats(**run)[i], input[(i + 4) % 8]);
}

TEST(Happy_Program, EveryAllowedOperatorExists) {
  for (const std::string_view name : AllowedOperators()) {
    Views views;  // the look-up is what is tested: no node uses it
    views.Operator(std::string(name));
    const auto prepared = Prepare(views);
    EXPECT_TRUE(prepared.ok()) << prepared.status().ToString();
  }
}

TEST(Malicious_Program, OperatorsOffTheListAreAllNamed) {
  Views views;
  views.Operator("aten::set_.source_Storage");
  views.Operator("aten::from_file");
  ExpectRefused(
      views, StatusCode::kOpNotAllowed,
      "2 operators are not on the allow-list: aten::set_.source_Storage, aten::from_file");
}

TEST(Malicious_Program, ArgumentsMustFitTheSchema) {
  Views unknown;
  TemplateBuilder::Integer(unknown.program.mutable_nodes(0), "inplace", 1);
  ExpectRefused(unknown, StatusCode::kGraph,
                "node 0 (aten::relu): the operator has no argument 'inplace'");
  Views missing;
  missing.program.mutable_nodes(4)->mutable_args()->RemoveLast();
  ExpectRefused(missing, StatusCode::kGraph, "node 4 (aten::mm): argument 'mat2' is missing");
  Views type;
  type.program.mutable_nodes(4)->mutable_args(1)->set_text("w");
  ExpectRefused(type, StatusCode::kGraph,
                "node 4 (aten::mm): argument 'mat2' is a string, the schema wants a tensor");
  Views number;
  number.program.mutable_nodes(2)->mutable_args(1)->set_floating(1.5);
  ExpectRefused(number, StatusCode::kGraph,
                "argument 'start' is a float, the schema wants an integer");
  Views outputs;
  outputs.program.mutable_nodes(0)->add_outputs(-1);
  ExpectRefused(outputs, StatusCode::kGraph,
                "node 0 (aten::relu): 2 outputs, the operator returns 1");
}

TEST(Malicious_Program, RawIntegersAreNoDtypes) {
  TemplateBuilder builder;
  const uint32_t x = builder.Value({4});
  const uint32_t y = builder.Value({4});
  builder.Input("x", proto::Input::DYNAMIC, x);
  TemplateBuilder::Integer(builder.Node("aten::_to_copy", {{"self", x}}, {y}), "dtype", 9999);
  builder.Group("all");
  ExpectRefused(builder, StatusCode::kGraph,
                "argument 'dtype' is an integer, the schema wants a dtype");
}

// One in-place node on `target` in a group that declares `writes`.
struct Write : TemplateBuilder {
  enum class Target {
    kConstantInput,
    kDynamic,
    kUnlisted,
    kThroughView,
    kOtherGroup,
    kConstant,
    kSplit
  };
  explicit Write(Target target) {
    const uint32_t x = Value({4});
    const uint32_t w = Value({4});
    const uint32_t state = Value({4});
    const uint32_t fresh = Value({4});
    const uint32_t view = Value({4});
    const uint32_t out = Value({4});
    const uint32_t constant = Value({4});
    Input("x", proto::Input::DYNAMIC, x);
    Input("w", proto::Input::STATIC_CONSTANT, w);
    Input("state", proto::Input::MANAGED, state, true);
    program.add_constants()->set_value(constant);
    program.mutable_constants(0)->set_data(std::string(16, '\0'));
    Node("aten::relu", {{"self", x}}, {fresh});
    Group("first");
    uint32_t written = 0;
    std::vector<uint32_t> reads;
    switch (target) {
      case Target::kConstantInput:
        written = w;
        reads = {1};
        break;
      case Target::kDynamic:
        written = x;
        break;
      case Target::kUnlisted:
        written = state;
        reads = {2};
        break;
      case Target::kThroughView:
        Integer(Node("aten::unsqueeze", {{"self", state}}, {view}), "dim", 0);
        written = view;
        reads = {2};
        break;
      case Target::kOtherGroup:
        written = fresh;
        break;
      case Target::kConstant:
        written = constant;
        break;
      case Target::kSplit: {
        proto::Node* node = Node("aten::_unsafe_view", {{"self", w}}, {view});
        node->add_args()->set_name("size");
        node->mutable_args(1)->mutable_integers()->add_value()->set_constant(4);
        written = view;
        reads = {1};
        break;
      }
    }
    Node("aten::neg_", {{"self", written}}, {out});
    Group("second", reads);
    Output(out);
  }
};

TEST(Malicious_Program, OnlyDeclaredMemoryIsWritten) {
  using Target = Write::Target;
  ExpectRefused(Write(Target::kConstantInput), StatusCode::kGraph,
                "writes input 1 'w', which the group does not list");
  ExpectRefused(Write(Target::kDynamic), StatusCode::kGraph,
                "argument 'self' (value 0) writes a dynamic input");
  ExpectRefused(Write(Target::kUnlisted), StatusCode::kGraph, "writes input 2 'state'");
  ExpectRefused(Write(Target::kThroughView), StatusCode::kGraph, "writes input 2 'state'");
  ExpectRefused(Write(Target::kOtherGroup), StatusCode::kGraph, "writes memory of another group");
  ExpectRefused(Write(Target::kConstant), StatusCode::kGraph, "writes a constant of the template");
  ExpectRefused(Write(Target::kSplit), StatusCode::kGraph, "writes input 1 'w'");
}

TEST(Malicious_Program, ReadsThroughViewsMustBeListed) {
  TemplateBuilder builder;
  const uint32_t state = builder.Value({4});
  const uint32_t view = builder.Value({1, 4});
  const uint32_t y = builder.Value({1, 4});
  builder.Input("state", proto::Input::MANAGED, state, true);
  TemplateBuilder::Integer(builder.Node("aten::unsqueeze", {{"self", state}}, {view}), "dim", 0);
  builder.Group("view", {0});
  builder.Node("aten::neg", {{"self", view}}, {y});
  builder.Group("hidden");
  builder.Output(y);
  ExpectRefused(builder, StatusCode::kGraph,
                "node 1 (aten::neg): argument 'self' (value 1) is memory of input 0 'state', which "
                "the group lists neither");
}

TEST(Malicious_Program, HugeNegativeSizesDoNotCrash) {
  TemplateBuilder builder;
  builder.AddSymbol("n", INT64_MIN, INT64_MAX);
  const uint32_t x = builder.Value({4});
  const uint32_t y = builder.Value({4});
  builder.Input("x", proto::Input::DYNAMIC, x);
  proto::Node* view = builder.Node("aten::view", {{"self", x}}, {y});
  view->add_args()->set_name("size");
  *view->mutable_args(1)->mutable_integers()->add_value() = TemplateBuilder::Symbol(0);
  builder.Group("all");
  builder.Output(y);
  for (const int64_t n : {INT64_MIN, INT64_MIN + 5, int64_t{-1} << 62, INT64_MAX}) {
    auto run = MakeRun(builder, {n});
    ASSERT_TRUE(run.ok()) << run.status().ToString();
    EXPECT_EQ((*run)->Run().code(), StatusCode::kOpFailed);
  }
  view->mutable_args(1)->mutable_integers()->mutable_value(0)->set_constant(INT64_MIN);
  auto run = MakeRun(builder, {1});
  ASSERT_TRUE(run.ok());
  EXPECT_EQ((*run)->Run().code(), StatusCode::kOpFailed);
}

TEST(Malicious_Program, ResultsMustBeWhatTheTemplateSays) {
  TemplateBuilder builder;
  const uint32_t x = builder.Value({4});
  const uint32_t y = builder.Value({3});
  builder.Input("x", proto::Input::DYNAMIC, x);
  builder.Node("aten::neg", {{"self", x}}, {y});
  builder.Group("all");
  builder.Output(y);
  auto run = MakeRun(builder);
  ASSERT_TRUE(run.ok());
  const Status status = (*run)->Run();
  EXPECT_EQ(status.code(), StatusCode::kOpFailed);
  EXPECT_NE(status.text().find("value 1: the operator made Float[4], the template says Float[3]"),
            std::string::npos)
      << status.text();
}

TEST(Edge_Program, CapOfTheTenantIsNoMemory) {
  TemplateBuilder builder;
  const uint32_t x = builder.Value({1024, 1024});
  const uint32_t y = builder.Value({1024, 1024});
  builder.Input("x", proto::Input::DYNAMIC, x);
  builder.Node("aten::neg", {{"self", x}}, {y});
  builder.Group("all");
  builder.Output(y);
  auto run = MakeRun(builder, {}, uint64_t{6} << 20);
  ASSERT_TRUE(run.ok());
  const Status status = (*run)->Run();
  EXPECT_EQ(status.code(), StatusCode::kNoMemory);
  EXPECT_NE(status.text().find("the tenant's cap in this memory domain is 6291456"),
            std::string::npos)
      << status.text();
  EXPECT_EQ(Backend()->BytesUsed(LocalRun::kDomain), 0u);
  Backend()->SetTenantCap(LocalRun::kDomain, LocalRun::kTenant, uint64_t{9} << 20);
  EXPECT_TRUE((*run)->Run().ok());
}

TEST(Edge_Program, ExpandedResultsAreStored) {
  TemplateBuilder builder;
  const uint32_t x = builder.Value({1, 4});
  const uint32_t y = builder.Value({3, 4});
  builder.program.mutable_values(1)->mutable_meta()->mutable_strides(0)->set_constant(0);
  builder.Input("x", proto::Input::DYNAMIC, x);
  proto::Node* expand = builder.Node("aten::expand", {{"self", x}}, {y});
  expand->add_args()->set_name("size");
  for (const int64_t size : {3, 4})
    expand->mutable_args(1)->mutable_integers()->add_value()->set_constant(size);
  builder.Group("all");
  builder.Output(y);
  auto run = MakeRun(builder);
  ASSERT_TRUE(run.ok()) << run.status().ToString();
  const Status status = (*run)->Run();
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ((*run)->result(0).size(), 16u);
  EXPECT_EQ(Floats(**run)[3], reinterpret_cast<const float*>((*run)->input(0))[3]);
}

}  // namespace
}  // namespace slice::executor
