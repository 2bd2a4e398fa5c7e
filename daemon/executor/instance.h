// One running copy of a program: its values per domain, its integers, its op states. No thread of
// its own.
//
// Threads: members are guarded by the executor's state mutex, except what is said to run outside
// it: those parts touch only immutable data, the caller's frame and the arena.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/status.h"
#include "common/wire/executor_ring.h"
#include "daemon/executor/binding.h"
#include "daemon/executor/interpreter.h"

namespace slice::executor {

// none -> issued -> launched -> finished
//   ^-------+ (recalled)
enum class OpState : uint8_t { kNone, kIssued, kLaunched, kFinished };

class Instance {
 public:
  // Checks every range against the arena, copies integer inputs. Errors: INVALID, OVERFLOW, BOUNDS,
  // NO_MEMORY.
  static Result<std::shared_ptr<Instance>> Start(std::shared_ptr<Binding> binding, uint64_t id,
                                                 uint32_t attempt, std::span<const int64_t> symbols,
                                                 std::span<const wire::ArenaRange> inputs,
                                                 std::span<const wire::ArenaRange> outputs);
  // One that only answers: every op fails with `why`.
  static std::shared_ptr<Instance> Failed(uint64_t id, uint32_t attempt, Status why);
  ~Instance();

  uint64_t id() const { return id_; }
  uint32_t attempt() const { return attempt_; }
  const Binding& binding() const { return *binding_; }
  bool usable() const { return binding_ != nullptr; }
  const graph::Template& source() const { return binding_->program()->source(); }
  size_t op_count() const { return binding_ == nullptr ? 0 : source().groups().size(); }
  uint32_t tenant() const { return binding_->tenant()->id; }
  const int64_t* integers() const { return bound_->integers.data(); }

  // ---- launching op `op` in `domain`
  // All values that other groups make are in the domain, and all predecessors have finished.
  bool IsReady(uint32_t op, uint32_t domain) const;
  struct Missing {  // dynamic inputs to copy from the arena, outside the mutex
    uint32_t dynamic = 0;
    uint32_t local = 0;
    at::Tensor copy;
  };
  // Fills the frame with what is there. Errors: INTERNAL.
  Status Gather(uint32_t op, uint32_t domain, Frame* frame, std::vector<Missing>* missing);
  // Outside the mutex, between the backend's BeginOp and EndOp. Errors: NO_MEMORY.
  Status CopyInputs(std::vector<Missing>* missing, Frame* frame) const;
  // Outside the mutex. Checks the op's exports against the template; copies results into their
  // arena slots. Errors: OP_FAILED (a result is not what the template says).
  Status StoreResults(uint32_t op, const Frame& frame) const;
  // Keeps crossing values and copied inputs; drops what has no consumer left.
  void Complete(uint32_t op, uint32_t domain, std::vector<Missing>* missing, Frame* frame);

  // ---- values for transfers
  at::Tensor Value(uint32_t value, uint32_t domain) const;  // undefined = not there
  void PutValue(uint32_t value, uint32_t domain, at::Tensor tensor);
  bool NeedsValue(uint32_t value) const;  // some consumer has not finished

  // Drops every value: before the end is reported.
  void Clear();

  std::vector<OpState> ops;
  Status failure;  // not OK: ops are answered with Failed or dropped
  bool ending = false;
  int running = 0;  // launched ops and copies

 private:
  struct InDomain {
    std::vector<at::Tensor> crossing, dynamic;
  };
  InDomain& At(uint32_t domain);
  Status CopyIntegerInputs();

  std::shared_ptr<Binding> binding_;
  uint64_t id_ = 0;
  uint32_t attempt_ = 0;
  std::shared_ptr<const BoundProgram> bound_;
  std::vector<wire::ArenaRange> inputs_, outputs_;
  std::vector<at::Tensor> integer_inputs_;  // by dynamic position; private copies
  uint64_t host_bytes_ = 0;
  std::vector<uint32_t> crossing_left_;  // consumers that have not finished
  std::vector<uint32_t> dynamic_left_;
  std::vector<InDomain> domains_;
};

}  // namespace slice::executor
