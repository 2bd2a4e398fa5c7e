// The executor's state: what the engine asked for (one command ring), what runs where, what is
// being copied.
//
//   service thread   cold path: makes templates, segments, bindings outside the mutex, publishes
//   them under it device threads   one per device: drain the command ring, choose, run one op at a
//   time (device_thread.cc) copy thread      transfers in chunks, tensor commands (copier.cc)
//
// Any thread that wakes drains the whole command ring under the state mutex, puts work into the
// queues of the devices concerned and signals those that sleep. Before a thread sleeps or runs an
// op, the ring's sleep flag is set and the ring seen empty: as long as nobody is about to look, the
// engine's next push finds the flag and wakes somebody. A device's eventfd is watched by its own
// thread first and by the copy thread when that one is busy (exclusive wake-ups), so commands never
// wait for a running op.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/clock.h"
#include "common/fd.h"
#include "common/log.h"
#include "common/status.h"
#include "common/wire/executor_ring.h"
#include "common/wire/record_ring.h"
#include "daemon/executor/binding.h"
#include "daemon/executor/device_backend.h"
#include "daemon/executor/instance.h"
#include "daemon/executor/launch_queue.h"
#include "daemon/executor/report_sink.h"
#include "slice/proto/executor.pb.h"

namespace slice::executor {

inline constexpr int kCopyThread = -1;  // where a device index says who is draining

class Executor {
 public:
  Executor() = default;

  // ---- cold path; service thread only. Errors: as executor.proto says, INVALID and STALE for
  // wrong ids.
  Status Setup(const proto::ExecutorSetup& request, std::vector<Fd>* fds);
  Status AddTemplate(const proto::ExecutorTemplate& request, const std::vector<Fd>& fds);
  Status AddSet(const proto::ExecutorTensorSet& request, std::vector<Fd>* fds);
  Status AddTenant(const proto::ExecutorTenant& request, const std::vector<Fd>& fds);
  Status AddBinding(const proto::ExecutorBinding& request);
  Status DropTemplate(uint32_t id);
  Status DropSet(uint32_t id);
  Status DropTenant(uint32_t id);
  Status DropBinding(uint32_t id);
  void Describe(proto::ExecutorAck* ack) const;

 private:
  struct Device {
    uint32_t index = 0;
    proto::ExecutorDevice config;
    Fd event;  // engine and other threads signal it
    Fd poll;   // epoll of `event`, exclusive
    LaunchQueue queue;
    bool sleeping = false;
    bool behind_online = false;  // the op that finished last was online
    std::thread thread;
  };
  struct Transfer {
    wire::Watch watch{};
    uint64_t order = 0;  // arrival
    std::shared_ptr<Instance> instance;
    std::shared_ptr<TensorSet> set;
    bool intent = false;  // reported: the source is ready
    bool recv = false, send = false;
    bool made = false;  // the destination exists
    bool cancelled = false;
    bool busy = false;  // the copy thread works on it outside the mutex
    at::Tensor source, destination;
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    size_t bytes = 0, done = 0;
    TimeNs start_ns = 0;
  };
  struct LaunchedOp {
    QueuedOp op;
    std::shared_ptr<Instance> instance;
    std::vector<Instance::Missing> missing;
    TimeNs start_ns = 0;
  };

  // ---- commands (executor_commands.cc); the mutex is held
  void DrainLocked();
  void HandleLocked(uint32_t type, const std::vector<std::byte>& payload);
  void OnStartInstance(const std::vector<std::byte>& payload);
  void OnEndInstance(const wire::EndInstance& command);
  void OnIssue(const wire::Issue& command);
  void OnRekey(const wire::Rekey& command);
  void OnRecall(const wire::Recall& command);
  void OnWatch(const wire::Watch& command);
  void OnRecv(const wire::TransferRef& command);
  void OnSend(const wire::TransferRef& command);
  void OnCancelTransfer(const wire::TransferRef& command);
  Instance* FindInstance(uint64_t id, uint32_t attempt);
  std::shared_ptr<Instance> ShareInstance(uint64_t id, uint32_t attempt);
  void RefreshReady(Instance* instance);  // its queued ops, and transfers that watch its values
  void ReportIntentIfReady(Transfer* transfer);
  void FailInstance(Instance* instance, uint32_t op, const Status& why, bool began_write);
  void DropQueued(const Instance& instance);
  void EndIfIdle(const std::shared_ptr<Instance>& instance);
  void FinishTransfer(uint64_t id, StatusCode code);
  void Recalled(const OpKey& key, uint32_t reason);
  // Sets the sleep flag, drains what came meanwhile, wakes threads that got work. True when
  // something was drained.
  bool LeaveLocked(int self);
  // Wakes threads that got work. True when `self` did.
  bool WakeLocked(int self);

  // ---- device threads (device_thread.cc)
  void RunDevice(Device* device);
  bool ChooseLocked(Device* device, LaunchedOp* launched, Frame* frame, TimeNs* wake_ns);
  void Execute(Device* device, LaunchedOp* launched, Frame* frame);
  bool SleepDevice(Device* device, TimeNs wake_ns);

  // ---- copy thread (copier.cc)
  void RunCopier();
  bool CopyStepLocked(std::unique_lock<std::mutex>* lock);
  void MakeDestination(std::unique_lock<std::mutex>* lock, Transfer* transfer);
  void CopyChunk(std::unique_lock<std::mutex>* lock, Transfer* transfer);
  void RunTensorCommand(std::unique_lock<std::mutex>* lock, const wire::TensorCommandRun& command);
  void DropReplica(std::unique_lock<std::mutex>* lock, const wire::DropReplica& command);

  mutable std::mutex mutex_;
  std::unique_ptr<DeviceBackend> backend_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<proto::ExecutorDomain> domains_;
  Mapping ring_memory_;
  std::optional<RecordRing> ring_;
  RecordRing::Record record_;  // reused by DrainLocked
  std::unique_ptr<ReportSink> reports_;

  std::unordered_map<uint32_t, std::shared_ptr<const Program>> templates_;
  std::unordered_map<uint32_t, std::shared_ptr<TensorSet>> sets_;
  std::unordered_map<uint32_t, std::shared_ptr<TenantMemory>> tenants_;
  std::unordered_map<uint32_t, std::shared_ptr<Binding>> bindings_;
  std::map<std::pair<uint64_t, uint32_t>, std::shared_ptr<Instance>> instances_;
  std::map<uint64_t, Transfer>
      transfers_;  // node-based: the copy thread keeps a pointer while `busy`
  struct CopyCommand {
    std::optional<wire::TensorCommandRun> tensor;
    std::optional<wire::DropReplica> drop;
  };
  std::deque<CopyCommand> copy_commands_;
  uint64_t transfer_order_ = 0;

  uint64_t wake_devices_ = 0;  // bit per device that got work
  bool wake_copier_ = false;
  bool copier_sleeping_ = false;
  Fd copier_event_;
  Fd copier_poll_;
  std::thread copier_;
  std::thread prefault_;
  RateLimitedLog tenant_faults_{"executor", 5};  // copy thread only
  int executing_ = 0;                            // device threads inside an op
  bool may_spin_ = false;                        // more CPUs than threads
};

// tensor_commands.cc: reset, fill, crop, write or read of one tensor. Bounds are checked. Errors:
// INVALID, BOUNDS.
Status ApplyTensorCommand(const wire::TensorCommandRun& command, TensorSet* set,
                          TenantMemory* tenant);

}  // namespace slice::executor
