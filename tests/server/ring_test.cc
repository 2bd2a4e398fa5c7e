// The fast path: slots from a tenant's ring to the engine and completions back, polite and not.
#include <limits>

#include "tests/server/server_fixture.h"

namespace slice::server {
namespace {

using testing::RawTenant;

class RingTest : public ServerFixture {
 protected:
  static wire::SubmitSlot Slot(uint32_t flags, uint64_t sequence = 0, uint64_t cookie = 0) {
    wire::SubmitSlot slot{};
    slot.flags = flags;
    slot.sequence = sequence;
    slot.cookie = cookie;
    return slot;
  }
  std::string TextOf(RawTenant* tenant, const wire::CompletionSlot& slot) {
    proto::Request request;
    request.mutable_error_text()->set_token(slot.text_token);
    return tenant->Call(request)->body().text();
  }
};

TEST_F(RingTest, Happy_SubmitsComplete) {
  Start();
  RawTenant tenant = Open();
  const uint64_t binding = tenant.Bind(SmallTemplate());
  for (uint64_t cookie = 1; cookie <= 3 * wire::kRingSlots; ++cookie) {
    tenant.Submit(cookie, binding, SmallArguments());
    const auto done = tenant.WaitCompletion();
    ASSERT_TRUE(done.has_value());
    ASSERT_EQ(done->cookie, cookie);
    ASSERT_EQ(done->status, SLICE_OK);
  }
  EXPECT_EQ(control.submits, 3u * wire::kRingSlots);
}

TEST_F(RingTest, Happy_SequencesAndCommands) {
  Start();
  RawTenant tenant = Open();
  tenant.Push(Slot(wire::kSequenceOpen | (2u << wire::kClassShift), 5));
  ASSERT_TRUE(Eventually([&] { return control.sequences == 1; }));
  EXPECT_EQ(control.last_class, static_cast<int>(ServiceClass::kOffline));
  tenant.Push(Slot(wire::kSequenceClose, 5));
  ASSERT_TRUE(Eventually([&] { return control.closed == 1; }));
  proto::Request alloc;
  alloc.mutable_alloc_tensors()->add_tensors()->set_dtype(proto::FLOAT32);
  alloc.mutable_alloc_tensors()->mutable_tensors(0)->add_sizes(4);
  const uint64_t handle = tenant.Call(alloc)->tensors().handles(0);
  const auto run = [&](wire::TensorCommandKind kind, wire::Argument argument, int32_t dimension) {
    *tenant.arguments(0) = argument;
    wire::SubmitSlot slot = Slot(
        wire::kTensorCommand | (static_cast<uint32_t>(kind) << wire::kCommandKindShift), 0, 77);
    slot.args_bytes = sizeof argument;
    slot.priority = dimension;
    tenant.Push(slot);
    return tenant.WaitCompletion()->status;
  };
  EXPECT_EQ(run(wire::kTensorReset, {handle, 0, 0}, 0), SLICE_OK);
  EXPECT_EQ(run(wire::kTensorRead, {handle, 64, 16}, 0), SLICE_OK);
  EXPECT_EQ(run(wire::kTensorRead, {handle, 64, 15}, 0), SLICE_ERR_BOUNDS);
  EXPECT_EQ(run(wire::kTensorRead, {handle, RawTenant::kArenaBytes, 16}, 0), SLICE_ERR_BOUNDS);
  EXPECT_EQ(run(wire::kTensorCrop, {handle, 0, 0}, 1), SLICE_ERR_INVALID);
  EXPECT_EQ(run(wire::kTensorCrop, {handle, 0, 0}, -1), SLICE_ERR_INVALID);
  EXPECT_EQ(run(wire::kTensorReset, {handle + 1, 0, 0}, 0), SLICE_ERR_STALE);
  EXPECT_EQ(run(static_cast<wire::TensorCommandKind>(9), {handle, 0, 0}, 0), SLICE_ERR_PROTOCOL);
  EXPECT_EQ(control.commands, 2u);
}

TEST_F(RingTest, Edge_ErrorsCarryATextThatCanBeAskedFor) {
  Start();
  RawTenant tenant = Open();
  tenant.Submit(1, 12345, SmallArguments());
  const auto done = tenant.WaitCompletion();
  EXPECT_EQ(done->status, SLICE_ERR_STALE);
  EXPECT_NE(TextOf(&tenant, *done).find("12345"), std::string::npos);
  wire::CompletionSlot other = *done;
  other.text_token = 999;
  EXPECT_EQ(TextOf(&tenant, other), "");
}

TEST_F(RingTest, Malicious_BadArgumentsAreTypedErrors) {
  config.limits.faults_max = 1000;
  Start();
  RawTenant tenant = Open();
  const uint64_t binding = tenant.Bind(SmallTemplate());
  const uint64_t end = RawTenant::kArenaBytes;
  const struct {
    std::vector<wire::Argument> arguments;
    int32_t status;
  } cases[] = {
      {{}, SLICE_ERR_INVALID},
      {{{wire::kArgArena, 0, 64}}, SLICE_ERR_INVALID},
      {{{wire::kArgArena, 32, 64}, {wire::kArgArena, 64, 64}}, SLICE_ERR_BOUNDS},
      {{{wire::kArgArena, 0, 64}, {wire::kArgArena, end, 64}}, SLICE_ERR_BOUNDS},
      {{{wire::kArgArena, 0, 64}, {wire::kArgArena, end - 64, 65}}, SLICE_ERR_BOUNDS},
      {{{wire::kArgArena, 0, ~uint64_t{0}}, {wire::kArgArena, 64, 64}}, SLICE_ERR_BOUNDS},
      {{{wire::kArgArena, ~uint64_t{63}, 128}, {wire::kArgArena, 64, 64}}, SLICE_ERR_BOUNDS},
      {{{wire::kArgSymbol, 0, 0}, {wire::kArgArena, 64, 64}}, SLICE_ERR_PROTOCOL},
      {{{0, 0, 64}, {wire::kArgArena, 64, 64}}, SLICE_ERR_PROTOCOL},
  };
  uint64_t cookie = 1;
  for (const auto& item : cases) {
    tenant.Submit(cookie, binding, item.arguments);
    const auto done = tenant.WaitCompletion();
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(done->cookie, cookie);
    EXPECT_EQ(done->status, item.status) << "case " << cookie - 1;
    ++cookie;
  }
  EXPECT_EQ(control.submits, 0u);
  tenant.Submit(cookie, binding, SmallArguments());
  EXPECT_EQ(tenant.WaitCompletion()->status, SLICE_OK);
}

TEST_F(RingTest, Malicious_OutputsThatOverlapALiveOneAreRefused) {
  control.hold = true;
  Start();
  RawTenant tenant = Open();
  const uint64_t binding = tenant.Bind(SmallTemplate());
  tenant.Submit(1, binding, SmallArguments(0, 1024));
  tenant.Submit(2, binding, {{{wire::kArgArena, 0, 64}, {wire::kArgArena, 960, 128}}});
  const auto refused = tenant.WaitCompletion();
  EXPECT_EQ(refused->cookie, 2u);
  EXPECT_EQ(refused->status, SLICE_ERR_BOUNDS);
  tenant.Submit(3, binding, SmallArguments(0, 1088));
  ASSERT_TRUE(Eventually([&] { return control.submits == 2; }));
  control.hold = false;
  tenant.Submit(4, binding, SmallArguments(0, 2048));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(tenant.WaitCompletion()->status, SLICE_OK);
  tenant.Submit(5, binding, SmallArguments(0, 1024));  // free again
  EXPECT_EQ(tenant.WaitCompletion()->status, SLICE_OK);
}

TEST_F(RingTest, Malicious_CookieThatIsInFlightAlready) {
  control.hold = true;
  Start();
  RawTenant tenant = Open();
  const uint64_t binding = tenant.Bind(SmallTemplate());
  tenant.Submit(1, binding, SmallArguments());
  tenant.Submit(1, binding, SmallArguments(0, 256));
  EXPECT_EQ(tenant.WaitCompletion()->status, SLICE_ERR_PROTOCOL);
}

TEST_F(RingTest, Happy_Cancel) {
  control.hold = true;
  Start();
  RawTenant tenant = Open();
  const uint64_t binding = tenant.Bind(SmallTemplate());
  tenant.Submit(1, binding, SmallArguments());
  wire::SubmitSlot cancel = Slot(wire::kCancel);
  cancel.binding = 1;
  tenant.Push(cancel);
  EXPECT_EQ(tenant.WaitCompletion()->status, SLICE_ERR_CANCELLED);
  cancel.binding = 999;  // unknown: nothing happens
  tenant.Push(cancel);
  tenant.Submit(2, 0, {});
  EXPECT_EQ(tenant.WaitCompletion()->status, SLICE_ERR_STALE);
  EXPECT_EQ(control.cancels, 1u);
}

TEST_F(RingTest, Malicious_ImpossibleTailEndsOnlyThatSession) {
  Start();
  RawTenant good = Open();
  const uint64_t binding = good.Bind(SmallTemplate());
  for (const uint64_t tail : {uint64_t{wire::kRingSlots + 1}, ~uint64_t{0}, uint64_t{1} << 63}) {
    RawTenant bad = Open();
    bad.PublishTail(tail);
    EXPECT_TRUE(bad.WaitHangUp());
  }
  RawTenant liar = Open();
  liar.PublishConsumed(1000);
  liar.Push(Slot(wire::kCancel));
  EXPECT_TRUE(liar.WaitHangUp());
  good.Submit(1, binding, SmallArguments());
  EXPECT_EQ(good.WaitCompletion()->status, SLICE_OK);
}

TEST_F(RingTest, Malicious_RingFullOfGarbageEndsTheSession) {
  Start();
  RawTenant bad = Open();
  for (uint32_t i = 0; i < wire::kRingSlots; ++i)
    std::memset(static_cast<void*>(bad.slot(i)), 0xa5 + static_cast<int>(i), 64);
  bad.PublishTail(wire::kRingSlots);
  EXPECT_TRUE(bad.WaitHangUp());
  ASSERT_TRUE(Eventually([&] { return control.tenants == 0; }));
  EXPECT_EQ(control.submits, 0u);
}

TEST_F(RingTest, Malicious_SequenceFlood) {
  config.limits.sequences_max = 4;
  config.limits.faults_max = 2;
  Start();
  RawTenant bad = Open();
  for (uint64_t i = 1; i <= 6; ++i) bad.Push(Slot(wire::kSequenceOpen, i));
  EXPECT_TRUE(bad.WaitHangUp());
  EXPECT_EQ(control.sequences, 4u);
}

TEST_F(RingTest, Malicious_TenantThatNeverReadsCompletionsOnlyStallsItself) {
  Start();
  RawTenant stalled = Open();
  RawTenant good = Open();
  const uint64_t binding = stalled.Bind(SmallTemplate());
  for (uint64_t cookie = 1; cookie <= 2 * wire::kRingSlots; ++cookie) {
    if (!Eventually([&] { return stalled.tail() - stalled.SubmitHead() < wire::kRingSlots; }))
      FAIL();
    stalled.Submit(cookie, binding, SmallArguments());
  }
  // Twice the ring was pushed, once the ring was taken.
  ASSERT_TRUE(Eventually([&] { return control.submits == wire::kRingSlots; }));
  const uint64_t other = good.Bind(SmallTemplate());
  good.Submit(1, other, SmallArguments());
  EXPECT_EQ(good.WaitCompletion()->status, SLICE_OK);
  // It wakes up: nothing was lost.
  for (uint64_t cookie = 1; cookie <= 2 * wire::kRingSlots; ++cookie) {
    ASSERT_EQ(stalled.WaitCompletion()->cookie, cookie);
  }
}

TEST_F(RingTest, Malicious_DrainingTheSubmitEventHurtsNobodyElse) {
  Start();
  RawTenant bad = Open(), good = Open();
  const uint64_t binding = good.Bind(SmallTemplate());
  std::atomic<bool> stop{false};
  std::thread drain([&] {
    while (!stop) ClearEventFd(bad.submit_event());
  });
  for (uint64_t cookie = 1; cookie <= 200; ++cookie) {
    good.Submit(cookie, binding, SmallArguments());
    ASSERT_TRUE(good.WaitCompletion().has_value());
  }
  stop = true;
  drain.join();
}

TEST_F(RingTest, Edge_DeadlinesBeyondTheClock) {
  Start();
  RawTenant tenant = Open();
  const uint64_t binding = tenant.Bind(SmallTemplate());
  const std::vector<wire::Argument> arguments = SmallArguments();
  std::memcpy(tenant.arguments(0), arguments.data(), arguments.size() * sizeof(wire::Argument));
  wire::SubmitSlot slot = Slot(wire::kSubmitGraph, 0, 1);
  slot.binding = binding;
  slot.args_bytes = static_cast<uint32_t>(arguments.size() * sizeof(wire::Argument));
  slot.deadline_ns = ~uint64_t{0};
  tenant.Push(slot);
  EXPECT_EQ(tenant.WaitCompletion()->status, SLICE_OK);
  EXPECT_EQ(control.last_deadline, kNever);
}

TEST_F(RingTest, Race_ManyTenantsAtOnce) {
  Start();
  std::vector<std::thread> threads;
  std::atomic<int> completed{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      RawTenant tenant = Open();
      const uint64_t binding = tenant.Bind(SmallTemplate());
      for (uint64_t cookie = 1; cookie <= 500; ++cookie) {
        tenant.Submit(cookie, binding, SmallArguments());
        if (cookie % 7 != 0) continue;
        for (int k = 0; k < 7; ++k) completed += tenant.WaitCompletion().has_value() ? 1 : 0;
      }
      for (int k = 0; k < 500 % 7; ++k) completed += tenant.WaitCompletion().has_value() ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(completed, 4 * 500);
}

}  // namespace
}  // namespace slice::server
