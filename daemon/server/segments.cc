#include "daemon/server/segments.h"

#include <linux/magic.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>

#include "common/checked.h"
#include "common/tensor_meta.h"
#include "daemon/graph/template.h"

namespace slice::server {
namespace {

using engine::TensorKind;

unsigned long long Ull(uint64_t value) { return value; }

// Sizes, strides and bytes of one spec.
Status CheckShape(const proto::TensorSpec& spec, int index, PlacedTensor* out) {
  out->name = spec.name();
  out->dtype = spec.dtype();
  const uint8_t item_bytes = proto::DType_IsValid(static_cast<int>(spec.dtype()))
                                 ? graph::ItemBytes(static_cast<proto::DType>(spec.dtype()))
                                 : 0;
  const char* name = out->name.c_str();
  if (item_bytes == 0)
    return Error(StatusCode::kInvalid, "tensor %d '%s': dtype %u is unknown", index, name,
                 spec.dtype());
  if (spec.sizes_size() > kDimensionsMax) {
    return Error(StatusCode::kInvalid, "tensor %d '%s': %d dimensions, at most %d are possible",
                 index, name, spec.sizes_size(), kDimensionsMax);
  }
  if (spec.strides_size() != 0 && spec.strides_size() != spec.sizes_size()) {
    return Error(StatusCode::kInvalid, "tensor %d '%s': %d sizes but %d strides", index, name,
                 spec.sizes_size(), spec.strides_size());
  }
  out->sizes.assign(spec.sizes().begin(), spec.sizes().end());
  int64_t elements = 1;
  int64_t nonzero_elements = 1;  // bounds the dense strides of empty tensors too
  bool fits = true;
  for (const int64_t size : out->sizes) {
    if (size < 0) {
      return Error(StatusCode::kInvalid, "tensor %d '%s': size %lld is negative", index, name,
                   static_cast<long long>(size));
    }
    fits = fits && CheckedMul(elements, size, &elements) &&
           CheckedMul(nonzero_elements, std::max<int64_t>(size, 1), &nonzero_elements);
  }
  int64_t dense_bytes = 0;
  fits = fits && CheckedMul(elements, item_bytes, &dense_bytes);
  int64_t last = 0;
  if (fits) {
    out->strides = spec.strides_size() != 0
                       ? std::vector<int64_t>(spec.strides().begin(), spec.strides().end())
                       : DenseStrides(out->sizes);
    for (size_t d = 0; d < out->sizes.size(); ++d) {
      if (out->strides[d] < 0) {
        return Error(StatusCode::kInvalid, "tensor %d '%s': stride %lld is negative", index, name,
                     static_cast<long long>(out->strides[d]));
      }
      int64_t span = 0;
      fits = fits && CheckedMul(std::max<int64_t>(out->sizes[d] - 1, 0), out->strides[d], &span) &&
             CheckedAdd(last, span, &last);
    }
  }
  int64_t extent_bytes = 0;
  fits = fits && CheckedAdd(last, 1, &extent_bytes) &&
         CheckedMul(extent_bytes, item_bytes, &extent_bytes);
  if (!fits) {
    return Error(StatusCode::kOverflow,
                 "tensor %d '%s': its bytes do not fit in 63 bits: check sizes and strides", index,
                 name);
  }
  out->dense_bytes = static_cast<uint64_t>(dense_bytes);
  out->extent_bytes = elements == 0 ? 0 : static_cast<uint64_t>(extent_bytes);
  out->meta_hash = TensorMetaHash(out->dtype, out->sizes, out->strides);
  return Status::Ok();
}

// Two tensors of one set that share bytes would be two access queues for one memory.
Status CheckNoOverlap(const std::vector<PlacedTensor>& tensors) {
  std::vector<const PlacedTensor*> order;
  for (const PlacedTensor& tensor : tensors) {
    if (tensor.extent_bytes != 0) order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i - 1]->offset + order[i - 1]->extent_bytes > order[i]->offset) {
      return Error(StatusCode::kInvalid, "mutable tensors '%s' and '%s' overlap at offset %llu",
                   order[i - 1]->name.c_str(), order[i]->name.c_str(), Ull(order[i]->offset));
    }
  }
  return Status::Ok();
}

}  // namespace

