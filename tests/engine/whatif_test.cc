// What-if questions: they agree with what a submit would store, and leave nothing behind.
#include <nlohmann/json.hpp>
#include <set>

#include "tests/testing/engine_fixture.h"
#include "tests/testing/schedule_checker.h"

namespace slice::testing {
namespace {

using nlohmann::json;

json Ask(Simulation& sim, const engine::WhatIfQuery& query) {
  const Result<std::string> text = sim.engine().WhatIf(query, sim.now());
  EXPECT_TRUE(text.ok()) << text.status().ToString();
  json answer = text.ok() ? json::parse(*text, nullptr, false) : json::object();
  EXPECT_TRUE(answer.is_object());
  return answer;
}
engine::WhatIfQuery Of(const std::string& graph, TenantId tenant = {}) {
  engine::WhatIfQuery query;
  query.graph = graph;
  query.tenant = tenant;
  return query;
}
// All that the engine holds and shows, byte by byte.
std::vector<std::byte> Memory(Simulation& sim) {
  return {sim.gmg_memory().begin(), sim.gmg_memory().end()};
}
std::string Views(Simulation& sim) {
  return sim.engine().StatusJson(sim.now()) + sim.engine().DevicesJson(sim.now()) +
         sim.engine().TenantsJson(sim.now()) + sim.engine().EstimatorsJson();
}
int64_t PredictedOf(Simulation& sim, uint64_t cookie) {
  const Result<gmg::Reader> reader = gmg::Reader::Open(sim.gmg_memory());
  for (const gmg::InstanceView& view : reader->Instances()) {
    if (view.cookie == cookie) return view.predicted_finish_ns;
  }
  return -1;
}

// Several tenants with work on their way. The same for the same seed.
struct Scene {
  explicit Scene(uint64_t seed, const char* policy = "slice")
      : random(seed), sim(Config(seed, policy), Options(seed)) {
    const std::vector<DomainIndex> everywhere =
        seed % 3 == 0 ? std::vector<DomainIndex>{} : std::vector<DomainIndex>{1};
    const TenantId online = sim.AddTenant(ServiceClass::kOnline, 0);
    const TenantId offline = sim.AddTenant(ServiceClass::kOffline, 1);
    const TenantId other = sim.AddTenant(ServiceClass::kOffline, 0);
    services.push_back(sim.AddService(online, Llama(4, 400 * kMicrosecond, 4096, 4096, "llama"), 0,
                                      everywhere, seed % 2 == 0));
    services.push_back(sim.AddService(offline, Diamond(4, 2 * kMillisecond, 16 << 10), 1, {0}));
    services.push_back(
        sim.AddService(other, RandomDag(&random, 14, 64 << 10, 3 * kMillisecond), 0, everywhere));
    sim.OpenSequence(online, 1, ServiceClass::kOnline);
  }
  static engine::Config Config(uint64_t seed, const char* policy) {
    engine::Config config = MakeConfig(2, (seed % 4 == 1 ? 2 : 64) * (256 << 10));
    config.policy = policy;
    config.batch_ops_max = static_cast<uint32_t>(2 + seed % 5);
    return config;
  }
  static VirtualOptions Options(uint64_t seed) {
    VirtualOptions options;
    options.seed = seed;
    options.noise = 0.2;
    return options;
  }
  // Submits at random times until `until`.
  void Load(TimeNs until, int count) {
    for (int i = 0; i < count; ++i) {
      const auto at = static_cast<TimeNs>(random() % static_cast<uint64_t>(until));
      const size_t which = random() % services.size();
      sim.At(sim.now() + at, [this, which] { sim.Submit(services[which], which == 0 ? 1 : 0); });
    }
  }
  std::mt19937_64 random;
  Simulation sim;
  std::vector<Simulation::Service> services;
};

std::string TraceOf(Simulation& sim) {
  std::string text;
  const auto add = [&text](int64_t number) { text += std::to_string(number) + " "; };
  for (const VirtualExecutor::OpRun& run : sim.executor().ops) {
    for (const int64_t n : {static_cast<int64_t>(run.instance), int64_t{run.attempt},
                            int64_t{run.op}, int64_t{run.device}, run.start, run.finish})
      add(n);
    text += "\n";
  }
  for (const engine::TraceEvent& event : sim.executor().trace) {
    for (const int64_t n :
         {static_cast<int64_t>(event.kind), static_cast<int64_t>(event.instance.value),
          int64_t{event.op}, int64_t{event.device}, event.start, event.finish,
          event.predicted_start, event.predicted_finish, event.bytes})
      add(n);
    text += event.text + "\n";
  }
  for (const auto& [key, completion] : sim.executor().completions) {
    for (const int64_t n :
         {int64_t{key.first}, static_cast<int64_t>(key.second), int64_t{completion.slot.status},
          completion.slot.start_ns, completion.slot.finish_ns, completion.slot.predicted_finish_ns,
          completion.at})
      add(n);
    text += completion.text + "\n";
  }
  return text;
}

TEST(EngineWhatIf, Happy_idle_engine_predicts_what_the_submit_does) {
  Simulation sim(MakeConfig(1));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service = sim.AddService(tenant, Chain(4, kMillisecond, 4096));
  const json answer = Ask(sim, Of("chain"));
  EXPECT_EQ(answer["state"], "placed");
  EXPECT_EQ(answer["graph"]["name"], "chain");
  EXPECT_EQ(answer["graph"]["ops"], 4);
  EXPECT_EQ(answer["tenant"], tenant.value);
  EXPECT_EQ(answer["binding"], service.binding.value);
  EXPECT_EQ(answer["class"], "online");
  EXPECT_EQ(answer["home_device"], "cpu0");
  EXPECT_EQ(answer["start_in_ns"], 0);
  EXPECT_NEAR(answer["work_ns"].get<double>(), 4e6, 1e4);
  EXPECT_EQ(answer["finish_in_ns"], answer["work_ns"]);
  EXPECT_EQ(answer["duration_ns"], answer["work_ns"]);
  EXPECT_EQ(answer["beyond_horizon"], false);
  ASSERT_EQ(answer["estimates"].size(), 1u) << "one signature";
  EXPECT_EQ(answer["estimates"][0]["ops"], 4);
  EXPECT_EQ(answer["estimates"][0]["level"], "prior");
  EXPECT_GT(answer["estimates"][0]["spread_ns"], 0);
  ASSERT_EQ(answer["memory"].size(), 1u);
  EXPECT_EQ(answer["memory"][0]["peak_bytes"], 2 * 4096);
  EXPECT_EQ(answer["memory"][0]["free_bytes"], 64 << 20);
  EXPECT_EQ(answer["memory"][0]["fits"], true);
  EXPECT_EQ(answer["access_queues"]["users_before"], 0);
  ASSERT_TRUE(answer.contains("decision"));
  EXPECT_EQ(answer["decision"]["device"], "cpu0");
  EXPECT_EQ(answer["decision"]["made_now"], true);

  const uint64_t cookie = sim.Submit(service);
  sim.engine().Run(sim.now());
  EXPECT_EQ(PredictedOf(sim, cookie), answer["predicted_finish_ns"].get<int64_t>());
  ASSERT_TRUE(sim.RunAll());
  ExpectClean(sim);
}

TEST(EngineWhatIf, Happy_agrees_with_the_submit_that_follows_whatever_is_going_on) {
  std::set<std::string> states;
  size_t deferrals = 0;
  for (const char* policy : {"slice", "fifo", "priority"}) {
    for (uint64_t seed = 1; seed <= 24; ++seed) {
      SCOPED_TRACE(std::string(policy) + " seed " + std::to_string(seed));
      Scene scene(seed, policy);
      Simulation& sim = scene.sim;
      scene.Load(20 * kMillisecond, 12);
      sim.RunUntil(static_cast<TimeNs>(1 + seed) * kMillisecond);
      for (const Simulation::Service& service : scene.services) {
        const json answer = Ask(sim, Of(service.graph->name(), service.tenant));
        states.insert(answer["state"]);
        deferrals += answer.contains("decision") && !answer["decision"]["placed"];
        const uint64_t cookie = sim.Submit(service);
        sim.engine().Run(sim.now());
        ASSERT_EQ(PredictedOf(sim, cookie), answer["predicted_finish_ns"].get<int64_t>())
            << answer.dump(1);
      }
      ASSERT_TRUE(sim.RunAll());
      ExpectClean(sim);
    }
  }
  for (const char* state : {"placed", "waiting", "started"})
    EXPECT_TRUE(states.contains(state)) << state << " never came up";
  EXPECT_GT(deferrals, 0u);
}

TEST(EngineWhatIf, Happy_a_class_is_that_of_the_first_step_of_a_sequence) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Scene scene(seed);
    Simulation& sim = scene.sim;
    scene.Load(10 * kMillisecond, 8);
    sim.RunUntil(4 * kMillisecond);
    const Simulation::Service& service = scene.services[0];
    for (const ServiceClass service_class : {ServiceClass::kOffline, ServiceClass::kOnline}) {
      engine::WhatIfQuery query = Of("llama");
      query.service_class = service_class;
      const json answer = Ask(sim, query);
      EXPECT_EQ(answer["class"], service_class == ServiceClass::kOnline ? "online" : "offline");
      const uint64_t sequence = 100 + static_cast<uint64_t>(service_class);
      sim.OpenSequence(service.tenant, sequence, service_class);
      const uint64_t cookie = sim.Submit(service, sequence);
      sim.engine().Run(sim.now());
      EXPECT_EQ(PredictedOf(sim, cookie), answer["predicted_finish_ns"].get<int64_t>());
    }
    ASSERT_TRUE(sim.RunAll());
  }
}

