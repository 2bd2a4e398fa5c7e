// Scheduling scenarios in virtual time: two devices, pipelining over pieces, slices, recall,
// parking, fifo.
#include <set>

#include "tests/testing/engine_fixture.h"
#include "tests/testing/schedule_checker.h"

namespace slice::testing {
namespace {

using OpRun = VirtualExecutor::OpRun;

TEST(EngineScenario, Happy_diamond_uses_two_devices_and_transfers) {
  Simulation sim(MakeConfig(2));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service =
      sim.AddService(tenant, Diamond(4, 5 * kMillisecond, 64 << 10), 0, {1});
  const uint64_t cookie = sim.Submit(service);
  ASSERT_TRUE(sim.RunAll());
  EXPECT_EQ(sim.StatusOf(tenant, cookie), SLICE_OK);
  ExpectClean(sim);
  EXPECT_EQ(CheckSchedule(sim), "");
  std::set<int> devices;
  for (const OpRun& run : sim.executor().ops) devices.insert(run.device);
  EXPECT_EQ(devices.size(), 2u) << "the branches are long, the values small: both devices pay";
  size_t values = 0;
  for (const auto& copy : sim.executor().copies) values += copy.instance != 0;
  EXPECT_GT(values, 0u);
  EXPECT_LT(sim.Find(tenant, cookie)->slot.finish_ns,
            sim.Find(tenant, cookie)->slot.submit_ns + 28 * kMillisecond);
}

TEST(EngineScenario, Happy_constants_without_a_replica_keep_work_at_home) {
  Simulation sim(MakeConfig(2));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline, 1);
  const Simulation::Service service = sim.AddService(tenant, Diamond(4, 5 * kMillisecond, 4096), 1);
  sim.Submit(service);
  ASSERT_TRUE(sim.RunAll());
  ExpectClean(sim);
  for (const OpRun& run : sim.executor().ops) EXPECT_EQ(run.device, 1);
  EXPECT_TRUE(sim.executor().copies.empty());
}

TEST(EngineScenario, Happy_chunks_of_one_cache_pipeline_layer_by_layer) {
  engine::Config config = MakeConfig(1);
  Simulation sim(config);
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service prefill =
      sim.AddService(tenant, Llama(4, 2 * kMillisecond, 4096, 4096, "prefill"));
  const Simulation::Service decode =
      sim.AddGraph(prefill, Llama(4, 500 * kMicrosecond, 1024, 4096, "decode"));
  sim.OpenSequence(tenant, 1, ServiceClass::kOnline);
  std::vector<uint64_t> cookies;
  for (int chunk = 0; chunk < 3; ++chunk) cookies.push_back(sim.Submit(prefill, 1));
  cookies.push_back(sim.Submit(decode, 1));
  ASSERT_TRUE(sim.RunAll());
  for (const uint64_t cookie : cookies) EXPECT_EQ(sim.StatusOf(tenant, cookie), SLICE_OK);
  EXPECT_EQ(sim.Violations(), "");
  EXPECT_EQ(CheckSchedule(sim), "");
  TimeNs before = 0;
  for (const uint64_t cookie : cookies) {
    EXPECT_GT(sim.Find(tenant, cookie)->slot.finish_ns, before) << "in submit order";
    before = sim.Find(tenant, cookie)->slot.finish_ns;
  }
}

TEST(EngineScenario, Happy_chunks_overlap_on_two_devices_with_split_layers) {
  // Layers 0-1 have their pieces in domain 0, 2-3 in domain 1: a two-stage pipeline.
  engine::Config config = MakeConfig(2);
  Simulation sim(config);
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  GraphBuilder graph("stages");
  const uint32_t x = graph.Dynamic("x", 1024);
  GraphBuilder::Use first, second;
  const uint32_t piece0 = graph.Managed("p0", 4096);
  const uint32_t state1 = graph.Mutable("m1", 4096);
  first.reads = first.writes = {piece0};
  second.reads = second.writes = {state1};
  const uint32_t a = graph.Op("stage0", {x}, 4096, 4 * kMillisecond, first);
  graph.Output(graph.Op("stage1", {a}, 4096, 4 * kMillisecond, second));
  const auto built = graph.Build();
  // The mutable set lives in domain 1 and pins the second stage there.
  Simulation::Service service;
  service.tenant = tenant;
  service = sim.AddServiceAt(
      tenant, built, {{engine::TensorKind::kManaged, 0}, {engine::TensorKind::kMutable, 1}});
  std::vector<uint64_t> cookies;
  for (int i = 0; i < 6; ++i) cookies.push_back(sim.Submit(service));
  ASSERT_TRUE(sim.RunAll());
  for (const uint64_t cookie : cookies) EXPECT_EQ(sim.StatusOf(tenant, cookie), SLICE_OK);
  ExpectClean(sim);
  EXPECT_EQ(CheckSchedule(sim), "");
  EXPECT_LT(sim.Find(tenant, cookies.back())->slot.finish_ns, 36 * kMillisecond)
      << "48 ms without overlap";
}

TEST(EngineScenario, Regression_fresh_cache_moves_with_a_copy_to_the_free_device) {
  Simulation sim(MakeConfig(2));
  const TenantId busy = sim.AddTenant(ServiceClass::kOnline);
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service load = sim.AddService(busy, Chain(10, 10 * kMillisecond, 4096));
  const Simulation::Service service =
      sim.AddService(tenant, Llama(4, 2 * kMillisecond, 4096, 1 << 20), 0, {1});
  sim.Submit(load);
  sim.RunUntil(sim.now() + 5 * kMillisecond);
  const uint64_t cookie = sim.Submit(service);
  ASSERT_TRUE(sim.RunAll());
  EXPECT_EQ(sim.StatusOf(tenant, cookie), SLICE_OK);
  ExpectClean(sim);
  for (const OpRun& run : sim.executor().ops) {
    if (run.tenant == tenant.value) {
      EXPECT_EQ(run.device, 1);
    }
  }
  // What an earlier stay left in the other domain is not zero: every piece must be copied.
  std::set<uint32_t> copied;
  for (const auto& copy : sim.executor().copies) {
    if (copy.set == service.managed.value) copied.insert(copy.value);
  }
  EXPECT_EQ(copied.size(), 8u) << "four layers, two pieces each";
}

// One online tenant that decodes with gaps of 400 us to 1.2 ms, one offline tenant with 3 ms ops,
// one device.
struct SliceWorld {
  explicit SliceWorld(const std::string& policy, DurationNs offline_op = 3 * kMillisecond,
                      size_t devices = 1)
      : sim([&] {
          engine::Config config = MakeConfig(devices);
          config.policy = policy;
          return config;
        }()) {
    online = sim.AddTenant(ServiceClass::kOnline);
    offline = sim.AddTenant(ServiceClass::kOffline, static_cast<DeviceIndex>(devices - 1));
    decode = sim.AddService(online, Llama(4, kMillisecond, 4096, 4096, "decode"));
    bulk = sim.AddService(offline, Chain(8, offline_op, 4096, true, "bulk"),
                          static_cast<DomainIndex>(devices - 1));
  }
  // `steps` decode steps, each submitted `gap` after the completion of the one before.
  void RunSteps(uint64_t sequence, int steps, DurationNs gap) {
    if (steps == 0) {
      sim.engine().CloseSequence(online, sequence, sim.now());
      return;
    }
    const uint64_t cookie = sim.Submit(decode, sequence);
    submitted.push_back(cookie);
    Poll(sequence, cookie, steps, gap);
  }
  void Poll(uint64_t sequence, uint64_t cookie, int steps, DurationNs gap) {
    if (const auto* const done = sim.Find(online, cookie)) {
      // Jitter of 20 %, deterministic.
      const DurationNs wait = gap + gap / 5 * (static_cast<DurationNs>(cookie % 3) - 1);
      sim.At(done->at + wait, [=, this] { RunSteps(sequence, steps - 1, gap); });
      return;
    }
    sim.At(sim.now() + 20 * kMicrosecond, [=, this] { Poll(sequence, cookie, steps, gap); });
  }
  DurationNs OnlineLatency() const {
    DurationNs total = 0;
    for (const uint64_t cookie : submitted) {
      const auto* const done = sim.Find(online, cookie);
      total += done->slot.finish_ns - done->slot.submit_ns;
    }
    return total / static_cast<DurationNs>(submitted.size());
  }
  Simulation sim;
  TenantId online, offline;
  Simulation::Service decode, bulk;
  std::vector<uint64_t> submitted;
};

TEST(EngineScenario, Happy_offline_leaves_short_gaps_alone_and_fills_long_ones) {
  SliceWorld world("slice");
  world.sim.OpenSequence(world.online, 1, ServiceClass::kOnline);
  world.RunSteps(1, 40, 600 * kMicrosecond);
  world.sim.RunUntil(60 * kMillisecond);  // gaps are known now
  std::vector<uint64_t> bulk;
  for (int i = 0; i < 3; ++i) bulk.push_back(world.sim.Submit(world.bulk));
  ASSERT_TRUE(world.sim.RunAll());
  EXPECT_EQ(world.sim.Violations(), "");
  EXPECT_EQ(CheckSchedule(world.sim), "");
  for (const uint64_t cookie : bulk)
    EXPECT_EQ(world.sim.StatusOf(world.offline, cookie), SLICE_OK) << "fills what follows";
  // 5 ms alone; a 3 ms op in a 0.6 ms gap would cost 2.4 ms more.
  EXPECT_LT(world.OnlineLatency(), 6 * kMillisecond);

  SliceWorld fifo("fifo");
  fifo.sim.OpenSequence(fifo.online, 1, ServiceClass::kOnline);
  fifo.RunSteps(1, 40, 600 * kMicrosecond);
  fifo.sim.RunUntil(60 * kMillisecond);
  for (int i = 0; i < 3; ++i) fifo.sim.Submit(fifo.bulk);
  ASSERT_TRUE(fifo.sim.RunAll());
  EXPECT_GT(fifo.OnlineLatency(), world.OnlineLatency() + kMillisecond)
      << "fifo is what slices are better than";
}

TEST(EngineScenario, Happy_offline_runs_in_long_idle_slices_between_requests) {
  SliceWorld world("slice");
  std::vector<uint64_t> bulk;
  for (int i = 0; i < 10; ++i) bulk.push_back(world.sim.Submit(world.bulk));
  // A request of 3 steps every 60 ms: two thirds of the device is idle in long slices.
  for (int request = 0; request < 10; ++request) {
    const auto number = static_cast<uint64_t>(request + 1);
    world.sim.At(request * 60 * kMillisecond, [&world, number] {
      world.sim.OpenSequence(world.online, number, ServiceClass::kOnline);
      world.RunSteps(number, 3, 500 * kMicrosecond);
    });
  }
  world.sim.RunUntil(600 * kMillisecond);
  size_t done = 0;
  for (const uint64_t cookie : bulk) done += world.sim.Find(world.offline, cookie) != nullptr;
  EXPECT_GE(done, 8u) << "24 ms each, about 420 ms of slices";
  // The first step of a request may meet a running 3 ms op; later ones not.
  EXPECT_LT(world.OnlineLatency(), 7 * kMillisecond);
  ASSERT_TRUE(world.sim.RunAll());
  EXPECT_EQ(world.sim.Violations(), "");
}

TEST(EngineScenario, Happy_online_arrival_recalls_unlaunched_offline_ops) {
  SliceWorld world("slice", 30 * kMicrosecond);
  for (int i = 0; i < 10; ++i) world.sim.Submit(world.bulk);
  world.sim.RunUntil(500 * kMicrosecond);
  const uint64_t cookie = world.sim.Submit(world.decode);
  ASSERT_TRUE(world.sim.RunAll());
  EXPECT_EQ(world.sim.StatusOf(world.online, cookie), SLICE_OK);
  EXPECT_GT(world.sim.engine().counters().recalls, 0u);
  ExpectClean(world.sim);
}

TEST(EngineScenario, Happy_online_only_parks_offline_until_the_policy_changes) {
  SliceWorld world("online-only");
  const uint64_t bulk = world.sim.Submit(world.bulk);
  const uint64_t step = world.sim.Submit(world.decode);
  ASSERT_TRUE(world.sim.RunAll());
  EXPECT_EQ(world.sim.StatusOf(world.online, step), SLICE_OK);
  EXPECT_EQ(world.sim.StatusOf(world.offline, bulk), -1);
  EXPECT_EQ(world.sim.engine().counters().parked, 1u);
  EXPECT_NE(world.sim.engine().StatusJson(world.sim.now()).find("\"instances_parked\":1"),
            std::string::npos);
  ASSERT_TRUE(world.sim.engine().SetPolicy("slice", world.sim.now()).ok());
  ASSERT_TRUE(world.sim.RunAll());
  EXPECT_EQ(world.sim.StatusOf(world.offline, bulk), SLICE_OK);
  EXPECT_EQ(world.sim.engine().counters().parked, 0u);
  EXPECT_EQ(world.sim.engine().SetPolicy("nonsense", world.sim.now()).code(), StatusCode::kInvalid);
  ExpectClean(world.sim);
}

TEST(EngineScenario, Happy_policy_switch_under_load_loses_nothing) {
  SliceWorld world("slice", kMillisecond, 2);
  std::vector<uint64_t> bulk;
  for (int i = 0; i < 10; ++i) bulk.push_back(world.sim.Submit(world.bulk));
  world.sim.OpenSequence(world.online, 1, ServiceClass::kOnline);
  world.RunSteps(1, 10, 500 * kMicrosecond);
  const std::vector<std::string> policies = {"fifo", "priority", "online-only", "slice"};
  for (size_t i = 0; i < policies.size(); ++i) {
    world.sim.At(static_cast<TimeNs>(i + 1) * 7 * kMillisecond, [&world, name = policies[i]] {
      ASSERT_TRUE(world.sim.engine().SetPolicy(name, world.sim.now()).ok());
    });
  }
  ASSERT_TRUE(world.sim.RunAll());
  for (const uint64_t cookie : bulk) EXPECT_EQ(world.sim.StatusOf(world.offline, cookie), SLICE_OK);
  for (const uint64_t cookie : world.submitted)
    EXPECT_EQ(world.sim.StatusOf(world.online, cookie), SLICE_OK);
  EXPECT_EQ(CheckSchedule(world.sim), "");
  ExpectClean(world.sim);
}

TEST(EngineScenario, Happy_fifo_runs_requests_in_arrival_order) {
  SliceWorld world("fifo");
  const uint64_t bulk = world.sim.Submit(world.bulk);
  const uint64_t step = world.sim.Submit(world.decode);
  ASSERT_TRUE(world.sim.RunAll());
  EXPECT_LT(world.sim.Find(world.offline, bulk)->slot.finish_ns,
            world.sim.Find(world.online, step)->slot.finish_ns);
}

TEST(EngineScenario, Happy_learned_durations_predict_the_finish) {
  VirtualOptions options;
  options.scale = 3;  // the prior is wrong by three
  options.noise = 0.05;
  Simulation sim(MakeConfig(1), options);
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service = sim.AddService(tenant, Llama(6, kMillisecond, 4096, 4096));
  uint64_t cookie = 0;
  for (int i = 0; i < 12; ++i) {
    cookie = sim.Submit(service);
    ASSERT_TRUE(sim.RunAll());
  }
  const auto* const done = sim.Find(tenant, cookie);
  const double actual = static_cast<double>(done->slot.finish_ns - done->slot.submit_ns);
  EXPECT_NEAR(static_cast<double>(done->slot.predicted_finish_ns - done->slot.submit_ns), actual,
              0.05 * actual);
}

TEST(EngineScenario, Happy_shared_domain_needs_no_transfers) {
  Simulation sim(MakeConfig(2, 64 << 20, true));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service = sim.AddService(tenant, Diamond(6, 2 * kMillisecond, 4096));
  const uint64_t cookie = sim.Submit(service);
  ASSERT_TRUE(sim.RunAll());
  EXPECT_EQ(sim.StatusOf(tenant, cookie), SLICE_OK);
  EXPECT_TRUE(sim.executor().copies.empty());
  EXPECT_EQ(CheckSchedule(sim), "");
  ExpectClean(sim);
}

// `width` ops that wait for nothing but the input.
std::shared_ptr<const graph::Template> Independent(int width, DurationNs duration) {
  GraphBuilder graph("independent");
  const uint32_t x = graph.Dynamic("x", 4096);
  for (int i = 0; i < width; ++i)
    graph.Output(graph.Op("op" + std::to_string(i), {x}, 4096, duration));
  return graph.Build();
}

// The snapshot that `crowd` fills does not hold `single`, whose only device needs no decision;
// `wide` must not be decided as if that op were not there.
TEST(EngineScenario, Regression_an_op_placed_without_a_decision_counts_in_the_next_one) {
  Simulation sim(MakeConfig(4, 64 << 20, true));
  const auto add_tenant = [&](DeviceIndex home, uint64_t devices) {
    engine::TenantConfig config;
    config.class_max = ServiceClass::kOnline;
    config.home = home;
    config.device_mask = devices;
    return sim.AddTenant(config);
  };
  const auto wide = sim.AddService(add_tenant(1, 0b1010), Independent(20, 10 * kMillisecond));
  const auto crowd =
      sim.AddService(add_tenant(0, 0b0101), Chain(300, 100 * kMicrosecond, 64, false, "crowd"));
  const auto single =
      sim.AddService(add_tenant(1, 0b0010), Chain(1, 15 * kMillisecond, 64, false, "single"));
  sim.Submit(wide);  // more than its two devices take at once
  // When both report their first op: there is room on each again.
  const VirtualOptions latencies;
  const TimeNs room = latencies.command_latency + 10 * kMillisecond + latencies.report_latency;
  sim.At(room, [&] {
    sim.Submit(crowd, 0, 0, 2);
    sim.Submit(single, 0, 0, 1);
  });
  sim.RunUntil(room + kMicrosecond);
  const Result<gmg::Reader> reader = gmg::Reader::Open(sim.gmg_memory());
  ASSERT_TRUE(reader.ok()) << reader.status().ToString();
  std::set<uint32_t> wide_on, single_on;
  for (const gmg::DecisionView& decision : reader->Decisions(1000)) {
    if (decision.time_ns != room) continue;
    if (decision.tenant == wide.tenant.value) wide_on.insert(decision.device);
    if (decision.tenant == single.tenant.value) single_on.insert(decision.device);
  }
  EXPECT_EQ(single_on, std::set<uint32_t>{1});
  EXPECT_EQ(wide_on, std::set<uint32_t>{3}) << "device 1 has `single` to run first";
  ASSERT_TRUE(sim.RunAll());
  ExpectClean(sim);
}

}  // namespace
}  // namespace slice::testing
