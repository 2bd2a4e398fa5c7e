// slice-executor as a process, spoken to as the daemon does.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cmath>
#include <csignal>

#include "common/clock.h"
#include "common/wire/tenant_ring.h"
#include "tests/testing/fake_engine.h"
#include "tests/testing/template_builder.h"

namespace slice {
namespace {

using testing::FakeEngine;
using testing::TemplateBuilder;

std::shared_ptr<const graph::Template> Parse(const proto::GraphTemplate& program) {
  return graph::Template::Parse(program.SerializeAsString()).value();
}

// x -> a = relu(x) -> b = mm(a, w) -> y = neg(b): three groups, one weight.
struct Chain : TemplateBuilder {
  explicit Chain(int64_t n = 8) {
    x = Value({n, n});
    w = Value({n, n});
    a = Value({n, n});
    b = Value({n, n});
    y = Value({n, n});
    Input("x", proto::Input::DYNAMIC, x);
    Input("w", proto::Input::STATIC_CONSTANT, w);
    Node("aten::relu", {{"self", x}}, {a});
    Group("first");
    Node("aten::mm", {{"self", a}, {"mat2", w}}, {b});
    Group("second", {1});
    Node("aten::neg", {{"self", b}}, {y});
    Group("third");
    Output(y);
  }
  uint32_t x, w, a, b, y;
};

// state += x, in place; y = state * 1.
struct Accumulate : TemplateBuilder {
  Accumulate() {
    const uint32_t x = Value({4});
    const uint32_t state = Value({4});
    const uint32_t next = Value({4});
    const uint32_t y = Value({4});
    Input("x", proto::Input::DYNAMIC, x);
    Input("state", proto::Input::MANAGED, state, true);
    Node("aten::add_.Tensor", {{"self", state}, {"other", x}}, {next});
    Node("aten::abs", {{"self", next}}, {y});
    Group("all", {}, {1});
    Output(y);
  }
};

struct Executor {
  explicit Executor(const proto::GraphTemplate& program, std::vector<uint32_t> device_domains = {0},
                    uint32_t domains = 1, std::vector<int64_t> bound = {},
                    uint64_t cap = uint64_t{48} << 20)
      : source(Parse(program)),
        symbols(std::move(bound)),
        engine(SLICE_EXECUTOR, std::move(device_domains), domains) {
    EXPECT_EQ(engine.Setup().status(), SLICE_OK);
    EXPECT_EQ(engine.AddTenant(FakeEngine::kTenant, cap).status(), SLICE_OK);
    const auto added = engine.AddTemplate(1, program);
    EXPECT_EQ(added.status(), SLICE_OK) << added.text();
    EXPECT_EQ(engine.AddStatics(1, *source, symbols).status(), SLICE_OK);
    const auto bind = engine.AddBinding(1, 1, 1, source->statics().size());
    EXPECT_EQ(bind.status(), SLICE_OK) << bind.text();
  }
  // Issues every op on `device` at once and waits for all.
  void RunAll(uint64_t instance, uint32_t device = 0) {
    engine.StartInstance(instance, 1, *source, symbols);
    for (uint32_t op = 0; op < source->groups().size(); ++op) engine.Issue(instance, op, device);
    for (uint32_t op = 0; op < source->groups().size(); ++op) {
      const auto finished = engine.Wait<wire::Finished>(wire::kFinished);
      ASSERT_TRUE(finished.has_value());
      EXPECT_EQ(finished->op, op);
      EXPECT_GE(finished->end_ns, finished->start_ns);
      EXPECT_GT(finished->peak_bytes, 0);
    }
  }
  void End(uint64_t instance) {
    engine.EndInstance(instance);
    ASSERT_TRUE(engine.Wait<wire::InstanceEnded>(wire::kInstanceEnded).has_value());
    EXPECT_EQ(engine.PoolBytes(), 0u);
  }
  float* input(size_t position) { return reinterpret_cast<float*>(engine.input(position)); }
  float* result(size_t position) { return reinterpret_cast<float*>(engine.result(position)); }

