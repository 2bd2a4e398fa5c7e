#include "daemon/server/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace slice::server {
namespace {

constexpr char kSmall[] = R"([[domain]]
name = "cpu0"
pool = "64MiB"
retained = "1GiB"
[[device]]
name = "cpu0"
)";

std::string ErrorOf(const std::string& text) {
  const Result<ServerConfig> config = ParseConfig(text, "test.toml");
  EXPECT_FALSE(config.ok()) << "accepted: " << text;
  return config.ok() ? "" : config.status().text();
}

TEST(ConfigTest, Happy_ParsesAllKeys) {
  const Result<ServerConfig> config = ParseConfig(R"(
[daemon]
socket = "/tmp/s.sock"
admin_group = "adm"
log_level = "warning"
estimates_file = "/var/lib/e.json"
executor = "/usr/bin/slice-executor"
hang_limit_ms = 5000
[[domain]]
name = "a"
pool = "64MiB"
retained = 1073741824
[[device]]
name = "cpu0"
domain = "a"
cpu = 1
[[device]]
name = "cpu1"
domain = "a"
[scheduler]
policy = "fifo"
issue_ahead = 3
offline_op_max_us = 7000
[limits]
sessions_max = 5
executor_deaths_max = 7
[tenant_defaults]
memory = "10MiB"
[[tenant]]
uid = 1000
class = "online"
weight = 2
devices = ["cpu1"]
deadline_min_ms = 50
)",
                                                  "test.toml");
  ASSERT_TRUE(config.ok()) << config.status().ToString();
  EXPECT_EQ(config->socket_path, "/tmp/s.sock");
  EXPECT_EQ(config->hang_limit, 5 * kSecond);
  EXPECT_EQ(config->engine.domains[0].retained_bytes, 1 << 30);
  EXPECT_EQ(config->devices[0].cpu, 1);
  EXPECT_EQ(config->engine.devices[1].domain, 0);
  EXPECT_EQ(config->engine.policy, "fifo");
  EXPECT_EQ(config->engine.issue_ahead, 3u);
  EXPECT_EQ(config->engine.offline_op_max, 7 * kMillisecond);
  EXPECT_EQ(config->limits.sessions_max, 5u);
  EXPECT_EQ(config->limits.executor_deaths_max, 7u);
  EXPECT_EQ(config->PolicyOf(1).class_max, ServiceClass::kOffline);
  const TenantPolicy& tenant = config->PolicyOf(1000);
  EXPECT_EQ(tenant.class_max, ServiceClass::kOnline);
  EXPECT_EQ(tenant.class_default, ServiceClass::kOffline);
  EXPECT_EQ(tenant.memory_bytes_max, 10 * kMiB);  // from tenant_defaults
  EXPECT_EQ(tenant.device_mask, 2u);
  EXPECT_EQ(tenant.deadline_min, 50 * kMillisecond);
}

TEST(ConfigTest, Happy_ExampleInDocsIsValid) {
  const Result<ServerConfig> config = LoadConfig(SLICE_SOURCE_DIR "/docs/sliced.toml");
  ASSERT_TRUE(config.ok()) << config.status().ToString();
  EXPECT_FALSE(config->devices.empty());
}

TEST(ConfigTest, Edge_UnknownKeyIsRefusedWithLineAndNearestKey) {
  EXPECT_EQ(ErrorOf(std::string(kSmall) + "[scheduler]\nisue_ahead = 2\n"),
            "test.toml:8: unknown key 'isue_ahead' in [scheduler]: did you mean 'issue_ahead'?");
  EXPECT_EQ(ErrorOf(std::string(kSmall) + "[scheduler]\nxyzzyplugh = 2\n"),
            "test.toml:8: unknown key 'xyzzyplugh' in [scheduler]");
  EXPECT_NE(ErrorOf(std::string(kSmall) + "[schedular]\n").find("did you mean 'scheduler'"),
            std::string::npos);
}

