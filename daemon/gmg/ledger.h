// The memory ledger: who holds how much of what, where. Pure accounting; the executor's pools
// enforce the same caps.
//
// Pool memory of a domain is split into
//   lanes         one per device: workspace of whatever op runs there = maximum over what may run
//   reservations  one per started instance and home domain: its peak in template order, taken all
//   at once grants        off-home or out-of-order copies and outputs, from what is unreserved
// Retained memory holds weights, replicas and managed tensors. Why this cannot deadlock: docs,
// "memory admission".
//
// Owner: the engine; its thread only. Charging more than is free is a bug (CHECK): callers ask
// first.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/units.h"

namespace slice::gmg {

enum class MemoryKind : uint8_t { kReservation, kGrant, kWeights, kReplica, kMutable, kManaged };
inline constexpr size_t kMemoryKindCount = 6;
inline bool IsPoolKind(MemoryKind kind) { return kind <= MemoryKind::kGrant; }
const char* MemoryKindName(MemoryKind kind);

struct DomainLimits {
  int64_t pool_bytes = 0;
  int64_t retained_bytes = 0;
};

class Ledger {
 public:
  Ledger(std::span<const DomainLimits> domains, std::span<const DomainIndex> device_domains);

  int64_t pool_capacity(DomainIndex domain) const { return domains_[domain].limits.pool_bytes; }
  int64_t retained_capacity(DomainIndex domain) const {
    return domains_[domain].limits.retained_bytes;
  }
  int64_t lanes(DomainIndex domain) const { return domains_[domain].lanes; }
  int64_t reserved(DomainIndex domain) const { return domains_[domain].reserved; }
  int64_t granted(DomainIndex domain) const { return domains_[domain].granted; }
  int64_t retained(DomainIndex domain) const { return domains_[domain].retained; }
  int64_t pool_free(DomainIndex domain) const {
    const Domain& d = domains_[domain];
    return d.limits.pool_bytes - d.lanes - d.reserved - d.granted;
  }
  int64_t retained_free(DomainIndex domain) const {
    return domains_[domain].limits.retained_bytes - domains_[domain].retained;
  }
  int64_t lane(DeviceIndex device) const { return lanes_[device]; }
  // What raising `device`'s lane to `bytes` would take from its domain's free pool.
  int64_t LaneRaise(DeviceIndex device, int64_t bytes) const {
    return bytes > lanes_[device] ? bytes - lanes_[device] : 0;
  }
  void SetLane(DeviceIndex device, int64_t bytes);

  void Charge(TenantId tenant, MemoryKind kind, DomainIndex domain, int64_t bytes);
  void Release(TenantId tenant, MemoryKind kind, DomainIndex domain, int64_t bytes);
  int64_t used(TenantId tenant, MemoryKind kind, DomainIndex domain) const;
  int64_t pool_used(TenantId tenant) const;      // reservations and grants, all domains
  int64_t retained_used(TenantId tenant) const;  // the other kinds, all domains
  void DropTenant(TenantId tenant);              // CHECKs that it holds nothing

  // "tenant 3: 120 MiB reservations, 40 MiB weights; tenant 5: ...": who holds a domain's pool or
  // retained memory.
  std::string Holders(DomainIndex domain, bool pool) const;
  bool Empty() const;  // nothing charged at all (lanes excepted)
  const std::vector<DomainIndex>& device_domains() const { return device_domains_; }

 private:
  struct Domain {
    DomainLimits limits;
    int64_t lanes = 0, reserved = 0, granted = 0, retained = 0;
  };
  struct Use {
    std::vector<int64_t> bytes;  // kind * domain count + domain
    int64_t pool = 0, retained = 0;
  };
  void Apply(TenantId tenant, MemoryKind kind, DomainIndex domain, int64_t delta);

  std::vector<Domain> domains_;
  std::vector<DomainIndex> device_domains_;
  std::vector<int64_t> lanes_;
  std::unordered_map<TenantId, Use> tenants_;
};

}  // namespace slice::gmg
