// executor_over_direct_ratio: a Llama decode step at layer grain (hidden 512, 4 layers, KV 512)
// through the executor's instance and interpreter, over the same calls made directly in C++; one
// process, same allocator, median of interleaved pairs. Prints {"figures": [...]}.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>

#include "common/clock.h"
#include "daemon/executor/cpu_backend.h"
#include "daemon/executor/local_run.h"
#include "daemon/executor/zygote.h"
#include "tests/testing/template_builder.h"

namespace slice::executor {
namespace {

using testing::TemplateBuilder;

constexpr int64_t kHidden = 512, kHeads = 8, kHeadDim = 64, kCache = 512, kInner = 1376;
constexpr uint64_t kPoolBytes = uint64_t{256} << 20;

// The program, written once: Make is the template's builder or the direct calls.
struct Builder : TemplateBuilder {
  struct Ref {
    uint32_t value;
    std::vector<int64_t> sizes;
  };
  Ref New(std::vector<int64_t> sizes) {
    std::vector<proto::Expr> exprs;
    for (const int64_t size : sizes) exprs.push_back(Constant(size));
    return {Value(exprs), sizes};
  }
  Ref Call(const std::string& op, std::initializer_list<std::pair<const char*, Ref>> args,
           std::vector<int64_t> sizes, const std::function<void(proto::Node*)>& more = {}) {
    const Ref out = New(std::move(sizes));
    proto::Node* node = Node(op, {}, {out.value});
    for (const auto& [name, ref] : args) {
      proto::Argument* arg = node->add_args();
      arg->set_name(name);
      arg->set_value(ref.value);
    }
    if (more) more(node);
    return out;
  }
  static void Ints(proto::Node* node, const char* name, const std::vector<int64_t>& values) {
    proto::Argument* arg = node->add_args();
    arg->set_name(name);
    arg->mutable_integers();
    for (const int64_t value : values) arg->mutable_integers()->add_value()->set_constant(value);
  }
  static void Float(proto::Node* node, const char* name, double value) {
    proto::Argument* arg = node->add_args();
    arg->set_name(name);
    arg->set_floating(value);
  }
  Ref View(const char* op, const Ref& x, std::vector<int64_t> sizes) {
    return Call(op, {{"self", x}}, sizes, [&](proto::Node* n) { Ints(n, "size", sizes); });
  }
  Ref Norm(const Ref& x, const Ref& w) {
    Ref squared = Call("aten::pow.Tensor_Scalar", {{"self", x}}, x.sizes,
                       [](proto::Node* n) { Integer(n, "exponent", 2); });
    Ref mean = Call("aten::mean.dim", {{"self", squared}}, {1, 1, 1}, [](proto::Node* n) {
      Ints(n, "dim", {-1});
      n->add_args()->set_name("keepdim");
      n->mutable_args(2)->set_boolean(true);
    });
    Ref shifted = Call("aten::add.Tensor", {{"self", mean}}, mean.sizes,
                       [](proto::Node* n) { Float(n, "other", 1e-5); });
    Ref root = Call("aten::rsqrt", {{"self", shifted}}, mean.sizes);
    Ref scaled = Call("aten::mul.Tensor", {{"self", x}, {"other", root}}, x.sizes);
    return Call("aten::mul.Tensor", {{"self", w}, {"other", scaled}}, x.sizes);
  }
  Ref Linear(const Ref& x, const Ref& w, int64_t out, int64_t in) {
    Ref flat = View("aten::view", x, {1, in});
    Ref t = Call("aten::t", {{"self", w}}, {in, out});
    Ref product = Call("aten::mm", {{"self", flat}, {"mat2", t}}, {1, out});
    return View("aten::_unsafe_view", product, {1, 1, out});
  }
  Ref Split(const Ref& x) {
    Ref heads = View("aten::view", x, {1, 1, kHeads, kHeadDim});
    return Transpose(heads, {1, kHeads, 1, kHeadDim});
  }
  Ref Transpose(const Ref& x, std::vector<int64_t> sizes) {
    return Call("aten::transpose.int", {{"self", x}}, std::move(sizes), [](proto::Node* n) {
      Integer(n, "dim0", 1);
      Integer(n, "dim1", 2);
    });
  }
  Ref Rotate(const Ref& q, const Ref& cos, const Ref& sin) {
    const std::vector<int64_t> half{1, kHeads, 1, kHeadDim / 2};
    const auto slice = [&](int64_t start, int64_t end) {
      return Call("aten::slice.Tensor", {{"self", q}}, half, [=](proto::Node* n) {
        Integer(n, "dim", 3);
        Integer(n, "start", start);
        Integer(n, "end", end);
      });
    };
    Ref a = Call("aten::mul.Tensor", {{"self", q}, {"other", cos}}, q.sizes);
    Ref low = slice(0, kHeadDim / 2);
    Ref high = slice(kHeadDim / 2, INT64_MAX);
    Ref negative = Call("aten::neg", {{"self", high}}, half);
    Ref joined = Call("aten::cat", {}, q.sizes, [&](proto::Node* n) {
      proto::Argument* tensors = n->add_args();
      tensors->set_name("tensors");
      tensors->mutable_values()->add_value(negative.value);
      tensors->mutable_values()->add_value(low.value);
      Integer(n, "dim", -1);
    });
    Ref b = Call("aten::mul.Tensor", {{"self", joined}, {"other", sin}}, q.sizes);
    return Call("aten::add.Tensor", {{"self", a}, {"other", b}}, q.sizes);
  }
};

struct Layer {
  at::Tensor norm1, wq, wk, wv, wo, norm2, gate, up, down, keys, values;
};

uint32_t AddStatic(Builder* b, const Builder::Ref& ref, const std::string& name, bool managed) {
  return b->Input(name, managed ? proto::Input::MANAGED : proto::Input::STATIC_CONSTANT, ref.value,
                  managed);
}

// x, cos, sin, mask dynamic; position as an integer input.
void BuildDecode(Builder* b, int layers) {
  using Ref = Builder::Ref;
  Ref x = b->New({1, 1, kHidden});
  const Ref cos = b->New({1, 1, kHeadDim}), sin = b->New({1, 1, kHeadDim}),
            mask = b->New({1, 1, 1, kCache});
  const Ref position{b->Value({1}, proto::INT64), {1}};
  b->Input("x", proto::Input::DYNAMIC, x.value);
  b->Input("cos", proto::Input::DYNAMIC, cos.value);
  b->Input("sin", proto::Input::DYNAMIC, sin.value);
  b->Input("mask", proto::Input::DYNAMIC, mask.value);
  b->Input("position", proto::Input::DYNAMIC, position.value);
  for (int l = 0; l < layers; ++l) {
    std::vector<uint32_t> reads, writes;
    const auto weight = [&](std::vector<int64_t> sizes) {
      Ref ref = b->New(std::move(sizes));
      reads.push_back(AddStatic(b, ref, "weight", false));
      return ref;
    };
    const auto cache = [&] {
      Ref ref = b->New({1, kHeads, kCache, kHeadDim});
      writes.push_back(AddStatic(b, ref, "cache", true));
      return ref;
    };
    const Ref norm1 = weight({kHidden}), wq = weight({kHidden, kHidden}),
              wk = weight({kHidden, kHidden}), wv = weight({kHidden, kHidden}),
              wo = weight({kHidden, kHidden}), norm2 = weight({kHidden}),
              gate = weight({kInner, kHidden}), up = weight({kInner, kHidden}),
              down = weight({kHidden, kInner});
    const Ref keys = cache(), values = cache();
    Ref h = b->Norm(x, norm1);
    Ref q = b->Split(b->Linear(h, wq, kHidden, kHidden)),
        k = b->Split(b->Linear(h, wk, kHidden, kHidden)),
        v = b->Split(b->Linear(h, wv, kHidden, kHidden));
    const auto unsqueeze = [&](const Ref& t) {
      return b->Call("aten::unsqueeze", {{"self", t}}, {1, 1, 1, kHeadDim},
                     [](proto::Node* n) { TemplateBuilder::Integer(n, "dim", 1); });
    };
    const Ref c = unsqueeze(cos), s = unsqueeze(sin);
    q = b->Rotate(q, c, s);
    k = b->Rotate(k, c, s);
    const auto store = [&](const Ref& into, const Ref& what) {
      return b->Call("aten::index_copy_", {{"self", into}, {"index", position}, {"source", what}},
                     into.sizes, [](proto::Node* n) { TemplateBuilder::Integer(n, "dim", 2); });
    };
    const Ref kc = store(keys, k), vc = store(values, v);
    const Ref attention = b->New({1, kHeads, 1, kHeadDim});
    proto::Node* node = b->Node(
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        {{"query", q.value}, {"key", kc.value}, {"value", vc.value}, {"attn_mask", mask.value}},
        {attention.value, -1});
    Builder::Float(node, "scale", 0.125);
    const Ref merged =
        b->View("aten::view", b->Transpose(attention, {1, 1, kHeads, kHeadDim}), {1, 1, kHidden});
    const Ref r =
        b->Call("aten::add.Tensor",
                {{"self", x}, {"other", b->Linear(merged, wo, kHidden, kHidden)}}, x.sizes);
    const Ref h2 = b->Norm(r, norm2);
    const Ref g =
        b->Call("aten::silu", {{"self", b->Linear(h2, gate, kInner, kHidden)}}, {1, 1, kInner});
    const Ref m =
        b->Call("aten::mul.Tensor", {{"self", g}, {"other", b->Linear(h2, up, kInner, kHidden)}},
                {1, 1, kInner});
    x = b->Call("aten::add.Tensor", {{"self", r}, {"other", b->Linear(m, down, kHidden, kInner)}},
                x.sizes);
    b->Group("layer " + std::to_string(l), reads, writes);
  }
  b->Output(x.value);
}

at::Tensor Norm(const at::Tensor& x, const at::Tensor& w) {
  return at::mul(w, at::mul(x, at::rsqrt(at::add(at::mean(at::pow(x, 2), {-1}, true), 1e-5))));
}
at::Tensor Linear(const at::Tensor& x, const at::Tensor& w, int64_t out, int64_t in) {
  return at::_unsafe_view(at::mm(x.view({1, in}), at::t(w)), {1, 1, out});
}
at::Tensor Split(const at::Tensor& x) {
  return at::transpose(x.view({1, 1, kHeads, kHeadDim}), 1, 2);
}
at::Tensor Rotate(const at::Tensor& q, const at::Tensor& cos, const at::Tensor& sin) {
  const at::Tensor a = at::mul(q, cos);
  const at::Tensor low = at::slice(q, 3, 0, kHeadDim / 2),
                   high = at::slice(q, 3, kHeadDim / 2, INT64_MAX);
  return at::add(a, at::mul(at::cat({at::neg(high), low}, -1), sin));
}

at::Tensor Direct(const std::vector<Layer>& layers, at::Tensor x, const at::Tensor& cos,
                  const at::Tensor& sin, const at::Tensor& mask, const at::Tensor& position) {
  for (const Layer& layer : layers) {
    const at::Tensor h = Norm(x, layer.norm1);
    at::Tensor q = Split(Linear(h, layer.wq, kHidden, kHidden)),
               k = Split(Linear(h, layer.wk, kHidden, kHidden)),
               v = Split(Linear(h, layer.wv, kHidden, kHidden));
    const at::Tensor c = at::unsqueeze(cos, 1), s = at::unsqueeze(sin, 1);
    q = Rotate(q, c, s);
    k = Rotate(k, c, s);
    at::Tensor keys = layer.keys, values = layer.values;
    keys.index_copy_(2, position, k);
    values.index_copy_(2, position, v);
    const at::Tensor attention = std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, false, mask, 0.125));
    const at::Tensor merged = at::transpose(attention, 1, 2).view({1, 1, kHidden});
    const at::Tensor r = at::add(x, Linear(merged, layer.wo, kHidden, kHidden));
    const at::Tensor h2 = Norm(r, layer.norm2);
    const at::Tensor m = at::mul(at::silu(Linear(h2, layer.gate, kInner, kHidden)),
                                 Linear(h2, layer.up, kInner, kHidden));
    x = at::add(r, Linear(m, layer.down, kHidden, kInner));
  }
  return x;
}

