#include "daemon/executor/instance.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "common/checked.h"
#include "daemon/executor/tensors.h"

namespace slice::executor {
namespace {

constexpr uint64_t kSlotAlignment = 16;  // the largest element

Status CheckRange(const wire::ArenaRange& range, int64_t bytes_needed, uint64_t arena_bytes,
                  const char* what, size_t index) {
  if (range.offset % kSlotAlignment != 0 || !RangeFits(range.offset, range.bytes, arena_bytes) ||
      range.bytes < static_cast<uint64_t>(bytes_needed)) {
    return Error(StatusCode::kBounds,
                 "%s %zu: slot at %llu of %llu bytes, needs %lld; the arena has %llu", what, index,
                 static_cast<unsigned long long>(range.offset),
                 static_cast<unsigned long long>(range.bytes), static_cast<long long>(bytes_needed),
                 static_cast<unsigned long long>(arena_bytes));
  }
  return Status::Ok();
}

}  // namespace

Result<std::shared_ptr<Instance>> Instance::Start(std::shared_ptr<Binding> binding, uint64_t id,
                                                  uint32_t attempt,
                                                  std::span<const int64_t> symbols,
                                                  std::span<const wire::ArenaRange> inputs,
                                                  std::span<const wire::ArenaRange> outputs) {
  auto instance = std::make_shared<Instance>();
  instance->binding_ = std::move(binding);
  instance->id_ = id;
  instance->attempt_ = attempt;
  const graph::Template& source = instance->source();
  SLICE_ASSIGN_OR_RETURN(instance->bound_, instance->binding_->Bind(symbols));
  const graph::BoundSizes& sizes = instance->bound_->sizes;
  if (inputs.size() != source.dynamics().size() || outputs.size() != source.results().size()) {
    return Error(StatusCode::kInvalid,
                 "%zu inputs and %zu outputs given, the template has %zu and %zu", inputs.size(),
                 outputs.size(), source.dynamics().size(), source.results().size());
  }
  const uint64_t arena_bytes = instance->binding_->tenant()->arena_bytes;
  for (size_t i = 0; i < inputs.size(); ++i) {
    SLICE_RETURN_IF_ERROR(CheckRange(inputs[i], sizes.dynamic_bytes(i), arena_bytes, "input", i));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    SLICE_RETURN_IF_ERROR(CheckRange(outputs[i], sizes.result_bytes(i), arena_bytes, "output", i));
  }
  instance->inputs_.assign(inputs.begin(), inputs.end());
  instance->outputs_.assign(outputs.begin(), outputs.end());
  instance->ops.assign(source.groups().size(), OpState::kNone);
  for (const graph::ValueUse& use : source.crossing()) {
    instance->crossing_left_.push_back(static_cast<uint32_t>(use.consumers.size()));
  }
  instance->dynamic_left_.assign(source.dynamics().size(), 0);
  for (const graph::Group& group : source.groups()) {
    for (const uint32_t dynamic : group.dynamic_in) ++instance->dynamic_left_[dynamic];
  }
  SLICE_RETURN_IF_ERROR(instance->CopyIntegerInputs());
  return instance;
}

std::shared_ptr<Instance> Instance::Failed(uint64_t id, uint32_t attempt, Status why) {
  auto instance = std::make_shared<Instance>();
  instance->id_ = id;
  instance->attempt_ = attempt;
  instance->failure = std::move(why);
  return instance;
}

void Instance::Clear() {
  domains_.clear();
  integer_inputs_.clear();
}

Instance::~Instance() {
  if (binding_ != nullptr)
    binding_->tenant()->host_bytes.fetch_sub(host_bytes_, std::memory_order_relaxed);
}

// Indices must be the same when they are checked and when they are used: the tenant could change
// them between.
Status Instance::CopyIntegerInputs() {
  TenantMemory& tenant = *binding_->tenant();
  integer_inputs_.resize(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const graph::Input& input = source().inputs()[source().dynamics()[i]];
    const graph::ValueShape& shape = source().values()[input.value];
    if (!shape.is_integer) continue;
    const auto size = static_cast<uint64_t>(bound_->sizes.dynamic_bytes(i));
    if (tenant.host_bytes.fetch_add(size, std::memory_order_relaxed) + size >
        tenant.pool_bytes_max) {
      tenant.host_bytes.fetch_sub(size, std::memory_order_relaxed);
      return Error(StatusCode::kNoMemory, "copies of integer inputs pass the tenant's %llu bytes",
                   static_cast<unsigned long long>(tenant.pool_bytes_max));
    }
    host_bytes_ += size;
    const BoundProgram::Shape& bound = bound_->shapes[input.value];
    try {
      // Not at::empty: first thing after a sleep, its dispatch takes longer than all the rest here.
      const std::shared_ptr<std::byte[]> copy(new std::byte[size + 1]);
      if (size > 0) std::memcpy(copy.get(), tenant.arena.data() + inputs_[i].offset, size);
      integer_inputs_[i] = WrapMemory(copy.get() + bound.offset_bytes, bound.sizes, bound.strides,
                                      *ToScalarType(shape.dtype), copy);
    } catch (const std::exception&) {
      return Error(StatusCode::kNoMemory, "cannot copy input %zu of %llu bytes", i,
                   static_cast<unsigned long long>(size));
    }
  }
  return Status::Ok();
}

Instance::InDomain& Instance::At(uint32_t domain) {
  if (domain >= domains_.size()) domains_.resize(domain + 1);
  InDomain& here = domains_[domain];
  if (here.crossing.size() != crossing_left_.size()) here.crossing.resize(crossing_left_.size());
  if (here.dynamic.size() != inputs_.size()) here.dynamic.resize(inputs_.size());
  return here;
}

bool Instance::IsReady(uint32_t op, uint32_t domain) const {
  const graph::Group& group = source().groups()[op];
  for (const uint32_t before : group.predecessors) {
    if (ops[before] != OpState::kFinished) return false;
  }
  for (const uint32_t value : group.values_in) {
    if (!Value(value, domain).defined()) return false;
  }
  return true;
}

Status Instance::Gather(uint32_t op, uint32_t domain, Frame* frame, std::vector<Missing>* missing) {
  const PreparedGroup& group = binding_->program()->groups()[op];
  PrepareFrame(group, frame);
  missing->clear();
  InDomain& here = At(domain);
  for (const External& external : group.externals) {
    c10::IValue& local = frame->locals[external.local];
    switch (external.kind) {
      case External::Kind::kCrossing:
        local = here.crossing[external.index];
        break;
      case External::Kind::kDynamic:
        if (integer_inputs_[external.index].defined()) {
          local = integer_inputs_[external.index];
        } else if (here.dynamic[external.index].defined()) {
          local = here.dynamic[external.index];
        } else {
          missing->push_back({external.index, external.local, {}});
        }
        break;
      default: {
        SLICE_ASSIGN_OR_RETURN(at::Tensor tensor, binding_->Get(external, domain));
        local = std::move(tensor);
      }
    }
  }
  return Status::Ok();
}

Status Instance::CopyInputs(std::vector<Missing>* missing, Frame* frame) const {
  for (Missing& input : *missing) {
    const uint32_t value = source().inputs()[source().dynamics()[input.dynamic]].value;
    const BoundProgram::Shape& shape = bound_->shapes[value];
    try {
      at::Tensor tensor = at::empty_strided(shape.sizes, shape.strides,
                                            *ToScalarType(source().values()[value].dtype));
      if (shape.extent_bytes > 0) {
        const std::byte* slot = binding_->tenant()->arena.data() + inputs_[input.dynamic].offset;
        std::memcpy(tensor.data_ptr(), slot + shape.offset_bytes,
                    static_cast<size_t>(shape.extent_bytes));
      }
      frame->locals[input.local] = tensor;
      input.copy = std::move(tensor);
    } catch (const c10::Error& error) {
      return Error(StatusCode::kNoMemory, "input %u: %s", input.dynamic,
                   error.what_without_backtrace());
    } catch (const std::exception& error) {
      return Error(StatusCode::kNoMemory, "input %u: %s", input.dynamic, error.what());
    }
  }
  return Status::Ok();
}

Status Instance::StoreResults(uint32_t op, const Frame& frame) const {
  for (const Export& exported : binding_->program()->groups()[op].exports) {
    const c10::ScalarType dtype = *ToScalarType(source().values()[exported.value].dtype);
    const BoundProgram::Shape& shape = bound_->shapes[exported.value];
    const auto refuse = [&](const std::string& why) {
      return Error(StatusCode::kOpFailed, "value %u: %s", exported.value, why.c_str());
    };
    const c10::IValue& local = frame.locals[exported.local];
    if (!local.isTensor() || !local.toTensor().defined()) return refuse("no tensor was made");
    const at::Tensor& tensor = local.toTensor();
    if (tensor.scalar_type() != dtype || tensor.sizes() != at::IntArrayRef(shape.sizes)) {
      return refuse(c10::str("the operator made ", tensor.scalar_type(), tensor.sizes(),
                             ", the template says ", dtype, at::IntArrayRef(shape.sizes)));
    }
    for (const uint32_t result : exported.results) {
      std::byte* slot =
          binding_->tenant()->arena.data() + outputs_[result].offset + shape.offset_bytes;
      try {
        if (tensor.numel() == 0) continue;
        if (tensor.is_contiguous() && tensor.strides() == at::IntArrayRef(shape.strides)) {
          std::memcpy(slot, tensor.data_ptr(), tensor.nbytes());
        } else {
          CopyInto(WrapMemory(slot, shape.sizes, shape.strides, tensor.scalar_type()), tensor);
        }
      } catch (const c10::Error& error) {
        return refuse(error.what_without_backtrace());
      }
    }
  }
  return Status::Ok();
}

void Instance::Complete(uint32_t op, uint32_t domain, std::vector<Missing>* missing, Frame* frame) {
  const graph::Group& group = source().groups()[op];
  ops[op] = OpState::kFinished;
  for (const Export& exported : binding_->program()->groups()[op].exports) {
    if (exported.crossing == graph::kNoIndex || crossing_left_[exported.crossing] == 0) continue;
    At(domain).crossing[exported.crossing] = frame->locals[exported.local].toTensor();
  }
  for (Missing& input : *missing) At(domain).dynamic[input.dynamic] = std::move(input.copy);
  for (const uint32_t value : group.values_in) {
    const uint32_t index = source().crossing_index(value);
    if (--crossing_left_[index] > 0) continue;
    for (InDomain& here : domains_) {
      if (!here.crossing.empty()) here.crossing[index] = at::Tensor();
    }
  }
  for (const uint32_t dynamic : group.dynamic_in) {
    if (--dynamic_left_[dynamic] > 0) continue;
    for (InDomain& here : domains_) {
      if (!here.dynamic.empty()) here.dynamic[dynamic] = at::Tensor();
    }
  }
}

at::Tensor Instance::Value(uint32_t value, uint32_t domain) const {
  const uint32_t index = source().crossing_index(value);
  if (index == graph::kNoIndex || domain >= domains_.size() || domains_[domain].crossing.empty())
    return {};
  return domains_[domain].crossing[index];
}

void Instance::PutValue(uint32_t value, uint32_t domain, at::Tensor tensor) {
  At(domain).crossing[source().crossing_index(value)] = std::move(tensor);
}

bool Instance::NeedsValue(uint32_t value) const {
  const uint32_t index = source().crossing_index(value);
  return index != graph::kNoIndex && crossing_left_[index] > 0;
}

}  // namespace slice::executor
