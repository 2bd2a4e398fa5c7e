#include "daemon/gmg/ledger.h"

#include <algorithm>
#include <cstdio>

#include "common/check.h"

namespace slice::gmg {

const char* MemoryKindName(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kReservation:
      return "reservations";
    case MemoryKind::kGrant:
      return "grants";
    case MemoryKind::kWeights:
      return "weights";
    case MemoryKind::kReplica:
      return "replicas";
    case MemoryKind::kMutable:
      return "mutable";
    case MemoryKind::kManaged:
      return "managed";
  }
  return "?";
}

Ledger::Ledger(std::span<const DomainLimits> domains, std::span<const DomainIndex> device_domains)
    : device_domains_(device_domains.begin(), device_domains.end()),
      lanes_(device_domains.size(), 0) {
  for (const DomainLimits& limits : domains) domains_.push_back({limits});
}

void Ledger::SetLane(DeviceIndex device, int64_t bytes) {
  domains_[device_domains_[device]].lanes += bytes - lanes_[device];
  lanes_[device] = bytes;
  SLICE_CHECK(pool_free(device_domains_[device]) >= 0, "a lane passes its domain's pool");
}

void Ledger::Apply(TenantId tenant, MemoryKind kind, DomainIndex domain, int64_t delta) {
  Domain& d = domains_[domain];
  Use& use = tenants_[tenant];
  if (use.bytes.empty()) use.bytes.resize(kMemoryKindCount * domains_.size(), 0);
  int64_t& bytes = use.bytes[static_cast<size_t>(kind) * domains_.size() + domain];
  bytes += delta;
  SLICE_CHECK(bytes >= 0, "more memory released than charged");
  if (kind == MemoryKind::kReservation) {
    d.reserved += delta;
  } else if (kind == MemoryKind::kGrant) {
    d.granted += delta;
  } else {
    d.retained += delta;
  }
  (IsPoolKind(kind) ? use.pool : use.retained) += delta;
}

void Ledger::Charge(TenantId tenant, MemoryKind kind, DomainIndex domain, int64_t bytes) {
  SLICE_CHECK(bytes >= 0 && bytes <= (IsPoolKind(kind) ? pool_free(domain) : retained_free(domain)),
              "charged more memory than is free");
  if (bytes > 0) Apply(tenant, kind, domain, bytes);
}

void Ledger::Release(TenantId tenant, MemoryKind kind, DomainIndex domain, int64_t bytes) {
  SLICE_CHECK(bytes >= 0, "negative release");
  if (bytes > 0) Apply(tenant, kind, domain, -bytes);
}

int64_t Ledger::used(TenantId tenant, MemoryKind kind, DomainIndex domain) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end()
             ? 0
             : found->second.bytes[static_cast<size_t>(kind) * domains_.size() + domain];
}
int64_t Ledger::pool_used(TenantId tenant) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? 0 : found->second.pool;
}
int64_t Ledger::retained_used(TenantId tenant) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? 0 : found->second.retained;
}

void Ledger::DropTenant(TenantId tenant) {
  SLICE_CHECK(pool_used(tenant) == 0 && retained_used(tenant) == 0,
              "tenant dropped while it holds memory");
  tenants_.erase(tenant);
}

std::string Ledger::Holders(DomainIndex domain, bool pool) const {
  std::vector<TenantId> ids;
  for (const auto& [id, use] : tenants_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  std::string text;
  for (const TenantId id : ids) {
    std::string line;
    for (size_t k = 0; k < kMemoryKindCount; ++k) {
      const auto kind = static_cast<MemoryKind>(k);
      const int64_t bytes = used(id, kind, domain);
      if (IsPoolKind(kind) != pool || bytes == 0) continue;
      if (!line.empty()) line += ", ";
      line += std::to_string(bytes) + " " + MemoryKindName(kind);
    }
    if (line.empty()) continue;
    if (!text.empty()) text += "; ";
    text += "session " + std::to_string(id.value) + ": " + line;
  }
  if (pool && domains_[domain].lanes > 0) {
    if (!text.empty()) text += "; ";
    text += std::to_string(domains_[domain].lanes) + " workspace lanes";
  }
  return text.empty() ? "nobody" : text;
}

bool Ledger::Empty() const {
  return std::all_of(domains_.begin(), domains_.end(), [](const Domain& d) {
    return d.reserved == 0 && d.granted == 0 && d.retained == 0;
  });
}

}  // namespace slice::gmg
