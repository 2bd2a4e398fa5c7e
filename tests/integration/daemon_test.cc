// sliced as a process: starting, stopping, dying parts. The executor is the torch-free double: what
// ops compute does not matter here, see live_test.cc.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "tests/integration/mlp_tenant.h"
#include "tests/testing/live_daemon.h"

namespace slice::testing {
namespace {

class DaemonTest : public ::testing::Test {
 protected:
  static pid_t ExecutorPid(const LiveDaemon& daemon) {
    const nlohmann::json pid = daemon.CtlJson({"status"})["executor_pid"];
    return pid.is_null() ? 0 : pid.get<pid_t>();
  }
};

TEST_F(DaemonTest, Happy_TenantRunsRequests) {
  LiveDaemon daemon(SLICE_EXECUTOR);
  MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK) << slice_last_error();
  for (uint32_t i = 0; i < 300; ++i) ASSERT_EQ(tenant.Run(i), SLICE_OK) << slice_last_error();
  EXPECT_EQ(daemon.CtlJson({"status"})["counters"]["ops_executed"], 300);
}

TEST_F(DaemonTest, Happy_RequestsInFlightFillTheQueue) {
  LiveDaemon daemon(SLICE_EXECUTOR);
  MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK) << slice_last_error();
  std::vector<MlpTenant::Request> requests(128);
  for (uint32_t i = 0; i < requests.size(); ++i)
    ASSERT_EQ(tenant.Submit(i, &requests[i]), SLICE_OK) << slice_last_error();
  for (auto& request : requests) EXPECT_EQ(tenant.Wait(&request), SLICE_OK) << slice_last_error();
}

TEST_F(DaemonTest, Happy_ExecutorThatIsKilledComesBack) {
  LiveDaemon daemon(SLICE_EXECUTOR);
  MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK) << slice_last_error();
  ASSERT_EQ(tenant.Run(1), SLICE_OK);
  const pid_t first = ExecutorPid(daemon);
  const TimeNs killed = MonotonicNow();
  ASSERT_EQ(::kill(first, SIGKILL), 0);
  ASSERT_EQ(tenant.Run(2), SLICE_OK) << slice_last_error();  // waits for the next executor
  RecordProperty("restart_us", static_cast<int>((MonotonicNow() - killed) / kMicrosecond));
  EXPECT_TRUE(Eventually([&] { return ExecutorPid(daemon) != first; }));
  EXPECT_EQ(daemon.CtlJson({"status"})["executor_restarts"], 1);
}

// Its requests end every executor that runs them: the others are served as if nothing were.
TEST_F(DaemonTest, Malicious_TenantThatCrashesTheExecutorIsEndedAndTheOthersGoOn) {
  LiveDaemon daemon(SLICE_EXECUTOR);
  MlpTenant good(daemon.socket());
  ASSERT_EQ(good.Run(1), SLICE_OK) << slice_last_error();
  MlpTenant::Options options;
  options.model = "fake:crash-op";
  MlpTenant bad(daemon.socket(), options);
  ASSERT_EQ(bad.status(), SLICE_OK) << slice_last_error();
  EXPECT_EQ(bad.Run(1), SLICE_ERR_EXECUTOR_LOST);
  EXPECT_EQ(bad.Run(2), SLICE_ERR_DAEMON_LOST) << "its session is over";
  EXPECT_NE(ReadWholeFile(daemon.log_path()).find("when the executor died, 3 times"),
            std::string::npos)
      << ReadWholeFile(daemon.log_path());
  for (uint32_t i = 0; i < 100; ++i) ASSERT_EQ(good.Run(i), SLICE_OK) << slice_last_error();
  EXPECT_EQ(daemon.CtlJson({"status"})["executor_restarts"], 3);
  EXPECT_EQ(daemon.CtlJson({"tenants"})["tenants"].size(), 1u);
  EXPECT_EQ(ReadWholeFile(daemon.log_path()).find("next try in"), std::string::npos)
      << ReadWholeFile(daemon.log_path());
}

