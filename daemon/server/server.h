// sliced, put together: listener, sessions, supervisor and engine loop around one server thread.
//
//   server thread (this)                        engine thread (EngineLoop)
//   accept, control messages, executor's        rings, Engine
//   cold path, process deaths, stop  ──Call──►
//                                    ◄─Post──   faults, "it is gone now"
//
// Owner: main (or a test). Threads: all methods on the thread that called Create, but RequestStop.
// Blocks: Run.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/status.h"
#include "daemon/server/config.h"
#include "daemon/server/engine_loop.h"
#include "daemon/server/executor_link.h"
#include "daemon/server/gmg_segment.h"
#include "daemon/server/listener.h"
#include "daemon/server/mailbox.h"
#include "daemon/server/poller.h"
#include "daemon/server/session.h"
#include "daemon/server/supervisor.h"
#include "daemon/server/template_store.h"

namespace slice::server {

class Server {
 public:
  struct Parts {
    EngineLoop::EngineFactory engine_factory;
    size_t gmg_bytes = 0;
    std::unique_ptr<ExecutorLauncher> launcher;
  };
  // Binds the socket and starts the executor; nothing is answered before Run.
  static Result<std::unique_ptr<Server>> Create(ServerConfig config, Parts parts);
  ~Server();

  // SIGTERM and SIGINT (blocked by the caller in all threads) end Run.
  Status StopOnSignals();
  // Until a stop was asked for; then ends all sessions, lets running ops end, and returns.
  void Run();
  void RequestStop();  // any thread

  const Supervisor& supervisor() const { return *supervisor_; }

 private:
  explicit Server(ServerConfig config) : config_(std::move(config)) {}
  Status Open(Parts parts);
  void AcceptSome();
  void Welcome(Fd socket, Peer peer);
  std::string ConnectionHolders(uid_t uid) const;
  void EndSilentConnections(TimeNs now);
  bool WaitForExecutor(const Fd& fd, DurationNs timeout);
  void EndSessions();
  void Drain();
  // Writes what was learned since the last time, if anything was.
  void KeepEstimates();
  std::string StatusJson();
  std::string DevicesJson();

  ServerConfig config_;           // not changed after Open
  Poller poller_, admin_poller_;  // see Services
  Mailbox mailbox_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<GmgSegment> gmg_;
  Fd signals_;
  std::unique_ptr<EngineLoop> loop_;
  std::unique_ptr<Supervisor> supervisor_;
  std::unique_ptr<TemplateStore> templates_;
  std::unique_ptr<Services> services_;
  std::unordered_map<uint32_t, std::unique_ptr<Session>> sessions_;
  std::vector<uint32_t> ended_;  // to be destroyed at the end of the turn
  std::unordered_map<uid_t, uint32_t> connections_;
  std::set<std::pair<TimeNs, uint32_t>> hello_deadlines_;  // may be out of date: ask the session
  uint32_t next_session_ = 1;
  std::optional<estimate::Saved> kept_estimates_;  // as last written
  TimeNs keep_estimates_at_ = kNever;
  TimeNs started_ = 0;
  TimeNs hello_grace_until_ = 0;  // this thread was waiting: who spoke then is not silent
  bool stopping_ = false;
};

}  // namespace slice::server
