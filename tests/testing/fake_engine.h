// Stands in for sliced: starts slice-executor as a child process and speaks both of its interfaces.
// Simple and works; no scheduling. Each wait has a long timeout and fails the test by returning
// nothing.
#pragma once

#include <sys/types.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/fd.h"
#include "common/wire/executor_ring.h"
#include "common/wire/record_ring.h"
#include "daemon/graph/template.h"
#include "slice/proto/executor.pb.h"

namespace slice::testing {

class FakeEngine {
 public:
  static constexpr uint32_t kTenant = 7;
  static constexpr size_t kArenaBytes = size_t{32} << 20;

  // `executable` is slice-executor. One device per entry of device_domains.
  FakeEngine(const std::string& executable, std::vector<uint32_t> device_domains,
             uint32_t domain_count, uint64_t pool_bytes = uint64_t{64} << 20);
  // Speaks to an executor that is there already (forked by a zygote).
  FakeEngine(Fd control, pid_t pid, std::vector<uint32_t> device_domains, uint32_t domain_count,
             uint64_t pool_bytes);
  ~FakeEngine();

  // ---- cold path
  proto::ExecutorAck Call(proto::ExecutorRequest request, const std::vector<int>& fds = {});
  proto::ExecutorAck Setup();
  proto::ExecutorAck AddTenant(uint32_t tenant = kTenant,
                               uint64_t pool_bytes_max = uint64_t{48} << 20);
  proto::ExecutorAck AddTemplate(uint32_t id, const proto::GraphTemplate& program);
  // One set with all statics of the template, mapped in every domain; domain 0 is filled with small
  // numbers.
  proto::ExecutorAck AddStatics(uint32_t set, const graph::Template& source,
                                std::vector<int64_t> symbols = {});
  proto::ExecutorAck AddBinding(uint32_t binding, uint32_t template_id, uint32_t set,
                                size_t statics);
  proto::ExecutorAck Describe();
  std::byte* segment(uint32_t set, uint32_t domain) { return segments_.at({set, domain}).data(); }
  const proto::SetTensor& layout(uint32_t set, int tensor) const {
    return layouts_.at(set).tensors(tensor);
  }

  // ---- fast path
  template <typename T>
  void Push(uint32_t type, const T& command, uint32_t device = 0) {
    PushBytes(type, {reinterpret_cast<const std::byte*>(&command), sizeof command}, device);
  }
  void PushBytes(uint32_t type, std::span<const std::byte> payload, uint32_t device);
  // Slots are laid out one behind the other from the arena's start: inputs, then results.
  void StartInstance(uint64_t instance, uint32_t binding, const graph::Template& source,
                     std::vector<int64_t> symbols = {});
  void Issue(uint64_t instance, uint32_t op, uint32_t device,
             std::function<void(wire::Issue*)> change = {});
  void EndInstance(uint64_t instance);
  std::byte* arena() { return arena_.data(); }
  std::byte* input(size_t position) { return arena_.data() + inputs_[position].offset; }
  std::byte* result(size_t position) { return arena_.data() + outputs_[position].offset; }
  size_t result_bytes(size_t position) const { return outputs_[position].bytes; }

  struct Report {
    uint32_t type = 0;
    std::vector<std::byte> payload;
  };
  // Next report of `type`; others are kept for later calls. nullopt after `timeout_ms`, or when the
  // executor is gone.
  template <typename T>
  std::optional<T> Wait(uint32_t type, int timeout_ms = 20'000) {
    const std::optional<Report> report = WaitReport(type, timeout_ms);
    if (!report.has_value() || report->payload.size() != sizeof(T)) return std::nullopt;
    T value;
    std::memcpy(&value, report->payload.data(), sizeof value);
    return value;
  }
  std::optional<Report> WaitReport(uint32_t type, int timeout_ms);
  bool Has(uint32_t type);  // arrived already
  // Bytes used in all pools, by describe.
  uint64_t PoolBytes();

  pid_t pid() const { return pid_; }
  void Kill();
  int WaitExit();  // wait status of the child

 private:
  void MakeRings();
  void Collect();

  pid_t pid_ = -1;
  bool own_child_ = false;
  Fd control_;
  std::vector<uint32_t> device_domains_;
  uint32_t domain_count_ = 0;
  uint64_t pool_bytes_ = 0;
  Fd command_memory_, report_memory_, arena_memory_, engine_event_;
  std::vector<Fd> device_events_;
  Mapping command_mapping_, report_mapping_, arena_;
  std::optional<RecordRing> commands_, reports_;
  std::deque<Report> received_;
  std::vector<wire::ArenaRange> inputs_, outputs_;
  std::map<std::pair<uint32_t, uint32_t>, Mapping> segments_;
  std::map<uint32_t, proto::ExecutorTensorSet> layouts_;
  uint64_t next_id_ = 1;
};

}  // namespace slice::testing
