// What a what-if simulation starts from: the live window of the GMG as flat arrays, in one reused
// arena.
//
// Built by the engine (which owns the GMG), read by the simulator and the policies. Plain data, no
// pointers into the GMG, no strings. Vectors are cleared and refilled: no allocation after warm-up.
// All times are absolute nanoseconds.
//
// Dependencies: an op depends on ops of its instance that make its inputs, and on earlier entries
// of the access queues of the managed tensors it touches (read-after-write, write-after-read,
// write-after-write across instances). Both are edges here. Edges from finished ops are left out.
#pragma once

#include <cstdint>
#include <vector>

#include "common/units.h"

namespace slice::sim {

using OpIndex = uint32_t;      // in Snapshot::ops
using TensorIndex = uint32_t;  // in Snapshot::tensors
inline constexpr uint32_t kNone = 0xffffffff;

enum class OpState : uint8_t { kUnscheduled, kPlaced, kIssued, kRunning };

struct SnapDevice {
  DomainIndex domain = 0;
  uint8_t kind = 0;    // device kind for durations (all CPU devices: 0)
  TimeNs free_at = 0;  // end of the running op as predicted (never before now), now if idle
  OpIndex running = kNone;
  bool hosts_online = false;  // an online tenant has its home or a live sequence here
  // Slice rule (scheduling.md section 6): an open online sequence is between two steps here. Until
  // phantom_until only offline ops that end before phantom_from may start. kNever/0 when there is
  // none.
  TimeNs phantom_from = kNever;
  TimeNs phantom_until = 0;
};

struct SnapDomain {
  int64_t free_bytes = 0;  // unreserved pool bytes
};

struct SnapOp {
  uint32_t instance = kNone;  // in Snapshot::instances
  uint32_t group = 0;         // group index in its template
  OpState state = OpState::kUnscheduled;
  DeviceIndex device = kNoDevice;  // placement, when placed or later
  ServiceClass service_class = ServiceClass::kOffline;
  bool deferred = false;
  int32_t priority = 0;
  uint64_t order = 0;            // engine order inside (class, priority): lower first
  TimeNs earliest = 0;           // not before
  DurationNs duration = 0;       // predicted, on device kind 0; other kinds: Snapshot::kind_scale
  uint64_t allowed_devices = 0;  // bit per device: memory, quota and pinning considered
  uint32_t pending = 0;          // predecessors in this snapshot
  uint32_t successors_begin = 0, successors_end = 0;  // in Snapshot::edges
  uint32_t reads_begin = 0,
           reads_end = 0;  // in Snapshot::uses: tensors that must be resident where it runs
  uint32_t writes_begin = 0, writes_end = 0;  // in Snapshot::uses: tensors that it makes or changes
  int64_t memory_bytes = 0;                   // outputs made in its domain
};

struct SnapTensor {
  int64_t bytes = 0;
  uint64_t resident =
      0;  // domains with a valid copy (bit mask); 0 = made later by an op of the window
  bool managed = false;  // exclusive when written; moves instead of copying
  bool pinned =
      false;  // may not leave `resident` (imported mutable); a constant without a replica elsewhere
  uint32_t consumers = 0;  // ops of the window that read it
  uint32_t instance =
      kNone;  // of an activation: its bytes are given back after the last consumer. kNone: retained
  uint64_t slots =
      0;  // retained: domains where its bytes are held even while it is elsewhere (home slot)
};

struct SnapTransfer {  // in flight: admitted or waiting
  TensorIndex tensor = kNone;
  DomainIndex source = 0, destination = 0;
  ServiceClass service_class = ServiceClass::kOffline;
  TimeNs finish = kNever;  // predicted, if admitted
};

struct SnapInstance {
  ServiceClass service_class = ServiceClass::kOffline;
  int32_t priority = 0;
  TimeNs arrival = 0;               // of its sequence
  TimeNs deadline = kNever;         // of its sequence
  DurationNs rest_of_sequence = 0;  // predicted work after this instance (expected further steps)
  uint32_t tenant = 0;
  uint64_t reserved_domains =
      0;  // its reservation holds what its ops make there: nothing comes out of free_bytes
  // Online, sequence open: when its last op of the window ends, a phantom opens on that device,
  // from end + gap_p10 until end + gap_p90 (quantiles of its service's gap). 0/0 = no next step
  // expected.
  DurationNs gap_p10 = 0, gap_p90 = 0;
};

struct Snapshot {
  TimeNs now = 0;
  std::vector<SnapDevice> devices;
  std::vector<SnapDomain> domains;
  std::vector<SnapInstance> instances;
  std::vector<SnapOp> ops;  // any topological order is fine; ids break ties
  std::vector<SnapTensor> tensors;
  std::vector<SnapTransfer> transfers;
  std::vector<OpIndex> edges;
  std::vector<TensorIndex> uses;
  std::vector<double>
      kind_scale;  // duration on a device kind / duration on kind 0; kinds beyond its end: 1
  // Offline ops longer than this go to devices without online tenants, if one is allowed
  // (scheduling.md section 6).
  DurationNs offline_op_max = kNever;
  void Clear();  // keeps the capacity
};

}  // namespace slice::sim
