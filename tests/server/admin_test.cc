// Administration requests and who may make them.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "tests/server/server_fixture.h"

namespace slice::server {
namespace {

using testing::RawTenant;

class AdminTest : public ServerFixture {
 protected:
  static proto::Request Timeline(uint32_t action, const std::string& path = "") {
    proto::Request request;
    request.mutable_timeline()->set_action(action);
    request.mutable_timeline()->set_path(path);
    return request;
  }
};

TEST_F(AdminTest, Happy_StatusNeedsNoHello) {
  Start();
  RawTenant admin = Connect();
  for (uint32_t what = 0; what < 4; ++what) {
    proto::Request request;
    request.mutable_status()->set_what(what);
    const auto reply = admin.Call(request);
    ASSERT_EQ(reply->status(), SLICE_OK) << reply->text();
    EXPECT_TRUE(nlohmann::json::parse(reply->body().text()).is_object());
  }
  proto::Request request;
  request.mutable_status()->set_what(4);
  EXPECT_EQ(admin.Call(request)->status(), SLICE_ERR_INVALID);
}

TEST_F(AdminTest, Happy_WhatIfIsHandedToTheEngine) {
  Start();
  RawTenant admin = Connect();
  proto::Request request;
  request.mutable_what_if()->set_graph("llama");
  request.mutable_what_if()->set_session(7);
  request.mutable_what_if()->add_symbols(3);
  request.mutable_what_if()->add_symbols(-4);
  request.mutable_what_if()->set_service_class(1);
  auto reply = admin.Call(request);
  ASSERT_EQ(reply->status(), SLICE_OK) << reply->text();
  nlohmann::json answer = nlohmann::json::parse(reply->body().text());
  EXPECT_EQ(answer["graph"], "llama");
  EXPECT_EQ(answer["tenant"], 7);
  EXPECT_EQ(answer["symbols"], nlohmann::json({3, -4}));
  EXPECT_EQ(answer["class"], "online");
  request.mutable_what_if()->set_service_class(2);
  EXPECT_EQ(nlohmann::json::parse(admin.Call(request)->body().text())["class"], "offline");
  request.mutable_what_if()->set_service_class(0);
  EXPECT_EQ(nlohmann::json::parse(admin.Call(request)->body().text())["class"], "none");
}

TEST_F(AdminTest, Malicious_WhatIfQuestionsAreSpacedWhoeverAsks) {
  Start();
  RawTenant first = Connect(), second = Connect();
  proto::Request request;
  request.mutable_what_if()->set_graph("llama");
  const TimeNs begin = MonotonicNow();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(first.Call(request)->status(), SLICE_OK);
    EXPECT_EQ(second.Call(request)->status(), SLICE_OK);
  }
  EXPECT_GE(MonotonicNow() - begin, 5 * 20 * kMillisecond);
}

TEST_F(AdminTest, Edge_WhatIfErrorsKeepTheConnection) {
  Start();
  RawTenant admin = Connect();
  proto::Request request;
  request.mutable_what_if()->set_graph("unknown");
  auto reply = admin.Call(request);
  EXPECT_EQ(reply->status(), SLICE_ERR_INVALID);
  EXPECT_NE(reply->text().find("unknown"), std::string::npos) << reply->text();
  request.mutable_what_if()->set_graph("llama");
  request.mutable_what_if()->set_service_class(3);
  EXPECT_EQ(admin.Call(request)->status(), SLICE_ERR_INVALID);
  request.mutable_what_if()->set_service_class(0);
  EXPECT_EQ(admin.Call(request)->status(), SLICE_OK);
}

TEST_F(AdminTest, Edge_TextTooLongForAMessageComesAsMemfd) {
  control.tenants_json_bytes = 300'000;
  Start();
  RawTenant admin = Connect();
  proto::Request request;
  request.mutable_status()->set_what(2);
  const auto reply = admin.Call(request);
  ASSERT_EQ(reply->status(), SLICE_OK) << reply->text();
  EXPECT_EQ(reply->body().text(), "");
  ASSERT_EQ(admin.fds().size(), 1u);
  const size_t bytes = CheckForeignMemfd(admin.fds()[0], 300'000).value();
  const Mapping text = Mapping::Map(admin.fds()[0], bytes, false).value();
  const std::string_view view(reinterpret_cast<const char*>(text.data()), bytes);
  EXPECT_TRUE(nlohmann::json::parse(view)["tenants"].is_array());
}

TEST_F(AdminTest, Happy_PolicyCanBeSwitched) {
  Start();
  RawTenant admin = Connect();
  proto::Request request;
  request.mutable_set_policy()->set_policy("fifo");
  EXPECT_EQ(admin.Call(request)->status(), SLICE_OK);
  request.mutable_set_policy()->set_policy("nonsense");
  EXPECT_EQ(admin.Call(request)->status(), SLICE_ERR_INVALID);
  proto::Request status;
  status.mutable_status();
  EXPECT_EQ(nlohmann::json::parse(admin.Call(status)->body().text())["policy"], "fifo");
}

TEST_F(AdminTest, Happy_TimelineToADescriptor) {
  Start();
  RawTenant admin = Connect();
  ASSERT_EQ(admin.Call(Timeline(0))->status(), SLICE_OK);
  ASSERT_EQ(admin.Call(Timeline(2, "phase"))->status(), SLICE_OK);
  const std::string path = folder.File("timeline.json");
  const Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  const int fd = file.get();
  ASSERT_EQ(admin.Call(Timeline(1), std::span(&fd, 1))->status(), SLICE_OK);
  const nlohmann::json timeline = nlohmann::json::parse(ReadFile(path));
  EXPECT_NE(timeline.dump().find("mark: phase"), std::string::npos);
}

TEST_F(AdminTest, Edge_TimelineErrors) {
  Start();
  RawTenant admin = Connect();
  EXPECT_EQ(admin.Call(Timeline(2, "x"))->status(), SLICE_ERR_INVALID);  // off
  EXPECT_EQ(admin.Call(Timeline(1, folder.File("t.json")))->status(), SLICE_ERR_INVALID);
  EXPECT_EQ(admin.Call(Timeline(9))->status(), SLICE_ERR_INVALID);
  EXPECT_EQ(admin.Call(Timeline(0))->status(), SLICE_OK);
  EXPECT_EQ(admin.Call(Timeline(1, "/nonexistent/t.json"))->status(), SLICE_ERR_INVALID);
  EXPECT_EQ(admin.Call(Timeline(1, "/dev/null"))->status(), SLICE_ERR_INVALID);
  EXPECT_EQ(admin.Call(Timeline(1, folder.File("t.json")))->status(),
            SLICE_OK);  // still recording till then
}

TEST_F(AdminTest, Malicious_OtherUsersMayNotAdminister) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  Start();
  std::filesystem::permissions(std::filesystem::path(config.socket_path).parent_path(),
                               std::filesystem::perms::all);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(2);
    RawTenant tenant(config.socket_path);
    proto::Request request;
    request.mutable_status();
    const auto refused = tenant.Call(request);
    request.mutable_what_if()->set_graph("llama");
    const auto curious = tenant.Call(request);
    const auto hello = tenant.Hello();
    ::_exit(refused.has_value() && refused->status() == SLICE_ERR_INVALID && curious.has_value() &&
                    curious->status() == SLICE_ERR_INVALID && hello->status() == SLICE_OK
                ? 0
                : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(AdminTest, Happy_GmgNoteLeadsToTheSealedSegment) {
  Start();
  std::ifstream note(config.socket_path + ".gmg");
  int pid = 0, fd = -1;
  ASSERT_TRUE(note >> pid >> fd);
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const Fd segment(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(segment.valid());
  EXPECT_TRUE(Mapping::Map(segment, 4096, false).ok());
  const Fd writable(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (writable.valid()) {
    EXPECT_FALSE(Mapping::Map(writable, 4096, true).ok());
  }
}

}  // namespace
}  // namespace slice::server
