#include "daemon/executor/allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "common/check.h"
#include "daemon/executor/pool.h"

namespace slice::executor {
namespace {

constexpr uint8_t kPriority = 100;  // above whatever torch installs
constexpr size_t kPoolsMax = 64;
constexpr size_t kAlignment = 64;

struct Current {
  MemoryPool* pool = nullptr;
  uint32_t tenant = 0;
  int64_t held_bytes = 0;
  int64_t peak_bytes = 0;
};
thread_local Current current;

std::array<std::atomic<MemoryPool*>, kPoolsMax> pools;
std::atomic<size_t> pool_count{0};

MemoryPool* PoolOf(const void* address) {
  const size_t count = pool_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i) {
    MemoryPool* pool = pools[i].load(std::memory_order_relaxed);
    if (pool->Owns(address)) return pool;
  }
  return nullptr;
}

void Delete(void* address) {
  if (address == nullptr) return;
  if (MemoryPool* pool = PoolOf(address)) {
    const size_t charged = pool->Free(address);
    if (current.pool == pool) current.held_bytes -= static_cast<int64_t>(charged);
  } else {
    std::free(address);
  }
}

[[noreturn]] void ThrowRefusal(const MemoryPool& pool, uint32_t tenant, size_t bytes,
                               MemoryPool::Refusal refusal) {
  const bool cap = refusal == MemoryPool::Refusal::kTenantCap;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "needs ", bytes, " bytes; ",
                   cap ? "the tenant's cap in this memory domain is "
                       : "other tenants fill the memory domain of ",
                   cap ? pool.BytesMax(tenant) : pool.bytes(), ", in use by this tenant are ",
                   pool.BytesUsed(tenant));
  std::abort();  // not reached
}

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::kCPU);
    if (bytes == 0) return {nullptr, nullptr, &Delete, cpu};
    void* address = nullptr;
    if (current.pool != nullptr) {
      size_t charged = 0;
      MemoryPool::Refusal refusal{};
      address = current.pool->Allocate(current.tenant, bytes, &charged, &refusal);
      if (address == nullptr) ThrowRefusal(*current.pool, current.tenant, bytes, refusal);
      current.held_bytes += static_cast<int64_t>(charged);
      current.peak_bytes = std::max(current.peak_bytes, current.held_bytes);
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, ::posix_memalign(&address, kAlignment, bytes) == 0,
                       "cannot allocate ", bytes, " bytes");
    }
    return {address, address, &Delete, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
};

}  // namespace

void InstallAllocator() {
  static PoolAllocator allocator;
  c10::SetCPUAllocator(&allocator, kPriority);
}

void AnnouncePool(MemoryPool* pool) {
  const size_t count = pool_count.load(std::memory_order_relaxed);
  SLICE_CHECK(count < kPoolsMax, "too many memory pools");
  pools[count].store(pool, std::memory_order_relaxed);
  pool_count.store(count + 1, std::memory_order_release);
}

ScopedPool::ScopedPool(MemoryPool* pool, uint32_t tenant)
    : previous_pool_(current.pool), previous_tenant_(current.tenant) {
  current.pool = pool;
  current.tenant = tenant;
  current.held_bytes = 0;
  current.peak_bytes = 0;
}

ScopedPool::~ScopedPool() {
  current.pool = previous_pool_;
  current.tenant = previous_tenant_;
}

int64_t ScopedPool::peak_bytes() const { return current.peak_bytes; }

}  // namespace slice::executor
