// Figures of the Global Mapping Graph. Prints {"figures": [...]}; times are thread CPU time.
//
//   gmg_bytes_per_live_op    100,000 live ops in a real engine: records of the segment (ops,
//   tensors,
//                            instances) and every heap byte that an engine without them lacks
//   gmg_instantiate_us_34    binding the sizes of a 34-op layer-grain decoder and filling its
//   block,
//                            beside 1,000 other live instances
//   gmg_done_ns              per op, over whole instances: placed, issued, launched and done, both
//                            frontiers moved, the block's counter opened and closed
//   gmg_reader_slowdown_pct  an engine's CPU time from submit to end of requests while 4 threads
//   read
//                            its segment at full speed, against 4 reading a private copy
#include <malloc.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <thread>

#include "common/clock.h"
#include "daemon/gmg/gmg.h"
#include "daemon/gmg/reader.h"
#include "tests/testing/bare_engine.h"
#include "tests/testing/graph_builder.h"

namespace {
std::atomic<int64_t> heap_bytes{0};  // as the allocator rounds them
void* Allocate(size_t bytes) {
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) std::abort();
  // Each block also costs the allocator a header of one word.
  heap_bytes.fetch_add(static_cast<int64_t>(malloc_usable_size(memory) + sizeof(void*)),
                       std::memory_order_relaxed);
  return memory;
}
void Release(void* memory) {
  if (memory == nullptr) return;
  heap_bytes.fetch_sub(static_cast<int64_t>(malloc_usable_size(memory) + sizeof(void*)),
                       std::memory_order_relaxed);
  std::free(memory);
}
}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes); }
void* operator new[](size_t bytes) { return Allocate(bytes); }
void operator delete(void* memory) noexcept { Release(memory); }
void operator delete[](void* memory) noexcept { Release(memory); }
void operator delete(void* memory, size_t) noexcept { Release(memory); }
void operator delete[](void* memory, size_t) noexcept { Release(memory); }

