// The engine's inside. One class over several files, by what they decide:
//
//   engine.cc            construction, Run, NextWake, policy switch
//   tables.cc            tenants, templates, sets, bindings: the cold calls
//   tenants.cc           sequences, commands of tenants on pieces, death of a tenant
//   submit.cc            checks of a submit, its instance
//   admission.cc         reservations, start and end of an instance
//   rounds.cc            op batches -> placements
//   issue.cc             placements -> Issue records; windows, recall
//   memory.cc            peaks, grants, death of values
//   transfers.cc         Watch/Recv/Send, moves of pieces, replicas
//   reports.cc           the executor's records
//   recovery.cc          loss and return of the executor
//   snapshot_builder.cc  the live window for what-if
//   estimates.cc         predictions of ops, what is learned from reports, `slicectl estimators`
//   report_json.cc       status texts
//   whatif.cc, copy.cc   what would become of a submit: tried out on a copy of the engine
#pragma once

#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "daemon/engine/engine.h"
#include "daemon/engine/state.h"
#include "daemon/estimate/estimator.h"
#include "daemon/gmg/gmg.h"
#include "daemon/gmg/ledger.h"
#include "daemon/sched/policy.h"
#include "daemon/sim/simulator.h"
#include "daemon/transfer/arbiter.h"

namespace slice::engine {

// Bytes that an allocation of `bytes` takes in the executor's pools: pages for large ones. The runs
// that small ones are cut from are covered by Config::workspace_margin_bytes.
inline int64_t Charged(int64_t bytes) {
  const int64_t unit = bytes > 8192 ? 4096 : 256;
  return (bytes + unit - 1) / unit * unit;
}

// Ids of things in reused slots: generation above, slot below. An id of an earlier generation is
// stale.
inline constexpr uint32_t kSlotBits = 20;
constexpr uint64_t MakeId(uint32_t generation, uint32_t slot) {
  return uint64_t{generation} << kSlotBits | slot;
}
constexpr uint64_t SlotOf(uint64_t id) { return id & ((uint64_t{1} << kSlotBits) - 1); }

class EngineImpl final : public Engine {
 public:
  EngineImpl(const Config& config, std::span<std::byte> gmg_memory, Sink* sink);
  // An engine in the same state, with GMG memory (zeroed) and a sink of its own, that decides as
  // `from` would about a submit of `question`, a binding of `from`, to the tables of which it has
  // only what this and live work reach. They share templates and estimators: a copy must be given
  // nothing that teaches these (reports, ends of sequences, steps of one but the first).
  EngineImpl(const EngineImpl& from, const Binding& question, std::span<std::byte> gmg_memory,
             Sink* sink);

  Status AddTenant(const TenantConfig& tenant, TimeNs now) override;
  void RemoveTenant(TenantId tenant, TimeNs now) override;
  bool TenantGone(TenantId tenant) const override;
  Status AddTemplate(TemplateId id, std::shared_ptr<const graph::Template> graph) override;
  Status RemoveTemplate(TemplateId id) override;
  Status AddTensorSet(const TensorSetConfig& set, TimeNs now) override;
  Status RemoveTensorSet(TensorSetId set, TimeNs now) override;
  bool TensorSetGone(TensorSetId set) const override;
  Status Replicate(TensorSetId set, DomainIndex domain, TimeNs now) override;
  bool ReplicasReady(TensorSetId set, DomainIndex domain) const override;
  Status AddBinding(const BindingConfig& binding) override;
  Status RemoveBinding(BindingId binding) override;
  Status SetPolicy(std::string_view name, TimeNs now) override;

  void Handle(const Submit& submit, TimeNs now) override;
  void Handle(const OpenSequence& open, TimeNs now) override;
  void CloseSequence(TenantId tenant, uint64_t sequence, TimeNs now) override;
  void Cancel(TenantId tenant, uint64_t cookie, TimeNs now) override;
  void Handle(const TensorCommand& command, TimeNs now) override;
  Status HandleReport(uint32_t type, std::span<const std::byte> payload, TimeNs now) override;
  void ExecutorLost(TimeNs now) override;
  void ExecutorReady(TimeNs now) override;
  void ExecutorGivenUp(TimeNs now) override;
  void Run(TimeNs now) override;
  TimeNs NextWake() const override;

  uint64_t OverrunDevices(TimeNs now) const override;
  std::vector<TenantUser> LaunchedTenants() const override;
  const Counters& counters() const override { return counters_; }
  std::string policy_name() const override { return std::string(policy_->name()); }
  std::string StatusJson(TimeNs now) const override;
  std::string DevicesJson(TimeNs now) const override;
  std::string TenantsJson(TimeNs now) const override;
  estimate::Saved SaveEstimates() const override;
  size_t LoadEstimates(const estimate::Saved& saved) override;
  std::string EstimatorsJson() const override;
  Result<std::string> WhatIf(const WhatIfQuery& query, TimeNs now) const override;

