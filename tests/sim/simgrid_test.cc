// SimGrid as an oracle: where no two copies share a link, an independent simulator of platforms
// must reach the same times. Built only where SimGrid is installed (Debian: libsimgrid-dev).
//
// Each device is an actor that takes the first of its ready ops and executes it; copies are
// SimGrid's. All cases run side by side, on hosts of their own, in one SimGrid engine (a process
// can have only one).
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <set>
#include <simgrid/s4u.hpp>
#include <string>
#include <vector>

#include "daemon/sim/simulator.h"
#include "tests/sim/snapshot_builder.h"

namespace slice::sim {
namespace {

namespace s4u = simgrid::s4u;

constexpr double kOverheadSeconds = 30e-6;
constexpr double kLatencySeconds = 20e-6;  // TransferEstimator's start: 20 us and 4 GB/s
constexpr double kBytesPerSecond = 4e9;

struct SimGridCase {
  Snapshot snapshot;
  std::vector<double> finish;  // seconds from now, by SimGrid
  std::vector<uint32_t> pending;
  std::vector<std::set<OpIndex>> ready;  // by device, lowest op first: ops are in queue order
  std::vector<s4u::Host*> hosts;
  s4u::MutexPtr mutex;
  s4u::ConditionVariablePtr changed;
  size_t left = 0;
};

// Chains and joins without copies: every op's device is its instance's.
Snapshot Local(uint64_t seed, size_t devices) {
  std::mt19937_64 rng(seed);
  SnapshotBuilder builder(devices);
  for (size_t i = 0; i < 6; ++i) {
    const uint32_t instance = builder.Online();
    std::vector<OpIndex> mine;
    for (size_t k = 0; k < 20; ++k) {
      OpSpec spec;
      spec.instance = instance;
      spec.state = OpState::kPlaced;
      spec.device = static_cast<DeviceIndex>(rng() % devices);
      spec.duration = static_cast<DurationNs>(100'000 + rng() % 1'000'000'000) / 100;
      if (!mine.empty()) spec.after.push_back(mine.back());
      if (mine.size() > 3 && rng() % 3 == 0) spec.after.push_back(mine[rng() % (mine.size() - 1)]);
      mine.push_back(builder.Op(spec));
    }
  }
  return builder.Build();
}

// One chain that wanders over the devices with its activation: one copy at a time.
Snapshot Wandering(uint64_t seed, size_t devices) {
  std::mt19937_64 rng(seed);
  SnapshotBuilder builder(devices);
  const uint32_t instance = builder.Online();
  OpIndex before = 0;
  TensorIndex activation = builder.Activation(1 << 20, instance, 1);
  for (size_t k = 0; k < 40; ++k) {
    OpSpec spec;
    spec.instance = instance;
    spec.state = OpState::kPlaced;
    spec.device = static_cast<DeviceIndex>(k == 0 ? 0 : rng() % devices);
    spec.duration = static_cast<DurationNs>(100'000 + rng() % 10'000'000);
    spec.reads = {activation};
    activation = builder.Activation(static_cast<int64_t>(1 + rng() % 1000) * 4'000, instance);
    spec.writes = {activation};
    if (k > 0) spec.after = {before};
    before = builder.Op(spec);
  }
  return builder.Build();
}

void Wake(SimGridCase* c) { c->changed->notify_all(); }

void MakeReady(SimGridCase* c, OpIndex op) {
  const std::unique_lock<s4u::Mutex> lock(*c->mutex);
  c->ready[c->snapshot.ops[op].device].insert(op);
  Wake(c);
}

void Arrive(SimGridCase* c, OpIndex op, size_t from) {
  if (--c->pending[op] != 0) return;
  const SnapOp& next = c->snapshot.ops[op];
  if (next.device == from || next.reads_begin == next.reads_end) {
    MakeReady(c, op);
    return;
  }
  const int64_t bytes = c->snapshot.tensors[c->snapshot.uses[next.reads_begin]].bytes;
  s4u::Actor::create("copy", c->hosts[from], [c, op, from, bytes] {
    s4u::this_actor::sleep_for(kOverheadSeconds);
    s4u::Comm::sendto(c->hosts[from], c->hosts[c->snapshot.ops[op].device],
                      static_cast<uint64_t>(bytes));
    MakeReady(c, op);
  });
}

void Device(SimGridCase* c, size_t device) {
  for (;;) {
    OpIndex op = kNone;
    {
      std::unique_lock<s4u::Mutex> lock(*c->mutex);
      while (c->ready[device].empty() && c->left > 0) c->changed->wait(lock);
      if (c->ready[device].empty()) return;
      op = *c->ready[device].begin();
      c->ready[device].erase(c->ready[device].begin());
    }
    s4u::this_actor::execute(static_cast<double>(c->snapshot.ops[op].duration));  // 1 flop = 1 ns
    c->finish[op] = s4u::Engine::get_clock();
    for (uint32_t e = c->snapshot.ops[op].successors_begin; e < c->snapshot.ops[op].successors_end;
         ++e) {
      Arrive(c, c->snapshot.edges[e], device);
    }
    const std::unique_lock<s4u::Mutex> lock(*c->mutex);
    if (--c->left == 0) Wake(c);
  }
}

TEST(SimGrid, Happy_TimesAgreeWithoutContention) {
  int argc = 1;
  std::string name = "simgrid_test";
  char* argv[] = {name.data(), nullptr};
  s4u::Engine engine(&argc, argv);
  // Plain latency + bytes / bandwidth, and times to the picosecond.
  s4u::Engine::set_config("network/model:CM02");
  s4u::Engine::set_config("network/TCP-gamma:0");
  s4u::Engine::set_config("network/crosstraffic:0");
  s4u::Engine::set_config("surf/precision:1e-12");
  s4u::Engine::set_config("maxmin/precision:1e-12");
  s4u::NetZone* const world = s4u::create_full_zone("world");
  std::vector<std::unique_ptr<SimGridCase>> cases;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const size_t devices = 1 + seed % 4;
    auto c = std::make_unique<SimGridCase>();
    c->snapshot = seed % 2 == 0 ? Local(seed, devices) : Wandering(seed, devices);
    c->finish.assign(c->snapshot.ops.size(), 0);
    for (const SnapOp& op : c->snapshot.ops) c->pending.push_back(op.pending);
    c->ready.resize(devices);
    c->left = c->snapshot.ops.size();
    c->mutex = s4u::Mutex::create();
    c->changed = s4u::ConditionVariable::create();
    for (size_t d = 0; d < devices; ++d) {
      c->hosts.push_back(
          world->create_host(std::to_string(seed) + "." + std::to_string(d), 1e9)->seal());
    }
    for (size_t a = 0; a < devices; ++a) {
      for (size_t b = 0; b < devices; ++b) {
        if (a == b) continue;
        s4u::Link* const link = world
                                    ->create_link(std::to_string(seed) + "." + std::to_string(a) +
                                                      "-" + std::to_string(b),
                                                  kBytesPerSecond)
                                    ->set_latency(kLatencySeconds)
                                    ->seal();
        world->add_route(c->hosts[a]->get_netpoint(), c->hosts[b]->get_netpoint(), nullptr, nullptr,
                         {s4u::LinkInRoute(link)}, false);
      }
    }
    for (OpIndex op = 0; op < c->snapshot.ops.size(); ++op) {
      if (c->pending[op] == 0) c->ready[c->snapshot.ops[op].device].insert(op);
    }
    cases.push_back(std::move(c));
  }
  world->seal();
  for (const auto& c : cases) {
    for (size_t d = 0; d < c->hosts.size(); ++d) {
      SimGridCase* const raw = c.get();
      s4u::Actor::create("device", c->hosts[d], [raw, d] { Device(raw, d); });
    }
  }
  engine.run();

  int64_t moved = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const SimGridCase& c = *cases[i];
    const estimate::TransferEstimator transfers(c.hosts.size());
    Options options;
    options.horizon = 3600 * kSecond;
    Simulator simulator(transfers, options);
    Timeline timeline;
    simulator.Run(c.snapshot, {}, &timeline);
    moved += timeline.bytes_moved;
    for (OpIndex op = 0; op < c.snapshot.ops.size(); ++op) {
      const double ours = static_cast<double>(timeline.finish[op] - c.snapshot.now) / 1e9;
      ASSERT_NEAR(ours, c.finish[op], 1e-6 * c.finish[op]) << "case " << i << ", op " << op;
    }
  }
  EXPECT_GT(moved, 0);
}

}  // namespace
}  // namespace slice::sim
