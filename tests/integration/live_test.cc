// The whole of SliceScheduler with torch: what comes back is what the program computes.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/integration/mlp_tenant.h"
#include "tests/testing/live_daemon.h"

namespace slice::testing {
namespace {

class LiveTest : public ::testing::Test {
 protected:
  LiveDaemon daemon{SLICE_EXECUTOR};
};

TEST_F(LiveTest, Happy_MlpIsRight) {
  MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK) << slice_last_error();
  for (uint32_t i = 0; i < 50; ++i) {
    bool right = false;
    ASSERT_EQ(tenant.Run(i * 1000, nullptr, &right), SLICE_OK) << slice_last_error();
    EXPECT_TRUE(right) << "request " << i;
  }
}

TEST_F(LiveTest, Happy_BothDevicesGiveTheSameBits) {
  MlpTenant::Options options;
  std::vector<float> results[2];
  for (int device = 0; device < 2; ++device) {
    options.home = device == 0 ? "cpu0" : "cpu1";
    MlpTenant tenant(daemon.socket(), options);
    ASSERT_EQ(tenant.Run(42, &results[device]), SLICE_OK) << slice_last_error();
  }
  EXPECT_EQ(std::memcmp(results[0].data(), results[1].data(), results[0].size() * sizeof(float)),
            0);
}

TEST_F(LiveTest, Happy_ReplicatedWeightsLetBothDevicesWork) {
  MlpTenant::Options options;
  options.replicate = true;
  MlpTenant tenant(daemon.socket(), options);
  ASSERT_EQ(tenant.status(), SLICE_OK) << slice_last_error();
  std::vector<MlpTenant::Request> requests(100);
  for (uint32_t i = 0; i < requests.size(); ++i)
    ASSERT_EQ(tenant.Submit(i, &requests[i]), SLICE_OK);
  for (auto& request : requests) {
    ASSERT_EQ(slice_wait(tenant.session(), request.ticket, 60'000'000'000, nullptr), SLICE_OK)
        << slice_last_error();
    EXPECT_TRUE(tenant.IsRight(request.x, request.y));
  }
}

TEST_F(LiveTest, Happy_OnlineAndOfflineTenantsInForkedProcesses) {
  std::vector<pid_t> children;
  for (uint32_t c = 0; c < 4; ++c) {
    const pid_t child = ::fork();
    if (child == 0) {
      MlpTenant::Options options;
      options.service_class = c % 2 == 0 ? SLICE_CLASS_ONLINE : SLICE_CLASS_OFFLINE;
      MlpTenant tenant(daemon.socket(), options);
      bool all_right = tenant.status() == SLICE_OK;
      for (uint32_t i = 0; i < 100 && all_right; ++i) {
        bool right = false;
        all_right = tenant.Run(c * 100 + i, nullptr, &right) == SLICE_OK && right;
      }
      ::_exit(all_right ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) EXPECT_EQ(WaitFor(child), 0);
  EXPECT_EQ(daemon.CtlJson({"status"})["counters"]["completions"], 400);
}

TEST_F(LiveTest, Race_KilledTenantDoesNotDisturbAnother) {
  const pid_t child = ::fork();
  if (child == 0) {
    MlpTenant tenant(daemon.socket());
    for (uint32_t i = 0;; ++i) tenant.Run(i);
  }
  MlpTenant good(daemon.socket());
  for (uint32_t i = 0; i < 100; ++i) {
    bool right = false;
    ASSERT_EQ(good.Run(i, nullptr, &right), SLICE_OK) << slice_last_error();
    EXPECT_TRUE(right);
    if (i == 50) ::kill(child, SIGKILL);
  }
  WaitFor(child);
  EXPECT_TRUE(Eventually([&] { return daemon.CtlJson({"tenants"})["tenants"].size() == 1; }));
}

TEST_F(LiveTest, Race_KilledExecutorIsReplacedAndAnswersStayRight) {
  MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK) << slice_last_error();
  for (int round = 0; round < 3; ++round) {
    std::vector<MlpTenant::Request> requests(32);
    for (uint32_t i = 0; i < requests.size(); ++i)
      ASSERT_EQ(tenant.Submit(i, &requests[i]), SLICE_OK);
    const pid_t executor = daemon.CtlJson({"status"})["executor_pid"];
    const TimeNs killed = MonotonicNow();
    ASSERT_EQ(::kill(executor, SIGKILL), 0);
    EXPECT_TRUE(Eventually([&] {
      const nlohmann::json status = daemon.CtlJson({"status"});
      return status["executor_up"] == true && status["executor_pid"] != executor;
    }));
    RecordProperty("restart_us", static_cast<int>((MonotonicNow() - killed) / kMicrosecond));
    for (auto& request : requests) {
      ASSERT_EQ(slice_wait(tenant.session(), request.ticket, 60'000'000'000, nullptr), SLICE_OK)
          << slice_last_error();
      EXPECT_TRUE(tenant.IsRight(request.x, request.y));
      slice_arena_free(tenant.session(), request.in);
      slice_arena_free(tenant.session(), request.out);
    }
  }
}

// Managed tensors: commands take effect in order, and survive the executor.
TEST_F(LiveTest, Happy_ManagedTensorsSurviveTheExecutor) {
  slice_session_options_t open{};
  open.size = sizeof open;
  const std::string socket = daemon.socket();
  open.socket_path = socket.c_str();
  slice_session_t* session = nullptr;
  ASSERT_EQ(slice_session_open(&open, &session), SLICE_OK) << slice_last_error();
  slice_tensor_spec_t spec{sizeof spec, "state", SLICE_DTYPE_FLOAT32, 2, {4, 8}, {}, 0};
  slice_tensor_t tensor = 0;
  const void* view = &spec;
  ASSERT_EQ(slice_tensor_alloc(session, &spec, 1, &tensor, &view), SLICE_OK) << slice_last_error();
  EXPECT_EQ(view, nullptr);
  const uint64_t bytes = 4 * 8 * 4;
  uint64_t offset = 0;
  void* memory = nullptr;
  ASSERT_EQ(slice_arena_alloc(session, bytes, &offset, &memory), SLICE_OK);
  const float* values = static_cast<const float*>(memory);
  const auto read = [&] { return slice_tensor_read(session, tensor, offset, bytes, nullptr); };
  ASSERT_EQ(read(), SLICE_OK) << slice_last_error();
  EXPECT_EQ(values[31], 0.0f);
  const float seven = 7.0f;
  uint64_t bits = 0;
  std::memcpy(&bits, &seven, sizeof seven);
  ASSERT_EQ(slice_tensor_fill(session, &tensor, 1, bits, nullptr), SLICE_OK) << slice_last_error();
  ASSERT_EQ(slice_tensor_crop(session, &tensor, 1, 1, 6, nullptr), SLICE_OK) << slice_last_error();
  for (int round = 0; round < 2; ++round) {
    ASSERT_EQ(read(), SLICE_OK) << slice_last_error();
    EXPECT_EQ(values[0], 7.0f);
    EXPECT_EQ(values[5], 7.0f);
    EXPECT_EQ(values[6], 0.0f);
    EXPECT_EQ(values[31], 0.0f);
    const pid_t executor = daemon.CtlJson({"status"})["executor_pid"];
    ASSERT_EQ(::kill(executor, SIGKILL), 0);
    std::memset(memory, 0xff, bytes);
  }
  slice_session_close(session);
}

TEST_F(LiveTest, Happy_TimelineShowsWhatRan) {
  ASSERT_EQ(daemon.Ctl({"timeline", "start"}).status, 0);
  MlpTenant tenant(daemon.socket());
  for (uint32_t i = 0; i < 5; ++i) ASSERT_EQ(tenant.Run(i), SLICE_OK);
  const std::string path = daemon.File("timeline.json");
  ASSERT_EQ(daemon.Ctl({"timeline", "stop", path}).status, 0);
  const nlohmann::json timeline = nlohmann::json::parse(ReadWholeFile(path));
  int ops = 0;
  for (const nlohmann::json& event : timeline["traceEvents"]) {
    if (event["ph"] != "X" || event["pid"] != 1) continue;
    ++ops;
    EXPECT_EQ(event["args"]["tenant"], "mlp");
    EXPECT_TRUE(event["args"].contains("predicted_end_us"));
    EXPECT_GT(event["dur"], 0.0);
  }
  EXPECT_EQ(ops, 5);
}

}  // namespace
}  // namespace slice::testing
