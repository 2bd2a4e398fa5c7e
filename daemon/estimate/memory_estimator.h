// How much more memory operators take than they declare, by signature and device kind.
//
// PURE. What an op declares (workspace and outputs) is its author's formula; what it took is the
// executor's measurement. The margin is the second highest ratio of the two among the last 64 to
// 128 runs: high enough for all but one of them, and one odd measurement changes nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace slice::estimate {

class MemoryEstimator {
 public:
  static constexpr size_t kSignaturesMax = 16'384;
  static constexpr uint32_t kWindow = 64;  // runs
  static constexpr double kRatioMax = 64;

  struct Margin {
    double ratio = 1;      // peak / declared that nearly every run stays below; >= 1
    uint64_t samples = 0;  // 0: nothing known
    // Bytes to expect of an op that declares `declared`: never below that.
    int64_t BytesFor(int64_t declared) const;
  };
  Margin Predict(uint64_t signature, uint8_t device_kind) const;
  // Ignores peaks below 0 and declarations below 1: there is nothing to compare.
  void Observe(uint64_t signature, uint8_t device_kind, int64_t declared_bytes, int64_t peak_bytes);
  size_t signature_count() const { return signatures_.size(); }

 private:
  struct Window {
    std::array<float, 2> highest{};  // ratios, descending
    void Add(float ratio);
  };
  struct Signature {
    Window current, before;
    uint32_t in_window = 0;
    uint64_t samples = 0;
    uint64_t last_use = 0;
  };
  void DropOne();

  uint64_t clock_ = 0;
  std::unordered_map<uint64_t, Signature> signatures_;
};

}  // namespace slice::estimate
