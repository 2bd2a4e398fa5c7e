#include "daemon/executor/binding.h"

#include <ATen/ATen.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "common/checked.h"
#include "daemon/executor/interpreter.h"
#include "daemon/executor/tensors.h"

namespace slice::executor {
namespace {

constexpr uint32_t kDomainsMax = 64;

Status CheckLayout(const proto::ExecutorTensorSet& set) {
  for (int i = 0; i < set.tensors_size(); ++i) {
    const proto::SetTensor& tensor = set.tensors(i);
    const auto dtype = static_cast<proto::DType>(tensor.dtype());
    const auto type = ToScalarType(dtype);
    if (!type.has_value()) {
      return Error(StatusCode::kInvalid, "set %u, tensor %d: unknown dtype %u", set.set_id(), i,
                   tensor.dtype());
    }
    const std::span sizes(tensor.sizes().data(), static_cast<size_t>(tensor.sizes_size()));
    const std::span strides(tensor.strides().data(), static_cast<size_t>(tensor.strides_size()));
    SLICE_ASSIGN_OR_RETURN(const int64_t extent,
                           ExtentBytes(sizes, strides, graph::ItemBytes(dtype)));
    if (static_cast<uint64_t>(extent) > tensor.bytes() ||
        !RangeFits(tensor.offset(), tensor.bytes(), set.segment_bytes()) ||
        tensor.offset() % graph::ItemBytes(dtype) != 0) {
      return Error(StatusCode::kBounds,
                   "set %u, tensor %d: its shape needs %lld bytes, it has %llu at offset %llu of a "
                   "segment of %llu",
                   set.set_id(), i, static_cast<long long>(extent),
                   static_cast<unsigned long long>(tensor.bytes()),
                   static_cast<unsigned long long>(tensor.offset()),
                   static_cast<unsigned long long>(set.segment_bytes()));
    }
  }
  return Status::Ok();
}

}  // namespace

Result<std::shared_ptr<TensorSet>> TensorSet::Create(const proto::ExecutorTensorSet& request,
                                                     std::vector<Fd>* fds) {
  if (static_cast<size_t>(request.domains_size()) != fds->size() ||
      request.writable_size() != request.domains_size()) {
    return Error(StatusCode::kInvalid, "set %u: %d domains, %d writable flags, %zu descriptors",
                 request.set_id(), request.domains_size(), request.writable_size(), fds->size());
  }
  SLICE_RETURN_IF_ERROR(CheckLayout(request));
  auto set = std::make_shared<TensorSet>();
  set->layout_ = request;
  for (int i = 0; i < request.domains_size(); ++i) {
    const uint32_t domain = request.domains(i);
    if (domain >= kDomainsMax)
      return Error(StatusCode::kInvalid, "set %u: domain %u", request.set_id(), domain);
    const Fd& fd = (*fds)[static_cast<size_t>(i)];
    SLICE_ASSIGN_OR_RETURN(const size_t size, CheckForeignMemfd(fd, request.segment_bytes()));
    static_cast<void>(size);
    auto segment = std::make_shared<Segment>();
    segment->writable = request.writable(i);
    if (request.segment_bytes() > 0) {
      SLICE_ASSIGN_OR_RETURN(segment->mapping,
                             Mapping::Map(fd, request.segment_bytes(), segment->writable));
    }
    for (const proto::SetTensor& tensor : request.tensors()) {
      const auto dtype = static_cast<proto::DType>(tensor.dtype());
      segment->tensors.push_back(
          WrapMemory(segment->mapping.data() + tensor.offset(),
                     {tensor.sizes().data(), static_cast<size_t>(tensor.sizes_size())},
                     {tensor.strides().data(), static_cast<size_t>(tensor.strides_size())},
                     *ToScalarType(dtype)));
    }
    set->segments_.resize(std::max<size_t>(set->segments_.size(), domain + 1));
    set->segments_[domain] = std::move(segment);
  }
  return set;
}

Status TensorSet::AddDomains(TensorSet* other) {
  if (other->layout_.segment_bytes() != layout_.segment_bytes() ||
      other->tensor_count() != tensor_count() || other->tenant() != tenant()) {
    return Error(StatusCode::kInvalid, "set %u exists with another layout", id());
  }
  segments_.resize(std::max(segments_.size(), other->segments_.size()));
  for (size_t domain = 0; domain < other->segments_.size(); ++domain) {
    if (other->segments_[domain] == nullptr) continue;
    if (segments_[domain] != nullptr) {
      return Error(StatusCode::kInvalid, "set %u is in domain %zu already", id(), domain);
    }
    segments_[domain] = std::move(other->segments_[domain]);
  }
  return Status::Ok();
}

at::Tensor TensorSet::Get(uint32_t domain, uint32_t tensor) const {
  const Segment* segment = Find(domain);
  return segment == nullptr ? at::Tensor() : segment->tensors[tensor];
}

std::byte* TensorSet::Storage(uint32_t domain, uint32_t tensor, bool write) const {
  const Segment* segment = Find(domain);
  if (segment == nullptr || (write && !segment->writable)) return nullptr;
  return segment->mapping.data() + layout(tensor).offset();
}

Status TensorSet::DropPages(uint32_t domain, uint32_t tensor) {
  std::byte* storage = Storage(domain, tensor, true);
  if (storage == nullptr)
    return Error(StatusCode::kInternal, "set %u is not mapped writable in domain %u", id(), domain);
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t begin = RoundUp(reinterpret_cast<uintptr_t>(storage), page);
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(storage) + layout(tensor).bytes()) / page * page;
  if (begin >= end) return Status::Ok();
  if (::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_REMOVE) != 0) {
    return ErrnoError(StatusCode::kInternal, errno, "releasing %zu bytes of set %u in domain %u",
                      size_t{end - begin}, id(), domain);
  }
  return Status::Ok();
}