TEST(EngineWhatIf, Happy_questions_change_nothing_that_follows) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const char* const policy = seed % 4 == 0 ? "fifo" : "slice";
    std::string plain, asked, plain_views, asked_views;
    for (const bool ask : {false, true}) {
      Scene scene(seed, policy);
      Simulation& sim = scene.sim;
      scene.Load(40 * kMillisecond, 30);
      if (seed % 5 == 0) sim.At(15 * kMillisecond, [&sim] { sim.KillExecutor(5 * kMillisecond); });
      for (TimeNs at = kMillisecond; ask && at < 60 * kMillisecond; at += 777 * kMicrosecond) {
        sim.At(at, [&scene, &sim, at] {
          const auto& service =
              scene.services[static_cast<size_t>(at / kMicrosecond) % scene.services.size()];
          engine::WhatIfQuery query = Of(service.graph->name(), service.tenant);
          if (at % 2 == 0 && &service == scene.services.data())
            query.service_class = ServiceClass::kOnline;
          const bool compare = at / 777 % 8 == 0;  // megabytes
          const std::vector<std::byte> before = compare ? Memory(sim) : std::vector<std::byte>();
          const std::string views = Views(sim);
          const TimeNs wake = sim.engine().NextWake();
          const size_t events = sim.executor().trace.size();
          const Result<std::string> answer = sim.engine().WhatIf(query, sim.now());
          // Refused only while there is no executor.
          EXPECT_TRUE(answer.ok() || answer.status().code() == StatusCode::kExecutorLost)
              << answer.status().ToString();
          EXPECT_TRUE(!compare || before == Memory(sim)) << "readers of the GMG would see it";
          EXPECT_EQ(views, Views(sim));
          EXPECT_EQ(wake, sim.engine().NextWake());
          EXPECT_EQ(events, sim.executor().trace.size());
        });
        // The same moments without a question: the engine runs at them, too.
      }
      for (TimeNs at = kMillisecond; !ask && at < 60 * kMillisecond; at += 777 * kMicrosecond)
        sim.At(at, [] {});
      ASSERT_TRUE(sim.RunAll());
      ExpectClean(sim);
      EXPECT_EQ(CheckSchedule(sim, seed % 5 != 0), "");
      (ask ? asked : plain) = TraceOf(sim);
      (ask ? asked_views : plain_views) = Views(sim);
    }
    EXPECT_EQ(plain, asked);
    EXPECT_EQ(plain_views, asked_views);
  }
}

