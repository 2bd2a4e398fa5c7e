// The pools under c10: at::empty and every kernel's result come from the pool of the calling
// thread's domain and are charged to the calling thread's tenant. Threads that charge nobody
// (registration) get plain heap memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slice::executor {

class MemoryPool;

// Once, before threads. Replaces torch's CPU allocator for good.
void InstallAllocator();
// Frees are routed by address: a pool must be announced before its first use and lives for ever
// after.
void AnnouncePool(MemoryPool* pool);

// While alive, this thread's tensors come from `pool` for `tenant`. Throws of allocation:
// c10::OutOfMemoryError.
class ScopedPool {
 public:
  ScopedPool(MemoryPool* pool, uint32_t tenant);
  ~ScopedPool();
  ScopedPool(const ScopedPool&) = delete;
  ScopedPool& operator=(const ScopedPool&) = delete;
  // Largest number of bytes that this thread held more than at construction.
  int64_t peak_bytes() const;

 private:
  MemoryPool* previous_pool_;
  uint32_t previous_tenant_;
};

}  // namespace slice::executor
