#include "daemon/executor/pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "common/check.h"
#include "common/checked.h"

namespace slice::executor {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr uint32_t kRunPages = 16;  // 64 KiB of small blocks
constexpr size_t kSlackBytes = size_t{4} << 20;
constexpr size_t kPoolBytesMax = size_t{8} << 40;
constexpr uint32_t kNoPage = 0xffffffff;
constexpr uint32_t kMixedTenants = 0xffffffff;
constexpr uint32_t kCachedPagesMax = 16384;  // 64 MiB of freed spans kept per tenant
// The address space is locked for a step, by a thread that gives way to all others: a request that
// maps memory must not wait for more of it than this.
constexpr size_t kPrefaultStepBytes = size_t{2} << 20;

// Four steps per power of two: at most a quarter is lost to rounding.
constexpr std::array<uint32_t, 25> kClassBytes = {
    64,   128,  192,  256,  320,  384,  448,  512,  640,  768,  896,  1024, 1280,
    1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 5632, 6144, 7168, 8192};

int ClassOf(size_t bytes) {
  const auto found = std::lower_bound(kClassBytes.begin(), kClassBytes.end(), bytes);
  return found == kClassBytes.end() ? -1 : static_cast<int>(found - kClassBytes.begin());
}

}  // namespace

Result<std::unique_ptr<MemoryPool>> MemoryPool::Create(size_t bytes) {
  const size_t rounded = RoundUp(bytes + bytes / 8, kPageBytes) + kSlackBytes;
  if (bytes >= kPoolBytesMax) {
    return Error(StatusCode::kNoMemory, "pool of %zu bytes is too large, the limit is %zu", bytes,
                 kPoolBytesMax);
  }
  void* base = ::mmap(nullptr, rounded, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return ErrnoError(StatusCode::kNoMemory, errno, "cannot map a pool of %zu bytes", rounded);
  }
  ::madvise(base, rounded, MADV_HUGEPAGE);
  ::madvise(base, rounded, MADV_DONTDUMP);  // tenants' data has no place in core files
  return std::unique_ptr<MemoryPool>(new MemoryPool(static_cast<std::byte*>(base), rounded, bytes));
}

MemoryPool::MemoryPool(std::byte* base, size_t mapped_bytes, size_t bytes)
    : base_(base),
      mapped_bytes_(mapped_bytes),
      bytes_(bytes),
      span_of_page_(mapped_bytes / kPageBytes, kNoPage) {
  InsertFree(0, {static_cast<uint32_t>(mapped_bytes / kPageBytes), 0});
}

MemoryPool::~MemoryPool() { ::munmap(base_, mapped_bytes_); }

void MemoryPool::Prefault() {
  for (size_t at = 0; at < bytes_; at += kPrefaultStepBytes) {
    ::madvise(base_ + at, std::min(kPrefaultStepBytes, bytes_ - at), MADV_POPULATE_WRITE);
  }
}

void MemoryPool::SetCap(uint32_t tenant, uint64_t bytes_max) {
  const std::lock_guard lock(mutex_);
  Tenant& entry = tenants_[tenant];
  entry.bytes_max = bytes_max;
  entry.dropped = false;
  entry.free_small.resize(kClassBytes.size());
}

void MemoryPool::DropTenant(uint32_t tenant) {
  const std::lock_guard lock(mutex_);
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return;
  FlushCache(tenant, &found->second);
  found->second.dropped = true;
  if (found->second.bytes_used == 0) tenants_.erase(found);
}

