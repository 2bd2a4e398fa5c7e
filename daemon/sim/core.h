// Inside of the what-if simulator: scratch arrays and the event loop. Only simulator.cc includes
// this.
//
// Time advances over `slot_`: one entry per device (end of its op) and two per domain (ends of the
// copies that come in, one of each class), beside a small heap of timers (ops held back by
// `earliest`, ends of phantoms). With at most 64 devices a linear minimum over the slots beats a
// heap. Everything that happens at one time is taken before anything starts.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/sim/simulator.h"

namespace slice::sim {

class Simulator::Core {
 public:
  Core(const estimate::TransferEstimator& transfers, const Options& options)
      : transfers_(transfers), options_(options) {}
  void Run(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules, Timeline* out);

 private:
  struct Op {  // what the loop needs of a SnapOp and its overlay
    TimeNs earliest = 0;
    uint32_t pending = 0;
    uint32_t missing = 0;  // inputs on their way
    DeviceIndex device = kNoDevice;
    bool online = false;
  };
  struct Tensor {
    uint64_t resident = 0;
    uint64_t incoming = 0;  // domains to which a copy waits or runs
    uint64_t held = 0;      // domains whose free bytes hold it: given back at its end
    uint32_t consumers = 0;
    bool transient = false;  // an activation: ends with its last consumer
  };
  struct Ready {  // entry of a device's queue
    QueueKey key;
    DurationNs duration = 0;
  };
  struct Device {
    std::vector<Ready> online, offline;  // heaps, best first
    OpIndex running = kNone;
    int64_t refund = 0;             // bytes that the running op gives back at its end
    DurationNs backlog_online = 0;  // released, not started
    DurationNs backlog_offline = 0;
    TimeNs phantom_from = kNever;
    TimeNs phantom_until = 0;
    TimeNs wake_at = 0;  // timer set for the end of the phantom
  };
  struct Domain {
    int64_t free_bytes = 0;
    std::array<uint32_t, 2> sending = {kNone, kNone};   // intent on its sending side, by lane
    std::array<uint32_t, 2> incoming = {kNone, kNone};  // and on its receiving side
  };
  struct Intent {
    TensorIndex tensor = kNone;
    DomainIndex source = 0, destination = 0;
    ServiceClass service_class = ServiceClass::kOffline;
    uint32_t waiters = kNone;  // list in waiters_
  };
  struct Waiter {
    OpIndex op = kNone;
    uint32_t next = kNone;
  };
  struct Timer {
    TimeNs at = 0;
    uint32_t what = 0;  // op, or kPhantomTimer | device
  };
  static constexpr uint32_t kPhantomTimer = 0x80000000;
  static constexpr size_t kOnlineLane = 0, kOfflineLane = 1;

  void Load(std::span<const Placement> batch);
  void LoadDevices();
  void LoadTransfers();
  void Advance();
  void PredecessorsDone(OpIndex op);
  void ReleaseAll();
  void Release(OpIndex op);
  DeviceIndex Rollout(OpIndex op) const;
  void Request(TensorIndex tensor, DomainIndex destination, OpIndex op);
  void AdmitTransfers();
  bool Blocked(const Intent& intent) const;
  void Pause(uint32_t offline, DurationNs duration);
  void CompleteTransfer(DomainIndex destination, size_t lane);
  // Copies of a worse class do not stand in the way of a better one: each class has a lane of its
  // own.
  size_t Lane(const Intent& intent) const {
    return rules_.classes && intent.service_class == ServiceClass::kOnline ? kOnlineLane
                                                                           : kOfflineLane;
  }
  TimeNs& CopySlot(DomainIndex destination, size_t lane) {
    return slot_[devices_.size() + destination * 2 + lane];
  }
  void Enqueue(OpIndex op);
  void StartOn(DeviceIndex device);
  bool Pick(DeviceIndex device, Ready* picked);
  void FinishOn(DeviceIndex device);
  void EndOfInstance(const SnapInstance& instance, Device* device);
  void Take(DomainIndex domain, int64_t bytes);
  void EndTensor(TensorIndex tensor);
  void AddTimer(TimeNs at, uint32_t what);
  void Summarise();

  DurationNs Duration(OpIndex op, DeviceIndex device) const {
    return OpDuration(*snapshot_, op, device);
  }
  QueueKey Key(OpIndex op) const;
  DomainIndex DomainOf(DeviceIndex device) const { return snapshot_->devices[device].domain; }
  bool Reserved(const SnapOp& op, DomainIndex domain) const;
  DurationNs CopyTime(DomainIndex source, DomainIndex destination, TensorIndex tensor) const;
  DomainIndex SourceFor(TensorIndex tensor, DomainIndex destination) const;

  const estimate::TransferEstimator& transfers_;
  const Options& options_;
  const Snapshot* snapshot_ = nullptr;
  Timeline* out_ = nullptr;
  Rules rules_;
  TimeNs now_ = 0;
  TimeNs end_ = 0;

  std::vector<Op> ops_;
  std::vector<Tensor> tensors_;
  std::vector<Device> devices_;
  std::vector<Domain> domains_;
  std::vector<TimeNs> slot_;  // devices, then lanes of domains; kNever = nothing under way
  std::vector<uint32_t> instance_ops_;  // not finished, by instance
  std::vector<Intent> intents_;
  std::vector<uint32_t> waiting_;  // intents by (class, age)
  std::vector<Waiter> waiters_;
  std::vector<Timer> timers_;      // heap, earliest first
  std::vector<OpIndex> released_;  // at now_
  uint64_t look_ = 0;              // devices that may have something to start
  bool admit_ = false;
};

}  // namespace slice::sim
