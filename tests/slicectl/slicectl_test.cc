// slicectl against a live sliced whose executor is the torch-free double.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstdlib>
#include <cstring>
#include <fstream>

#include "tests/integration/mlp_tenant.h"
#include "tests/testing/live_daemon.h"

namespace slice::testing {
namespace {

constexpr const char* kCommands[] = {"status",  "devices", "tenants", "estimators", "graphs",
                                     "explain", "whatif",  "policy",  "timeline"};

class SlicectlTest : public ::testing::Test {
 protected:
  LiveDaemon daemon{FAKE_EXECUTOR, {"--log-level", "error"}};
};

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

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
  EXPECT_EQ(daemon.Ctl({"whatif", hash, "--symbol", "8", "--tenant", "999"}).status, 1);
}

TEST_F(SlicectlTest, Happy_StatusShowsRequestsByClass) {
  MlpTenant tenant(daemon.socket(), {.service_class = SLICE_CLASS_ONLINE});
  ASSERT_EQ(tenant.status(), SLICE_OK);
  ASSERT_EQ(tenant.Run(1), SLICE_OK);
  const Finished status = daemon.Ctl({"status"});
  for (const std::string& part : {"pid " + std::to_string(daemon.pid()), daemon.socket(),
                                  std::string("executor"), std::string("policy          slice"),
                                  std::string("SUBMITS"), std::string("\nonline         1     1")})
    EXPECT_TRUE(Has(status.output, part)) << part << " in " << status.output;
}

TEST_F(SlicectlTest, Happy_TenantsShowTheWeightAsANumber) {
  const MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK);
  const double weight = daemon.CtlJson({"tenants"})["tenants"][0]["weight"];
  EXPECT_EQ(weight, 1e6);  // what a daemon without a config grants
  const Finished table = daemon.Ctl({"tenants"});
  EXPECT_TRUE(Has(table.output, " 1000000 ")) << table.output;
}

TEST_F(SlicectlTest, Happy_GraphsShowTheHashThatWhatIfTakes) {
  const MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK);
  const nlohmann::json graphs = daemon.CtlJson({"graphs"});
  ASSERT_EQ(graphs["templates"].size(), 1u) << graphs;
  const std::string hash = graphs["templates"][0]["content_hash"];
  ASSERT_EQ(hash.size(), 16u);
  EXPECT_EQ(daemon.CtlJson({"whatif", hash, "--symbol", "8"})["graph"]["content_hash"], hash);
  const Finished table = daemon.Ctl({"graphs"});
  EXPECT_TRUE(Has(table.output, hash)) << table.output;
  EXPECT_TRUE(Has(table.output, "1 graph, 0 instances")) << table.output;
}

TEST_F(SlicectlTest, Happy_ExplainNamesDevicesAndWhatDecided) {
  MlpTenant pinned(daemon.socket(), {.service_class = SLICE_CLASS_ONLINE, .home = "cpu1"});
  ASSERT_EQ(pinned.status(), SLICE_OK);
  ASSERT_EQ(pinned.Run(1), SLICE_OK);
  const Finished one = daemon.Ctl({"explain"});
  EXPECT_TRUE(Has(one.output, "one device  cpu1")) << one.output;
  EXPECT_FALSE(Has(one.output, "levels")) << one.output;
  EXPECT_FALSE(Has(one.output, " 0 ms")) << "no lateness: nothing was simulated\n" << one.output;
  nlohmann::json decision = daemon.CtlJson({"explain", "-n", "1"})["decisions"][0];
  EXPECT_EQ(decision["by"], "one device");
  EXPECT_EQ(decision["device_name"], "cpu1");
  EXPECT_FALSE(decision["candidates"][0].contains("lateness_ms"));

  MlpTenant anywhere(daemon.socket(), {.service_class = SLICE_CLASS_ONLINE, .replicate = true});
  ASSERT_EQ(anywhere.status(), SLICE_OK);
  const auto last = [&](MlpTenant* tenant) {
    EXPECT_EQ(tenant->Run(1), SLICE_OK);
    return daemon.CtlJson({"explain", "-n", "1"})["decisions"][0];
  };
  // Until both replicas are there, one device is all it can use.
  ASSERT_TRUE(Eventually([&] { return (decision = last(&anywhere))["by"] == "levels"; }));
  EXPECT_EQ(decision["candidates"].size(), 2u);
  for (const char* const key : {"feasible", "lateness_ms", "online_added_percent",
                                "finish_added_percent", "bytes_moved", "queued_ms", "beaten"})
    EXPECT_TRUE(decision["candidates"][0].contains(key)) << key;
  const std::string levels = daemon.Ctl({"explain", "-n", "1"}).output;
  for (const char* const part : {"levels", "cpu0", "cpu1", "0 ms", "0 %"})
    EXPECT_TRUE(Has(levels, part)) << part << " in " << levels;

  ASSERT_EQ(daemon.Ctl({"policy", "set", "fifo"}).status, 0);
  decision = last(&anywhere);
  EXPECT_EQ(decision["by"], "queue");
  EXPECT_FALSE(decision["candidates"][0].contains("lateness_ms"));
  const std::string queue = daemon.Ctl({"explain", "-n", "1"}).output;
  EXPECT_FALSE(Has(queue, std::to_string(kNever / kSecond).substr(0, 6))) << queue;
}