namespace {

using slice::gmg::Gmg;
using slice::gmg::OpState;

constexpr int kLayers = 32;
constexpr uint32_t kOps = kLayers + 2;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Segment {
  explicit Segment(uint32_t live_ops) {
    const auto capacity = slice::gmg::Capacity::For(2, 2, live_ops);
    const size_t bytes = Gmg::Bytes(capacity);
    memory = static_cast<std::byte*>(std::aligned_alloc(4096, bytes));
    std::memset(memory, 0, bytes);
    span = {memory, bytes};
    gmg = std::make_unique<Gmg>(span, capacity, 1, 1);
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() { std::free(memory); }
  std::byte* memory;
  std::span<std::byte> span;
  std::unique_ptr<Gmg> gmg;
};

uint32_t Add(Gmg* gmg, const slice::graph::Template& graph, const slice::graph::BoundSizes& sizes,
             uint64_t id) {
  const uint32_t slot = gmg->AddInstance(graph, sizes);
  SLICE_CHECK(slot != slice::gmg::RangeAllocator::kNone, "the segment is full");
  gmg->Write(slot).id = id;
  return slot;
}

// One instance from its placement to its end, as the engine's events come: a batch placed, then
// each op issued, launched and done in events of their own.
void RunInstance(Gmg* gmg, const slice::graph::Template& graph, uint32_t slot) {
  for (uint32_t op = 0; op < kOps; ++op) gmg->SetOpState(slot, graph, op, OpState::kPlaced);
  gmg->CloseWrites();
  for (uint32_t op = 0; op < kOps; ++op) {
    gmg->SetOpState(slot, graph, op, OpState::kIssued);
    gmg->SetOpState(slot, graph, op, OpState::kLaunched);
    gmg->CloseWrites();
    gmg->SetOpState(slot, graph, op, OpState::kDone);
    gmg->CloseWrites();
  }
}

double InstantiateMicroseconds(const slice::graph::Template& graph) {
  Segment segment(100'000);
  std::mt19937_64 random(1);
  slice::graph::BoundSizes sizes;
  std::vector<uint32_t> live;
  int64_t tokens = 1;
  uint64_t id = 1;
  for (int i = 0; i < 1000; ++i) {
    SLICE_CHECK(graph.Bind({&tokens, 1}, &sizes).ok(), "bind");
    live.push_back(Add(segment.gmg.get(), graph, sizes, id++));
  }
  std::vector<double> samples;
  for (int round = 0; round < 200; ++round) {
    constexpr int kBatch = 50;
    for (int i = 0; i < kBatch; ++i) {  // random holes, as instances that end leave them
      std::swap(live[random() % live.size()], live.back());
      segment.gmg->FreeInstance(live.back());
      live.pop_back();
    }
    segment.gmg->CloseWrites();
    const slice::DurationNs before = slice::ThreadCpuNow();
    for (int i = 0; i < kBatch; ++i) {
      tokens = 1 + (tokens + 37) % 4096;
      SLICE_CHECK(graph.Bind({&tokens, 1}, &sizes).ok(), "bind");
      live.push_back(Add(segment.gmg.get(), graph, sizes, id++));
      segment.gmg->CloseWrites();
    }
    samples.push_back(static_cast<double>(slice::ThreadCpuNow() - before) / kBatch / 1000);
  }
  return Median(samples);
}

double DoneNanoseconds(const slice::graph::Template& graph) {
  Segment segment(100'000);
  slice::graph::BoundSizes sizes;
  const int64_t tokens = 1;
  SLICE_CHECK(graph.Bind({&tokens, 1}, &sizes).ok(), "bind");
  std::vector<double> samples;
  for (int round = 0; round < 100; ++round) {
    constexpr uint32_t kInstances = 1000;
    std::vector<uint32_t> slots;
    for (uint32_t i = 0; i < kInstances; ++i)
      slots.push_back(Add(segment.gmg.get(), graph, sizes, i + 1));
    segment.gmg->CloseWrites();
    const slice::DurationNs before = slice::ThreadCpuNow();
    for (const uint32_t slot : slots) RunInstance(segment.gmg.get(), graph, slot);
    samples.push_back(static_cast<double>(slice::ThreadCpuNow() - before) / kInstances / kOps);
    for (const uint32_t slot : slots) segment.gmg->FreeInstance(slot);
    segment.gmg->CloseWrites();
  }
  return Median(samples);
}

// An engine with services of one tenant, and submits of 34 ops each.
struct Load {
  static constexpr size_t kServices = 50;
  Load(uint32_t live_ops_max, std::shared_ptr<const slice::graph::Template> of)
      : graph(std::move(of)) {
    slice::engine::Config config;
    for (size_t d = 0; d < 2; ++d) {
      config.devices.push_back({"cpu" + std::to_string(d), static_cast<slice::DomainIndex>(d), 0});
      config.domains.push_back({"d" + std::to_string(d), int64_t{1} << 40, int64_t{1} << 40});
    }
    config.live_ops_max = live_ops_max;
    config.tenant_queue_max = live_ops_max;
    bare = std::make_unique<slice::testing::BareEngine>(config);
    AddTenant(slice::ServiceClass::kOnline);
  }
  // The next submits are its.
  void AddTenant(slice::ServiceClass service_class) {
    slice::engine::TenantConfig config;
    config.id = tenant = {tenant.value + 1};
    config.class_max = service_class;
    SLICE_CHECK(bare->engine().AddTenant(config, bare->now()).ok(), "tenant");
    bindings.clear();
    for (size_t s = 0; s < kServices; ++s) bindings.push_back(bare->AddService(tenant, graph));
  }
  void Submit() {
    const int64_t tokens = 1 + count % 64;
    slice::engine::Submit request;
    request.tenant = tenant;
    request.cookie = count + 1;
    request.binding = bindings[count % kServices];
    request.symbols = {&tokens, 1};
    const slice::wire::ArenaRange input{0, static_cast<uint64_t>(8 * tokens)};
    const slice::wire::ArenaRange output{uint64_t{count} << 24,
                                         static_cast<uint64_t>(64'000 * tokens)};
    request.inputs = {&input, 1};
    request.outputs = {&output, 1};
    bare->engine().Handle(request, bare->now());
    SLICE_CHECK(bare->engine().counters().refused == 0, "a submit was refused");
    ++count;
  }
  std::shared_ptr<const slice::graph::Template> graph;
  std::unique_ptr<slice::testing::BareEngine> bare;
  slice::TenantId tenant;
  std::vector<slice::BindingId> bindings;
  uint32_t count = 0;
};

// Median of paired rounds: 4 threads read the segment of a working engine, or a copy of it.
double ReaderSlowdownPercent(const std::shared_ptr<const slice::graph::Template>& graph) {
  constexpr int kRounds = 60, kRequests = 150;
  Load load(100'000, graph);
  for (int i = 0; i < kRequests; ++i) {  // warm
    load.Submit();
    load.bare->Step();
  }
  constexpr uint32_t kParked = 100;  // live all the time, so that there is something to read
  SLICE_CHECK(load.bare->engine().SetPolicy("online-only", load.bare->now()).ok(), "policy");
  load.AddTenant(slice::ServiceClass::kOffline);
  for (uint32_t i = 0; i < kParked; ++i) load.Submit();
  load.AddTenant(slice::ServiceClass::kOnline);
  const std::span<std::byte> segment = load.bare->gmg_memory();
  const std::unique_ptr<std::byte, void (*)(void*)> copy(
      static_cast<std::byte*>(std::aligned_alloc(4096, segment.size())), std::free);
  std::memcpy(copy.get(), segment.data(), segment.size());
  std::atomic<size_t> reading{0};
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> scans{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < 4; ++r) {
    readers.emplace_back([&] {
      const std::array<slice::gmg::Reader, 2> segments{
          *slice::gmg::Reader::Open({copy.get(), segment.size()}),
          *slice::gmg::Reader::Open(segment)};
      while (!stop.load(std::memory_order_relaxed)) {
        const size_t which = reading.load(std::memory_order_relaxed);
        SLICE_CHECK(segments[which].Instances().size() >= kParked, "instances are missing");
        scans.fetch_add(1, std::memory_order_relaxed);
      }
    });
  }
  std::vector<double> ratios;
  for (int round = 0; round < kRounds; ++round) {
    double cpu[2];
    for (size_t turn = 0; turn < 2; ++turn) {
      const size_t which = (static_cast<size_t>(round) + turn) % 2;
      reading.store(which, std::memory_order_relaxed);
      const uint64_t from = scans.load(std::memory_order_relaxed);
      while (scans.load(std::memory_order_relaxed) < from + 8)
        std::this_thread::yield();  // until nobody reads the other one
      const slice::DurationNs before = slice::ThreadCpuNow();
      for (int i = 0; i < kRequests; ++i) {
        load.Submit();
        load.bare->Step();
      }
      cpu[which] = static_cast<double>(slice::ThreadCpuNow() - before);
    }
    ratios.push_back(cpu[1] / cpu[0]);
  }
  stop.store(true);
  for (std::thread& reader : readers) reader.join();
  return (Median(ratios) - 1) * 100;
}

// Against an engine with the same tenants, graphs, tensors and bindings that is made for next to no
// live ops: what is set aside for them at the start counts as well.
double BytesPerLiveOp(const std::shared_ptr<const slice::graph::Template>& graph) {
  constexpr uint32_t kLiveOps = 100'000;
  const auto heap_of = [](auto make) {
    const int64_t before = heap_bytes.load();
    const std::unique_ptr<Load> load = make();
    return heap_bytes.load() - before;
  };
  const int64_t idle = heap_of([&] { return std::make_unique<Load>(kOps, graph); });
  int64_t segment = 0, ops = 0;
  const int64_t full = heap_of([&] {
    auto load = std::make_unique<Load>(kLiveOps, graph);
    while ((load->count + 1) * kOps <= kLiveOps) load->Submit();
    load->bare->engine().Run(load->bare->now());  // all are started, the first are issued
    const auto reader = *slice::gmg::Reader::Open(load->bare->gmg_memory());
    for (const slice::gmg::InstanceView& instance : reader.Instances()) {
      ops += static_cast<int64_t>(instance.ops.size());
      segment += static_cast<int64_t>(sizeof(slice::gmg::InstanceRecord) +
                                      instance.ops.size() * sizeof(slice::gmg::OpRecord) +
                                      instance.tensors.size() * sizeof(slice::gmg::TensorRecord));
    }
    SLICE_CHECK(ops == int64_t{load->count} * kOps, "instances are missing");
    return load;
  });
  const double heap = static_cast<double>(full - idle) / static_cast<double>(ops);
  const double shown = static_cast<double>(segment) / static_cast<double>(ops);
  std::fprintf(stderr, "%lld live ops: segment %.1f, heap %.1f bytes per op\n",
               static_cast<long long>(ops), shown, heap);
  return shown + heap;
}

}  // namespace

int main() {
  const auto graph = slice::testing::SymbolicLlama(kLayers, 4096, 4096);
  const double bytes = BytesPerLiveOp(graph);
  const double instantiate = InstantiateMicroseconds(*graph);
  const double done = DoneNanoseconds(*graph);
  const double slowdown = ReaderSlowdownPercent(graph);
  std::printf(
      "{\"figures\": [{\"name\": \"gmg_bytes_per_live_op\", \"value\": %.1f, \"unit\": \"bytes\"}, "
      "{\"name\": \"gmg_instantiate_us_34\", \"value\": %.2f, \"unit\": \"us\"}, "
      "{\"name\": \"gmg_done_ns\", \"value\": %.1f, \"unit\": \"ns\"}, "
      "{\"name\": \"gmg_reader_slowdown_pct\", \"value\": %.2f, \"unit\": \"percent\"}]}\n",
      bytes, instantiate, done, slowdown);
  return EXIT_SUCCESS;
}
