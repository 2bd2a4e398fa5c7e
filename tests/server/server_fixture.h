// A Server with a StubEngine and a fake-executor process, on a thread of its own and a socket in a
// fresh folder.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "common/clock.h"
#include "common/log.h"
#include "daemon/server/server.h"
#include "tests/testing/raw_tenant.h"
#include "tests/testing/stub_engine.h"
#include "tests/testing/template_builder.h"

namespace slice::server {

// Polls until `condition` holds. No test depends on how long that takes.
inline bool Eventually(const std::function<bool()>& condition) {
  const TimeNs end = MonotonicNow() + 30 * kSecond;
  while (!condition()) {
    if (MonotonicNow() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "slice-server-XXXXXX").string();
    SLICE_CHECK(::mkdtemp(name.data()) != nullptr, "mkdtemp");
    path_ = name;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

class ServerFixture : public ::testing::Test {
 protected:
  ServerFixture() : config(DefaultConfig(2, 64 * kMiB, 256 * kMiB).value()) {
    config.socket_path = folder.File("sliced.sock");
    config.log_level = LogLevel::kError;
    SLICE_CHECK(OpenLog("", LogLevel::kError).ok(), "log");
    ::setenv("FAKE_EXECUTOR_LOG", folder.File("executor.log").c_str(), 1);
  }
  ~ServerFixture() override { Stop(); }

  void Start() {
    const Status status = TryStart();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  // The executor must be started by the thread that runs the server: it dies with it.
  Status TryStart() {
    std::mutex mutex;
    std::condition_variable changed;
    bool ready = false;
    Status status;
    thread_ = std::thread([&] {
      Server::Parts parts;
      parts.gmg_bytes = 4096;
      parts.launcher = std::make_unique<ZygoteLauncher>(FAKE_EXECUTOR);
      parts.engine_factory = [this](const engine::Config&, std::span<std::byte>,
                                    engine::Sink* sink) -> Result<std::unique_ptr<engine::Engine>> {
        return std::unique_ptr<engine::Engine>(
            std::make_unique<testing::StubEngine>(&control, sink));
      };
      auto made = Server::Create(config, std::move(parts));
      std::unique_ptr<Server> server;
      {
        std::lock_guard lock(mutex);
        status = made.status();
        if (made.ok()) server = std::move(*made);
        server_ = server.get();
        ready = true;
        changed.notify_one();
      }
      if (server != nullptr) server->Run();
    });
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return ready; });
    return status;
  }
  void Stop() {
    if (!thread_.joinable()) return;
    if (server_ != nullptr) server_->RequestStop();
    thread_.join();
    server_ = nullptr;
  }

  testing::RawTenant Connect() { return testing::RawTenant(config.socket_path); }
  testing::RawTenant Open() {
    testing::RawTenant tenant(config.socket_path);
    const auto reply = tenant.Hello();
    SLICE_CHECK(reply.has_value() && reply->status() == SLICE_OK, "Hello");
    return tenant;
  }
  size_t LogCount(const std::string& word) const {
    const std::string log = ReadFile(folder.File("executor.log"));
    size_t count = 0;
    for (size_t at = log.find(word); at != std::string::npos; at = log.find(word, at + 1)) ++count;
    return count;
  }
  // One op, one 4x4 input, one 4x4 output; `model` is its name.
  static std::string SmallTemplate(const std::string& model = "small") {
    testing::TemplateBuilder builder;
    const uint32_t x = builder.Value({4, 4});
    builder.Input("x", proto::Input::DYNAMIC, x);
    const uint32_t y = builder.Value({4, 4});
    builder.Node("aten::relu", {{"self", x}}, {y});
    proto::Group* group = builder.Group("layer");
    group->add_inputs(x);
    group->add_outputs(y);
    builder.Output(y);
    builder.program.mutable_metadata()->set_model(model);
    return builder.Serialize();
  }
  static std::vector<wire::Argument> SmallArguments(uint64_t in = 0, uint64_t out = 64) {
    return {{wire::kArgArena, in, 64}, {wire::kArgArena, out, 64}};
  }

  TempFolder folder;
  ServerConfig config;
  testing::StubEngine::Control control;

 private:
  std::thread thread_;
  Server* server_ = nullptr;
};

}  // namespace slice::server
