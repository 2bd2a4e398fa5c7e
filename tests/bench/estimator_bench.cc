// Speed of the estimators on the daemon's hot path, and calibration of gaps. Prints
// {"figures": [{"name", "value", "unit"}]}. 200 signatures of 20 shapes, one thread, its CPU time;
// medians of batches of predictions and updates that take turns.
//
//     estimator_bench [TRACE.csv ...]     request traces to take gaps from; without: generated ones
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "daemon/estimate/estimator.h"
#include "tests/estimate/gap_traces.h"

namespace slice::estimate {
namespace {

constexpr uint64_t kSignatures = 200;
constexpr int64_t kShapes = 20;
constexpr int kBatches = 201;

struct Op {
  OpFeatures features;
  DurationNs duration;
};

double Now() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

std::vector<Op> Ops() {
  std::mt19937_64 random(1);
  std::vector<Op> ops;
  for (uint64_t signature = 0; signature < kSignatures; ++signature) {
    const uint64_t hash = random();
    for (int64_t shape = 1; shape <= kShapes; ++shape) {
      const int64_t tokens = 16 * shape;
      const OpFeatures features{hash, 0, tokens * 33'554'432, 33'554'432 + tokens * 16'384,
                                tokens * 8'192};
      ops.push_back({features, 20'000 + tokens * 1'000 + static_cast<DurationNs>(signature)});
    }
  }
  std::shuffle(ops.begin(), ops.end(), random);
  return ops;
}

void Print(const char* name, double value, const char* unit, bool last = false) {
  std::printf("{\"name\": \"%s\", \"value\": %.2f, \"unit\": \"%s\"}%s", name, value, unit,
              last ? "" : ", ");
}

void Run(const std::vector<DurationNs>& gaps) {
  const std::vector<Op> ops = Ops();
  OpEstimator estimator(2e10, 8e9);
  std::mt19937_64 random(2);
  std::uniform_int_distribution<DurationNs> noise(-500, 500);
  std::vector<DurationNs> noises(4096);
  for (DurationNs& value : noises) value = noise(random);
  size_t at = 0;
  const auto update_all = [&] {
    for (const Op& op : ops)
      estimator.Observe(op.features, op.duration + noises[at++ % noises.size()], 0.5);
  };
  for (int i = 0; i < 10; ++i) update_all();
  // Shapes teach table and fit every few samples: not all of them in the same batch.
  for (size_t op = 0; op < ops.size(); ++op) {
    for (size_t i = 0; i < op % 16; ++i) estimator.Observe(ops[op].features, ops[op].duration, 0.5);
  }
  std::vector<double> predict, unseen, update;
  int64_t sum = 0;
  for (int batch = 0; batch < kBatches; ++batch) {
    double start = Now();
    for (const Op& op : ops) sum += estimator.Predict(op.features).duration;
    predict.push_back((Now() - start) / static_cast<double>(ops.size()));
    start = Now();
    update_all();
    update.push_back((Now() - start) / static_cast<double>(ops.size()));
    start = Now();
    for (const Op& op : ops) {
      OpFeatures other = op.features;
      other.flops += 8 * 33'554'432;
      sum += estimator.Predict(other).duration;
    }
    unseen.push_back((Now() - start) / static_cast<double>(ops.size()));
  }
  if (sum == 0) std::abort();  // the predictions are used
  const Coverage coverage = Replay(gaps);
  std::printf("{\"figures\": [");
  Print("estimator_predict_ns", Median(predict), "ns");
  Print("estimator_predict_unseen_ns", Median(unseen), "ns");
  Print("estimator_update_ns", Median(update), "ns");
  Print("gap_p10_coverage_pct", 100 * coverage.p10, "%");
  Print("gap_p90_coverage_pct", 100 * coverage.p90, "%", true);
  std::printf("]}\n");
}

}  // namespace
}  // namespace slice::estimate

int main(int argc, char** argv) {
  namespace estimate = slice::estimate;
  std::vector<slice::DurationNs> gaps;
  for (int i = 1; i < argc; ++i) {
    const std::vector<slice::DurationNs> more = estimate::TraceGaps(argv[i], 1);
    if (more.empty()) {
      std::fprintf(stderr, "estimator_bench: no arrivals in '%s'\n", argv[i]);
      return EXIT_FAILURE;
    }
    gaps.insert(gaps.end(), more.begin(), more.end());
  }
  if (gaps.empty()) gaps = estimate::GeneratedGaps(300 * slice::kMicrosecond, 10'000, 1);
  estimate::Run(gaps);
  return EXIT_SUCCESS;
}
