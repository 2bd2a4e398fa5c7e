// What the executor needs from a kind of device. "cpu" is built in; others are libraries that the
// executor loads when a device of their kind is configured (slice_backend_create below), so that
// one executor binary serves hosts with and without their driver.
//
// A domain is memory that its devices address directly; it has one pool with a hard cap per tenant.
// Threads: BeginOp/EndOp pair up on the device's own thread (or the copy thread, for allocations);
// the rest: any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/status.h"

namespace slice::executor {

inline constexpr uint32_t kBackendAbi = 1;

struct OpScope {
  uint32_t ordinal = 0;  // backend's number of the device
  uint32_t domain = 0;
  uint32_t tenant = 0;
};
struct OpTiming {
  int64_t peak_bytes = 0;  // most that the scope held at once
};

class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;
  virtual const char* Name() const = 0;
  virtual int DeviceCount() const = 0;

  // Domains. Errors: NO_MEMORY. `Prefault` may take long; call it off the data path.
  virtual Status OpenDomain(uint32_t domain, uint32_t ordinal, uint64_t pool_bytes) = 0;
  virtual void Prefault(uint32_t domain) = 0;
  virtual void SetTenantCap(uint32_t domain, uint32_t tenant, uint64_t bytes_max) = 0;
  virtual void DropTenant(uint32_t domain, uint32_t tenant) = 0;
  virtual uint64_t BytesUsed(uint32_t domain) const = 0;

  // Between the two, what torch allocates on this thread comes from the domain's pool on the
  // tenant's account, and kernels are launched on the device. EndOp returns when the work is
  // complete.
  virtual void BeginOp(const OpScope& scope) = 0;
  virtual Status EndOp(OpTiming* timing) = 0;

  // One chunk between two domains of this backend, complete on return. Allocates nothing.
  virtual Status Copy(uint32_t destination_domain, void* destination, uint32_t source_domain,
                      const void* source, size_t bytes) = 0;
};

}  // namespace slice::executor

// A backend library exports this. 0 = OK; otherwise `error` (zero terminated) says why.
extern "C" typedef int SliceBackendCreate(uint32_t abi, slice::executor::DeviceBackend** out,
                                          char* error, size_t error_bytes);