TEST_F(SlicectlTest, Happy_EstimatorsNameTheKindOfDevice) {
  MlpTenant tenant(daemon.socket());
  ASSERT_EQ(tenant.status(), SLICE_OK);
  ASSERT_EQ(tenant.Run(1), SLICE_OK);
  EXPECT_EQ(daemon.CtlJson({"estimators"})["signatures"][0]["device_kind"], "cpu");
  const Finished table = daemon.Ctl({"estimators"});
  EXPECT_TRUE(Has(table.output, "  cpu   ")) << table.output;
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
  // Times below a millisecond are not 0.
  EXPECT_FALSE(Has(daemon.Ctl({"status", "--timeout", "0.001"}).output, " 0 ms"));
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

TEST_F(SlicectlTest, Edge_WrongUsageIsStatus2AndSaysWhatThereIs) {
  const auto refused = [&](std::vector<std::string> arguments,
                           const std::vector<std::string>& parts) {
    const Finished finished = daemon.Ctl(arguments);
    EXPECT_EQ(finished.status, 2) << finished.output;
    for (const std::string& part : parts)
      EXPECT_TRUE(Has(finished.output, part)) << part << " in " << finished.output;
  };
  refused({}, {"a command is missing", "status", "`slicectl --help`"});
  refused({"nonsense"}, {"no command 'nonsense'", "status", "explain", "timeline"});
  refused({"policy"}, {"`slicectl policy --help`"});
  refused({"policy", "got"}, {"no command 'got'", "get, set", "`slicectl policy --help`"});
  refused({"timeline", "stop"}, {"FILE", "`slicectl timeline stop --help`"});
  refused({"status", "extra"}, {"extra"});
  refused({"whatif"}, {"GRAPH"});
  refused({"whatif", "x", "--class", "best"}, {"online"});
  refused({"whatif", "x", "--tenant", "-1"}, {"--tenant"});
  for (const char* const count : {"0", "-1", "many"})
    refused({"explain", "-n", count}, {"--count"});
  for (const char* const timeout : {"0", "-1", "nan", "soon"})
    refused({"status", "--timeout", timeout}, {"--timeout"});
}

TEST_F(SlicectlTest, Happy_HelpTellsUnitsAndWhatEveryCommandTakes) {
  const Finished whole = daemon.Ctl({"--help"});
  EXPECT_EQ(whole.status, 0);
  for (const char* const command : kCommands) {
    EXPECT_TRUE(Has(whole.output, command)) << command << " in " << whole.output;
    const Finished help = daemon.Ctl({command, "--help"});
    EXPECT_EQ(help.status, 0) << command;
    for (const char* const part : {"Usage: slicectl ", "--socket", "--json", "--timeout SECONDS"})
      EXPECT_TRUE(Has(help.output, part)) << part << " in " << help.output;
  }
  for (const char* const command : {"devices", "tenants", "estimators", "explain", "whatif"})
    EXPECT_TRUE(Has(daemon.Ctl({command, "--help"}).output, "B to TiB") ||
                Has(daemon.Ctl({command, "--help"}).output, "powers of 1024"))
        << command;
}

TEST_F(SlicectlTest, Edge_AnotherProgramsSocketIsAClearError) {
  const std::string path = daemon.File("other.sock");
  const Fd other(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  ASSERT_LT(path.size(), sizeof address.sun_path);
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  ASSERT_EQ(::bind(other.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(other.get(), 1), 0);
  const Finished finished = daemon.Ctl({"--socket", path, "status"});
  EXPECT_EQ(finished.status, 1);
  EXPECT_TRUE(Has(finished.output, "another program's socket")) << finished.output;
}

}  // namespace
}  // namespace slice::testing
