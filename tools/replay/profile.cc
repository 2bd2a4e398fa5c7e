#include "tools/replay/profile.h"

#include <algorithm>
#include <functional>
#include <set>

namespace slice::replay {
namespace {

constexpr std::string_view kPrefix = "time_stats.";
constexpr std::string_view kTransfer = "send_recv";
constexpr double kMsMax = 3.6e6;  // an hour
constexpr double kNsPerMs = 1e6;
constexpr double kWidthMax = 1e7, kTokensMax = 1e9, kBytesMax = 1e13;
constexpr double kRounding = 1e-6;  // of means and deviations, relative
constexpr int64_t kItem = 2;        // bytes of an fp16 or bf16 element

struct TimingColumns {
  size_t min = 0, max = 0, mean = 0, deviation = 0;
};

Result<TimingColumns> FindTiming(const Csv& csv, const std::string& op) {
  TimingColumns columns;
  const std::string prefix = std::string(kPrefix) + op;
  SLICE_ASSIGN_OR_RETURN(columns.min, csv.Column(prefix + ".min"));
  SLICE_ASSIGN_OR_RETURN(columns.max, csv.Column(prefix + ".max"));
  SLICE_ASSIGN_OR_RETURN(columns.mean, csv.Column(prefix + ".mean"));
  SLICE_ASSIGN_OR_RETURN(columns.deviation, csv.Column(prefix + ".std"));
  return columns;
}

Result<Timing> ReadTiming(const Csv& csv, size_t row, const TimingColumns& columns) {
  Timing timing;
  SLICE_ASSIGN_OR_RETURN(timing.min, csv.Number(row, columns.min, 0, kMsMax));
  SLICE_ASSIGN_OR_RETURN(timing.max, csv.Number(row, columns.max, timing.min, kMsMax));
  const double slack = timing.max * kRounding;
  SLICE_ASSIGN_OR_RETURN(
      timing.mean,
      csv.Number(row, columns.mean, std::max(timing.min - slack, 1e-6), timing.max + slack));
  SLICE_ASSIGN_OR_RETURN(timing.deviation,
                         csv.Number(row, columns.deviation, 0, timing.max - timing.min + slack));
  for (double* value : {&timing.min, &timing.max, &timing.mean, &timing.deviation})
    *value *= kNsPerMs;
  return timing;
}

Result<bool> ReadFlag(const Csv& csv, size_t row, size_t column) {
  const std::string_view text = csv.Text(row, column);
  if (text == "True" || text == "1") return true;
  if (text == "False" || text == "0") return false;
  return Error(StatusCode::kInvalid, "%s line %u, column '%s': '%.40s' is not True or False",
               csv.name().c_str(), csv.Line(row), csv.columns()[column].c_str(),
               std::string(text).c_str());
}

struct Widths {
  int64_t hidden = 0, kv = 0, expanded = 0, workers = 0;
  bool gated = false;
};

// Work of an operator of a transformer layer on `t` tokens, per worker.
estimate::OpFeatures FeaturesOf(const std::string& op, int64_t t, const Widths& w) {
  estimate::OpFeatures features;
  features.signature = std::hash<std::string>{}(op + "/" + std::to_string(w.workers));
  const auto matrix = [&](int64_t in, int64_t out) {
    features.flops = 2 * t * in * out;
    features.bytes = kItem * (in * out + t * (in + out));
    features.size = kItem * t * out;
  };
  const auto elements = [&](int64_t reads, int64_t writes) {
    features.bytes = kItem * t * (reads + writes);
    features.size = kItem * t * writes;
  };
  const int64_t expanded = w.expanded / w.workers;
  const int64_t projected = (w.hidden + 2 * w.kv) / w.workers;
  if (op == "attn_pre_proj") {
    matrix(w.hidden, projected);
  } else if (op == "attn_post_proj") {
    matrix(w.hidden / w.workers, w.hidden);
  } else if (op == "mlp_up_proj") {
    matrix(w.hidden, expanded * (w.gated ? 2 : 1));
  } else if (op == "mlp_down_proj") {
    matrix(expanded, w.hidden);
  } else if (op == "mlp_act") {
    elements(expanded * (w.gated ? 2 : 1), expanded);
  } else if (op == "attn_rope") {
    elements(projected, projected);
  } else if (op == "add") {
    elements(2 * w.hidden, w.hidden);
  } else {  // embedding, norms, and whatever else goes over the tokens once
    elements(w.hidden, w.hidden);
  }
  return features;
}

Status AddOps(const Csv& csv, const std::set<std::string>& ops, Profile* profile) {
  SLICE_ASSIGN_OR_RETURN(const size_t tokens_column, csv.Column("num_tokens"));
  SLICE_ASSIGN_OR_RETURN(const size_t workers_column, csv.Column("num_tensor_parallel_workers"));
  SLICE_ASSIGN_OR_RETURN(const size_t hidden_column, csv.Column("n_embd"));
  SLICE_ASSIGN_OR_RETURN(const size_t expanded_column, csv.Column("n_expanded_embd"));
  SLICE_ASSIGN_OR_RETURN(const size_t heads_column, csv.Column("n_head"));
  SLICE_ASSIGN_OR_RETURN(const size_t kv_heads_column, csv.Column("n_kv_head"));
  SLICE_ASSIGN_OR_RETURN(const size_t gated_column, csv.Column("use_gated_mlp"));
  std::vector<std::pair<std::string, TimingColumns>> timings;
  for (const std::string& op : ops) {
    SLICE_ASSIGN_OR_RETURN(const TimingColumns columns, FindTiming(csv, op));
    timings.emplace_back(op, columns);
  }
  for (size_t row = 0; row < csv.rows(); ++row) {
    Widths widths;
    SLICE_ASSIGN_OR_RETURN(const int64_t tokens, csv.Integer(row, tokens_column, 1, kTokensMax));
    SLICE_ASSIGN_OR_RETURN(widths.workers, csv.Integer(row, workers_column, 1, 1024));
    SLICE_ASSIGN_OR_RETURN(widths.hidden, csv.Integer(row, hidden_column, 1, kWidthMax));
    SLICE_ASSIGN_OR_RETURN(widths.expanded, csv.Integer(row, expanded_column, 1, kWidthMax));
    SLICE_ASSIGN_OR_RETURN(const int64_t heads, csv.Integer(row, heads_column, 1, kWidthMax));
    SLICE_ASSIGN_OR_RETURN(const int64_t kv_heads,
                           csv.Integer(row, kv_heads_column, 1, static_cast<double>(heads)));
    widths.kv = widths.hidden * kv_heads / heads;
    SLICE_ASSIGN_OR_RETURN(widths.gated, ReadFlag(csv, row, gated_column));
    for (const auto& [op, columns] : timings) {
      if (csv.Empty(row, columns.mean)) continue;  // not measured for this shape
      OpRow item;
      item.op = op;
      item.tokens = tokens;
      item.workers = widths.workers;
      item.features = FeaturesOf(op, item.tokens, widths);
      SLICE_ASSIGN_OR_RETURN(item.timing, ReadTiming(csv, row, columns));
      profile->ops.push_back(std::move(item));
    }
  }
  return Status::Ok();
}

Status AddTransfers(const Csv& csv, Profile* profile) {
  SLICE_ASSIGN_OR_RETURN(const TimingColumns columns, FindTiming(csv, std::string(kTransfer)));
  SLICE_ASSIGN_OR_RETURN(const size_t size_column, csv.Column("size"));
  SLICE_ASSIGN_OR_RETURN(const size_t workers_column, csv.Column("num_workers"));
  SLICE_ASSIGN_OR_RETURN(const size_t devices_column, csv.Column("devices_per_node"));
  for (size_t row = 0; row < csv.rows(); ++row) {
    TransferRow item;
    SLICE_ASSIGN_OR_RETURN(item.bytes, csv.Integer(row, size_column, 0, kBytesMax));
    SLICE_ASSIGN_OR_RETURN(const int64_t workers, csv.Integer(row, workers_column, 1, 1e6));
    SLICE_ASSIGN_OR_RETURN(const int64_t devices, csv.Integer(row, devices_column, 1, 1e6));
    SLICE_ASSIGN_OR_RETURN(item.timing, ReadTiming(csv, row, columns));
    const std::string link =
        std::to_string(workers) + " workers, " + std::to_string(devices) + " per node";
    const auto found = std::find(profile->links.begin(), profile->links.end(), link);
    item.link = static_cast<size_t>(found - profile->links.begin());
    if (found == profile->links.end()) profile->links.push_back(link);
    profile->transfers.push_back(item);
  }
  return Status::Ok();
}

}  // namespace

Status AddProfile(const Csv& csv, Profile* profile) {
  std::set<std::string> ops;
  for (const std::string& column : csv.columns()) {
    const size_t dot = column.rfind('.');
    if (column.starts_with(kPrefix) && dot > kPrefix.size())
      ops.insert(column.substr(kPrefix.size(), dot - kPrefix.size()));
  }
  if (ops.empty()) {
    return Error(StatusCode::kInvalid,
                 "%s: no columns time_stats.OPERATOR.mean, so it is no profile of operators or "
                 "transfers",
                 csv.name().c_str());
  }
  if (ops.contains(std::string(kTransfer))) return AddTransfers(csv, profile);
  return AddOps(csv, ops, profile);
}

}  // namespace slice::replay