TEST(EngineWhatIf, Happy_candidates_say_why_they_were_not_chosen) {
  Simulation sim(MakeConfig(3));
  engine::TenantConfig config;
  config.class_max = ServiceClass::kOnline;
  config.device_mask = 0b011;
  const TenantId tenant = sim.AddTenant(config);
  sim.AddService(tenant, Chain(4, kMillisecond, 1 << 20), 0, {1});
  const json answer = Ask(sim, Of("chain"));
  ASSERT_TRUE(answer.contains("decision")) << answer.dump(1);
  const json& candidates = answer["decision"]["candidates"];
  ASSERT_EQ(candidates.size(), 3u) << candidates.dump(1);
  size_t chosen = 0;
  for (const json& candidate : candidates) {
    chosen += candidate["chosen"].get<bool>();
    EXPECT_NE(candidate["chosen"].get<bool>(), candidate.contains("why_not"));
    if (candidate["device"] == "cpu2") {
      EXPECT_EQ(candidate["why_not"], "the session may not use it");
      EXPECT_FALSE(candidate.contains("finish_in_ns"));
    } else {
      EXPECT_GE(candidate["finish_in_ns"].get<int64_t>(), 4 * kMillisecond);
      EXPECT_GE(candidate["graph_finish_in_ns"].get<int64_t>(), 4 * kMillisecond);
    }
  }
  EXPECT_EQ(chosen, 1u);
}