TEST(ConfigTest, Edge_ErrorsNameLineAndReason) {
  EXPECT_NE(
      ErrorOf("[daemon]\nsocket = 3\n").find("test.toml:2: [daemon]: socket must be a string"),
      std::string::npos);
  EXPECT_NE(ErrorOf("[daemon\n").find("test.toml:1:"), std::string::npos);
  EXPECT_NE(ErrorOf("").find("no [[device]]"), std::string::npos);
  EXPECT_NE(ErrorOf("[[device]]\nname = \"a\"\n").find("there is no [[domain]] named 'a'"),
            std::string::npos);
  EXPECT_NE(ErrorOf(std::string(kSmall) + "[scheduler]\nissue_ahead = 0\n").find("from 1 to 64"),
            std::string::npos);
  EXPECT_NE(ErrorOf(std::string(kSmall) + "[[tenant]]\nuid = 1\nuser = \"root\"\n")
                .find("either uid or user"),
            std::string::npos);
  EXPECT_NE(ErrorOf(std::string(kSmall) + "[[tenant]]\nuid = 1\n[[tenant]]\nuid = 1\n")
                .find("is there twice"),
            std::string::npos);
  EXPECT_NE(
      ErrorOf(std::string(kSmall) + "[[tenant]]\nuid = 1\ndevices = [\"gpu9\"]\n").find("'gpu9'"),
      std::string::npos);
  EXPECT_NE(ErrorOf(std::string(kSmall) + "[[tenant]]\nuid = 1\ndefault_class = \"online\"\n")
                .find("offline only"),
            std::string::npos);
  EXPECT_NE(ErrorOf("[[domain]]\nname = \"a\"\npool = \"12 parsecs\"\n").find("is not a size"),
            std::string::npos);
}

class CheckConfigTest : public ::testing::Test {
 protected:
  CheckConfigTest() : config(DefaultConfig(2, 64 * kMiB, 64 * kMiB).value()) {
    config.socket_path = "/tmp/sliced.sock";
    config.executor_path = "/bin/true";
  }
  void ExpectRefused(const std::string& part) const {
    const Status status = CheckConfig(config);
    EXPECT_EQ(status.code(), StatusCode::kInvalid);
    EXPECT_NE(status.text().find(part), std::string::npos) << part << " in " << status.text();
  }
  ServerConfig config;
};