  std::shared_ptr<const graph::Template> source;
  std::vector<int64_t> symbols;
  FakeEngine engine;
};

void FillArena(FakeEngine* engine, size_t floats) {
  auto* numbers = reinterpret_cast<float*>(engine->arena());
  for (size_t i = 0; i < floats; ++i) numbers[i] = static_cast<float>(i % 7) - 3.0f;
}

TEST(Happy_Executor, ChainGivesTheRightNumbers) {
  Executor executor(Chain().program);
  FillArena(&executor.engine, 64);
  executor.RunAll(5);
  const auto* w = reinterpret_cast<const float*>(executor.engine.segment(1, 0));
  for (int row = 0; row < 8; ++row) {
    for (int column = 0; column < 8; ++column) {
      float expected = 0;
      for (int k = 0; k < 8; ++k)
        expected -= std::max(executor.input(0)[row * 8 + k], 0.0f) * w[k * 8 + column];
      EXPECT_NEAR(executor.result(0)[row * 8 + column], expected, 1e-5f);
    }
  }
  executor.End(5);
}

TEST(Happy_Executor, GoldenTemplatesRun) {
  for (const std::string name : {"mlp", "llama_prefill", "llama_decode"}) {
    const auto program =
        testing::ReadTextTemplate(std::string(SLICE_GOLDEN_DIR "/") + name + ".textproto");
    std::vector<int64_t> symbols;
    for (const auto& symbol : program.symbols()) symbols.push_back(symbol.min() + 2);
    Executor executor(program, {0}, 1, symbols);
    executor.RunAll(1);
    bool finite = true;
    for (size_t i = 0; i < executor.engine.result_bytes(0) / sizeof(float); ++i) {
      finite &= std::isfinite(executor.result(0)[i]);
    }
    EXPECT_TRUE(finite) << name;
    executor.End(1);
  }
}

TEST(Happy_Executor, DuplicateCommandsChangeNothing) {
  Executor executor(Accumulate().program);
  FillArena(&executor.engine, 4);
  executor.engine.StartInstance(1, 1, *executor.source);
  executor.engine.StartInstance(1, 1, *executor.source);
  for (int i = 0; i < 3; ++i) executor.engine.Issue(1, 0, 0);
  ASSERT_TRUE(executor.engine.Wait<wire::Finished>(wire::kFinished).has_value());
  executor.engine.Issue(1, 0, 0);
  executor.End(1);
  EXPECT_FALSE(executor.engine.Has(wire::kFinished));
  EXPECT_FLOAT_EQ(reinterpret_cast<float*>(executor.engine.segment(1, 0))[0], -3.0f);
}

TEST(Happy_Executor, ValueMovesBetweenDomains) {
  Executor executor(Chain(512).program, {0, 1}, 2);
  FakeEngine& engine = executor.engine;
  FillArena(&engine, 512 * 512);
  // Weights are a set: replicated to domain 1 first.
  engine.Push(wire::kWatch, wire::Watch{10, 0, 0, 0, 1, 0, 1, 1, 0});
  ASSERT_TRUE(engine.Wait<wire::Intent>(wire::kIntent).has_value());
  engine.Push(wire::kRecv, wire::TransferRef{10});
  engine.Push(wire::kSend, wire::TransferRef{10});
  const auto replicated = engine.Wait<wire::TransferDone>(wire::kTransferDone);
  ASSERT_TRUE(replicated.has_value());
  EXPECT_EQ(replicated->status, SLICE_OK);
  EXPECT_EQ(replicated->bytes, 512 * 512 * 4);
  EXPECT_EQ(std::memcmp(engine.segment(1, 0), engine.segment(1, 1), 512 * 512 * 4), 0);

  executor.RunAll(1, 0);
  const std::vector<float> expected(executor.result(0), executor.result(0) + 512 * 512);
  std::memset(executor.result(0), 0, expected.size() * sizeof(float));
  executor.End(1);

  // Same again, the second op on the other device.
  const uint32_t a = 2;
  engine.StartInstance(2, 1, *executor.source);
  engine.Push(wire::kWatch, wire::Watch{11, 2, 1, a, 0, 0, 1, 0, 0});
  engine.Issue(2, 1, 1);  // waits for its input
  EXPECT_FALSE(engine.Has(wire::kIntent));
  engine.Issue(2, 0, 0);
  const auto intent = engine.Wait<wire::Intent>(wire::kIntent);
  ASSERT_TRUE(intent.has_value());
  EXPECT_EQ(intent->transfer, 11u);
  ASSERT_EQ(engine.Wait<wire::Finished>(wire::kFinished)->op, 0u);
  engine.Push(wire::kRecv, wire::TransferRef{11});
  engine.Push(wire::kSend, wire::TransferRef{11});
  EXPECT_EQ(engine.Wait<wire::TransferDone>(wire::kTransferDone)->status, SLICE_OK);
  const auto second = engine.Wait<wire::Finished>(wire::kFinished);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->op, 1u);
  EXPECT_EQ(second->device, 1u);
  engine.Issue(2, 2, 1);
  ASSERT_TRUE(engine.Wait<wire::Finished>(wire::kFinished).has_value());
  EXPECT_EQ(std::memcmp(executor.result(0), expected.data(), expected.size() * sizeof(float)), 0);
  executor.End(2);
}

TEST(Happy_Executor, DevicesOfOneDomainShareValues) {
  Executor executor(Chain().program, {0, 0}, 1);
  FillArena(&executor.engine, 64);
  executor.engine.StartInstance(1, 1, *executor.source);
  for (uint32_t op = 0; op < 3; ++op) executor.engine.Issue(1, op, op % 2);
  for (uint32_t op = 0; op < 3; ++op) {
    const auto finished = executor.engine.Wait<wire::Finished>(wire::kFinished);
    ASSERT_TRUE(finished.has_value());
    EXPECT_EQ(finished->op, op);
    EXPECT_EQ(finished->device, op % 2);
  }
  executor.End(1);
}

TEST(Edge_Executor, RecalledOpDoesNotRunAndMayBeIssuedAgain) {
  Executor executor(Chain().program);
  FakeEngine& engine = executor.engine;
  FillArena(&engine, 64);
  engine.StartInstance(1, 1, *executor.source);
  engine.Issue(1, 1, 0);  // cannot start: op 0 is not issued
  engine.Push(wire::kRecall, wire::Recall{1, 1, 1});
  const auto recalled = engine.Wait<wire::Recalled>(wire::kRecalled);
  ASSERT_TRUE(recalled.has_value());
  EXPECT_EQ(recalled->op, 1u);
  EXPECT_EQ(recalled->reason, 0u);
  for (uint32_t op = 0; op < 3; ++op) engine.Issue(1, op, 0);
  for (uint32_t op = 0; op < 3; ++op)
    ASSERT_TRUE(engine.Wait<wire::Finished>(wire::kFinished).has_value());
  // A launched or finished op is answered by its reports alone.
  engine.Push(wire::kRecall, wire::Recall{1, 1, 1});
  executor.End(1);
  EXPECT_FALSE(engine.Has(wire::kRecalled));
}

TEST(Edge_Executor, OfflineOpOutsideItsWindowIsGivenBack) {
  Executor executor(Chain().program);
  FakeEngine& engine = executor.engine;
  engine.StartInstance(1, 1, *executor.source);
  engine.Issue(1, 0, 0, [](wire::Issue* issue) {
    issue->service_class = 1;
    issue->duration_ns = kMillisecond;
    issue->end_by_ns = MonotonicNow() - kSecond;
  });
  const auto recalled = engine.Wait<wire::Recalled>(wire::kRecalled);
  ASSERT_TRUE(recalled.has_value());
  EXPECT_EQ(recalled->reason, 1u);
  executor.End(1);
}

TEST(Edge_Executor, OfflineOpWaitsForItsEarliestTime) {
  Executor executor(Chain().program);
  FakeEngine& engine = executor.engine;
  engine.StartInstance(1, 1, *executor.source);
  const TimeNs earliest = MonotonicNow() + 30 * kMillisecond;
  engine.Issue(1, 0, 0, [&](wire::Issue* issue) {
    issue->service_class = 1;
    issue->earliest_ns = earliest;
  });
  const auto finished = engine.Wait<wire::Finished>(wire::kFinished);
  ASSERT_TRUE(finished.has_value());
  EXPECT_GE(finished->start_ns, earliest);
  executor.End(1);
}

TEST(Edge_Executor, FailingOpFailsItsInstanceOnly) {
  TemplateBuilder builder;  // embedding with an index out of range
  const uint32_t indices = builder.Value({4}, proto::INT64);
  const uint32_t table = builder.Value({8, 4});
  const uint32_t y = builder.Value({4, 4});
  const uint32_t z = builder.Value({4, 4});
  builder.Input("indices", proto::Input::DYNAMIC, indices);
  builder.Input("table", proto::Input::STATIC_CONSTANT, table);
  builder.Node("aten::embedding", {{"weight", table}, {"indices", indices}}, {y});
  builder.Group("embed", {1});
  builder.Node("aten::neg", {{"self", y}}, {z});
  builder.Group("neg");
  builder.Output(z);
  Executor executor(builder.program);
  FakeEngine& engine = executor.engine;
  auto* numbers = reinterpret_cast<int64_t*>(engine.arena());
  numbers[2] = 1'000'000;
  engine.StartInstance(1, 1, *executor.source);
  for (uint32_t op = 0; op < 2; ++op) engine.Issue(1, op, 0);
  const auto failed = engine.Wait<wire::Failed>(wire::kFailed);
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->op, 0u);
  EXPECT_EQ(failed->status, SLICE_ERR_OP_FAILED);
  EXPECT_EQ(failed->began_write, 0u);
  EXPECT_NE(std::string(failed->text).find("node 0 (aten::embedding): "), std::string::npos)
      << failed->text;
  executor.End(1);
  EXPECT_FALSE(engine.Has(wire::kFinished));
  numbers[2] = 3;
  executor.RunAll(2);
  executor.End(2);
}