  // Errors: INVALID (config).
  Status Initialise();

 private:
  friend class Hypothesis;  // whatif.cc

  // ---- copy.cc
  class Copier;
  void CopyTables(const EngineImpl& from, const Binding& question);

  // ---- engine.cc
  void ScheduleWake(TimeNs now);
  bool Stalled() const;
  void Publish();  // device, domain and tenant records of the GMG; closes the instance blocks
  Tenant* FindTenant(TenantId id) const;
  Sequence* FindSequence(TenantId tenant, uint64_t number) const;
  Instance* FindInstance(uint64_t id) const;  // null: stale
  Instance* InstanceAt(uint32_t slot) const;  // null: free; of an access queue's entry
  ServiceClass QueueClass(const Instance& instance) const;  // as the policy orders queues
  const sched::OrderKey& Key(Instance* instance);
  void CompleteCookie(Tenant* tenant, const wire::CompletionSlot& completion,
                      const std::string& text);
  gmg::OpRecord& Op(const Instance& instance, uint32_t op) { return gmg_.ops(instance.slot)[op]; }
  const gmg::OpRecord& Op(const Instance& instance, uint32_t op) const {
    return gmg_.ops(instance.slot)[op];
  }
  gmg::TensorRecord& Value(const Instance& instance, uint32_t crossing) {
    return gmg_.tensors(instance.slot)[crossing];
  }
  void SetState(Instance* instance, uint32_t op, gmg::OpState state);
  uint64_t DomainDevices(DomainIndex domain) const { return domain_devices_[domain]; }
  DomainIndex DomainOf(DeviceIndex device) const { return devices_[device].domain; }
  template <typename Record>
  void Send(wire::CommandType type, const Record& record, DeviceIndex wake = kNoDevice);

  // ---- tables.cc
  void ReapSet(TensorSet* set);  // frees it when it is being removed and nothing uses it
  void ReapBinding(Binding* binding);
  void ReapTenant(Tenant* tenant);
  Status PlanBinding(Binding* binding);
  void PublishPiece(const Piece& piece);
  void PublishLastEntry(const Piece& piece);
  void ShowEntry(const gmg::AccessEntry& entry, gmg::QueueEntryRecord* shown) const;
  uint64_t OwnerId(const gmg::AccessEntry& entry) const;

  // ---- tenants.cc
  void ReapSequence(Sequence* sequence);
  void PublishSequence(const Sequence& sequence);
  void RefuseCommand(Tenant* tenant, const TensorCommand& command, StatusCode code,
                     const std::string& text, TimeNs now);
  Status CheckCommand(Tenant* tenant, const TensorCommand& command);
  void PumpCommands(Piece* piece, TimeNs now);  // starts what came to the head of its queue
  void StartPart(CommandPart* part, TimeNs now);
  void FinishPart(CommandPart* part, StatusCode status, TimeNs now);
  void CompleteCommand(Command* command, TimeNs now);
  CommandPart* NewPart();
  CommandPart* FindPart(uint64_t id);
  void DropWaitingParts(Command* command, StatusCode status, TimeNs now);

  // ---- submit.cc, admission.cc
  Tenant* CountSubmit(TenantId id, TimeNs now);  // null: it is gone, and so is who could be told
  Status CheckQueue(const Tenant& tenant) const;
  Status CheckSubmit(Tenant* tenant, const Submit& submit, Binding** binding, Sequence** sequence);
  Status CheckRanges(const Tenant& tenant, std::span<const wire::ArenaRange> outputs) const;
  Status CheckFits(const Instance& instance);
  void Refuse(Tenant* tenant, uint64_t cookie, const Status& status, TimeNs now);
  Instance* NewInstance(const graph::Template& graph, const graph::BoundSizes& sizes);
  void FillInstance(Instance* instance, Tenant* tenant, Binding* binding, Sequence* sequence,
                    const Submit& submit, TimeNs now);
  void Enqueue(Instance* instance);
  void InsertWaiting(Instance* instance);
  void BoostEarlier(const Instance& instance);
  void AssignHome(Instance* instance);
  bool EarlierStarted(const Instance& instance) const;
  void AdmitWaiting();
  bool TryStart(Instance* instance, uint64_t* blocked_domains);
  void SendStart(Instance* instance);
  void CompleteInstance(Instance* instance, StatusCode code, const std::string& text,
                        uint32_t failed_op, TimeNs now);
  void FailInstance(Instance* instance, StatusCode code, const std::string& text,
                    uint32_t failed_op, TimeNs now);
  void EndInstance(Instance* instance, TimeNs now);
  void Finalise(Instance* instance, TimeNs now);  // nothing of it is left in the executor
  void ReleaseReservation(Instance* instance);
  void LeavePieces(Instance* instance, TimeNs now);
  void LosePiece(Piece* piece, TimeNs now);
  void NoteOnlineArrival(const Instance& instance, TimeNs now);

