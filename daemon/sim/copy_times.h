// Predicted times of copies, each predicted once per snapshot: windows have few senders and sizes.
// Inside of the simulator.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "common/units.h"
#include "daemon/estimate/estimator.h"

namespace slice::sim {

class CopyTimes {
 public:
  // `overhead`: of the commands, added to each prediction. `transfers` must outlive it.
  CopyTimes(const estimate::TransferEstimator& transfers, DurationNs overhead)
      : transfers_(transfers), overhead_(overhead) {}

  // Another snapshot with `domains` domains: what is predicted may have changed.
  void Start(size_t domains) {
    if (domains != domains_) {
      domains_ = domains;
      times_.assign(rows_.size() * domains, kUnknown);
      rows_.fill({});
    }
    ++snapshot_;
  }

  // Nanoseconds, the overhead included.
  DurationNs Of(DomainIndex source, DomainIndex destination, int64_t bytes) {
    const size_t row = RowOf(source, bytes);
    DurationNs& time = times_[row * domains_ + destination];
    if (time == kUnknown) time = overhead_ + transfers_.Predict(source, destination, bytes);
    return time;
  }

 private:
  static constexpr DurationNs kUnknown = INT64_MIN;
  static constexpr uint32_t kRowBits = 7;
  static constexpr uint64_t kHash = 0x9e3779b97f4a7c15;
  struct Row {  // times from one domain for one size
    int64_t bytes = 0;
    uint32_t snapshot = 0;  // in which it was taken; 0: never
    DomainIndex source = 0;
  };

  size_t RowOf(DomainIndex source, int64_t bytes) {
    const uint64_t hash = (static_cast<uint64_t>(bytes) ^ uint64_t{source} << 48) * kHash;
    const size_t at = hash >> (64 - kRowBits);
    Row& row = rows_[at];
    if (row.bytes != bytes || row.source != source || row.snapshot != snapshot_) {
      row = {bytes, snapshot_, source};
      std::fill_n(times_.begin() + static_cast<std::ptrdiff_t>(at * domains_), domains_, kUnknown);
    }
    return at;
  }

  const estimate::TransferEstimator& transfers_;
  const DurationNs overhead_;
  size_t domains_ = 0;
  uint32_t snapshot_ = 0;
  std::array<Row, 1U << kRowBits> rows_{};  // by hash
  std::vector<DurationNs> times_;           // by row and destination
};

}  // namespace slice::sim
