// One simulation of a prepared snapshot: its state and the event loop. Inside of the simulator.
//
// Time advances over the devices' ends, packed with their index into one integer each: the least is
// next, and what ends at one time comes in the order of devices. Everything that happens at one
// time is taken before anything starts. Copies, windows and phantoms are rare and kept aside
// (`side_next`).
//
// The state is a few flat arrays, about 5 bytes per op: a candidate starts from a copy of the
// common prefix's. (Undoing instead would cost a log entry for every write; copying the state of
// 1,024 ops takes as long as simulating five.)
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/sim/copy_times.h"
#include "daemon/sim/prepared.h"
#include "daemon/sim/simulator.h"

namespace slice::sim {

struct SimulationState {
  static constexpr uint64_t kIdle = UINT64_MAX;
  struct Device {
    uint32_t running = kNone;  // op
    DomainIndex domain = 0;
    TimeNs ends = 0;
    TimeNs phantom_from = kNever, phantom_until = 0;
    TimeNs wake_at = 0;             // timer set for the end of the phantom
    int64_t refund = 0;             // bytes that a general op gives back at its end
    DurationNs backlog_online = 0;  // released, not started; kept where a rollout asks
    DurationNs backlog_offline = 0;
  };
  struct Domain {
    int64_t free_bytes = 0, free_bytes_min = 0;
    std::array<uint32_t, 2> sending = {kNone, kNone};    // intent on its sending side, by lane
    std::array<uint32_t, 2> incoming = {kNone, kNone};   // and on its receiving side
    std::array<TimeNs, 2> copy_ends = {kNever, kNever};  // of `incoming`
    LinkSide sends, receives;
  };
  struct General {
    TimeNs earliest = 0;
    uint32_t missing = 0;  // inputs on their way
    DeviceIndex device = kNoDevice;
  };
  struct Tensor {
    uint64_t resident = 0;
    uint64_t incoming = 0;  // domains to which a copy waits or runs
    uint64_t held = 0;      // domains whose free bytes hold it: given back at its end
    uint32_t consumers = 0;
  };
  struct Intent {
    uint32_t tensor = kNone;
    DomainIndex source = 0, destination = 0;
    ServiceClass service_class = ServiceClass::kOffline;
    uint32_t waiters = kNone;  // list in `waiters`
  };
  struct Waiter {
    uint32_t op = kNone;
    uint32_t next = kNone;
  };
  struct Timer {
    TimeNs at = 0;
    uint32_t what = 0;  // op, or kPhantomTimer | device
  };
  TimeNs now = 0;
  TimeNs side_next = kNever;  // next end of a copy, or timer
  uint64_t look = 0;          // devices that may have something to start
  uint32_t unstarted = 0;
  uint32_t batch_unfinished = 0;
  DurationNs batch_work = 0;  // of its ops that have not started, on the candidate's device
  TimeNs batch_finish = 0;
  int64_t bytes_moved = 0;
  Infeasible infeasible;
  bool admit = false;
  std::vector<uint64_t> keys;    // by device: (end - snapshot's now) << 8 | device
  std::vector<uint64_t> groups;  // least of 8 keys each
  std::vector<uint32_t> left;    // by op: predecessors that have not ended; kStarted
  std::vector<uint64_t> ready;   // by device: set of ops (ReadySet)
  std::vector<Device> devices;
  std::vector<Domain> domains;
  std::vector<General> generals;
  std::vector<Tensor> tensors;
  std::vector<InstanceProgress> instances;
  std::vector<Intent> intents;
  std::vector<uint32_t> waiting;  // intents by (class, age)
  uint64_t receiving = 0;         // domains that a copy enters
  std::vector<Waiter> waiters;
  std::vector<Timer> timers;       // heap, earliest first
  std::vector<uint32_t> released;  // general ops, at `now`
  std::vector<uint32_t> fresh;     // simple ops that became ready at `now`, not yet in a backlog;
                                   // where a rollout asks
  std::vector<uint32_t> due;       // of the batch: ready before the candidate was known

  size_t bytes() const;
};

class Simulation {
 public:
  Simulation(const estimate::TransferEstimator& transfers, const Options& options)
      : options_(options), copy_times_(transfers, options.transfer_overhead) {}

  // Starts over from the snapshot and runs until an op of the batch is ready, or to the end.
  // `rollout`: the candidates may leave a device to it.
  void Prefix(const Prepared& prepared, bool rollout, Timeline* trace);
  // Takes over the prefix that `other` ran.
  void Start(const Simulation& other, const SimulationState& prefix);
  // The batch goes where the candidate (or each placement) says.
  void Place(const Candidate& candidate);
  void Place(std::span<const Placement> placements);
  // To the end; false: beaten before. `bound` may be null.
  bool Finish(const Bound* bound, size_t candidate);
  void Summarise(bool beaten, Outcome* out);
  void Summarise(Timeline* out);
  SimulationState& state() { return st_; }

