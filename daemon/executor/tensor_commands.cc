// Tenants' commands on managed tensors: the only writes to them outside graphs.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "common/checked.h"
#include "common/wire/tenant_ring.h"
#include "daemon/executor/executor.h"
#include "daemon/executor/tensors.h"

namespace slice::executor {
namespace {

// The whole tensor, dense, in the tenant's arena.
Result<at::Tensor> ArenaTensor(const wire::TensorCommandRun& command, const at::Tensor& like,
                               TenantMemory* tenant) {
  if (command.arena_bytes != like.nbytes() || command.arena_offset % like.element_size() != 0 ||
      !RangeFits(command.arena_offset, command.arena_bytes, tenant->arena_bytes)) {
    return Error(StatusCode::kBounds,
                 "arena slot at %llu of %llu bytes for a tensor of %zu, the arena has %llu",
                 static_cast<unsigned long long>(command.arena_offset),
                 static_cast<unsigned long long>(command.arena_bytes), like.nbytes(),
                 static_cast<unsigned long long>(tenant->arena_bytes));
  }
  std::vector<int64_t> strides(static_cast<size_t>(like.dim()));
  int64_t stride = 1;
  for (int64_t d = like.dim() - 1; d >= 0; --d) {
    strides[static_cast<size_t>(d)] = stride;
    stride *= std::max<int64_t>(like.size(d), 1);
  }
  return WrapMemory(tenant->arena.data() + command.arena_offset, like.sizes(), strides,
                    like.scalar_type());
}

Status Apply(const wire::TensorCommandRun& command, const at::Tensor& tensor,
             TenantMemory* tenant) {
  switch (command.kind) {
    case wire::kTensorReset:
      tensor.zero_();
      return Status::Ok();
    case wire::kTensorFill: {
      alignas(16) std::byte element[16] = {};
      std::memcpy(element, &command.parameter, sizeof command.parameter);
      tensor.fill_(WrapMemory(element, {}, {}, tensor.scalar_type()));
      return Status::Ok();
    }
    case wire::kTensorCrop: {
      const int64_t dimension = command.dimension;
      if (dimension < 0 || dimension >= tensor.dim()) {
        return Error(StatusCode::kInvalid, "crop along dimension %lld of a tensor with %lld",
                     static_cast<long long>(dimension), static_cast<long long>(tensor.dim()));
      }
      const int64_t size = tensor.size(dimension);
      if (command.parameter >= static_cast<uint64_t>(size)) return Status::Ok();
      const auto length = static_cast<int64_t>(command.parameter);
      tensor.narrow(dimension, length, size - length).zero_();
      return Status::Ok();
    }
    case wire::kTensorWrite: {
      SLICE_ASSIGN_OR_RETURN(const at::Tensor source, ArenaTensor(command, tensor, tenant));
      CopyInto(tensor, source);
      return Status::Ok();
    }
    case wire::kTensorRead: {
      SLICE_ASSIGN_OR_RETURN(const at::Tensor destination, ArenaTensor(command, tensor, tenant));
      destination.copy_(tensor);
      return Status::Ok();
    }
    default:
      return Error(StatusCode::kInvalid, "tensor command %u is not known", command.kind);
  }
}

}  // namespace

Status ApplyTensorCommand(const wire::TensorCommandRun& command, TensorSet* set,
                          TenantMemory* tenant) {
  if (set->tenant() != tenant->id || command.tensor >= set->tensor_count()) {
    return Error(StatusCode::kInvalid, "tensor %u of set %u (%zu tensors) for tenant %u",
                 command.tensor, set->id(), set->tensor_count(), tenant->id);
  }
  const bool writes = command.kind != wire::kTensorRead;
  if (set->Storage(command.domain, command.tensor, writes) == nullptr) {
    return Error(StatusCode::kInvalid, "set %u is not mapped%s in domain %u", set->id(),
                 writes ? " writable" : "", command.domain);
  }
  try {
    return Apply(command, set->Get(command.domain, command.tensor), tenant);
  } catch (const c10::Error& error) {
    return Error(StatusCode::kInvalid, "%s", error.what_without_backtrace());
  } catch (const std::exception& error) {
    return Error(StatusCode::kInternal, "%s", error.what());
  }
}

}  // namespace slice::executor