TEST(EngineWhatIf, Happy_memory_queues_and_line_are_counted) {
  Simulation sim(MakeConfig(1, 256 << 10));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service =
      sim.AddService(tenant, Llama(3, kMillisecond, 64 << 10, 4096));
  sim.Submit(service);
  sim.Submit(service);
  sim.engine().Run(sim.now());
  const json answer = Ask(sim, Of("llama"));
  EXPECT_EQ(answer["access_queues"]["pieces"], 6);
  EXPECT_EQ(answer["access_queues"]["entries_before"], 12);
  EXPECT_EQ(answer["access_queues"]["users_before"], 2);
  EXPECT_EQ(answer["state"], "waiting");
  EXPECT_EQ(answer["memory"][0]["fits"], false);
  EXPECT_LT(answer["memory"][0]["free_bytes"], answer["memory"][0]["peak_bytes"]);
  EXPECT_GT(answer["start_in_ns"], kMillisecond);
  ASSERT_TRUE(sim.RunAll());
  const json later = Ask(sim, Of("llama"));
  EXPECT_EQ(later["access_queues"]["users_before"], 0);
  EXPECT_EQ(later["state"], "placed");
  EXPECT_NE(later["estimates"][0]["level"], "prior") << "it has run";
  ExpectClean(sim);
}

TEST(EngineWhatIf, Edge_class_above_the_session_is_refused) {
  Simulation sim(MakeConfig(1));
  sim.AddService(sim.AddTenant(ServiceClass::kOffline), Chain(2, kMillisecond, 4096));
  engine::WhatIfQuery query = Of("chain");
  query.service_class = ServiceClass::kOnline;
  const Status status = sim.engine().WhatIf(query, sim.now()).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalid);
  EXPECT_NE(status.text().find("may only be offline"), std::string::npos) << status.text();
  query.service_class = ServiceClass::kOffline;
  EXPECT_EQ(Ask(sim, query)["class"], "offline");
}

