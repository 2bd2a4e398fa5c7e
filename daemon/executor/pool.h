// Memory of one domain (a CPU device's own pool): one region, mapped once, cut into blocks for
// tenants.
//
// Second wall behind the engine's ledger: every tenant has a hard cap per domain, and the domain
// one for all. Charged is what was asked for (small blocks: rounded up), so that the ledger's sums
// hold here; the mapping is an eighth larger for rounding and gaps, touched only when needed.
// Memory that changes its tenant is zeroed first, so no tenant reads another's values. Blocks may
// be freed by any thread. No torch here; allocator.cc puts it under c10.
//
// Small blocks (up to 8 KiB) come from runs of 64 KiB that belong to one tenant; larger ones are
// spans of 4 KiB pages, best fit with coalescing, with a cache of recently freed spans per tenant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "common/status.h"

namespace slice::executor {

class MemoryPool {
 public:
  // A pool in which `bytes` may be in use at once. Errors: NO_MEMORY.
  static Result<std::unique_ptr<MemoryPool>> Create(size_t bytes);
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // Makes the first bytes() resident (fresh ones cost 10-20 times a warm copy). Blocks: long for
  // large pools; any thread.
  void Prefault();

  // Declares a tenant, or changes its cap.
  void SetCap(uint32_t tenant, uint64_t bytes_max);
  // Forgets a tenant; what it still holds stays charged until freed.
  void DropTenant(uint32_t tenant);

  enum class Refusal { kNone, kTenantCap, kPoolFull, kUnknownTenant };
  // 64-byte aligned. *charged: bytes counted against the tenant. nullptr with *refusal set when
  // there is no room.
  void* Allocate(uint32_t tenant, size_t bytes, size_t* charged, Refusal* refusal);
  // Returns what was charged. `address` came from Allocate of this pool.
  size_t Free(void* address);

  bool Owns(const void* address) const {
    return address >= base_ && address < base_ + mapped_bytes_;
  }
  size_t bytes() const { return bytes_; }
  uint64_t BytesUsed() const;  // charged, all tenants
  uint64_t BytesUsed(uint32_t tenant) const;
  uint64_t BytesMax(uint32_t tenant) const;  // its cap

 private:
  struct Tenant {
    uint64_t bytes_max = 0;
    uint64_t bytes_used = 0;
    bool dropped = false;
    std::vector<std::vector<void*>> free_small;  // by class
    std::unordered_map<uint32_t, std::vector<uint32_t>>
        free_spans;  // cache: page count -> first pages
    uint32_t cached_pages = 0;
  };
  // A run of small blocks, or one large block, or a cached span; by its first page.
  struct Span {
    uint32_t pages = 0;
    uint32_t tenant = 0;
    uint64_t charged = 0;     // large blocks
    int16_t size_class = -1;  // -1: large
    uint16_t live = 0;        // small blocks in use
    bool cached = false;
  };
  struct FreeSpan {
    uint32_t pages = 0;
    uint32_t last_tenant = 0;  // 0: never used, zero; kMixed: several
  };

  MemoryPool(std::byte* base, size_t mapped_bytes, size_t bytes);
  void* AllocateSmall(uint32_t id, Tenant* tenant, int size_class);
  void* AllocateLarge(uint32_t id, Tenant* tenant, uint32_t pages, uint64_t charged);
  // First page, or kNoPage. Zeroes what another tenant used.
  uint32_t TakePages(uint32_t id, uint32_t pages);
  void GivePages(uint32_t first, uint32_t pages, uint32_t tenant);
  void FlushCaches();
  void FlushCache(uint32_t id, Tenant* tenant);
  void InsertFree(uint32_t first, FreeSpan span);

  std::byte* const base_;
  const size_t mapped_bytes_;
  const size_t bytes_;
  mutable std::mutex mutex_;
  std::vector<uint32_t>
      span_of_page_;  // first page of the span that covers a page; small runs and large blocks
  std::unordered_map<uint32_t, Span> spans_;  // by first page
  std::map<uint32_t, FreeSpan> free_by_page_;
  std::set<std::pair<uint32_t, uint32_t>> free_by_size_;  // (pages, first)
  std::unordered_map<uint32_t, Tenant> tenants_;
  uint64_t bytes_used_ = 0;
};

}  // namespace slice::executor
