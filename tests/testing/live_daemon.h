// LiveDaemon: a real sliced process on a socket in a fresh folder, and slicectl to look at it. For
// tests with real processes. Binaries come from the build (compile definitions SLICED, SLICECTL).
//
// Threads: one. The daemon is stopped with SIGTERM by the destructor; nothing outlives the test.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/clock.h"
#include "common/fd.h"

extern char** environ;

namespace slice::testing {

// Polls until `condition` holds; false only when a minute was not enough.
inline bool Eventually(const std::function<bool()>& condition) {
  const TimeNs end = MonotonicNow() + 60 * kSecond;
  while (!condition()) {
    if (MonotonicNow() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

inline std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "slice-live-XXXXXX").string();
    SLICE_CHECK(::mkdtemp(name.data()) != nullptr, "mkdtemp");
    path_ = name;
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() { std::filesystem::remove_all(path_); }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Starts `arguments` with both outputs in `output_path`.
inline pid_t Spawn(std::vector<std::string> arguments, const std::string& output_path) {
  std::vector<char*> raw;
  for (std::string& argument : arguments) raw.push_back(argument.data());
  raw.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output_path.c_str(),
                                     O_WRONLY | O_CREAT | O_TRUNC, 0600);
  ::posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t pid = -1;
  SLICE_CHECK(::posix_spawn(&pid, raw[0], &actions, nullptr, raw.data(), environ) == 0, raw[0]);
  ::posix_spawn_file_actions_destroy(&actions);
  return pid;
}

struct Finished {
  int status = -1;     // exit status, or 1000 + signal
  std::string output;  // both streams
};
inline int WaitFor(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

class LiveDaemon {
 public:
  explicit LiveDaemon(const std::string& executor, std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {SLICED,   "--socket",      socket(), "--executor",
                                          executor, "--cpu-devices", "2",      "--pool",
                                          "64MiB",  "--retained",    "256MiB"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    pid_ = Spawn(std::move(arguments), log_path());
    const bool ready =
        Eventually([this] { return std::filesystem::exists(socket() + ".gmg") || HasEnded(); });
    SLICE_CHECK(ready && !HasEnded(), ReadWholeFile(log_path()).c_str());
  }
  LiveDaemon(const LiveDaemon&) = delete;
  LiveDaemon& operator=(const LiveDaemon&) = delete;
  ~LiveDaemon() {
    if (pid_ <= 0) return;
    Signal(SIGCONT);
    Signal(SIGTERM);
    WaitFor(pid_);
  }

  std::string socket() const { return folder_.File("sliced.sock"); }
  std::string log_path() const { return folder_.File("sliced.log"); }
  std::string File(const std::string& name) const { return folder_.File(name); }
  pid_t pid() const { return pid_; }
  void Signal(int number) const { ::kill(pid_, number); }
  // After a signal that ends it.
  int Wait() { return WaitFor(std::exchange(pid_, -1)); }

  Finished Ctl(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), {SLICECTL, "--socket", socket()});
    const std::string output = folder_.File("slicectl.out");
    Finished finished;
    finished.status = WaitFor(Spawn(std::move(arguments), output));
    finished.output = ReadWholeFile(output);
    return finished;
  }
  nlohmann::json CtlJson(std::vector<std::string> arguments) const {
    arguments.push_back("--json");
    const Finished finished = Ctl(std::move(arguments));
    return finished.status == 0 ? nlohmann::json::parse(finished.output, nullptr, false)
                                : nlohmann::json();
  }

 private:
  bool HasEnded() {
    if (pid_ <= 0) return true;
    siginfo_t info{};
    return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid != 0;
  }

  TempFolder folder_;
  pid_t pid_ = -1;
};

}  // namespace slice::testing