TEST(EngineWhatIf, Edge_parked_work_has_no_prediction) {
  engine::Config config = MakeConfig(1);
  config.policy = "online-only";
  Simulation sim(config);
  sim.AddService(sim.AddTenant(ServiceClass::kOffline), Chain(2, kMillisecond, 4096));
  const json answer = Ask(sim, Of("chain"));
  EXPECT_EQ(answer["state"], "parked");
  EXPECT_FALSE(answer.contains("finish_in_ns"));
  EXPECT_FALSE(answer.contains("decision"));
}

TEST(EngineWhatIf, Edge_which_graph_is_meant) {
  Simulation sim(MakeConfig(1));
  const auto fails = [&sim](const engine::WhatIfQuery& query, const std::string& part) {
    const Result<std::string> answer = sim.engine().WhatIf(query, sim.now());
    ASSERT_FALSE(answer.ok()) << *answer;
    EXPECT_EQ(answer.status().code(), StatusCode::kInvalid);
    EXPECT_NE(answer.status().text().find(part), std::string::npos) << answer.status().text();
  };
  fails(Of("chain"), "bound are: none");
  const TenantId first = sim.AddTenant(ServiceClass::kOnline);
  const TenantId second = sim.AddTenant(ServiceClass::kOnline);
  const auto graph = Chain(4, kMillisecond, 4096);
  const Simulation::Service service = sim.AddService(first, graph);
  char hash[17];
  std::snprintf(hash, sizeof hash, "%016llx",
                static_cast<unsigned long long>(graph->content_hash()));
  EXPECT_EQ(Ask(sim, Of(std::string(hash, 6)))["binding"], service.binding.value);
  EXPECT_EQ(Ask(sim, Of(hash))["graph"]["content_hash"], hash);
  fails(Of("chai"), "'chain'");
  fails(Of("chain", second), "no session of that number");
  sim.AddService(second, graph);
  fails(Of("chain"), "say which (--tenant)");
  EXPECT_EQ(Ask(sim, Of("chain", first))["tenant"], first.value);
  EXPECT_EQ(Ask(sim, Of("chain", second))["tenant"], second.value);
  // Another graph of the same name in the same session.
  sim.AddService(first, Chain(5, kMillisecond, 4096));
  fails(Of("chain", first), "more than one graph");
  EXPECT_EQ(Ask(sim, Of(hash, first))["graph"]["ops"], 4);
  // The newest binding of one session.
  const Simulation::Service newer = sim.AddGraph(service, graph);
  EXPECT_EQ(Ask(sim, Of(hash, first))["binding"], newer.binding.value);
  for (int i = 0; i < 40; ++i)
    sim.AddService(first, Chain(3, kMillisecond, 4096, true, "other" + std::to_string(i)));
  const Status unknown = sim.engine().WhatIf(Of("nothing"), sim.now()).status();
  EXPECT_NE(unknown.text().find("more"), std::string::npos) << "the list is bounded";
  EXPECT_LT(unknown.text().size(), 2000u);
}

TEST(EngineWhatIf, Malicious_long_names_are_cut) {
  Simulation sim(MakeConfig(1));
  std::string name = "n";  // then characters of two bytes: none may be cut in half
  for (int i = 0; i < 255; ++i) name += "\xc3\xa9";
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const auto graph = Chain(2, kMillisecond, 4096, true, name);
  sim.AddService(tenant, graph);
  char hash[17];
  std::snprintf(hash, sizeof hash, "%016llx",
                static_cast<unsigned long long>(graph->content_hash()));
  const std::string shown = Ask(sim, Of(hash))["graph"]["name"];
  EXPECT_EQ(shown, name.substr(0, 63));
  const Status unknown = sim.engine().WhatIf(Of("nothing"), sim.now()).status();
  EXPECT_NE(unknown.text().find(hash), std::string::npos) << "after the name";
}

