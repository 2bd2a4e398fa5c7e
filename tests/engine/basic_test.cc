// One request through the engine in virtual time, and what a submit may be refused for.
#include <gtest/gtest.h>

#include "tests/testing/graph_builder.h"
#include "tests/testing/virtual_executor.h"

namespace slice::testing {
namespace {

engine::Config OneDevice() {
  engine::Config config;
  config.devices = {{"cpu0", 0, 0}};
  config.domains = {{"d0", 64 << 20, 64 << 20}};
  config.live_ops_max = 4096;
  return config;
}

TEST(EngineBasic, Happy_chain_on_one_device_completes_with_times) {
  Simulation sim(OneDevice());
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  const Simulation::Service service = sim.AddService(tenant, Chain(4, kMillisecond, 4096));
  const uint64_t cookie = sim.Submit(service);
  EXPECT_TRUE(sim.RunAll());
  EXPECT_EQ(sim.Violations(), "");
  const VirtualExecutor::Completion* const done = sim.Find(tenant, cookie);
  ASSERT_NE(done, nullptr);
  EXPECT_EQ(done->slot.status, SLICE_OK) << done->text;
  EXPECT_EQ(sim.executor().ops.size(), 4u);
  EXPECT_GE(done->slot.finish_ns - done->slot.start_ns, 4 * kMillisecond);
  EXPECT_LT(done->slot.finish_ns, 4 * kMillisecond + 200 * kMicrosecond);
  EXPECT_NEAR(static_cast<double>(done->slot.predicted_finish_ns), static_cast<double>(done->slot.finish_ns), 2e5);
  EXPECT_EQ(sim.executor().pool_used[0], 0);
  EXPECT_EQ(sim.executor().instances_known(), 0u);
  std::puts(sim.engine().StatusJson(sim.now()).c_str());
  std::puts(sim.engine().DevicesJson(sim.now()).c_str());
  std::puts(sim.engine().TenantsJson(sim.now()).c_str());
}

}  // namespace
}  // namespace slice::testing
