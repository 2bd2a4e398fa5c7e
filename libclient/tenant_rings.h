// Tenant's ends of the two shared-memory rings (layout and memory order:
// common/wire/tenant_ring.h). Not thread-safe: the session's mutex guards both. Must not depend on:
// sockets, tickets.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "common/status.h"
#include "common/wire/tenant_ring.h"

namespace slice::client {

// Producer of submit slots and of their arguments. The argument area is used as a ring of bytes as
// well: positions count for ever, one slot's arguments never wrap, and they are free again when
// submit_head has passed the slot.
class SubmitRing {
 public:
  // Both memories outlive the ring; zeroed memory is an empty ring.
  SubmitRing(std::byte* tenant_memory, std::byte* daemon_memory)
      : tenant_memory_(tenant_memory), daemon_memory_(daemon_memory) {}

  // Writes arguments and slot (args_offset and args_bytes are set here), then publishes. Nothing is
  // written on failure. Errors: kWouldBlock (no slot or no room for arguments now), kInvalid (the
  // arguments can never fit), kProtocol (the daemon's head is impossible).
  Status Push(wire::SubmitSlot slot, std::span<const wire::Argument> arguments);
  // Slots that the daemon has not taken.
  [[nodiscard]] bool SlotsWait() const;
  // After Push, and after completions were consumed while slots wait: must the daemon be woken?
  // Contains the seq_cst fence.
  [[nodiscard]] bool DaemonSleeps() const;

 private:
  Status TakeConsumed();

  std::byte* tenant_memory_;
  std::byte* daemon_memory_;  // read-only mapping
  uint64_t tail_ = 0;
  uint64_t head_ = 0;  // as last read from the daemon
  uint64_t arguments_tail_ = 0;
  uint64_t arguments_head_ = 0;
  std::array<uint64_t, wire::kRingSlots> arguments_end_{};  // by slot: arguments_tail_ after it
};

// Consumer of completion slots.
class CompletionRing {
 public:
  CompletionRing(std::byte* tenant_memory, std::byte* daemon_memory)
      : tenant_memory_(tenant_memory), daemon_memory_(daemon_memory) {}

  [[nodiscard]] bool Empty() const;
  // Copies the next completion; false = none. Errors: kProtocol (impossible tail).
  Result<bool> Pop(wire::CompletionSlot* slot);
  // Tells the daemon what was consumed; once per batch.
  void Publish();

 private:
  std::byte* tenant_memory_;
  std::byte* daemon_memory_;  // read-only mapping
  uint64_t head_ = 0;
};

}  // namespace slice::client
