// Profiles of measured operator and transfer times, as the simulator project Vidur publishes them.
//
// Operators: a row per (num_tokens, num_tensor_parallel_workers), with columns
// time_stats.OP.{min,max,mean,std} in ms for each operator and the model's widths (n_embd, ...).
// Transfers: a row per size, with time_stats.send_recv.*, num_workers and devices_per_node.
#pragma once

#include <string>
#include <vector>

#include "common/status.h"
#include "daemon/estimate/op_estimator.h"
#include "tools/replay/csv.h"

namespace slice::replay {

// Statistics of the runs of one shape, ns.
struct Timing {
  double min = 0, max = 0, mean = 0, deviation = 0;
};
struct OpRow {
  std::string op;
  int64_t tokens = 0;
  int64_t workers = 0;  // tensor-parallel degree
  estimate::OpFeatures features;
  Timing timing;
};
struct TransferRow {
  size_t link = 0;  // in Profile::links
  int64_t bytes = 0;
  Timing timing;
};
struct Profile {
  std::vector<OpRow> ops;
  std::vector<TransferRow> transfers;
  std::vector<std::string> links;
};

// Adds a file's rows. Errors: INVALID names the file, and line and column where there is one.
Status AddProfile(const Csv& csv, Profile* profile);

}  // namespace slice::replay