TEST_F(CheckConfigTest, Happy_DefaultsAreFineAndDescribed) {
  EXPECT_TRUE(CheckConfig(config).ok()) << CheckConfig(config).ToString();
  config.engine.domains[1].retained_bytes = 3 * kMiB / 2;
  const std::string text = DescribeConfig(config);
  for (const char* part : {"/tmp/sliced.sock", "slice\n", "pool 64MiB, retained 64MiB",
                           "pool 64MiB, retained 1536KiB", "device cpu1"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
}

TEST_F(CheckConfigTest, Edge_PoolMustHoldAnOp) {
  for (const int64_t bytes : {int64_t{0}, int64_t{1024}, 2 * kMiB - 1}) {
    config.engine.domains[1].pool_bytes = bytes;
    ExpectRefused("domain 'cpu1': a pool of");
    ExpectRefused("at least 2MiB: every op takes its workspace_margin (1MiB)");
  }
  config.engine.domains[1].pool_bytes = 2 * kMiB;
  EXPECT_TRUE(CheckConfig(config).ok());
  config.engine.workspace_margin_bytes = 64 * kMiB;
  ExpectRefused("at least 65MiB");
  config.engine.workspace_margin_bytes = INT64_MAX;
  ExpectRefused("beyond any machine");
}

TEST_F(CheckConfigTest, Edge_MemoryThatIsNotThere) {
  config.engine.domains[0].retained_bytes = 0;
  ExpectRefused("retained of 0B is too small, at least 1MiB");
  config.engine.domains[0].retained_bytes = int64_t{1} << 50;  // used as needed: no limit here
  EXPECT_TRUE(CheckConfig(config).ok());
  config.engine.domains[0].pool_bytes = int64_t{1} << 50;
  ExpectRefused("this machine has");
  config.devices[0].backend = "cuda";  // not this machine's memory
  EXPECT_TRUE(CheckConfig(config).ok());
  config.engine.domains[0].pool_bytes = INT64_MAX;
  ExpectRefused("beyond any machine");
}

TEST_F(CheckConfigTest, Edge_PathsThatCannotWork) {
  config.socket_path = "/tmp/" + std::string(103, 'x');
  ExpectRefused("108 bytes, 1 to 107 are possible");
  config.socket_path = "/tmp";
  ExpectRefused("is not a socket");
  config.socket_path = "/nonexistent/a/b.sock";
  ExpectRefused("cannot write to folder '/nonexistent'");
  config.socket_path = "/tmp/made-at-start/b.sock";
  EXPECT_TRUE(CheckConfig(config).ok());
  config.log_file = "/nonexistent/sliced.log";
  ExpectRefused("log_file: cannot write to folder '/nonexistent'");
  config.log_file = "/tmp";
  ExpectRefused("is a folder");
  config.log_file = "/proc/version";
  if (::geteuid() != 0) ExpectRefused("cannot write '/proc/version'");
  config.log_file.clear();
  config.estimates_file = "/nonexistent/estimates.json";
  ExpectRefused("estimates_file: cannot write to folder '/nonexistent'");
  config.estimates_file = "/tmp";
  ExpectRefused("estimates_file: '/tmp' is a folder");
  config.estimates_file = "/dev/null";  // a file would replace it
  ExpectRefused("estimates_file: '/dev/null' is not a regular file");
  config.estimates_file.clear();
  config.executor_path = "/nonexistent/slice-executor";
  ExpectRefused("executor: '/nonexistent/slice-executor'");
  config.executor_path = "/etc/passwd";
  ExpectRefused("is not a program");
}

TEST_F(CheckConfigTest, Edge_GroupCpuAndArena) {
  config.admin_group = "no-such-group";
  ExpectRefused("there is no group 'no-such-group'");
  config.admin_group = "root";
  EXPECT_TRUE(CheckConfig(config).ok());
  config.devices[1].cpu = 65535;
  ExpectRefused("device 'cpu1': cpu 65535");
  config.devices[1].cpu = 0;
  config.limits.arena_bytes_max = 0;
  ExpectRefused("arena_max of 0 bytes");
}

TEST(ConfigTest, Edge_NonsenseInTheFileIsRefused) {
  EXPECT_NE(ErrorOf("[[domain]]\nname = \"a\"\npool = -1\nretained = 1\n").find("must be a size"),
            std::string::npos);
  EXPECT_NE(ErrorOf("[[domain]]\nname = \"a\"\nretained = 1\n").find("'a' needs pool"),
            std::string::npos);
  EXPECT_NE(ErrorOf(std::string(kSmall) + "[[device]]\nname = \"cpu0\"\n").find("is there twice"),
            std::string::npos);
  EXPECT_NE(ErrorOf(std::string(kSmall) + "[daemon]\nhang_limit_ms = -1\n").find("from 0 to"),
            std::string::npos);
  std::string many = kSmall;
  for (int i = 1; i < 65; ++i)
    many += "[[device]]\nname = \"d" + std::to_string(i) + "\"\ndomain = \"cpu0\"\n";
  EXPECT_NE(ErrorOf(many).find("more than 64 devices"), std::string::npos);
  const Result<ServerConfig> folder = LoadConfig("/tmp");
  ASSERT_FALSE(folder.ok());
  EXPECT_NE(folder.status().text().find("'/tmp': is it a file?"), std::string::npos)
      << folder.status().text();
}

TEST(ConfigTest, Edge_FileThatIsMissing) {
  const Result<ServerConfig> config = LoadConfig("/nonexistent/sliced.toml");
  ASSERT_FALSE(config.ok());
  EXPECT_EQ(config.status().code(), StatusCode::kInvalid);
}

TEST(ConfigTest, Happy_ParseBytes) {
  EXPECT_EQ(ParseBytes("4096").value(), 4096);
  EXPECT_EQ(ParseBytes("512MiB").value(), 512 * kMiB);
  EXPECT_EQ(ParseBytes("2 GiB").value(), int64_t{2} << 30);
}

TEST(ConfigTest, Edge_ParseBytesRefusesNonsense) {
  for (const char* text : {"", "MiB", "-1", "1.5GiB", "1XB", "1MB"}) {
    EXPECT_EQ(ParseBytes(text).status().code(), StatusCode::kInvalid) << text;
  }
  EXPECT_EQ(ParseBytes("99999999999999999999").status().code(), StatusCode::kOverflow);
  EXPECT_EQ(ParseBytes("9999999999TiB").status().code(), StatusCode::kOverflow);
}

TEST(ConfigTest, Happy_DefaultDevices) {
  const ServerConfig config = DefaultConfig(3).value();
  EXPECT_EQ(config.devices.size(), 3u);
  EXPECT_EQ(config.engine.devices[2].domain, 2);
  EXPECT_EQ(DefaultConfig(0).status().code(), StatusCode::kInvalid);
  EXPECT_EQ(DefaultConfig(65).status().code(), StatusCode::kInvalid);
}

}  // namespace
}  // namespace slice::server
