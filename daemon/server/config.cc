#include "daemon/server/config.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <array>

#include "common/checked.h"

namespace slice::server {
namespace {

constexpr int64_t kDefaultPoolMin = 64 * kMiB;
constexpr int64_t kDefaultPoolMax = 512 * kMiB;

}  // namespace

Result<int64_t> ParseBytes(std::string_view text) {
  size_t at = 0;
  int64_t value = 0;
  bool fits = true;
  for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
    fits = fits && CheckedMul(value, 10, &value) && CheckedAdd(value, text[at] - '0', &value);
  }
  const bool has_digits = at > 0;
  while (at < text.size() && text[at] == ' ') ++at;
  const std::string_view unit = text.substr(at);
  constexpr std::array<std::pair<std::string_view, int64_t>, 6> kUnits = {
      {{"", 1},
       {"B", 1},
       {"KiB", int64_t{1} << 10},
       {"MiB", int64_t{1} << 20},
       {"GiB", int64_t{1} << 30},
       {"TiB", int64_t{1} << 40}}};
  const auto found = std::find_if(kUnits.begin(), kUnits.end(),
                                  [unit](const auto& item) { return item.first == unit; });
  if (!has_digits || found == kUnits.end()) {
    return Error(StatusCode::kInvalid,
                 "'%s' is not a size: write e.g. \"512MiB\" (B, KiB, MiB, GiB, TiB)",
                 std::string(text).c_str());
  }
  if (!fits || !CheckedMul(value, found->second, &value)) {
    return Error(StatusCode::kOverflow, "size '%s' does not fit in 63 bits",
                 std::string(text).c_str());
  }
  return value;
}

std::string NearestKey(std::string_view key, const std::vector<std::string_view>& known) {
  size_t best_distance = key.size() / 2 + 2;  // farther is no help
  std::string best;
  for (const std::string_view candidate : known) {
    // Levenshtein, one row.
    std::vector<size_t> row(candidate.size() + 1);
    for (size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= key.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j < row.size(); ++j) {
        const size_t above = row[j];
        row[j] = std::min(
            {above + 1, row[j - 1] + 1, diagonal + (key[i - 1] == candidate[j - 1] ? 0 : 1)});
        diagonal = above;
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best;
}

Result<ServerConfig> DefaultConfig(int count, int64_t pool_bytes, int64_t retained_bytes) {
  if (count < 1 || count > kDevicesMax) {
    return Error(StatusCode::kInvalid, "%d CPU devices: 1 to %d are possible", count, kDevicesMax);
  }
  struct sysinfo memory {};
  ::sysinfo(&memory);
  const int64_t total = static_cast<int64_t>(memory.totalram) * memory.mem_unit;
  if (pool_bytes == 0)
    pool_bytes = std::clamp(total / (16 * count), kDefaultPoolMin, kDefaultPoolMax);
  if (retained_bytes == 0) retained_bytes = total / (2 * count);
  ServerConfig config;
  for (int i = 0; i < count; ++i) {
    DeviceSpec device;
    device.name = "cpu" + std::to_string(i);
    device.ordinal = static_cast<uint32_t>(i);
    device.domain = static_cast<DomainIndex>(i);
    config.engine.devices.push_back({device.name, device.domain, 0});
    config.engine.domains.push_back({device.name, pool_bytes, retained_bytes});
    config.devices.push_back(std::move(device));
  }
  config.tenant_defaults.class_max = ServiceClass::kOnline;
  config.tenant_defaults.weight = 1e6;
  config.tenant_defaults.sessions_max = config.limits.sessions_max;
  return config;
}

}  // namespace slice::server
