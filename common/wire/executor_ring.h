// Records of the two rings between sliced's engine and slice-executor (fast path). The cold path
// (templates, segments, bindings) is executor.proto over a socket pair, each message acknowledged
// before the engine uses what it made.
//
// Every record is idempotent by (instance, op, attempt). Times are CLOCK_MONOTONIC nanoseconds.
// "op" is the index of a group in its template.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slice::wire {

inline constexpr uint32_t kExecutorRingVersion = 1;
inline constexpr size_t kExecutorRingCapacityBytes = size_t{1} << 20;

// ---- engine -> executor
// -------------------------------------------------------------------------------------------

enum CommandType : uint32_t {
  kStartInstance = 1,
  kEndInstance = 2,
  kIssue = 3,
  kRekey = 4,
  kRecall = 5,
  kWatch = 6,
  kRecv = 7,
  kSend = 8,
  kCancelTransfer = 9,
  kTensorCommandRun = 10,
  kDropReplica = 11,
};

// Followed by int64_t symbols[symbol_count], ArenaRange inputs[input_count] (DYNAMIC inputs in
// template order), ArenaRange outputs[output_count] (value outputs in template order). The executor
// copies integer inputs to private memory at once; others are copied by the first op that needs
// them.
struct StartInstance {
  uint64_t instance;
  uint32_t attempt;
  uint32_t binding;
  uint32_t tenant;
  uint32_t symbol_count;
  uint32_t input_count;
  uint32_t output_count;
};
struct ArenaRange {
  uint64_t offset;
  uint64_t bytes;
};
// No op of the instance will be issued any more. Launched ops and copies end, then everything it
// holds is freed and InstanceEnded is reported.
struct EndInstance {
  uint64_t instance;
  uint32_t attempt;
  uint32_t reserved;
};
enum IssueFlags : uint16_t {
  kAfterOnlineFinish = 1,  // may start directly behind an online op of the device
};
struct Issue {
  uint64_t instance;
  uint32_t attempt;
  uint32_t op;
  uint8_t device;
  uint8_t service_class;  // 0 online, 1 offline
  uint16_t flags;
  int32_t priority;     // higher first
  uint64_t order;       // engine order: lower first
  int64_t earliest_ns;  // offline window: not before
  int64_t end_by_ns;  // offline window: predicted end must not pass this, else Recalled; INT64_MAX
                      // = none
  int64_t duration_ns;  // predicted
};
struct Rekey {  // new order of an op that is issued and not launched
  uint64_t instance;
  uint32_t attempt;
  uint32_t op;
  int32_t priority;
  uint32_t reserved;
  uint64_t order;
};
// Take back an unlaunched op. Each Recall is answered: by Recalled with reason 0 (also when the
// executor had given the op back by itself a moment before), or by the op's Started/Finished. The
// op is not issued again before the answer.
struct Recall {
  uint64_t instance;
  uint32_t attempt;
  uint32_t op;
};
// A transfer is Watch (say Intent when the source is ready) -> Recv (make the destination) -> Send
// (copy). Source: a value of an instance (instance != 0) or a tensor of a set (instance == 0),
// always one whole value/tensor.
struct Watch {
  uint64_t transfer;
  uint64_t instance;
  uint32_t attempt;
  uint32_t value;  // value index, or tensor index in the set
  uint32_t set;    // instance == 0: the set
  uint8_t source_domain;
  uint8_t destination_domain;
  uint8_t service_class;  // order among copies
  uint8_t move;           // set transfers: 1 = the source's pages are released after TransferDone
                          // (DropReplica does it)
};
struct TransferRef {  // payload of kRecv, kSend, kCancelTransfer
  uint64_t transfer;
};
struct TensorCommandRun {  // fill, reset, crop, write, read at the head of the access queue;
                           // answered by CommandDone
  uint64_t command;
  uint32_t kind;  // wire::TensorCommandKind
  uint32_t set;
  uint32_t tensor;  // index in the set
  uint8_t domain;   // where the tensor resides
  uint8_t reserved[3];
  uint32_t tenant;  // whose arena
  int32_t dimension;
  uint64_t parameter;  // fill bits, crop length
  uint64_t arena_offset;
  uint64_t arena_bytes;
};
struct DropReplica {  // release the pages of a set's tensor in a domain (clean replica dropped, or
                      // moved away)
  uint32_t set;
  uint32_t tensor;  // 0xffffffff = all of the set
  uint8_t domain;
  uint8_t reserved[7];
};

// ---- executor -> engine
// -------------------------------------------------------------------------------------------

enum ReportType : uint32_t {
  kStarted = 101,
  kFinished = 102,
  kFailed = 103,
  kRecalled = 104,
  kIntent = 105,
  kTransferDone = 106,
  kCommandDone = 107,
  kInstanceEnded = 108,
};
// In the ring before the op touches anything: an op that never reported Started has written
// nothing.
struct Started {
  uint64_t instance;
  uint32_t attempt;
  uint32_t op;
  int64_t start_ns;
  uint32_t device;
  uint32_t reserved;
};
struct Finished {  // graph outputs that the op produces are in their arena slots already
  uint64_t instance;
  uint32_t attempt;
  uint32_t op;
  int64_t start_ns;
  int64_t end_ns;
  int64_t cpu_ns;      // thread CPU time
  int64_t peak_bytes;  // largest memory the op itself held (outputs included)
  uint32_t device;
  uint32_t reserved;
};
struct Failed {  // the instance's other ops are not run; the engine sends EndInstance
  uint64_t instance;
  uint32_t attempt;
  uint32_t op;
  int32_t status;        // slice_status_t
  uint32_t began_write;  // 1: a static input may be half written
  char text[104];        // zero terminated
};
struct Recalled {
  uint64_t instance;
  uint32_t attempt;
  uint32_t op;
  uint32_t reason;  // 0 asked for by Recall, 1 window no longer holds, 2 cannot get memory now
  uint32_t reserved;
};
struct Intent {
  uint64_t transfer;
  int64_t ready_ns;
};
struct TransferDone {
  uint64_t transfer;
  int64_t start_ns;
  int64_t end_ns;
  int64_t bytes;
  int32_t status;  // SLICE_OK, SLICE_ERR_NO_MEMORY, SLICE_ERR_CANCELLED
  uint32_t reserved;
};
struct CommandDone {
  uint64_t command;
  int32_t status;
  uint32_t reserved;
};
struct InstanceEnded {
  uint64_t instance;
  uint32_t attempt;
  uint32_t reserved;
};

static_assert(sizeof(Issue) == 56 && sizeof(Finished) == 56 && sizeof(Watch) == 32 &&
                  sizeof(StartInstance) == 32,
              "wire format");

}  // namespace slice::wire
