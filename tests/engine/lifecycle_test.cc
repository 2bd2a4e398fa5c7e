// Ends of all kinds in every phase: cancel, death of a tenant, death of the executor, failing ops
// and copies, commands on pieces, garbage from the executor. After each the ledger is back to zero.
#include "tests/testing/engine_fixture.h"
#include "tests/testing/schedule_checker.h"

namespace slice::testing {
namespace {

// When to strike: at the first record of some kind, at a time, or at the end.
enum class Moment {
  kReserved,
  kIssued,
  kLaunched,
  kMidOp,
  kIntent,
  kRecv,
  kMidCopy,
  kFinishedUnreported,
  kEnding
};
const Moment kMoments[] = {
    Moment::kReserved, Moment::kIssued, Moment::kLaunched, Moment::kMidOp,
    Moment::kIntent,   Moment::kRecv,   Moment::kMidCopy,  Moment::kFinishedUnreported,
    Moment::kEnding};

std::string MomentName(const ::testing::TestParamInfo<Moment>& info) {
  const char* const kNames[] = {"reserved", "issued", "launched", "mid_op",
                                "intent",   "recv",   "mid_copy", "finished_unreported",
                                "ending"};
  return kNames[static_cast<size_t>(info.param)];
}

// A request that spans two devices with transfers; calls `strike` once at the moment.
struct World {
  World() : sim(MakeConfig(2)) {
    tenant = sim.AddTenant(ServiceClass::kOnline);
    other = sim.AddTenant(ServiceClass::kOnline);
    service = sim.AddService(tenant, Diamond(4, 4 * kMillisecond, 256 << 10), 0, {1});
    bystander = sim.AddService(other, Chain(6, 2 * kMillisecond, 4096), 1);
  }
  void StrikeAt(Moment moment, std::function<void()> strike) {
    auto once = std::make_shared<bool>(false);
    const auto hit = [this, strike, once](DurationNs delay) {
      if (*once) return;
      *once = true;
      sim.At(sim.now() + delay, strike);
    };
    const auto command = [this, hit](uint32_t type, DurationNs delay) {
      sim.executor().on_command = [=](uint32_t t, std::span<const std::byte>) {
        if (t == type) hit(delay);
      };
    };
    const auto report = [this, hit](uint32_t type, DurationNs delay) {
      sim.executor().on_report = [=](uint32_t t, std::span<const std::byte>) {
        if (t == type) hit(delay);
      };
    };
    switch (moment) {
      case Moment::kReserved:
        return command(wire::kStartInstance, 0);
      case Moment::kIssued:
        return command(wire::kIssue, 0);
      case Moment::kLaunched:
        return report(wire::kStarted, 0);
      case Moment::kMidOp:
        return report(wire::kStarted, 2 * kMillisecond);
      case Moment::kIntent:
        return report(wire::kIntent, 0);
      case Moment::kRecv:
        return command(wire::kRecv, 0);
      case Moment::kMidCopy:
        return command(wire::kSend, 50 * kMicrosecond);
      case Moment::kFinishedUnreported:
        return report(wire::kStarted, 4 * kMillisecond - 10 * kMicrosecond);
      case Moment::kEnding: {
        auto first = std::make_shared<uint64_t>(0);  // the instance submitted first
        sim.executor().on_command = [=](uint32_t type, std::span<const std::byte> payload) {
          uint64_t instance = 0;
          std::memcpy(&instance, payload.data(), sizeof(instance));
          if (type == wire::kStartInstance && *first == 0) *first = instance;
          if (type == wire::kEndInstance && instance == *first) hit(0);
        };
        return;
      }
    }
  }
  Simulation sim;
  TenantId tenant, other;
  Simulation::Service service, bystander;
};

class EngineEnds : public ::testing::TestWithParam<Moment> {};
INSTANTIATE_TEST_SUITE_P(All, EngineEnds, ::testing::ValuesIn(kMoments), MomentName);

TEST_P(EngineEnds, Edge_cancel_frees_everything_and_completes_once) {
  World world;
  uint64_t cookie = 0;
  world.StrikeAt(GetParam(),
                 [&] { world.sim.engine().Cancel(world.tenant, cookie, world.sim.now()); });
  cookie = world.sim.Submit(world.service);
  const uint64_t safe = world.sim.Submit(world.bystander);
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, cookie),
            GetParam() == Moment::kEnding ? SLICE_OK : SLICE_ERR_CANCELLED);
  EXPECT_EQ(world.sim.StatusOf(world.other, safe), SLICE_OK);
  ExpectClean(world.sim);
  // The next request is none the wiser.
  const uint64_t again = world.sim.Submit(world.service);
  ASSERT_TRUE(world.sim.RunAll(2 * kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, again), SLICE_OK);
}

