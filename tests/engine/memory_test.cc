// Refusals and quotas of memory (scheduling rules, section 2). What reservations are for:
// admission_test.cc.
#include "tests/testing/engine_fixture.h"

namespace slice::testing {
namespace {

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
