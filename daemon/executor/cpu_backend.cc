#include "daemon/executor/cpu_backend.h"

#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "common/check.h"
#include "daemon/executor/allocator.h"
#include "daemon/executor/pool.h"

namespace slice::executor {
namespace {

thread_local std::optional<ScopedPool> op_scope;

class CpuBackend final : public DeviceBackend {
 public:
  CpuBackend() { InstallAllocator(); }

  const char* Name() const override { return "cpu"; }
  int DeviceCount() const override { return static_cast<int>(std::thread::hardware_concurrency()); }

  Status OpenDomain(uint32_t domain, uint32_t, uint64_t pool_bytes) override {
    SLICE_ASSIGN_OR_RETURN(std::unique_ptr<MemoryPool> pool, MemoryPool::Create(pool_bytes));
    AnnouncePool(pool.get());
    const std::lock_guard lock(mutex_);
    pools_[domain] = pool.release();  // lives as long as the process: tensors may be freed late
    return Status::Ok();
  }
  void Prefault(uint32_t domain) override { Pool(domain)->Prefault(); }
  void SetTenantCap(uint32_t domain, uint32_t tenant, uint64_t bytes_max) override {
    Pool(domain)->SetCap(tenant, bytes_max);
  }
  void DropTenant(uint32_t domain, uint32_t tenant) override { Pool(domain)->DropTenant(tenant); }
  uint64_t BytesUsed(uint32_t domain) const override { return Pool(domain)->BytesUsed(); }

  void BeginOp(const OpScope& scope) override {
    op_scope.emplace(Pool(scope.domain), scope.tenant);
  }
  Status EndOp(OpTiming* timing) override {
    SLICE_CHECK(op_scope.has_value(), "EndOp without BeginOp");
    timing->peak_bytes = op_scope->peak_bytes();
    op_scope.reset();
    return Status::Ok();
  }

  Status Copy(uint32_t, void* destination, uint32_t, const void* source, size_t bytes) override {
    std::memcpy(destination, source, bytes);
    return Status::Ok();
  }

 private:
  MemoryPool* Pool(uint32_t domain) const {
    const std::lock_guard lock(mutex_);
    const auto found = pools_.find(domain);
    SLICE_CHECK(found != pools_.end(), "memory domain is not open");
    return found->second;
  }
  mutable std::mutex mutex_;
  std::map<uint32_t, MemoryPool*> pools_;
};

}  // namespace

std::unique_ptr<DeviceBackend> CreateCpuBackend() { return std::make_unique<CpuBackend>(); }

}  // namespace slice::executor