void* MemoryPool::Allocate(uint32_t tenant, size_t bytes, size_t* charged, Refusal* refusal) {
  const int size_class = ClassOf(bytes);
  const std::lock_guard lock(mutex_);
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end() || found->second.dropped) {
    *refusal = Refusal::kUnknownTenant;
    return nullptr;
  }
  if (size_class < 0 && bytes > bytes_) {
    *refusal = bytes > found->second.bytes_max ? Refusal::kTenantCap : Refusal::kPoolFull;
    return nullptr;
  }
  const size_t charge = size_class >= 0 ? kClassBytes[static_cast<size_t>(size_class)] : bytes;
  if (charge >
      found->second.bytes_max - std::min(found->second.bytes_used, found->second.bytes_max)) {
    *refusal = Refusal::kTenantCap;
    return nullptr;
  }
  if (charge > bytes_ - std::min<uint64_t>(bytes_used_, bytes_)) {
    *refusal = Refusal::kPoolFull;
    return nullptr;
  }
  const auto pages = static_cast<uint32_t>(RoundUp(charge, kPageBytes) / kPageBytes);
  void* address = size_class >= 0 ? AllocateSmall(tenant, &found->second, size_class)
                                  : AllocateLarge(tenant, &found->second, pages, charge);
  if (address == nullptr) {
    *refusal = Refusal::kPoolFull;
    return nullptr;
  }
  found->second.bytes_used += charge;
  bytes_used_ += charge;
  *charged = charge;
  *refusal = Refusal::kNone;
  return address;
}

void* MemoryPool::AllocateSmall(uint32_t id, Tenant* tenant, int size_class) {
  std::vector<void*>& list = tenant->free_small[static_cast<size_t>(size_class)];
  if (list.empty()) {
    const uint32_t first = TakePages(id, kRunPages);
    if (first == kNoPage) return nullptr;
    const uint32_t block = kClassBytes[static_cast<size_t>(size_class)];
    spans_[first] = {kRunPages, id, 0, static_cast<int16_t>(size_class), 0, false};
    std::fill_n(span_of_page_.begin() + first, kRunPages, first);
    std::byte* run = base_ + size_t{first} * kPageBytes;
    for (size_t i = kRunPages * kPageBytes / block; i-- > 0;) list.push_back(run + i * block);
  }
  void* address = list.back();
  list.pop_back();
  const auto page = static_cast<size_t>(static_cast<std::byte*>(address) - base_) / kPageBytes;
  ++spans_[span_of_page_[page]].live;
  return address;
}

void* MemoryPool::AllocateLarge(uint32_t id, Tenant* tenant, uint32_t pages, uint64_t charged) {
  uint32_t first = kNoPage;
  const auto cached = tenant->free_spans.find(pages);
  if (cached != tenant->free_spans.end() && !cached->second.empty()) {
    first = cached->second.back();
    cached->second.pop_back();
    tenant->cached_pages -= pages;
    spans_[first].cached = false;
    spans_[first].charged = charged;
  } else {
    first = TakePages(id, pages);
    if (first == kNoPage) return nullptr;
    spans_[first] = {pages, id, charged, -1, 0, false};
    span_of_page_[first] = first;
  }
  return base_ + size_t{first} * kPageBytes;
}

size_t MemoryPool::Free(void* address) {
  const auto page = static_cast<size_t>(static_cast<std::byte*>(address) - base_) / kPageBytes;
  const std::lock_guard lock(mutex_);
  SLICE_CHECK(page < span_of_page_.size() && span_of_page_[page] != kNoPage,
              "freed address is not a block's");
  const uint32_t first = span_of_page_[page];
  Span& span = spans_[first];
  SLICE_CHECK(!span.cached, "block freed twice");
  const uint32_t id = span.tenant;
  Tenant& tenant = tenants_[id];
  size_t charged = 0;
  if (span.size_class >= 0) {
    charged = kClassBytes[static_cast<size_t>(span.size_class)];
    SLICE_CHECK(span.live > 0, "block freed twice");
    tenant.free_small[static_cast<size_t>(span.size_class)].push_back(address);
    --span.live;
  } else {
    charged = span.charged;
    if (span.pages <= kCachedPagesMax - tenant.cached_pages) {
      span.cached = true;
      tenant.cached_pages += span.pages;
      tenant.free_spans[span.pages].push_back(first);
    } else {
      span_of_page_[first] = kNoPage;
      const uint32_t pages = span.pages;
      spans_.erase(first);
      GivePages(first, pages, id);
    }
  }
  SLICE_CHECK(tenant.bytes_used >= charged && bytes_used_ >= charged, "pool accounting");
  tenant.bytes_used -= charged;
  bytes_used_ -= charged;
  if (tenant.dropped && tenant.bytes_used == 0) {
    FlushCache(id, &tenant);
    tenants_.erase(id);
  }
  return charged;
}

