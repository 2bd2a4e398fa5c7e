#include "daemon/sim/simulator.h"

#include <algorithm>
#include <cmath>

#include "daemon/sim/prepared.h"
#include "daemon/sim/simulation.h"

namespace slice::sim {

DurationNs OpDuration(const Snapshot& snapshot, OpIndex op, DeviceIndex device) {
  const DurationNs base = snapshot.ops[op].duration;
  const uint8_t kind = snapshot.devices[device].kind;
  if (kind >= snapshot.kind_scale.size()) return std::max<DurationNs>(1, base);
  return std::max<DurationNs>(1,
                              std::llround(static_cast<double>(base) * snapshot.kind_scale[kind]));
}

struct Simulator::Scratch {
  Preparation preparation;
  Prepared prepared;
  SimulationState prefix;
  std::vector<std::unique_ptr<Simulation>> runs;  // one, or one for each candidate
  std::vector<OpIndex> batch;
};

Simulator::Simulator(const estimate::TransferEstimator& transfers, Options options)
    : transfers_(transfers), options_(std::move(options)), scratch_(std::make_unique<Scratch>()) {
  scratch_->runs.push_back(std::make_unique<Simulation>(transfers_, options_));
}
Simulator::~Simulator() = default;

void Simulator::Run(const Snapshot& snapshot, std::span<const Placement> batch, Rules rules,
                    Timeline* out) {
  Scratch& scratch = *scratch_;
  scratch.batch.clear();
  for (const Placement& placement : batch) scratch.batch.push_back(placement.op);
  Prepare(snapshot, scratch.batch, rules);
  Simulation& run = *scratch.runs[0];
  run.Prefix(scratch.prepared, true, out);
  run.Place(batch);
  run.Finish(nullptr, 0);
  run.Summarise(out);
}

void Simulator::Prepare(const Snapshot& snapshot, std::span<const OpIndex> batch, Rules rules) {
  scratch_->preparation.Run(snapshot, batch, rules, &scratch_->prepared);
}

void Simulator::RunPrepared(const Candidate& candidate, Timeline* out) {
  Simulation& run = *scratch_->runs[0];
  run.Prefix(scratch_->prepared, candidate.device == kNoDevice, out);
  run.Place(candidate);
  run.Finish(nullptr, 0);
  run.Summarise(out);
}

void Simulator::Evaluate(std::span<const Candidate> candidates, Bound* bound,
                         std::vector<Outcome>* out) {
  Scratch& scratch = *scratch_;
  out->resize(candidates.size());
  if (candidates.empty()) return;
  const bool rollout = !scratch.prepared.batch.empty() &&
                       std::any_of(candidates.begin(), candidates.end(), [](const Candidate& c) {
                         return c.device == kNoDevice && c.earliest != kNever;
                       });
  scratch.runs[0]->Prefix(scratch.prepared, rollout, nullptr);
  if (candidates.size() > 1) scratch.prefix = scratch.runs[0]->state();
  const auto evaluate = [&](Simulation* run, size_t i, const Bound* against) {
    run->Place(candidates[i]);
    const bool ended = run->Finish(against, i);
    run->Summarise(!ended, &(*out)[i]);
  };
  // The first alone sets the bound: what beats what does not depend on who is faster.
  evaluate(scratch.runs[0].get(), 0, nullptr);
  if (bound != nullptr) bound->First((*out)[0]);
  const bool parallel = options_.for_each != nullptr && candidates.size() > 2;
  if (parallel) {
    while (scratch.runs.size() < candidates.size())
      scratch.runs.push_back(std::make_unique<Simulation>(transfers_, options_));
  }
  const auto job = [&](size_t i) {
    Simulation* const run = scratch.runs[parallel ? i + 1 : 0].get();
    run->Start(*scratch.runs[0], scratch.prefix);
    evaluate(run, i + 1, bound);
  };
  if (parallel) {
    options_.for_each(candidates.size() - 1, job);
  } else {
    for (size_t i = 0; i + 1 < candidates.size(); ++i) job(i);
  }
}

size_t Simulator::bytes() const {
  return scratch_->prepared.bytes() + scratch_->runs[0]->state().bytes();
}

}  // namespace slice::sim
