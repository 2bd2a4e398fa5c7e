// The daemon's ends of one session's shared-memory rings (layout, memory order:
// common/wire/tenant_ring.h).
//
// Everything in the tenant's memfd is hostile: indices are read once and checked, slots and
// arguments are copied once into private memory. The daemon never waits for the tenant and never
// blocks in waking it: eventfds are shared open file descriptions, so a tenant could drain or fill
// one and clear its O_NONBLOCK. Therefore the submit eventfd is only watched edge-triggered and
// never read, and "client eventfd" of the handshake is one end of a socket pair of which each
// readable 8 bytes are one wake-up: sending never blocks, and nothing is sent while an earlier
// wake-up is unread.
//
// Completions cannot overflow their ring: a slot is taken only while fewer than kRingSlots
// completions are promised and not yet consumed.
//
// Owner: engine loop. Threads: the engine thread, except Create and submit_event().
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/fd.h"
#include "common/status.h"
#include "common/wire/tenant_ring.h"

namespace slice::server {

class TenantRing {
 public:
  // For the Hello reply.
  struct Handout {
    Fd daemon_ring;  // sealed FUTURE_WRITE: the tenant cannot write it
    Fd submit_event;
    Fd completion_event;
  };
  // `tenant_memfd` comes from the tenant. Errors: INVALID/BOUNDS (not such a memfd), NO_MEMORY.
  static Result<std::unique_ptr<TenantRing>> Create(const Fd& tenant_memfd, Handout* handout);

  // One slot, copied. `status` is not OK when its arguments cannot even be copied or reserved bytes
  // are set.
  struct Submission {
    wire::SubmitSlot slot{};
    std::vector<wire::Argument> arguments;  // reused
    Status status;
  };
  // False: nothing there, or throttled(). kProtocol: the indices are impossible, end the session.
  Result<bool> Take(Submission* submission);
  // Slots wait but as many completions as the ring holds are unread. A tenant signals when it has
  // read some and sees that slots wait; one that does not must be looked at again.
  bool throttled() const { return throttled_; }
  // Take may give a slot, or an error: something is there, and if throttled, completions were read.
  bool HasSubmissions() const;
  // After a batch of Take: the slots and arguments are the tenant's again.
  void PublishTaken();

  // Each taken slot that gets a completion: promise it first, then Complete exactly once.
  void Promise() { ++promised_; }
  void Complete(const wire::CompletionSlot& completion);
  // After a batch of Complete: publishes and wakes the tenant if something is new; true if it was.
  bool PublishCompleted();

  void SetSleeping(bool sleeping);
  const Fd& submit_event() const { return submit_event_; }

 private:
  TenantRing() = default;
  Status ReadCompletionHead();

  Mapping tenant_;  // read-only
  Mapping daemon_;
  Fd submit_event_;
  Fd completion_socket_;  // our end
  uint64_t taken_ = 0;
  uint64_t published_taken_ = 0;
  uint64_t promised_ = 0;
  uint64_t completed_ = 0;
  uint64_t published_completed_ = 0;
  uint64_t consumed_ = 0;  // completion_head as last read and believed
  bool throttled_ = false;
};

}  // namespace slice::server
