#include "tests/testing/fake_engine.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "common/checked.h"
#include "common/clock.h"
#include "daemon/executor/socket_message.h"

namespace slice::testing {
namespace {
constexpr size_t kRingBytes = 64 * 1024;
}  // namespace

FakeEngine::FakeEngine(const std::string& executable, std::vector<uint32_t> device_domains,
                       uint32_t domain_count, uint64_t pool_bytes)
    : own_child_(true),
      device_domains_(std::move(device_domains)),
      domain_count_(domain_count),
      pool_bytes_(pool_bytes) {
  int pair[2];
  SLICE_CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
  control_ = Fd(pair[0]);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(pair[1], 3);
    if (pair[1] == 3) ::fcntl(3, F_SETFD, 0);
    ::execl(executable.c_str(), executable.c_str(), static_cast<char*>(nullptr));
    ::_exit(127);
  }
  ::close(pair[1]);
  MakeRings();
}

FakeEngine::FakeEngine(Fd control, pid_t pid, std::vector<uint32_t> device_domains,
                       uint32_t domain_count, uint64_t pool_bytes)
    : pid_(pid),
      control_(std::move(control)),
      device_domains_(std::move(device_domains)),
      domain_count_(domain_count),
      pool_bytes_(pool_bytes) {
  MakeRings();
}

FakeEngine::~FakeEngine() {
  control_.Close();
  if (own_child_ && pid_ > 0) WaitExit();
}

void FakeEngine::MakeRings() {
  const size_t bytes = RecordRing::MemoryBytes(kRingBytes);
  command_memory_ = CreateMemfd("commands", bytes).value();
  report_memory_ = CreateMemfd("reports", bytes).value();
  arena_memory_ = CreateMemfd("arena", kArenaBytes).value();
  command_mapping_ = Mapping::Map(command_memory_, bytes, true).value();
  report_mapping_ = Mapping::Map(report_memory_, bytes, true).value();
  arena_ = Mapping::Map(arena_memory_, kArenaBytes, true).value();
  commands_.emplace(command_mapping_.data(), kRingBytes);
  reports_.emplace(report_mapping_.data(), kRingBytes);
  engine_event_ = CreateEventFd().value();
  for (size_t i = 0; i < device_domains_.size(); ++i)
    device_events_.push_back(CreateEventFd().value());
}

proto::ExecutorAck FakeEngine::Call(proto::ExecutorRequest request, const std::vector<int>& fds) {
  request.set_id(next_id_++);
  proto::ExecutorAck ack;
  ack.set_status(-1);
  if (!executor::SendMessage(control_, request.SerializeAsString(), fds).ok()) return ack;
  executor::SocketMessage message;
  const Result<bool> received = executor::ReceiveMessage(control_, &message);
  if (!received.ok() || !*received) return ack;
  SLICE_CHECK(ack.ParseFromString(message.bytes) && ack.id() == request.id(), "acks come in order");
  return ack;
}

proto::ExecutorAck FakeEngine::Setup() {
  proto::ExecutorRequest request;
  proto::ExecutorSetup* setup = request.mutable_setup();
  setup->set_ring_version(wire::kExecutorRingVersion);
  setup->set_ring_capacity_bytes(kRingBytes);
  std::vector<int> fds{command_memory_.get(), report_memory_.get(), engine_event_.get()};
  for (size_t i = 0; i < device_domains_.size(); ++i) {
    proto::ExecutorDevice* device = setup->add_devices();
    device->set_name("cpu" + std::to_string(i));
    device->set_backend("cpu");
    device->set_ordinal(static_cast<uint32_t>(i));
    device->set_domain(device_domains_[i]);
    device->set_cpu(-1);
    fds.push_back(device_events_[i].get());
  }
  for (uint32_t d = 0; d < domain_count_; ++d) {
    proto::ExecutorDomain* domain = setup->add_domains();
    domain->set_name("domain" + std::to_string(d));
    domain->set_pool_bytes(pool_bytes_);
  }
  return Call(request, fds);
}

