// A copy of the engine to try things out on (engine_impl.h). It has what live work and the question
// reach: what points to another object has that copied when it is looked up, so that the cost does
// not grow with all that is registered, and the copy never reaches into the original. What is
// missing here is found by the tests that compare a copy's decisions with the original's.
#include <algorithm>
#include <unordered_map>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {
namespace {

// A thing in a slot that is free: only its generation counts.
template <typename T>
std::unique_ptr<T> EmptySlot(const T& original) {
  auto copy = std::make_unique<T>();
  copy->slot = original.slot;
  copy->generation = original.generation;
  return copy;
}

}  // namespace

// Fills the tables of `to`, which finds its objects by id or slot as any engine does.
class EngineImpl::Copier {
 public:
  Copier(const EngineImpl& from, EngineImpl* to) : from_(from), to_(to) {}

  void Commands();  // before tenants and parts
  void Instances();
  void Transfers();
  void Redirect(Tenant** tenant) const {
    if (*tenant != nullptr) *tenant = to_->tenants_.at((*tenant)->config.id).get();
  }
  void Redirect(Command** command) const {
    if (*command != nullptr) *command = commands_.at(*command);
  }
  void Redirect(Instance** instance) const {
    if (*instance == nullptr) return;
    auto& copy = to_->instances_[(*instance)->slot];
    if (copy == nullptr) copy = EmptySlot(**instance);  // it ended, something still names it
    *instance = copy.get();
  }
  void Redirect(TensorSet** set);
  void Redirect(Piece** piece);
  void Redirect(Binding** binding);
  void Redirect(Sequence** sequence);
  void Redirect(OpRef* ref) const { Redirect(&ref->instance); }
  void Redirect(PieceUse* use) { Redirect(&use->piece); }
  template <typename T>
  void Redirect(std::vector<T>* all) {
    for (T& one : *all) Redirect(&one);
  }

 private:
  const EngineImpl& from_;
  EngineImpl* const to_;
  std::unordered_map<const Command*, Command*> commands_;
};

void EngineImpl::Copier::Redirect(TensorSet** set) {
  if (*set == nullptr) return;
  const auto [place, is_new] = to_->sets_.try_emplace((*set)->config.id);
  if (is_new) {
    place->second = std::make_unique<TensorSet>(**set);
    Redirect(&place->second->tenant);
    for (Piece& piece : place->second->pieces) piece.set = place->second.get();
  }
  *set = place->second.get();
}

void EngineImpl::Copier::Redirect(Piece** piece) {
  if (*piece == nullptr) return;
  TensorSet* set = (*piece)->set;
  const auto index = static_cast<size_t>(*piece - set->pieces.data());
  Redirect(&set);
  *piece = &set->pieces[index];
}

void EngineImpl::Copier::Redirect(Binding** binding) {
  if (*binding == nullptr) return;
  const auto [place, is_new] = to_->bindings_.try_emplace((*binding)->config.id);
  if (is_new) {
    Binding* const copy = (place->second = std::make_unique<Binding>(**binding)).get();
    Redirect(&copy->tenant);
    Redirect(&copy->sets);
    Redirect(&copy->pieces);
    for (auto& pieces : copy->group_pieces) Redirect(&pieces);
    for (auto& constants : copy->group_constants) Redirect(&constants);
  }
  *binding = place->second.get();
}

void EngineImpl::Copier::Redirect(Sequence** sequence) {
  if (*sequence == nullptr) return;
  const SequenceKey key{(*sequence)->tenant->config.id, (*sequence)->number};
  const auto [place, is_new] = to_->sequences_.try_emplace(key);
  if (is_new) {
    place->second = std::make_unique<Sequence>(**sequence);
    Redirect(&place->second->tenant);
  }
  *sequence = place->second.get();
}

void EngineImpl::Copier::Commands() {
  for (const auto& command : from_.commands_) {
    to_->commands_.push_back(std::make_unique<Command>(*command));
    commands_.emplace(command.get(), to_->commands_.back().get());
    Redirect(&to_->commands_.back()->tenant);
  }
}

