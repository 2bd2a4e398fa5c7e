// Which of the executor's threads the engine thread wakes. The test is the executor: it announces
// sleep on the command ring and counts the signals.
#include "daemon/server/engine_loop.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "tests/testing/stub_engine.h"

namespace slice::server {
namespace {

constexpr DeviceIndex kHome = 0, kOther = 1;

class EngineLoopTest : public ::testing::Test {
 protected:
  EngineLoopTest() {
    engine::Config config;
    config.devices = {{"cpu0", 0, 0}, {"cpu1", 0, 0}};
    config.domains = {{"memory", 1 << 20, 1 << 20}};
    const auto factory = [this](const engine::Config&, std::span<std::byte>,
                                engine::Sink* sink) -> Result<std::unique_ptr<engine::Engine>> {
      sink_ = sink;
      return std::unique_ptr<engine::Engine>(
          std::make_unique<testing::StubEngine>(&control_, sink));
    };
    EngineLoop::Events events;
    events.tenant_fault = [](TenantId, const Status&) {};
    events.executor_fault = [](uint64_t, const Status&) {};
    loop_ = EngineLoop::Create(config, gmg_, factory, {}, events).value();
    loop_->Start();
    Attach();
    const Fd memfd = CreateMemfd("tenant", wire::kTenantRingBytes).value();
    tenant_memory_ = Mapping::Map(memfd, wire::kTenantRingBytes, true).value();
    std::unique_ptr<TenantRing> ring = TenantRing::Create(memfd, &handout_).value();
    engine::TenantConfig tenant;
    tenant.id = TenantId{1};
    tenant.class_max = ServiceClass::kOnline;
    tenant.home = kHome;
    OnEngineThread([&] { ASSERT_TRUE(loop_->AddTenant(tenant, std::move(ring)).ok()); });
  }
  ~EngineLoopTest() override { loop_->Stop(); }

  // An executor whose threads all sleep.
  void Attach() {
    const size_t bytes = RecordRing::MemoryBytes(wire::kExecutorRingCapacityBytes);
    const Fd commands = CreateMemfd("commands", bytes).value();
    const Fd reports = CreateMemfd("reports", bytes).value();
    auto rings = std::make_unique<ExecutorRings>();
    rings->commands = Mapping::Map(commands, bytes, true).value();
    rings->reports = Mapping::Map(reports, bytes, true).value();
    rings->engine_event = CreateEventFd().value();
    for (Fd& event : events_) {
      event = CreateEventFd().value();
      rings->device_events.push_back(Fd(::dup(event.get())));
    }
    command_memory_ = Mapping::Map(commands, bytes, true).value();
    ring_.emplace(command_memory_.data(), wire::kExecutorRingCapacityBytes);
    ASSERT_TRUE(ring_->PrepareSleep());
    OnEngineThread([&] { loop_->AttachExecutor(std::move(rings), 1); });
  }

  // Returns after the turn in which `task` ran.
  void OnEngineThread(const std::function<void()>& task) {
    loop_->Call(task);
    loop_->Call([] {});
  }
  // A submit that the engine never sees: its binding does not exist. The wake-up comes before the
  // checks.
  void SubmitOnline() {
    tenant_memory_.as<wire::SubmitSlot>(wire::kSlotsOffset)[submitted_].cookie = submitted_ + 1;
    std::atomic_ref(*tenant_memory_.as<uint64_t>(wire::kSubmitTailOffset)).store(++submitted_);
    OnEngineThread([] {});
  }
  void CommandFor(DeviceIndex device) {
    OnEngineThread([&] { sink_->ToExecutor(wire::kRecall, {}, device); });
  }
  // Signals since the last look.
  uint64_t Signals(DeviceIndex device) {
    uint64_t count = 0;
    return ::read(events_[device].get(), &count, sizeof count) == sizeof count ? count : 0;
  }
  void TakeCommands() {
    ring_->EndSleep();
    RecordRing::Record record;
    while (ring_->Pop(&record).value()) {
    }
  }

  alignas(64) std::array<std::byte, 4096> gmg_{};
  testing::StubEngine::Control control_;
  engine::Sink* sink_ = nullptr;
  std::unique_ptr<EngineLoop> loop_;
  Mapping tenant_memory_, command_memory_;
  TenantRing::Handout handout_;
  uint64_t submitted_ = 0;
  std::array<Fd, 2> events_;
  std::optional<RecordRing> ring_;
};

TEST_F(EngineLoopTest, Happy_ADeviceThatSleepsIsWokenForItsCommands) {
  CommandFor(kOther);
  EXPECT_EQ(Signals(kHome), 0u);
  EXPECT_EQ(Signals(kOther), 1u);
  TakeCommands();
  CommandFor(kOther);
  EXPECT_EQ(Signals(kOther), 0u) << "it is awake";
}

TEST_F(EngineLoopTest, Happy_AnOnlineSubmitWakesItsHomeOnceAhead) {
  SubmitOnline();
  EXPECT_EQ(Signals(kHome), 1u);
  SubmitOnline();
  CommandFor(kHome);
  EXPECT_EQ(Signals(kHome), 0u) << "it is on its way";
  EXPECT_EQ(Signals(kOther), 0u);
}

// The home's thread may be inside an op, and the copy thread busy: nobody takes the wake-up soon.
TEST_F(EngineLoopTest, Regression_AWakeUpAheadDoesNotSwallowThatOfAnotherDevice) {
  SubmitOnline();
  EXPECT_EQ(Signals(kHome), 1u);
  CommandFor(kOther);
  EXPECT_EQ(Signals(kOther), 1u);
  CommandFor(kOther);
  EXPECT_EQ(Signals(kOther), 1u) << "still nobody has looked";
  EXPECT_EQ(Signals(kHome), 0u);
}

TEST_F(EngineLoopTest, Edge_AnAheadWokenDeviceThatSleepsAgainIsWoken) {
  SubmitOnline();
  EXPECT_EQ(Signals(kHome), 1u);
  TakeCommands();
  ASSERT_TRUE(ring_->PrepareSleep());
  CommandFor(kHome);
  EXPECT_EQ(Signals(kHome), 1u);
  TakeCommands();
  CommandFor(kOther);
  EXPECT_EQ(Signals(kOther), 0u) << "awake, and the wake-up ahead is long over";
}

TEST_F(EngineLoopTest, Edge_AnotherExecutorIsNotOnItsWay) {
  SubmitOnline();
  OnEngineThread([&] { loop_->DetachExecutor(); });
  SubmitOnline();  // wakes nobody
  Attach();
  TakeCommands();
  CommandFor(kOther);
  EXPECT_EQ(Signals(kOther), 0u) << "it is awake";
  TakeCommands();
  ASSERT_TRUE(ring_->PrepareSleep());
  CommandFor(kHome);
  EXPECT_EQ(Signals(kHome), 1u);
}

}  // namespace
}  // namespace slice::server
