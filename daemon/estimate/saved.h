// What the estimators have learned, in plain numbers, to be kept between runs of the daemon. PURE.
//
// Device kinds and domains are the running configuration's: who writes a file stores them by name.
#pragma once

#include <cstdint>
#include <iterator>
#include <string_view>
#include <vector>

#include "common/units.h"

namespace slice::estimate {

// By engine::DeviceConfig::kind.
inline constexpr std::string_view kDeviceKinds[] = {"cpu", "cuda"};
constexpr std::string_view DeviceKindName(uint8_t kind) {
  return kind < std::size(kDeviceKinds) ? kDeviceKinds[kind] : std::string_view("other");
}

struct SavedShape {
  int64_t flops = 0, bytes = 0, size = 0;
  double ns = 0;
  double deviation = 0;  // mean absolute, ns
  uint32_t samples = 0;
  friend bool operator==(const SavedShape&, const SavedShape&) = default;
};
struct SavedSignature {
  uint64_t signature = 0;
  uint8_t device_kind = 0;
  std::vector<SavedShape> shapes;
  friend bool operator==(const SavedSignature&, const SavedSignature&) = default;
};
struct SavedLink {
  DomainIndex source = 0, destination = 0;
  struct Point {
    int64_t bytes = 0;
    double ns = 0;
    friend bool operator==(const Point&, const Point&) = default;
  };
  std::vector<Point> points;
  friend bool operator==(const SavedLink&, const SavedLink&) = default;
};
struct Saved {
  std::vector<SavedSignature> signatures;
  std::vector<SavedLink> links;
  friend bool operator==(const Saved&, const Saved&) = default;
};

}  // namespace slice::estimate
