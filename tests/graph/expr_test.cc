#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include "daemon/graph/template.h"

namespace slice::graph {
namespace {

proto::Expr Text(const std::string& text) {
  proto::Expr expr;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &expr)) << text;
  return expr;
}

proto::Expr Call(proto::Expr::Kind kind, std::initializer_list<int64_t> args) {
  proto::Expr expr;
  expr.mutable_call()->set_kind(kind);
  for (const int64_t arg : args) expr.mutable_call()->add_args()->set_constant(arg);
  return expr;
}

Result<int64_t> Evaluate(const proto::Expr& expr, std::vector<int64_t> symbols = {}) {
  ExprTable table;
  Result<ExprIndex> index = table.Add(expr, static_cast<uint32_t>(symbols.size()), Limits{});
  if (!index.ok()) return index.status();
  return table.Evaluate(*index, symbols);
}

TEST(Happy_Expr, KindsEvaluateAsPythonDoes) {
  EXPECT_EQ(*Evaluate(Call(proto::Expr::ADD, {1, 2, 3})), 6);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::MUL, {4, 5})), 20);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::FLOOR_DIV, {-7, 2})), -4);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::FLOOR_DIV, {7, -2})), -4);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::CEIL_DIV, {7, 2})), 4);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::CEIL_DIV, {-7, 2})), -3);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::MOD, {-7, 3})), 2);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::MOD, {7, -3})), -2);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::POW, {3, 4})), 81);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::MAX, {3, 9, 4})), 9);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::MIN, {3, 9, 4})), 3);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::NOT, {5})), 0);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::AND, {5, 1})), 1);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::OR, {0, 0})), 0);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::LE, {3, 3})), 1);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::SHIFT_LEFT, {3, 4})), 48);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::SHIFT_RIGHT, {-48, 4})), -3);
}

TEST(Happy_Expr, SymbolsAreBound) {
  EXPECT_EQ(*Evaluate(Text("call { kind: MUL args { symbol: 1 } args { symbol: 0 } }"), {6, 7}),
            42);
}

TEST(Edge_Expr, ErrorInBranchNotTakenIsNoError) {
  const auto expr = Text(
      "call { kind: WHERE args { symbol: 0 } args { call { kind: FLOOR_DIV args { constant: 10 } "
      "args { symbol: 0 } } }"
      " args { constant: 0 } }");
  EXPECT_EQ(*Evaluate(expr, {0}), 0);
  EXPECT_EQ(*Evaluate(expr, {5}), 2);
}

TEST(Edge_Expr, ArithmeticOverflowIsTyped) {
  for (const auto& expr :
       {Call(proto::Expr::ADD, {INT64_MAX, 1}), Call(proto::Expr::MUL, {INT64_MAX, 2}),
        Call(proto::Expr::FLOOR_DIV, {INT64_MIN, -1}), Call(proto::Expr::FLOOR_DIV, {1, 0}),
        Call(proto::Expr::MOD, {1, 0}), Call(proto::Expr::POW, {10, 19}),
        Call(proto::Expr::POW, {2, -1}), Call(proto::Expr::SHIFT_LEFT, {1, 63}),
        Call(proto::Expr::SHIFT_RIGHT, {1, -1})}) {
    EXPECT_EQ(Evaluate(expr).status().code(), StatusCode::kOverflow) << expr.ShortDebugString();
  }
  EXPECT_EQ(*Evaluate(Call(proto::Expr::MOD, {INT64_MIN, -1})), 0);
  EXPECT_EQ(*Evaluate(Call(proto::Expr::POW, {1, INT64_MAX})), 1);
}

TEST(Malicious_Expr, ShapeOfTreeIsChecked) {
  EXPECT_EQ(Evaluate(proto::Expr()).status().code(), StatusCode::kGraph);
  EXPECT_EQ(Evaluate(Text("symbol: 3"), {1}).status().code(), StatusCode::kGraph);
  EXPECT_EQ(Evaluate(Call(proto::Expr::FLOOR_DIV, {1})).status().code(), StatusCode::kGraph);
  EXPECT_EQ(Evaluate(Call(proto::Expr::ADD, {})).status().code(), StatusCode::kGraph);
  EXPECT_EQ(Evaluate(Call(static_cast<proto::Expr::Kind>(77), {1})).status().code(),
            StatusCode::kGraph);
}

TEST(Malicious_Expr, DepthAndNodesAreBounded) {
  proto::Expr deep;
  deep.set_constant(1);
  for (int depth = 2; depth <= 32; ++depth) {
    proto::Expr outer;
    outer.mutable_call()->set_kind(proto::Expr::NOT);
    *outer.mutable_call()->add_args() = deep;
    deep = outer;
  }
  EXPECT_TRUE(Evaluate(deep).ok());
  proto::Expr deeper;
  deeper.mutable_call()->set_kind(proto::Expr::NOT);
  *deeper.mutable_call()->add_args() = deep;
  const auto refused = Evaluate(deeper);
  EXPECT_EQ(refused.status().code(), StatusCode::kOverflow);
  EXPECT_NE(refused.status().text().find("deeper than 32"), std::string::npos);

  proto::Expr wide;
  wide.mutable_call()->set_kind(proto::Expr::ADD);
  for (int i = 0; i < 255; ++i) wide.mutable_call()->add_args()->set_constant(1);
  EXPECT_EQ(*Evaluate(wide), 255);
  wide.mutable_call()->add_args()->set_constant(1);
  EXPECT_EQ(Evaluate(wide).status().code(), StatusCode::kOverflow);
}

}  // namespace
}  // namespace slice::graph