TEST_F(DaemonTest, Edge_StoppedExecutorIsShownAndGoesOn) {
  LiveDaemon daemon(SLICE_EXECUTOR);
  MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK) << slice_last_error();
  ASSERT_EQ(tenant.Run(1), SLICE_OK) << slice_last_error();
  const pid_t executor = ExecutorPid(daemon);
  ASSERT_EQ(::kill(executor, SIGSTOP), 0);
  const auto state = [&](const char* key) { return daemon.CtlJson({"status"})[key]; };
  // The kernel says so at once ...
  EXPECT_TRUE(Eventually([&] { return state("executor") == "stopped by a signal"; }));
  EXPECT_EQ(state("executor_up"), false);
  EXPECT_EQ(daemon.CtlJson({"devices"})["devices"][0]["state"], "not responding");
  // ... and the engine notices that its commands are not taken.
  MlpTenant::Request request;
  ASSERT_EQ(tenant.Submit(2, &request), SLICE_OK) << slice_last_error();
  EXPECT_TRUE(Eventually([&] { return !state("executor_silent_ns").is_null(); }));
  EXPECT_NE(ReadWholeFile(daemon.log_path()).find("the executor does not respond"),
            std::string::npos);
  ASSERT_EQ(::kill(executor, SIGCONT), 0);
  EXPECT_EQ(tenant.Wait(&request), SLICE_OK) << slice_last_error();
  EXPECT_TRUE(Eventually([&] { return state("executor_up") == true; }));
  EXPECT_EQ(state("executor"), "up");
  EXPECT_EQ(state("executor_restarts"), 0);
}

TEST_F(DaemonTest, Edge_StoppedExecutorIsReplacedAtTheHangLimit) {
  TempFolder folder;
  const std::string file = folder.File("sliced.toml");
  std::ofstream(file) << "[daemon]\nhang_limit_ms = 300\n[[domain]]\nname = \"cpu0\"\npool = "
                         "\"64MiB\"\nretained = \"64MiB\"\n[[device]]\nname = \"cpu0\"\n"
                         "[tenant_defaults]\nclass = \"online\"\n";
  const std::string socket = folder.File("s.sock");
  const pid_t pid =
      Spawn({SLICED, "--config", file, "--socket", socket, "--executor", SLICE_EXECUTOR},
            folder.File("log"));
  ASSERT_TRUE(Eventually([&] { return std::filesystem::exists(socket + ".gmg"); }));
  MlpTenant tenant(socket);
  ASSERT_EQ(tenant.status(), SLICE_OK) << slice_last_error();
  ASSERT_EQ(tenant.Run(1), SLICE_OK) << slice_last_error();
  const std::string log = ReadWholeFile(folder.File("log"));
  const size_t at = log.find("server: executor ");
  ASSERT_NE(at, std::string::npos) << log;
  ASSERT_EQ(::kill(std::stoi(log.substr(at + 17)), SIGSTOP), 0);
  EXPECT_EQ(tenant.Run(2), SLICE_OK) << slice_last_error();  // by the next executor
  EXPECT_NE(ReadWholeFile(folder.File("log")).find("no command was taken for"), std::string::npos)
      << ReadWholeFile(folder.File("log"));
  ::kill(pid, SIGTERM);
  EXPECT_EQ(WaitFor(pid), 0);
}

TEST_F(DaemonTest, Edge_StoppedDaemonIsNotWaitedForInVain) {
  LiveDaemon daemon(SLICE_EXECUTOR);
  daemon.Signal(SIGSTOP);
  MlpTenant tenant(daemon.socket());  // a few seconds
  EXPECT_EQ(tenant.status(), SLICE_ERR_TIMEOUT);
  const std::string text = slice_last_error();
  EXPECT_NE(text.find("pid " + std::to_string(daemon.pid())), std::string::npos) << text;
  EXPECT_NE(text.find("kill -CONT"), std::string::npos) << text;
  daemon.Signal(SIGCONT);
  MlpTenant next(daemon.socket());
  EXPECT_EQ(next.Run(1), SLICE_OK) << slice_last_error();
}