TEST_P(EngineEnds, Edge_death_of_the_tenant_frees_everything_and_touches_nobody_else) {
  World world;
  world.StrikeAt(GetParam(),
                 [&] { world.sim.engine().RemoveTenant(world.tenant, world.sim.now()); });
  for (int i = 0; i < 4; ++i) world.sim.Submit(world.service);
  const uint64_t safe = world.sim.Submit(world.bystander);
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  EXPECT_TRUE(world.sim.engine().TenantGone(world.tenant));
  EXPECT_TRUE(world.sim.engine().TensorSetGone(world.service.constants));
  EXPECT_EQ(world.sim.StatusOf(world.other, safe), SLICE_OK);
  ExpectClean(world.sim);
  EXPECT_EQ(world.sim.engine().TenantsJson(0).find("\"tenant\":1"), std::string::npos);
}

TEST_P(EngineEnds, Edge_death_of_the_executor_is_not_noticed_without_writes) {
  World world;
  world.StrikeAt(GetParam(), [&] { world.sim.KillExecutor(5 * kMillisecond); });
  const uint64_t cookie = world.sim.Submit(world.service);
  const uint64_t safe = world.sim.Submit(world.bystander);
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, cookie), SLICE_OK);
  EXPECT_EQ(world.sim.StatusOf(world.other, safe), SLICE_OK);
  EXPECT_TRUE(world.sim.engine().ReplicasReady(world.service.constants, 1))
      << "replicas are made again";
  ExpectClean(world.sim);
}

TEST_P(EngineEnds, Edge_executor_given_up_fails_what_waits) {
  World world;
  world.StrikeAt(GetParam(), [&] {
    world.sim.executor().Die();
    world.sim.engine().ExecutorLost(world.sim.now());
    world.sim.At(world.sim.now() + kMillisecond,
                 [&] { world.sim.engine().ExecutorGivenUp(world.sim.now()); });
  });
  const uint64_t cookie = world.sim.Submit(world.service);
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, cookie),
            GetParam() == Moment::kEnding ? SLICE_OK : SLICE_ERR_EXECUTOR_LOST);
  const uint64_t refused = world.sim.Submit(world.service);
  EXPECT_EQ(world.sim.StatusOf(world.tenant, refused), SLICE_ERR_EXECUTOR_LOST);
  ExpectClean(world.sim);
  world.sim.engine().ExecutorReady(world.sim.now());
  const uint64_t again = world.sim.Submit(world.service);
  ASSERT_TRUE(world.sim.RunAll(2 * kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, again), SLICE_OK);
}

// Whom the shell suspects when the executor dies.
TEST(EngineLaunched, Happy_names_each_tenant_once_the_latest_start_first) {
  Simulation sim(MakeConfig(2));
  const TenantId first = sim.AddTenant(ServiceClass::kOnline, 0);
  const TenantId second = sim.AddTenant(ServiceClass::kOnline, 1);
  const auto graph = Llama(4, 2 * kMillisecond, 4096, 4096);
  const Simulation::Service of_first = sim.AddService(first, graph);
  const Simulation::Service of_second = sim.AddService(second, graph, 1);
  std::vector<engine::TenantUser> one, two;
  sim.Submit(of_first);
  sim.At(sim.now() + kMillisecond, [&] {
    one = sim.engine().LaunchedTenants();
    sim.Submit(of_second);
  });
  sim.At(sim.now() + 1500 * kMicrosecond, [&] { two = sim.engine().LaunchedTenants(); });
  ASSERT_TRUE(sim.RunAll(kSecond));
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0].tenant, first);
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].tenant, second);
  EXPECT_EQ(two[1].tenant, first);
  EXPECT_TRUE(sim.engine().LaunchedTenants().empty());
}

