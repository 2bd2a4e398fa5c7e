#include "tools/replay/estimators.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "daemon/estimate/transfer_estimator.h"

namespace slice::replay {
namespace {

using estimate::OpEstimator;
using estimate::Prediction;
using estimate::TransferEstimator;
using Level = Prediction::Level;
using Random = std::mt19937_64;

constexpr int kRuns = 10;         // drawn from a row
constexpr DomainIndex kHost = 0;  // one end of every link

double Draw(const Timing& timing, Random* random) {
  if (timing.deviation <= 0) return timing.mean;
  std::normal_distribution<double> normal(timing.mean, timing.deviation);
  return std::clamp(normal(*random), timing.min, timing.max);
}

class Mean {
 public:
  void Add(double value) {
    sum_ += value;
    ++count_;
  }
  double value() const { return count_ == 0 ? -1 : sum_ / static_cast<double>(count_); }

 private:
  double sum_ = 0;
  size_t count_ = 0;
};
double RelativeError(double predicted, double actual) {
  return std::abs(predicted - actual) / actual;
}
double Ns(const Prediction& prediction) { return static_cast<double>(prediction.duration); }

// y over (1, x) by least squares of relative errors: the best that a line can do here.
class PlainLine {
 public:
  void Add(double x, double y) {
    const double weight = 1 / (y * y);
    n_ += weight;
    x_ += weight * x;
    y_ += weight * y;
    xx_ += weight * x * x;
    xy_ += weight * x * y;
  }
  double At(double x) const {
    const double spread = n_ * xx_ - x_ * x_;
    if (spread <= 0) return n_ > 0 ? y_ / n_ : 0;
    const double slope = (n_ * xy_ - x_ * y_) / spread;
    return (y_ - slope * x_) / n_ + slope * x;
  }

