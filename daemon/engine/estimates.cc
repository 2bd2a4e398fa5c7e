// Predictions of ops, what the estimators learn from reports, and what people see of them.
#include <algorithm>
#include <cstdio>

#include "daemon/engine/engine_impl.h"
#include "daemon/gmg/json.h"

namespace slice::engine {

using estimate::ContentionEstimator;
using estimate::OpEstimator;
using estimate::OpFeatures;
using estimate::Prediction;
using estimate::TransferEstimator;
using gmg::JsonWriter;

namespace {
constexpr size_t kShownMax = 64;          // signatures, and links, in one answer
constexpr size_t kSavedShapes = 100'000;  // of all signatures: a file of some ten megabytes
}  // namespace

OpFeatures EngineImpl::FeaturesOf(const Instance& instance, uint32_t op, uint8_t kind) const {
  OpFeatures features;
  features.signature = instance.graph->groups()[op].signature;
  features.device_kind = kind;
  features.flops = instance.sizes->flops(op);
  features.bytes = instance.sizes->bytes(op);
  const TemplateEntry::GroupPlan& plan = instance.binding->graph->groups[op];
  for (const uint32_t crossing : plan.out)
    features.size += instance.sizes->crossing_bytes(crossing);
  for (const uint32_t result : plan.scratch) features.size += instance.sizes->result_bytes(result);
  return features;
}

DurationNs EngineImpl::PredictOp(const OpFeatures& features, double activity) const {
  const Prediction prediction = op_estimator_.Predict(features);
  const double slowdown = contention_estimator_.Slowdown(features, prediction, activity);
  if (slowdown == 1) return prediction.duration;
  const auto duration =
      static_cast<DurationNs>(static_cast<double>(prediction.duration) * slowdown);
  return std::max<DurationNs>(duration, 1);
}

// Share of the other devices that have something to run: what an op placed now is to expect. < 0:
// there are no others.
double EngineImpl::ActivityBeside(DeviceIndex device) const {
  if (devices_.size() < 2) return -1;
  size_t busy = 0;
  for (const DeviceState& other : devices_) {
    busy += other.index != device &&
            !(other.launched.empty() && other.issued.empty() && other.placed.empty());
  }
  return static_cast<double>(busy) / static_cast<double>(devices_.size() - 1);
}

// Time that the other devices have spent in ops until `at`, all together.
DurationNs EngineImpl::BusyBeside(DeviceIndex device, TimeNs at) const {
  DurationNs busy = 0;
  for (const DeviceState& other : devices_) {
    if (other.index == device) continue;
    busy += counters_.device_busy[other.index];
    if (!other.launched.empty()) busy += std::max<DurationNs>(at - other.started, 0);
  }
  return busy;
}

void EngineImpl::LearnOp(const Instance& instance, uint32_t op, const wire::Finished& report) {
  const DurationNs duration = report.end_ns - report.start_ns;
  const auto device = static_cast<DeviceIndex>(report.device);
  const uint8_t kind = config_.devices[device].kind;
  const OpFeatures features = FeaturesOf(instance, op, kind);
  const DurationNs before = devices_[device].busy_beside;
  double activity = -1;
  if (before >= 0 && duration > 0 && devices_.size() > 1) {
    const auto busy = static_cast<double>(BusyBeside(device, report.end_ns) - before);
    const double all = static_cast<double>(duration) * static_cast<double>(devices_.size() - 1);
    activity = std::clamp(busy / all, 0.0, 1.0);
  }
  contention_estimator_.Learn(&op_estimator_, features, activity, duration);
  memory_estimator_.Observe(features.signature, kind,
                            instance.sizes->workspace_bytes(op) + OutputBytes(instance, op),
                            report.peak_bytes);
}

estimate::Saved EngineImpl::SaveEstimates() const {
  return {op_estimator_.Export(kSavedShapes), transfer_estimator_.Export()};
}

size_t EngineImpl::LoadEstimates(const estimate::Saved& saved) {
  return op_estimator_.Import(saved.signatures) + transfer_estimator_.Import(saved.links);
}

// Names of the ops with these signatures, as far as a registered template has them.
std::unordered_map<uint64_t, std::string_view> EngineImpl::NamesOf(
    std::span<const OpEstimator::SignatureReport> reports) const {
  std::unordered_map<uint64_t, std::string_view> names;
  for (const OpEstimator::SignatureReport& report : reports) names.emplace(report.signature, "");
  size_t left = names.size();
  for (const auto& [id, entry] : templates_) {
    for (const graph::Group& group : entry->graph->groups()) {
      if (left == 0) return names;
      const auto found = names.find(group.signature);
      if (found == names.end() || !found->second.empty() || group.name.empty()) continue;
      found->second = group.name;
      --left;
    }
  }
  return names;
}

std::string EngineImpl::EstimatorsJson() const {
  const std::vector<OpEstimator::SignatureReport> reports = op_estimator_.Report(kShownMax);
  const auto names = NamesOf(reports);
  JsonWriter json;
  json.BeginObject().Key("signatures").BeginArray();
  for (const OpEstimator::SignatureReport& report : reports) {
    char hash[24];
    std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(report.signature));
    json.BeginObject().Field("signature", static_cast<const char*>(hash));
    if (const std::string_view name = names.at(report.signature); !name.empty())
      json.Field("name", name);
    json.Field("device_kind", estimate::DeviceKindName(report.device_kind))
        .Field("level", LevelName(report.level));
    json.Field("samples", report.samples).Field("shapes", report.shapes);
    json.Field("error", report.error).Field("bias", report.bias).Field("drift", report.drift);
    json.Field("table_error", report.table_error).Field("linear_error", report.linear_error);
    const auto margin = memory_estimator_.Predict(report.signature, report.device_kind);
    json.Field("memory_samples", margin.samples).Field("memory_ratio", margin.ratio).EndObject();
  }
  json.EndArray().Field("signatures_left_out", op_estimator_.signature_count() - reports.size());
  const std::vector<TransferEstimator::LinkReport> links = transfer_estimator_.Report();
  const size_t links_shown = std::min(links.size(), kShownMax);
  json.Key("links").BeginArray();
  for (size_t i = 0; i < links_shown; ++i) {
    const TransferEstimator::LinkReport& link = links[i];
    json.BeginObject()
        .Field("source", std::string_view(config_.domains[link.source].name))
        .Field("destination", std::string_view(config_.domains[link.destination].name));
    json.Field("samples", link.samples).Field("error", link.error);
    json.Field("latency_ns", static_cast<int64_t>(link.latency_ns))
        .Field("bytes_per_second", link.bytes_per_second)
        .EndObject();
  }
  json.EndArray().Field("links_left_out", links.size() - links_shown);
  json.Key("contention").BeginArray();
  for (const ContentionEstimator::Report& report : contention_estimator_.Reports()) {
    json.BeginObject()
        .Field("device_kind", estimate::DeviceKindName(report.device_kind))
        .Field("class", ContentionEstimator::ClassName(report.op_class));
    json.Field("samples", report.samples).Field("on", report.on).Field("slowdown", report.slowdown);
    json.Field("error_without", report.error_without)
        .Field("error_with", report.error_with)
        .EndObject();
  }
  json.EndArray().Field("services", gap_estimator_.service_count()).EndObject();
  return json.Take();
}

}  // namespace slice::engine