TEST(Edge_Executor, FailureBehindAWriteIsMarked) {
  TemplateBuilder builder;
  const uint32_t x = builder.Value({4});
  const uint32_t state = builder.Value({4});
  const uint32_t next = builder.Value({4});
  const uint32_t y = builder.Value({5});
  builder.Input("x", proto::Input::DYNAMIC, x);
  builder.Input("state", proto::Input::MANAGED, state, true);
  builder.Node("aten::add_.Tensor", {{"self", state}, {"other", x}}, {next});
  builder.Node("aten::abs", {{"self", next}}, {y});  // makes 4 elements, not 5
  builder.Group("all", {}, {1});
  builder.Output(y);
  Executor executor(builder.program);
  executor.engine.StartInstance(1, 1, *executor.source);
  executor.engine.Issue(1, 0, 0);
  const auto failed = executor.engine.Wait<wire::Failed>(wire::kFailed);
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->status, SLICE_ERR_OP_FAILED);
  EXPECT_EQ(failed->began_write, 1u);
  executor.End(1);
}

TEST(Edge_Executor, OverCapIsNoMemoryForThatOp) {
  Executor executor(Chain(512).program, {0}, 1, {},
                    uint64_t{1} << 20);  // room for the input, not for the result
  executor.engine.StartInstance(1, 1, *executor.source);
  executor.engine.Issue(1, 0, 0);
  const auto failed = executor.engine.Wait<wire::Failed>(wire::kFailed);
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->status, SLICE_ERR_NO_MEMORY) << failed->text;
  executor.End(1);
}

