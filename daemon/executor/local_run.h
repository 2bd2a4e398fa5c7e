// A template bound to made-up memory in this process and run group by group on the calling thread:
// the executor's own instance code without rings, threads or daemon. For `--run`, unit tests and
// benchmarks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/status.h"
#include "daemon/executor/device_backend.h"
#include "daemon/executor/instance.h"

namespace slice::executor {

class LocalRun {
 public:
  static constexpr uint32_t kTenant = 1;
  static constexpr uint32_t kDomain = 0;

  // Statics and dynamic inputs are random: floats normal (scaled so that deep models stay finite),
  // integers 0-3 (0 in statics), bools true. The backend has kDomain open. Errors: those of
  // parsing, preparing and binding.
  static Result<std::unique_ptr<LocalRun>> Create(DeviceBackend* backend,
                                                  std::shared_ptr<const graph::Template> source,
                                                  std::vector<int64_t> symbols, uint64_t seed,
                                                  uint64_t pool_bytes_max);
  // Same values again in inputs and written statics.
  void ResetInputs();
  // One instance, all groups in order. group_ns: one entry per group. Errors: those of the ops.
  Status Run(std::vector<int64_t>* group_ns = nullptr);
  std::span<const std::byte> result(size_t position) const;
  const graph::Template& source() const { return *source_; }
  std::byte* input(size_t position) const;
  at::Tensor static_tensor(uint32_t position) const { return set_->Get(kDomain, position); }

 private:
  DeviceBackend* backend_ = nullptr;
  std::shared_ptr<const graph::Template> source_;
  std::vector<int64_t> symbols_;
  uint64_t seed_ = 0;
  std::shared_ptr<TensorSet> set_;
  std::shared_ptr<TenantMemory> tenant_;
  std::shared_ptr<Binding> binding_;
  std::vector<wire::ArenaRange> inputs_, outputs_;
  Frame frame_;
};

}  // namespace slice::executor