uint32_t MemoryPool::TakePages(uint32_t id, uint32_t pages) {
  auto fit = free_by_size_.lower_bound({pages, 0});
  if (fit == free_by_size_.end()) {
    FlushCaches();
    fit = free_by_size_.lower_bound({pages, 0});
    if (fit == free_by_size_.end()) return kNoPage;
  }
  const uint32_t first = fit->second;
  const FreeSpan span = free_by_page_[first];
  free_by_size_.erase(fit);
  free_by_page_.erase(first);
  if (span.pages > pages) InsertFree(first + pages, {span.pages - pages, span.last_tenant});
  if (span.last_tenant != 0 && span.last_tenant != id) {
    std::memset(base_ + size_t{first} * kPageBytes, 0, size_t{pages} * kPageBytes);
  }
  return first;
}

void MemoryPool::GivePages(uint32_t first, uint32_t pages, uint32_t tenant) {
  FreeSpan span{pages, tenant};
  const auto merge = [&](uint32_t other) {
    if (other != 0 && other != span.last_tenant) span.last_tenant = kMixedTenants;
  };
  auto next = free_by_page_.lower_bound(first);
  if (next != free_by_page_.end() && next->first == first + pages) {
    merge(next->second.last_tenant);
    span.pages += next->second.pages;
    free_by_size_.erase({next->second.pages, next->first});
    next = free_by_page_.erase(next);
  }
  if (next != free_by_page_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.pages == first) {
      merge(before->second.last_tenant);
      span.pages += before->second.pages;
      first = before->first;
      free_by_size_.erase({before->second.pages, before->first});
      free_by_page_.erase(before);
    }
  }
  InsertFree(first, span);
}

void MemoryPool::InsertFree(uint32_t first, FreeSpan span) {
  free_by_page_[first] = span;
  free_by_size_.insert({span.pages, first});
}

void MemoryPool::FlushCaches() {
  for (auto& [id, tenant] : tenants_) FlushCache(id, &tenant);
}

void MemoryPool::FlushCache(uint32_t id, Tenant* tenant) {
  for (auto& [pages, list] : tenant->free_spans) {
    for (const uint32_t first : list) {
      span_of_page_[first] = kNoPage;
      spans_.erase(first);
      GivePages(first, pages, id);
    }
  }
  tenant->free_spans.clear();
  tenant->cached_pages = 0;
  // Runs without a live block. Rare: at memory pressure and when a tenant leaves.
  for (size_t size_class = 0; size_class < tenant->free_small.size(); ++size_class) {
    std::vector<void*>& list = tenant->free_small[size_class];
    std::set<uint32_t> empty_runs;
    std::erase_if(list, [&](void* address) {
      const auto page = static_cast<size_t>(static_cast<std::byte*>(address) - base_) / kPageBytes;
      const uint32_t first = span_of_page_[page];
      if (spans_[first].live != 0) return false;
      empty_runs.insert(first);
      return true;
    });
    for (const uint32_t first : empty_runs) {
      std::fill_n(span_of_page_.begin() + first, kRunPages, kNoPage);
      spans_.erase(first);
      GivePages(first, kRunPages, id);
    }
  }
}

uint64_t MemoryPool::BytesUsed() const {
  const std::lock_guard lock(mutex_);
  return bytes_used_;
}

uint64_t MemoryPool::BytesUsed(uint32_t tenant) const {
  const std::lock_guard lock(mutex_);
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? 0 : found->second.bytes_used;
}

uint64_t MemoryPool::BytesMax(uint32_t tenant) const {
  const std::lock_guard lock(mutex_);
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? 0 : found->second.bytes_max;
}

}  // namespace slice::executor