 private:
  static constexpr uint32_t kPhantomTimer = 0x80000000;
  static constexpr uint32_t kStarted = 0xffffffff;
  static constexpr uint32_t kLevelsMax = 4;  // of a ready set: 64^4 ops
  static constexpr size_t kOnlineLane = 0, kOfflineLane = 1;

  void Load();
  void LoadTransfers();
  void LoadDevices();
  bool Loop();
  template <uint32_t kLevels, bool kPlain>
  bool LoopOn();
  template <uint32_t kLevels, bool kPlain>
  uint64_t TakeEnds(uint64_t next);
  bool Beaten(TimeNs at);
  uint64_t NextKey() const;
  void SetKey(uint32_t device, uint64_t key);  // of one that is idle
  void ClearKey(uint32_t device);
  TimeNs TimeOf(uint64_t key) const { return s_->now + static_cast<TimeNs>(key >> 8); }
  uint64_t KeyOf(TimeNs at, uint32_t device) const;

  // Ops. kLevels: of the ready sets. kPlain: nobody asks for a rollout or a trace.
  template <uint32_t kLevels, bool kPlain>
  void FinishOn(uint32_t device);
  template <uint32_t kLevels, bool kPlain>
  void Arrive(uint32_t op);
  template <uint32_t kLevels, bool kPlain>
  uint64_t StartOn(uint32_t device);
  void FinishGeneral(uint32_t device, const Prepared::General& general);
  void FinishSink(uint32_t device, uint32_t op);
  void PredecessorsDone(uint32_t op);
  void ReleaseAll();
  void Release(uint32_t op);
  void Enqueue(uint32_t op, DeviceIndex device);
  uint32_t PickInGap(uint32_t device);
  DurationNs StartGeneral(uint32_t device, uint32_t op);
  DurationNs Duration(uint32_t op, DeviceIndex device) const;
  DeviceIndex Rollout(uint32_t op) const;
  TimeNs QueueEnd(uint32_t device, bool behind_offline) const;
  uint64_t DevicesIn(uint64_t domains) const;
  DurationNs CopiesTo(const Prepared::General& op, DomainIndex destination) const;
  void OpenPhantom(const SnapInstance& instance, uint32_t device);
  void CountFresh(uint32_t before);
  DurationNs& Backlog(uint32_t op, uint32_t device);

  // The ready set of a device: a tree of bits, each level telling which words below are not empty.
  uint64_t* Words(uint32_t device, uint32_t level) {
    return &st_.ready[size_t{device} * stride_ + level_at_[level]];
  }
  const uint64_t* Words(uint32_t device, uint32_t level) const {
    return &st_.ready[size_t{device} * stride_ + level_at_[level]];
  }
  template <uint32_t kLevels>
  void Insert(uint32_t device, uint32_t op);
  template <uint32_t kLevels>
  void Remove(uint32_t device, uint32_t op);
  template <uint32_t kLevels>
  uint32_t First(uint32_t device) const;              // kNone: empty
  uint32_t Next(uint32_t device, uint32_t op) const;  // the first at or after `op`

  // Copies.
  void EndSide();
  void CompleteCopy(DomainIndex destination, size_t lane);
  void Request(uint32_t slot, DomainIndex destination, uint32_t op, ServiceClass service_class);
  void AdmitCopies();
  void Pause(uint32_t offline, DurationNs duration);
  DurationNs CopyTime(DomainIndex source, DomainIndex destination, int64_t bytes) const {
    return copy_times_.Of(source, destination, bytes);
  }
  DomainIndex SourceFor(uint32_t slot, DomainIndex destination) const;
  ServiceClass LaneClass(ServiceClass service_class) const {
    return p_->rules.classes ? service_class : ServiceClass::kOffline;
  }
  void AddTimer(TimeNs at, uint32_t what);
  void RenewSideNext();

  // Memory.
  void Take(DomainIndex domain, int64_t bytes, OpIndex op, TensorIndex tensor);
  void ShortOfMemory(DomainIndex domain, OpIndex op, TensorIndex tensor);
  void TraceMemory();
  void EndTensor(uint32_t slot);
  int64_t BytesOf(uint32_t slot) const;
  bool Reserved(const Prepared::General& general, DomainIndex domain) const;

  const Options& options_;
  const Prepared* p_ = nullptr;
  const Snapshot* s_ = nullptr;
  Timeline* trace_ = nullptr;
  TimeNs end_ = 0;
  uint32_t levels_ = 2;
  uint32_t stride_ = 0;                          // words of a device's ready set
  std::array<uint32_t, kLevelsMax> level_at_{};  // where a level begins in it
  bool slices_ = false;
  bool rollout_ = false;
  bool prefix_ = false;  // the candidate is not known yet
  bool pause_ = false;   // an op of the batch is ready: now it must be
  const Bound* bound_ = nullptr;
  size_t candidate_ = 0;
  DeviceIndex candidate_device_ = kNoDevice;
  TimeNs ask_at_ = kNever;
  SimulationState st_;
  mutable CopyTimes copy_times_;
};

}  // namespace slice::sim
