#include "daemon/executor/service.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <string>
#include <utility>

#include "common/log.h"
#include "daemon/executor/executor.h"
#include "daemon/executor/socket_message.h"
#include "slice/proto/executor.pb.h"

namespace slice::executor {
namespace {

// A set of thousands of tensors is one message.
constexpr int kSocketBytes = 4 << 20;

Status Dispatch(Executor* executor, const proto::ExecutorRequest& request, std::vector<Fd>* fds,
                bool* is_set_up, proto::ExecutorAck* ack) {
  using Kind = proto::ExecutorRequest::KindCase;
  if (!*is_set_up && request.kind_case() != Kind::kSetup) {
    return Error(StatusCode::kProtocol, "the first request must be setup");
  }
  switch (request.kind_case()) {
    case Kind::kSetup: {
      const Status status = executor->Setup(request.setup(), fds);
      *is_set_up |= status.ok();
      return status;
    }
    case Kind::kAddTemplate:
      return executor->AddTemplate(request.add_template(), *fds);
    case Kind::kDropTemplate:
      return executor->DropTemplate(request.drop_template());
    case Kind::kAddSet:
      return executor->AddSet(request.add_set(), fds);
    case Kind::kDropSet:
      return executor->DropSet(request.drop_set());
    case Kind::kAddTenant:
      return executor->AddTenant(request.add_tenant(), *fds);
    case Kind::kDropTenant:
      return executor->DropTenant(request.drop_tenant());
    case Kind::kAddBinding:
      return executor->AddBinding(request.add_binding());
    case Kind::kDropBinding:
      return executor->DropBinding(request.drop_binding());
    case Kind::kDescribe:
      executor->Describe(ack);
      return Status::Ok();
    default:
      return Error(StatusCode::kProtocol, "request of unknown kind");
  }
}

}  // namespace

int RunService(int control_fd) {
  const Fd socket(control_fd);
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &kSocketBytes, sizeof kSocketBytes);
  auto* executor = new Executor();  // its threads end with the process
  bool is_set_up = false;
  SocketMessage message;
  for (;;) {
    const Result<bool> received = ReceiveMessage(socket, &message);
    if (!received.ok() || !*received) {
      if (!received.ok()) SLICE_LOG_ERROR("executor", "%s", received.status().ToString().c_str());
      ::_exit(received.ok() ? 0 : 1);  // device threads may be inside an op: no destructors
    }
    proto::ExecutorRequest request;
    proto::ExecutorAck ack;
    Status status = Error(StatusCode::kProtocol, "not an ExecutorRequest");
    if (request.ParseFromString(message.bytes)) {
      try {
        status = Dispatch(executor, request, &message.fds, &is_set_up, &ack);
      } catch (const std::exception& error) {
        status = Error(StatusCode::kInternal, "%s", error.what());
      }
    }
    ack.set_id(request.id());
    ack.set_status(static_cast<int32_t>(status.code()));
    ack.set_text(status.text());
    const Status sent = SendMessage(socket, ack.SerializeAsString());
    if (!sent.ok()) {
      SLICE_LOG_ERROR("executor", "%s", sent.ToString().c_str());
      ::_exit(1);
    }
  }
}

}  // namespace slice::executor
