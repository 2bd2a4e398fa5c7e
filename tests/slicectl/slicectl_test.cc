// slicectl against a live sliced whose executor is the torch-free double.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>

#include "tests/integration/mlp_tenant.h"
#include "tests/testing/live_daemon.h"

namespace slice::testing {
namespace {

class SlicectlTest : public ::testing::Test {
 protected:
  LiveDaemon daemon{FAKE_EXECUTOR, {"--log-level", "error"}};
};

TEST_F(SlicectlTest, Happy_EveryViewHasATableAndJson) {
  for (const char* what : {"status", "devices", "tenants", "estimators", "graphs", "explain"}) {
    const Finished table = daemon.Ctl({what});
    EXPECT_EQ(table.status, 0) << what << ": " << table.output;
    EXPECT_FALSE(table.output.empty());
    EXPECT_FALSE(daemon.CtlJson({what}).is_discarded()) << what;
    const Finished flag_first = daemon.Ctl({"--json", what});
    EXPECT_FALSE(nlohmann::json::parse(flag_first.output, nullptr, false).is_discarded())
        << flag_first.output;
  }
  EXPECT_EQ(daemon.CtlJson({"status"})["pid"], daemon.pid());
  EXPECT_EQ(daemon.CtlJson({"devices"})["devices"].size(), 2u);
}

TEST_F(SlicectlTest, Happy_PolicyIsReadAndSwitched) {
  EXPECT_EQ(daemon.CtlJson({"policy", "get"})["policy"], "slice");
  EXPECT_EQ(daemon.Ctl({"policy", "set", "fifo"}).status, 0);
  EXPECT_EQ(daemon.CtlJson({"policy", "get"})["policy"], "fifo");
  const Finished refused = daemon.Ctl({"policy", "set", "nonsense"});
  EXPECT_EQ(refused.status, 1);
  EXPECT_NE(refused.output.find("nonsense"), std::string::npos);
}

TEST_F(SlicectlTest, Happy_TimelineIsRecordedMarkedAndWritten) {
  const std::string path = daemon.File("timeline.json");
  EXPECT_EQ(daemon.Ctl({"timeline", "stop", path}).status, 1);  // none is recorded
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_FALSE(std::filesystem::exists(path + ".partial"));
  EXPECT_EQ(daemon.Ctl({"timeline", "start"}).status, 0);
  // What is there and no file, such as /dev/null, is not replaced by one; the recording goes on.
  const std::string pipe = daemon.File("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(daemon.Ctl({"timeline", "stop", pipe}).status, 1);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_EQ(daemon.Ctl({"timeline", "mark", "phase slice"}).status, 0);
  const Finished stopped = daemon.Ctl({"timeline", "stop", path});
  EXPECT_EQ(stopped.status, 0) << stopped.output;
  const nlohmann::json timeline = nlohmann::json::parse(ReadWholeFile(path));
  EXPECT_TRUE(timeline["traceEvents"].is_array());
  EXPECT_NE(timeline.dump().find("phase slice"), std::string::npos);
}

TEST_F(SlicectlTest, Edge_AnAnswerThatCannotBeWrittenIsAnError) {
  const std::string command = std::string(SLICECTL) + " --socket " + daemon.socket() + " status";
  EXPECT_EQ(std::system((command + " > /dev/null").c_str()), 0);
  EXPECT_NE(std::system((command + " > /dev/full 2> /dev/null").c_str()), 0);
}

TEST_F(SlicectlTest, Happy_WhatIfOfABoundGraph) {
  const MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK);
  const nlohmann::json sessions = daemon.CtlJson({"tenants"});
  const std::string session = sessions["tenants"][0]["tenant"].dump();
  const Finished unknown = daemon.Ctl({"whatif", "nothing"});
  EXPECT_EQ(unknown.status, 1);
  // The template has no name: '' and its content hash are listed.
  const size_t listed = unknown.output.find("bound are: '' ");
  ASSERT_NE(listed, std::string::npos) << unknown.output;
  const std::string hash = unknown.output.substr(listed + 14, 16);
  const nlohmann::json bound = daemon.CtlJson({"whatif", hash, "--symbol", "8"});
  ASSERT_TRUE(bound.is_object());
  EXPECT_EQ(bound["graph"]["content_hash"], hash);
  EXPECT_EQ(bound["tenant"].dump(), session);
  EXPECT_GT(bound["finish_in_ns"], 0);
  const Finished table = daemon.Ctl(
      {"whatif", hash.substr(0, 8), "--symbol", "8", "--class", "offline", "--tenant", session});
  EXPECT_EQ(table.status, 0) << table.output;
  for (const std::string part : {"binding", "offline", "start", "finish", "CANDIDATE", "cpu0",
                                 "cpu1", "WHY NOT", "SPREAD", "PEAK"})
    EXPECT_NE(table.output.find(part), std::string::npos) << part << " in " << table.output;
  const Finished symbols = daemon.Ctl({"whatif", hash});
  EXPECT_EQ(symbols.status, 1);
  EXPECT_NE(symbols.output.find("--symbol"), std::string::npos) << symbols.output;
  EXPECT_NE(daemon.Ctl({"whatif", hash, "--class", "best"}).status, 0);
  EXPECT_NE(daemon.Ctl({"whatif"}).status, 0);
  EXPECT_EQ(daemon.Ctl({"whatif", hash, "--symbol", "8", "--tenant", "999"}).status, 1);
}

TEST_F(SlicectlTest, Happy_GraphsAndExplainWorkWhileTheDaemonIsStopped) {
  daemon.Signal(SIGSTOP);
  EXPECT_EQ(daemon.Ctl({"graphs"}).status, 0);
  EXPECT_EQ(daemon.CtlJson({"graphs", "--ops"})["pid"], daemon.pid());
  EXPECT_EQ(daemon.Ctl({"explain"}).status, 0);
  daemon.Signal(SIGCONT);
  EXPECT_EQ(daemon.Ctl({"status"}).status, 0);
}

TEST_F(SlicectlTest, Edge_StoppedDaemonIsAClearError) {
  daemon.Signal(SIGSTOP);
  for (const char* what : {"status", "devices", "tenants"}) {
    const Finished finished = daemon.Ctl({what, "--timeout", "0.05"});
    EXPECT_EQ(finished.status, 1);
    for (const std::string& part :
         {"pid " + std::to_string(daemon.pid()), daemon.socket(), std::string("is stopped"),
          "kill -CONT " + std::to_string(daemon.pid()), std::string("slicectl graphs"),
          std::string("--timeout")}) {
      EXPECT_NE(finished.output.find(part), std::string::npos) << part << " in " << finished.output;
    }
  }
  daemon.Signal(SIGCONT);
  EXPECT_EQ(daemon.Ctl({"status"}).status, 0);
}

TEST_F(SlicectlTest, Edge_NoDaemonIsAClearError) {
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0);
  for (const char* what : {"status", "devices", "tenants", "graphs"}) {
    const Finished finished = daemon.Ctl({what});
    EXPECT_EQ(finished.status, 1);
    EXPECT_NE(finished.output.find(daemon.socket()), std::string::npos) << finished.output;
    EXPECT_NE(finished.output.find("sliced --config FILE"), std::string::npos) << finished.output;
  }
}

TEST_F(SlicectlTest, Edge_DaemonKilledLeavesNotesThatDoNotFoolAnybody) {
  daemon.Signal(SIGKILL);
  daemon.Wait();
  const Finished finished = daemon.Ctl({"graphs"});
  EXPECT_EQ(finished.status, 1);
  EXPECT_NE(finished.output.find("is gone"), std::string::npos) << finished.output;
  std::ofstream(daemon.socket() + ".gmg") << "garbage";
  EXPECT_EQ(daemon.Ctl({"graphs"}).status, 1);
  std::ofstream(daemon.socket() + ".gmg") << ::getpid() << " 1\n";  // not a memfd
  EXPECT_EQ(daemon.Ctl({"graphs"}).status, 1);
}

TEST_F(SlicectlTest, Edge_WrongUsage) {
  EXPECT_NE(daemon.Ctl({}).status, 0);
  EXPECT_NE(daemon.Ctl({"nonsense"}).status, 0);
  EXPECT_NE(daemon.Ctl({"policy"}).status, 0);
  EXPECT_NE(daemon.Ctl({"timeline", "stop"}).status, 0);
  for (const char* timeout : {"0", "-1", "nan", "soon"})
    EXPECT_NE(daemon.Ctl({"status", "--timeout", timeout}).status, 0) << timeout;
}

}  // namespace
}  // namespace slice::testing
