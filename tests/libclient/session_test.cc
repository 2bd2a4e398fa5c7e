// Opening sessions, arena, tensors, graphs: what goes over the control socket.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>

#include "tests/libclient/session_fixture.h"

namespace slice::testing {
namespace {

class SessionTest : public SessionFixture {};

TEST_F(SessionTest, Happy_OpenReportsLimits) {
  Start();
  slice_session_limits_t limits{};
  limits.size = sizeof limits;
  ASSERT_EQ(slice_session_limits(session_, &limits), SLICE_OK);
  EXPECT_EQ(limits.service_class, SLICE_CLASS_ONLINE);
  EXPECT_EQ(limits.queue_slots, wire::kRingSlots);
  EXPECT_EQ(limits.arena_bytes, uint64_t{1} << 20);
  EXPECT_EQ(limits.daemon_epoch, 42u);
  EXPECT_EQ(limits.device_count, 2u);
  EXPECT_EQ(limits.session_number, 7u);
  EXPECT_EQ(daemon_->requests().at(0).hello().name(), "test");
  EXPECT_EQ(daemon_->requests().at(0).hello().ring_version(), wire::kTenantRingVersion);
}

TEST_F(SessionTest, Happy_DefaultsComeFromTheEnvironment) {
  FakeDaemon daemon;
  ::setenv("SLICE_SOCKET", daemon.path().c_str(), 1);
  const slice_status_t status = slice_session_open(nullptr, &session_);
  ::unsetenv("SLICE_SOCKET");
  ASSERT_EQ(status, SLICE_OK) << slice_last_error();
  EXPECT_EQ(daemon.requests().at(0).hello().arena_bytes(), uint64_t{64} << 20);
  EXPECT_NE(daemon.requests().at(0).hello().name(), "");
  slice_session_close(session_);
  session_ = nullptr;
}

TEST_F(SessionTest, Edge_NoDaemonIsDaemonLostAndWritesNothing) {
  slice_session_options_t options{};
  options.size = sizeof options;
  options.socket_path = "/nonexistent/sliced.sock";
  auto* const marker = reinterpret_cast<slice_session_t*>(&options);
  slice_session_t* session = marker;
  EXPECT_EQ(slice_session_open(&options, &session), SLICE_ERR_DAEMON_LOST);
  EXPECT_EQ(session, marker);
  ExpectErrorContains("slice_session_open: ");
  ExpectErrorContains("/nonexistent/sliced.sock");
  ExpectErrorContains("sliced --config FILE");
}

TEST_F(SessionTest, Edge_WrongOptionsAreInvalid) {
  daemon_ = std::make_unique<FakeDaemon>();
  const auto open = [this](auto change) {
    slice_session_options_t options = Options();
    change(&options);
    slice_session_t* session = nullptr;
    return slice_session_open(&options, &session);
  };
  EXPECT_EQ(open([](auto* o) { o->size = 0; }), SLICE_ERR_INVALID);
  ExpectErrorContains("sizeof(slice_session_options_t)");
  EXPECT_EQ(open([](auto* o) { o->service_class = 3; }), SLICE_ERR_INVALID);
  EXPECT_EQ(open([](auto* o) { o->reserved = 1; }), SLICE_ERR_INVALID);
  EXPECT_EQ(open([](auto* o) { o->weight = -1; }), SLICE_ERR_INVALID);
  EXPECT_EQ(open([](auto* o) { o->weight = std::nan(""); }), SLICE_ERR_INVALID);
  EXPECT_EQ(open([](auto* o) { o->arena_bytes = UINT64_MAX; }), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_session_open(nullptr, nullptr), SLICE_ERR_INVALID);
  EXPECT_TRUE(daemon_->requests().empty());
}

TEST_F(SessionTest, Edge_DaemonOfAnotherMajorIsVersion) {
  daemon_ = std::make_unique<FakeDaemon>(
      FakeDaemon::Hooks{.reply = [](const proto::Request&, proto::Reply* reply, std::vector<Fd>*) {
        reply->mutable_hello()->set_abi_major(SLICE_ABI_MAJOR + 1);
      }});
  const slice_session_options_t options = Options();
  EXPECT_EQ(slice_session_open(&options, &session_), SLICE_ERR_VERSION);
  ExpectErrorContains("ABI 2.0, this libslice speaks 1.0");
}

TEST_F(SessionTest, Edge_RefusalOfTheDaemonKeepsItsText) {
  daemon_ = std::make_unique<FakeDaemon>(FakeDaemon::Hooks{
      .reply = [](const proto::Request&, proto::Reply* reply, std::vector<Fd>* fds) {
        reply->clear_kind();
        fds->clear();
        reply->set_status(SLICE_ERR_VERSION);
        reply->set_text("ring version 1, this daemon needs 2");
      }});
  const slice_session_options_t options = Options();
  EXPECT_EQ(slice_session_open(&options, &session_), SLICE_ERR_VERSION);
  ExpectErrorContains("ring version 1, this daemon needs 2");
}

TEST_F(SessionTest, Malicious_HelloReplyWithoutDescriptorsIsProtocol) {
  daemon_ = std::make_unique<FakeDaemon>(
      FakeDaemon::Hooks{.reply = [](const proto::Request&, proto::Reply*, std::vector<Fd>* fds) {
        fds->pop_back();
      }});
  const slice_session_options_t options = Options();
  EXPECT_EQ(slice_session_open(&options, &session_), SLICE_ERR_PROTOCOL);
}

TEST_F(SessionTest, Malicious_DaemonRingThatIsTooSmallIsProtocol) {
  daemon_ = std::make_unique<FakeDaemon>(
      FakeDaemon::Hooks{.reply = [](const proto::Request&, proto::Reply*, std::vector<Fd>* fds) {
        (*fds)[0] = CreateMemfd("small", 4096).value();
      }});
  const slice_session_options_t options = Options();
  EXPECT_EQ(slice_session_open(&options, &session_), SLICE_ERR_PROTOCOL);
}

TEST_F(SessionTest, Edge_NullSessionIsInvalidEverywhere) {
  uint64_t out = 0;
  slice_completion_t completion{};
  EXPECT_EQ(slice_arena_alloc(nullptr, 1, &out, nullptr), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_wait(nullptr, 1, 0, &completion), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_cancel(nullptr, 1), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_tensor_reset(nullptr, &out, 1, nullptr), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_session_fd(nullptr), -1);
  slice_session_close(nullptr);
  ExpectErrorContains("session is NULL");
}

TEST_F(SessionTest, Happy_ArenaSlotsAreWritable) {
  Start();
  uint64_t offset = 1;
  void* pointer = nullptr;
  ASSERT_EQ(slice_arena_alloc(session_, 100, &offset, &pointer), SLICE_OK);
  EXPECT_EQ(offset % 64, 0u);
  std::memset(pointer, 0xab, 100);
  EXPECT_EQ(slice_arena_free(session_, offset), SLICE_OK);
  EXPECT_EQ(slice_arena_free(session_, offset), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_arena_alloc(session_, 2 << 20, &offset, &pointer), SLICE_ERR_NO_MEMORY);
}

class SessionTensorTest : public SessionFixture {
 protected:
  static slice_tensor_spec_t Spec(uint64_t offset, const char* name = "w") {
    slice_tensor_spec_t spec{};
    spec.size = sizeof spec;
    spec.name = name;
    spec.dtype = SLICE_DTYPE_FLOAT32;
    spec.dim_count = 1;
    spec.sizes[0] = 16;
    spec.offset = offset;
    return spec;
  }
};

TEST_F(SessionTensorTest, Happy_ImportSendsKindsSpecsAndGivesHandles) {
  Start();
  const Fd memfd = CreateMemfd("weights", 4096).value();
  const slice_tensor_spec_t specs[] = {Spec(0), Spec(64, "bad\xff")};
  slice_tensor_t handles[2] = {};
  ASSERT_EQ(slice_tensor_import(session_, memfd.get(), SLICE_TENSOR_MUTABLE, specs, 2, handles),
            SLICE_OK)
      << slice_last_error();
  EXPECT_NE(handles[0], 0u);
  EXPECT_NE(handles[0], handles[1]);
  const proto::ImportTensors sent = daemon_->requests().back().import_tensors();
  EXPECT_EQ(sent.kind(), proto::IMPORTED_MUTABLE);
  EXPECT_EQ(sent.segment_bytes(), 4096u);
  EXPECT_EQ(sent.tensors(1).name(), "bad?");
  EXPECT_EQ(sent.tensors(1).offset(), 64u);
  EXPECT_TRUE(sent.tensors(1).strides().empty());
  EXPECT_EQ(slice_tensor_replicate(session_, handles, 2, nullptr, 0), SLICE_OK);
  EXPECT_EQ(slice_tensor_release(session_, handles, 2), SLICE_OK);
  EXPECT_EQ(slice_tensor_release(session_, handles, 2), SLICE_ERR_STALE);
}

TEST_F(SessionTensorTest, Happy_ThousandsOfTensorsFitOneMessage) {
  Start();
  const size_t count = 2000;
  const Fd memfd = CreateMemfd("weights", count * 64).value();
  const std::string name(300, 'n');
  std::vector<slice_tensor_spec_t> specs;
  for (size_t i = 0; i < count; ++i) specs.push_back(Spec(i * 64, name.c_str()));
  std::vector<slice_tensor_t> handles(count);
  EXPECT_EQ(slice_tensor_import(session_, memfd.get(), SLICE_TENSOR_CONSTANT, specs.data(), count,
                                handles.data()),
            SLICE_OK)
      << slice_last_error();
}

TEST_F(SessionTensorTest, Edge_ImportChecksTheMemfd) {
  Start();
  slice_tensor_t handle = 0;
  const slice_tensor_spec_t spec = Spec(0);
  EXPECT_EQ(slice_tensor_import(session_, -1, SLICE_TENSOR_CONSTANT, &spec, 1, &handle),
            SLICE_ERR_INVALID);
  const Fd unsealed(::memfd_create("unsealed", MFD_ALLOW_SEALING));
  EXPECT_EQ(slice_tensor_import(session_, unsealed.get(), SLICE_TENSOR_CONSTANT, &spec, 1, &handle),
            SLICE_ERR_INVALID);
  ExpectErrorContains("F_SEAL_SHRINK");
  const Fd small = CreateMemfd("small", 63).value();
  EXPECT_EQ(slice_tensor_import(session_, small.get(), SLICE_TENSOR_CONSTANT, &spec, 1, &handle),
            SLICE_ERR_BOUNDS);
  ExpectErrorContains("63 bytes");
  EXPECT_EQ(slice_tensor_import(session_, small.get(), 3, &spec, 1, &handle), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_tensor_import(session_, small.get(), SLICE_TENSOR_CONSTANT, nullptr, 1, &handle),
            SLICE_ERR_INVALID);
  EXPECT_EQ(handle, 0u);
}

TEST_F(SessionTensorTest, Happy_ManagedTensorsAreVisibleReadOnly) {
  Start();
  std::vector<const void*> views;
  const auto handles = AllocTensors(3, &views);
  for (const void* view : views) EXPECT_EQ(static_cast<const float*>(view)[31], 0.0f);
  EXPECT_EQ(slice_tensor_release(session_, handles.data(), 2), SLICE_OK);
  EXPECT_EQ(static_cast<const float*>(views[2])[0], 0.0f);  // the last one keeps the mapping
  EXPECT_EQ(slice_tensor_release(session_, &handles[2], 1), SLICE_OK);
}

TEST_F(SessionTensorTest, Malicious_TensorsReplyWithTooFewHandlesIsProtocolAndFinal) {
  Start({.reply = [](const proto::Request& request, proto::Reply* reply, std::vector<Fd>*) {
    if (request.has_import_tensors()) reply->mutable_tensors()->clear_handles();
  }});
  const Fd memfd = CreateMemfd("weights", 4096).value();
  const slice_tensor_spec_t spec = Spec(0);
  slice_tensor_t handle = 0;
  EXPECT_EQ(slice_tensor_import(session_, memfd.get(), SLICE_TENSOR_CONSTANT, &spec, 1, &handle),
            SLICE_ERR_PROTOCOL);
  EXPECT_EQ(slice_graph_unregister(session_, 1), SLICE_ERR_PROTOCOL);
  uint64_t offset = 0;
  EXPECT_EQ(slice_arena_alloc(session_, 1, &offset, nullptr), SLICE_ERR_PROTOCOL);
}

TEST_F(SessionTensorTest, Malicious_ManagedOffsetOutsideItsSegmentIsProtocol) {
  Start({.reply = [](const proto::Request& request, proto::Reply* reply, std::vector<Fd>*) {
    if (request.has_alloc_tensors()) reply->mutable_tensors()->set_offsets(0, UINT64_MAX - 8);
  }});
  const slice_tensor_spec_t spec = Spec(0);
  slice_tensor_t handle = 0;
  const void* view = nullptr;
  EXPECT_EQ(slice_tensor_alloc(session_, &spec, 1, &handle, &view), SLICE_ERR_PROTOCOL);
  EXPECT_EQ(view, nullptr);
}

TEST_F(SessionTest, Happy_TemplateTravelsInASealedMemfd) {
  std::atomic<bool> seen = false;
  Start({.reply = [&](const proto::Request& request, proto::Reply*, std::vector<Fd>*) {
    if (request.has_register_graph()) seen = request.register_graph().bytes() == 8;
  }});
  Bind();
  EXPECT_TRUE(seen);
  EXPECT_EQ(slice_binding_destroy(session_, binding_), SLICE_OK);
  slice_ticket_t ticket = 0;
  EXPECT_EQ(Submit(&ticket), SLICE_ERR_STALE);
}

TEST_F(SessionTest, Edge_GraphArgumentsAreChecked) {
  Start();
  slice_graph_t graph = 0;
  EXPECT_EQ(slice_graph_register(session_, nullptr, 8, &graph), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_graph_register(session_, "x", 0, &graph), SLICE_ERR_INVALID);
  EXPECT_EQ(slice_graph_register(session_, "x", 1, nullptr), SLICE_ERR_INVALID);
  slice_binding_t binding = 0;
  EXPECT_EQ(slice_binding_create(session_, 1, nullptr, 1, &binding), SLICE_ERR_INVALID);
  const slice_tensor_t unknown = 99;
  EXPECT_EQ(slice_binding_create(session_, 1, &unknown, 1, &binding), SLICE_ERR_STALE);
}

TEST_F(SessionTest, Happy_NamesAndRetryableOfEveryStatus) {
  EXPECT_STREQ(slice_status_name(SLICE_OK), "SLICE_OK");
  EXPECT_STREQ(slice_status_name(SLICE_ERR_STATE_LOST), "SLICE_ERR_STATE_LOST");
  EXPECT_STREQ(slice_status_name(static_cast<slice_status_t>(31)), "SLICE_ERR_UNKNOWN");
  for (int code = SLICE_OK; code <= SLICE_ERR_TIMEOUT; ++code) {
    const auto status = static_cast<slice_status_t>(code);
    EXPECT_EQ(std::string(slice_status_name(status)).find("UNKNOWN"), std::string::npos) << code;
  }
  EXPECT_EQ(slice_status_is_retryable(SLICE_ERR_WOULD_BLOCK), 1);
  EXPECT_EQ(slice_status_is_retryable(SLICE_ERR_EXECUTOR_LOST), 1);
  EXPECT_EQ(slice_status_is_retryable(SLICE_ERR_INVALID), 0);
  EXPECT_EQ(slice_status_is_retryable(SLICE_ERR_STATE_LOST), 0);
  EXPECT_EQ(slice_abi_version(), uint32_t{SLICE_ABI_MAJOR} << 16 | SLICE_ABI_MINOR);
}

}  // namespace
}  // namespace slice::testing
