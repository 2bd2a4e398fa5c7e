#include "daemon/server/server.h"

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "common/clock.h"
#include "common/process.h"
#include "daemon/server/estimates_file.h"

namespace slice::server {
namespace {

// Connections beyond a user's sessions: slicectl, and programs that are about to say Hello.
constexpr uint32_t kExtraConnectionsPerUser = 16;
// Beyond these, for administration only: root and the daemon's user can always look.
constexpr uint32_t kReservedConnections = 8;
// A turn: whoever connects again and again leaves the others their time.
constexpr int kAcceptsPerTurn = 32;
constexpr size_t kHoldersShown = 4;
constexpr DurationNs kDrainLimit = 5 * kSecond;

void RaiseDescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

Result<std::unique_ptr<Server>> Server::Create(ServerConfig config, Parts parts) {
  std::unique_ptr<Server> server(new Server(std::move(config)));
  SLICE_RETURN_IF_ERROR(server->Open(std::move(parts)));
  return server;
}

Status Server::Open(Parts parts) {
  started_ = MonotonicNow();
  std::random_device random;
  config_.engine.epoch = (uint64_t{random()} << 32) | random();
  config_.engine.daemon_pid = static_cast<uint64_t>(::getpid());
  RaiseDescriptorLimit();
  SLICE_RETURN_IF_ERROR(poller_.Open());
  SLICE_RETURN_IF_ERROR(admin_poller_.Open());
  SLICE_RETURN_IF_ERROR(mailbox_.Open());
  // The socket first: a second daemon must fail before it costs anything.
  SLICE_ASSIGN_OR_RETURN(Listener listener, Listener::Listen(config_.socket_path));
  listener_ = std::make_unique<Listener>(std::move(listener));
  SLICE_ASSIGN_OR_RETURN(GmgSegment gmg, GmgSegment::Create(parts.gmg_bytes));
  gmg_ = std::make_unique<GmgSegment>(std::move(gmg));

  EngineLoop::Options options;
  options.sequences_max = config_.limits.sequences_max;
  options.faults_max = config_.limits.faults_max;
  options.cpu_wake_latency_us = config_.cpu_wake_latency_us;
  options.executor_limits = {config_.executor_silence, config_.hang_limit};
  EngineLoop::Events events;
  events.tenant_fault = [this](TenantId tenant, Status why) {
    mailbox_.Post([this, tenant, why] {
      const auto found = sessions_.find(tenant.value);
      if (found == sessions_.end()) return;
      found->second->set_farewell(StatusCode::kProtocol);
      found->second->End(why);
    });
  };
  events.executor_fault = [this](uint64_t generation, Status why) {
    mailbox_.Post([this, generation, why] { supervisor_->Distrust(generation, why); });
  };
  SLICE_ASSIGN_OR_RETURN(loop_, EngineLoop::Create(config_.engine, gmg_->memory(),
                                                   parts.engine_factory, options, events));
  if (!config_.estimates_file.empty()) {
    loop_->engine().LoadEstimates(LoadEstimates(config_.estimates_file, config_.engine.domains));
    keep_estimates_at_ = started_ + config_.estimates_interval;
  }
  supervisor_ = std::make_unique<Supervisor>(
      config_, std::move(parts.launcher), loop_.get(), &poller_,
      [this](const Fd& fd, DurationNs timeout) { return WaitForExecutor(fd, timeout); },
      [this](TenantId tenant, const Status& why) {
        // The session goes at the end of the turn; the next executor must not meet its ops.
        loop_->Call([&] { loop_->RemoveTenant(tenant, why.code()); });
        const auto found = sessions_.find(tenant.value);
        if (found != sessions_.end()) found->second->End(why);
      });
  templates_ = std::make_unique<TemplateStore>(loop_.get(), supervisor_.get(), &mailbox_);
  services_ = std::make_unique<Services>(config_, poller_, admin_poller_, mailbox_, *loop_,
                                         *supervisor_, *templates_);
  services_->daemon_epoch = config_.engine.epoch;
  services_->home_counts.resize(config_.devices.size());
  services_->find_session = [this](uint32_t number) -> Session* {
    const auto found = sessions_.find(number);
    return found == sessions_.end() ? nullptr : found->second.get();
  };
  services_->end_session = [this](uint32_t number) { ended_.push_back(number); };
  services_->status_json = [this] { return StatusJson(); };
  services_->devices_json = [this] { return DevicesJson(); };
  SLICE_RETURN_IF_ERROR(supervisor_->Start());
  loop_->Start();
  SLICE_RETURN_IF_ERROR(gmg_->Publish(config_.socket_path));
  SLICE_RETURN_IF_ERROR(
      poller_.Add(mailbox_.fd().get(), EPOLLIN, [this](uint32_t) { mailbox_.Drain(); }));
  SLICE_RETURN_IF_ERROR(
      poller_.Add(listener_->fd().get(), EPOLLIN, [this](uint32_t) { AcceptSome(); }));
  SLICE_RETURN_IF_ERROR(
      admin_poller_.Add(listener_->fd().get(), EPOLLIN, [this](uint32_t) { AcceptSome(); }));
  SLICE_LOG_INFO("server", "sliced %d serves %zu devices on '%s', policy '%s'", ::getpid(),
                 config_.devices.size(), config_.socket_path.c_str(),
                 config_.engine.policy.c_str());
  return Status::Ok();
}

Server::~Server() {
  sessions_.clear();
  if (loop_ != nullptr) loop_->Stop();
  if (services_ != nullptr && services_->background.joinable()) services_->background.join();
}

Status Server::StopOnSignals() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGTERM);
  ::sigaddset(&set, SIGINT);
  signals_ = Fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.valid()) return ErrnoError(StatusCode::kInternal, errno, "signalfd");
  return poller_.Add(signals_.get(), EPOLLIN, [this](uint32_t) {
    signalfd_siginfo info{};
    if (::read(signals_.get(), &info, sizeof info) != sizeof info) return;
    SLICE_LOG_INFO("server", "signal %u: stopping", info.ssi_signo);
    stopping_ = true;
  });
}