 private:
  double n_ = 0, x_ = 0, y_ = 0, xx_ = 0, xy_ = 0;
};

// Fold of each distinct key; shuffled by the seed.
Result<std::map<int64_t, size_t>> Folds(std::vector<int64_t> keys, const EvaluationOptions& options,
                                        const char* what) {
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  if (options.folds < 2 || keys.size() < 2 * options.folds) {
    return Error(StatusCode::kInvalid,
                 "%zu folds over %zu different %s: at least 2 each, and 2 folds", options.folds,
                 keys.size(), what);
  }
  Random random(options.seed);
  std::shuffle(keys.begin(), keys.end(), random);
  std::map<int64_t, size_t> folds;
  for (size_t i = 0; i < keys.size(); ++i) folds[keys[i]] = i % options.folds;
  return folds;
}

// kRuns times the number of each row for which `take` is true, shuffled.
template <typename Take>
std::vector<size_t> Order(size_t rows, Random* random, Take take) {
  std::vector<size_t> order;
  for (size_t row = 0; row < rows; ++row) {
    if (take(row)) order.insert(order.end(), kRuns, row);
  }
  std::shuffle(order.begin(), order.end(), *random);
  return order;
}

OpEstimator Learn(const std::vector<OpRow>& rows, const EvaluationOptions& options,
                  const std::vector<size_t>& order, Random* random) {
  OpEstimator estimator(options.flops_per_second, options.bytes_per_second);
  for (const size_t row : order) {
    estimator.Observe(rows[row].features,
                      static_cast<DurationNs>(Draw(rows[row].timing, random) + 0.5));
  }
  return estimator;
}

struct OpErrors {
  size_t rows = 0;
  Mean cov, seen, heldout, plain;
  Mean levels[Prediction::kLevels];
};

Accuracy AccuracyOf(const std::string& name, const OpErrors& errors) {
  Accuracy accuracy;
  accuracy.name = name;
  accuracy.rows = errors.rows;
  accuracy.cov = errors.cov.value();
  accuracy.seen = errors.seen.value();
  accuracy.heldout = errors.heldout.value();
  accuracy.plain = errors.plain.value();
  accuracy.table = errors.levels[static_cast<size_t>(Level::kTable)].value();
  accuracy.linear = errors.levels[static_cast<size_t>(Level::kLinear)].value();
  accuracy.prior = errors.levels[static_cast<size_t>(Level::kPrior)].value();
  return accuracy;
}

Accuracy MeanOf(const std::vector<Accuracy>& items) {
  Accuracy mean;
  mean.name = "mean";
  for (const Accuracy& item : items) mean.rows += item.rows;
  for (const auto member : {&Accuracy::cov, &Accuracy::seen, &Accuracy::heldout, &Accuracy::table,
                            &Accuracy::linear, &Accuracy::prior, &Accuracy::plain}) {
    Mean values;
    for (const Accuracy& item : items) {
      if (item.*member >= 0) values.Add(item.*member);
    }
    mean.*member = values.value();
  }
  return mean;
}

Status EvaluateOps(const std::vector<OpRow>& rows, const EvaluationOptions& options,
                   Evaluation* evaluation) {
  std::vector<int64_t> tokens;
  for (const OpRow& row : rows) tokens.push_back(row.tokens);
  SLICE_ASSIGN_OR_RETURN(const auto folds, Folds(std::move(tokens), options, "token counts"));
  std::map<std::string, OpErrors> errors;
  Random random(options.seed);
  for (const OpRow& row : rows) {
    OpErrors& of = errors[row.op];
    ++of.rows;
    of.cov.Add(row.timing.deviation / row.timing.mean);
  }
  const OpEstimator all =
      Learn(rows, options, Order(rows.size(), &random, [](size_t) { return true; }), &random);
  for (const OpRow& row : rows)
    errors[row.op].seen.Add(RelativeError(Ns(all.Predict(row.features)), row.timing.mean));
  for (size_t fold = 0; fold < options.folds; ++fold) {
    const auto held_out = [&](size_t row) { return folds.at(rows[row].tokens) == fold; };
    const OpEstimator estimator =
        Learn(rows, options,
              Order(rows.size(), &random, [&](size_t row) { return !held_out(row); }), &random);
    std::map<std::pair<std::string, int64_t>, PlainLine> lines;
    for (size_t row = 0; row < rows.size(); ++row) {
      if (held_out(row)) continue;
      lines[{rows[row].op, rows[row].workers}].Add(static_cast<double>(rows[row].tokens),
                                                   rows[row].timing.mean);
    }
    for (size_t row = 0; row < rows.size(); ++row) {
      if (!held_out(row)) continue;
      const OpRow& item = rows[row];
      const double actual = item.timing.mean;
      OpErrors& of = errors[item.op];
      of.heldout.Add(RelativeError(Ns(estimator.Predict(item.features)), actual));
      for (const Level level : {Level::kPrior, Level::kLinear, Level::kTable}) {
        Prediction prediction;
        if (estimator.PredictWith(level, item.features, &prediction))
          of.levels[static_cast<size_t>(level)].Add(RelativeError(Ns(prediction), actual));
      }
      of.plain.Add(RelativeError(
          lines[{item.op, item.workers}].At(static_cast<double>(item.tokens)), actual));
    }
  }
  for (const auto& [op, of] : errors) evaluation->ops.push_back(AccuracyOf(op, of));
  evaluation->op_mean = MeanOf(evaluation->ops);
  return Status::Ok();
}

DomainIndex EndOf(const TransferRow& row) { return static_cast<DomainIndex>(row.link + 1); }

Status EvaluateTransfers(const Profile& profile, const EvaluationOptions& options,
                         Evaluation* evaluation) {
  const std::vector<TransferRow>& rows = profile.transfers;
  std::vector<int64_t> sizes;
  for (const TransferRow& row : rows) sizes.push_back(row.bytes);
  SLICE_ASSIGN_OR_RETURN(const auto folds, Folds(std::move(sizes), options, "sizes"));
  struct Errors {
    size_t rows = 0;
    Mean cov, seen, heldout, linear, plain;
  };
  std::vector<Errors> errors(profile.links.size());
  Random random(options.seed);
  const auto learn = [&](auto take) {
    TransferEstimator estimator(profile.links.size() + 1);
    for (const size_t row : Order(rows.size(), &random, take)) {
      estimator.Observe(kHost, EndOf(rows[row]), rows[row].bytes,
                        static_cast<DurationNs>(Draw(rows[row].timing, &random) + 0.5));
    }
    return estimator;
  };
  const TransferEstimator all = learn([](size_t) { return true; });
  for (const TransferRow& row : rows) {
    Errors& of = errors[row.link];
    ++of.rows;
    of.cov.Add(row.timing.deviation / row.timing.mean);
    of.seen.Add(RelativeError(static_cast<double>(all.Predict(kHost, EndOf(row), row.bytes)),
                              row.timing.mean));
  }
  for (size_t fold = 0; fold < options.folds; ++fold) {
    const auto held_out = [&](size_t row) { return folds.at(rows[row].bytes) == fold; };
    const TransferEstimator estimator = learn([&](size_t row) { return !held_out(row); });
    std::vector<PlainLine> lines(profile.links.size());
    for (size_t row = 0; row < rows.size(); ++row) {
      if (!held_out(row))
        lines[rows[row].link].Add(static_cast<double>(rows[row].bytes), rows[row].timing.mean);
    }
    for (size_t row = 0; row < rows.size(); ++row) {
      if (!held_out(row)) continue;
      const TransferRow& item = rows[row];
      Errors& of = errors[item.link];
      const auto predict = [&](auto method) {
        return static_cast<double>((estimator.*method)(kHost, EndOf(item), item.bytes));
      };
      of.heldout.Add(RelativeError(predict(&TransferEstimator::Predict), item.timing.mean));
      of.linear.Add(RelativeError(predict(&TransferEstimator::PredictLine), item.timing.mean));
      of.plain.Add(
          RelativeError(lines[item.link].At(static_cast<double>(item.bytes)), item.timing.mean));
    }
  }
  for (size_t link = 0; link < errors.size(); ++link) {
    const Errors& of = errors[link];
    Accuracy accuracy;
    accuracy.name = profile.links[link];
    accuracy.rows = of.rows;
    accuracy.cov = of.cov.value();
    accuracy.seen = of.seen.value();
    accuracy.heldout = of.heldout.value();
    accuracy.linear = of.linear.value();
    accuracy.plain = of.plain.value();
    evaluation->links.push_back(std::move(accuracy));
  }
  evaluation->link_mean = MeanOf(evaluation->links);
  return Status::Ok();
}

std::string Percent(double value) {
  if (value < 0) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", 100 * value);
  return text;
}

void AppendRows(const char* title, const std::vector<Accuracy>& items, const Accuracy& mean,
                std::string* text) {
  char line[256];
  const auto append = [&](const char* name, const char* rows, const std::array<std::string, 7>& v) {
    std::snprintf(line, sizeof line, "%-26s %7s %7s %8s %9s %8s %8s %9s %9s\n", name, rows,
                  v[0].c_str(), v[1].c_str(), v[2].c_str(), v[3].c_str(), v[4].c_str(),
                  v[5].c_str(), v[6].c_str());
    *text += line;
  };
  append(title, "ROWS", {"COV", "SEEN", "HELD OUT", "TABLE", "LINEAR", "PRIOR", "PLAIN FIT"});
  std::vector<Accuracy> all = items;
  all.push_back(mean);
  for (const Accuracy& item : all) {
    append(item.name.c_str(), std::to_string(item.rows).c_str(),
           {Percent(item.cov), Percent(item.seen), Percent(item.heldout), Percent(item.table),
            Percent(item.linear), Percent(item.prior), Percent(item.plain)});
  }
}

}  // namespace

Result<Evaluation> Evaluate(const Profile& profile, const EvaluationOptions& options) {
  Evaluation evaluation;
  if (!profile.ops.empty()) SLICE_RETURN_IF_ERROR(EvaluateOps(profile.ops, options, &evaluation));
  if (!profile.transfers.empty())
    SLICE_RETURN_IF_ERROR(EvaluateTransfers(profile, options, &evaluation));
  return evaluation;
}

std::string TextOf(const Evaluation& evaluation) {
  std::string text = "mean absolute relative errors in percent; COV: of the samples of one shape\n";
  if (!evaluation.ops.empty()) AppendRows("OPERATOR", evaluation.ops, evaluation.op_mean, &text);
  if (!evaluation.links.empty()) AppendRows("LINK", evaluation.links, evaluation.link_mean, &text);
  return text;
}

std::string FiguresJson(const Evaluation& evaluation) {
  nlohmann::json figures = nlohmann::json::array();
  const auto add = [&](const char* name, double value) {
    if (value >= 0) figures.push_back({{"name", name}, {"value", 100 * value}, {"unit", "%"}});
  };
  add("op_mape_heldout_pct", evaluation.op_mean.heldout);
  add("op_mape_linear_pct", evaluation.op_mean.plain);
  add("op_mape_seen_pct", evaluation.op_mean.seen);
  add("op_cov_pct", evaluation.op_mean.cov);
  add("transfer_mape_heldout_pct", evaluation.link_mean.heldout);
  add("transfer_mape_linear_pct", evaluation.link_mean.plain);
  return nlohmann::json{{"figures", figures}}.dump(2) + "\n";
}

}  // namespace slice::replay