  // ---- memory.cc
  void ComputePeaks(const Instance& instance, std::vector<int64_t>* peaks,
                    std::vector<int64_t>* lanes);
  bool InOrder(const Instance& instance, uint32_t op, DeviceIndex device);
  int64_t ScratchBytes(const Instance& instance, uint32_t op) const;
  int64_t OutputBytes(const Instance& instance, uint32_t op) const;
  bool IsMissing(const Instance& instance, uint32_t crossing, DomainIndex domain) const;
  int64_t MissingInputBytes(const Instance& instance, uint32_t op, DomainIndex domain);
  bool TakeGrant(Instance* instance, uint32_t op, DeviceIndex device);
  void ReleaseOutputs(Instance* instance, uint32_t op);
  void ReleaseScratch(Instance* instance, uint32_t op);
  void ReleaseValueIfDead(Instance* instance, uint32_t crossing);
  void ReleaseDynamicIfDead(Instance* instance, uint32_t dynamic);
  void ReleaseAllMemory(Instance* instance);
  void RecomputeLane(DeviceIndex device);

  // ---- rounds.cc
  bool Round(TimeNs now);  // false: nothing more to place now
  bool MayPlace(const Instance& instance, TimeNs now);
  bool CollectBatch(Instance* instance, std::vector<uint32_t>* batch, uint64_t* devices);
  std::optional<sched::Decision> OnlyChoice(const Instance& instance, uint64_t devices,
                                            TimeNs now) const;
  bool QueuesPlaced(const Instance& instance, uint32_t op);
  uint64_t AllowedDevices(const Instance& instance, uint32_t op);
  bool CanMove(const Piece& piece, const Instance& instance, uint32_t op, DomainIndex domain) const;
  void Commit(Instance* instance, std::span<const uint32_t> batch, DeviceIndex device);
  void Defer(Instance* instance, TimeNs retry_at, TimeNs now, const char* cause);
  void LogDecision(const Instance& instance, std::span<const uint32_t> batch,
                   const sched::Decision& decision, TimeNs now);
  DurationNs Backlog(const DeviceState& device, ServiceClass service_class) const;
  void WakeDeferred();

  // ---- issue.cc
  estimate::GapEstimator::Gap GapOf(uint64_t service) const;
  void UpdatePhantoms(TimeNs now);
  bool IssueAll(TimeNs now);  // true: something went back to be placed anew
  bool IssueOn(DeviceState* device, TimeNs now);
  enum class Ready : uint8_t { kNo, kYes, kReplaced };
  Ready Prepare(Instance* instance, uint32_t op, DeviceState* device, TimeNs now);
  bool PiecesReady(Instance* instance, uint32_t op, DomainIndex domain, bool* must_move);
  bool SliceAllows(const Instance& instance, uint32_t op, const DeviceState& device, TimeNs now,
                   TimeNs* wake, wire::Issue* issue) const;
  void IssueOp(Instance* instance, uint32_t op, DeviceState* device, const wire::Issue& window,
               TimeNs now);
  TimeNs FreeAt(const DeviceState& device, TimeNs now) const;
  TimeNs LaunchedEnd(const DeviceState& device, TimeNs now, bool* overrun) const;
  DurationNs Duration(const Instance& instance, uint32_t op) const {
    return Op(instance, op).duration_ns;
  }
  DurationNs Duration(const OpRef& ref) const { return Duration(*ref.instance, ref.op); }
  // Of a placed op: it is not issued before. 0: any time.
  TimeNs RetryAt(const OpRef& ref) const { return Op(*ref.instance, ref.op).predicted_start_ns; }
  void SetRetryAt(Instance* instance, uint32_t op, TimeNs at);
  // The whole number of an issue that is at most 2^32 issues ago.
  uint64_t IssueOrder(const OpExtra& extra) const {
    return next_order_ - static_cast<uint32_t>(next_order_ - extra.order);
  }
  void RecallOffline(uint64_t devices, TimeNs now);
  void RecallOp(Instance* instance, uint32_t op, TimeNs now);
  void WantUnplace(Instance* instance, uint32_t op);
  void UnplaceWanted(Instance* instance, TimeNs now);

