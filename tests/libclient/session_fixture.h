// A session of the real libslice.so on a FakeDaemon.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "slice/slice.h"
#include "tests/testing/fake_daemon.h"

namespace slice::testing {

class SessionFixture : public ::testing::Test {
 protected:
  ~SessionFixture() override { slice_session_close(session_); }

  void Start(FakeDaemon::Hooks hooks = {}) {
    daemon_ = std::make_unique<FakeDaemon>(std::move(hooks));
    const slice_session_options_t options = Options();
    ASSERT_EQ(slice_session_open(&options, &session_), SLICE_OK) << slice_last_error();
  }
  slice_session_options_t Options() const {
    slice_session_options_t options{};
    options.size = sizeof options;
    options.socket_path = daemon_->path().c_str();
    options.name = "test";
    options.arena_bytes = 1 << 20;
    return options;
  }
  void Bind() {
    slice_graph_t graph = 0;
    ASSERT_EQ(slice_graph_register(session_, "template", 8, &graph), SLICE_OK)
        << slice_last_error();
    ASSERT_EQ(slice_binding_create(session_, graph, nullptr, 0, &binding_), SLICE_OK)
        << slice_last_error();
  }
  slice_submit_args_t Args() const {
    slice_submit_args_t args{};
    args.size = sizeof args;
    args.binding = binding_;
    return args;
  }
  slice_status_t Submit(slice_ticket_t* ticket) {
    const slice_submit_args_t args = Args();
    return slice_submit(session_, &args, ticket);
  }
  slice_ticket_t MustSubmit() {
    slice_ticket_t ticket = 0;
    EXPECT_EQ(Submit(&ticket), SLICE_OK) << slice_last_error();
    return ticket;
  }
  std::vector<slice_tensor_t> AllocTensors(size_t count,
                                           std::vector<const void*>* views = nullptr) {
    slice_tensor_spec_t spec{};
    spec.size = sizeof spec;
    spec.dtype = SLICE_DTYPE_FLOAT32;
    spec.dim_count = 2;
    spec.sizes[0] = 4;
    spec.sizes[1] = 8;
    const std::vector<slice_tensor_spec_t> specs(count, spec);
    std::vector<slice_tensor_t> handles(count);
    if (views != nullptr) views->resize(count);
    EXPECT_EQ(slice_tensor_alloc(session_, specs.data(), count, handles.data(),
                                 views == nullptr ? nullptr : views->data()),
              SLICE_OK)
        << slice_last_error();
    return handles;
  }
  // Hook that completes nothing by itself.
  static FakeDaemon::Hooks Silent() {
    return {.submit = [](const FakeDaemon::Submit&) { return std::nullopt; }};
  }

  std::unique_ptr<FakeDaemon> daemon_;
  slice_session_t* session_ = nullptr;
  slice_binding_t binding_ = 0;
};

inline void ExpectErrorContains(const std::string& part) {
  EXPECT_NE(std::string(slice_last_error()).find(part), std::string::npos) << slice_last_error();
}

}  // namespace slice::testing
