// fake-executor: speaks the protocols of slice-executor (zygote, executor.proto, both rings)
// without torch. Ops take no time and compute nothing; outputs stay as they are. For tests of
// sliced that need a process which can die.
//
//   fake-executor --zygote [--control-fd N]
//
// Misbehaviour, by environment: FAKE_EXECUTOR_LOG=FILE appends one line per cold request. A
// template whose bytes hold "fake:die" kills the process, "fake:refuse" is refused, "fake:hang" is
// never acknowledged; an op of a binding made of a template with "fake:crash-op" kills the process,
// "fake:silent-op" is started and never finished.
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/fd.h"
#include "common/fd_passing.h"
#include "common/wire/executor_ring.h"
#include "common/wire/record_ring.h"
#include "common/wire/zygote.h"
#include "daemon/server/packet.h"
#include "slice/proto/executor.pb.h"

namespace {

using namespace slice;  // NOLINT(build/namespaces): a program of its own

void LogLine(const std::string& line) {
  const char* path = std::getenv("FAKE_EXECUTOR_LOG");
  if (path == nullptr) return;
  const Fd file(::open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  const std::string text = line + "\n";
  [[maybe_unused]] const ssize_t put = ::write(file.get(), text.data(), text.size());
}

class Executor {
 public:
  explicit Executor(Fd socket) : socket_(std::move(socket)) {}

  int Run() {
    for (;;) {
      std::vector<pollfd> items = {{socket_.get(), POLLIN, 0}};
      for (const Fd& event : device_events_) items.push_back({event.get(), POLLIN, 0});
      const bool may_sleep = commands_ == nullptr || commands_->PrepareSleep();
      ::poll(items.data(), items.size(), may_sleep ? -1 : 0);
      if (commands_ != nullptr) commands_->EndSleep();
      for (const Fd& event : device_events_) ClearEventFd(event);
      RunCommands();
      if (items[0].revents == 0) continue;
      Result<server::Packet> packet = server::ReceivePacket(socket_, 4 << 20, kPassedFdsMax, true);
      if (!packet.ok() || packet->end) return 0;
      proto::ExecutorRequest request;
      proto::ExecutorAck ack;
      if (!request.ParseFromString(packet->bytes)) return 1;
      ack.set_id(request.id());
      const Status status = Handle(request, std::move(packet->fds), &ack);
      ack.set_status(static_cast<int32_t>(status.code()));
      ack.set_text(status.text());
      if (!server::SendPacket(socket_, ack.SerializeAsString(), {}, false).ok()) return 1;
    }
  }

 private:
  Status Handle(const proto::ExecutorRequest& request, std::vector<Fd> fds,
                proto::ExecutorAck* ack) {
    switch (request.kind_case()) {
      case proto::ExecutorRequest::kSetup:
        return Setup(request.setup(), std::move(fds));
      case proto::ExecutorRequest::kAddTemplate:
        return AddTemplate(request.add_template(), fds);
      case proto::ExecutorRequest::kAddSet:
        LogLine("add_set " + std::to_string(request.add_set().set_id()));
        if (static_cast<size_t>(request.add_set().domains_size()) != fds.size()) {
          return Error(StatusCode::kInvalid, "descriptors do not match the domains");
        }
        for (size_t i = 0; i < fds.size(); ++i) {
          const Result<Mapping> mapped =
              Mapping::Map(fds[i], request.add_set().segment_bytes(),
                           request.add_set().writable(static_cast<int>(i)));
          if (!mapped.ok()) return mapped.status();
        }
        return Status::Ok();
      case proto::ExecutorRequest::kAddTenant:
        LogLine("add_tenant " + std::to_string(request.add_tenant().tenant()));
        return fds.size() == 1 ? Status::Ok() : Error(StatusCode::kInvalid, "no arena");
      case proto::ExecutorRequest::kAddBinding:
        LogLine("add_binding " + std::to_string(request.add_binding().binding()));
        template_of_binding_[request.add_binding().binding()] = request.add_binding().template_id();
        return Status::Ok();
      case proto::ExecutorRequest::kDropTemplate:
        LogLine("drop_template " + std::to_string(request.drop_template()));
        return Status::Ok();
      case proto::ExecutorRequest::kDropSet:
        LogLine("drop_set " + std::to_string(request.drop_set()));
        return Status::Ok();
      case proto::ExecutorRequest::kDropTenant:
        LogLine("drop_tenant " + std::to_string(request.drop_tenant()));
        return Status::Ok();
      case proto::ExecutorRequest::kDropBinding:
        LogLine("drop_binding " + std::to_string(request.drop_binding()));
        return Status::Ok();
      case proto::ExecutorRequest::kDescribe:
        ack->set_description("fake");
        return Status::Ok();
      default:
        return Error(StatusCode::kProtocol, "unknown request");
    }
  }

  Status Setup(const proto::ExecutorSetup& setup, std::vector<Fd> fds) {
    LogLine("setup");
    if (fds.size() != 3 + static_cast<size_t>(setup.devices_size()))
      return Error(StatusCode::kInvalid, "descriptors");
    const size_t bytes = RecordRing::MemoryBytes(setup.ring_capacity_bytes());
    SLICE_ASSIGN_OR_RETURN(command_memory_, Mapping::Map(fds[0], bytes, true));
    SLICE_ASSIGN_OR_RETURN(report_memory_, Mapping::Map(fds[1], bytes, true));
    commands_ = std::make_unique<RecordRing>(command_memory_.data(), setup.ring_capacity_bytes());
    reports_ = std::make_unique<RecordRing>(report_memory_.data(), setup.ring_capacity_bytes());
    engine_event_ = std::move(fds[2]);
    for (size_t i = 3; i < fds.size(); ++i) device_events_.push_back(std::move(fds[i]));
    return Status::Ok();
  }

  Status AddTemplate(const proto::ExecutorTemplate& request, const std::vector<Fd>& fds) {
    LogLine("add_template " + std::to_string(request.template_id()));
    if (fds.size() != 1) return Error(StatusCode::kInvalid, "no template");
    SLICE_ASSIGN_OR_RETURN(const Mapping bytes, Mapping::Map(fds[0], request.bytes(), false));
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), request.bytes());
    const auto holds = [text](const char* word) {
      return text.find(word) != std::string_view::npos;
    };
    if (holds("fake:die")) ::_exit(9);
    if (holds("fake:hang")) ::pause();
    if (holds("fake:refuse")) return Error(StatusCode::kOpNotAllowed, "aten::evil is not allowed");
    if (holds("fake:crash-op")) crash_templates_.insert(request.template_id());
    if (holds("fake:silent-op")) silent_templates_.insert(request.template_id());
    return Status::Ok();
  }

