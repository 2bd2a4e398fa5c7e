// The executor's life: deaths, replay, giving up. The executor is tests/testing/fake_executor.cc.
#include <signal.h>

#include <nlohmann/json.hpp>

#include "tests/server/server_fixture.h"

namespace slice::server {
namespace {

using testing::RawTenant;

class SupervisorTest : public ServerFixture {
 protected:
  nlohmann::json StatusOf(RawTenant* tenant) {
    proto::Request request;
    request.mutable_status();
    return nlohmann::json::parse(tenant->Call(request)->body().text());
  }
  // SIGUSR1: as a crash would, without a core file. Waits for the next one: the `death`th is over.
  void EndExecutor(RawTenant* admin, int signal, uint64_t death) {
    ASSERT_TRUE(Eventually([&] { return control.readies == death; }));
    ASSERT_EQ(::kill(StatusOf(admin)["executor_pid"], signal), 0);
    ASSERT_TRUE(Eventually([&] { return control.readies == death + 1; }));
  }
  int32_t RegisterAndGetStatus(RawTenant* tenant, const std::string& text) {
    const Fd memfd = RawTenant::MemfdOf(text);
    const int fd = memfd.get();
    proto::Request request;
    request.mutable_register_graph()->set_bytes(text.size());
    return tenant->Call(request, std::span(&fd, 1))->status();
  }
};

TEST_F(SupervisorTest, Happy_KilledExecutorIsReplacedAndToldEverything) {
  Start();
  RawTenant tenant = Open();
  const uint64_t binding = tenant.Bind(SmallTemplate());
  proto::Request alloc;
  alloc.mutable_alloc_tensors()->add_tensors()->set_dtype(proto::FLOAT32);
  ASSERT_EQ(tenant.Call(alloc)->status(), SLICE_OK);
  const pid_t first = StatusOf(&tenant)["executor_pid"];
  ASSERT_EQ(::kill(first, SIGKILL), 0);
  ASSERT_TRUE(Eventually([&] { return control.readies == 2; }));
  const nlohmann::json status = StatusOf(&tenant);
  EXPECT_NE(status["executor_pid"], first);
  EXPECT_EQ(status["executor_restarts"], 1);
  EXPECT_EQ(status["executor_up"], true);
  EXPECT_EQ(control.losses, 1u);
  EXPECT_EQ(LogCount("setup"), 2u);
  for (const char* what : {"add_tenant", "add_template", "add_set", "add_binding"})
    EXPECT_EQ(LogCount(what), 2u) << what;
  tenant.Submit(1, binding, SmallArguments());
  EXPECT_EQ(tenant.WaitCompletion()->status, SLICE_OK);
}

TEST_F(SupervisorTest, Malicious_TemplateThatKillsExecutorsIsRefused) {
  Start();
  RawTenant bad = Open(), good = Open();
  EXPECT_EQ(RegisterAndGetStatus(&bad, SmallTemplate("fake:die")), SLICE_ERR_EXECUTOR_LOST);
  EXPECT_EQ(RegisterAndGetStatus(&good, SmallTemplate()), SLICE_OK);
  EXPECT_EQ(control.templates, 1u);
}

TEST_F(SupervisorTest, Edge_ExecutorThatDoesNotAnswerIsReplaced) {
  config.executor_request_timeout = 300 * kMillisecond;
  Start();
  RawTenant tenant = Open();
  EXPECT_EQ(RegisterAndGetStatus(&tenant, SmallTemplate("fake:hang")), SLICE_ERR_EXECUTOR_LOST);
  EXPECT_EQ(RegisterAndGetStatus(&tenant, SmallTemplate()), SLICE_OK);
  EXPECT_EQ(control.losses, 2u);
}

// Nobody is served who needs the executor, but who wants to know what is going on is.
TEST_F(SupervisorTest, Malicious_ATemplateThatHangsTheExecutorDoesNotBlockAdministration) {
  config.hello_timeout = 3600 * kSecond;
  Start();
  RawTenant bad = Open(), admin = Connect();
  const std::string text = SmallTemplate("fake:hang");
  const Fd memfd = RawTenant::MemfdOf(text);
  const int fd = memfd.get();
  proto::Request request;
  request.mutable_register_graph()->set_bytes(text.size());
  ASSERT_TRUE(bad.Send(request, std::span(&fd, 1)));
  for (size_t attempt = 1; attempt <= 2; ++attempt) {
    ASSERT_TRUE(Eventually([&] { return LogCount("add_template") == attempt; }));
    const pid_t executor = StatusOf(&admin)["executor_pid"];
    RawTenant late = Connect(), gone = Connect();  // accepted while the server waits
    EXPECT_EQ(StatusOf(&late)["executor_pid"], executor);
    ASSERT_TRUE(gone.Send(RawTenant::HelloRequest()));  // left for later
    gone.CloseSocket();
    proto::Request policy;
    policy.mutable_set_policy()->set_policy("fifo");
    EXPECT_EQ(late.Call(policy)->status(), SLICE_OK);
    ASSERT_EQ(::kill(executor, SIGKILL), 0);
  }
  EXPECT_EQ(bad.Receive()->status(), SLICE_ERR_EXECUTOR_LOST);
  EXPECT_EQ(admin.Hello()->status(), SLICE_OK);
}

TEST_F(SupervisorTest, Edge_GivesUpAfterManyDeathsAndComesBack) {
  Start();
  RawTenant tenant = Open();
  for (uint64_t death = 1; death <= Supervisor::kDeathsMax; ++death) {
    ASSERT_TRUE(Eventually([&] { return control.readies == death; }));
    ASSERT_EQ(::kill(StatusOf(&tenant)["executor_pid"], SIGKILL), 0);
    ASSERT_TRUE(Eventually([&] { return control.losses == death; }));
  }
  ASSERT_TRUE(Eventually([&] { return control.given_up == 1; }));
  EXPECT_EQ(RegisterAndGetStatus(&tenant, SmallTemplate()), SLICE_ERR_EXECUTOR_LOST);
  // The next try comes by itself after the backoff.
  ASSERT_TRUE(Eventually([&] { return control.readies == Supervisor::kDeathsMax + 1; }));
  EXPECT_EQ(RegisterAndGetStatus(&tenant, SmallTemplate()), SLICE_OK);
}

// One whose ops end the executor again and again goes; before, everybody waited for a backoff.
TEST_F(SupervisorTest, Malicious_TenantWhoseOpsEndTheExecutorGoesAndNobodyElseWaits) {
  Start();
  RawTenant good = Open(), bad = Open(), admin = Connect();
  const uint64_t binding = bad.Bind(SmallTemplate());
  control.hold = true;  // running, as far as the engine knows
  bad.Submit(1, binding, SmallArguments());
  ASSERT_TRUE(Eventually([&] { return control.submits == 1; }));
  for (uint64_t death = 1; death <= config.limits.executor_deaths_max; ++death)
    EndExecutor(&admin, SIGUSR1, death);
  const auto last_word = bad.Receive();
  ASSERT_TRUE(last_word.has_value());
  EXPECT_EQ(last_word->status(), SLICE_ERR_EXECUTOR_LOST);
  EXPECT_NE(last_word->text().find("3 times"), std::string::npos) << last_word->text();
  ASSERT_TRUE(bad.CompletionWaits());
  EXPECT_EQ(bad.WaitCompletion()->status, SLICE_ERR_EXECUTOR_LOST);
  EXPECT_TRUE(bad.WaitHangUp());
  EXPECT_EQ(RegisterAndGetStatus(&good, SmallTemplate()), SLICE_OK);
  // Opening another session must not be a way on.
  RawTenant next = Connect();
  const auto refused = next.Hello();
  EXPECT_EQ(refused->status(), SLICE_ERR_EXECUTOR_LOST);
  EXPECT_NE(refused->text().find("try again in"), std::string::npos) << refused->text();
  EXPECT_TRUE(Eventually([&] { return Connect().Hello()->status() == SLICE_OK; }));
  // The deaths so far do not count for a backoff.
  for (uint64_t death = 1; death < Supervisor::kDeathsMax; ++death)
    EndExecutor(&admin, SIGUSR1, config.limits.executor_deaths_max + death);
  EXPECT_EQ(control.given_up, 0u);
}

TEST_F(SupervisorTest, Malicious_TenantWhoseRequestsEndTheExecutorGoes) {
  Start();
  RawTenant good = Open(), bad = Open();
  EXPECT_EQ(RegisterAndGetStatus(&bad, SmallTemplate("fake:die")), SLICE_ERR_EXECUTOR_LOST);
  EXPECT_EQ(RegisterAndGetStatus(&bad, SmallTemplate("fake:die")), SLICE_ERR_EXECUTOR_LOST);
  EXPECT_TRUE(bad.WaitHangUp());
  EXPECT_EQ(LogCount("add_template"), config.limits.executor_deaths_max);
  EXPECT_EQ(RegisterAndGetStatus(&good, SmallTemplate()), SLICE_OK);
  EXPECT_EQ(control.given_up, 0u);
}

TEST_F(SupervisorTest, Edge_ADeathFromOutsideIsNobodysFault) {
  config.limits.executor_deaths_max = 1;
  Start();
  RawTenant tenant = Open();
  const uint64_t binding = tenant.Bind(SmallTemplate());
  control.hold = true;
  tenant.Submit(1, binding, SmallArguments());
  ASSERT_TRUE(Eventually([&] { return control.submits == 1; }));
  EndExecutor(&tenant, SIGKILL, 1);
  EndExecutor(&tenant, SIGTERM, 2);
  control.hold = false;
  tenant.Submit(2, binding, SmallArguments(0, 1024));
  EXPECT_EQ(tenant.WaitCompletion()->status, SLICE_OK);
}

TEST_F(SupervisorTest, Edge_MissingExecutorIsAClearError) {
  ZygoteLauncher launcher("/nonexistent/slice-executor");
  const Result<ExecutorProcess> process = launcher.Launch(WaitReadable);
  ASSERT_FALSE(process.ok());
  EXPECT_EQ(process.status().code(), StatusCode::kExecutorLost);
  EXPECT_NE(process.status().text().find("/nonexistent/slice-executor"), std::string::npos);
}

TEST_F(SupervisorTest, Edge_ProgramThatIsNoZygoteIsAClearError) {
  ZygoteLauncher launcher("/bin/true");
  const Result<ExecutorProcess> process = launcher.Launch(WaitReadable);
  ASSERT_FALSE(process.ok());
  EXPECT_NE(process.status().text().find("ended before it was ready"), std::string::npos);
}

}  // namespace
}  // namespace slice::server