TEST_F(DaemonTest, Race_ExecutorIsKilledWhileRequestsFly) {
  LiveDaemon daemon(SLICE_EXECUTOR);
  MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK) << slice_last_error();
  for (int round = 0; round < 3; ++round) {
    std::vector<MlpTenant::Request> requests(64);
    for (uint32_t i = 0; i < requests.size(); ++i)
      ASSERT_EQ(tenant.Submit(i, &requests[i]), SLICE_OK);
    if (const pid_t executor = ExecutorPid(daemon); executor > 0) ::kill(executor, SIGKILL);
    // Nothing is written by them: the engine runs them again, unnoticed.
    for (auto& request : requests) EXPECT_EQ(tenant.Wait(&request), SLICE_OK) << slice_last_error();
  }
}

TEST_F(DaemonTest, Happy_KilledTenantLeavesNothingBehind) {
  LiveDaemon daemon(SLICE_EXECUTOR);
  const pid_t child = ::fork();
  if (child == 0) {
    MlpTenant tenant(daemon.socket());
    for (uint32_t i = 0;; ++i) tenant.Run(i);
  }
  EXPECT_TRUE(
      Eventually([&] { return daemon.CtlJson({"status"})["counters"]["completions"] > 10; }));
  ::kill(child, SIGKILL);
  WaitFor(child);
  EXPECT_TRUE(Eventually([&] { return daemon.CtlJson({"tenants"})["tenants"].empty(); }));
  EXPECT_TRUE(Eventually([&] { return daemon.CtlJson({"status"})["templates"] == 0; }));
  MlpTenant next(daemon.socket());
  EXPECT_EQ(next.Run(1), SLICE_OK) << slice_last_error();
}

TEST_F(DaemonTest, Happy_SigtermEndsSessionsAndExitsCleanly) {
  LiveDaemon daemon(SLICE_EXECUTOR);
  MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.Run(1), SLICE_OK);
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0);
  EXPECT_EQ(tenant.Run(2), SLICE_ERR_DAEMON_LOST);
  EXPECT_FALSE(std::filesystem::exists(daemon.socket()));
  EXPECT_FALSE(std::filesystem::exists(daemon.socket() + ".gmg"));
}

TEST_F(DaemonTest, Race_SigtermWhileRequestsFly) {
  LiveDaemon daemon(SLICE_EXECUTOR);
  MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK);
  std::vector<MlpTenant::Request> requests(128);
  for (uint32_t i = 0; i < requests.size(); ++i)
    ASSERT_EQ(tenant.Submit(i, &requests[i]), SLICE_OK);
  daemon.Signal(SIGTERM);
  for (auto& request : requests) {
    const slice_status_t status = tenant.Wait(&request);
    EXPECT_TRUE(status == SLICE_OK || status == SLICE_ERR_DAEMON_LOST) << slice_status_name(status);
  }
  EXPECT_EQ(daemon.Wait(), 0);
}

TEST_F(DaemonTest, Happy_KilledDaemonIsReplacedOnTheSameSocket) {
  TempFolder folder;
  const std::string socket = folder.File("s.sock");
  for (int round = 0; round < 2; ++round) {
    const pid_t pid =
        Spawn({SLICED, "--socket", socket, "--executor", SLICE_EXECUTOR, "--pool", "16MiB"},
              folder.File("log"));
    const auto answers = [&] {
      MlpTenant tenant(socket);
      return tenant.status() == SLICE_OK && tenant.Run(1) == SLICE_OK;
    };
    EXPECT_TRUE(Eventually(answers)) << ReadWholeFile(folder.File("log"));
    ::kill(pid, SIGKILL);
    WaitFor(pid);
  }
}

TEST_F(DaemonTest, Edge_SecondDaemonOnALiveSocketIsRefused) {
  LiveDaemon daemon(SLICE_EXECUTOR);
  const std::string log = daemon.File("second.log");
  EXPECT_EQ(
      WaitFor(Spawn({SLICED, "--socket", daemon.socket(), "--executor", SLICE_EXECUTOR}, log)), 1);
  EXPECT_NE(ReadWholeFile(log).find("another sliced uses '" + daemon.socket()), std::string::npos)
      << ReadWholeFile(log);
  MlpTenant tenant(daemon.socket());
  EXPECT_EQ(tenant.Run(1), SLICE_OK) << slice_last_error();
}

