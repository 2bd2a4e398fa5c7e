// See memory_estimator.h.
#include "daemon/estimate/memory_estimator.h"

#include <algorithm>
#include <cmath>

namespace slice::estimate {
namespace {

constexpr size_t kLookedAt = 16;  // signatures, to find one to drop

uint64_t Key(uint64_t signature, uint8_t device_kind) {
  return signature ^ (uint64_t{device_kind} + 1) * 0x9e3779b97f4a7c15ull;
}

}  // namespace

int64_t MemoryEstimator::Margin::BytesFor(int64_t declared) const {
  if (declared <= 0) return declared;
  const double bytes = std::ceil(static_cast<double>(declared) * ratio);
  constexpr auto kMax = static_cast<double>(int64_t{1} << 62);
  return std::max(declared, static_cast<int64_t>(std::min(bytes, kMax)));
}

void MemoryEstimator::Window::Add(float ratio) {
  if (ratio > highest[0]) {
    highest = {ratio, highest[0]};
  } else {
    highest[1] = std::max(highest[1], ratio);
  }
}

MemoryEstimator::Margin MemoryEstimator::Predict(uint64_t signature, uint8_t device_kind) const {
  const auto found = signatures_.find(Key(signature, device_kind));
  if (found == signatures_.end()) return {};
  const Signature& s = found->second;
  Window both = s.current;
  for (const float ratio : s.before.highest) both.Add(ratio);
  Margin margin;
  margin.ratio = std::max(1.0, static_cast<double>(both.highest[1]));
  margin.samples = s.samples;
  return margin;
}

void MemoryEstimator::Observe(uint64_t signature, uint8_t device_kind, int64_t declared_bytes,
                              int64_t peak_bytes) {
  if (declared_bytes < 1 || peak_bytes < 0) return;
  const uint64_t key = Key(signature, device_kind);
  if (signatures_.size() >= kSignaturesMax && !signatures_.contains(key)) DropOne();
  Signature& s = signatures_[key];
  s.last_use = ++clock_;
  ++s.samples;
  if (s.in_window == kWindow) {
    s.before = s.current;
    s.current = {};
    s.in_window = 0;
  }
  ++s.in_window;
  const double ratio = static_cast<double>(peak_bytes) / static_cast<double>(declared_bytes);
  s.current.Add(static_cast<float>(std::min(ratio, kRatioMax)));
}

// Of a few, the one not used for longest.
void MemoryEstimator::DropOne() {
  auto oldest = signatures_.begin();
  auto it = oldest;
  for (size_t i = 0; i < kLookedAt && it != signatures_.end(); ++i, ++it) {
    if (it->second.last_use < oldest->second.last_use) oldest = it;
  }
  signatures_.erase(oldest);
}

}  // namespace slice::estimate
