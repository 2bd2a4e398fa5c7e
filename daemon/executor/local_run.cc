#include "daemon/executor/local_run.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <random>

#include "common/checked.h"
#include "common/clock.h"
#include "daemon/executor/tensors.h"

namespace slice::executor {
namespace {

constexpr uint64_t kSlotBytes = 64;

void FillRandom(const at::Tensor& tensor, std::mt19937_64* random, bool is_static) {
  at::Tensor flat = at::empty(tensor.sizes(), at::kDouble);
  auto* numbers = flat.data_ptr<double>();
  const bool real = tensor.is_floating_point() || tensor.is_complex();
  const double scale =
      tensor.dim() >= 2 ? 1.0 / std::sqrt(static_cast<double>(tensor.size(-1))) : 1.0;
  std::normal_distribution<double> normal(0.0, is_static ? scale : 1.0);
  for (int64_t i = 0; i < flat.numel(); ++i) {
    numbers[i] = real                                ? normal(*random)
                 : tensor.scalar_type() == at::kBool ? 1.0
                 : is_static                         ? 0.0
                                                     : static_cast<double>((*random)() % 4);
  }
  CopyInto(tensor, flat.to(tensor.scalar_type()));
}

}  // namespace

Result<std::unique_ptr<LocalRun>> LocalRun::Create(DeviceBackend* backend,
                                                   std::shared_ptr<const graph::Template> source,
                                                   std::vector<int64_t> symbols, uint64_t seed,
                                                   uint64_t pool_bytes_max) {
  auto run = std::make_unique<LocalRun>();
  run->backend_ = backend;
  run->source_ = source;
  run->symbols_ = std::move(symbols);
  run->seed_ = seed;
  graph::BoundSizes sizes;
  SLICE_RETURN_IF_ERROR(source->Bind(run->symbols_, &sizes));
  SLICE_ASSIGN_OR_RETURN(std::shared_ptr<const Program> program, Program::Prepare(source));

  run->tenant_ = std::make_shared<TenantMemory>();
  run->tenant_->id = kTenant;
  run->tenant_->pool_bytes_max = pool_bytes_max;
  backend->SetTenantCap(kDomain, kTenant, pool_bytes_max);
  uint64_t arena_bytes = 0;
  const auto slot = [&](int64_t bytes) {
    const wire::ArenaRange range{arena_bytes, static_cast<uint64_t>(bytes)};
    arena_bytes += RoundUp(range.bytes + 1, kSlotBytes);
    return range;
  };
  for (size_t i = 0; i < sizes.dynamic_count(); ++i)
    run->inputs_.push_back(slot(sizes.dynamic_bytes(i)));
  for (size_t i = 0; i < sizes.result_count(); ++i)
    run->outputs_.push_back(slot(sizes.result_bytes(i)));
  arena_bytes = RoundUp(arena_bytes + 1, 4096);
  SLICE_ASSIGN_OR_RETURN(const Fd arena, CreateMemfd("run-arena", arena_bytes));
  SLICE_ASSIGN_OR_RETURN(run->tenant_->arena, Mapping::Map(arena, arena_bytes, true));
  run->tenant_->arena_bytes = arena_bytes;

  proto::ExecutorTensorSet layout;
  layout.set_set_id(1);
  layout.set_tenant(kTenant);
  uint64_t segment_bytes = 0;
  std::vector<StaticRef> statics;
  for (const uint32_t index : source->statics()) {
    const uint32_t value = source->inputs()[index].value;
    const graph::ValueShape& shape = source->values()[value];
    proto::SetTensor* tensor = layout.add_tensors();
    SLICE_ASSIGN_OR_RETURN(const int64_t bytes, source->ValueBytes(value, run->symbols_));
    tensor->set_offset(segment_bytes);
    tensor->set_bytes(static_cast<uint64_t>(bytes));
    tensor->set_dtype(static_cast<uint32_t>(shape.dtype));
    for (size_t d = 0; d < shape.sizes.size(); ++d) {
      tensor->add_sizes(source->expressions().Evaluate(shape.sizes[d], run->symbols_).value());
      tensor->add_strides(source->expressions().Evaluate(shape.strides[d], run->symbols_).value());
    }
    segment_bytes += RoundUp(static_cast<uint64_t>(bytes), kSlotBytes);
  }
  layout.set_segment_bytes(RoundUp(segment_bytes + 1, 4096));
  layout.add_domains(kDomain);
  layout.add_writable(true);
  std::vector<Fd> fds(1);
  SLICE_ASSIGN_OR_RETURN(fds[0], CreateMemfd("run-statics", layout.segment_bytes()));
  SLICE_ASSIGN_OR_RETURN(run->set_, TensorSet::Create(layout, &fds));
  for (uint32_t i = 0; i < source->statics().size(); ++i) statics.push_back({run->set_, i});
  SLICE_ASSIGN_OR_RETURN(run->binding_,
                         Binding::Create(std::move(program), run->tenant_, std::move(statics)));
  std::mt19937_64 random(seed);
  for (uint32_t i = 0; i < source->statics().size(); ++i)
    FillRandom(run->static_tensor(i), &random, true);
  run->ResetInputs();
  return run;
}

std::byte* LocalRun::input(size_t position) const {
  return tenant_->arena.data() + inputs_[position].offset;
}

std::span<const std::byte> LocalRun::result(size_t position) const {
  return {tenant_->arena.data() + outputs_[position].offset, outputs_[position].bytes};
}

void LocalRun::ResetInputs() {
  std::mt19937_64 random(seed_ + 1);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const graph::ValueShape& shape =
        source_->values()[source_->inputs()[source_->dynamics()[i]].value];
    std::vector<int64_t> sizes, strides;
    for (size_t d = 0; d < shape.sizes.size(); ++d) {
      sizes.push_back(source_->expressions().Evaluate(shape.sizes[d], symbols_).value());
      strides.push_back(source_->expressions().Evaluate(shape.strides[d], symbols_).value());
    }
    FillRandom(WrapMemory(input(i), sizes, strides, *ToScalarType(shape.dtype)), &random, false);
  }
  for (uint32_t i = 0; i < source_->statics().size(); ++i) {
    if (source_->inputs()[source_->statics()[i]].written) static_tensor(i).zero_();
  }
}

