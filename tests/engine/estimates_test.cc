// What the engine feeds its estimators with, and what it shows and keeps of them.
#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/testing/engine_fixture.h"

namespace slice::testing {
namespace {

using nlohmann::json;

json Estimators(Simulation& sim) { return json::parse(sim.engine().EstimatorsJson()); }

const json* ByName(const json& answer, const std::string& name) {
  for (const json& item : answer["signatures"]) {
    if (item.value("name", "") == name) return &item;
  }
  return nullptr;
}

double PredictionError(const Simulation& sim, TenantId tenant, uint64_t cookie) {
  const auto& slot = sim.Find(tenant, cookie)->slot;
  const auto actual = static_cast<double>(slot.finish_ns - slot.submit_ns);
  return std::abs(static_cast<double>(slot.predicted_finish_ns - slot.finish_ns)) / actual;
}

TEST(EngineEstimates, Happy_OpsAreShownByNameWithWhatIsKnownOfThem) {
  Simulation sim(MakeConfig(1));
  sim.executor().peak_of = [](uint64_t, uint32_t) { return int64_t{12'288}; };
  EXPECT_TRUE(Estimators(sim)["signatures"].empty());
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service = sim.AddService(tenant, Llama(4, kMillisecond, 4096, 4096));
  for (int i = 0; i < 10; ++i) {
    sim.Submit(service);
    ASSERT_TRUE(sim.RunAll());
  }
  const json answer = Estimators(sim);
  EXPECT_EQ(answer["signatures"].size(), 3u);
  EXPECT_EQ(answer["signatures_left_out"], 0);
  const json* const embed = ByName(answer, "embed");
  ASSERT_NE(embed, nullptr) << answer;
  EXPECT_EQ((*embed)["samples"], 10);
  EXPECT_EQ((*embed)["level"], "exact");
  EXPECT_EQ((*embed)["drift"], false);
  EXPECT_EQ((*embed)["memory_samples"], 10);
  EXPECT_NEAR((*embed)["memory_ratio"].get<double>(), 3, 1e-6) << "12 KiB where 4 are declared";
  const json* layers = nullptr;
  for (const json& item : answer["signatures"]) {
    if (item["samples"] == 40) layers = &item;
  }
  ASSERT_NE(layers, nullptr) << "equal layers share a signature: " << answer;
  EXPECT_NEAR((*layers)["memory_ratio"].get<double>(), 1.5, 1e-6) << "workspace is declared too";
}

TEST(EngineEstimates, Happy_GapsAreLearnedByModelNotBySessionOrGraph) {
  Simulation sim(MakeConfig(1));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service prompt = sim.AddService(tenant, Llama(2, kMillisecond, 4096, 4096));
  const Simulation::Service step = sim.AddGraph(prompt, Llama(2, 2 * kMillisecond, 4096, 4096));
  const Simulation::Service other = sim.AddService(tenant, Llama(3, kMillisecond, 4096, 4096));
  uint64_t sequence = 0;
  const auto serve = [&](const Simulation::Service& first, const Simulation::Service& then) {
    sim.OpenSequence(tenant, ++sequence, ServiceClass::kOnline);
    for (const Simulation::Service* const service : {&first, &then, &then}) {
      sim.Submit(*service, sequence);
      ASSERT_TRUE(sim.RunAll());
    }
    sim.engine().CloseSequence(tenant, sequence, sim.now());
  };
  serve(prompt, step);
  EXPECT_EQ(Estimators(sim)["services"], 1) << "the prompt's and the steps' weights are the same";
  serve(other, other);
  EXPECT_EQ(Estimators(sim)["services"], 2);
  sim.engine().RemoveTenant(tenant, sim.now());
  ASSERT_TRUE(sim.RunAll());
  EXPECT_EQ(Estimators(sim)["services"], 0) << "nothing is kept of who left";
}

TEST(EngineEstimates, Edge_TheAnswerIsBoundedAndSaysWhatIsLeftOut) {
  Simulation sim(MakeConfig(1));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  for (int i = 0; i < 10; ++i) {
    GraphBuilder graph("many" + std::to_string(i));
    uint32_t value = graph.Dynamic("x", 4096);
    GraphBuilder::Use use;
    use.reads = {graph.Constant("w", 1024)};
    for (int op = 0; op < 10; ++op) {
      use.signature = static_cast<uint64_t>(1'000 + 10 * i + op);
      value = graph.Op("op" + std::to_string(use.signature), {value}, 4096, kMillisecond, use);
    }
    graph.Output(value);
    sim.Submit(sim.AddService(tenant, graph.Build()));
    ASSERT_TRUE(sim.RunAll());
  }
  const json answer = Estimators(sim);
  EXPECT_EQ(answer["signatures"].size(), 64u);
  EXPECT_EQ(answer["signatures_left_out"], 36);
  EXPECT_NE(ByName(answer, "op1099"), nullptr) << "the newest are there";
  EXPECT_EQ(ByName(answer, "op1000"), nullptr);
}

TEST(EngineEstimates, Happy_WhatOneEngineLearnedAnotherPredictsFrom) {
  VirtualOptions slow;
  slow.scale = 3;  // three times what the graph says
  const auto run = [&](const estimate::Saved& saved) {
    Simulation sim(MakeConfig(2), slow);
    sim.engine().LoadEstimates(saved);
    const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
    const Simulation::Service service = sim.AddService(tenant, Chain(8, kMillisecond, 4096));
    const uint64_t first = sim.Submit(service);
    EXPECT_TRUE(sim.RunAll());
    for (int i = 0; i < 10; ++i) {
      sim.Submit(service);
      EXPECT_TRUE(sim.RunAll());
    }
    return std::pair(PredictionError(sim, tenant, first), sim.engine().SaveEstimates());
  };
  const auto [cold, saved] = run({});
  EXPECT_GT(cold, 0.5);
  ASSERT_FALSE(saved.signatures.empty());
  EXPECT_LT(run(saved).first, 0.1);
}

// One device's ops take 1.4 times as long while the other device is busy.
TEST(EngineEstimates, Happy_ContentionIsLearnedFromReports) {
  Simulation sim(MakeConfig(2));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const TenantId other = sim.AddTenant(ServiceClass::kOnline, 1);
  const Simulation::Service service = sim.AddService(tenant, Chain(20, kMillisecond, 4096));
  const Simulation::Service load = sim.AddService(other, Chain(1, 40 * kMillisecond, 4096), 1);
  bool loaded = false;
  sim.executor().duration_of = [&](uint64_t, uint32_t, DurationNs planned) {
    return planned < 10 * kMillisecond && loaded ? planned * 14 / 10 : planned;
  };
  for (int i = 0; i < 60; ++i) {
    loaded = i % 2 == 1;
    if (loaded) {
      sim.Submit(load);
      sim.RunUntil(sim.now() + kMillisecond);
    }
    sim.Submit(service);
    ASSERT_TRUE(sim.RunAll());
  }
  const json answer = Estimators(sim);
  ASSERT_EQ(answer["contention"].size(), 1u) << answer;
  const json& contention = answer["contention"][0];
  EXPECT_TRUE(contention["on"].get<bool>()) << answer;
  EXPECT_LT(contention["error_with"].get<double>(), contention["error_without"].get<double>());
  EXPECT_NEAR(contention["slowdown"].get<double>(), 0.4, 0.05);
  // Predicted for a submit beside a busy device, and beside an idle one.
  sim.Submit(load);
  sim.RunUntil(sim.now() + kMillisecond);
  loaded = true;
  const uint64_t beside_load = sim.Submit(service);
  ASSERT_TRUE(sim.RunAll());
  loaded = false;
  const uint64_t alone = sim.Submit(service);
  ASSERT_TRUE(sim.RunAll());
  EXPECT_LT(PredictionError(sim, tenant, beside_load), 0.12);
  EXPECT_LT(PredictionError(sim, tenant, alone), 0.12);
}

}  // namespace
}  // namespace slice::testing
