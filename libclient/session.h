// One session of a tenant: control channel, the two shared-memory rings, the arena, and the table
// of tickets.
//
// Owner: the caller of slice_session_open. Threads: every method may be called by several threads;
// one mutex guards rings and tables, control calls take turns in the channel. Of the threads that
// wait, one polls (completions and hang-up), the others sleep on a futex of their own; whoever
// drains completions wakes the threads whose tickets are done, and a poller that leaves passes
// polling on. Signals interrupt both kinds of sleep. Loss: a hang-up or a broken protocol is
// recorded once; results that had arrived can still be taken, every other ticket and call fails
// with that status. Fork: the child of a fork gets kInvalid from every call.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "common/fd.h"
#include "common/status.h"
#include "common/units.h"
#include "libclient/arena.h"
#include "libclient/control_channel.h"
#include "libclient/tenant_rings.h"
#include "libclient/tensor_spec.h"
#include "slice/slice.h"

namespace slice::client {

class Session {
 public:
  // Options are complete (ReadOptions); strings may be null.
  static Result<std::unique_ptr<Session>> Open(const slice_session_options_t& options);

  // Takes no lock: in the child of a fork another thread may have held it.
  Status CheckNotForked() const;
  Status CheckNotLost() const;
  // Descriptor for event loops, made at the first call; -1 when that fails.
  int EventLoopFd();
  const slice_session_limits_t& limits() const { return limits_; }

  Status ArenaAlloc(uint64_t bytes, uint64_t* offset, void** pointer);
  Status ArenaFree(uint64_t offset);

  Status ImportTensors(int memfd, uint32_t kind, const std::vector<TensorSpec>& specs,
                       slice_tensor_t* handles);
  Status ReplicateTensors(std::span<const slice_tensor_t> handles,
                          std::span<const char* const> devices);
  Status AllocTensors(const std::vector<TensorSpec>& specs, slice_tensor_t* handles,
                      const void** views);
  Status ReleaseTensors(std::span<const slice_tensor_t> handles);

  struct TensorCommand {
    wire::TensorCommandKind kind = wire::kTensorReset;
    uint64_t parameter = 0;     // fill bits, crop length
    int32_t dimension = 0;      // crop
    uint64_t arena_offset = 0;  // write, read
    uint64_t arena_bytes = 0;
  };
  // `ticket` null: waits; *interrupted then as in Wait.
  Status CommandTensors(const TensorCommand& command, std::span<const slice_tensor_t> handles,
                        slice_ticket_t* ticket, bool* interrupted);

  Status RegisterGraph(std::span<const std::byte> bytes, slice_graph_t* graph);
  Status UnregisterGraph(slice_graph_t graph);
  Status CreateBinding(slice_graph_t graph, std::span<const slice_tensor_t> tensors,
                       slice_binding_t* binding);
  Status DestroyBinding(slice_binding_t binding);

  Status OpenSequence(const slice_sequence_options_t& options, slice_sequence_t* sequence);
  Status CloseSequence(slice_sequence_t sequence);
  Status Submit(const slice_submit_args_t& args, slice_ticket_t* ticket);
  Status Cancel(slice_ticket_t ticket);
  // Ticket 0: any finished ticket, which is not consumed. *interrupted: a signal arrived, the
  // ticket stays valid.
  Status Wait(slice_ticket_t ticket, int64_t timeout_ns, slice_completion_t* completion,
              bool* interrupted);

 private:
  struct Ticket {
    bool done = false;
    bool abandoned = false;  // nobody will wait: drop the completion
    wire::CompletionSlot completion{};
  };
  struct Tensor {
    std::shared_ptr<Mapping> view;  // managed tensors whose home copy is visible
    uint64_t dense_bytes = 0;
    uint32_t dim_count = 0;
    bool managed = false;
  };
  struct Waiter {
    explicit Waiter(slice_ticket_t waited) : ticket(waited) {}
    slice_ticket_t ticket;
    std::atomic<uint32_t> woken{0};  // futex word
  };
  class WaitScope;

  Session() = default;
  Status Connect(const slice_session_options_t& options);
  Status SayHello(const slice_session_options_t& options, TimeNs deadline_ns);
  Status AcceptHello(const proto::HelloReply& hello, std::vector<Fd> fds);
  // A control call; a broken channel makes the session lost.
  Result<proto::Reply> Call(proto::Request request, std::span<const int> fds = {},
                            std::vector<Fd>* reply_fds = nullptr,
                            DurationNs timeout = kCallTimeout);
  // The daemon answered something impossible: the session is lost.
  Status BreakProtocol(const std::string& text);
  // Records what a TensorsReply made; all or nothing.
  Status AddTensors(const proto::Reply& reply, const std::vector<TensorSpec>& specs,
                    std::shared_ptr<Mapping> view, bool managed, slice_tensor_t* handles);
  Status CheckHandlesLive(std::span<const slice_tensor_t> handles) const;

  // All below are under mutex_.
  void DrainLocked();
  void CompleteLocked(const wire::CompletionSlot& slot);
  void BreakLocked(const Status& status);
  void SetUnclaimedLocked(size_t count);
  void WakeLocked(Waiter* waiter);
  // Pushes a slot; when `ticket` is not null it gets a new one. The caller signals the daemon
  // (SignalDaemon) afterwards.
  Status PushLocked(wire::SubmitSlot slot, std::span<const wire::Argument> arguments,
                    slice_ticket_t* ticket);
  Status CheckCommandLocked(const TensorCommand& command,
                            std::span<const slice_tensor_t> handles) const;
  void SignalDaemon();

  // Sleep until something may have changed or `deadline_ns`; true = a signal arrived. Unlocks and
  // locks again.
  bool PollForCompletions(std::unique_lock<std::mutex>* lock, TimeNs deadline_ns);
  bool SleepUntilWoken(std::unique_lock<std::mutex>* lock, Waiter* waiter, TimeNs deadline_ns);
  // Status of a finished request, with the daemon's text if it has one. Not under mutex_.
  Status StatusOf(slice_ticket_t ticket, const wire::CompletionSlot& slot);

  pid_t pid_ = 0;
  slice_session_limits_t limits_{};
  std::unique_ptr<ControlChannel> channel_;
  Mapping tenant_ring_;
  Mapping daemon_ring_;
  Mapping arena_memory_;
  std::unique_ptr<Arena> arena_;
  Fd daemon_event_;
  Fd client_event_;

  mutable std::mutex mutex_;
  std::unique_ptr<SubmitRing> submits_;
  std::unique_ptr<CompletionRing> completions_;
  Status broken_;  // OK, or why the session is lost
  std::unordered_map<slice_ticket_t, Ticket> tickets_;
  slice_ticket_t next_ticket_ = 1;
  size_t in_flight_ = 0;                   // tickets without a completion
  size_t unclaimed_ = 0;                   // tickets with one
  bool polling_ = false;                   // a thread is in PollForCompletions
  std::vector<Waiter*> waiters_;           // every thread in Wait
  std::vector<wire::Argument> arguments_;  // scratch of Submit
  slice_sequence_t next_sequence_ = 1;
  std::unordered_set<slice_sequence_t> sequences_;
  std::unordered_set<slice_binding_t> bindings_;
  std::unordered_map<slice_tensor_t, Tensor> tensors_;
  Fd event_loop_;       // epoll over client_event_, unclaimed_event_ and hang-up
  Fd unclaimed_event_;  // readable while unclaimed_ > 0 or the session is lost
};

}  // namespace slice::client