Status LocalRun::Run(std::vector<int64_t>* group_ns) {
  const c10::InferenceMode inference;
  SLICE_ASSIGN_OR_RETURN(const std::shared_ptr<Instance> instance,
                         Instance::Start(binding_, 1, 1, symbols_, inputs_, outputs_));
  if (group_ns != nullptr) group_ns->assign(instance->op_count(), 0);
  std::vector<Instance::Missing> missing;
  const Program& program = *binding_->program();
  for (uint32_t op = 0; op < instance->op_count(); ++op) {
    const TimeNs start = MonotonicNow();
    SLICE_CHECK(instance->IsReady(op, kDomain), "groups run in order");
    SLICE_RETURN_IF_ERROR(instance->Gather(op, kDomain, &frame_, &missing));
    backend_->BeginOp({0, kDomain, kTenant});
    RunTrace trace;
    Status status = instance->CopyInputs(&missing, &frame_);
    if (status.ok())
      status = RunGroup(program, program.groups()[op], instance->integers(), &frame_, &trace);
    if (status.ok()) status = instance->StoreResults(op, frame_);
    OpTiming timing;
    const Status ended = backend_->EndOp(&timing);
    if (status.ok()) status = ended;
    if (status.ok()) instance->Complete(op, kDomain, &missing, &frame_);
    frame_.locals.clear();
    if (group_ns != nullptr) (*group_ns)[op] = MonotonicNow() - start;
    if (!status.ok()) {
      return Error(status.code(), "group %u '%s': %s", op, source_->groups()[op].name.c_str(),
                   status.text().c_str());
    }
  }
  return Status::Ok();
}

}  // namespace slice::executor