// ---- pieces: half-done writes
// -------------------------------------------------------------------------------------

struct CacheWorld {
  CacheWorld() : sim(MakeConfig(1)) {
    tenant = sim.AddTenant(ServiceClass::kOnline);
    service = sim.AddService(tenant, Llama(4, 2 * kMillisecond, 4096, 4096));
  }
  Simulation sim;
  TenantId tenant;
  Simulation::Service service;
};

TEST(EnginePieces, Edge_death_mid_write_loses_the_pieces_until_a_reset) {
  CacheWorld world;
  const uint64_t first = world.sim.Submit(world.service);
  const uint64_t queued = world.sim.Submit(world.service);
  world.sim.At(5 * kMillisecond, [&] { world.sim.KillExecutor(3 * kMillisecond); });
  world.sim.RunUntil(20 * kMillisecond);
  EXPECT_EQ(world.sim.StatusOf(world.tenant, first), SLICE_ERR_STATE_LOST);
  EXPECT_EQ(world.sim.StatusOf(world.tenant, queued), SLICE_ERR_STATE_LOST);
  const uint64_t after = world.sim.Submit(world.service);
  EXPECT_EQ(world.sim.StatusOf(world.tenant, after), SLICE_ERR_STATE_LOST);
  const uint64_t crop = world.sim.Command(world.service, wire::kTensorCrop, world.service.pieces);
  EXPECT_EQ(world.sim.StatusOf(world.tenant, crop), SLICE_ERR_STATE_LOST);
  const uint64_t reset = world.sim.Command(world.service, wire::kTensorReset, world.service.pieces);
  const uint64_t again = world.sim.Submit(world.service);  // queued behind the reset
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, reset), SLICE_OK);
  EXPECT_EQ(world.sim.StatusOf(world.tenant, again), SLICE_OK);
  ExpectClean(world.sim);
}

TEST(EnginePieces, Edge_death_before_the_first_write_is_not_noticed) {
  CacheWorld world;
  const uint64_t cookie = world.sim.Submit(world.service);
  world.sim.At(300 * kMicrosecond,
               [&] { world.sim.KillExecutor(3 * kMillisecond); });  // in "embed"
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, cookie), SLICE_OK);
  ExpectClean(world.sim);
}

TEST(EnginePieces, Edge_death_after_the_last_write_keeps_the_pieces) {
  CacheWorld world;
  const uint64_t cookie = world.sim.Submit(world.service);
  world.sim.At(9 * kMillisecond, [&] { world.sim.KillExecutor(3 * kMillisecond); });  // in "head"
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, cookie), SLICE_ERR_STATE_LOST)
      << "a second run would write twice";
  const uint64_t again = world.sim.Submit(world.service);
  ASSERT_TRUE(world.sim.RunAll(2 * kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, again), SLICE_OK);
  ExpectClean(world.sim);
}

TEST(EnginePieces, Edge_cancel_mid_write_loses_cancel_while_queued_does_not) {
  CacheWorld world;
  const uint64_t first = world.sim.Submit(world.service);
  const uint64_t queued = world.sim.Submit(world.service);
  world.sim.At(kMillisecond,
               [&] { world.sim.engine().Cancel(world.tenant, queued, world.sim.now()); });
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, first), SLICE_OK);
  EXPECT_EQ(world.sim.StatusOf(world.tenant, queued), SLICE_ERR_CANCELLED);
  const uint64_t second = world.sim.Submit(world.service);
  world.sim.At(world.sim.now() + 3 * kMillisecond,
               [&] { world.sim.engine().Cancel(world.tenant, second, world.sim.now()); });
  ASSERT_TRUE(world.sim.RunAll(2 * kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, second), SLICE_ERR_CANCELLED);
  EXPECT_EQ(world.sim.StatusOf(world.tenant, world.sim.Submit(world.service)),
            SLICE_ERR_STATE_LOST);
  ExpectClean(world.sim);
}

