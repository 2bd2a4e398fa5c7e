// libclient/examples/run_template.c as a process of its own.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "slice/proto/template.pb.h"
#include "tests/testing/fake_daemon.h"

namespace slice::testing {
namespace {

constexpr size_t kIn = 16;
constexpr size_t kHidden = 32;
constexpr size_t kOut = 8;

// Computes the golden MLP, times `factor`.
class MlpDaemon {
 public:
  explicit MlpDaemon(float factor)
      : factor_(factor),
        daemon_({.received = [this](const proto::Request& request,
                                    const std::vector<Fd>& fds) { Receive(request, fds); },
                 .submit = [this](const FakeSubmit& submit) { return Run(submit); }}) {}

  int RunExample(const std::string& rows) {
    const std::string command =
        std::string(RUN_TEMPLATE) + " " + daemon_.path() + " " + MLP_TEMPLATE + " " + rows;
    const int status = std::system(command.c_str());
    daemon_.Settle();  // what its thread wrote is ours to read
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  const proto::GraphTemplate& graph() const { return graph_; }

 private:
  void Receive(const proto::Request& request, const std::vector<Fd>& fds) {
    if (request.has_import_tensors()) {
      weights_ = Mapping::Map(fds.at(0), request.import_tensors().segment_bytes(), false).value();
    } else if (request.has_register_graph()) {
      const size_t bytes = request.register_graph().bytes();
      const Mapping content = Mapping::Map(fds.at(0), bytes, false).value();
      SLICE_CHECK(graph_.ParseFromArray(content.data(), static_cast<int>(bytes)), "template");
    }
  }
  std::optional<wire::CompletionSlot> Run(const FakeSubmit& submit) const {
    const auto rows = static_cast<size_t>(submit.arguments.at(0).offset);
    SLICE_CHECK(submit.arguments.at(1).bytes == rows * kIn * sizeof(float), "input bytes");
    SLICE_CHECK(submit.arguments.at(2).bytes == rows * kOut * sizeof(float), "output bytes");
    const auto* x =
        reinterpret_cast<const float*>(submit.arena.data() + submit.arguments[1].offset);
    auto* y = reinterpret_cast<float*>(submit.arena.data() + submit.arguments[2].offset);
    const auto* w1 = weights_.as<float>();
    const auto* w2 = w1 + kIn * kHidden;
    for (size_t r = 0; r < rows; ++r) {
      for (size_t o = 0; o < kOut; ++o) {
        float out = 0;
        for (size_t h = 0; h < kHidden; ++h) {
          float hidden = 0;
          for (size_t i = 0; i < kIn; ++i) hidden += x[r * kIn + i] * w1[i * kHidden + h];
          out += std::max(hidden, 0.0f) * w2[h * kOut + o];
        }
        y[r * kOut + o] = out * factor_;
      }
    }
    return FakeDaemon::Completion(submit.slot.cookie);
  }

  const float factor_;
  Mapping weights_;
  proto::GraphTemplate graph_;
  FakeDaemon daemon_;  // last: its thread uses the others
};

TEST(ExampleTest, Happy_RightNumbersExitZero) {
  MlpDaemon daemon(1.0f);
  EXPECT_EQ(daemon.RunExample("5"), 0);
  EXPECT_EQ(daemon.RunExample("64"), 0);
  EXPECT_EQ(daemon.graph().operators(0), "aten::mm");
}

TEST(ExampleTest, Edge_WrongNumbersExitOne) { EXPECT_EQ(MlpDaemon(1.01f).RunExample("5"), 1); }

TEST(ExampleTest, Edge_UsageExitsTwo) { EXPECT_EQ(MlpDaemon(1.0f).RunExample("65"), 2); }

}  // namespace
}  // namespace slice::testing
