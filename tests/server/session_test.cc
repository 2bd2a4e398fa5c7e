// Control messages of tenants: handshake, limits, handles, and what a hostile one can send.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "tests/server/server_fixture.h"

namespace slice::server {
namespace {

using testing::RawTenant;

class SessionTest : public ServerFixture {
 protected:
  static proto::Request Alloc(std::initializer_list<int64_t> sizes) {
    proto::Request request;
    proto::TensorSpec* spec = request.mutable_alloc_tensors()->add_tensors();
    spec->set_name("kv");
    spec->set_dtype(proto::FLOAT32);
    for (const int64_t size : sizes) spec->add_sizes(size);
    return request;
  }
  static proto::Request Register(uint64_t bytes) {
    proto::Request request;
    request.mutable_register_graph()->set_bytes(bytes);
    return request;
  }
};

TEST_F(SessionTest, Happy_HelloTellsLimitsAndHandsOutRings) {
  Start();
  RawTenant tenant = Connect();
  proto::Request hello = RawTenant::HelloRequest();
  hello.mutable_hello()->set_home_device("cpu1");
  hello.mutable_hello()->set_service_class(SLICE_CLASS_ONLINE);
  const auto reply = tenant.Hello(hello);
  ASSERT_TRUE(reply.has_value());
  ASSERT_EQ(reply->status(), SLICE_OK) << reply->text();
  EXPECT_EQ(reply->hello().home_device(), "cpu1");
  EXPECT_EQ(reply->hello().service_class(), SLICE_CLASS_ONLINE);
  EXPECT_EQ(reply->hello().devices_size(), 2);
  EXPECT_NE(reply->hello().daemon_epoch(), 0u);
}

TEST_F(SessionTest, Happy_HomesAreSpread) {
  Start();
  RawTenant a = Connect(), b = Connect();
  EXPECT_EQ(a.Hello()->hello().home_device(), "cpu0");
  EXPECT_EQ(b.Hello()->hello().home_device(), "cpu1");
}

TEST_F(SessionTest, Edge_ConfigLimitsClassDevicesAndWeight) {
  TenantPolicy policy;
  policy.device_mask = 2;
  policy.memory_bytes_max = 1 << 20;
  config.tenants[::getuid()] = policy;
  Start();
  RawTenant tenant = Connect();
  proto::Request hello = RawTenant::HelloRequest();
  hello.mutable_hello()->set_service_class(SLICE_CLASS_ONLINE);
  hello.mutable_hello()->set_weight(100);
  const auto reply = tenant.Hello(hello);
  EXPECT_EQ(reply->hello().service_class(), SLICE_CLASS_OFFLINE);  // lowered, never raised
  EXPECT_EQ(reply->hello().memory_bytes_max(), 1u << 20);
  EXPECT_EQ(reply->hello().home_device(), "cpu1");
  RawTenant other = Connect();
  hello.mutable_hello()->set_home_device("cpu0");
  EXPECT_EQ(other.Hello(hello)->status(), SLICE_ERR_INVALID);
}

TEST_F(SessionTest, Edge_HelloErrors) {
  Start();
  RawTenant tenant = Connect();
  proto::Request hello = RawTenant::HelloRequest();
  hello.mutable_hello()->set_abi_major(99);
  EXPECT_EQ(tenant.Hello(hello)->status(), SLICE_ERR_VERSION);
  hello = RawTenant::HelloRequest();
  hello.mutable_hello()->set_weight(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(tenant.Hello(hello)->status(), SLICE_ERR_INVALID);
  hello = RawTenant::HelloRequest();
  hello.mutable_hello()->set_arena_bytes(RawTenant::kArenaBytes + 1);  // more than the memfd has
  EXPECT_EQ(tenant.Hello(hello)->status(), SLICE_ERR_BOUNDS);
  hello.mutable_hello()->set_arena_bytes(~uint64_t{0});
  EXPECT_EQ(tenant.Hello(hello)->status(), SLICE_ERR_INVALID);
  hello = RawTenant::HelloRequest();
  hello.mutable_hello()->set_home_device("gpu\n7");
  EXPECT_EQ(tenant.Hello(hello)->status(), SLICE_ERR_INVALID);
  EXPECT_EQ(tenant.Call(RawTenant::HelloRequest())->status(),
            SLICE_ERR_PROTOCOL);  // no descriptors
  EXPECT_EQ(tenant.Hello()->status(), SLICE_OK);
  EXPECT_EQ(tenant.Hello()->status(), SLICE_ERR_PROTOCOL);  // twice
}

TEST_F(SessionTest, Edge_SessionsOfAUserAreCounted) {
  config.tenant_defaults.sessions_max = 2;
  Start();
  RawTenant a = Open();
  {
    RawTenant b = Open();
    RawTenant c = Connect();
    EXPECT_EQ(c.Hello()->status(), SLICE_ERR_QUOTA);
  }
  RawTenant d = Connect();
  EXPECT_TRUE(Eventually([&] {
    const auto reply = d.Hello();
    return !reply.has_value() || reply->status() == SLICE_OK;
  }));
  EXPECT_EQ(d.Call(Alloc({4}))->status(), SLICE_OK);
}

TEST_F(SessionTest, Race_AClosedSessionMakesRoomForTheNext) {
  config.tenant_defaults.sessions_max = 1;
  Start();
  for (int i = 0; i < 200; ++i) {
    RawTenant tenant = Connect();
    const auto reply = tenant.Hello();
    ASSERT_TRUE(reply.has_value());
    ASSERT_EQ(reply->status(), SLICE_OK) << "session " << i << ": " << reply->text();
  }
}

TEST_F(SessionTest, Malicious_ConnectionsOfAUserAreLimitedAndAdministrationStaysPossible) {
  config.tenant_defaults.sessions_max = 1;
  config.hello_timeout = 3600 * kSecond;
  Start();
  std::vector<RawTenant> held;
  for (int i = 0; i < 17; ++i) held.push_back(Connect());
  const std::string told = "too many connections of uid " + std::to_string(::getuid()) +
                           ": limit 17, held by pid " + std::to_string(::getpid()) + " (17)";
  // This process is of the daemon's own user: for it a few more are kept, but not for tenants.
  RawTenant admin = Connect();
  const auto refused = admin.Hello();
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->status(), SLICE_ERR_QUOTA);
  EXPECT_EQ(refused->text().substr(0, told.size()), told);
  proto::Request status;
  status.mutable_status();
  EXPECT_EQ(admin.Call(status)->status(), SLICE_OK);
  for (int i = 0; i < 7; ++i) held.push_back(Connect());
  RawTenant one_more = Connect();
  const auto last_word = one_more.Receive();
  ASSERT_TRUE(last_word.has_value());
  EXPECT_EQ(last_word->id(), 0u);
  EXPECT_EQ(last_word->status(), SLICE_ERR_QUOTA);
  EXPECT_NE(last_word->text().find("limit 17"), std::string::npos) << last_word->text();
  EXPECT_TRUE(one_more.WaitHangUp());
  EXPECT_EQ(held[0].Hello()->status(), SLICE_OK);
}

TEST_F(SessionTest, Malicious_SilentConnectionsAreEnded) {
  config.tenant_defaults.sessions_max = 1;
  config.hello_timeout = 50 * kMillisecond;
  Start();
  RawTenant tenant = Open();
  std::vector<RawTenant> silent;
  for (int i = 0; i < 16; ++i) silent.push_back(Connect());
  for (RawTenant& connection : silent) {
    const auto last_word = connection.Receive();
    ASSERT_TRUE(last_word.has_value());
    EXPECT_EQ(last_word->id(), 0u);
    EXPECT_EQ(last_word->status(), SLICE_ERR_TIMEOUT);
    EXPECT_TRUE(connection.WaitHangUp());
  }
  EXPECT_EQ(tenant.Call(Alloc({4}))->status(), SLICE_OK);  // a session may be silent
  RawTenant next = Connect();
  EXPECT_EQ(next.Hello()->status(), SLICE_ERR_QUOTA);  // of sessions: the connection was taken
}

TEST_F(SessionTest, Malicious_AMessageTooLongForASocketIsNoDeathOfThePeer) {
  int pair[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  const Fd near(pair[0]), far(pair[1]);
  EXPECT_EQ(SendPacket(near, std::string(64 << 20, 'x'), {}, true).code(), StatusCode::kInvalid);
  EXPECT_TRUE(SendPacket(near, "x", {}, true).ok());
}

// Requests that are not granted do not keep a connection either.
TEST_F(SessionTest, Malicious_ChatterBeforeHelloDoesNotKeepAConnection) {
  config.hello_timeout = 50 * kMillisecond;
  config.limits.faults_max = 1'000'000;
  Start();
  RawTenant chatter = Connect();
  proto::Request alloc = Alloc({4});
  std::optional<proto::Reply> reply;
  do {
    reply = chatter.Call(alloc);
  } while (reply.has_value() && reply->id() != 0);
  EXPECT_TRUE(!reply.has_value() || reply->status() == SLICE_ERR_TIMEOUT);
}

// Closing a session does not end its running ops: until then it counts.
TEST_F(SessionTest, Malicious_SessionsOpenedAndClosedWithLongOpsDoNotPileUp) {
  config.tenant_defaults.sessions_max = 2;
  control.keep_tenants = true;
  Start();
  for (int i = 0; i < 2; ++i) Open();
  ASSERT_TRUE(Eventually([&] { return control.tenants == 0; }));
  RawTenant third = Connect();
  EXPECT_EQ(third.Hello()->status(), SLICE_ERR_QUOTA);
  control.keep_tenants = false;
  RawTenant admin = Connect();
  proto::Request status;
  status.mutable_status();
  EXPECT_EQ(admin.Call(status)->status(), SLICE_OK);  // a turn of the engine, which sees it
  EXPECT_TRUE(Eventually([&] {
    const auto reply = third.Hello();
    return !reply.has_value() || reply->status() == SLICE_OK;
  }));
  EXPECT_EQ(third.Call(Alloc({4}))->status(), SLICE_OK);
}

TEST_F(SessionTest, Malicious_NoDescriptorLeftIsToldAndDoesNotSpin) {
  Start();
  RawTenant tenant = Open();
  // Several: the server may still close some of its own when the others are taken.
  std::vector<Fd> sockets;
  for (int i = 0; i < 8; ++i)
    sockets.emplace_back(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, config.socket_path.c_str(), config.socket_path.size() + 1);
  // The server runs in this process: take all it may have.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit tight = before;
  tight.rlim_cur = 256;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  std::vector<Fd> fill;
  for (Fd fd(::dup(0)); fd.valid(); fd = Fd(::dup(0))) fill.push_back(std::move(fd));
  for (const Fd& socket : sockets)
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const Result<Packet> packet =
      ReceivePacket(sockets.back(), wire::kControlMessageBytesMax, 0, false);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  fill.clear();
  ASSERT_TRUE(packet.ok());
  proto::Reply reply;
  ASSERT_TRUE(reply.ParseFromString(packet->bytes));
  EXPECT_EQ(reply.id(), 0u);
  EXPECT_EQ(reply.status(), SLICE_ERR_NO_MEMORY);
  EXPECT_EQ(tenant.Call(Alloc({4}))->status(), SLICE_OK);
  RawTenant next = Connect();
  EXPECT_EQ(next.Hello()->status(), SLICE_OK);
}

TEST_F(SessionTest, Malicious_RequestsBeforeHello) {
  Start();
  RawTenant tenant = Connect();
  EXPECT_EQ(tenant.Call(Alloc({4}))->status(), SLICE_ERR_PROTOCOL);
  EXPECT_EQ(tenant.Call(proto::Request{})->status(), SLICE_ERR_PROTOCOL);
  EXPECT_EQ(tenant.Hello()->status(), SLICE_OK);
}

TEST_F(SessionTest, Malicious_GarbageFramesEndOnlyThatConnection) {
  Start();
  RawTenant good = Open();
  for (const std::string& bytes :
       {std::string("\xff\xff\xff\xff garbage"), std::string(100'000, 'x'), std::string(1, '\0')}) {
    RawTenant bad = Open();
    bad.SendBytes(bytes);
    const auto reply = bad.Receive();
    if (reply.has_value()) {
      EXPECT_EQ(reply->status(), SLICE_ERR_PROTOCOL);
    }
    EXPECT_TRUE(bad.WaitHangUp());
  }
  EXPECT_EQ(good.Call(Alloc({4}))->status(), SLICE_OK);
}

TEST_F(SessionTest, Malicious_TooManyDescriptorsEndTheConnectionAndDoNotLeak) {
  Start();
  RawTenant bad = Open();
  const Fd memfd = CreateMemfd("x", 4096).value();
  const std::vector<int> fds(8, memfd.get());
  bad.SendBytes(RawTenant::HelloRequest().SerializeAsString(), fds);
  EXPECT_TRUE(bad.WaitHangUp());
  RawTenant good = Connect();
  EXPECT_EQ(good.Hello()->status(), SLICE_OK);
}

TEST_F(SessionTest, Malicious_EndsAfterTooManyFaults) {
  config.limits.faults_max = 3;
  Start();
  RawTenant bad = Open();
  EXPECT_EQ(bad.Call(proto::Request{})->status(), SLICE_ERR_PROTOCOL);
  EXPECT_EQ(bad.Call(proto::Request{})->status(), SLICE_ERR_PROTOCOL);
  EXPECT_EQ(bad.Call(proto::Request{})->status(), SLICE_ERR_PROTOCOL);
  EXPECT_TRUE(bad.WaitHangUp());
}

TEST_F(SessionTest, Malicious_WrongDescriptors) {
  Start();
  RawTenant tenant = Open();
  int pipe_fds[2];
  ASSERT_EQ(::pipe2(pipe_fds, O_CLOEXEC), 0);
  const Fd read_end(pipe_fds[0]), write_end(pipe_fds[1]);
  EXPECT_EQ(tenant.Call(Register(10), std::span(pipe_fds, 1))->status(), SLICE_ERR_INVALID);
  const Fd small = RawTenant::MemfdOf("tiny");
  const int fd = small.get();
  EXPECT_EQ(tenant.Call(Register(4096), std::span(&fd, 1))->status(), SLICE_ERR_BOUNDS);
  EXPECT_EQ(tenant.Call(Register(4), std::span(&fd, 1))->status(), SLICE_ERR_GRAPH);
  EXPECT_EQ(tenant.Call(Register(0), std::span(&fd, 1))->status(), SLICE_ERR_QUOTA);
  EXPECT_EQ(tenant.Call(Register(~uint64_t{0}), std::span(&fd, 1))->status(), SLICE_ERR_QUOTA);
  EXPECT_EQ(tenant.Call(Register(4))->status(), SLICE_ERR_PROTOCOL);
}

TEST_F(SessionTest, Happy_GraphsAreSharedByContent) {
  Start();
  RawTenant a = Open(), b = Open();
  const std::string text = SmallTemplate();
  const Fd memfd = RawTenant::MemfdOf(text);
  const int fd = memfd.get();
  const auto first = a.Call(Register(text.size()), std::span(&fd, 1));
  ASSERT_EQ(first->status(), SLICE_OK) << first->text();
  EXPECT_FALSE(first->graph().known());
  const auto second = b.Call(Register(text.size()), std::span(&fd, 1));
  EXPECT_TRUE(second->graph().known());
  EXPECT_EQ(second->graph().content_hash(), first->graph().content_hash());
  EXPECT_EQ(control.templates, 1u);
  proto::Request drop;
  drop.set_unregister_graph(first->graph().graph());
  EXPECT_EQ(a.Call(drop)->status(), SLICE_OK);
  EXPECT_EQ(a.Call(drop)->status(), SLICE_ERR_STALE);
  EXPECT_EQ(control.templates, 1u);
  b.CloseSocket();
  EXPECT_TRUE(Eventually([&] { return control.templates == 0; }));
  EXPECT_TRUE(Eventually([&] { return LogCount("drop_template") == 1; }));
}

TEST_F(SessionTest, Edge_TemplateThatTheExecutorRefuses) {
  Start();
  RawTenant tenant = Open();
  const std::string text = SmallTemplate("fake:refuse");
  const Fd memfd = RawTenant::MemfdOf(text);
  const int fd = memfd.get();
  const auto reply = tenant.Call(Register(text.size()), std::span(&fd, 1));
  EXPECT_EQ(reply->status(), SLICE_ERR_OP_NOT_ALLOWED);
  EXPECT_NE(reply->text().find("aten::evil"), std::string::npos);
  EXPECT_EQ(control.templates, 0u);
}

TEST_F(SessionTest, Edge_GraphLimits) {
  config.limits.graphs_max = 1;
  Start();
  RawTenant tenant = Open();
  const std::string text = SmallTemplate();
  const Fd memfd = RawTenant::MemfdOf(text);
  const int fd = memfd.get();
  EXPECT_EQ(tenant.Call(Register(text.size()), std::span(&fd, 1))->status(), SLICE_OK);
  EXPECT_EQ(tenant.Call(Register(text.size()), std::span(&fd, 1))->status(), SLICE_ERR_QUOTA);
}

TEST_F(SessionTest, Happy_TensorsAndBindingsComeAndGo) {
  Start();
  RawTenant tenant = Open();
  proto::Request alloc = Alloc({8});
  *alloc.mutable_alloc_tensors()->add_tensors() = alloc.alloc_tensors().tensors(0);
  const auto made = tenant.Call(alloc);
  ASSERT_EQ(made->status(), SLICE_OK) << made->text();
  ASSERT_EQ(made->tensors().handles_size(), 2);
  EXPECT_EQ(made->tensors().offsets(1), 64u);
  EXPECT_TRUE(tenant.fds().empty());  // the segment never leaves sliced and its executor
  EXPECT_EQ(control.sets, 1u);
  proto::Request release;
  release.mutable_release_tensors()->add_handles(made->tensors().handles(0));
  EXPECT_EQ(tenant.Call(release)->status(), SLICE_OK);
  EXPECT_EQ(tenant.Call(release)->status(), SLICE_ERR_STALE);
  EXPECT_EQ(control.sets, 1u);
  release.mutable_release_tensors()->set_handles(0, made->tensors().handles(1));
  EXPECT_EQ(tenant.Call(release)->status(), SLICE_OK);
  EXPECT_EQ(control.sets, 0u);
  EXPECT_TRUE(Eventually([&] { return LogCount("drop_set") == 1; }));

  const uint64_t binding = tenant.Bind(SmallTemplate());
  EXPECT_EQ(control.bindings, 1u);
  proto::Request destroy;
  destroy.set_destroy_binding(binding);
  EXPECT_EQ(tenant.Call(destroy)->status(), SLICE_OK);
  EXPECT_EQ(tenant.Call(destroy)->status(), SLICE_ERR_STALE);
  EXPECT_TRUE(Eventually([&] { return control.bindings == 0; }));
  EXPECT_TRUE(Eventually([&] { return LogCount("drop_binding") == 1; }));
}

TEST_F(SessionTest, Edge_BindingDestroyedWhileARequestUsesIt) {
  control.hold = true;
  Start();
  RawTenant tenant = Open();
  const uint64_t binding = tenant.Bind(SmallTemplate());
  tenant.Submit(1, binding, SmallArguments());
  ASSERT_TRUE(Eventually([&] { return control.submits == 1; }));
  proto::Request destroy;
  destroy.set_destroy_binding(binding);
  EXPECT_EQ(tenant.Call(destroy)->status(), SLICE_OK);
  EXPECT_EQ(control.bindings, 1u);
  tenant.Submit(2, binding, SmallArguments(128, 192));
  EXPECT_EQ(tenant.WaitCompletion()->status, SLICE_ERR_STALE);
  control.hold = false;
  EXPECT_EQ(tenant.Call(Alloc({1}))->status(), SLICE_OK);  // a turn of the engine thread
  EXPECT_EQ(tenant.WaitCompletion()->status, SLICE_OK);
  EXPECT_TRUE(Eventually([&] { return control.bindings == 0; }));
}

// The request lies in the ring, the socket's message comes another way: it must not be the first.
TEST_F(SessionTest, Race_WhatWasSubmittedBeforeItsBindingIsDestroyedRuns) {
  Start();
  RawTenant tenant = Open();
  for (uint64_t i = 1; i <= config.limits.graphs_max; ++i) {
    const uint64_t binding = tenant.Bind(SmallTemplate());
    tenant.Submit(i, binding, SmallArguments());
    proto::Request destroy;
    destroy.set_destroy_binding(binding);
    ASSERT_EQ(tenant.Call(destroy)->status(), SLICE_OK);
    ASSERT_EQ(tenant.WaitCompletion()->status, SLICE_OK) << "request " << i;
  }
}

TEST_F(SessionTest, Race_CommandSubmittedBeforeItsTensorIsReleasedRuns) {
  Start();
  RawTenant tenant = Open();
  for (uint64_t i = 1; i <= 200; ++i) {
    const auto set = tenant.Call(Alloc({4}));
    ASSERT_EQ(set->status(), SLICE_OK) << set->text();
    const uint64_t handle = set->tensors().handles(0);
    wire::SubmitSlot slot{};
    slot.cookie = i;
    slot.flags = wire::kTensorCommand | (wire::kTensorReset << wire::kCommandKindShift);
    *tenant.arguments(0) = {handle, 0, 0};
    slot.args_bytes = sizeof(wire::Argument);
    tenant.Push(slot);
    proto::Request release;
    release.mutable_release_tensors()->add_handles(handle);
    ASSERT_EQ(tenant.Call(release)->status(), SLICE_OK);
    ASSERT_EQ(tenant.WaitCompletion()->status, SLICE_OK) << "command " << i;
  }
}

TEST_F(SessionTest, Edge_SetThatTheEngineRefusesIsDroppedByTheExecutor) {
  Start();
  RawTenant tenant = Open();
  proto::Request alloc = Alloc({4});
  alloc.mutable_alloc_tensors()->mutable_tensors(0)->set_name("refuse");
  EXPECT_EQ(tenant.Call(alloc)->status(), SLICE_ERR_QUOTA);
  EXPECT_TRUE(Eventually([&] { return LogCount("drop_set") == 1; }));
}

TEST_F(SessionTest, Malicious_SparseSegmentsCannotUseUpTheExecutorsAddressSpace) {
  Start();
  RawTenant tenant = Open();
  EXPECT_EQ(tenant.Call(Alloc({int64_t{1} << 40}))->status(), SLICE_ERR_QUOTA);
  EXPECT_EQ(LogCount("add_set"), 0u);
  const uint64_t memory = 2 * (64 + 256) * kMiB;  // what the fixture's devices have
  const Fd sparse = CreateMemfd("sparse", 10 * memory).value();
  const int fd = sparse.get();
  proto::Request import;
  import.mutable_import_tensors()->set_kind(proto::IMPORTED_CONSTANT);
  import.mutable_import_tensors()->set_segment_bytes(10 * memory);
  import.mutable_import_tensors()->add_tensors()->set_dtype(proto::FLOAT32);
  const auto first = tenant.Call(import, std::span(&fd, 1));
  ASSERT_EQ(first->status(), SLICE_OK) << first->text();
  EXPECT_EQ(tenant.Call(import, std::span(&fd, 1))->status(), SLICE_ERR_QUOTA);
  proto::Request release;
  release.mutable_release_tensors()->add_handles(first->tensors().handles(0));
  EXPECT_EQ(tenant.Call(release)->status(), SLICE_OK);
  EXPECT_EQ(tenant.Call(import, std::span(&fd, 1))->status(), SLICE_OK);
}

TEST_F(SessionTest, Edge_MutableImportOfAReadOnlyDescriptorIsRefused) {
  Start();
  RawTenant tenant = Open();
  const Fd memfd = CreateMemfd("weights", 4096).value();
  const Fd read_only(
      ::open(("/proc/self/fd/" + std::to_string(memfd.get())).c_str(), O_RDONLY | O_CLOEXEC));
  proto::Request request;
  request.mutable_import_tensors()->set_kind(proto::IMPORTED_MUTABLE);
  request.mutable_import_tensors()->set_segment_bytes(4096);
  proto::TensorSpec* spec = request.mutable_import_tensors()->add_tensors();
  spec->set_dtype(proto::FLOAT32);
  spec->add_sizes(4);
  const int fd = read_only.get();
  EXPECT_NE(tenant.Call(request, std::span(&fd, 1))->status(), SLICE_OK);
  request.mutable_import_tensors()->set_kind(proto::IMPORTED_CONSTANT);
  EXPECT_EQ(tenant.Call(request, std::span(&fd, 1))->status(), SLICE_OK);
  request.mutable_import_tensors()->set_kind(static_cast<proto::TensorKind>(77));
  EXPECT_EQ(tenant.Call(request, std::span(&fd, 1))->status(), SLICE_ERR_INVALID);
}

TEST_F(SessionTest, Happy_ReplicateAnswersWhenTheCopiesAreThere) {
  Start();
  RawTenant tenant = Open(), other = Open();
  const Fd memfd = CreateMemfd("weights", 4096).value();
  const int fd = memfd.get();
  proto::Request import;
  import.mutable_import_tensors()->set_kind(proto::IMPORTED_CONSTANT);
  import.mutable_import_tensors()->set_segment_bytes(4096);
  import.mutable_import_tensors()->add_tensors()->set_dtype(proto::FLOAT32);
  import.mutable_import_tensors()->mutable_tensors(0)->add_sizes(16);
  const auto made = tenant.Call(import, std::span(&fd, 1));
  ASSERT_EQ(made->status(), SLICE_OK) << made->text();
  control.hold = true;
  proto::Request replicate;
  replicate.mutable_replicate_tensors()->add_handles(made->tensors().handles(0));
  ASSERT_TRUE(tenant.Send(replicate));
  EXPECT_EQ(other.Call(Alloc({1}))->status(), SLICE_OK);  // others go on
  control.hold = false;
  EXPECT_EQ(other.Call(Alloc({1}))->status(), SLICE_OK);
  EXPECT_EQ(tenant.Receive()->status(), SLICE_OK);
}

TEST_F(SessionTest, Edge_TenantThatLeavesWhileItReplicates) {
  control.hold = true;
  Start();
  RawTenant tenant = Open();
  const Fd memfd = CreateMemfd("weights", 4096).value();
  const int fd = memfd.get();
  proto::Request import;
  import.mutable_import_tensors()->set_kind(proto::IMPORTED_CONSTANT);
  import.mutable_import_tensors()->set_segment_bytes(4096);
  import.mutable_import_tensors()->add_tensors()->set_dtype(proto::FLOAT32);
  const auto made = tenant.Call(import, std::span(&fd, 1));
  ASSERT_EQ(made->status(), SLICE_OK) << made->text();
  proto::Request replicate;
  replicate.mutable_replicate_tensors()->add_handles(made->tensors().handles(0));
  ASSERT_TRUE(tenant.Send(replicate));
  tenant.CloseSocket();
  EXPECT_TRUE(Eventually([&] { return control.tenants == 0; }));
}

TEST_F(SessionTest, Happy_TenantProcessThatIsKilledIsNoticed) {
  Start();
  const pid_t child = ::fork();
  if (child == 0) {
    RawTenant tenant(config.socket_path);
    tenant.Hello();
    ::pause();
    ::_exit(0);
  }
  ASSERT_TRUE(Eventually([&] { return control.tenants == 1; }));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(Eventually([&] { return control.tenants == 0; }));
  EXPECT_TRUE(Eventually([&] { return LogCount("drop_tenant") == 1; }));
}

TEST_F(SessionTest, Edge_ExecutorForgetsATenantOnlyWhenTheEngineHas) {
  control.keep_tenants = true;
  Start();
  { RawTenant tenant = Open(); }
  ASSERT_TRUE(Eventually([&] { return control.tenants == 0; }));
  RawTenant other = Open();
  EXPECT_EQ(LogCount("drop_tenant"), 0u);
  control.keep_tenants = false;
  EXPECT_EQ(other.Call(Alloc({1}))->status(), SLICE_OK);
  EXPECT_TRUE(Eventually([&] { return LogCount("drop_tenant") == 1; }));
}

}  // namespace
}  // namespace slice::server