TEST(EnginePieces, Edge_failing_op_fails_its_request_alone_and_loses_what_it_wrote) {
  CacheWorld world;
  const TenantId other = world.sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service bystander = world.sim.AddService(other, Chain(3, kMillisecond, 4096));
  const uint64_t cookie = world.sim.Submit(world.service);
  const uint64_t safe = world.sim.Submit(bystander);
  uint64_t victim = 0;
  world.sim.executor().fail_op = [&](uint64_t instance, uint32_t op) {
    if (victim == 0) victim = instance;
    return instance == victim && op == 2 ? SLICE_ERR_OP_FAILED : -1;
  };
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  const auto* const done = world.sim.Find(world.tenant, cookie);
  EXPECT_EQ(done->slot.status, SLICE_ERR_OP_FAILED);
  EXPECT_EQ(done->slot.failed_op, 2u);
  EXPECT_NE(done->text.find("layer1"), std::string::npos) << done->text;
  EXPECT_EQ(world.sim.StatusOf(other, safe), SLICE_OK);
  EXPECT_EQ(world.sim.StatusOf(world.tenant, world.sim.Submit(world.service)),
            SLICE_ERR_STATE_LOST);
  ExpectClean(world.sim);
}

TEST(EnginePieces, Happy_commands_are_ordered_with_the_graphs) {
  CacheWorld world;
  const uint64_t before = world.sim.Submit(world.service);
  const uint64_t reset = world.sim.Command(world.service, wire::kTensorReset, world.service.pieces);
  const uint64_t after = world.sim.Submit(world.service);
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, reset), SLICE_OK);
  EXPECT_LT(world.sim.Find(world.tenant, reset)->slot.finish_ns,
            world.sim.Find(world.tenant, after)->slot.finish_ns);
  EXPECT_GT(world.sim.Find(world.tenant, reset)->slot.finish_ns, 8 * kMillisecond)
      << "the last layer's piece is free then";
  EXPECT_EQ(world.sim.StatusOf(world.tenant, before), SLICE_OK);
  ExpectClean(world.sim);
}

TEST(EnginePieces, Edge_commands_survive_the_executor_and_can_be_cancelled_while_they_wait) {
  CacheWorld world;
  const uint64_t running =
      world.sim.Command(world.service, wire::kTensorFill, world.service.pieces);
  world.sim.At(30 * kMicrosecond, [&] { world.sim.KillExecutor(2 * kMillisecond); });
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, running), SLICE_OK) << "sent again";
  world.sim.Submit(world.service);
  const uint64_t waiting =
      world.sim.Command(world.service, wire::kTensorReset, {world.service.pieces.back()});
  world.sim.engine().Cancel(world.tenant, waiting, world.sim.now());
  EXPECT_EQ(world.sim.StatusOf(world.tenant, waiting), SLICE_ERR_CANCELLED);
  ASSERT_TRUE(world.sim.RunAll(2 * kSecond));
  ExpectClean(world.sim);
}

// ---- the executor as an unreliable narrator
// -----------------------------------------------------------------------

template <typename Record>
Status Report(Simulation& sim, uint32_t type, const Record& record) {
  return sim.engine().HandleReport(type, std::as_bytes(std::span(&record, 1)), sim.now());
}