Result<SegmentLayout> LayOut(const google::protobuf::RepeatedPtrField<proto::TensorSpec>& specs,
                             TensorKind kind, uint64_t segment_bytes) {
  if (specs.empty()) return Error(StatusCode::kInvalid, "no tensors named");
  SegmentLayout layout;
  layout.bytes = segment_bytes;
  int64_t end = 0;
  for (int i = 0; i < specs.size(); ++i) {
    PlacedTensor tensor;
    SLICE_RETURN_IF_ERROR(CheckShape(specs[i], i, &tensor));
    if (kind == TensorKind::kManaged) {
      tensor.offset = static_cast<uint64_t>(end);
      // Rounding first and adding then may pass 2^63 in one step each: both are checked.
      int64_t rounded = 0;
      if (!CheckedAdd(static_cast<int64_t>(tensor.extent_bytes),
                      static_cast<int64_t>(kTensorAlignment) - 1, &rounded) ||
          !CheckedAdd(end, rounded, &end)) {
        return Error(StatusCode::kOverflow,
                     "tensor %d '%s': all tensors together do not fit in 63 bits", i,
                     tensor.name.c_str());
      }
      end = end / static_cast<int64_t>(kTensorAlignment) * static_cast<int64_t>(kTensorAlignment);
    } else {
      tensor.offset = specs[i].offset();
      if (tensor.offset % kTensorAlignment != 0) {
        return Error(StatusCode::kInvalid, "tensor %d '%s': offset %llu is not a multiple of %llu",
                     i, tensor.name.c_str(), Ull(tensor.offset), Ull(kTensorAlignment));
      }
      if (!RangeFits(tensor.offset, tensor.extent_bytes, segment_bytes)) {
        return Error(
            StatusCode::kBounds,
            "tensor %d '%s': %llu bytes at offset %llu end beyond the segment's %llu bytes", i,
            tensor.name.c_str(), Ull(tensor.extent_bytes), Ull(tensor.offset), Ull(segment_bytes));
      }
    }
    layout.tensors.push_back(std::move(tensor));
  }
  if (kind == TensorKind::kMutable) SLICE_RETURN_IF_ERROR(CheckNoOverlap(layout.tensors));
  if (kind == TensorKind::kManaged)
    layout.bytes = std::max<uint64_t>(static_cast<uint64_t>(end), kTensorAlignment);
  return layout;
}

Result<SetSegments> CreateSegments(const SegmentLayout& layout, TensorKind kind, Fd home_memfd,
                                   DomainIndex home, std::span<const DomainIndex> domains) {
  SetSegments segments;
  for (const DomainIndex domain : domains) {
    const bool is_home = domain == home;
    // Only managed tensors move and only constants have replicas: a mutable one lives at home.
    if (kind == TensorKind::kMutable && !is_home) continue;
    if (is_home && kind != TensorKind::kManaged) {
      segments.memfds.push_back(std::move(home_memfd));
      segments.writable.push_back(kind == TensorKind::kMutable);
    } else {
      SLICE_ASSIGN_OR_RETURN(Fd memfd, CreateMemfd("slice-segment", layout.bytes));
      segments.memfds.push_back(std::move(memfd));
      segments.writable.push_back(true);
    }
    segments.domains.push_back(domain);
  }
  return segments;
}

Status CheckTenantSegment(const Fd& memfd, uint64_t bytes) {
  SLICE_ASSIGN_OR_RETURN([[maybe_unused]] size_t size, CheckForeignMemfd(memfd, bytes));
  struct statfs info {};
  if (::fstatfs(memfd.get(), &info) != 0)
    return ErrnoError(StatusCode::kInvalid, errno, "fstatfs of memfd");
  if (info.f_type != TMPFS_MAGIC) {
    return Error(StatusCode::kInvalid, "memfd of huge pages: create it without MFD_HUGETLB");
  }
  return Status::Ok();
}

proto::ExecutorTensorSet ToExecutorSet(TensorSetId id, TenantId tenant, TensorKind kind,
                                       const SegmentLayout& layout, const SetSegments& segments) {
  proto::ExecutorTensorSet out;
  out.set_set_id(id.value);
  out.set_tenant(tenant.value);
  out.set_kind(static_cast<uint32_t>(kind));
  out.set_segment_bytes(layout.bytes);
  for (const PlacedTensor& tensor : layout.tensors) {
    proto::SetTensor* item = out.add_tensors();
    item->set_offset(tensor.offset);
    item->set_bytes(tensor.extent_bytes);
    item->set_dtype(tensor.dtype);
    for (const int64_t size : tensor.sizes) item->add_sizes(size);
    for (const int64_t stride : tensor.strides) item->add_strides(stride);
  }
  for (size_t i = 0; i < segments.domains.size(); ++i) {
    out.add_domains(segments.domains[i]);
    out.add_writable(segments.writable[i]);
  }
  return out;
}

engine::TensorSetConfig ToEngineSet(TensorSetId id, TenantId tenant, TensorKind kind,
                                    DomainIndex home, const SegmentLayout& layout,
                                    const SetSegments& segments) {
  engine::TensorSetConfig out;
  out.id = id;
  out.tenant = tenant;
  out.kind = kind;
  out.home = home;
  for (const DomainIndex domain : segments.domains) out.segment_domains |= uint64_t{1} << domain;
  for (const PlacedTensor& tensor : layout.tensors) {
    out.tensors.push_back(
        {tensor.name, static_cast<int64_t>(tensor.extent_bytes), tensor.meta_hash});
  }
  return out;
}

}  // namespace slice::server