TEST_F(DaemonTest, Happy_TwoDaemonsSideBySide) {
  LiveDaemon a(SLICE_EXECUTOR), b(SLICE_EXECUTOR);
  MlpTenant of_a(a.socket()), of_b(b.socket());
  EXPECT_EQ(of_a.Run(1), SLICE_OK) << slice_last_error();
  EXPECT_EQ(of_b.Run(1), SLICE_OK) << slice_last_error();
  a.Signal(SIGTERM);
  EXPECT_EQ(a.Wait(), 0);
  EXPECT_EQ(of_b.Run(2), SLICE_OK) << slice_last_error();
}

TEST_F(DaemonTest, Edge_ConfigIsChecked) {
  TempFolder folder;
  const std::string file = folder.File("sliced.toml"), log = folder.File("log");
  // Exit status of a check, its output in `log`.
  const auto check = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {SLICED,         "--check-config", "--executor",
                                          SLICE_EXECUTOR, "--socket",       folder.File("s.sock")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return WaitFor(Spawn(std::move(arguments), log));
  };
  const auto said = [&](const std::string& part) {
    return ReadWholeFile(log).find(part) != std::string::npos;
  };
  const std::string good =
      "[daemon]\nlog_level = \"error\"\n[scheduler]\npolicy = \"fifo\"\n[[domain]]\nname = "
      "\"cpu0\"\npool = \"64MiB\"\nretained = \"64MiB\"\n[[device]]\nname = \"cpu0\"\n";
  std::ofstream(file) << good;
  EXPECT_EQ(check({"--config", file}), 0) << ReadWholeFile(log);
  EXPECT_TRUE(said("pool 64MiB, retained 64MiB") && said("fifo") && said("error, to"))
      << ReadWholeFile(log);
  // Flags override the file, and what is in effect is shown.
  EXPECT_EQ(check({"--config", file, "--pool", "32MiB", "--retained", "2GiB", "--policy", "slice",
                   "--log-level", "info"}),
            0);
  EXPECT_TRUE(said("pool 32MiB, retained 2GiB") && !said("fifo") && said("info, to"))
      << ReadWholeFile(log);
  EXPECT_NE(check({"--config", file, "--cpu-devices", "2"}), 0);
  EXPECT_TRUE(said("excludes")) << ReadWholeFile(log);
  for (const std::vector<std::string>& nonsense : {std::vector<std::string>{"--pool", "0B"},
                                                   {"--pool", "1KiB"},
                                                   {"--pool", "-1"},
                                                   {"--pool", ""},
                                                   {"--retained", "0"},
                                                   {"--policy", "nonsense"},
                                                   {"--policy", ""},
                                                   {"--cpu-devices", "0"},
                                                   {"--cpu-devices", "65"},
                                                   {"--cpu-devices", "-1"},
                                                   {"--log-level", "loud"}}) {
    EXPECT_NE(check(nonsense), 0) << nonsense[0] << " " << nonsense[1];
    EXPECT_NE(check({"--config", file, nonsense[0], nonsense[1]}), 0)
        << nonsense[0] << " " << nonsense[1];
  }
  std::ofstream(file) << good << "[limits]\nsesions_max = 1\n";
  EXPECT_EQ(check({"--config", file}), 1);
  EXPECT_TRUE(
      said(file + ":12: unknown key 'sesions_max' in [limits]: did you mean 'sessions_max'?"))
      << ReadWholeFile(log);
  // A start refuses the same.
  EXPECT_EQ(WaitFor(Spawn({SLICED, "--socket", folder.File("s.sock"), "--executor", SLICE_EXECUTOR,
                           "--pool", "1KiB"},
                          log)),
            1);
  EXPECT_TRUE(said("at least 2MiB")) << ReadWholeFile(log);
}

}  // namespace
}  // namespace slice::testing
