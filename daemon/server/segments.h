// Shared-memory segments of tensor sets: where each tensor lies, and one memfd per memory domain
// with the same layout.
//
// Imported tensors: at home the tenant's own memfd, elsewhere lazily paged memfds of the daemon
// (replicas). Managed tensors: the daemon's memfds in every domain. These never leave sliced and
// its executor. The seal F_SEAL_FUTURE_WRITE belongs to the inode, and a restarted executor must
// map it writable again, so the data segment can neither be sealed nor be shown to the tenant (a
// read-only descriptor is no protection: /proc/self/fd reopens it). So there are no views of
// managed tensors (slice_tensor_alloc writes NULL): contents are had by slice_tensor_read.
//
// Pure but for making memfds. Owner: the session that asked.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/fd.h"
#include "common/status.h"
#include "common/units.h"
#include "daemon/engine/engine.h"
#include "slice/proto/control.pb.h"
#include "slice/proto/executor.pb.h"

namespace slice::server {

inline constexpr uint64_t kTensorAlignment = 64;
inline constexpr int kDimensionsMax = 8;

// A checked tensor of a set.
struct PlacedTensor {
  std::string name;
  uint32_t dtype = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // filled in when the tenant left them out
  uint64_t offset = 0;           // in the segment
  uint64_t extent_bytes = 0;     // storage extent
  uint64_t dense_bytes = 0;      // elements * element bytes
  uint64_t meta_hash = 0;
};
struct SegmentLayout {
  std::vector<PlacedTensor> tensors;
  uint64_t bytes = 0;  // of the segment, at least 1
};

// Checks specs of a tenant. kManaged: offsets are chosen here. Imports: offsets must lie in
// `segment_bytes`, and tensors of kMutable must not overlap. Errors: INVALID, BOUNDS, OVERFLOW;
// texts name the tensor.
Result<SegmentLayout> LayOut(const google::protobuf::RepeatedPtrField<proto::TensorSpec>& specs,
                             engine::TensorKind kind, uint64_t segment_bytes);

// Memfds of one set, in the order of `domains`. `home_memfd` is the tenant's (imports) or not valid
// (managed).
struct SetSegments {
  std::vector<DomainIndex> domains;
  std::vector<Fd> memfds;
  std::vector<bool> writable;
};
Result<SetSegments> CreateSegments(const SegmentLayout& layout, engine::TensorKind kind,
                                   Fd home_memfd, DomainIndex home,
                                   std::span<const DomainIndex> domains);
// A descriptor of a tenant that the executor will map: as CheckForeignMemfd, and not of huge pages
// (touching one that the pool cannot give is SIGBUS in whoever touches it).
Status CheckTenantSegment(const Fd& memfd, uint64_t bytes);

proto::ExecutorTensorSet ToExecutorSet(TensorSetId id, TenantId tenant, engine::TensorKind kind,
                                       const SegmentLayout& layout, const SetSegments& segments);
engine::TensorSetConfig ToEngineSet(TensorSetId id, TenantId tenant, engine::TensorKind kind,
                                    DomainIndex home, const SegmentLayout& layout,
                                    const SetSegments& segments);

}  // namespace slice::server