Result<std::shared_ptr<Binding>> Binding::Create(std::shared_ptr<const Program> program,
                                                 std::shared_ptr<TenantMemory> tenant,
                                                 std::vector<StaticRef> statics) {
  auto binding = std::make_shared<Binding>();
  binding->program_ = std::move(program);
  binding->tenant_ = std::move(tenant);
  binding->statics_ = std::move(statics);
  SLICE_RETURN_IF_ERROR(binding->CheckStatics());
  return binding;
}

// Shapes that depend on symbols are not checked here: the operators check what they get.
Status Binding::CheckStatics() const {
  const graph::Template& source = program_->source();
  if (statics_.size() != source.statics().size()) {
    return Error(StatusCode::kInvalid, "binding names %zu static tensors, the template has %zu",
                 statics_.size(), source.statics().size());
  }
  for (size_t position = 0; position < statics_.size(); ++position) {
    const graph::Input& input = source.inputs()[source.statics()[position]];
    const graph::ValueShape& shape = source.values()[input.value];
    const StaticRef& ref = statics_[position];
    if (ref.tensor >= ref.set->tensor_count()) {
      return Error(StatusCode::kInvalid, "static %zu '%s': tensor %u of set %u, which has %zu",
                   position, input.name.c_str(), ref.tensor, ref.set->id(),
                   ref.set->tensor_count());
    }
    const proto::SetTensor& tensor = ref.set->layout(ref.tensor);
    if (tensor.dtype() != static_cast<uint32_t>(shape.dtype) ||
        static_cast<size_t>(tensor.sizes_size()) != shape.sizes.size()) {
      return Error(StatusCode::kInvalid,
                   "static %zu '%s': dtype %u with %d dimensions, the template has %d with %zu",
                   position, input.name.c_str(), tensor.dtype(), tensor.sizes_size(),
                   static_cast<int>(shape.dtype), shape.sizes.size());
    }
    for (int d = 0; d < tensor.sizes_size(); ++d) {
      const Result<int64_t> size =
          source.expressions().Evaluate(shape.sizes[static_cast<size_t>(d)], {});
      const Result<int64_t> stride =
          source.expressions().Evaluate(shape.strides[static_cast<size_t>(d)], {});
      const bool size_differs = size.ok() && *size != tensor.sizes(d);
      const bool stride_differs =
          stride.ok() && tensor.sizes(d) > 1 && *stride != tensor.strides(d);
      if (size_differs || stride_differs) {
        return Error(StatusCode::kInvalid,
                     "static %zu '%s': dimension %d is %lld (stride %lld), the template differs",
                     position, input.name.c_str(), d, static_cast<long long>(tensor.sizes(d)),
                     static_cast<long long>(tensor.strides(d)));
      }
    }
  }
  return Status::Ok();
}

Result<std::shared_ptr<const BoundProgram>> Binding::Bind(std::span<const int64_t> symbols) {
  if (bound_ == nullptr || !std::ranges::equal(bound_->symbols, symbols)) {
    SLICE_ASSIGN_OR_RETURN(bound_, program_->Bind(symbols));
  }
  return bound_;
}

Result<at::Tensor> Binding::Get(const External& external, uint32_t domain) {
  if (external.kind == External::Kind::kConstant) return program_->constants()[external.index];
  if (domain >= domains_.size()) domains_.resize(domain + 1);
  InDomain& here = domains_[domain];
  if (external.kind == External::Kind::kStatic) {
    here.statics.resize(statics_.size());
    at::Tensor& tensor = here.statics[external.index];
    if (!tensor.defined())
      tensor = statics_[external.index].set->Get(domain, statics_[external.index].tensor);
    if (!tensor.defined()) {
      return Error(StatusCode::kInternal, "static %u (set %u) is not in domain %u", external.index,
                   statics_[external.index].set->id(), domain);
    }
    return tensor;
  }
  here.hoisted.resize(program_->hoisted().size());
  if (!here.hoisted[external.index].defined()) {
    const HoistedView& view = program_->hoisted()[external.index];
    SLICE_ASSIGN_OR_RETURN(const at::Tensor source, Get(view.source, domain));
    SLICE_ASSIGN_OR_RETURN(domains_[domain].hoisted[external.index],
                           RunHoisted(*program_, view, source));
  }
  return here.hoisted[external.index];
}

}  // namespace slice::executor
