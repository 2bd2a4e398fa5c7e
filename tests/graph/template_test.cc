#include "daemon/graph/template.h"

#include <gtest/gtest.h>

#include "tests/testing/template_builder.h"

namespace slice::graph {
namespace {

using testing::TemplateBuilder;

// x -> [relu] -> [mm w] -> [add state in place] -> y; three groups.
struct Chain : TemplateBuilder {
  Chain() {
    AddSymbol("n", 1, 8);
    x = Value({Symbol(0), Constant(4)});
    w = Value({4, 4});
    state = Value({Symbol(0), Constant(4)});
    a = Value({Symbol(0), Constant(4)});
    b = Value({Symbol(0), Constant(4)});
    c = Value({Symbol(0), Constant(4)});
    Input("x", proto::Input::DYNAMIC, x);
    Input("w", proto::Input::STATIC_CONSTANT, w);
    Input("state", proto::Input::MANAGED, state, true);
    Node("aten::relu", {{"self", x}}, {a});
    Group("first");
    Node("aten::mm", {{"self", a}, {"mat2", w}}, {b});
    Group("second", {1});
    Node("aten::add_.Tensor", {{"self", state}, {"other", b}}, {c});
    Group("third", {}, {2});
    Output(c);
  }
  uint32_t x, w, state, a, b, c;
};

Status ParseStatus(const TemplateBuilder& builder, const Limits& limits = {}) {
  return Template::Parse(builder.Serialize(), limits).status();
}

void ExpectRefused(const TemplateBuilder& builder, StatusCode code, const std::string& text,
                   const Limits& limits = {}) {
  const Status status = ParseStatus(builder, limits);
  EXPECT_EQ(status.code(), code) << status.ToString();
  EXPECT_NE(status.text().find(text), std::string::npos) << status.ToString();
}

TEST(Happy_Template, ChainIsDerivedAtGroupGrain) {
  const auto parsed = Template::Parse(Chain().Serialize());
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  const Template& graph = **parsed;
  ASSERT_EQ(graph.groups().size(), 3u);
  EXPECT_EQ(graph.groups()[0].dynamic_in, std::vector<uint32_t>{0});
  EXPECT_EQ(graph.groups()[0].values_out, std::vector<uint32_t>{3});
  EXPECT_EQ(graph.groups()[0].successors, std::vector<uint32_t>{1});
  EXPECT_EQ(graph.groups()[1].values_in, std::vector<uint32_t>{3});
  EXPECT_EQ(graph.groups()[1].reads, std::vector<uint32_t>{0});
  EXPECT_EQ(graph.groups()[2].writes, std::vector<uint32_t>{1});
  EXPECT_EQ(graph.groups()[2].predecessors, std::vector<uint32_t>{1});
  EXPECT_EQ(graph.groups()[2].results, std::vector<uint32_t>{0});
  ASSERT_EQ(graph.crossing().size(), 2u);
  EXPECT_EQ(graph.crossing_index(4), 1u);
  EXPECT_EQ(graph.crossing_index(5), kNoIndex);
  EXPECT_EQ(graph.crossing()[0].producer, 0u);
  EXPECT_EQ(graph.crossing()[0].consumers, std::vector<uint32_t>{1});
}

TEST(Happy_Template, BindGivesBytes) {
  const auto parsed = Template::Parse(Chain().Serialize());
  ASSERT_TRUE(parsed.ok());
  BoundSizes sizes;
  const int64_t symbols[] = {3};
  ASSERT_TRUE((*parsed)->Bind(symbols, &sizes).ok());
  ASSERT_EQ(sizes.dynamic_count(), 1u);
  EXPECT_EQ(sizes.dynamic_bytes(0), 3 * 4 * 4);
  ASSERT_EQ(sizes.result_count(), 1u);
  EXPECT_EQ(sizes.result_bytes(0), 3 * 4 * 4);
  for (uint32_t c = 0; c < 2; ++c) EXPECT_EQ(sizes.crossing_bytes(c), 48);
  for (uint32_t g = 0; g < 3; ++g) EXPECT_EQ(sizes.workspace_bytes(g), 0);
}

TEST(Happy_Template, GoldenTemplatesParse) {
  for (const std::string name : {"mlp", "llama_prefill", "llama_decode"}) {
    const auto program =
        testing::ReadTextTemplate(std::string(SLICE_GOLDEN_DIR "/") + name + ".textproto");
    const auto parsed = Template::Parse(program.SerializeAsString());
    ASSERT_TRUE(parsed.ok()) << name << ": " << parsed.status().ToString();
    std::vector<int64_t> symbols;
    for (const auto& symbol : program.symbols()) symbols.push_back(symbol.min());
    BoundSizes sizes;
    EXPECT_TRUE((*parsed)->Bind(symbols, &sizes).ok());
    // The group lists that the front end wrote agree with what the nodes say.
    for (size_t g = 0; g < (*parsed)->groups().size(); ++g) {
      for (const uint32_t value : (*parsed)->groups()[g].values_in) {
        const auto& inputs = program.groups(static_cast<int>(g)).inputs();
        EXPECT_NE(std::find(inputs.begin(), inputs.end(), value), inputs.end())
            << name << " group " << g;
      }
    }
  }
}

TEST(Happy_Template, WriteHazardsMakeEdges) {
  TemplateBuilder builder;
  const uint32_t state = builder.Value({4});
  std::vector<uint32_t> made;
  for (int i = 0; i < 4; ++i) made.push_back(builder.Value({4}));
  builder.Input("state", proto::Input::MANAGED, state, true);
  builder.Node("aten::relu", {{"self", state}}, {made[0]});
  builder.Group("read 1", {0});
  builder.Node("aten::neg", {{"self", state}}, {made[1]});
  builder.Group("read 2", {0});
  builder.Node("aten::relu_", {{"self", state}}, {made[2]});
  builder.Group("write", {}, {0});
  builder.Node("aten::neg", {{"self", state}}, {made[3]});
  builder.Group("read after", {0});
  builder.Node("aten::neg_", {{"self", state}}, {-1});
  builder.Group("write again", {0}, {0});
  const auto parsed = Template::Parse(builder.Serialize());
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  const auto& groups = (*parsed)->groups();
  EXPECT_TRUE(groups[0].predecessors.empty());
  EXPECT_TRUE(groups[1].predecessors.empty());
  EXPECT_EQ(groups[2].predecessors, (std::vector<uint32_t>{0, 1}));  // write after read
  EXPECT_EQ(groups[3].predecessors, (std::vector<uint32_t>{2}));     // read after write
  EXPECT_EQ(groups[4].predecessors,
            (std::vector<uint32_t>{2, 3}));  // write after write, write after read
  EXPECT_EQ(groups[2].successors, (std::vector<uint32_t>{3, 4}));
}

TEST(Happy_Template, ContentHashIsOfTheBytes) {
  EXPECT_EQ(ContentHash(""), 0xcbf29ce484222325u);
  EXPECT_EQ(ContentHash("a"), 0xaf63dc4c8601ec8cu);
  Chain other;
  other.program.mutable_metadata()->set_model("other");
  EXPECT_NE((*Template::Parse(Chain().Serialize()))->content_hash(),
            (*Template::Parse(other.Serialize()))->content_hash());
}

TEST(Edge_Template, SymbolRangeIsInclusive) {
  const auto parsed = Template::Parse(Chain().Serialize());
  BoundSizes sizes;
  for (const int64_t good : {1, 8})
    EXPECT_TRUE((*parsed)->Bind(std::vector<int64_t>{good}, &sizes).ok());
  ASSERT_EQ(sizes.dynamic_bytes(0), 8 * 4 * 4);
  for (const int64_t bad : {int64_t{0}, int64_t{9}, INT64_MIN}) {
    const Status status = (*parsed)->Bind(std::vector<int64_t>{bad}, &sizes);
    EXPECT_EQ(status.code(), StatusCode::kOverflow);
    EXPECT_NE(status.text().find("'n'"), std::string::npos);
  }
  EXPECT_EQ((*parsed)->Bind(std::vector<int64_t>{}, &sizes).code(), StatusCode::kOverflow);
  EXPECT_EQ((*parsed)->Bind(std::vector<int64_t>{1, 1}, &sizes).code(), StatusCode::kOverflow);
  EXPECT_EQ(sizes.dynamic_bytes(0), 8 * 4 * 4) << "written on success only";
}

TEST(Edge_Template, EmptyTensorHasNoBytes) {
  TemplateBuilder builder;
  builder.AddSymbol("n", 0, 8);
  const uint32_t x = builder.Value({TemplateBuilder::Symbol(0), TemplateBuilder::Constant(4)});
  const uint32_t y = builder.Value({4});
  builder.Input("x", proto::Input::DYNAMIC, x);
  builder.Node("aten::sum", {{"self", x}}, {y});
  builder.Group("all");
  const auto parsed = Template::Parse(builder.Serialize());
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  EXPECT_EQ(*(*parsed)->ValueBytes(x, std::vector<int64_t>{0}), 0);
}

TEST(Edge_Template, ExpandedStridesCountTheExtent) {
  TemplateBuilder builder;
  const uint32_t x = builder.Value({8, 4});
  builder.program.mutable_values(0)->mutable_meta()->mutable_strides(0)->set_constant(0);
  builder.program.mutable_values(0)->mutable_meta()->mutable_storage_offset()->set_constant(2);
  const uint32_t y = builder.Value({4});
  builder.Input("x", proto::Input::DYNAMIC, x);
  builder.Node("aten::sum", {{"self", x}}, {y});
  builder.Group("all");
  EXPECT_EQ(*(*Template::Parse(builder.Serialize()))->ValueBytes(x, {}), (4 + 2) * 4);
}

TEST(Malicious_Template, GarbageIsRefused) {
  for (const std::string& bytes :
       {std::string("\xff\xff\xff\xff"), std::string("\x0a"), std::string(64, '\x07')}) {
    EXPECT_EQ(Template::Parse(bytes).status().code(), StatusCode::kGraph);
  }
  EXPECT_EQ(Template::Parse("").status().code(), StatusCode::kGraph);
  Chain chain;
  chain.program.set_format(2);
  ExpectRefused(chain, StatusCode::kGraph, "format is 2");
}

TEST(Malicious_Template, TruncationAtEveryByteNeverCrashes) {
  const std::string bytes = Chain().Serialize();
  for (size_t length = 0; length < bytes.size(); ++length) {
    static_cast<void>(Template::Parse(std::string_view(bytes).substr(0, length)).status());
  }
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (const char flip : {'\x01', '\x80', '\xff'}) {
      std::string broken = bytes;
      broken[at] = static_cast<char>(broken[at] ^ flip);
      static_cast<void>(Template::Parse(broken).status());
    }
  }
}

TEST(Malicious_Template, CyclicUseIsRefused) {
  Chain chain;  // the first node uses what the second makes
  chain.program.mutable_nodes(0)->mutable_args(0)->set_value(chain.b);
  ExpectRefused(chain, StatusCode::kGraph,
                "node 0 (aten::relu): argument 'self' uses value 4 before it is defined");
}

TEST(Malicious_Template, DanglingUseIsRefused) {
  Chain chain;
  const uint32_t nobody = chain.Value({4, 4});
  chain.program.mutable_nodes(1)->mutable_args(1)->set_value(nobody);
  ExpectRefused(chain, StatusCode::kGraph,
                "node 1 (aten::mm): argument 'mat2' uses value 6 before");
  chain.program.mutable_nodes(1)->mutable_args(1)->set_value(1000);
  ExpectRefused(chain, StatusCode::kGraph, "uses value 1000, there are 7");
}

TEST(Malicious_Template, SecondDefinitionIsRefused) {
  Chain chain;
  chain.program.mutable_nodes(1)->set_outputs(0, chain.a);
  ExpectRefused(chain, StatusCode::kGraph,
                "node 1 (aten::mm) defines value 3, which is defined already");
  Chain twice;
  twice.Input("again", proto::Input::DYNAMIC, twice.x);
  ExpectRefused(twice, StatusCode::kGraph, "input 3 'again' defines value 0");
}

TEST(Malicious_Template, BadIndicesAreRefused) {
  Chain op;
  op.program.mutable_nodes(0)->set_operator_index(9);
  ExpectRefused(op, StatusCode::kGraph, "node 0 calls operator 9, there are 3");
  Chain output;
  output.program.mutable_nodes(0)->set_outputs(0, -2);
  ExpectRefused(output, StatusCode::kGraph, "output -2");
  Chain result;
  result.program.mutable_outputs(0)->set_value(result.x);
  ExpectRefused(result, StatusCode::kGraph, "output 0 is value 0, which no node makes");
  Chain alias;
  alias.program.mutable_outputs(0)->set_alias_of_input(3);
  ExpectRefused(alias, StatusCode::kGraph, "output 0 is input 3, there are 3");
  Chain reads;
  reads.program.mutable_groups(1)->add_reads(7);
  ExpectRefused(reads, StatusCode::kGraph, "group 1 'second' reads input 7");
  Chain listed;
  listed.program.mutable_groups(1)->add_inputs(70);
  ExpectRefused(listed, StatusCode::kGraph, "group 1 'second' lists value 70");
  Chain values;
  proto::Argument* arg = values.program.mutable_nodes(0)->add_args();
  arg->set_name("tensors");
  arg->mutable_values()->add_value(-7);
  ExpectRefused(values, StatusCode::kGraph, "-7 is neither");
}

TEST(Malicious_Template, GroupsMustPartitionTheNodes) {
  Chain gap;
  gap.program.mutable_groups(1)->set_first_node(2);
  ExpectRefused(gap, StatusCode::kGraph, "group 1 'second'");
  Chain overlap;
  overlap.program.mutable_groups(0)->set_node_count(2);
  ExpectRefused(overlap, StatusCode::kGraph, "groups must partition the nodes, next is 2");
  Chain missing;
  missing.program.mutable_groups()->RemoveLast();
  ExpectRefused(missing, StatusCode::kGraph, "groups cover 2 of 3 nodes");
  Chain beyond;
  beyond.program.mutable_groups(2)->set_node_count(UINT32_MAX);
  ExpectRefused(beyond, StatusCode::kGraph, "ends behind node 2");
  Chain empty;
  empty.program.mutable_groups(0)->set_node_count(0);
  ExpectRefused(empty, StatusCode::kGraph, "group 0 'first': 0 nodes");
  TemplateBuilder nothing;
  ExpectRefused(nothing, StatusCode::kGraph, "no nodes");
}

TEST(Malicious_Template, ConsumerBeforeProducerIsRefused) {
  Chain chain;
  chain.program.mutable_nodes()->SwapElements(0, 1);
  ExpectRefused(chain, StatusCode::kGraph,
                "node 0 (aten::mm): argument 'self' uses value 3 before it is defined");
}

TEST(Malicious_Template, UndeclaredWritesAndReadsAreRefused) {
  Chain constant;
  constant.program.mutable_groups(2)->set_writes(0, 1);
  ExpectRefused(constant, StatusCode::kGraph, "lists input 1 'w' as written");
  Chain written;
  written.program.mutable_inputs(1)->set_written(true);
  ExpectRefused(written, StatusCode::kGraph,
                "input 1 'w' is written, but only mutable and managed");
  Chain dynamic;
  dynamic.program.mutable_inputs(0)->set_written(true);
  ExpectRefused(dynamic, StatusCode::kGraph, "input 0 'x' is written");
  Chain hidden;
  hidden.program.mutable_groups(1)->clear_reads();
  ExpectRefused(hidden, StatusCode::kGraph,
                "uses input 1 'w', but group 1 'second' lists it neither");
}

TEST(Malicious_Template, OverflowingSizesAreRefusedAtBind) {
  TemplateBuilder builder;
  builder.AddSymbol("n", 1, INT64_MAX);
  const uint32_t x = builder.Value({TemplateBuilder::Symbol(0), TemplateBuilder::Symbol(0)});
  const uint32_t y = builder.Value({4});
  builder.Input("x", proto::Input::DYNAMIC, x);
  builder.Node("aten::sum", {{"self", x}}, {y});
  builder.Group("all");
  const auto parsed = Template::Parse(builder.Serialize());
  ASSERT_TRUE(parsed.ok());
  BoundSizes sizes;
  for (const int64_t n : {INT64_MAX, int64_t{1} << 32, int64_t{1} << 28}) {
    const Status status = (*parsed)->Bind(std::vector<int64_t>{n}, &sizes);
    EXPECT_EQ(status.code(), StatusCode::kOverflow) << n;
    EXPECT_NE(status.text().find("value 0"), std::string::npos) << status.text();
  }
}

TEST(Malicious_Template, NegativeSizesAreRefusedAtBind) {
  Chain chain;
  chain.program.mutable_groups(1)->mutable_workspace_bytes()->set_constant(-1);
  const auto parsed = Template::Parse(chain.Serialize());
  ASSERT_TRUE(parsed.ok());
  BoundSizes sizes;
  const Status status = (*parsed)->Bind(std::vector<int64_t>{1}, &sizes);
  EXPECT_EQ(status.code(), StatusCode::kOverflow);
  EXPECT_NE(status.text().find("group 1 'second': workspace_bytes is -1"), std::string::npos)
      << status.text();
  Chain stride;
  stride.program.mutable_values(0)->mutable_meta()->mutable_strides(0)->set_constant(-4);
  EXPECT_EQ((*Template::Parse(stride.Serialize()))->Bind(std::vector<int64_t>{2}, &sizes).code(),
            StatusCode::kOverflow);
}

TEST(Malicious_Template, ExpressionLimitsHoldInEveryPlace) {
  proto::Expr deep;
  deep.set_constant(1);
  for (int depth = 0; depth < 33; ++depth) {
    proto::Expr outer;
    outer.mutable_call()->set_kind(proto::Expr::NOT);
    *outer.mutable_call()->add_args() = deep;
    deep = outer;
  }
  Chain size;
  *size.program.mutable_values(0)->mutable_meta()->mutable_sizes(0) = deep;
  ExpectRefused(size, StatusCode::kOverflow, "value 0, size: expression is deeper than 32");
  Chain arg;
  proto::Argument* extra = arg.program.mutable_nodes(0)->add_args();
  extra->set_name("dim");
  *extra->mutable_integer() = deep;
  ExpectRefused(arg, StatusCode::kOverflow, "node 0 (aten::relu): argument 'dim'");
  for (int depth = 0; depth < 200; ++depth) {
    proto::Expr outer;
    outer.mutable_call()->set_kind(proto::Expr::NOT);
    *outer.mutable_call()->add_args() = deep;
    deep.Swap(&outer);
  }
  Chain parse;
  *parse.program.mutable_values(0)->mutable_meta()->mutable_sizes(0) = deep;
  ExpectRefused(parse, StatusCode::kGraph, "nests too deep");
}

TEST(Malicious_Template, CountsAreBoundedBeforeAllocation) {
  Limits limits;
  limits.values_max = 5;
  ExpectRefused(Chain(), StatusCode::kOverflow, "more than 5 values", limits);
  limits = {};
  limits.nodes_max = 2;
  ExpectRefused(Chain(), StatusCode::kOverflow, "more than 2", limits);
  limits = {};
  limits.groups_max = 2;
  ExpectRefused(Chain(), StatusCode::kOverflow, "more than 2 groups", limits);
  limits = {};
  limits.symbols_max = 0;
  ExpectRefused(Chain(), StatusCode::kOverflow, "more than 0 symbols", limits);
  limits = {};
  limits.template_bytes_max = 10;
  ExpectRefused(Chain(), StatusCode::kOverflow, "the limit is 10", limits);
}

TEST(Malicious_Template, NamesAreBoundedWhereverTheyAre) {
  Limits limits;
  limits.name_bytes_max = 64;
  const std::string most(64, 'n'), more(65, 'n');
  const auto with = [](const std::string& name, int which) {
    TemplateBuilder builder = Chain();
    proto::GraphTemplate& program = builder.program;
    if (program.symbols_size() == 0) program.add_symbols()->set_max(1);
    if (which == 0) program.mutable_metadata()->set_model(name);
    if (which == 1) program.mutable_symbols(0)->set_name(name);
    if (which == 2) program.mutable_inputs(0)->set_name(name);
    if (which == 3) program.mutable_groups(1)->set_name(name);
    return builder;
  };
  const char* const where[] = {"graph 0", "symbol 0", "input 0", "group 1"};
  for (int which = 0; which < 4; ++which) {
    const auto fits = Template::Parse(with(most, which).Serialize(), limits);
    EXPECT_TRUE(fits.ok()) << fits.status().ToString();
    ExpectRefused(with(more, which), StatusCode::kGraph,
                  std::string("the name of ") + where[which] + " has 65 bytes, the limit is 64",
                  limits);
  }
}

TEST(Malicious_Template, ConstantsAreCheckedAgainstTheirShape) {
  Chain chain;
  const uint32_t value = chain.Value({2, 2});
  proto::Constant* constant = chain.program.add_constants();
  constant->set_value(value);
  constant->set_data(std::string(16, 'x'));
  EXPECT_TRUE(ParseStatus(chain).ok()) << ParseStatus(chain).ToString();
  constant->set_data(std::string(12, 'x'));
  ExpectRefused(chain, StatusCode::kGraph, "constant 0: its shape needs 16 bytes, 12 are there");
  constant->set_data(std::string(64 * 1024 + 1, 'x'));
  ExpectRefused(chain, StatusCode::kOverflow, "constant 0 has 65537 bytes");
  constant->set_data(std::string(16, 'x'));
  chain.program.mutable_values(static_cast<int>(value))
      ->mutable_meta()
      ->mutable_sizes(0)
      ->set_symbol(0);
  ExpectRefused(chain, StatusCode::kGraph, "must not depend on symbols");
}

TEST(Malicious_Template, ArgumentsMustBeDistinctAndFilled) {
  Chain twice;
  *twice.program.mutable_nodes(0)->add_args() = twice.program.nodes(0).args(0);
  ExpectRefused(twice, StatusCode::kGraph, "argument 'self' is given twice");
  Chain empty;
  empty.program.mutable_nodes(0)->add_args()->set_name("dim");
  ExpectRefused(empty, StatusCode::kGraph, "argument 'dim' has no content");
  Chain name;
  name.program.set_operators(0, "aten::relu\n%s");
  ExpectRefused(name, StatusCode::kGraph, "operator 0: not a name");
  Chain untyped;
  untyped.program.mutable_values(static_cast<int>(untyped.a))->clear_meta();
  ExpectRefused(untyped, StatusCode::kGraph,
                "node 1 (aten::mm): argument 'self' uses value 3, which has no tensor type");
}

TEST(Malicious_Template, ShapesMustBeComplete) {
  Chain strides;
  strides.program.mutable_values(0)->mutable_meta()->mutable_strides()->RemoveLast();
  ExpectRefused(strides, StatusCode::kGraph, "value 0: 2 sizes but 1 strides");
  Chain dtype;
  dtype.program.mutable_values(2)->mutable_meta()->set_dtype(proto::DTYPE_UNSPECIFIED);
  ExpectRefused(dtype, StatusCode::kGraph, "value 2: unknown dtype 0");
  Chain symbol;
  symbol.program.mutable_symbols(0)->set_min(9);
  ExpectRefused(symbol, StatusCode::kGraph, "symbol 0 'n': range 9 to 8 is empty");
  Chain kind;
  kind.program.mutable_inputs(0)->set_kind(proto::Input::KIND_UNSPECIFIED);
  ExpectRefused(kind, StatusCode::kGraph, "input 0 'x': unknown kind 0");
}

}  // namespace
}  // namespace slice::graph
