// Memory admission (scheduling rules, section 2): reservations keep 40 random instances on 4
// domains from deadlock; fitting by what is free right now does not. Refusals name numbers and
// holders.
#include <numeric>

#include "tests/testing/engine_fixture.h"

namespace slice::testing {
namespace {

constexpr size_t kDomains = 4;
constexpr size_t kInstances = 40;

// A chain whose ops are pinned to random domains.
struct RandomChain {
  std::vector<DomainIndex> domain;
  std::vector<int64_t> bytes;
  explicit RandomChain(std::mt19937_64* random) {
    const size_t length = 4 + (*random)() % 7;
    for (size_t i = 0; i < length; ++i) {
      domain.push_back(static_cast<DomainIndex>((*random)() % kDomains));
      bytes.push_back(static_cast<int64_t>(1 + (*random)() % 16) * 4096);
    }
  }
  // Most that it holds in one domain when it runs alone.
  int64_t Peak() const {
    int64_t peak = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      peak = std::max(peak, bytes[i] + (i > 0 ? bytes[i - 1] : 0));
    }
    return peak;
  }
};

// The control: every op that fits right now starts. True: some instance can never go on.
bool FittingByWhatIsFreeDeadlocks(const std::vector<RandomChain>& chains, int64_t pool,
                                  std::mt19937_64* random) {
  std::vector<int64_t> free(kDomains, pool);
  std::vector<size_t> at(chains.size(), 0);
  std::vector<size_t> order(chains.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (;;) {
    bool progress = false, left = false;
    std::shuffle(order.begin(), order.end(), *random);
    for (const size_t i : order) {
      const RandomChain& chain = chains[i];
      const size_t op = at[i];
      if (op == chain.bytes.size()) continue;
      left = true;
      const DomainIndex d = chain.domain[op];
      const bool copies = op > 0 && chain.domain[op - 1] != d;
      const int64_t needed = chain.bytes[op] + (copies ? chain.bytes[op - 1] : 0);
      if (needed > free[d]) continue;
      free[d] -= chain.bytes[op];
      if (op > 0)
        free[chain.domain[op - 1]] += chain.bytes[op - 1];  // input gone, and its copy with it
      if (op + 1 == chain.bytes.size()) free[d] += chain.bytes[op];
      ++at[i];
      progress = true;
    }
    if (!left) return false;
    if (!progress) return true;
  }
}

TEST(EngineMemory, Happy_40_random_instances_on_4_domains_never_deadlock_and_the_control_does) {
  int control = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<RandomChain> chains;
    int64_t peak = 0;
    for (size_t i = 0; i < kInstances; ++i) {
      chains.emplace_back(&random);
      peak = std::max(peak, chains.back().Peak());
    }
    const int64_t pool = peak + peak / 4;
    control += FittingByWhatIsFreeDeadlocks(chains, pool, &random);
    Simulation sim(MakeConfig(kDomains, pool));
    const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
    std::vector<uint64_t> cookies;
    for (const RandomChain& chain : chains) {
      GraphBuilder graph("chain");
      uint32_t value = graph.Dynamic("x", 256);
      std::vector<uint32_t> pins;
      std::vector<DomainIndex> homes;
      for (size_t i = 0; i < chain.bytes.size(); ++i) {
        pins.push_back(graph.Mutable("m" + std::to_string(i), 4, false));
        homes.push_back(chain.domain[i]);
      }
      for (size_t i = 0; i < chain.bytes.size(); ++i) {
        GraphBuilder::Use use;
        use.reads = {pins[i]};
        value = graph.Op("op" + std::to_string(i), {value}, chain.bytes[i], kMillisecond, use);
      }
      graph.Output(value);
      cookies.push_back(sim.Submit(sim.AddServiceSpread(tenant, graph.Build(), homes)));
    }
    ASSERT_TRUE(sim.RunAll(60 * kSecond)) << sim.engine().StatusJson(sim.now());
    for (const uint64_t cookie : cookies)
      ASSERT_EQ(sim.StatusOf(tenant, cookie), SLICE_OK) << sim.Find(tenant, cookie)->text;
    ExpectClean(sim);
    if (HasFailure()) return;
  }
  EXPECT_GT(control, 80) << "the control is what the rule is for";
}

TEST(EngineMemory, Edge_request_that_never_fits_is_refused_with_numbers_and_holders) {
  engine::Config config = MakeConfig(1, 1 << 20);
  Simulation sim(config);
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service big = sim.AddService(tenant, Chain(3, kMillisecond, 600 << 10));
  const Simulation::Service fits = sim.AddService(tenant, Chain(3, kMillisecond, 200 << 10));
  const uint64_t refused = sim.Submit(big);
  const auto* const done = sim.Find(tenant, refused);
  ASSERT_NE(done, nullptr) << "at once";
  EXPECT_EQ(done->slot.status, SLICE_ERR_NEVER_FITS);
  EXPECT_NE(done->text.find("1048576"), std::string::npos) << done->text;
  EXPECT_NE(done->text.find("held by"), std::string::npos) << done->text;
  const uint64_t cookie = sim.Submit(fits);
  ASSERT_TRUE(sim.RunAll(kSecond));
  EXPECT_EQ(sim.StatusOf(tenant, cookie), SLICE_OK);
  ExpectClean(sim);
}

TEST(EngineMemory, Edge_quota_of_a_tenant_makes_it_wait_for_itself_only) {
  Simulation sim(MakeConfig(1, 64 << 20));
  engine::TenantConfig small;
  small.class_max = ServiceClass::kOnline;
  small.memory_bytes_max = 1 << 20;
  const TenantId tenant = sim.AddTenant(small);
  const TenantId other = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service = sim.AddService(tenant, Chain(3, kMillisecond, 128 << 10));
  const Simulation::Service bystander = sim.AddService(other, Chain(3, kMillisecond, 128 << 10));
  std::vector<uint64_t> cookies;
  for (int i = 0; i < 8; ++i) cookies.push_back(sim.Submit(service));
  const uint64_t safe = sim.Submit(bystander);
  sim.RunUntil(10 * kMicrosecond);
  EXPECT_NE(sim.engine().StatusJson(0).find("\"instances_waiting\":5"), std::string::npos)
      << sim.engine().StatusJson(0);
  ASSERT_TRUE(sim.RunAll(kSecond));
  for (const uint64_t cookie : cookies) EXPECT_EQ(sim.StatusOf(tenant, cookie), SLICE_OK);
  EXPECT_EQ(sim.StatusOf(other, safe), SLICE_OK);
  ExpectClean(sim);
}

TEST(EngineMemory, Edge_registered_tensors_are_bounded_by_domain_and_quota) {
  Simulation sim(MakeConfig(1));
  engine::TenantConfig config;
  config.memory_bytes_max = 1 << 20;
  const TenantId tenant = sim.AddTenant(config);
  engine::TensorSetConfig set;
  set.id = {900};
  set.tenant = tenant;
  set.tensors = {{"w", int64_t{512} << 20, 0}};
  EXPECT_EQ(sim.engine().AddTensorSet(set, 0).code(), StatusCode::kNeverFits);
  set.tensors = {{"w", 2 << 20, 0}};
  EXPECT_EQ(sim.engine().AddTensorSet(set, 0).code(), StatusCode::kQuota);
  set.tensors = {{"w", INT64_MAX, 0}, {"v", INT64_MAX, 0}};
  EXPECT_EQ(sim.engine().AddTensorSet(set, 0).code(), StatusCode::kOverflow);
  set.tensors = {{"w", 1 << 20, 0}};
  EXPECT_TRUE(sim.engine().AddTensorSet(set, 0).ok());
  EXPECT_EQ(sim.engine().AddTensorSet(set, 0).code(), StatusCode::kInvalid) << "the id is taken";
  EXPECT_TRUE(sim.engine().RemoveTensorSet(set.id, 0).ok());
  EXPECT_TRUE(sim.engine().TensorSetGone(set.id));
}

}  // namespace
}  // namespace slice::testing