proto::ExecutorAck FakeEngine::AddTenant(uint32_t tenant, uint64_t pool_bytes_max) {
  proto::ExecutorRequest request;
  request.mutable_add_tenant()->set_tenant(tenant);
  request.mutable_add_tenant()->set_arena_bytes(kArenaBytes);
  request.mutable_add_tenant()->set_pool_bytes_max(pool_bytes_max);
  return Call(request, {arena_memory_.get()});
}

proto::ExecutorAck FakeEngine::AddTemplate(uint32_t id, const proto::GraphTemplate& program) {
  const std::string bytes = program.SerializeAsString();
  const Fd memory = CreateMemfd("template", bytes.size()).value();
  std::memcpy(Mapping::Map(memory, bytes.size(), true).value().data(), bytes.data(), bytes.size());
  proto::ExecutorRequest request;
  request.mutable_add_template()->set_template_id(id);
  request.mutable_add_template()->set_bytes(bytes.size());
  return Call(request, {memory.get()});
}

proto::ExecutorAck FakeEngine::AddStatics(uint32_t set, const graph::Template& source,
                                          std::vector<int64_t> symbols) {
  proto::ExecutorRequest request;
  proto::ExecutorTensorSet* layout = request.mutable_add_set();
  layout->set_set_id(set);
  layout->set_tenant(kTenant);
  uint64_t offset = 0;
  for (const uint32_t input : source.statics()) {
    const graph::ValueShape& shape = source.values()[source.inputs()[input].value];
    proto::SetTensor* tensor = layout->add_tensors();
    tensor->set_dtype(static_cast<uint32_t>(shape.dtype));
    tensor->set_offset(offset);
    tensor->set_bytes(
        static_cast<uint64_t>(source.ValueBytes(source.inputs()[input].value, symbols).value()));
    for (size_t d = 0; d < shape.sizes.size(); ++d) {
      tensor->add_sizes(source.expressions().Evaluate(shape.sizes[d], symbols).value());
      tensor->add_strides(source.expressions().Evaluate(shape.strides[d], symbols).value());
    }
    offset = RoundUp(offset + tensor->bytes(), 4096);
  }
  layout->set_segment_bytes(RoundUp(offset + 1, 4096));
  std::vector<Fd> memories;
  std::vector<int> fds;
  for (uint32_t domain = 0; domain < domain_count_; ++domain) {
    memories.push_back(CreateMemfd("segment", layout->segment_bytes()).value());
    fds.push_back(memories.back().get());
    layout->add_domains(domain);
    layout->add_writable(true);
    segments_[{set, domain}] = Mapping::Map(memories.back(), layout->segment_bytes(), true).value();
  }
  for (int t = 0; t < layout->tensors_size(); ++t) {
    if (static_cast<proto::DType>(layout->tensors(t).dtype()) != proto::FLOAT32)
      continue;  // integers stay 0
    if (source.inputs()[source.statics()[static_cast<size_t>(t)]].written) continue;
    auto* numbers = reinterpret_cast<float*>(segment(set, 0) + layout->tensors(t).offset());
    for (uint64_t i = 0; i < layout->tensors(t).bytes() / sizeof(float); ++i) {
      numbers[i] = static_cast<float>((i * 37 + static_cast<uint64_t>(t)) % 13) / 64.0f - 0.09f;
    }
  }
  layouts_[set] = *layout;
  return Call(request, fds);
}

proto::ExecutorAck FakeEngine::AddBinding(uint32_t binding, uint32_t template_id, uint32_t set,
                                          size_t statics) {
  proto::ExecutorRequest request;
  request.mutable_add_binding()->set_binding(binding);
  request.mutable_add_binding()->set_template_id(template_id);
  request.mutable_add_binding()->set_tenant(kTenant);
  for (uint32_t i = 0; i < statics; ++i) {
    proto::StaticBinding* ref = request.mutable_add_binding()->add_statics();
    ref->set_set_id(set);
    ref->set_tensor(i);
  }
  return Call(request);
}

proto::ExecutorAck FakeEngine::Describe() {
  proto::ExecutorRequest request;
  request.set_describe(true);
  return Call(request);
}

uint64_t FakeEngine::PoolBytes() {
  uint64_t total = 0;
  const proto::ExecutorAck ack = Describe();
  for (const uint64_t bytes : ack.pool_bytes_used()) total += bytes;
  return total;
}

