// One connection to the control socket: a tenant's session after Hello, or slicectl.
//
//   connected ──Hello──► tenant ──hang-up, process death, faults, stop──► ended
//       └── administration requests (root, the daemon's user, the admin group) in both
//
// Requests are answered in order, one at a time; one that must wait (replication) stops the reading
// of this socket only. All that a message says is checked here against this session's own tables; a
// malformed message is answered with PROTOCOL and counted, a truncated or unparsable one ends the
// session.
//
// Owner and thread: the server, on the server thread. Must not depend on: rings' contents (engine
// loop).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/fd.h"
#include "common/log.h"
#include "common/status.h"
#include "daemon/server/config.h"
#include "daemon/server/engine_loop.h"
#include "daemon/server/handle_table.h"
#include "daemon/server/mailbox.h"
#include "daemon/server/packet.h"
#include "daemon/server/peer.h"
#include "daemon/server/poller.h"
#include "daemon/server/segments.h"
#include "daemon/server/supervisor.h"
#include "daemon/server/template_store.h"
#include "slice/proto/control.pb.h"

namespace slice::server {

class Session;

// The last word to a peer whose connection ends or is not taken: a Reply with id 0. Never blocks.
void SendFarewell(const Fd& socket, const Status& why);

// What sessions need of their server. Everything outlives them.
struct Services {
  Services(const ServerConfig& config_in, Poller& poller_in, Poller& admin_poller_in,
           Mailbox& mailbox_in, EngineLoop& loop_in, Supervisor& supervisor_in,
           TemplateStore& templates_in)
      : config(config_in),
        poller(poller_in),
        admin_poller(admin_poller_in),
        mailbox(mailbox_in),
        loop(loop_in),
        supervisor(supervisor_in),
        templates(templates_in) {}
  const ServerConfig& config;
  Poller& poller;
  // Connections of administrators that have asked for nothing else: looked at while the server
  // thread waits for the executor, too.
  Poller& admin_poller;
  Mailbox& mailbox;  // to the server thread
  EngineLoop& loop;
  Supervisor& supervisor;
  TemplateStore& templates;
  uint64_t daemon_epoch = 0;
  std::thread background;                    // writes a timeline; at most one
  std::vector<uint32_t> home_counts;         // sessions by home device
  std::map<uid_t, uint32_t> tenants_of_uid;  // sessions after Hello, those that leave too
  uint32_t tenant_count = 0;                 // sessions after Hello
  uint32_t tenants_leaving = 0;  // of these: ended, but the engine still waits for their last ops
  uint32_t next_set = 1, next_binding = 1;
  TimeNs next_what_if = 0;  // no question goes to the engine before
  RateLimitedLog fault_log{"server", 5};
  std::function<Session*(uint32_t number)> find_session;
  std::function<void(uint32_t number)> end_session;  // at the end of the turn
  std::function<std::string()> status_json, devices_json;
};

class Session {
 public:
  Session(Services* services, uint32_t number, Fd socket, Peer peer);
  // Lets go of everything; the engine and the executor forget the tenant when its last op has
  // ended.
  ~Session();

  // Starts watching the socket and the process.
  Status Start();
  // Hello is refused with this: the connection is for administration only.
  void RefuseHello(Status why) { hello_refusal_ = std::move(why); }
  // When a connection is ended that is no tenant's by then; later after each request of an
  // administrator, and never while one is being answered.
  TimeNs hello_deadline() const { return is_tenant_ || busy_ ? kNever : hello_deadline_; }
  uint32_t number() const { return number_; }
  bool is_tenant() const { return is_tenant_; }
  const Peer& peer() const { return peer_; }
  // Ends it soon; logs the first cause.
  void End(const Status& why);
  // Requests in flight are answered with this when the session ends.
  void set_farewell(StatusCode code) { farewell_ = code; }

 private:
  struct Set {
    engine::TensorKind kind = engine::TensorKind::kConstant;
    DomainIndex home = 0;
    uint64_t segment_bytes = 0;
    uint32_t tensors = 0;  // handles not released
    uint32_t bindings = 0;
  };
  struct Tensor {
    engine::TensorRef ref;
    engine::TensorKind kind = engine::TensorKind::kConstant;
  };
  struct Graph {
    TemplateId id;
    uint64_t bytes = 0;
  };
  struct Binding {
    BindingId id;
    TemplateId graph;
    std::vector<TensorSetId> sets;  // no duplicates
  };

  void OnReadable();
  void OnReadableWhileExecutorIsAwaited();
  void Dispatch(const proto::Request& request, std::vector<Fd> fds);
  void ReplyError(const Status& status);
  void ReplyWith(proto::Reply reply, std::span<const int> fds = {});
  bool ReplyWithMemfd(const proto::Reply& reply);
  void Fault(const Status& status);

  Status Hello(const proto::Hello& hello, std::vector<Fd>* fds);
  Status CheckHello(const proto::Hello& hello, const TenantPolicy& policy, size_t fd_count) const;
  Result<DeviceIndex> ChooseHome(const std::string& name) const;
  // session_requests.cc
  Status RegisterGraph(const proto::RegisterGraph& request, std::vector<Fd>* fds);
  Status UnregisterGraph(uint64_t handle);
  Status ImportTensors(const proto::ImportTensors& request, std::vector<Fd>* fds);
  Status AllocTensors(const proto::AllocTensors& request);
  Status AddSet(const SegmentLayout& layout, engine::TensorKind kind, Fd home_memfd,
                proto::TensorsReply* reply);
  Status ReplicateTensors(const proto::ReplicateTensors& request);
  Status ReleaseTensors(const proto::ReleaseTensors& request);
  Status CheckSegmentQuota(const SegmentLayout& layout) const;
  void ReleaseSetIfUnused(TensorSetId id);
  Status CreateBinding(const proto::CreateBinding& request);
  Status DestroyBinding(uint64_t handle);
  // session_admin.cc
  Status Administer(const proto::Request& request, std::vector<Fd>* fds);
  Status WhatIf(const proto::WhatIf& request);
  Status ControlTimeline(const proto::TimelineControl& request, std::vector<Fd>* fds);
  void WriteTimeline(Fd file, Recording recording);
  std::vector<DomainIndex> DomainsOfTenant() const;
  // Around a request that is answered later: the socket only reports a hang-up. Resume is false
  // when the session ends.
  void Pause();
  bool Resume();
  TenantId tenant() const { return TenantId{number_}; }
  engine::TenantUser tenant_user() const { return {tenant(), peer_.uid}; }

  Services* services_;
  const uint32_t number_;
  Fd socket_;
  Peer peer_;
  bool is_tenant_ = false;
  bool busy_ = false;  // a request waits for the engine: the socket is not read
  bool ending_ = false;
  uint64_t request_id_ = 0;  // of the request being answered
  uint32_t faults_ = 0;
  TimeNs hello_deadline_;
  Status hello_refusal_;
  StatusCode farewell_ = StatusCode::kCancelled;

  std::string name_;
  uint64_t device_mask_ = 0;
  DeviceIndex home_ = 0;
  HandleTable<Graph> graphs_;
  HandleTable<Tensor> tensors_;
  HandleTable<Binding> bindings_;
  std::unordered_map<uint32_t, Set> sets_;
  uint64_t graph_bytes_ = 0;
  uint64_t memory_bytes_max_ = 0;
  uint64_t segment_bytes_ = 0;  // of all sets: address space of the executor, in each domain
};

}  // namespace slice::server
