// One request through the engine in virtual time; what a submit, a binding or a command may be
// refused for; the GMG as readers see it; a golden timeline.
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "tests/testing/engine_fixture.h"

namespace slice::testing {
namespace {

TEST(EngineBasic, Happy_chain_on_one_device_completes_with_times) {
  Simulation sim(MakeConfig(1));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service = sim.AddService(tenant, Chain(4, kMillisecond, 4096));
  const uint64_t cookie = sim.Submit(service);
  EXPECT_TRUE(sim.RunAll());
  const VirtualExecutor::Completion* const done = sim.Find(tenant, cookie);
  ASSERT_NE(done, nullptr);
  EXPECT_EQ(done->slot.status, SLICE_OK) << done->text;
  EXPECT_EQ(sim.executor().ops.size(), 4u);
  EXPECT_GE(done->slot.finish_ns - done->slot.start_ns, 4 * kMillisecond);
  EXPECT_LT(done->slot.finish_ns, 4 * kMillisecond + 200 * kMicrosecond)
      << "short ops are issued ahead";
  EXPECT_NEAR(static_cast<double>(done->slot.predicted_finish_ns),
              static_cast<double>(done->slot.finish_ns), 2e5);
  ExpectClean(sim);
  EXPECT_EQ(sim.engine().counters().ops_executed, 4u);
  EXPECT_EQ(sim.engine().counters().device_busy[0], 4 * kMillisecond);
}

TEST(EngineBasic, Edge_nothing_is_sent_before_the_executor_is_ready) {
  const engine::Config config = MakeConfig(1);
  std::vector<std::byte> memory(engine::Engine::GmgBytes(config) + 64);
  void* pointer = memory.data();
  size_t space = memory.size();
  std::align(64, engine::Engine::GmgBytes(config), pointer, space);
  VirtualExecutor executor(config, {});
  auto created =
      engine::Engine::Create(config, {static_cast<std::byte*>(pointer), space}, &executor);
  ASSERT_TRUE(created.ok());
  EXPECT_EQ((*created)->NextWake(), kNever);
  (*created)->Run(0);
  EXPECT_EQ(executor.NextEvent(), kNever);
}

TEST(EngineBasic, Edge_bad_configs_are_refused) {
  VirtualExecutor executor(MakeConfig(1), {});
  std::vector<std::byte> memory(64);
  const auto code = [&](const engine::Config& config) {
    return engine::Engine::Create(config, memory, &executor).status().code();
  };
  engine::Config config = MakeConfig(1);
  config.devices.clear();
  EXPECT_EQ(code(config), StatusCode::kInvalid);
  config = MakeConfig(1);
  config.devices[0].domain = 3;
  EXPECT_EQ(code(config), StatusCode::kInvalid);
  config = MakeConfig(1);
  config.issue_ahead = 0;
  EXPECT_EQ(code(config), StatusCode::kInvalid);
  EXPECT_EQ(code(MakeConfig(1)), StatusCode::kInvalid) << "memory too small";
}

class EngineRefusals : public ::testing::Test {
 protected:
  EngineRefusals() : sim(MakeConfig(1)) {
    tenant = sim.AddTenant(ServiceClass::kOnline);
    stranger = sim.AddTenant(ServiceClass::kOnline);
    service = sim.AddService(tenant, Chain(3, kMillisecond, 4096));
    cache = sim.AddService(tenant, Llama(2, kMillisecond, 4096, 4096));
    submit.tenant = tenant;
    submit.binding = service.binding;
    submit.inputs = {&in, 1};
    submit.outputs = {&out, 1};
  }
  int Status() {
    submit.cookie = ++cookie;
    sim.engine().Handle(submit, sim.now());
    return sim.StatusOf(submit.tenant, cookie);
  }
  Simulation sim;
  TenantId tenant, stranger;
  Simulation::Service service, cache;
  wire::ArenaRange in{0, 4096}, out{8192, 4096};
  engine::Submit submit;
  uint64_t cookie = 1000;
};

TEST_F(EngineRefusals, Malicious_sizes_counts_and_symbols_are_checked) {
  in.bytes = 4095;
  EXPECT_EQ(Status(), SLICE_ERR_BOUNDS);
  in.bytes = 4100;
  EXPECT_EQ(Status(), SLICE_ERR_BOUNDS);
  in.bytes = 4096;
  out.bytes = 1;
  EXPECT_EQ(Status(), SLICE_ERR_BOUNDS);
  out.bytes = 4096;
  submit.outputs = {};
  EXPECT_EQ(Status(), SLICE_ERR_INVALID);
  submit.outputs = {&out, 1};
  const int64_t symbol = 5;
  submit.symbols = {&symbol, 1};
  EXPECT_EQ(Status(), SLICE_ERR_OVERFLOW);
  submit.symbols = {};
  EXPECT_EQ(Status(), -1) << "now it is right, and runs";
  ASSERT_TRUE(sim.RunAll(kSecond));
  ExpectClean(sim);
}

TEST_F(EngineRefusals, Malicious_handles_of_others_are_stale) {
  submit.tenant = stranger;
  EXPECT_EQ(Status(), SLICE_ERR_STALE);
  submit.tenant = tenant;
  submit.binding = {777};
  EXPECT_EQ(Status(), SLICE_ERR_STALE);
  submit.binding = service.binding;
  submit.sequence = 5;
  EXPECT_EQ(Status(), SLICE_ERR_INVALID) << "the sequence is not open";
  sim.OpenSequence(tenant, 5, ServiceClass::kOnline);
  EXPECT_EQ(Status(), -1);
  sim.engine().CloseSequence(tenant, 5, sim.now());
  out.offset = 1 << 20;
  EXPECT_EQ(Status(), SLICE_ERR_INVALID) << "closed";
  ASSERT_TRUE(sim.RunAll(kSecond));
  engine::TensorCommand command;
  command.tenant = stranger;
  command.cookie = 1;
  command.tensors = cache.pieces;
  sim.engine().Handle(command, sim.now());
  EXPECT_EQ(sim.StatusOf(stranger, 1), SLICE_ERR_STALE);
}

TEST_F(EngineRefusals, Malicious_overlapping_live_output_slots_are_refused) {
  EXPECT_EQ(Status(), -1);
  EXPECT_EQ(Status(), SLICE_ERR_BOUNDS) << "the same slot";
  out.offset = 8192 + 4095;
  EXPECT_EQ(Status(), SLICE_ERR_BOUNDS) << "one byte";
  out.offset = 8192 + 4096;
  EXPECT_EQ(Status(), -1) << "adjacent";
  ASSERT_TRUE(sim.RunAll(kSecond));
  EXPECT_EQ(Status(), -1) << "free again";
  ASSERT_TRUE(sim.RunAll(2 * kSecond));
  ExpectClean(sim);
}

TEST_F(EngineRefusals, Edge_full_queue_would_block) {
  std::vector<uint64_t> cookies;
  for (int i = 0; i < 256; ++i) cookies.push_back(sim.Submit(service));
  const uint64_t over = sim.Submit(service);
  EXPECT_EQ(sim.StatusOf(tenant, over), SLICE_ERR_WOULD_BLOCK);
  ASSERT_TRUE(sim.RunAll(10 * kSecond));
  for (const uint64_t c : cookies) EXPECT_EQ(sim.StatusOf(tenant, c), SLICE_OK);
  ExpectClean(sim);
}

TEST_F(EngineRefusals, Edge_drop_late_refuses_what_cannot_be_in_time) {
  engine::Config config = MakeConfig(1);
  config.drop_late = true;
  Simulation strict(config);
  const TenantId id = strict.AddTenant(ServiceClass::kOnline);
  const Simulation::Service chain = strict.AddService(id, Chain(4, kMillisecond, 4096));
  EXPECT_EQ(strict.StatusOf(id, strict.Submit(chain, 0, 2 * kMillisecond)), SLICE_ERR_DEADLINE);
  EXPECT_EQ(strict.StatusOf(id, strict.Submit(chain, 0, 5 * kMillisecond)), -1);
  ASSERT_TRUE(strict.RunAll(kSecond));
  ExpectClean(strict);
}

TEST_F(EngineRefusals, Malicious_bindings_must_fit_their_graph) {
  engine::BindingConfig binding;
  binding.id = {5000};
  binding.tenant = tenant;
  const auto graph = Llama(1, kMillisecond, 4096, 4096);
  binding.graph = sim.AddTemplate(graph);
  EXPECT_EQ(sim.engine().AddBinding(binding).code(), StatusCode::kGraph) << "count";
  const engine::TensorRef w{cache.constants, 0}, k = cache.pieces[0], v = cache.pieces[1];
  binding.statics = {w, k, k};
  EXPECT_EQ(sim.engine().AddBinding(binding).code(), StatusCode::kGraph)
      << "one tensor twice, written";
  binding.statics = {k, w, v};
  EXPECT_EQ(sim.engine().AddBinding(binding).code(), StatusCode::kGraph) << "kind";
  binding.statics = {{service.constants, 0}, k, v};
  EXPECT_EQ(sim.engine().AddBinding(binding).code(), StatusCode::kGraph) << "shape";
  binding.statics = {w, {cache.managed, 99}, v};
  EXPECT_EQ(sim.engine().AddBinding(binding).code(), StatusCode::kStale) << "no such tensor";
  binding.statics = {w, k, v};
  EXPECT_TRUE(sim.engine().AddBinding(binding).ok());
  EXPECT_EQ(sim.engine().RemoveTemplate(binding.graph).code(), StatusCode::kStale) << "in use";
  EXPECT_TRUE(sim.engine().RemoveBinding(binding.id).ok());
  EXPECT_EQ(sim.engine().RemoveBinding(binding.id).code(), StatusCode::kStale);
  EXPECT_TRUE(sim.engine().RemoveTemplate(binding.graph).ok());
}

TEST_F(EngineRefusals, Edge_released_tensors_stay_until_the_last_use) {
  EXPECT_EQ(Status(), -1);
  ASSERT_TRUE(sim.engine().RemoveTensorSet(service.constants, sim.now()).ok());
  out.offset = 1 << 20;
  EXPECT_EQ(Status(), SLICE_ERR_STALE);
  ASSERT_TRUE(sim.RunAll(kSecond));
  EXPECT_FALSE(sim.engine().TensorSetGone(service.constants)) << "a binding holds it";
  ASSERT_TRUE(sim.engine().RemoveBinding(service.binding).ok());
  EXPECT_TRUE(sim.engine().TensorSetGone(service.constants));
}

// Every kind of bad input: its code, and nothing has changed.
TEST_F(EngineRefusals, Malicious_bad_input_has_a_typed_error_and_changes_nothing) {
  engine::Engine& engine = sim.engine();
  const auto state = [this] {
    return gmg::Reader::Open(sim.gmg_memory())->GraphsJson(true) +
           sim.engine().TenantsJson(sim.now());
  };
  const std::string before = state();
  const uint64_t refused = engine.counters().refused;
  // Ids that are gone or were never there.
  EXPECT_EQ(engine.RemoveTemplate({4711}).code(), StatusCode::kStale);
  EXPECT_EQ(engine.RemoveBinding({4711}).code(), StatusCode::kStale);
  EXPECT_EQ(engine.RemoveTensorSet({4711}, sim.now()).code(), StatusCode::kStale);
  EXPECT_EQ(engine.Replicate({4711}, 0, sim.now()).code(), StatusCode::kStale);
  engine::TensorSetConfig set;
  set.id = {900};
  set.tenant = {4711};
  EXPECT_EQ(engine.AddTensorSet(set, sim.now()).code(), StatusCode::kStale);
  engine::BindingConfig binding;
  binding.id = {901};
  binding.tenant = tenant;
  binding.graph = {4711};
  EXPECT_EQ(engine.AddBinding(binding).code(), StatusCode::kStale);
  // Devices and domains that do not exist.
  engine::TenantConfig config;
  config.id = {902};
  config.home = 1;
  EXPECT_EQ(engine.AddTenant(config, sim.now()).code(), StatusCode::kInvalid);
  config.home = 0;
  config.device_mask = 2;
  EXPECT_EQ(engine.AddTenant(config, sim.now()).code(), StatusCode::kInvalid);
  EXPECT_EQ(engine.Replicate(service.constants, 7, sim.now()).code(), StatusCode::kInvalid);
  set.tenant = tenant;
  set.home = 7;
  EXPECT_EQ(engine.AddTensorSet(set, sim.now()).code(), StatusCode::kInvalid);
  // Twice the same id.
  EXPECT_EQ(engine.AddTemplate({1}, nullptr).code(), StatusCode::kInvalid);
  config.id = tenant;
  config.device_mask = 0;
  EXPECT_EQ(engine.AddTenant(config, sim.now()).code(), StatusCode::kInvalid);
  EXPECT_EQ(state(), before);
  // Sizes that are negative, too large, or do not fit in 63 bits.
  set.home = 0;
  set.tensors = {{"w", -1, 0}};
  EXPECT_EQ(engine.AddTensorSet(set, sim.now()).code(), StatusCode::kOverflow);
  set.tensors = {{"w", INT64_MAX, 0}, {"v", 1, 0}};
  EXPECT_EQ(engine.AddTensorSet(set, sim.now()).code(), StatusCode::kOverflow);
  set.tensors = {{"w", int64_t{1} << 50, 0}};
  EXPECT_EQ(engine.AddTensorSet(set, sim.now()).code(), StatusCode::kNeverFits);
  EXPECT_EQ(state(), before);
  // Reports and cancels of instances of an earlier generation.
  engine.Cancel(tenant, 4711, sim.now());
  wire::Finished finished{};
  finished.instance = uint64_t{9} << 20 | 3;
  finished.attempt = 1;
  EXPECT_TRUE(engine
                  .HandleReport(wire::kFinished,
                                {reinterpret_cast<const std::byte*>(&finished), sizeof(finished)},
                                sim.now())
                  .ok())
      << "late, not wrong";
  EXPECT_EQ(state(), before);
  EXPECT_EQ(engine.counters().refused, refused);
}

TEST(EngineRefusal, Malicious_symbols_out_of_range_leave_the_gmg_as_it_was) {
  Simulation sim(MakeConfig(1));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service = sim.AddService(tenant, SymbolicLlama(2, 64, 4096));
  const auto instances = [&] { return gmg::Reader::Open(sim.gmg_memory())->Instances().size(); };
  uint64_t cookie = 0;
  const auto status = [&](std::vector<int64_t> symbols) {
    const int64_t tokens = symbols.empty() ? 1 : std::max<int64_t>(symbols[0], 1);
    const wire::ArenaRange in{0, static_cast<uint64_t>(8 * tokens)};
    const wire::ArenaRange out{1 << 20, static_cast<uint64_t>(64'000 * tokens)};
    engine::Submit submit;
    submit.tenant = tenant;
    submit.cookie = ++cookie;
    submit.binding = service.binding;
    submit.symbols = symbols;
    submit.inputs = {&in, 1};
    submit.outputs = {&out, 1};
    sim.engine().Handle(submit, sim.now());
    return sim.StatusOf(tenant, cookie);
  };
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, INT64_MIN, int64_t{4097}})
    EXPECT_EQ(status({bad}), SLICE_ERR_OVERFLOW) << bad;
  EXPECT_EQ(status({}), SLICE_ERR_OVERFLOW) << "none given";
  EXPECT_EQ(status({1, 1}), SLICE_ERR_OVERFLOW) << "more than declared";
  EXPECT_EQ(instances(), 0u);
  EXPECT_EQ(sim.engine().counters().refused, 6u);
  EXPECT_EQ(status({4}), -1) << "a right one runs";
  EXPECT_EQ(instances(), 1u);
  sim.engine().Cancel(tenant, cookie, sim.now());
  EXPECT_EQ(instances(), 0u);
}

TEST(EngineGmg, Happy_reader_sees_who_waits_for_a_piece) {
  Simulation sim(MakeConfig(1));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service = sim.AddService(tenant, Llama(2, kMillisecond, 4096, 4096));
  for (int i = 0; i < 5; ++i) sim.Submit(service);
  sim.Command(service, wire::kTensorReset, {service.pieces[0]});
  for (int i = 0; i < 5; ++i) sim.Submit(service);
  const auto piece = [&](size_t index) {
    return gmg::Reader::Open(sim.gmg_memory())->Pieces()[index];
  };
  const gmg::PieceView first = piece(0);
  EXPECT_EQ(first.queue_length, 11u);
  EXPECT_EQ(first.version, 0u);
  ASSERT_EQ(first.queue.size(), 8u);
  const auto instances = gmg::Reader::Open(sim.gmg_memory())->Instances();
  for (uint32_t e = 0; e < 8; ++e) {
    EXPECT_EQ(first.queue[e].waits_for, e) << "writers wait for everybody before";
    EXPECT_EQ(gmg::AccessName(first.queue[e]), e == 5 ? "reset" : "write");
    const bool command = first.queue[e].kind == gmg::AccessKind::kCommand;
    EXPECT_EQ(command, e == 5);
    EXPECT_TRUE(command || first.queue[e].owner == instances[e < 5 ? e : e - 1].id);
  }
  EXPECT_EQ(piece(1).queue_length, 10u);
  // The first request has written both layers and runs its head.
  sim.RunUntil(2'500 * kMicrosecond);
  EXPECT_EQ(piece(0).version, 1u);
  EXPECT_EQ(piece(2).version, 1u);
  EXPECT_EQ(piece(0).queue_length, 10u);
  ASSERT_TRUE(sim.RunAll(kSecond));
  EXPECT_EQ(piece(0).version, 11u);
  EXPECT_EQ(piece(3).version, 10u);
  ExpectClean(sim);
}

TEST(EngineGmg, Happy_reader_sees_a_running_graph_with_names_and_decisions) {
  Simulation sim(MakeConfig(1));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service =
      sim.AddService(tenant, Llama(3, 2 * kMillisecond, 4096, 4096, "Tiny\"Llama"));
  sim.OpenSequence(tenant, 9, ServiceClass::kOnline);
  sim.Submit(service, 9);
  sim.RunUntil(3 * kMillisecond);
  const Result<gmg::Reader> reader = gmg::Reader::Open(sim.gmg_memory());
  ASSERT_TRUE(reader.ok());
  const auto instances = reader->Instances();
  ASSERT_EQ(instances.size(), 1u);
  EXPECT_EQ(instances[0].state, gmg::InstanceState::kStarted);
  ASSERT_EQ(instances[0].ops.size(), 5u);
  EXPECT_EQ(instances[0].ops[0].state, gmg::OpState::kDone);
  EXPECT_EQ(instances[0].ops[2].state, gmg::OpState::kLaunched);
  EXPECT_GT(instances[0].predicted_finish_ns, 0);
  EXPECT_EQ(reader->Sequences().size(), 1u);
  EXPECT_EQ(reader->Pieces().size(), 6u);
  EXPECT_GT(reader->Decisions(10).size(), 0u);
  EXPECT_GT(reader->Decisions(10)[0].candidates.size(), 0u);
  EXPECT_EQ(reader->policy(), "slice");
  const std::string json = reader->GraphsJson(true);
  EXPECT_NE(json.find("\"name\":\"layer1\""), std::string::npos);
  EXPECT_NE(json.find("Tiny\\\"Llama"), std::string::npos);
  EXPECT_NE(reader->DecisionsJson(5).find("\"candidates\""), std::string::npos);
}

// What the decisions of a simulation's engine were made by, the newest first.
std::vector<gmg::DecisionView> DecisionsOf(Simulation* sim) {
  const Result<gmg::Reader> reader = gmg::Reader::Open(sim->gmg_memory());
  SLICE_CHECK(reader.ok(), reader.status().ToString().c_str());
  return reader->Decisions(1000);
}

TEST(EngineGmg, Happy_a_batch_with_one_device_is_recorded_as_such) {
  Simulation sim(MakeConfig(2));
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  sim.Submit(sim.AddService(tenant, Chain(2, kMillisecond, 256)));
  ASSERT_TRUE(sim.RunAll(kSecond));
  const std::vector<gmg::DecisionView> decisions = DecisionsOf(&sim);
  ASSERT_FALSE(decisions.empty());
  for (const gmg::DecisionView& decision : decisions) {
    EXPECT_EQ(decision.basis, gmg::DecisionBasis::kOneDevice);
    ASSERT_EQ(decision.candidates.size(), 1u);
    EXPECT_TRUE(decision.candidates[0].chosen);
    EXPECT_FALSE(decision.candidates[0].beaten);
  }
}

TEST(EngineGmg, Happy_a_candidate_that_was_beaten_is_recorded_as_such) {
  Simulation sim(MakeConfig(2));
  const TenantId other = sim.AddTenant(ServiceClass::kOnline, 1);
  const Simulation::Service busy = sim.AddService(other, Chain(1, 50 * kMillisecond, 256), 1);
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline, 0);
  const Simulation::Service service =
      sim.AddService(tenant, Chain(1, kMillisecond, 256), 0, {0, 1});
  sim.Submit(busy);
  sim.Submit(service);
  ASSERT_TRUE(sim.RunAll(kSecond));  // durations are known from here on
  sim.Submit(busy);
  sim.RunUntil(sim.now() + 2 * kMillisecond);
  sim.Submit(service);
  ASSERT_TRUE(sim.RunAll(2 * kSecond));
  const gmg::DecisionView decision = DecisionsOf(&sim).at(0);
  EXPECT_EQ(decision.basis, gmg::DecisionBasis::kLevels);
  EXPECT_EQ(decision.device, 0u);
  ASSERT_EQ(decision.candidates.size(), 2u);
  EXPECT_TRUE(decision.candidates[0].chosen);
  EXPECT_FALSE(decision.candidates[0].beaten);
  EXPECT_EQ(decision.candidates[1].device, 1u);
  EXPECT_TRUE(decision.candidates[1].beaten);
}

TEST(EngineGmg, Edge_of_more_candidates_than_a_record_holds_the_chosen_one_is_kept) {
  const size_t devices = gmg::kDecisionCandidatesMax + 2;
  engine::Config config = MakeConfig(devices);
  config.policy = "fifo";
  Simulation sim(config);
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  std::vector<DomainIndex> everywhere;
  for (size_t d = 0; d < devices; ++d) everywhere.push_back(static_cast<DomainIndex>(d));
  const Simulation::Service service =
      sim.AddService(tenant, Chain(1, 10 * kMillisecond, 256), 0, everywhere);
  for (size_t d = 0; d < devices; ++d) sim.Submit(service);
  ASSERT_TRUE(sim.RunAll(kSecond));
  bool beyond = false;
  for (const gmg::DecisionView& decision : DecisionsOf(&sim)) {
    EXPECT_EQ(decision.basis, gmg::DecisionBasis::kQueue);
    EXPECT_EQ(decision.candidates.size(), gmg::kDecisionCandidatesMax);
    EXPECT_EQ(decision.candidates_left_out, 2u);
    size_t chosen = 0;
    for (const gmg::CandidateView& candidate : decision.candidates) {
      chosen += candidate.chosen;
      if (candidate.chosen) {
        EXPECT_EQ(candidate.device, decision.device);
      }
    }
    EXPECT_EQ(chosen, 1u);
    beyond |= decision.device >= gmg::kDecisionCandidatesMax;
  }
  EXPECT_TRUE(beyond);
}

// Two tenants, a diamond over two devices, a decode with a gap: the whole schedule as text.
// SLICE_UPDATE_GOLDENS=1 rewrites it.
TEST(EngineGolden, Happy_timeline_of_a_mixed_load) {
  engine::Config config = MakeConfig(2);
  Simulation sim(config);
  const TenantId online = sim.AddTenant(ServiceClass::kOnline);
  const TenantId offline = sim.AddTenant(ServiceClass::kOffline, 1);
  const Simulation::Service decode = sim.AddService(online, Llama(3, kMillisecond, 4096, 4096));
  const Simulation::Service diamond =
      sim.AddService(offline, Diamond(4, 3 * kMillisecond, 64 << 10), 1, {0});
  const TimeNs zero = sim.now();
  sim.OpenSequence(online, 1, ServiceClass::kOnline);
  for (int i = 0; i < 3; ++i) {
    sim.At(zero + i * 6 * kMillisecond, [&] { sim.Submit(decode, 1); });
    sim.At(zero + i * 4 * kMillisecond, [&] { sim.Submit(diamond); });
  }
  ASSERT_TRUE(sim.RunAll(zero + kSecond));
  EXPECT_EQ(sim.Violations(), "");
  std::ostringstream text;
  text << "# device start finish tenant op (integer ns from the first submit)\n";
  for (const auto& run : sim.executor().ops) {
    text << static_cast<int>(run.device) << ' ' << run.start - zero << ' ' << run.finish - zero
         << ' ' << run.tenant << ' ' << run.op << '\n';
  }
  const std::string path = std::string(SLICE_SOURCE_DIR) + "/tests/golden/timelines/mixed_load.txt";
  if (std::getenv("SLICE_UPDATE_GOLDENS") != nullptr) std::ofstream(path) << text.str();
  std::ifstream file(path);
  std::ostringstream golden;
  golden << file.rdbuf();
  EXPECT_EQ(text.str(), golden.str()) << "SLICE_UPDATE_GOLDENS=1 rewrites " << path;
}

}  // namespace
}  // namespace slice::testing
