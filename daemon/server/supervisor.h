// Keeps one slice-executor alive and in step with sliced's tables.
//
//            Start                      died, hangs, nonsense
//   (none) ────────► starting ──► up ─────────────────────────► starting ──► up
//                        │ failed kDeathsMax times in kDeathWindow
//                        ▼
//                     given up ── backoff passed ──► starting
//
// A start is: launch (zygote fork), setup with fresh rings, replay of the tables, then
// Engine::ExecutorReady. While given up, requests fail with EXECUTOR_LOST and the engine fails what
// waits; the next start is tried after a backoff.
//
// A session whose ops or requests end the executor again and again must not take it from the others
// in this way: it is ended (see blame.h), and the deaths so far no longer count for a backoff.
//
// Owner and thread: the server, on the server thread. Blocks: Start, Call and OnTimer, at most the
// request timeout each step, in the WaitFunction; tenants' rings go on meanwhile (engine thread).
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "common/units.h"
#include "daemon/server/blame.h"
#include "daemon/server/config.h"
#include "daemon/server/engine_loop.h"
#include "daemon/server/executor_link.h"
#include "daemon/server/executor_tables.h"
#include "daemon/server/poller.h"

namespace slice::server {

class Supervisor {
 public:
  static constexpr int kDeathsMax = 5;
  static constexpr DurationNs kDeathWindow = 10 * kSecond;
  static constexpr DurationNs kBackoffMin = kSecond;
  static constexpr DurationNs kBackoffMax = 30 * kSecond;

  // `wait`: must not call the supervisor. `end_tenant`: an entry of this tenant cannot be replayed,
  // or it is to blame for deaths; takes it out of the engine at once and ends its session.
  // References outlive the supervisor.
  Supervisor(const ServerConfig& config, std::unique_ptr<ExecutorLauncher> launcher,
             EngineLoop* loop, Poller* poller, WaitFunction wait,
             std::function<void(TenantId, Status)> end_tenant);
  ~Supervisor();

  // The first start. Errors: the launcher's.
  Status Start();
  // Makes it known to the executor and keeps it for replays. After a death, which counts for
  // `asker`, the request is sent once more to the next executor: one that kills two is refused.
  // Errors: the executor's answer; EXECUTOR_LOST.
  Status Add(proto::ExecutorRequest request, std::vector<Fd> fds, const engine::TenantUser& asker);
  void DropTemplate(TemplateId id);
  void DropSet(TensorSetId id);
  void DropBinding(BindingId id);
  void DropTenant(TenantId id);

  // From the engine thread by way of the mailbox: it no longer behaves.
  void Distrust(uint64_t generation, const Status& why);
  // Retries after a backoff. NextWake: when OnTimer must be called; kNever if not.
  void OnTimer(TimeNs now);
  TimeNs NextWake() const { return retry_at_; }

  // Until when no session of this user is let in, because others of its ended the executor; past:
  // they are.
  TimeNs WaitsUntil(uid_t uid) const { return blame_.WaitsUntil(uid); }
  bool up() const { return up_; }
  pid_t pid() const { return link_ == nullptr ? 0 : link_->pid(); }
  uint64_t restarts() const { return generation_ == 0 ? 0 : generation_ - 1; }
  Status Describe(std::string* description);

 private:
  Status StartOnce();
  Status SetUp(std::unique_ptr<ExecutorRings>* rings);
  // Detaches a dead executor and starts until one is up or it must be given up. `asker`: whose
  // request it was taking; tenant 0: nobody's. False: the asker has been ended for it.
  bool Recover(const Status& why, const engine::TenantUser& asker = {});
  // Returns whose ops were running.
  std::vector<engine::TenantUser> Detach();
  // The one that was ended for this death, if any.
  std::optional<engine::TenantUser> Accuse(const std::vector<engine::TenantUser>& suspects,
                                           TimeNs now);
  void GiveUp(const Status& why);
  void Drop(const proto::ExecutorRequest& request);

  const ServerConfig& config_;
  std::unique_ptr<ExecutorLauncher> launcher_;
  EngineLoop* loop_;
  Poller* poller_;
  const WaitFunction wait_;
  std::function<void(TenantId, Status)> end_tenant_;
  std::unique_ptr<ExecutorLink> link_;
  ExecutorTables tables_;
  Blame blame_;
  std::deque<TimeNs> deaths_;
  uint64_t generation_ = 0;
  bool up_ = false;
  TimeNs retry_at_ = kNever;
  DurationNs backoff_ = kBackoffMin;
  uint32_t last_bad_entry_[2] = {ExecutorTables::kKindCount, 0};  // kind, id at which a replay died
};

}  // namespace slice::server
