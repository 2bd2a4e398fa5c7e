// The engine over a sink that keeps nothing on the heap: for figures and tests that count the
// engine's own memory. Ops run at once and without an executor: Step() answers each Issue with
// Started and Finished, each EndInstance with InstanceEnded.
#pragma once

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/tensor_meta.h"
#include "daemon/engine/engine.h"

namespace slice::testing {

class BareEngine final : public engine::Sink {
 public:
  explicit BareEngine(const engine::Config& config)
      : bytes_(engine::Engine::GmgBytes(config)),
        memory_(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes_ + 4095) / 4096 * 4096)),
                std::free) {
    std::memset(memory_.get(), 0, bytes_);
    Result<std::unique_ptr<engine::Engine>> created =
        engine::Engine::Create(config, gmg_memory(), this);
    SLICE_CHECK(created.ok(), created.status().ToString().c_str());
    engine_ = *std::move(created);
    engine_->ExecutorReady(now_);
  }

  engine::Engine& engine() { return *engine_; }
  std::span<std::byte> gmg_memory() const { return {memory_.get(), bytes_}; }
  uint64_t completed() const { return completed_; }
  uint64_t failed() const { return failed_; }

  // Tensors for every static input, one set for each kind, and a binding over them.
  BindingId AddService(TenantId tenant, const std::shared_ptr<const graph::Template>& graph) {
    const TemplateId id{next_id_++};
    Check(engine_->AddTemplate(id, graph));
    engine::BindingConfig binding;
    binding.id = {next_id_++};
    binding.tenant = tenant;
    binding.graph = id;
    const std::vector<int64_t> symbols(graph->symbol_count(), 0);
    std::array<engine::TensorSetConfig, 4> sets;
    for (const uint32_t index : graph->statics()) {
      const graph::Input& input = graph->inputs()[index];
      const auto kind = input.kind == proto::Input::STATIC_CONSTANT  ? engine::TensorKind::kConstant
                        : input.kind == proto::Input::STATIC_MUTABLE ? engine::TensorKind::kMutable
                                                                     : engine::TensorKind::kManaged;
      engine::TensorSetConfig& set = sets[static_cast<size_t>(kind)];
      if (!set.id) set.id = {next_id_++};
      set.tenant = tenant;
      set.kind = kind;
      const graph::ValueShape& shape = graph->values()[input.value];
      std::vector<int64_t> sizes, strides;
      for (const graph::ExprIndex e : shape.sizes)
        sizes.push_back(*graph->expressions().Evaluate(e, symbols));
      for (const graph::ExprIndex e : shape.strides)
        strides.push_back(*graph->expressions().Evaluate(e, symbols));
      binding.statics.push_back({set.id, static_cast<uint32_t>(set.tensors.size())});
      set.tensors.push_back({input.name, *graph->ValueBytes(input.value, symbols),
                             TensorMetaHash(static_cast<uint32_t>(shape.dtype), sizes, strides)});
    }
    for (const engine::TensorSetConfig& set : sets) {
      if (set.id) Check(engine_->AddTensorSet(set, now_));
    }
    Check(engine_->AddBinding(binding));
    return binding.id;
  }

  // Runs what was issued and ends what is over, until nothing is left to do now.
  void Step() {
    engine_->Run(now_);
    while (issued_count_ + ending_count_ > 0) {
      now_ += kMicrosecond;
      const size_t issued = std::exchange(issued_count_, 0);
      batch_ = issued_;
      for (size_t i = 0; i < issued; ++i) {
        const wire::Issue& op = batch_[i];
        wire::Finished report{};
        report.instance = op.instance;
        report.attempt = op.attempt;
        report.op = op.op;
        report.device = op.device;
        report.start_ns = now_;
        report.end_ns = now_ += kMicrosecond;
        Report(wire::kFinished, report);
      }
      const size_t ending = std::exchange(ending_count_, 0);
      ends_ = ending_;
      for (size_t i = 0; i < ending; ++i) {
        wire::InstanceEnded report{};
        report.instance = ends_[i].instance;
        report.attempt = ends_[i].attempt;
        Report(wire::kInstanceEnded, report);
      }
      engine_->Run(now_);
    }
  }

  TimeNs now() const { return now_; }

  void ToExecutor(uint32_t type, std::span<const std::byte> payload, DeviceIndex) override {
    if (type == wire::kIssue) Keep(payload, &issued_, &issued_count_);
    if (type == wire::kEndInstance) Keep(payload, &ending_, &ending_count_);
  }
  void Complete(TenantId, const wire::CompletionSlot& completion, const std::string&) override {
    ++completed_;
    failed_ += completion.status != SLICE_OK;
  }
  void Trace(const engine::TraceEvent&) override {}

 private:
  static constexpr size_t kMax = 4096;
  static void Check(const Status& status) { SLICE_CHECK(status.ok(), status.ToString().c_str()); }
  template <typename Record>
  static void Keep(std::span<const std::byte> payload, std::array<Record, kMax>* list,
                   size_t* count) {
    SLICE_CHECK(*count < kMax && payload.size() == sizeof(Record), "a record too many");
    std::memcpy(&(*list)[(*count)++], payload.data(), sizeof(Record));
  }
  template <typename Record>
  void Report(wire::ReportType type, const Record& record) {
    Check(engine_->HandleReport(type, {reinterpret_cast<const std::byte*>(&record), sizeof(record)},
                                now_));
  }

  size_t bytes_;
  std::unique_ptr<std::byte, void (*)(void*)> memory_;
  TimeNs now_ = 1;
  uint32_t next_id_ = 1;
  uint64_t completed_ = 0, failed_ = 0;
  size_t issued_count_ = 0, ending_count_ = 0;
  std::array<wire::Issue, kMax> issued_, batch_;
  std::array<wire::EndInstance, kMax> ending_, ends_;
  std::unique_ptr<engine::Engine> engine_;
};

}  // namespace slice::testing
