// Graph templates for scheduling tests, where only structure, sizes and durations matter: chains,
// diamonds, Llama-like layers with managed pieces, random DAGs. A group's duration in nanoseconds
// is its flops / 20: what the prior of the engine's estimator says as well.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/units.h"
#include "daemon/graph/template.h"
#include "tests/testing/template_builder.h"

namespace slice::testing {

inline constexpr int64_t kFlopsPerNs = 20;

class GraphBuilder {
 public:
  explicit GraphBuilder(const std::string& name) {
    builder_.program.mutable_metadata()->set_model(name);
  }

  uint32_t Dynamic(const std::string& name, int64_t bytes) {
    const uint32_t value = Bytes(bytes);
    builder_.Input(name, proto::Input::DYNAMIC, value);
    return value;
  }
  // Static inputs return the input index (for reads and writes).
  uint32_t Constant(const std::string& name, int64_t bytes) {
    return builder_.Input(name, proto::Input::STATIC_CONSTANT, Bytes(bytes));
  }
  uint32_t Managed(const std::string& name, int64_t bytes, bool written = true) {
    return builder_.Input(name, proto::Input::MANAGED, Bytes(bytes), written);
  }
  uint32_t Mutable(const std::string& name, int64_t bytes, bool written = true) {
    return builder_.Input(name, proto::Input::STATIC_MUTABLE, Bytes(bytes), written);
  }
  struct Use {
    std::vector<uint32_t> reads, writes;
    int64_t workspace = 0;
    uint64_t signature = 0;
  };
  // One group: reads `in`, makes one value of `bytes`; returns it.
  uint32_t Op(const std::string& name, const std::vector<uint32_t>& in, int64_t bytes,
              DurationNs duration, const Use& use) {
    const uint32_t out = Bytes(bytes);
    proto::Node* const node = builder_.Node("aten::cat", {}, {out});
    if (!in.empty()) {
      proto::Argument* const arg = node->add_args();
      arg->set_name("tensors");
      for (const uint32_t value : in) arg->mutable_values()->add_value(value);
    }
    proto::Group* const group = builder_.Group(name, use.reads, use.writes);
    if (use.signature != 0) group->set_signature(use.signature);
    if (use.signature == 0) group->set_signature(Hash(name));
    *group->mutable_flops() = TemplateBuilder::Constant(duration * kFlopsPerNs);
    *group->mutable_workspace_bytes() = TemplateBuilder::Constant(use.workspace);
    return out;
  }
  uint32_t Op(const std::string& name, const std::vector<uint32_t>& in, int64_t bytes,
              DurationNs duration) {
    return Op(name, in, bytes, duration, Use());
  }
  void Output(uint32_t value) { builder_.Output(value); }
  std::string Serialize() const { return builder_.Serialize(); }
  std::shared_ptr<const graph::Template> Build() const {
    Result<std::shared_ptr<const graph::Template>> parsed = graph::Template::Parse(Serialize());
    SLICE_CHECK(parsed.ok(), parsed.status().ToString().c_str());
    return *parsed;
  }