  // ---- transfers.cc
  Transfer* NewTransfer(Tenant* tenant, DomainIndex source, DomainIndex destination,
                        ServiceClass service_class, int64_t bytes, TimeNs now);
  Transfer* FindTransfer(uint64_t id);
  void WatchValue(Instance* instance, uint32_t crossing, DomainIndex destination, TimeNs now);
  bool IsAdmitted(const Instance& instance, uint32_t crossing, DomainIndex destination) const;
  void StartMove(Piece* piece, Instance* instance, DomainIndex destination, TimeNs now);
  void SendWatch(const Transfer& transfer);
  void RunArbiter(TimeNs now);
  void CancelTransfer(Transfer* transfer);
  void PublishTransfer(const Transfer& transfer, gmg::TransferState state);
  void ForgetMove(Piece* piece, TimeNs now);
  void SettleTransfer(Transfer* transfer, StatusCode status, TimeNs now);
  void FreeTransfer(Transfer* transfer);
  void PumpReplications(TimeNs now);
  void EndReplication(size_t index);

  // ---- reports.cc
  Status OnStarted(const wire::Started& report, TimeNs now);
  Status OnFinished(const wire::Finished& report, TimeNs now);
  Status OnFailed(const wire::Failed& report, TimeNs now);
  Status OnRecalled(const wire::Recalled& report, TimeNs now);
  Status OnIntent(const wire::Intent& report, TimeNs now);
  Status OnTransferDone(const wire::TransferDone& report, TimeNs now);
  Status OnCommandDone(const wire::CommandDone& report, TimeNs now);
  Status OnInstanceEnded(const wire::InstanceEnded& report, TimeNs now);
  Status FindOp(uint64_t instance, uint32_t attempt, uint32_t op, Instance** found);
  void Launch(Instance* instance, uint32_t op, TimeNs start);
  void OpDone(Instance* instance, uint32_t op, TimeNs now);
  void RecordOp(Instance* instance, uint32_t op, const wire::Finished& report, TimeNs now);
  void RecordLatency(const Instance& instance);

  // ---- recovery.cc
  void RestartInstance(Instance* instance);
  void SettleEverythingInFlight(TimeNs now);

  // ---- estimates.cc
  estimate::OpFeatures FeaturesOf(const Instance& instance, uint32_t op, uint8_t kind) const;
  DurationNs PredictOp(const estimate::OpFeatures& features, double activity) const;
  double ActivityBeside(DeviceIndex device) const;
  DurationNs BusyBeside(DeviceIndex device, TimeNs at) const;
  void LearnOp(const Instance& instance, uint32_t op, const wire::Finished& report);
  std::unordered_map<uint64_t, std::string_view> NamesOf(
      std::span<const estimate::OpEstimator::SignatureReport> reports) const;

  // ---- snapshot_builder.cc
  void BuildSnapshot(TimeNs now,
                     Instance* first);  // `first`: its unscheduled ops come in before all others'
  DurationNs RestOfSequence(const Instance& instance, const estimate::GapEstimator::Gap& gap) const;
  void AddOps(Instance* instance, bool unscheduled, TimeNs now);
  void Link(Instance* instance);
  void AddUses(Instance* instance, uint32_t op, sim::SnapOp* snap);
  void SealEdges();
  sim::OpIndex SnapshotOf(const Instance& instance, uint32_t op) const {
    return instance.snapshot == sim::kNone ? sim::kNone : window_ops_[instance.snapshot_ops + op];
  }
  sim::TensorIndex ValueTensor(Instance* instance, uint32_t crossing);
  sim::TensorIndex PieceTensor(Piece* piece);
  void PredictPending(TimeNs now);

  const Config config_;
  Sink* const sink_;
  // Of a copy: hears each decision while batch_ and snapshot_ are those that it was made from.
  std::function<void(const Instance&, const sched::Decision&)> on_decision_;
  gmg::Gmg gmg_;
  gmg::Ledger ledger_;
  transfer::Arbiter arbiter_;
  struct Estimators {  // megabytes: not copied
    explicit Estimators(size_t domain_count);
    estimate::OpEstimator op;
    estimate::TransferEstimator transfer;
    estimate::MemoryEstimator memory;
    estimate::ContentionEstimator contention;
    estimate::GapEstimator gap;
  };
  const std::shared_ptr<Estimators> estimators_;
  estimate::OpEstimator& op_estimator_ = estimators_->op;
  estimate::TransferEstimator& transfer_estimator_ = estimators_->transfer;
  estimate::MemoryEstimator& memory_estimator_ = estimators_->memory;
  estimate::ContentionEstimator& contention_estimator_ = estimators_->contention;
  estimate::GapEstimator& gap_estimator_ = estimators_->gap;
  sim::Simulator simulator_;
  std::unique_ptr<sched::Policy> policy_;

