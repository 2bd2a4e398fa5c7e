// Time, sizes and strong ids. Times are integer nanoseconds of CLOCK_MONOTONIC (or virtual time in
// tests).
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace slice {

using TimeNs = int64_t;      // a point in time
using DurationNs = int64_t;  // a length of time
inline constexpr TimeNs kNever = INT64_MAX;
inline constexpr DurationNs kMicrosecond = 1'000;
inline constexpr DurationNs kMillisecond = 1'000'000;
inline constexpr DurationNs kSecond = 1'000'000'000;
inline constexpr int64_t kMiB = int64_t{1} << 20;

// A strong integer id; Tag only keeps kinds apart. 0 is "none".
template <typename Tag, typename Rep = uint64_t>
struct Id {
  Rep value = 0;
  constexpr explicit operator bool() const { return value != 0; }
  friend constexpr auto operator<=>(const Id&, const Id&) = default;
};

using TenantId = Id<struct TenantTag, uint32_t>;  // one session of one tenant
using TemplateId = Id<struct TemplateTag, uint32_t>;
using TensorSetId = Id<struct TensorSetTag, uint32_t>;
using BindingId = Id<struct BindingTag, uint32_t>;
using InstanceId = Id<struct InstanceTag>;
using SequenceId = Id<struct SequenceTag>;  // unique in the daemon
using TransferId = Id<struct TransferTag>;
using CommandId = Id<struct CommandTag>;  // a tenant command on managed tensors

using DeviceIndex = uint8_t;  // position in the config's device list
using DomainIndex = uint8_t;  // position in the list of memory domains
inline constexpr DomainIndex kNoDomain = 0xff;
inline constexpr DeviceIndex kNoDevice = 0xff;
inline constexpr int kDevicesMax = 64;  // residency is a 64-bit mask of domains

enum class ServiceClass : uint8_t { kOnline = 0, kOffline = 1 };

}  // namespace slice

template <typename Tag, typename Rep>
struct std::hash<::slice::Id<Tag, Rep>> {
  size_t operator()(const ::slice::Id<Tag, Rep>& id) const noexcept {
    return std::hash<Rep>{}(id.value);
  }
};
