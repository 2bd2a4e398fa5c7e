// What the cold path sets up: tenants' arenas, tensor sets in shared segments, and bindings of
// programs to them.
//
// Threads: made by the service thread; once published they change only under the executor's state
// mutex (a set may gain domains, a binding fills its views of a domain on first use).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/fd.h"
#include "common/status.h"
#include "daemon/executor/program.h"
#include "slice/proto/executor.pb.h"

namespace slice::executor {

struct TenantMemory {
  uint32_t id = 0;
  Mapping arena;  // tenant-writable: read once, never trusted
  uint64_t arena_bytes = 0;
  uint64_t pool_bytes_max = 0;
  std::atomic<uint64_t> host_bytes{0};  // private copies of integer inputs
};

class TensorSet {
 public:
  // Checks the layout and maps every segment. Errors: INVALID, BOUNDS, NO_MEMORY.
  static Result<std::shared_ptr<TensorSet>> Create(const proto::ExecutorTensorSet& request,
                                                   std::vector<Fd>* fds);
  // Takes the domains of a later request for the same set over. Errors: INVALID (another layout, or
  // a domain that the set has: bindings hold its memory).
  Status AddDomains(TensorSet* other);

  uint32_t id() const { return layout_.set_id(); }
  uint32_t tenant() const { return layout_.tenant(); }
  size_t tensor_count() const { return static_cast<size_t>(layout_.tensors_size()); }
  const proto::SetTensor& layout(uint32_t tensor) const {
    return layout_.tensors(static_cast<int>(tensor));
  }
  // Undefined when the set is not mapped in the domain. The caller keeps the set as long as the
  // tensor.
  at::Tensor Get(uint32_t domain, uint32_t tensor) const;
  // First byte of a tensor's storage; nullptr when not mapped (or not writable and `write`).
  std::byte* Storage(uint32_t domain, uint32_t tensor, bool write) const;
  // Gives the pages that lie wholly inside a tensor back. Errors: INTERNAL (sealed or read-only
  // segment).
  Status DropPages(uint32_t domain, uint32_t tensor);

 private:
  struct Segment {
    Mapping mapping;
    bool writable = false;
    std::vector<at::Tensor> tensors;
  };
  Segment* Find(uint32_t domain) const {
    return domain < segments_.size() ? segments_[domain].get() : nullptr;
  }
  proto::ExecutorTensorSet layout_;
  std::vector<std::shared_ptr<Segment>> segments_;  // by domain
};

struct StaticRef {
  std::shared_ptr<TensorSet> set;
  uint32_t tensor = 0;
};

class Binding {
 public:
  // Errors: INVALID (count, dtype, shape of a static), GRAPH (a view of a static does not work).
  static Result<std::shared_ptr<Binding>> Create(std::shared_ptr<const Program> program,
                                                 std::shared_ptr<TenantMemory> tenant,
                                                 std::vector<StaticRef> statics);

  const std::shared_ptr<const Program>& program() const { return program_; }
  const std::shared_ptr<TenantMemory>& tenant() const { return tenant_; }
  // The program with its symbols bound; that of the last call when they are the same, as they are
  // in every decode step. Errors: INVALID, OVERFLOW.
  Result<std::shared_ptr<const BoundProgram>> Bind(std::span<const int64_t> symbols);
  // A static, constant or hoisted view in a domain. Errors: INTERNAL (the set is not mapped there).
  Result<at::Tensor> Get(const External& external, uint32_t domain);

 private:
  struct InDomain {
    std::vector<at::Tensor> statics, hoisted;
  };
  Status CheckStatics() const;
  std::shared_ptr<const Program> program_;
  std::shared_ptr<TenantMemory> tenant_;
  std::vector<StaticRef> statics_;
  std::vector<InDomain> domains_;
  std::shared_ptr<const BoundProgram> bound_;
};

}  // namespace slice::executor