double Median(std::vector<double> list) {
  std::nth_element(list.begin(), list.begin() + static_cast<ptrdiff_t>(list.size() / 2),
                   list.end());
  return list[list.size() / 2];
}

int Main(int pairs, int layer_count) {
  PrepareTorch();
  const std::unique_ptr<DeviceBackend> backend = CreateCpuBackend();
  SLICE_CHECK(backend->OpenDomain(LocalRun::kDomain, 0, kPoolBytes).ok(), "pool");
  Builder builder;
  BuildDecode(&builder, layer_count);
  const auto source = graph::Template::Parse(builder.Serialize());
  if (!source.ok()) {
    std::fprintf(stderr, "%s\n", source.status().ToString().c_str());
    return 1;
  }
  auto made = LocalRun::Create(backend.get(), *source, {}, 1, kPoolBytes);
  if (!made.ok()) {
    std::fprintf(stderr, "%s\n", made.status().ToString().c_str());
    return 1;
  }
  LocalRun& run = **made;
  std::vector<Layer> layers;
  for (uint32_t l = 0; l < static_cast<uint32_t>(layer_count); ++l) {
    const auto get = [&](uint32_t i) { return run.static_tensor(l * 11 + i); };
    layers.push_back({get(0), get(1), get(2), get(3), get(4), get(5), get(6), get(7), get(8),
                      get(9).clone(), get(10).clone()});
  }
  const c10::InferenceMode inference;
  const auto input = [&](size_t i, at::IntArrayRef sizes, at::ScalarType type) {
    return at::from_blob(run.input(i), sizes, type);
  };
  const at::Tensor x = input(0, {1, 1, kHidden}, at::kFloat),
                   cos = input(1, {1, 1, kHeadDim}, at::kFloat),
                   sin = input(2, {1, 1, kHeadDim}, at::kFloat),
                   mask = input(3, {1, 1, 1, kCache}, at::kFloat),
                   position = input(4, {1}, at::kLong);
  at::Tensor expected;
  const auto direct = [&] {
    backend->BeginOp({0, LocalRun::kDomain, LocalRun::kTenant});
    expected = Direct(layers, x, cos, sin, mask, position);
    std::memcpy(const_cast<std::byte*>(run.result(0).data()), expected.data_ptr(),
                expected.nbytes());
    OpTiming timing;
    static_cast<void>(backend->EndOp(&timing));
  };
  const auto executor = [&] {
    const Status status = run.Run();
    SLICE_CHECK(status.ok(), status.ToString().c_str());
  };
  for (int i = 0; i < 5; ++i) {
    direct();
    executor();
  }
  const bool equal = at::equal(
      expected, at::from_blob(const_cast<std::byte*>(run.result(0).data()), {1, 1, kHidden}));
  std::vector<double> ratios, direct_us, executor_us;
  for (int i = 0; i < pairs; ++i) {
    double us[2];
    for (int step = 0; step < 2; ++step) {
      const bool is_direct = (step + i) % 2 == 0;
      const TimeNs start = MonotonicNow();
      if (is_direct)
        direct();
      else
        executor();
      us[is_direct ? 0 : 1] = static_cast<double>(MonotonicNow() - start) / 1e3;
    }
    direct_us.push_back(us[0]);
    executor_us.push_back(us[1]);
    ratios.push_back(us[1] / us[0]);
  }
  std::printf(
      "{\"figures\": [{\"name\": \"executor_over_direct_ratio\", \"value\": %.4f, \"unit\": "
      "\"ratio\", "
      "\"goal_max\": 1.05, \"detail\": \"Llama decode step, hidden %lld, %d layers, median of %d "
      "pairs: direct "
      "%.1f us, executor %.1f us, results %s\"}]}\n",
      Median(ratios), static_cast<long long>(kHidden), layer_count, pairs, Median(direct_us),
      Median(executor_us), equal ? "equal" : "DIFFER");
  return equal ? 0 : 1;
}

}  // namespace
}  // namespace slice::executor

int main(int argc, char** argv) {
  slice::executor::PrepareEnvironment(argv);
  return slice::executor::Main(argc > 1 ? std::atoi(argv[1]) : 300,
                               argc > 2 ? std::atoi(argv[2]) : 4);
}