void Server::RequestStop() {
  mailbox_.Post([this] { stopping_ = true; });
}

void Server::Run() {
  while (!stopping_) {
    TimeNs wake = std::min(supervisor_->NextWake(), keep_estimates_at_);
    if (!hello_deadlines_.empty())
      wake = std::min(wake, std::max(hello_deadlines_.begin()->first, hello_grace_until_));
    poller_.Wait(wake == kNever ? -1 : std::max<DurationNs>(0, wake - MonotonicNow()));
    const TimeNs now = MonotonicNow();
    supervisor_->OnTimer(now);
    if (now >= keep_estimates_at_) KeepEstimates();
    EndSilentConnections(now);
    EndSessions();
  }
  Drain();
}

// Sessions are told, running ops end, and the socket goes last: a client that tries again finds no
// daemon.
void Server::Drain() {
  poller_.Remove(listener_->fd().get());
  admin_poller_.Remove(listener_->fd().get());
  for (auto& [number, session] : sessions_) {
    session->set_farewell(StatusCode::kDaemonLost);
    session->End(Error(StatusCode::kDaemonLost, "sliced stops"));
  }
  EndSessions();
  const TimeNs limit = MonotonicNow() + kDrainLimit;
  while (services_->tenants_leaving != 0 && MonotonicNow() < limit)
    poller_.Wait(100 * kMillisecond);
  if (services_->tenants_leaving != 0) {
    SLICE_LOG_WARN("server", "%u sessions had ops that did not end within %lld s",
                   services_->tenants_leaving, static_cast<long long>(kDrainLimit / kSecond));
  }
  kept_estimates_.reset();  // somebody may have moved the file since
  KeepEstimates();
  loop_->Stop();
  supervisor_.reset();  // and the executor with it
  SLICE_LOG_INFO("server", "sliced stopped");
}

void Server::KeepEstimates() {
  if (config_.estimates_file.empty()) return;
  keep_estimates_at_ = MonotonicNow() + config_.estimates_interval;
  estimate::Saved saved;
  loop_->Call([&] { saved = loop_->engine().SaveEstimates(); });
  if (saved == kept_estimates_) return;
  const Status status = SaveEstimates(config_.estimates_file, saved, config_.engine.domains);
  if (status.ok()) {
    kept_estimates_ = std::move(saved);
  } else {
    SLICE_LOG_WARN("server", "estimates are not kept: %s", status.text().c_str());
  }
}

void Server::AcceptSome() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    Listener::Accepted accepted = listener_->Accept();
    if (accepted.exhausted) {
      const Status status =
          Error(StatusCode::kNoMemory, "sliced (pid %d) has no descriptor left: try again later",
                ::getpid());
      services_->fault_log.Warn(status.text());
      if (accepted.socket.valid()) SendFarewell(accepted.socket, status);
      accepted.socket.Close();
      listener_->KeepSpare();
      return;
    }
    if (!accepted.socket.valid()) return;
    Result<Peer> peer = IdentifyPeer(accepted.socket);
    if (peer.ok()) Welcome(std::move(accepted.socket), std::move(*peer));
  }
}

void Server::Welcome(Fd socket, Peer peer) {
  const uid_t uid = peer.uid;
  const uint32_t open = connections_.contains(uid) ? connections_[uid] : 0;
  const uint32_t limit = config_.PolicyOf(uid).sessions_max + kExtraConnectionsPerUser;
  Status too_many;
  if (open >= limit) {
    too_many = Error(StatusCode::kQuota,
                     "too many connections of uid %u: limit %u, held by %s: close some", uid, limit,
                     ConnectionHolders(uid).c_str());
    const bool is_privileged = uid == 0 || uid == ::geteuid();
    if (!is_privileged || open >= limit + kReservedConnections) {
      services_->fault_log.Warn(too_many.text());
      SendFarewell(socket, too_many);
      return;
    }
  }
  const uint32_t number = next_session_++;
  auto session =
      std::make_unique<Session>(services_.get(), number, std::move(socket), std::move(peer));
  session->RefuseHello(too_many);
  const Status started = session->Start();
  if (!started.ok()) {
    services_->fault_log.Warn(started.ToString());
    return;
  }
  hello_deadlines_.emplace(session->hello_deadline(), number);
  ++connections_[uid];
  sessions_.emplace(number, std::move(session));
}