  template <typename T>
  static T Read(const RecordRing::Record& record) {
    T value{};
    std::memcpy(&value, record.payload.data(), std::min(sizeof value, record.payload.size()));
    return value;
  }
  template <typename T>
  void Report(uint32_t type, const T& value) {
    while (!reports_->PushStruct(type, value)) ::usleep(100);
    if (reports_->ConsumerSleeps()) SignalEventFd(engine_event_);
  }

  void RunCommands() {
    if (commands_ == nullptr) return;
    RecordRing::Record record;
    for (;;) {
      const Result<bool> popped = commands_->Pop(&record);
      if (!popped.ok() || !*popped) return;
      RunCommand(record);
    }
  }

  void RunCommand(const RecordRing::Record& record) {
    const TimeNs now = MonotonicNow();
    switch (record.type) {
      case wire::kStartInstance: {
        const auto start = Read<wire::StartInstance>(record);
        template_of_instance_[start.instance] = template_of_binding_[start.binding];
        return;
      }
      case wire::kEndInstance: {
        const auto end = Read<wire::EndInstance>(record);
        template_of_instance_.erase(end.instance);
        return Report(wire::kInstanceEnded, wire::InstanceEnded{end.instance, end.attempt, 0});
      }
      case wire::kIssue: {
        const auto issue = Read<wire::Issue>(record);
        const uint32_t graph = template_of_instance_[issue.instance];
        Report(wire::kStarted,
               wire::Started{issue.instance, issue.attempt, issue.op, now, issue.device, 0});
        if (crash_templates_.contains(graph)) ::_exit(9);
        if (silent_templates_.contains(graph)) return;
        return Report(wire::kFinished, wire::Finished{issue.instance, issue.attempt, issue.op, now,
                                                      MonotonicNow(), 1000, 64, issue.device, 0});
      }
      case wire::kRecall: {
        const auto recall = Read<wire::Recall>(record);  // ran long ago
        static_cast<void>(recall);
        return;
      }
      case wire::kWatch: {
        const auto watch = Read<wire::Watch>(record);
        return Report(wire::kIntent, wire::Intent{watch.transfer, now});
      }
      case wire::kSend: {
        const auto send = Read<wire::TransferRef>(record);
        return Report(wire::kTransferDone,
                      wire::TransferDone{send.transfer, now, MonotonicNow(), 64, 0, 0});
      }
      case wire::kCancelTransfer: {
        const auto cancel = Read<wire::TransferRef>(record);
        return Report(wire::kTransferDone,
                      wire::TransferDone{cancel.transfer, now, now, 0,
                                         static_cast<int32_t>(StatusCode::kCancelled), 0});
      }
      case wire::kTensorCommandRun: {
        const auto command = Read<wire::TensorCommandRun>(record);
        return Report(wire::kCommandDone, wire::CommandDone{command.command, 0, 0});
      }
      default:
        return;
    }
  }

  Fd socket_;
  Mapping command_memory_, report_memory_;
  std::unique_ptr<RecordRing> commands_, reports_;
  Fd engine_event_;
  std::vector<Fd> device_events_;
  std::map<uint32_t, uint32_t> template_of_binding_;
  std::map<uint64_t, uint32_t> template_of_instance_;
  std::set<uint32_t> crash_templates_, silent_templates_;
};

int RunZygote(int control_fd) {
  const Fd socket(control_fd);
  const wire::ZygoteHello hello{wire::kZygoteVersion, wire::kExecutorRingVersion};
  if (!server::SendPacket(socket, std::string(reinterpret_cast<const char*>(&hello), sizeof hello),
                          {}, false)
           .ok())
    return 1;
  for (;;) {
    Result<server::Packet> packet = server::ReceivePacket(socket, 16, 1, false);
    if (!packet.ok() || packet->end || packet->fds.size() != 1) return 0;
    int pidfd = -1;
    clone_args arguments{};
    arguments.flags = CLONE_PARENT | CLONE_PIDFD;
    arguments.pidfd = reinterpret_cast<uint64_t>(&pidfd);
    const auto pid = static_cast<pid_t>(::syscall(SYS_clone3, &arguments, sizeof arguments));
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::_exit(Executor(std::move(packet->fds[0])).Run());
    }
    const Fd owned(pidfd);
    const wire::ZygoteReply reply{pid, pid < 0 ? errno : 0};
    const std::string bytes(reinterpret_cast<const char*>(&reply), sizeof reply);
    if (!server::SendPacket(socket, bytes, std::span(&pidfd, pid < 0 ? 0 : 1), false).ok())
      return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  int control_fd = wire::kControlFdDefault;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string(argv[i]) == "--control-fd") control_fd = std::atoi(argv[i + 1]);
  }
  return RunZygote(control_fd);
}