  std::unordered_map<TenantId, std::unique_ptr<Tenant>> tenants_;
  std::unordered_map<TemplateId, std::shared_ptr<const TemplateEntry>> templates_;
  std::unordered_map<TensorSetId, std::unique_ptr<TensorSet>> sets_;
  std::unordered_map<BindingId, std::unique_ptr<Binding>> bindings_;
  struct SequenceKey {
    TenantId tenant;
    uint64_t number;
    friend bool operator==(const SequenceKey&, const SequenceKey&) = default;
  };
  struct SequenceHash {
    size_t operator()(const SequenceKey& key) const {
      return std::hash<uint64_t>{}(key.number * 1024 + key.tenant.value);
    }
  };
  std::unordered_map<SequenceKey, std::unique_ptr<Sequence>, SequenceHash> sequences_;
  std::vector<std::unique_ptr<Instance>> instances_;  // by slot, reused
  // Beside the GMG's ops, at the same indices. Pages are made when an instance first has them.
  struct Free {
    void operator()(OpExtra* extras) const { std::free(extras); }
  };
  using OpExtras = std::unique_ptr<OpExtra[], Free>;
  static OpExtras NewOpExtras(const Config& config);
  OpExtras op_extras_;
  std::vector<std::unique_ptr<Transfer>> transfers_;  // by slot, reused
  std::vector<uint32_t> free_transfers_;
  std::vector<std::unique_ptr<CommandPart>> parts_;
  std::vector<uint32_t> free_parts_;
  std::vector<std::unique_ptr<Command>> commands_;
  std::vector<Replication> replications_;
  std::vector<Instance*> waiting_;  // admission order
  std::vector<Instance*> started_;
  std::vector<DeviceState> devices_;
  std::vector<uint64_t> domain_devices_;
  std::vector<InstanceId> predict_;  // submitted, not yet predicted
  std::vector<Sequence*> between_;   // open online ones between two steps: their phantoms

  bool executor_up_ = false;  // until the first ExecutorReady
  bool given_up_ = false;
  bool admission_dirty_ = false;  // memory was freed, something arrived, an earlier entry started
  bool deferral_event_ = false;   // look at deferred batches again
  bool work_dirty_ = false;       // placements or issues may be possible
  DurationNs report_latency_p99_ = 0;  // "done" in the executor -> here
  uint64_t run_stamp_ = 0;
  uint64_t next_creation_ = 1;
  uint64_t next_order_ = 1;
  uint64_t next_sequence_ = 1;
  TimeNs next_wake_ = kNever;
  TimeNs now_ = 0;
  Counters counters_;
  ClassCounters class_counters_[2];
  std::vector<float> prediction_errors_[2];  // rings of relative errors
  size_t prediction_next_[2] = {0, 0};

  // Scratch, reused.
  sim::Snapshot snapshot_;
  sim::Timeline timeline_;
  std::vector<Instance*> window_;
  std::vector<sim::OpIndex> window_ops_;         // of the window's instances, by op
  std::vector<sim::TensorIndex> window_values_;  // likewise, by crossing value
  std::vector<Instance*> by_key_;                // the window, best first
  std::vector<Instance*> round_order_;
  bool round_order_fresh_ = false;
  bool snapshot_fresh_ = false;
  int deferrals_left_ = 0;
  bool ignore_budget_ = false;  // stalled: place one more batch all the same
  std::vector<uint32_t> batch_, missing_;
  std::vector<OpRef> issue_order_, recall_;
  std::vector<sim::OpIndex> batch_snapshot_;
  struct Edge {
    sim::OpIndex from, to;
  };
  std::vector<Edge> edges_;
  std::vector<sim::OpIndex> mine_;
  uint64_t snapshot_stamp_ = 0;
  std::vector<int64_t> peaks_, lanes_;
  std::vector<TransferId> admitted_;
  std::vector<std::byte> record_;
  std::shared_ptr<const graph::BoundSizes> bound_;  // of the submit in hand
};

template <typename Record>
void EngineImpl::Send(wire::CommandType type, const Record& record, DeviceIndex wake) {
  if (!executor_up_) return;
  sink_->ToExecutor(type, {reinterpret_cast<const std::byte*>(&record), sizeof(record)}, wake);
}

}  // namespace slice::engine
