// The socket's life: a second daemon, what a dead one left, what stopping does.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "tests/server/server_fixture.h"

namespace slice::server {
namespace {

using testing::RawTenant;
using StartStopTest = ServerFixture;

TEST_F(StartStopTest, Edge_SecondDaemonOnTheSameSocketIsRefused) {
  Start();
  const Result<Listener> second = Listener::Listen(config.socket_path);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().text().find("another sliced uses"), std::string::npos);
  RawTenant tenant = Connect();
  EXPECT_EQ(tenant.Hello()->status(), SLICE_OK);
}

TEST_F(StartStopTest, Edge_StaleSocketFileIsReplaced) {
  {
    const Fd dead(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, config.socket_path.c_str(), config.socket_path.size() + 1);
    ASSERT_EQ(::bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  Start();
  RawTenant tenant = Connect();
  EXPECT_EQ(tenant.Hello()->status(), SLICE_OK);
}

TEST_F(StartStopTest, Edge_FileThatIsNoSocketIsLeftAlone) {
  std::ofstream(config.socket_path) << "mine";
  const Status status = TryStart();
  EXPECT_NE(status.text().find("is not a socket"), std::string::npos);
  EXPECT_EQ(ReadFile(config.socket_path), "mine");
}

TEST_F(StartStopTest, Happy_StopTellsWaitingRequestsAndRemovesTheSocket) {
  control.hold = true;
  Start();
  RawTenant tenant = Open();
  const uint64_t binding = tenant.Bind(SmallTemplate());
  tenant.Submit(1, binding, SmallArguments());
  ASSERT_TRUE(Eventually([&] { return control.submits == 1; }));
  Stop();
  const auto completion = tenant.WaitCompletion();
  ASSERT_TRUE(completion.has_value());
  EXPECT_EQ(completion->status, SLICE_ERR_DAEMON_LOST);
  EXPECT_TRUE(tenant.WaitHangUp());
  EXPECT_FALSE(std::filesystem::exists(config.socket_path));
  EXPECT_FALSE(std::filesystem::exists(config.socket_path + ".gmg"));
}
}  // namespace
}  // namespace slice::server