void FakeEngine::PushBytes(uint32_t type, std::span<const std::byte> payload, uint32_t device) {
  SLICE_CHECK(commands_->Push(type, payload), "command ring is full");
  if (commands_->ConsumerSleeps()) SignalEventFd(device_events_[device]);
}

void FakeEngine::StartInstance(uint64_t instance, uint32_t binding, const graph::Template& source,
                               std::vector<int64_t> symbols) {
  graph::BoundSizes sizes;
  SLICE_CHECK(source.Bind(symbols, &sizes).ok(), "symbols of the test");
  uint64_t offset = 0;
  const auto slot = [&](int64_t bytes) {
    const wire::ArenaRange range{offset, static_cast<uint64_t>(bytes)};
    offset = RoundUp(offset + range.bytes, 64);
    return range;
  };
  inputs_.clear();
  outputs_.clear();
  for (size_t i = 0; i < sizes.dynamic_count(); ++i)
    inputs_.push_back(slot(sizes.dynamic_bytes(i)));
  for (size_t i = 0; i < sizes.result_count(); ++i) outputs_.push_back(slot(sizes.result_bytes(i)));
  std::vector<std::byte> payload;
  const auto append = [&](const void* bytes, size_t size) {
    const auto* at = static_cast<const std::byte*>(bytes);
    payload.insert(payload.end(), at, at + size);
  };
  const wire::StartInstance command{instance,
                                    1,
                                    binding,
                                    kTenant,
                                    static_cast<uint32_t>(symbols.size()),
                                    static_cast<uint32_t>(inputs_.size()),
                                    static_cast<uint32_t>(outputs_.size())};
  append(&command, sizeof command);
  append(symbols.data(), symbols.size() * sizeof(int64_t));
  append(inputs_.data(), inputs_.size() * sizeof(wire::ArenaRange));
  append(outputs_.data(), outputs_.size() * sizeof(wire::ArenaRange));
  PushBytes(wire::kStartInstance, payload, 0);
}

void FakeEngine::Issue(uint64_t instance, uint32_t op, uint32_t device,
                       std::function<void(wire::Issue*)> change) {
  wire::Issue issue{};
  issue.instance = instance;
  issue.attempt = 1;
  issue.op = op;
  issue.device = static_cast<uint8_t>(device);
  issue.order = op;
  issue.end_by_ns = INT64_MAX;
  if (change) change(&issue);
  Push(wire::kIssue, issue, device);
}

void FakeEngine::EndInstance(uint64_t instance) {
  Push(wire::kEndInstance, wire::EndInstance{instance, 1, 0});
}

void FakeEngine::Collect() {
  RecordRing::Record record;
  for (;;) {
    const Result<bool> popped = reports_->Pop(&record);
    if (!popped.ok() || !*popped) return;
    received_.push_back({record.type, record.payload});
  }
}

bool FakeEngine::Has(uint32_t type) {
  Collect();
  for (const Report& report : received_) {
    if (report.type == type) return true;
  }
  return false;
}

std::optional<FakeEngine::Report> FakeEngine::WaitReport(uint32_t type, int timeout_ms) {
  const TimeNs end = MonotonicNow() + timeout_ms * kMillisecond;
  for (;;) {
    Collect();
    for (auto report = received_.begin(); report != received_.end(); ++report) {
      if (report->type != type) continue;
      Report found = std::move(*report);
      received_.erase(report);
      return found;
    }
    const DurationNs left = end - MonotonicNow();
    if (left <= 0) return std::nullopt;
    if (!reports_->PrepareSleep()) continue;
    // Started may come without a wake-up: look again now and then.
    pollfd poll{engine_event_.get(), POLLIN, 0};
    ::poll(&poll, 1, static_cast<int>(std::min<DurationNs>(left / kMillisecond + 1, 20)));
    reports_->EndSleep();
    ClearEventFd(engine_event_);
  }
}

void FakeEngine::Kill() { ::kill(pid_, SIGKILL); }

int FakeEngine::WaitExit() {
  int status = -1;
  if (pid_ > 0) ::waitpid(pid_, &status, __WALL);
  pid_ = -1;
  return status;
}

}  // namespace slice::testing