TEST(Edge_Executor, TransferWithoutRoomIsNoMemoryAndNothingStays) {
  Executor executor(Chain(512).program, {0, 1}, 2, {}, uint64_t{2} << 20);
  FakeEngine& engine = executor.engine;
  engine.StartInstance(1, 1, *executor.source);
  engine.Issue(1, 0, 0);
  ASSERT_TRUE(engine.Wait<wire::Finished>(wire::kFinished).has_value());
  for (uint64_t transfer = 1; transfer <= 3; ++transfer) {  // three buffers of 1 MiB, room for two
    engine.Push(wire::kWatch, wire::Watch{transfer, 1, 1, 2, 0, 0, 1, 0, 0});
    engine.Push(wire::kRecv, wire::TransferRef{transfer});
  }
  const auto refused = engine.Wait<wire::TransferDone>(wire::kTransferDone);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->transfer, 3u);
  EXPECT_EQ(refused->status, SLICE_ERR_NO_MEMORY);
  engine.Push(wire::kSend, wire::TransferRef{1});
  EXPECT_EQ(engine.Wait<wire::TransferDone>(wire::kTransferDone)->status, SLICE_OK);
  executor.End(1);  // the second, never sent, is cancelled
  EXPECT_EQ(engine.Wait<wire::TransferDone>(wire::kTransferDone)->status, SLICE_ERR_CANCELLED);
}

TEST(Edge_Executor, CancelledTransferIsAnswered) {
  Executor executor(Chain().program, {0, 1}, 2);
  FakeEngine& engine = executor.engine;
  engine.StartInstance(1, 1, *executor.source);
  engine.Push(wire::kWatch, wire::Watch{4, 1, 1, 2, 0, 0, 1, 0, 0});
  engine.Push(wire::kCancelTransfer, wire::TransferRef{4});
  const auto done = engine.Wait<wire::TransferDone>(wire::kTransferDone);
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->status, SLICE_ERR_CANCELLED);
  executor.End(1);
}

