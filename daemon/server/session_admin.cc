// Session's administration requests: for root, the daemon's own user, and the configured admin
// group.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "common/clock.h"
#include "daemon/server/session.h"

namespace slice::server {
namespace {

constexpr size_t kLabelBytesMax = 256;
// Between two what-if questions, of whomever: each holds the engine thread for milliseconds.
constexpr DurationNs kWhatIfPause = 20 * kMillisecond;

Status WriteAll(const Fd& file, std::string_view content) {
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t put = ::write(file.get(), content.data() + done, content.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return ErrnoError(StatusCode::kInvalid, errno, "cannot write the timeline");
    done += static_cast<size_t>(put);
  }
  return Status::Ok();
}

// The file that a timeline goes to. A descriptor from the client counts with the client's own
// rights. A path is opened with the daemon's rights, so it is only for those who have them anyway.
Result<Fd> OpenTarget(const Peer& peer, const std::string& path, std::vector<Fd>* fds) {
  Fd file;
  if (fds->size() == 1) {
    file = std::move((*fds)[0]);
  } else if (peer.uid != 0 && peer.uid != ::geteuid()) {
    return Error(
        StatusCode::kInvalid,
        "timeline: send the descriptor of a file; a path is only for root and the daemon's user");
  } else {
    file = Fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!file.valid())
      return ErrnoError(StatusCode::kInvalid, errno, "cannot write timeline file '%s'",
                        path.c_str());
  }
  struct stat info {};
  if (::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return Error(StatusCode::kInvalid, "timeline: '%s' is not a regular file", path.c_str());
  }
  return file;
}

}  // namespace

Status Session::Administer(const proto::Request& request, std::vector<Fd>* fds) {
  if (!IsAdministrator(peer_, services_->config.admin_group)) {
    const std::string group =
        services_->config.admin_group.empty()
            ? ""
            : ", and members of group '" + services_->config.admin_group + "'";
    return Error(StatusCode::kInvalid,
                 "user %u may not administer sliced: only root, user %u%s may", peer_.uid,
                 ::geteuid(), group.c_str());
  }
  EngineLoop& loop = services_->loop;
  proto::Reply reply;
  if (request.has_what_if()) return WhatIf(request.what_if());
  if (request.has_timeline()) return ControlTimeline(request.timeline(), fds);
  if (request.has_set_policy()) {
    Status status;
    loop.Call(
        [&] { status = loop.engine().SetPolicy(request.set_policy().policy(), MonotonicNow()); });
    SLICE_RETURN_IF_ERROR(status);
    SLICE_LOG_INFO("server", "policy is now '%s' (asked for by uid %u)",
                   request.set_policy().policy().c_str(), peer_.uid);
    ReplyWith({});
    return Status::Ok();
  }
  std::string text;
  switch (request.status().what()) {
    case 0:
      text = services_->status_json();
      break;
    case 1:
      text = services_->devices_json();
      break;
    case 2:
      loop.Call([&] { text = loop.engine().TenantsJson(MonotonicNow()); });
      break;
    case 3:
      loop.Call([&] { text = loop.engine().EstimatorsJson(); });
      break;
    default:
      return Error(StatusCode::kInvalid,
                   "status of %u: 0 status, 1 devices, 2 tenants, 3 estimators",
                   request.status().what());
  }
  reply.mutable_body()->set_text(std::move(text));
  ReplyWith(std::move(reply));
  return Status::Ok();
}

Status Session::WhatIf(const proto::WhatIf& request) {
  engine::WhatIfQuery query;
  query.graph = request.graph();
  query.tenant = {request.session()};
  query.symbols.assign(request.symbols().begin(), request.symbols().end());
  if (request.service_class() > 2) {
    return Error(StatusCode::kInvalid, "class %u: 1 online, 2 offline, 0 neither is asked for",
                 request.service_class());
  }
  if (request.service_class() != 0) {
    query.service_class =
        request.service_class() == 1 ? ServiceClass::kOnline : ServiceClass::kOffline;
  }
  EngineLoop& loop = services_->loop;
  Result<std::string> text = Error(StatusCode::kInternal, "not asked");
  // Waits here, for less time than a request to the executor takes: no client has to try again.
  const DurationNs early = services_->next_what_if - MonotonicNow();
  if (early > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(early));
  loop.Call([&] { text = loop.engine().WhatIf(query, MonotonicNow()); });
  services_->next_what_if = MonotonicNow() + kWhatIfPause;
  if (!text.ok()) return text.status();
  proto::Reply reply;
  reply.mutable_body()->set_text(*std::move(text));
  ReplyWith(std::move(reply));
  return Status::Ok();
}

Status Session::ControlTimeline(const proto::TimelineControl& request, std::vector<Fd>* fds) {
  EngineLoop& loop = services_->loop;
  proto::Reply reply;
  switch (request.action()) {
    case 0:
      loop.Call([&] { loop.timeline().Start(MonotonicNow()); });
      break;
    case 1: {
      if (services_->background.joinable()) {
        return Error(StatusCode::kWouldBlock, "another timeline is being written: try again");
      }
      SLICE_ASSIGN_OR_RETURN(Fd file, OpenTarget(peer_, request.path(), fds));
      Result<Recording> recording = Error(StatusCode::kInternal, "not asked");
      loop.Call([&] { recording = loop.timeline().Stop(MonotonicNow()); });
      if (!recording.ok()) return recording.status();
      WriteTimeline(std::move(file), std::move(*recording));
      return Status::Ok();  // answered when it is written
    }
    case 2: {
      const std::string label = request.path().substr(0, kLabelBytesMax);
      bool on = false;
      loop.Call([&] {
        on = loop.timeline().on();
        loop.timeline().Mark(label, MonotonicNow());
      });
      if (!on)
        return Error(StatusCode::kInvalid,
                     "no timeline is being recorded: start one with `slicectl timeline start`");
      break;
    }
    default:
      return Error(StatusCode::kInvalid, "timeline action %u: 0 start, 1 stop, 2 mark",
                   request.action());
  }
  ReplyWith(std::move(reply));
  return Status::Ok();
}

// On a thread of its own: a long recording takes seconds to write, and an executor may have to be
// restarted meanwhile.
void Session::WriteTimeline(Fd file, Recording recording) {
  Pause();
  services_->background = std::thread([services = services_, number = number_,
                                       file = std::move(file), recording = std::move(recording)] {
    const Status status =
        recording.WriteJson([&file](std::string_view piece) { return WriteAll(file, piece); });
    const nlohmann::json summary = {{"events", recording.events.size()},
                                    {"dropped", recording.dropped},
                                    {"duration_ns", recording.stop - recording.start}};
    services->mailbox.Post([services, number, status, text = summary.dump()] {
      services->background.join();
      Session* session = services->find_session(number);
      if (session == nullptr || !session->Resume()) return;
      proto::Reply reply;
      reply.mutable_body()->set_text(text);
      if (status.ok()) {
        session->ReplyWith(std::move(reply));
      } else {
        session->ReplyError(status);
      }
    });
  });
}

}  // namespace slice::server
