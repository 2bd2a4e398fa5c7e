// A tenant that reads no completions, and the engine thread by itself: no server, no executor.
#include <gtest/gtest.h>

#include <cstring>

#include "daemon/server/engine_loop.h"
#include "tests/server/server_fixture.h"

namespace slice::server {
namespace {

class SlowReaderTest : public ::testing::Test {
 protected:
  SlowReaderTest() {
    loop = EngineLoop::Create(
               DefaultConfig(1).value().engine, {},
               [this](const engine::Config&, std::span<std::byte>,
                      engine::Sink* sink) -> Result<std::unique_ptr<engine::Engine>> {
                 return std::unique_ptr<engine::Engine>(
                     std::make_unique<testing::StubEngine>(&control, sink));
               },
               EngineLoop::Options{}, EngineLoop::Events{[](TenantId, Status) {}, {}})
               .value();
    memfd = CreateMemfd("tenant", wire::kTenantRingBytes).value();
    mine = Mapping::Map(memfd, wire::kTenantRingBytes, true).value();
    engine::TenantConfig config;
    config.id = TenantId{1};
    SLICE_CHECK(loop->AddTenant(config, TenantRing::Create(memfd, &handout).value()).ok(),
                "tenant");
    theirs = Mapping::Map(handout.daemon_ring, wire::kDaemonRingBytes, false).value();
    loop->Start();
  }
  ~SlowReaderTest() override { loop->Stop(); }

  // A slot that is refused at once: its binding does not exist.
  void Push() {
    std::memset(static_cast<void*>(mine.as<wire::SubmitSlot>(SlotOffset(tail_))), 0,
                sizeof(wire::SubmitSlot));
    ++tail_;
    std::atomic_ref(*mine.as<uint64_t>(wire::kSubmitTailOffset)).store(tail_);
    SignalEventFd(handout.submit_event);
  }
  void SetConsumed(uint64_t head) {
    std::atomic_ref(*mine.as<uint64_t>(wire::kCompletionHeadOffset)).store(head);
  }
  uint64_t Taken() const {
    return std::atomic_ref(*theirs.as<uint64_t>(wire::kSubmitHeadOffset)).load();
  }

  testing::StubEngine::Control control;
  std::unique_ptr<EngineLoop> loop;
  Fd memfd;
  Mapping mine, theirs;
  TenantRing::Handout handout;

 private:
  static size_t SlotOffset(uint64_t index) {
    return wire::kSlotsOffset + index % wire::kRingSlots * sizeof(wire::SubmitSlot);
  }
  uint64_t tail_ = 0;
};

TEST_F(SlowReaderTest, Malicious_TenantThatNeverReadsCompletionsIsLookedAtMoreAndMoreSeldom) {
  for (uint32_t i = 0; i < wire::kRingSlots; ++i) Push();
  ASSERT_TRUE(Eventually([&] { return Taken() == wire::kRingSlots; }));
  Push();  // more than there is room for completions
  // Ten turns, of which a few may still be those that took the slots: the others come after 1 ms,
  // 2 ms, 4 ms...
  const uint64_t turns = loop->turns();
  const TimeNs begin = MonotonicNow();
  ASSERT_TRUE(Eventually([&] { return loop->turns() >= turns + 10; }));
  EXPECT_GE(MonotonicNow() - begin, 60 * kMillisecond);
  EXPECT_EQ(Taken(), wire::kRingSlots);
  // It reads at last, and says so.
  SetConsumed(1);
  SignalEventFd(handout.submit_event);
  EXPECT_TRUE(Eventually([&] { return Taken() == wire::kRingSlots + 1; }));
}

}  // namespace
}  // namespace slice::server