// Free slots stay empty unless something names them: no id that the copy still has to look up is of
// an earlier generation.
void EngineImpl::Copier::Instances() {
  to_->instances_.resize(from_.instances_.size());
  for (const auto& instance : from_.instances_) {
    if (instance == nullptr || instance->phase == Phase::kFree) continue;
    auto& copy = to_->instances_[instance->slot] = std::make_unique<Instance>(*instance);
    to_->gmg_.CopyInstance(from_.gmg_, instance->slot);
    copy->ops = {to_->op_extras_.get() + to_->gmg_.instance(instance->slot).op_begin,
                 instance->ops.size()};
    std::copy(instance->ops.begin(), instance->ops.end(), copy->ops.begin());
    copy->snapshot = sim::kNone;  // the original's window is not copied
    Redirect(&copy->tenant);
    Redirect(&copy->binding);
    Redirect(&copy->sequence);
  }
  for (const InstanceId id : from_.predict_) {
    if (from_.FindInstance(id.value) != nullptr) to_->predict_.push_back(id);
  }
}

void EngineImpl::Copier::Transfers() {
  for (const auto& transfer : from_.transfers_) {
    if (!transfer->live) {
      to_->transfers_.push_back(EmptySlot(*transfer));
      continue;
    }
    Transfer* const copy =
        to_->transfers_.emplace_back(std::make_unique<Transfer>(*transfer)).get();
    Redirect(&copy->tenant);
    Redirect(&copy->instance);
    Redirect(&copy->set);
  }
  for (const auto& part : from_.parts_) {
    if (!part->live) {
      to_->parts_.push_back(EmptySlot(*part));
      continue;
    }
    CommandPart* const copy = to_->parts_.emplace_back(std::make_unique<CommandPart>(*part)).get();
    Redirect(&copy->command);
    Redirect(&copy->piece);
  }
}

EngineImpl::EngineImpl(const EngineImpl& from, const Binding& question,
                       std::span<std::byte> gmg_memory, Sink* sink)
    : config_(from.config_),
      sink_(sink),
      gmg_(from.gmg_, gmg_memory),
      ledger_(from.ledger_),
      arbiter_(from.arbiter_),
      estimators_(from.estimators_),
      simulator_(transfer_estimator_, from.simulator_.options()),
      op_extras_(NewOpExtras(config_)),
      free_transfers_(from.free_transfers_),
      free_parts_(from.free_parts_),
      replications_(from.replications_),
      waiting_(from.waiting_),
      started_(from.started_),
      devices_(from.devices_),
      domain_devices_(from.domain_devices_),
      between_(from.between_),
      executor_up_(from.executor_up_),
      given_up_(from.given_up_),
      admission_dirty_(from.admission_dirty_),
      deferral_event_(from.deferral_event_),
      work_dirty_(from.work_dirty_),
      report_latency_p99_(from.report_latency_p99_),
      run_stamp_(from.run_stamp_),
      next_creation_(from.next_creation_),
      next_order_(from.next_order_),
      next_sequence_(from.next_sequence_),
      next_wake_(from.next_wake_),
      now_(from.now_),
      counters_(from.counters_),
      snapshot_stamp_(from.snapshot_stamp_) {
  Result<std::unique_ptr<sched::Policy>> policy =
      sched::MakePolicy(from.policy_->name(), &simulator_);
  SLICE_CHECK(policy.ok(), "the policy in force has a name");
  policy_ = *std::move(policy);
  CopyTables(from, question);
}

void EngineImpl::CopyTables(const EngineImpl& from, const Binding& question) {
  Copier copier(from, this);
  tenants_.reserve(from.tenants_.size());
  for (const auto& [id, tenant] : from.tenants_)
    tenants_.emplace(id, std::make_unique<Tenant>(*tenant));
  copier.Commands();
  copier.Instances();
  copier.Transfers();
  auto* asked = const_cast<Binding*>(&question);  // becomes the copy's
  copier.Redirect(&asked);
  for (const auto& [id, tenant] : tenants_) {
    copier.Redirect(&tenant->instances);
    copier.Redirect(&tenant->commands);
  }
  for (Replication& replication : replications_) copier.Redirect(&replication.set);
  copier.Redirect(&waiting_);
  copier.Redirect(&started_);
  copier.Redirect(&between_);
  for (DeviceState& device : devices_) {
    copier.Redirect(&device.placed);
    copier.Redirect(&device.issued);
    copier.Redirect(&device.launched);
  }
}

}  // namespace slice::engine