TEST(EngineWhatIf, Edge_symbols) {
  TemplateBuilder builder;
  proto::Symbol* const rows = builder.program.add_symbols();
  rows->set_name("rows");
  rows->set_min(1);
  rows->set_max(64);
  builder.program.mutable_metadata()->set_model("sized");
  const uint32_t x = builder.Value({4, 4}), y = builder.Value({4, 4});
  builder.Input("x", proto::Input::DYNAMIC, x);
  builder.Node("aten::relu", {{"self", x}}, {y});
  proto::Group* const group = builder.Group("layer");
  group->add_inputs(x);
  group->add_outputs(y);
  group->mutable_flops()->set_symbol(0);
  builder.Output(y);
  Result<std::shared_ptr<const graph::Template>> graph =
      graph::Template::Parse(builder.Serialize());
  ASSERT_TRUE(graph.ok()) << graph.status().ToString();
  Simulation sim(MakeConfig(1));
  const Simulation::Service service = sim.AddService(sim.AddTenant(ServiceClass::kOnline), *graph);
  const auto text = [&](std::vector<int64_t> symbols) {
    engine::WhatIfQuery query = Of("sized");
    query.symbols = std::move(symbols);
    return sim.engine().WhatIf(query, sim.now()).status().text();
  };
  EXPECT_NE(text({}).find("rows (1 to 64)"), std::string::npos) << text({});
  EXPECT_NE(text({}).find("nothing was submitted yet"), std::string::npos);
  EXPECT_NE(text({3, 4}).find("needs 1 symbols, 2 are given"), std::string::npos) << text({3, 4});
  EXPECT_EQ(text({3}), "");
  EXPECT_NE(text({65}), "") << "outside its range";
  engine::WhatIfQuery query = Of("sized");
  query.symbols = {5};
  EXPECT_EQ(Ask(sim, query)["graph"]["symbols"]["rows"], 5);
  engine::Submit submit;
  const std::vector<int64_t> symbols = {7};
  const std::vector<wire::ArenaRange> inputs = {{0, 64}}, outputs = {{64, 64}};
  submit.tenant = service.tenant;
  submit.cookie = 1;
  submit.binding = service.binding;
  submit.symbols = symbols;
  submit.inputs = inputs;
  submit.outputs = outputs;
  sim.engine().Handle(submit, sim.now());
  EXPECT_EQ(Ask(sim, Of("sized"))["graph"]["symbols"]["rows"], 7) << "of the latest submit";
}

TEST(EngineWhatIf, Edge_refused_as_the_submit_would_be) {
  engine::Config config = MakeConfig(1, 64 << 10);
  config.tenant_queue_max = 1;
  Simulation sim(config);
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  sim.AddService(tenant, Chain(2, kMillisecond, 256 << 10, true, "large"));
  const Simulation::Service small = sim.AddService(tenant, Chain(2, kMillisecond, 1024));
  EXPECT_EQ(sim.engine().WhatIf(Of("large"), sim.now()).status().code(), StatusCode::kNeverFits);
  sim.Submit(small);
  EXPECT_EQ(sim.engine().WhatIf(Of("chain"), sim.now()).status().code(), StatusCode::kWouldBlock);
  ASSERT_TRUE(sim.RunAll());
  EXPECT_TRUE(sim.engine().WhatIf(Of("chain"), sim.now()).ok());
  sim.KillExecutor(kMillisecond);
  EXPECT_EQ(sim.engine().WhatIf(Of("chain"), sim.now()).status().code(), StatusCode::kExecutorLost);
  sim.engine().ExecutorGivenUp(sim.now());
  EXPECT_EQ(sim.engine().WhatIf(Of("chain"), sim.now()).status().code(), StatusCode::kExecutorLost);
}

}  // namespace
}  // namespace slice::testing