// "pid 71 (140), pid 72 (4)": the processes of this user with the most connections.
std::string Server::ConnectionHolders(uid_t uid) const {
  std::map<pid_t, uint32_t> counts;
  for (const auto& [number, session] : sessions_) {
    if (session->peer().uid == uid) ++counts[session->peer().pid];
  }
  std::vector<std::pair<uint32_t, pid_t>> holders;
  for (const auto& [pid, count] : counts) holders.emplace_back(count, pid);
  std::sort(holders.rbegin(), holders.rend());
  std::string text;
  for (size_t i = 0; i < holders.size() && i < kHoldersShown; ++i) {
    text += (i == 0 ? "pid " : ", pid ") + std::to_string(holders[i].second) + " (" +
            std::to_string(holders[i].first) + ")";
  }
  if (holders.size() > kHoldersShown) text += ", ...";
  return text;
}

// The executor may take its time, or hang: who wants to know why must get an answer meanwhile. So
// connections are accepted and administrators' requests answered; nothing else is begun.
bool Server::WaitForExecutor(const Fd& fd, DurationNs timeout) {
  const TimeNs begin = MonotonicNow();
  bool readable = false;
  for (DurationNs left = timeout; left > 0 && !readable; left = begin + timeout - MonotonicNow()) {
    std::array<pollfd, 2> items = {{{fd.get(), POLLIN, 0}, {admin_poller_.fd().get(), POLLIN, 0}}};
    ::poll(items.data(), items.size(), static_cast<int>((left + kMillisecond - 1) / kMillisecond));
    readable = items[0].revents != 0;
    if (!readable && items[1].revents != 0) admin_poller_.Wait(0);
  }
  const TimeNs now = MonotonicNow();
  if (now - begin > config_.hello_timeout / 2) hello_grace_until_ = now + config_.hello_timeout;
  return readable;
}

void Server::EndSilentConnections(TimeNs now) {
  if (now < hello_grace_until_) return;
  while (!hello_deadlines_.empty() && hello_deadlines_.begin()->first <= now) {
    const uint32_t number = hello_deadlines_.begin()->second;
    hello_deadlines_.erase(hello_deadlines_.begin());
    const auto found = sessions_.find(number);
    if (found == sessions_.end() || found->second->is_tenant()) continue;
    Session* session = found->second.get();
    if (session->hello_deadline() > now) {
      // Asked again when it may be over; while a request is being answered, a timeout later.
      hello_deadlines_.emplace(std::min(session->hello_deadline(), now + config_.hello_timeout),
                               number);
      continue;
    }
    const Status why =
        Error(StatusCode::kTimeout, "connection of uid %u, pid %d: no Hello within %lld ms",
              session->peer().uid, session->peer().pid,
              static_cast<long long>(config_.hello_timeout / kMillisecond));
    services_->fault_log.Warn(why.text());
    session->End(why);
  }
}

void Server::EndSessions() {
  while (!ended_.empty()) {
    const uint32_t number = ended_.back();
    ended_.pop_back();
    const auto found = sessions_.find(number);
    if (found == sessions_.end()) continue;
    const uid_t uid = found->second->peer().uid;
    if (--connections_[uid] == 0) connections_.erase(uid);
    sessions_.erase(found);
  }
}

std::string Server::StatusJson() {
  std::string text;
  loop_->Call([&] { text = loop_->StatusJson(); });
  nlohmann::json status = nlohmann::json::parse(text, nullptr, false);
  status["pid"] = ::getpid();
  status["socket"] = config_.socket_path;
  status["epoch"] = services_->daemon_epoch;
  status["uptime_ns"] = MonotonicNow() - started_;
  // Null while there is none: a script that signals 0 would signal its own process group.
  status["executor_pid"] = nullptr;
  if (supervisor_->pid() > 0) status["executor_pid"] = supervisor_->pid();
  if (IsStopped(supervisor_->pid())) {
    status["executor"] = "stopped by a signal";
    status["executor_up"] = false;
  }
  status["executor_restarts"] = supervisor_->restarts();
  status["connections"] = sessions_.size();
  status["templates"] = templates_->size();
  return status.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string Server::DevicesJson() {
  const bool stopped = IsStopped(supervisor_->pid());
  std::string text;
  loop_->Call([&] { text = loop_->DevicesJson(stopped); });
  return text;
}

}  // namespace slice::server
