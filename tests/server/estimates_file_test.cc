// Learned durations on disk: what goes out comes back, and what cannot be read costs nothing.
#include "daemon/server/estimates_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "tests/server/server_fixture.h"

namespace slice::server {
namespace {

const std::vector<engine::DomainConfig> kDomains = {{"cpu0", 1, 1}, {"cpu1", 1, 1}};

estimate::Saved Sample() {
  estimate::Saved saved;
  saved.signatures = {{0xfedcba9876543210, 0, {{1'000'000, 2'000, 300, 12'345.5, 120.25, 40}}},
                      {7, 1, {{5, 6, 7, 8, 9, 10}, {0, 0, 0, 1, 0, 1}}}};
  saved.links = {{0, 1, {{4'096, 20'000}, {1 << 20, 150'000.5}}}, {1, 0, {{4'096, 1}}}};
  return saved;
}

class EstimatesFileTest : public ::testing::Test {
 protected:
  EstimatesFileTest() { SLICE_CHECK(OpenLog("", LogLevel::kError).ok(), "log"); }
  void Write(const std::string& text) { std::ofstream(path) << text; }
  bool Exists(const std::string& name) const { return std::filesystem::exists(name); }

  TempFolder folder;
  std::string path = folder.File("estimates.json");
};

TEST_F(EstimatesFileTest, Happy_WhatIsSavedIsLoaded) {
  ASSERT_TRUE(SaveEstimates(path, Sample(), kDomains).ok());
  EXPECT_FALSE(Exists(path + ".partial"));
  const estimate::Saved loaded = LoadEstimates(path, kDomains);
  EXPECT_EQ(FormatEstimates(loaded, kDomains), FormatEstimates(Sample(), kDomains));
  ASSERT_EQ(loaded.signatures.size(), 2u);
  EXPECT_EQ(loaded.signatures[0].signature, 0xfedcba9876543210);
  EXPECT_EQ(loaded.signatures[0].device_kind, 0);
  EXPECT_EQ(loaded.signatures[0].shapes[0].ns, 12'345.5);
  EXPECT_EQ(loaded.links[0].points[1].bytes, 1 << 20);
  EXPECT_TRUE(Exists(path)) << "loading leaves the file";
}

TEST_F(EstimatesFileTest, Happy_DomainsAndKindsGoByName) {
  const std::string text = FormatEstimates(Sample(), kDomains);
  const auto json = nlohmann::json::parse(text);
  EXPECT_TRUE(json["kinds"].contains("cpu"));
  EXPECT_TRUE(json["kinds"].contains("cuda"));
  const std::vector<engine::DomainConfig> turned = {{"cpu1", 1, 1}, {"cpu0", 1, 1}};
  const Result<estimate::Saved> saved = ParseEstimates(text, turned);
  ASSERT_TRUE(saved.ok());
  EXPECT_EQ(saved->links[0].source, 1);
  const std::vector<engine::DomainConfig> other = {{"cpu1", 1, 1}, {"gpu0", 1, 1}};
  EXPECT_TRUE(ParseEstimates(text, other)->links.empty()) << "domains that are not there";
  EXPECT_EQ(ParseEstimates(text, other)->signatures.size(), 2u);
}

TEST_F(EstimatesFileTest, Edge_NoFileIsAFreshStart) {
  EXPECT_TRUE(LoadEstimates(path, kDomains).signatures.empty());
  EXPECT_FALSE(Exists(path + ".bad-1"));
}

TEST_F(EstimatesFileTest, Malicious_WhatIsNoEstimatesIsKeptAsideAndNothingIsKnown) {
  const std::string good = FormatEstimates(Sample(), kDomains);
  const auto with = [&](const char* pointer, const nlohmann::json& value) {
    nlohmann::json json = nlohmann::json::parse(good);
    json[nlohmann::json::json_pointer(pointer)] = value;
    return json.dump();
  };
  // Nested deeper than the stack of a recursion could be.
  const auto deep = [](const std::string& before, const std::string& after) {
    constexpr size_t kDepth = 500'000;
    return R"({"format":"slicescheduler-estimates","version":1,)" + before +
           std::string(kDepth, '[') + std::string(kDepth, ']') + after + "}";
  };
  const std::vector<std::string> bad = {"",
                                        "{",
                                        "[]",
                                        "null",
                                        "{}",
                                        std::string(100'000, '['),
                                        good.substr(0, good.size() / 2),
                                        std::string("\0\1\2", 3),
                                        with("/format", "another"),
                                        with("/version", 2),
                                        with("/version", "1"),
                                        with("/kinds", 5),
                                        with("/links", "x"),
                                        with("/kinds/cpu", 5),
                                        with("/kinds/cpu/0", 5),
                                        with("/kinds/cpu/0/signature", "xyz"),
                                        with("/kinds/cpu/0/signature", 5),
                                        with("/kinds/cpu/0/shapes", nlohmann::json::object()),
                                        with("/kinds/cpu/0/shapes/0", 5),
                                        with("/kinds/cpu/0/shapes/0/3", -1),
                                        with("/kinds/cpu/0/shapes/0/3", nullptr),
                                        with("/kinds/cpu/0/shapes/0/0", 1e300),
                                        with("/kinds/cpu/0/shapes/0/6", 1),
                                        with("/links/0", 1),
                                        with("/links/0/points", 1),
                                        with("/links/0/points/0", nlohmann::json::array({1})),
                                        with("/links/0/points/0/1", "fast"),
                                        deep(R"("links":[],"kinds":)", ""),
                                        deep(R"("kinds":{},"links":)", ""),
                                        deep(R"("links":[],"kinds":{"cpu":)", "}"),
                                        deep(R"("kinds":{},"links":[],"format":)", ""),
                                        deep(R"("kinds":{},"links":[],"version":)", "")};
  for (size_t i = 0; i < bad.size(); ++i) {
    Write(bad[i]);
    const estimate::Saved loaded = LoadEstimates(path, kDomains);
    EXPECT_TRUE(loaded.signatures.empty() && loaded.links.empty()) << bad[i].substr(0, 200);
    EXPECT_FALSE(Exists(path)) << bad[i].substr(0, 200);
    const std::string aside = path + ".bad-" + std::to_string(i + 1);
    ASSERT_TRUE(Exists(aside)) << bad[i].substr(0, 200);
    EXPECT_EQ(ReadFile(aside), bad[i]);
  }
}

TEST_F(EstimatesFileTest, Malicious_OneFileWithMoreEntriesThanADaemonKeeps) {
  std::string text =
      R"({"format":"slicescheduler-estimates","version":1,"links":[],"kinds":{"cpu":[)"
      R"({"signature":"1","shapes":[)";
  for (int i = 0; i < 1'000'001; ++i) text += i == 0 ? "[1,1,1,1,1,1]" : ",[1,1,1,1,1,1]";
  text += "]}]}}";
  EXPECT_EQ(ParseEstimates(text, kDomains).status().code(), StatusCode::kInvalid);
}

TEST_F(EstimatesFileTest, Edge_FilesThatAreNoneAndFoldersThatAreNotThere) {
  const std::string nowhere = folder.File("missing/estimates.json");
  EXPECT_EQ(SaveEstimates(nowhere, Sample(), kDomains).code(), StatusCode::kInvalid);
  EXPECT_TRUE(LoadEstimates(nowhere, kDomains).signatures.empty());
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_TRUE(LoadEstimates(path, kDomains).signatures.empty()) << "and it does not wait";
  // As it would be with /dev/null: neither moved nor replaced.
  EXPECT_FALSE(Exists(path + ".bad-1"));
  EXPECT_EQ(SaveEstimates(path, Sample(), kDomains).code(), StatusCode::kInvalid);
  EXPECT_TRUE(std::filesystem::is_fifo(path));
  EXPECT_FALSE(Exists(path + ".partial"));
}

TEST_F(EstimatesFileTest, Edge_AFailedSaveLeavesTheOldFile) {
  ASSERT_TRUE(SaveEstimates(path, Sample(), kDomains).ok());
  const std::string before = ReadFile(path);
  std::filesystem::create_directory(path + ".partial");
  EXPECT_FALSE(SaveEstimates(path, {}, kDomains).ok());
  EXPECT_EQ(ReadFile(path), before);
}

// The daemon around it.
class EstimatesServerTest : public ServerFixture {};

TEST_F(EstimatesServerTest, Happy_ADaemonGoesOnWhereTheLastOneStopped) {
  config.estimates_file = folder.File("estimates.json");
  Start();
  Stop();
  ASSERT_EQ(ReadFile(config.estimates_file), FormatEstimates({}, config.engine.domains));
  estimate::Saved saved = Sample();
  ASSERT_TRUE(SaveEstimates(config.estimates_file, saved, config.engine.domains).ok());
  Start();
  Stop();
  EXPECT_EQ(ReadFile(config.estimates_file), FormatEstimates(saved, config.engine.domains))
      << "loaded at start, saved at stop";
}

TEST_F(EstimatesServerTest, Happy_WhatWasLearnedIsWrittenNowAndThen) {
  config.estimates_file = folder.File("estimates.json");
  config.estimates_interval = 5 * kMillisecond;
  Start();
  const auto expected = [&](uint64_t signatures) {
    estimate::Saved saved;
    for (uint64_t i = 1; i <= signatures; ++i)
      saved.signatures.push_back({i, 0, {{1, 1, 1, 1000.0, 0.0, 1}}});
    return FormatEstimates(saved, config.engine.domains);
  };
  EXPECT_TRUE(Eventually([&] { return ReadFile(config.estimates_file) == expected(0); }));
  control.signatures_learned = 2;
  EXPECT_TRUE(Eventually([&] { return ReadFile(config.estimates_file) == expected(2); }));
  // Nothing new is learned: the file is left alone...
  std::ofstream(config.estimates_file) << "somebody's";
  const uint64_t asked = control.estimates_asked;
  ASSERT_TRUE(Eventually([&] { return control.estimates_asked >= asked + 5; }));
  EXPECT_EQ(ReadFile(config.estimates_file), "somebody's");
  // ...until it stops.
  Stop();
  EXPECT_EQ(ReadFile(config.estimates_file), expected(2));
}

TEST_F(EstimatesServerTest, Edge_ACorruptFileDoesNotKeepTheDaemonFromStarting) {
  config.estimates_file = folder.File("estimates.json");
  std::ofstream(config.estimates_file) << "garbage";
  Start();
  Stop();
  EXPECT_EQ(ReadFile(config.estimates_file + ".bad-1"), "garbage");
  EXPECT_EQ(ReadFile(config.estimates_file), FormatEstimates({}, config.engine.domains));
}

}  // namespace
}  // namespace slice::server
