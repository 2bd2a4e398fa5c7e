// The command line of slice-replay.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

namespace slice::replay {
namespace {

struct Finished {
  int status = -1;
  std::string output;  // both streams
};

Finished Replay(const std::string& arguments) {
  const std::string command = std::string(SLICE_REPLAY) + " " + arguments + " 2>&1";
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  Finished finished;
  if (pipe == nullptr) return finished;
  char buffer[4096];
  while (const size_t got = std::fread(buffer, 1, sizeof buffer, pipe))
    finished.output.append(buffer, got);
  const int status = ::pclose(pipe);
  if (WIFEXITED(status)) finished.status = WEXITSTATUS(status);
  return finished;
}

class ReplayCommand : public ::testing::Test {
 protected:
  ReplayCommand() {
    std::string name = (std::filesystem::temp_directory_path() / "slice-replay-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    std::ofstream file(profile());
    file << "time_stats.send_recv.min,time_stats.send_recv.max,time_stats.send_recv.mean,"
            "time_stats.send_recv.std,size,num_workers,devices_per_node\n";
    for (int i = 1; i <= 40; ++i)
      file << i << "," << i + 1 << "," << i + .5 << ",.1," << i << "000,2,8\n";
  }
  ~ReplayCommand() override { std::filesystem::remove_all(folder_); }
  std::string profile() const { return folder_ + "/p.csv"; }

 private:
  std::string folder_;
};

TEST_F(ReplayCommand, Happy_AProfileGivesATable) {
  const Finished finished = Replay("estimators --profile " + profile());
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_NE(finished.output.find("2 workers, 8 per node"), std::string::npos) << finished.output;
}

TEST_F(ReplayCommand, Edge_NumbersThatMeanNothingAreRefused) {
  for (const std::string option :
       {"--seed -1", "--seed 1.5", "--folds 1", "--folds -2", "--flops-per-second nan",
        "--flops-per-second 0", "--flops-per-second inf", "--bytes-per-second -1"}) {
    const Finished finished = Replay("estimators --profile " + profile() + " " + option);
    EXPECT_EQ(finished.status, 2) << option << ": " << finished.output;
    EXPECT_NE(finished.output.find(option.substr(0, option.find(' '))), std::string::npos)
        << option << ": " << finished.output;
  }
}

TEST_F(ReplayCommand, Edge_WhatCannotBeWrittenIsAnError) {
  EXPECT_EQ(Replay("estimators --json /nonexistent/f --profile " + profile()).status, 1);
  EXPECT_EQ(Replay("estimators --profile " + profile() + " > /dev/full").status, 1);
}

TEST_F(ReplayCommand, Happy_HelpTellsUnits) {
  const Finished finished = Replay("estimators --help");
  EXPECT_EQ(finished.status, 0);
  for (const char* const unit : {"in ms", "FLOP/s", "bytes/s", "percent"})
    EXPECT_NE(finished.output.find(unit), std::string::npos) << unit << " in " << finished.output;
}

}  // namespace
}  // namespace slice::replay
