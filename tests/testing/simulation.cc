// Engine, virtual executor and clock together: registration, actions, and the loop.
#include <algorithm>
#include <cstdlib>

#include "common/clock.h"
#include "common/tensor_meta.h"
#include "tests/testing/virtual_executor.h"

namespace slice::testing {

// ---------------------------------------------------------------------------------------------------

Simulation::Simulation(const engine::Config& config, const VirtualOptions& options)
    : config_(config),
      gmg_(static_cast<std::byte*>(std::calloc(1, engine::Engine::GmgBytes(config) + 64)),
           std::free),
      executor_(config, options) {
  const auto address = reinterpret_cast<uintptr_t>(gmg_.get());
  gmg_span_ = {gmg_.get() + (64 - address % 64) % 64, engine::Engine::GmgBytes(config)};
  Result<std::unique_ptr<engine::Engine>> created =
      engine::Engine::Create(config, gmg_span_, &executor_);
  SLICE_CHECK(created.ok(), created.status().ToString().c_str());
  engine_ = *std::move(created);
  executor_.set_engine(engine_.get());
  engine_->ExecutorReady(0);
}

void Simulation::At(TimeNs at, std::function<void()> action) {
  actions_.push({at, next_action_++, std::move(action)});
}

void Simulation::Step(TimeNs at) {
  now_ = std::max(now_, at);
  executor_.AdvanceTo(now_);
  while (!actions_.empty() && actions_.top().at <= now_) {
    const Action action = actions_.top();
    actions_.pop();
    action.run();
  }
  if (!run_probe) return engine_->Run(now_);
  const uint64_t rounds = engine_->counters().rounds;
  const DurationNs before = ThreadCpuNow();
  engine_->Run(now_);
  run_probe(ThreadCpuNow() - before, engine_->counters().rounds != rounds);
}

void Simulation::RunUntil(TimeNs at) {
  for (;;) {
    TimeNs next = std::min(executor_.NextEvent(), engine_->NextWake());
    if (!actions_.empty()) next = std::min(next, actions_.top().at);
    if (next > at) break;
    Step(next);
  }
  now_ = std::max(now_, at);
  executor_.AdvanceTo(now_);
}

bool Simulation::RunAll(TimeNs limit) {
  for (;;) {
    TimeNs next = std::min(executor_.NextEvent(), engine_->NextWake());
    if (!actions_.empty()) next = std::min(next, actions_.top().at);
    if (next == kNever) return true;
    if (next > limit) return false;
    Step(next);
  }
}

void Simulation::KillExecutor(DurationNs restart_after) {
  executor_.Die();
  engine_->ExecutorLost(now_);
  At(now_ + restart_after, [this] { engine_->ExecutorReady(now_); });
}

TenantId Simulation::AddTenant(engine::TenantConfig config) {
  config.id = {next_id_++};
  if (config.name.empty()) config.name = "tenant" + std::to_string(config.id.value);
  const Status status = engine_->AddTenant(config, now_);
  SLICE_CHECK(status.ok(), status.ToString().c_str());
  return config.id;
}

TenantId Simulation::AddTenant(ServiceClass service_class, DeviceIndex home) {
  engine::TenantConfig config;
  config.class_max = service_class;
  config.home = home;
  return AddTenant(config);
}

TemplateId Simulation::AddTemplate(std::shared_ptr<const graph::Template> graph) {
  const TemplateId id{next_id_++};
  const Status status = engine_->AddTemplate(id, std::move(graph));
  SLICE_CHECK(status.ok(), status.ToString().c_str());
  return id;
}

namespace {
engine::TensorKind KindOf(const graph::Input& input) {
  return input.kind == proto::Input::STATIC_CONSTANT  ? engine::TensorKind::kConstant
         : input.kind == proto::Input::STATIC_MUTABLE ? engine::TensorKind::kMutable
                                                      : engine::TensorKind::kManaged;
}
}  // namespace

TensorSetId Simulation::AddSet(const Service& service, engine::TensorKind kind, DomainIndex home,
                               uint64_t segment_domains) {
  std::vector<uint32_t> inputs;
  for (const uint32_t input : service.graph->statics()) {
    if (KindOf(service.graph->inputs()[input]) == kind) inputs.push_back(input);
  }
  if (inputs.empty()) return {};
  return AddSet(service, inputs, kind, home, segment_domains);
}

TensorSetId Simulation::AddSet(const Service& service, std::span<const uint32_t> inputs,
                               engine::TensorKind kind, DomainIndex home,
                               uint64_t segment_domains) {
  engine::TensorSetConfig set;
  set.id = {next_id_++};
  set.tenant = service.tenant;
  set.kind = kind;
  set.home = home;
  set.segment_domains = segment_domains;
  const std::vector<int64_t> symbols(service.graph->symbol_count(), 0);
  for (const uint32_t input_index : inputs) {
    const graph::Input& input = service.graph->inputs()[input_index];
    const graph::ValueShape& shape = service.graph->values()[input.value];
    std::vector<int64_t> sizes, strides;
    for (const graph::ExprIndex e : shape.sizes)
      sizes.push_back(*service.graph->expressions().Evaluate(e, symbols));
    for (const graph::ExprIndex e : shape.strides)
      strides.push_back(*service.graph->expressions().Evaluate(e, symbols));
    set.tensors.push_back({input.name, *service.graph->ValueBytes(input.value, symbols),
                           TensorMetaHash(static_cast<uint32_t>(shape.dtype), sizes, strides)});
  }
  const Status status = engine_->AddTensorSet(set, now_);
  SLICE_CHECK(status.ok(), status.ToString().c_str());
  executor_.AddSet(set);
  return set.id;
}

Simulation::Service Simulation::AddServiceSpread(TenantId tenant,
                                                 std::shared_ptr<const graph::Template> graph,
                                                 const std::vector<DomainIndex>& homes) {
  Service service;
  service.tenant = tenant;
  service.graph = graph;
  std::vector<engine::TensorRef> statics;
  for (size_t i = 0; i < graph->statics().size(); ++i) {
    const uint32_t input = graph->statics()[i];
    statics.push_back(
        {AddSet(service, std::span(&input, 1), KindOf(graph->inputs()[input]), homes[i], 0), 0});
  }
  return Bind(service, std::move(statics));
}

Simulation::Service Simulation::AddService(TenantId tenant,
                                           std::shared_ptr<const graph::Template> graph,
                                           DomainIndex home, std::vector<DomainIndex> replicas,
                                           bool movable) {
  Service service;
  service.tenant = tenant;
  service.graph = graph;
  uint64_t domains = uint64_t{1} << home;
  if (movable) domains = (uint64_t{1} << config_.domains.size()) - 1;
  service.constants = AddSet(service, engine::TensorKind::kConstant, home, 0);
  service.managed = AddSet(service, engine::TensorKind::kManaged, home, domains);
  service.mutables = AddSet(service, engine::TensorKind::kMutable, home, 0);
  for (const DomainIndex domain : replicas) {
    if (!service.constants) break;
    const Status status = engine_->Replicate(service.constants, domain, now_);
    SLICE_CHECK(status.ok(), status.ToString().c_str());
    while (!engine_->ReplicasReady(service.constants, domain))
      Step(std::min(executor_.NextEvent(), engine_->NextWake()));
  }
  return AddGraph(service, std::move(graph));
}

Simulation::Service Simulation::AddServiceAt(
    TenantId tenant, std::shared_ptr<const graph::Template> graph,
    const std::map<engine::TensorKind, DomainIndex>& homes) {
  Service service;
  service.tenant = tenant;
  service.graph = graph;
  for (const auto& [kind, home] : homes) {
    TensorSetId& set = kind == engine::TensorKind::kConstant  ? service.constants
                       : kind == engine::TensorKind::kManaged ? service.managed
                                                              : service.mutables;
    set = AddSet(service, kind, home, 0);
  }
  return AddGraph(service, std::move(graph));
}

Simulation::Service Simulation::AddGraph(const Service& from,
                                         std::shared_ptr<const graph::Template> graph) {
  Service service = from;
  service.graph = graph;
  uint32_t next[4] = {0, 0, 0, 0};
  std::vector<engine::TensorRef> statics;
  for (const uint32_t input : graph->statics()) {
    const engine::TensorKind kind = KindOf(graph->inputs()[input]);
    const TensorSetId set = kind == engine::TensorKind::kConstant  ? service.constants
                            : kind == engine::TensorKind::kManaged ? service.managed
                                                                   : service.mutables;
    statics.push_back({set, next[static_cast<size_t>(kind)]++});
  }
  return Bind(service, std::move(statics));
}

Simulation::Service Simulation::Bind(Service service, std::vector<engine::TensorRef> statics) {
  service.pieces.clear();
  engine::BindingConfig binding;
  binding.tenant = service.tenant;
  binding.graph = AddTemplate(service.graph);
  binding.id = {next_id_++};
  binding.statics = statics;
  for (size_t i = 0; i < statics.size(); ++i) {
    const bool managed = KindOf(service.graph->inputs()[service.graph->statics()[i]]) ==
                         engine::TensorKind::kManaged;
    if (managed) service.pieces.push_back(statics[i]);
  }
  const Status status = engine_->AddBinding(binding);
  SLICE_CHECK(status.ok(), status.ToString().c_str());
  executor_.AddBinding(binding.id, {service.graph, std::move(statics)});
  service.binding = binding.id;
  return service;
}

uint64_t Simulation::Submit(const Service& service, uint64_t sequence, TimeNs deadline,
                            int32_t priority) {
  graph::BoundSizes sizes;
  const Status bound = service.graph->Bind({}, &sizes);
  SLICE_CHECK(bound.ok(), bound.ToString().c_str());
  std::vector<wire::ArenaRange> inputs, outputs;
  const auto slot = [this](int64_t bytes) {
    const wire::ArenaRange range{next_offset_, static_cast<uint64_t>(bytes)};
    next_offset_ += (static_cast<uint64_t>(bytes) + 63) / 64 * 64;
    return range;
  };
  for (size_t i = 0; i < sizes.dynamic_count(); ++i) inputs.push_back(slot(sizes.dynamic_bytes(i)));
  for (size_t i = 0; i < sizes.result_count(); ++i) outputs.push_back(slot(sizes.result_bytes(i)));
  engine::Submit submit;
  submit.tenant = service.tenant;
  submit.cookie = next_cookie_++;
  submit.binding = service.binding;
  submit.sequence = sequence;
  submit.deadline = deadline;
  submit.priority = priority;
  submit.inputs = inputs;
  submit.outputs = outputs;
  engine_->Handle(submit, now_);
  return submit.cookie;
}

uint64_t Simulation::Command(const Service& service, wire::TensorCommandKind kind,
                             std::vector<engine::TensorRef> pieces) {
  engine::TensorCommand command;
  command.tenant = service.tenant;
  command.cookie = next_cookie_++;
  command.kind = kind;
  command.tensors = pieces;
  engine_->Handle(command, now_);
  return command.cookie;
}

void Simulation::OpenSequence(TenantId tenant, uint64_t number, ServiceClass service_class,
                              TimeNs deadline) {
  engine::OpenSequence open;
  open.tenant = tenant;
  open.sequence = number;
  open.service_class = service_class;
  open.deadline = deadline;
  engine_->Handle(open, now_);
}

const VirtualExecutor::Completion* Simulation::Find(TenantId tenant, uint64_t cookie) const {
  const auto found = executor_.completions.find({tenant.value, cookie});
  return found == executor_.completions.end() ? nullptr : &found->second;
}

int Simulation::StatusOf(TenantId tenant, uint64_t cookie) const {
  const VirtualExecutor::Completion* const completion = Find(tenant, cookie);
  return completion == nullptr ? -1 : completion->slot.status;
}

std::string Simulation::Violations() const {
  std::string text;
  for (size_t i = 0; i < executor_.violations.size() && i < 5; ++i)
    text += executor_.violations[i] + "\n";
  return text;
}

}  // namespace slice::testing
