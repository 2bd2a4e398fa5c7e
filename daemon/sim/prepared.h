// A snapshot made ready to be simulated many times: packed arrays, built once a round and shared by
// all candidates. Inside of the simulator.
//
// Ops are renumbered by the order in which a free device takes them (RunsBefore): a ready queue is
// then a set of integers whose least is next, and the ops of a chain lie side by side. Most ops are
// *simple*: their device is fixed and, whatever the candidate, all inputs are there once the
// predecessors are done. Of a simple op 24 bytes say all: how long, what memory it takes and gives
// back, whom it makes ready. The others are *general* and look at the state of their tensors.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "daemon/sim/simulator.h"

namespace slice::sim {

constexpr uint64_t Bit(uint32_t index) { return uint64_t{1} << (index & 63); }
template <typename T>
size_t BytesIn(const std::vector<T>& v) {
  return v.size() * sizeof(T);
}

struct Prepared {
  static constexpr uint8_t kGeneral = 1;   // `take` is its index in `generals`
  static constexpr uint8_t kSink = 2;      // no successor inside its instance
  static constexpr uint8_t kManyNext = 4;  // `more` is where the successors behind the first begin
  static constexpr uint8_t kOnline = 8;
  struct Op {
    uint32_t duration;  // ns, on its device
    uint32_t take;      // bytes that it takes from its domain at its start
    uint32_t give;      // bytes that its domain gets back at its end
    uint32_t next;      // first successor, or kNone
    uint32_t more;      // second successor, or kNone
    uint16_t pending;   // predecessors; kManyPending: the snapshot says
    DeviceIndex device;
    uint8_t flags;
  };
  static constexpr uint16_t kManyPending = UINT16_MAX;
  static_assert(sizeof(Op) == 24, "bytes per op decide the speed of large graphs");

  struct General {
    OpIndex op = kNone;      // in the snapshot
    uint32_t batch = kNone;  // position in the batch
    // In `slots`: the tensors that it reads and whose place must be looked up, then those it
    // writes.
    uint32_t reads_begin = 0, writes_begin = 0, writes_end = 0;
    DeviceIndex device = kNoDevice;  // kNoDevice: the candidate or the rollout says
    bool online = false;
    int64_t made_settled = 0;  // bytes of its outputs that stay where they are made
    int64_t give_settled = 0;  // bytes that come back at its end, whatever happens elsewhere
  };

  // A tensor whose place changes or depends on the candidate.
  struct Tensor {
    uint64_t resident = 0;
    uint64_t held = 0;            // domains whose free bytes hold it
    uint64_t free_of_charge = 0;  // domains into which a copy takes nothing
    TensorIndex tensor = kNone;   // in the snapshot
    bool transient = false;       // an activation: ends with its last consumer
    bool pinned = false;
  };

  const Snapshot* snapshot = nullptr;
  Rules rules;
  uint32_t online_count = 0;  // ids below are taken whatever the phantom
  bool rollout = false;       // some device is left to the rollout
  std::vector<Op> ops;
  std::vector<OpIndex> index;   // by op: in the snapshot
  std::vector<uint32_t> edges;  // of kManyNext: a count, then the successors
  std::vector<General> generals;
  std::vector<uint32_t> slots;  // in `tensors`
  std::vector<Tensor> tensors;
  std::vector<SnapTransfer> transfers;  // of the snapshot, with `tensor` in `tensors`
  std::vector<uint32_t> running;        // by device: op or kNone
  std::vector<uint64_t> computing;      // by domain: devices
  std::vector<uint32_t> sinks;          // by instance
  std::vector<uint32_t> batch;          // generals of the batch

  size_t bytes() const;  // in use
};

// Builds a Prepared; keeps scratch between calls.
class Preparation {
 public:
  // `batch`: ops whose device depends on the candidate. The snapshot must outlive `out`'s use.
  void Run(const Snapshot& snapshot, std::span<const OpIndex> batch, Rules rules, Prepared* out);

 private:
  enum class Place : uint8_t { kUnknown, kOne, kMany };
  struct Uses {  // what the ops of the window do with a tensor
    uint32_t reads = 0;
    uint8_t writers = 0;  // 2: two or more
    DomainIndex domain = 0;
    Place place = Place::kUnknown;
    bool settled = false;  // needs no state: always where its readers are
    bool held = false;     // settled: its domain's free bytes hold it
    bool writer_reserved = false;
    uint32_t slot = kNone;
  };
  struct Rank {
    uint64_t high, order;
    OpIndex op;
  };
  void Order();
  void PlaceOps(std::span<const OpIndex> batch);
  void ScanUses();
  void Settle(TensorIndex tensor);
  bool Simple(OpIndex op) const;
  void Emit(uint32_t id);
  void EmitGeneral(OpIndex op, uint32_t id, int64_t made, int64_t give);
  void EmitEdges(OpIndex op, Prepared::Op* out);
  bool Satisfied(TensorIndex tensor, DeviceIndex device) const;
  uint32_t Slot(TensorIndex tensor);
  uint64_t Reserved(uint32_t instance) const {
    return instance < s_->instances.size() ? s_->instances[instance].reserved_domains : 0;
  }

  const Snapshot* s_ = nullptr;
  Prepared* out_ = nullptr;
  uint64_t domains_ = 0;  // mask of those that some device computes in
  std::vector<Rank> ranks_, merged_;
  std::vector<size_t> runs_;
  std::vector<uint32_t> id_;                            // by snapshot op
  std::vector<DeviceIndex> device_;                     // by snapshot op: fixed device or kNoDevice
  std::vector<Uses> uses_;                              // by tensor
  std::vector<std::pair<OpIndex, uint32_t>> in_batch_;  // op, position; sorted
};

}  // namespace slice::sim