TEST(Happy_Executor, TensorCommandsChangeManagedTensors) {
  Executor executor(Accumulate().program);
  FakeEngine& engine = executor.engine;
  auto* state = reinterpret_cast<float*>(engine.segment(1, 0));
  wire::TensorCommandRun command{};
  command.set = 1;
  command.tenant = FakeEngine::kTenant;
  const auto run = [&](uint32_t kind, int32_t expected = SLICE_OK) {
    command.kind = kind;
    ++command.command;
    engine.Push(wire::kTensorCommandRun, command);
    const auto done = engine.Wait<wire::CommandDone>(wire::kCommandDone);
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(done->command, command.command);
    EXPECT_EQ(done->status, expected) << kind;
  };
  const float value = 2.5f;
  std::memcpy(&command.parameter, &value, sizeof value);
  run(wire::kTensorFill);
  EXPECT_EQ(state[3], 2.5f);
  command.parameter = 3;
  run(wire::kTensorCrop);
  EXPECT_EQ(state[2], 2.5f);
  EXPECT_EQ(state[3], 0.0f);
  command.arena_offset = 1024;
  command.arena_bytes = 16;
  run(wire::kTensorRead);
  EXPECT_EQ(reinterpret_cast<float*>(engine.arena() + 1024)[1], 2.5f);
  reinterpret_cast<float*>(engine.arena() + 1024)[1] = 9.0f;
  run(wire::kTensorWrite);
  EXPECT_EQ(state[1], 9.0f);
  run(wire::kTensorReset);
  EXPECT_EQ(state[1], 0.0f);
  command.dimension = 1;
  command.parameter = 0;
  run(wire::kTensorCrop, SLICE_ERR_INVALID);
  command.arena_offset = FakeEngine::kArenaBytes - 8;
  run(wire::kTensorRead, SLICE_ERR_BOUNDS);
  command.arena_offset = UINT64_MAX - 7;
  run(wire::kTensorWrite, SLICE_ERR_BOUNDS);
  command.arena_offset = 0;
  command.arena_bytes = 12;
  run(wire::kTensorWrite, SLICE_ERR_BOUNDS);
  command.tensor = 5;
  run(wire::kTensorReset, SLICE_ERR_INVALID);
  command.tensor = 0;
  run(77, SLICE_ERR_INVALID);
}

TEST(Happy_Executor, DroppedReplicaGivesItsPagesBack) {
  Executor executor(Chain(512).program, {0, 1}, 2);
  FakeEngine& engine = executor.engine;
  std::memset(engine.segment(1, 1), 1, 512 * 512 * 4);
  engine.Push(wire::kDropReplica, wire::DropReplica{1, 0, 1, {}});
  wire::TensorCommandRun command{};  // behind it in the same queue
  command.set = 1;
  command.tenant = FakeEngine::kTenant;
  command.kind = wire::kTensorReset;
  engine.Push(wire::kTensorCommandRun, command);
  ASSERT_TRUE(engine.Wait<wire::CommandDone>(wire::kCommandDone).has_value());
  EXPECT_EQ(engine.segment(1, 1)[5000], std::byte{0});
}

TEST(Malicious_Executor, ArenaRangesOutsideTheArenaAreRefused) {
  Executor executor(Chain().program);
  FakeEngine& engine = executor.engine;
  struct {
    wire::StartInstance start{1, 1, 1, FakeEngine::kTenant, 0, 1, 1};
    wire::ArenaRange input{0, 256}, output{512, 256};
  } command;
  const std::pair<wire::ArenaRange, wire::ArenaRange> cases[] = {
      {{FakeEngine::kArenaBytes - 128, 256}, {0, 256}},
      {{0, 256}, {UINT64_MAX - 15, 256}},
      {{0, 128}, {512, 256}},
      {{0, 256}, {512, 255}},
      {{3, 256}, {512, 256}},
  };
  for (const auto& [input, output] : cases) {
    ++command.start.instance;
    command.input = input;
    command.output = output;
    engine.Push(wire::kStartInstance, command);
    engine.Issue(command.start.instance, 0, 0);
    const auto failed = engine.Wait<wire::Failed>(wire::kFailed);
    ASSERT_TRUE(failed.has_value());
    EXPECT_EQ(failed->status, SLICE_ERR_BOUNDS) << failed->text;
    executor.End(command.start.instance);
  }
}

