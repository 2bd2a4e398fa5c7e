// The shared-memory fast path between a tenant (libslice) and sliced: one submit ring, one
// completion ring.
//
// Two sealed memfds per session, so that each side can write only what it owns:
//
//   tenant memfd (tenant read-write, daemon read-only)          daemon memfd (daemon read-write,
//   tenant read-only,
//                                                                F_SEAL_FUTURE_WRITE)
//   0     submit_tail      u64  tenant                          0     submit_head       u64  daemon
//   64    completion_head  u64  tenant                          64    completion_tail   u64  daemon
//   4096  SubmitSlot[kRingSlots]                                128   daemon_sleeping   u32  daemon
//   ..    argument area, kArgumentAreaBytes                     4096  CompletionSlot[kRingSlots]
//
// Indices count slots for ever; slot = index % kRingSlots. A producer writes the slot, then stores
// its tail with release; the consumer loads the tail with acquire. The consumer keeps its own head
// privately and only publishes it. The daemon reads a tail once, refuses tail - head > kRingSlots,
// copies the slot and its arguments to private memory once, and only then checks and uses them.
// Arguments of a slot stay the tenant's to keep until submit_head passes it.
//
// Waking: the tenant stores its tail, issues a seq_cst fence, and writes the daemon's eventfd only
// if daemon_sleeping is 1. The daemon sets daemon_sleeping (seq_cst), looks at every ring once
// more, then sleeps. The daemon writes the tenant's eventfd after each batch of completions. It
// takes no slot while kRingSlots completions are unread: a tenant that stores completion_head while
// slots of its wait does the same as after storing its tail, or they may wait for a minute.
//
// Layout version: kTenantRingVersion, exchanged in Hello. Any change of a size, an offset or a
// meaning bumps it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slice::wire {

inline constexpr uint32_t kTenantRingVersion = 1;
inline constexpr uint32_t kRingSlots = 256;  // the queue bound of a session: more is WOULD_BLOCK
inline constexpr uint32_t kArgumentAreaBytes = 256 * 1024;
inline constexpr size_t kSubmitTailOffset = 0;
inline constexpr size_t kCompletionHeadOffset = 64;
inline constexpr size_t kSubmitHeadOffset = 0;
inline constexpr size_t kCompletionTailOffset = 64;
inline constexpr size_t kDaemonSleepingOffset = 128;
inline constexpr size_t kSlotsOffset = 4096;
inline constexpr size_t kArgumentsOffset = kSlotsOffset + kRingSlots * 64;
inline constexpr size_t kTenantRingBytes = kArgumentsOffset + kArgumentAreaBytes;
inline constexpr size_t kDaemonRingBytes = kSlotsOffset + kRingSlots * 64;

// flags, bits 0-7: what the slot asks for.
enum SubmitOpcode : uint32_t {
  kSubmitGraph = 0,  // run `binding`; arguments: symbols, dynamic inputs, outputs (see Argument)
  kSequenceOpen =
      1,  // `sequence` is a new number chosen by the client; deadline_ns, priority; no completion
  kSequenceClose = 2,  // no completion
  kCancel = 3,         // `binding` holds the cookie to cancel; no completion of its own
  kTensorCommand = 4,  // flags bits 8-15: TensorCommandKind; one argument per tensor
};
enum TensorCommandKind : uint32_t {
  kTensorReset = 0,  // zero, and clear `lost`
  kTensorFill = 1,   // deadline_ns holds the element's bits (element size bytes, little endian)
  kTensorCrop =
      2,  // deadline_ns = length; zero everything at or past it along `priority` (the dimension)
  kTensorWrite = 3,  // arena [offset, offset+bytes) -> whole tensor, dense
  kTensorRead = 4,   // whole tensor, dense -> arena [offset, offset+bytes)
};
inline constexpr uint32_t kOpcodeMask = 0xff;
inline constexpr uint32_t kCommandKindShift = 8;
// flags, bits 16-17 (kSequenceOpen): class. 0 = the session's, 1 = online, 2 = offline (may lower,
// never raise).
inline constexpr uint32_t kClassShift = 16;

struct SubmitSlot {
  uint64_t cookie;       // chosen by the client, echoed in the completion
  uint64_t binding;      // handle
  uint64_t sequence;     // 0: a sequence of one
  uint64_t deadline_ns;  // CLOCK_MONOTONIC; 0 = none (kSubmitGraph: overrides the sequence's)
  uint32_t args_offset;  // into the argument area, multiple of 8
  uint32_t args_bytes;   // multiple of sizeof(Argument)
  int32_t priority;      // inside the class; higher first
  uint32_t flags;
  uint8_t reserved[16];  // must be zero
};
static_assert(sizeof(SubmitSlot) == 64, "slot size is wire format");

// kSubmitGraph: first one per symbol {kArgSymbol | index, value, 0}, then one per DYNAMIC input in
// template order {kArgArena, offset, bytes}, then one per value output in template order
// {kArgArena, offset, bytes}. kTensorCommand: {tensor handle, arena offset, bytes}.
inline constexpr uint64_t kArgSymbol = uint64_t{1} << 56;
inline constexpr uint64_t kArgArena = uint64_t{2} << 56;
struct Argument {
  uint64_t handle;
  uint64_t offset;  // into the session's arena (multiple of 64), or the symbol's value (two's
                    // complement)
  uint64_t bytes;
};
static_assert(sizeof(Argument) == 24, "argument size is wire format");

struct CompletionSlot {
  uint64_t cookie;
  int32_t status;               // slice_status_t
  uint32_t failed_op;           // group index, 0xffffffff = none
  int64_t submit_ns;            // when the daemon took the slot
  int64_t start_ns;             // first op launched
  int64_t finish_ns;            // last op finished
  int64_t predicted_finish_ns;  // predicted when submitted; 0 = no prediction
  uint32_t text_token;          // != 0: a longer text can be asked for over the socket (ErrorText)
  uint8_t reserved[12];
};
static_assert(sizeof(CompletionSlot) == 64, "slot size is wire format");

}  // namespace slice::wire
