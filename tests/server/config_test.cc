#include "daemon/server/config.h"

#include <gtest/gtest.h>

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
