// Random load in virtual time over many seeds: several tenants, graphs with pieces, transfers,
// cancels, commands, failures, executor deaths, policy switches, tenants that vanish. Everything
// submitted completes once, and nothing is left.
#include "tests/testing/engine_fixture.h"
#include "tests/testing/schedule_checker.h"

namespace slice::testing {
namespace {

struct SoakOptions {
  bool failures = false;    // ops and copies that fail
  bool deaths = false;      // of the executor
  bool departures = false;  // of tenants
  bool policies = false;
  bool all_simulated = false;  // rounds with one possible device, too: somebody records them
};

struct Request {
  TenantId tenant;
  uint64_t cookie;
};

// For SLICE_SOAK_SEED: what the engine holds when a run went wrong.
void Dump(Simulation& sim) {
  if (!::testing::Test::HasFailure() || std::getenv("SLICE_SOAK_SEED") == nullptr) return;
  std::puts(sim.engine().StatusJson(sim.now()).c_str());
  std::puts(gmg::Reader::Open(sim.gmg_memory())->GraphsJson(true).c_str());
}

void Soak(uint64_t seed, const SoakOptions& soak,
          std::vector<VirtualExecutor::OpRun>* ran = nullptr) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto pick = [&random](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const auto devices = static_cast<size_t>(pick(1, 4));
  engine::Config config = MakeConfig(devices, pick(1, 8) * (256 << 10), pick(0, 3) == 0);
  const auto domains = static_cast<int64_t>(config.domains.size());
  const char* const kPolicies[] = {"slice", "fifo", "priority", "slice"};
  config.policy = kPolicies[pick(0, 3)];
  config.issue_ahead = static_cast<uint32_t>(pick(1, 4));
  config.batch_ops_max = static_cast<uint32_t>(pick(1, 8));
  config.tenant_queue_max = 64;
  if (soak.all_simulated) config.record_round = [](std::string_view) {};
  VirtualOptions options;
  options.seed = seed;
  options.noise = 0.3;
  options.outlier_rate = 0.01;
  options.command_latency = pick(1, 200) * kMicrosecond;
  options.report_latency = pick(1, 200) * kMicrosecond;
  if (soak.failures) options.fail_rate = 0.01;
  Simulation sim(config, options);
  struct Tenant {
    TenantId id;
    ServiceClass service_class;
    std::vector<Simulation::Service> services;
    uint64_t sequence = 0;
    bool gone = false;
  };
  std::vector<Tenant> tenants;
  const int64_t tenant_count = pick(2, 4);
  for (int64_t t = 0; t < tenant_count; ++t) {
    Tenant tenant;
    tenant.service_class =
        t == 0 || pick(0, 1) == 0 ? ServiceClass::kOnline : ServiceClass::kOffline;
    const auto home = static_cast<DeviceIndex>(pick(0, static_cast<int64_t>(devices) - 1));
    tenant.id = sim.AddTenant(tenant.service_class, home);
    const int64_t service_count = pick(1, 3);
    for (int64_t s = 0; s < service_count; ++s) {
      const auto domain = static_cast<DomainIndex>(pick(0, domains - 1));
      std::vector<DomainIndex> replicas;
      for (DomainIndex d = 0; d < domains; ++d) {
        if (d != domain && pick(0, 1) == 0) replicas.push_back(d);
      }
      std::shared_ptr<const graph::Template> graph;
      switch (pick(0, 3)) {
        case 0:
          graph = Chain(static_cast<int>(pick(1, 12)), pick(20, 3000) * kMicrosecond,
                        pick(1, 16) * 1024);
          break;
        case 1:
          graph = Diamond(static_cast<int>(pick(2, 5)), pick(20, 3000) * kMicrosecond,
                          pick(1, 16) * 1024);
          break;
        case 2:
          graph = Llama(static_cast<int>(pick(1, 6)), pick(50, 2000) * kMicrosecond,
                        pick(1, 8) * 1024, 4096);
          break;
        default:
          graph = RandomDag(&random, static_cast<int>(pick(2, 16)), 16 << 10, 2 * kMillisecond);
          break;
      }
      tenant.services.push_back(
          sim.AddService(tenant.id, graph, domain, replicas, pick(0, 1) == 0));
    }
    tenants.push_back(std::move(tenant));
  }
  if (soak.failures) {
    sim.executor().fail_transfer = [&random](uint64_t) {
      return random() % 20 == 0 ? SLICE_ERR_NO_MEMORY : SLICE_OK;
    };
  }
  std::vector<Request> requests;
  TimeNs up_at = 0;
  const int64_t actions = pick(20, 60);
  for (int64_t a = 0; a < actions; ++a) {
    sim.At(pick(0, 120) * kMillisecond / 2, [&] {
      Tenant& tenant = tenants[static_cast<size_t>(pick(0, tenant_count - 1))];
      if (tenant.gone) return;
      const Simulation::Service& service = tenant.services[static_cast<size_t>(
          pick(0, static_cast<int64_t>(tenant.services.size()) - 1))];
      const int64_t what = pick(0, 19);
      if (what < 11) {
        if (what < 4) {
          if (tenant.sequence == 0 || pick(0, 3) == 0) {
            if (tenant.sequence != 0)
              sim.engine().CloseSequence(tenant.id, tenant.sequence, sim.now());
            sim.OpenSequence(tenant.id, ++tenant.sequence, tenant.service_class,
                             sim.now() + pick(5, 80) * kMillisecond);
          }
          requests.push_back({tenant.id, sim.Submit(service, tenant.sequence)});
        } else {
          requests.push_back(
              {tenant.id, sim.Submit(service, 0, 0, static_cast<int32_t>(pick(-1, 1)))});
        }
      } else if (what < 13 && !requests.empty()) {
        const Request& request =
            requests[static_cast<size_t>(pick(0, static_cast<int64_t>(requests.size()) - 1))];
        sim.engine().Cancel(request.tenant, request.cookie, sim.now());
      } else if (what < 15 && !service.pieces.empty()) {
        const auto kind = static_cast<wire::TensorCommandKind>(pick(0, 2));
        requests.push_back({tenant.id, sim.Command(service, kind, service.pieces)});
      } else if (what == 15 && soak.deaths && sim.now() >= up_at) {
        up_at = sim.now() + 25 * kMillisecond;
        sim.KillExecutor(pick(1, 20) * kMillisecond);
      } else if (what == 16 && soak.departures && pick(0, 2) == 0) {
        tenant.gone = true;
        sim.engine().RemoveTenant(tenant.id, sim.now());
      } else if (what == 17 && soak.policies) {
        const char* const kNames[] = {"slice", "fifo", "priority", "online-only"};
        ASSERT_TRUE(sim.engine().SetPolicy(kNames[pick(0, 3)], sim.now()).ok());
      }
    });
  }
  if (!sim.RunAll(20 * kSecond)) {
    ADD_FAILURE() << "still busy after 20 s\n" << sim.engine().StatusJson(sim.now());
    return Dump(sim);
  }
  if (soak.policies) {
    ASSERT_TRUE(sim.engine().SetPolicy("slice", sim.now()).ok());
    ASSERT_TRUE(sim.RunAll(20 * kSecond));
  }
  EXPECT_EQ(CheckSchedule(sim, !soak.deaths && !soak.failures), "");
  for (const Request& request : requests) {
    const bool gone = std::any_of(tenants.begin(), tenants.end(), [&](const Tenant& t) {
      return t.id == request.tenant && t.gone;
    });
    if (gone) {
      EXPECT_TRUE(sim.engine().TenantGone(request.tenant));
      continue;
    }
    const int status = sim.StatusOf(request.tenant, request.cookie);
    if (status == -1) {
      ADD_FAILURE() << "cookie " << request.cookie << " never completed";
      continue;
    }
    const bool expected = status == SLICE_OK || status == SLICE_ERR_CANCELLED ||
                          status == SLICE_ERR_NEVER_FITS || status == SLICE_ERR_STATE_LOST ||
                          (soak.failures && status == SLICE_ERR_OP_FAILED);
    EXPECT_TRUE(expected) << "cookie " << request.cookie << " status " << status << " "
                          << sim.Find(request.tenant, request.cookie)->text;
  }
  ExpectClean(sim);
  Dump(sim);
  if (ran != nullptr) *ran = sim.executor().ops;
}

// SLICE_SOAK_SEED=n: only this seed, for a closer look. SLICE_SOAK_FACTOR=n: n times as many seeds.
void SoakSeeds(uint64_t first, uint64_t count, const SoakOptions& options) {
  if (const char* const only = std::getenv("SLICE_SOAK_SEED"))
    return Soak(std::strtoull(only, nullptr, 10), options);
  if (const char* const factor = std::getenv("SLICE_SOAK_FACTOR"))
    count *= std::strtoull(factor, nullptr, 10);
  for (uint64_t seed = first; seed < first + count && !::testing::Test::HasFailure(); ++seed)
    Soak(seed, options);
}

TEST(EngineSoak, Happy_plain_load_200_seeds) { SoakSeeds(1, 200, {}); }
TEST(EngineSoak, Edge_failing_ops_and_copies_100_seeds) {
  SoakSeeds(1000, 100, {.failures = true});
}
TEST(EngineSoak, Edge_executor_deaths_100_seeds) { SoakSeeds(2000, 100, {.deaths = true}); }
TEST(EngineSoak, Edge_everything_at_once_200_seeds) {
  SoakSeeds(3000, 200, {.failures = true, .deaths = true, .departures = true, .policies = true});
}

TEST(EngineSoak, Happy_placing_without_a_simulation_changes_nothing_40_seeds) {
  for (uint64_t seed = 5000; seed < 5040 && !HasFailure(); ++seed) {
    SoakOptions options{.policies = true};
    std::vector<VirtualExecutor::OpRun> as_always, all_simulated;
    Soak(seed, options, &as_always);
    options.all_simulated = true;
    Soak(seed, options, &all_simulated);
    ASSERT_FALSE(as_always.empty());
    ASSERT_EQ(as_always.size(), all_simulated.size()) << "seed " << seed;
    for (size_t i = 0; i < as_always.size(); ++i) {
      const auto told = [](const VirtualExecutor::OpRun& run) {
        return std::tuple(run.instance, run.attempt, run.op, run.device, run.start, run.finish);
      };
      ASSERT_EQ(told(as_always[i]), told(all_simulated[i])) << "seed " << seed << ", run " << i;
    }
  }
}

}  // namespace
}  // namespace slice::testing
