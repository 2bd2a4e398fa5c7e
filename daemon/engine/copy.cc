// A copy of the engine to try things out on (engine_impl.h). What points to another object is
// copied first and looked up then, so that the copy never reaches into the original. What is
// missing here is found by the tests that compare a copy's decisions with the original's.
#include <algorithm>
#include <unordered_map>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {
namespace {

// Where the copy of an object is, by the original's address.
class Copies {
 public:
  template <typename T>
  std::unique_ptr<T> Make(const T& original) {
    auto copy = std::make_unique<T>(original);
    Note(original, copy.get());
    return copy;
  }
  template <typename T>
  void Note(const T& original, T* copy) {
    copies_.emplace(&original, copy);
  }
  template <typename T>
  void Redirect(T** pointer) const {
    if (*pointer == nullptr) return;
    const auto found = copies_.find(*pointer);
    SLICE_CHECK(found != copies_.end(), "the engine points to something that was not copied");
    *pointer = static_cast<T*>(found->second);
  }
  template <typename T>
  void Redirect(std::vector<T*>* pointers) const {
    for (T*& pointer : *pointers) Redirect(&pointer);
  }
  void Redirect(std::vector<OpRef>* refs) const {
    for (OpRef& ref : *refs) Redirect(&ref.instance);
  }
  void Redirect(std::vector<PieceUse>* uses) const {
    for (PieceUse& use : *uses) Redirect(&use.piece);
  }

 private:
  std::unordered_map<const void*, void*> copies_;
};

// A thing in a slot that is free: only its generation counts.
template <typename T>
std::unique_ptr<T> EmptySlot(const T& original) {
  auto copy = std::make_unique<T>();
  copy->slot = original.slot;
  copy->generation = original.generation;
  return copy;
}

}  // namespace

EngineImpl::EngineImpl(const EngineImpl& from, std::span<std::byte> gmg_memory, Sink* sink)
    : config_(from.config_),
      sink_(sink),
      gmg_(from.gmg_, gmg_memory),
      ledger_(from.ledger_),
      arbiter_(from.arbiter_),
      estimators_(from.estimators_),
      simulator_(transfer_estimator_, from.simulator_.options()),
      templates_(from.templates_),
      op_extras_(from.op_extras_.size()),
      free_transfers_(from.free_transfers_),
      free_parts_(from.free_parts_),
      replications_(from.replications_),
      waiting_(from.waiting_),
      started_(from.started_),
      devices_(from.devices_),
      domain_devices_(from.domain_devices_),
      predict_(from.predict_),
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
      window_(from.window_),
      snapshot_stamp_(from.snapshot_stamp_) {
  Result<std::unique_ptr<sched::Policy>> policy =
      sched::MakePolicy(from.policy_->name(), &simulator_);
  SLICE_CHECK(policy.ok(), "the policy in force has a name");
  policy_ = *std::move(policy);
  CopyTables(from);
}

void EngineImpl::CopyTables(const EngineImpl& from) {
  Copies copies;
  for (const auto& [id, tenant] : from.tenants_) tenants_.emplace(id, copies.Make(*tenant));
  for (const auto& [id, set] : from.sets_) {
    TensorSet* const copy = sets_.emplace(id, copies.Make(*set)).first->second.get();
    for (size_t p = 0; p < set->pieces.size(); ++p) copies.Note(set->pieces[p], &copy->pieces[p]);
  }
  for (const auto& [id, binding] : from.bindings_) bindings_.emplace(id, copies.Make(*binding));
  for (const auto& [key, sequence] : from.sequences_)
    sequences_.emplace(key, copies.Make(*sequence));
  for (const auto& command : from.commands_) commands_.push_back(copies.Make(*command));
  for (const auto& instance : from.instances_) {
    const bool live = instance != nullptr && instance->phase != Phase::kFree;
    instances_.push_back(instance == nullptr ? nullptr
                         : live              ? copies.Make(*instance)
                                             : EmptySlot(*instance));
    if (instance == nullptr) continue;
    Instance* const copy = instances_.back().get();
    if (!live) copies.Note(*instance, copy);
    if (!live) continue;
    gmg_.CopyInstance(from.gmg_, instance->slot);
    copy->ops = {op_extras_.data() + gmg_.instance(instance->slot).op_begin, instance->ops.size()};
    std::copy(instance->ops.begin(), instance->ops.end(), copy->ops.begin());
  }
  for (const auto& transfer : from.transfers_)
    transfers_.push_back(transfer->live ? copies.Make(*transfer) : EmptySlot(*transfer));
  for (const auto& part : from.parts_)
    parts_.push_back(part->live ? copies.Make(*part) : EmptySlot(*part));

  for (const auto& [id, tenant] : tenants_) {
    copies.Redirect(&tenant->instances);
    copies.Redirect(&tenant->commands);
  }
  for (const auto& [id, set] : sets_) {
    copies.Redirect(&set->tenant);
    for (Piece& piece : set->pieces) copies.Redirect(&piece.set);
  }
  for (const auto& [id, binding] : bindings_) {
    copies.Redirect(&binding->tenant);
    copies.Redirect(&binding->pieces);
    copies.Redirect(&binding->sets);
    for (auto& pieces : binding->group_pieces) copies.Redirect(&pieces);
    for (auto& constants : binding->group_constants) copies.Redirect(&constants);
  }
  for (const auto& [key, sequence] : sequences_) copies.Redirect(&sequence->tenant);
  for (const auto& command : commands_) copies.Redirect(&command->tenant);
  for (const auto& instance : instances_) {
    if (instance == nullptr) continue;
    copies.Redirect(&instance->tenant);
    copies.Redirect(&instance->binding);
    copies.Redirect(&instance->sequence);
  }
  for (const auto& transfer : transfers_) {
    copies.Redirect(&transfer->tenant);
    copies.Redirect(&transfer->instance);
    copies.Redirect(&transfer->set);
  }
  for (const auto& part : parts_) {
    copies.Redirect(&part->command);
    copies.Redirect(&part->piece);
  }
  for (Replication& replication : replications_) copies.Redirect(&replication.set);
  copies.Redirect(&waiting_);
  copies.Redirect(&started_);
  copies.Redirect(&between_);
  copies.Redirect(&window_);  // the next snapshot takes its marks off
  for (DeviceState& device : devices_) {
    copies.Redirect(&device.placed);
    copies.Redirect(&device.issued);
    copies.Redirect(&device.launched);
  }
}

}  // namespace slice::engine