TEST(EngineReports, Malicious_garbage_is_a_protocol_error) {
  CacheWorld world;
  uint64_t instance = 0;
  world.sim.executor().on_command = [&](uint32_t type, std::span<const std::byte> payload) {
    if (type == wire::kStartInstance) std::memcpy(&instance, payload.data(), sizeof(instance));
  };
  world.sim.Submit(world.service);
  world.sim.RunUntil(kMillisecond);
  ASSERT_NE(instance, 0u);
  Simulation& sim = world.sim;
  EXPECT_EQ(sim.engine().HandleReport(999, {}, sim.now()).code(), StatusCode::kProtocol);
  EXPECT_EQ(sim.engine().HandleReport(wire::kFinished, {}, sim.now()).code(),
            StatusCode::kProtocol);
  EXPECT_EQ(Report(sim, wire::kStarted, wire::Started{instance, 1, 77, 0, 0, 0}).code(),
            StatusCode::kProtocol)
      << "no such op";
  EXPECT_EQ(Report(sim, wire::kStarted, wire::Started{instance, 2, 0, 0, 0, 0}).code(),
            StatusCode::kProtocol)
      << "no such attempt";
  EXPECT_EQ(Report(sim, wire::kStarted, wire::Started{instance, 1, 4, 0, 0, 0}).code(),
            StatusCode::kProtocol)
      << "not issued";
  wire::Finished finished{};
  finished.instance = instance;
  finished.attempt = 1;
  finished.op = 4;
  EXPECT_EQ(Report(sim, wire::kFinished, finished).code(), StatusCode::kProtocol) << "not issued";
  finished.op = 1;
  finished.start_ns = 10;
  finished.end_ns = 5;
  EXPECT_EQ(Report(sim, wire::kFinished, finished).code(), StatusCode::kProtocol)
      << "ends before it starts";
  EXPECT_EQ(Report(sim, wire::kInstanceEnded, wire::InstanceEnded{instance, 1, 0}).code(),
            StatusCode::kProtocol)
      << "it runs";
  // Late or repeated: ignored.
  EXPECT_TRUE(Report(sim, wire::kStarted, wire::Started{instance, 1, 0, 0, 0, 0}).ok());
  EXPECT_TRUE(
      Report(sim, wire::kFinished, wire::Finished{instance + 1, 1, 0, 0, 0, 0, 0, 0, 0}).ok());
  EXPECT_TRUE(Report(sim, wire::kTransferDone, wire::TransferDone{12345, 0, 0, 0, 0, 0}).ok());
  EXPECT_TRUE(Report(sim, wire::kIntent, wire::Intent{12345, 0}).ok());
  EXPECT_TRUE(Report(sim, wire::kCommandDone, wire::CommandDone{12345, 0, 0}).ok());
  EXPECT_TRUE(Report(sim, wire::kRecalled, wire::Recalled{instance, 1, 0, 0, 0}).ok());
  ASSERT_TRUE(sim.RunAll(kSecond));
  ExpectClean(sim);
}

TEST(EngineReports, Edge_executor_gives_ops_back_for_want_of_memory) {
  Simulation sim(MakeConfig(1));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service = sim.AddService(tenant, Chain(3, kMillisecond, 4096));
  int refusals = 3;
  // The executor would say so instead of Started; here its Issue is swallowed by a recall and
  // answered with reason 2.
  sim.executor().on_report = [&](uint32_t, std::span<const std::byte>) {};
  const uint64_t cookie = sim.Submit(service);
  sim.executor().refuse_issue = [&](uint64_t, uint32_t op) { return op == 1 && refusals-- > 0; };
  ASSERT_TRUE(sim.RunAll(kSecond));
  EXPECT_EQ(sim.StatusOf(tenant, cookie), SLICE_OK);
  ExpectClean(sim);
}

TEST(EngineReports, Edge_copies_that_fail_are_asked_for_again) {
  World world;
  int failures = 5;
  world.sim.executor().fail_transfer = [&](uint64_t) {
    return failures-- > 0 ? SLICE_ERR_NO_MEMORY : SLICE_OK;
  };
  const uint64_t cookie = world.sim.Submit(world.service);
  ASSERT_TRUE(world.sim.RunAll(kSecond));
  EXPECT_EQ(world.sim.StatusOf(world.tenant, cookie), SLICE_OK);
  ExpectClean(world.sim);
}

}  // namespace
}  // namespace slice::testing