TEST(Malicious_Executor, TemplatesAreRefusedWithTheirStatus) {
  FakeEngine engine(SLICE_EXECUTOR, {0}, 1);
  proto::ExecutorRequest early;
  early.set_describe(true);
  EXPECT_EQ(engine.Call(early).status(), SLICE_ERR_PROTOCOL);
  ASSERT_EQ(engine.Setup().status(), SLICE_OK);
  EXPECT_EQ(engine.Setup().status(), SLICE_ERR_INVALID);
  Chain chain;
  chain.program.set_operators(0, "aten::nonzero");
  chain.program.set_operators(2, "prim::print");
  const auto refused = engine.AddTemplate(1, chain.program);
  EXPECT_EQ(refused.status(), SLICE_ERR_OP_NOT_ALLOWED);
  EXPECT_NE(refused.text().find("aten::nonzero, prim::print"), std::string::npos) << refused.text();
  Chain cyclic;
  cyclic.program.mutable_nodes(0)->mutable_args(0)->set_value(cyclic.b);
  EXPECT_EQ(engine.AddTemplate(1, cyclic.program).status(), SLICE_ERR_GRAPH);
  EXPECT_EQ(engine.AddBinding(1, 1, 1, 0).status(), SLICE_ERR_STALE);
  EXPECT_EQ(engine.AddTenant().status(), SLICE_OK);
  EXPECT_EQ(engine.AddTemplate(1, Chain().program).status(), SLICE_OK);
  EXPECT_EQ(engine.AddBinding(1, 1, 1, 1).status(), SLICE_ERR_STALE);
  EXPECT_EQ(engine.AddBinding(1, 1, 1, 0).status(), SLICE_ERR_INVALID);
}

TEST(Malicious_Executor, CommandsForUnknownThingsAreAnswered) {
  Executor executor(Chain().program);
  FakeEngine& engine = executor.engine;
  engine.Issue(99, 0, 0);
  EXPECT_EQ(engine.Wait<wire::Failed>(wire::kFailed)->status, SLICE_ERR_STALE);
  engine.EndInstance(99);
  EXPECT_TRUE(engine.Wait<wire::InstanceEnded>(wire::kInstanceEnded).has_value());
  engine.Push(wire::kWatch, wire::Watch{1, 0, 0, 3, 55, 0, 0, 0, 0});
  EXPECT_EQ(engine.Wait<wire::TransferDone>(wire::kTransferDone)->status, SLICE_ERR_CANCELLED);
  engine.Push(777, wire::TransferRef{1});
  engine.Push(wire::kSend, wire::TransferRef{1234});
  engine.StartInstance(1, 1, *executor.source);
  engine.Issue(1, 50, 0);
  EXPECT_EQ(engine.Wait<wire::Failed>(wire::kFailed)->status, SLICE_ERR_INTERNAL);
  executor.End(1);
}

TEST(Edge_Executor, KilledExecutorIsSeenAndEndsNobodyElse) {
  Executor executor(Chain().program);
  executor.engine.StartInstance(1, 1, *executor.source);
  executor.engine.Kill();
  const int status = executor.engine.WaitExit();
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  EXPECT_EQ(executor.engine.Describe().status(), -1);
}

TEST(Race_Executor, ManyInstancesOnTwoDevices) {
  Executor executor(Chain(64).program, {0, 0}, 1);
  FakeEngine& engine = executor.engine;
  FillArena(&engine, 64 * 64);
  constexpr uint64_t kInstances = 60;
  for (uint64_t instance = 1; instance <= kInstances; ++instance) {
    engine.StartInstance(instance, 1, *executor.source);
    for (uint32_t op = 0; op < 3; ++op)
      engine.Issue(instance, op, static_cast<uint32_t>(instance + op) % 2);
  }
  for (uint64_t i = 0; i < 3 * kInstances; ++i) {
    ASSERT_TRUE(engine.Wait<wire::Finished>(wire::kFinished).has_value()) << i;
  }
  for (uint64_t instance = 1; instance <= kInstances; ++instance) engine.EndInstance(instance);
  for (uint64_t i = 0; i < kInstances; ++i) {
    ASSERT_TRUE(engine.Wait<wire::InstanceEnded>(wire::kInstanceEnded).has_value());
  }
  EXPECT_EQ(engine.PoolBytes(), 0u);
}

}  // namespace
}  // namespace slice