 private:
  uint32_t Bytes(int64_t bytes) {
    SLICE_CHECK(bytes % 4 == 0, "float32 values");
    return builder_.Value({bytes / 4});
  }
  static uint64_t Hash(const std::string& name) { return graph::ContentHash(name) | 1; }
  TemplateBuilder builder_;
};

// x -> op0 -> op1 -> ... -> result.
inline std::shared_ptr<const graph::Template> Chain(int length, DurationNs duration, int64_t bytes,
                                                    bool constant = true,
                                                    const std::string& name = "chain") {
  GraphBuilder graph(name);
  uint32_t value = graph.Dynamic("x", bytes);
  GraphBuilder::Use use;
  if (constant) use.reads = {graph.Constant("w", 1024)};
  use.signature = 1000 + static_cast<uint64_t>(duration);
  for (int i = 0; i < length; ++i)
    value = graph.Op("op" + std::to_string(i), {value}, bytes, duration, use);
  graph.Output(value);
  return graph.Build();
}

// One source, `width` branches, one sink.
inline std::shared_ptr<const graph::Template> Diamond(int width, DurationNs duration,
                                                      int64_t bytes) {
  GraphBuilder graph("diamond");
  GraphBuilder::Use use;
  use.reads = {graph.Constant("w", 1024)};
  const uint32_t source = graph.Op("source", {graph.Dynamic("x", bytes)}, bytes, duration, use);
  std::vector<uint32_t> branches;
  for (int i = 0; i < width; ++i)
    branches.push_back(graph.Op("branch" + std::to_string(i), {source}, bytes, duration, use));
  graph.Output(graph.Op("sink", branches, bytes, duration, use));
  return graph.Build();
}

// Embedding, `layers` layers that each write their K and V pieces, head. Statics: w, then k0, v0,
// k1, v1, ...
inline std::shared_ptr<const graph::Template> Llama(int layers, DurationNs layer, int64_t bytes,
                                                    int64_t piece_bytes,
                                                    const std::string& name = "llama") {
  GraphBuilder graph(name);
  const uint32_t ids = graph.Dynamic("ids", 64);
  GraphBuilder::Use use;
  const uint32_t weights = graph.Constant("w", 4096);
  use.reads = {weights};
  std::vector<uint32_t> k, v;
  for (int i = 0; i < layers; ++i) {
    const std::string number = std::to_string(i);
    k.push_back(graph.Managed("k" + number, piece_bytes));
    v.push_back(graph.Managed("v" + number, piece_bytes));
  }
  use.signature = 1;
  uint32_t hidden = graph.Op("embed", {ids}, bytes, layer / 4, use);
  for (int i = 0; i < layers; ++i) {
    GraphBuilder::Use layer_use;
    const auto index = static_cast<size_t>(i);
    layer_use.reads = {weights, k[index], v[index]};
    layer_use.writes = {k[index], v[index]};
    layer_use.workspace = bytes;
    layer_use.signature = 2 + static_cast<uint64_t>(layer);
    hidden = graph.Op("layer" + std::to_string(i), {hidden}, bytes, layer, layer_use);
  }
  use.signature = 3;
  graph.Output(graph.Op("head", {hidden}, bytes, layer / 2, use));
  return graph.Build();
}

// A decoder at layer grain as the front end captures it, with sizes that depend on the number of
// tokens: embedding (which also makes the rotary tables and the mask that every layer reads),
// `layers` layers that each write their K and V pieces, head. Symbol 0: tokens. Statics: w, then
// k0, v0, k1, v1, ...
inline std::shared_ptr<const graph::Template> SymbolicLlama(int layers, int64_t hidden_size,
                                                            int64_t piece_bytes,
                                                            const std::string& name = "llama") {
  TemplateBuilder builder;
  builder.program.mutable_metadata()->set_model(name);
  builder.AddSymbol("tokens", 1, 4096);
  const auto tokens = TemplateBuilder::Symbol(0);
  const auto constant = [](int64_t value) { return TemplateBuilder::Constant(value); };
  const auto times = [&](int64_t factor) {
    proto::Expr expr;
    expr.mutable_call()->set_kind(proto::Expr::MUL);
    *expr.mutable_call()->add_args() = constant(factor);
    *expr.mutable_call()->add_args() = tokens;
    return expr;
  };
  const auto value = [&](std::vector<proto::Expr> sizes, proto::DType dtype = proto::BFLOAT16) {
    return builder.Value(sizes, dtype);
  };
  const uint32_t ids = value({constant(1), tokens}, proto::INT64);
  builder.Input("ids", proto::Input::DYNAMIC, ids);
  builder.Input("w", proto::Input::STATIC_CONSTANT, value({constant(1024)}));
  for (int i = 0; i < layers; ++i) {
    for (const char* const kind : {"k", "v"}) {
      builder.Input(kind + std::to_string(i), proto::Input::MANAGED,
                    value({constant(piece_bytes / 2)}), true);
    }
  }
  const auto cost = [&](proto::Group* group, int64_t flops) {
    *group->mutable_flops() = times(flops);
    *group->mutable_bytes() = times(flops / 1024);
    *group->mutable_workspace_bytes() = times(8 * hidden_size);
  };
  uint32_t hidden = value({constant(1), tokens, constant(hidden_size)});
  const uint32_t cosine = value({constant(1), tokens, constant(128)});
  const uint32_t sine = value({constant(1), tokens, constant(128)});
  const uint32_t mask = value({constant(1), constant(1), tokens, constant(512)});
  builder.Node("aten::embedding", {{"indices", ids}}, {hidden});
  builder.Node("aten::cos", {{"self", hidden}}, {cosine});
  builder.Node("aten::sin", {{"self", hidden}}, {sine});
  builder.Node("aten::tril", {{"self", hidden}}, {mask});
  cost(builder.Group("embed", {1}), hidden_size);
  for (uint32_t i = 0; i < static_cast<uint32_t>(layers); ++i) {
    const uint32_t out = value({constant(1), tokens, constant(hidden_size)});
    builder.Node("aten::decoder",
                 {{"self", hidden}, {"cos", cosine}, {"sin", sine}, {"mask", mask}}, {out});
    proto::Group* const group = builder.Group("layer" + std::to_string(i),
                                              {1, 2 + 2 * i, 3 + 2 * i}, {2 + 2 * i, 3 + 2 * i});
    group->set_signature(77);
    cost(group, 24 * hidden_size * hidden_size);
    hidden = out;
  }
  const uint32_t logits = value({constant(1), tokens, constant(32'000)});
  builder.Node("aten::linear", {{"input", hidden}}, {logits});
  cost(builder.Group("head", {1}), 2 * 32'000 * hidden_size);
  builder.Output(logits);
  Result<std::shared_ptr<const graph::Template>> parsed =
      graph::Template::Parse(builder.Serialize());
  SLICE_CHECK(parsed.ok(), parsed.status().ToString().c_str());
  return *parsed;
}

// A random DAG: each op reads up to three earlier values.
inline std::shared_ptr<const graph::Template> RandomDag(std::mt19937_64* random, int ops,
                                                        int64_t bytes_max, DurationNs duration_max,
                                                        bool constant = true) {
  GraphBuilder graph("random");
  std::vector<uint32_t> values{graph.Dynamic("x", 256)};
  GraphBuilder::Use use;
  if (constant) use.reads = {graph.Constant("w", 1024)};
  const auto pick = [random](int64_t low, int64_t high) {
    return low + static_cast<int64_t>((*random)() % static_cast<uint64_t>(high - low + 1));
  };
  uint32_t last = 0;
  for (int i = 0; i < ops; ++i) {
    std::vector<uint32_t> in;
    const int64_t count = pick(1, 3);
    for (int64_t n = 0; n < count; ++n)
      in.push_back(values[static_cast<size_t>(pick(0, static_cast<int64_t>(values.size()) - 1))]);
    use.workspace = pick(0, 4) * 1024;
    last = graph.Op("op" + std::to_string(i), in, pick(1, bytes_max / 1024) * 1024,
                    pick(duration_max / 20, duration_max), use);
    values.push_back(last);
  }
  graph.Output(last);
  return graph.Build();
}

}  // namespace slice::testing
