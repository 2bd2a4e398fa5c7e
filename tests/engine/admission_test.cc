// Memory admission without hold-and-wait (docs/gmg.md), on the engine itself: 40 random instances
// that each fit alone, on 4 domains at tight capacity, over thousands of seeds. All of them finish.
// The control lets an op start whenever its own peak fits right now: it deadlocks on most seeds,
// and where it does not, reservations take hardly longer.
#include <array>
#include <map>
#include <optional>

#include "tests/testing/engine_fixture.h"

namespace slice::testing {
namespace {

constexpr size_t kDomains = 4;
constexpr size_t kInstances = 40;
constexpr int64_t kUnit = 4096;

// A graph whose ops are pinned to domains.
struct PinnedGraph {
  struct Op {
    DomainIndex domain = 0;
    int64_t bytes = 0;
    DurationNs duration = 0;
    std::vector<uint32_t> inputs;  // earlier ops
  };
  std::vector<Op> ops;
  std::vector<uint32_t> consumers;

  // `strays`: percentage of ops that are pinned anywhere; the others are in the graph's home. Most
  // outputs are small; a large one now and then makes the peak.
  PinnedGraph(std::mt19937_64* random, int strays) {
    const auto pick = [random](int64_t low, int64_t high) {
      return low + static_cast<int64_t>((*random)() % static_cast<uint64_t>(high - low + 1));
    };
    const auto any_domain = [&] { return static_cast<DomainIndex>(pick(0, kDomains - 1)); };
    const auto count = static_cast<uint32_t>(pick(4, 8));
    const DomainIndex home = any_domain();
    for (uint32_t i = 0; i < count; ++i) {
      Op op;
      op.domain = pick(0, 99) < strays ? any_domain() : home;
      op.bytes = (pick(0, 9) == 0 ? pick(8, 16) : pick(1, 2)) * kUnit;
      op.duration = pick(1, 3) * kMillisecond;
      const int64_t inputs = i == 0 ? 0 : pick(1, 2);
      for (int64_t n = 0; n < inputs; ++n) {
        const auto from = static_cast<uint32_t>(std::max<int64_t>(0, int64_t{i} - pick(1, 2)));
        if (std::find(op.inputs.begin(), op.inputs.end(), from) == op.inputs.end())
          op.inputs.push_back(from);
      }
      ops.push_back(op);
    }
    consumers.assign(count, 0);
    for (const Op& op : ops)
      for (const uint32_t from : op.inputs) ++consumers[from];
  }

  std::shared_ptr<const graph::Template> Build(std::vector<DomainIndex>* homes) const {
    GraphBuilder graph("pinned");
    std::vector<uint32_t> pins, values;
    const uint32_t input = graph.Dynamic("x", 256);
    for (size_t i = 0; i < ops.size(); ++i) {
      const std::string number = std::to_string(i);
      pins.push_back(graph.Mutable("m" + number, 4, false));
      homes->push_back(ops[i].domain);
    }
    for (size_t i = 0; i < ops.size(); ++i) {
      GraphBuilder::Use use;
      use.reads = {pins[i]};
      std::vector<uint32_t> in;
      for (const uint32_t from : ops[i].inputs) in.push_back(values[from]);
      if (in.empty()) in.push_back(input);
      values.push_back(graph.Op("op" + std::to_string(i) + "_" + std::to_string(ops[i].duration),
                                in, ops[i].bytes, ops[i].duration, use));
    }
    graph.Output(values.back());
    return graph.Build();
  }
};

// One instance of the control and what it holds.
struct Held {
  explicit Held(const PinnedGraph* of)
      : graph(of), copies(of->ops.size(), 0), left(of->consumers), done(of->ops.size(), false) {}
  // Bytes that `op` needs in its domain right now: its output and copies of inputs.
  int64_t Needs(uint32_t op) const {
    const PinnedGraph::Op& entry = graph->ops[op];
    int64_t bytes = entry.bytes;
    for (const uint32_t from : entry.inputs)
      if ((copies[from] >> entry.domain & 1) == 0) bytes += graph->ops[from].bytes;
    return bytes;
  }
  void Begin(uint32_t op, std::array<int64_t, kDomains>* free) {
    const PinnedGraph::Op& entry = graph->ops[op];
    (*free)[entry.domain] -= Needs(op);
    for (const uint32_t from : entry.inputs) copies[from] |= 1u << entry.domain;
    copies[op] |= 1u << entry.domain;
    started.push_back(op);
  }
  void End(uint32_t op, std::array<int64_t, kDomains>* free) {
    done[op] = true;
    ++finished;
    for (const uint32_t from : graph->ops[op].inputs) {
      if (--left[from] == 0) Drop(from, free);
    }
    if (left[op] == 0) Drop(op, free);
  }
  bool Ready(uint32_t op) const {
    if (std::find(started.begin(), started.end(), op) != started.end()) return false;
    return std::all_of(graph->ops[op].inputs.begin(), graph->ops[op].inputs.end(),
                       [this](uint32_t from) { return done[from]; });
  }
  void Drop(uint32_t op, std::array<int64_t, kDomains>* free) {
    for (size_t d = 0; d < kDomains; ++d)
      if ((copies[op] >> d & 1) != 0) (*free)[d] += graph->ops[op].bytes;
    copies[op] = 0;
  }
  const PinnedGraph* graph;
  std::vector<uint32_t> copies;  // by op: domains that hold its output
  std::vector<uint32_t> left;
  std::vector<bool> done;
  std::vector<uint32_t> started;
  size_t finished = 0;
};

// Most that an instance holds in each domain when its ops run alone, in order.
int64_t PeakAlone(const PinnedGraph& graph) {
  std::array<int64_t, kDomains> free{};
  int64_t lowest = 0;
  Held alone(&graph);
  for (uint32_t op = 0; op < graph.ops.size(); ++op) {
    alone.Begin(op, &free);
    lowest = std::min(lowest, *std::min_element(free.begin(), free.end()));
    alone.End(op, &free);
  }
  return -lowest;
}

// The control: a device takes the first op in its queue whose own peak fits right now. Returns the
// makespan; nothing when it deadlocks.
std::optional<TimeNs> CheckingPeaksOnly(const std::vector<PinnedGraph>& graphs, int64_t pool) {
  std::array<int64_t, kDomains> free;
  free.fill(pool);
  std::vector<Held> instances;
  size_t left = 0;
  for (const PinnedGraph& graph : graphs) {
    instances.emplace_back(&graph);
    left += graph.ops.size();
  }
  std::multimap<TimeNs, std::pair<size_t, uint32_t>> running;  // by finish
  std::array<bool, kDomains> busy{};
  std::array<std::vector<std::pair<size_t, uint32_t>>, kDomains> ready;  // in the order they came
  for (size_t i = 0; i < graphs.size(); ++i) ready[graphs[i].ops[0].domain].push_back({i, 0});
  TimeNs now = 0;
  while (left > 0) {
    for (size_t d = 0; d < kDomains; ++d) {
      if (busy[d]) continue;
      const auto fits = std::find_if(ready[d].begin(), ready[d].end(), [&](const auto& ref) {
        return instances[ref.first].Needs(ref.second) <= free[d];
      });
      if (fits == ready[d].end()) continue;
      const auto [i, op] = *fits;
      ready[d].erase(fits);
      instances[i].Begin(op, &free);
      busy[d] = true;
      running.emplace(now + graphs[i].ops[op].duration, std::pair(i, op));
    }
    if (running.empty()) return std::nullopt;
    const auto next = running.begin();
    now = next->first;
    const auto [i, op] = next->second;
    running.erase(next);
    instances[i].End(op, &free);
    busy[graphs[i].ops[op].domain] = false;
    for (uint32_t user = op + 1; user < graphs[i].ops.size(); ++user) {
      const auto& in = graphs[i].ops[user].inputs;
      const bool uses = std::find(in.begin(), in.end(), op) != in.end();
      if (uses && instances[i].Ready(user)) ready[graphs[i].ops[user].domain].push_back({i, user});
    }
    --left;
  }
  return now;
}

// What the engine needs for all of them; 0 when some never end.
TimeNs RunOnEngine(const std::vector<PinnedGraph>& graphs, int64_t pool) {
  VirtualOptions options;  // the control has no latencies either
  options.command_latency = options.report_latency = options.copy_latency = kMicrosecond;
  options.copy_ns_per_byte = 0;
  Simulation sim(MakeConfig(kDomains, pool), options);
  const TenantId tenant = sim.AddTenant(ServiceClass::kOnline);
  std::vector<Simulation::Service> services;
  for (const PinnedGraph& graph : graphs) {
    std::vector<DomainIndex> homes;
    const std::shared_ptr<const graph::Template> built = graph.Build(&homes);
    services.push_back(sim.AddServiceSpread(tenant, built, homes));
  }
  std::vector<uint64_t> cookies;
  for (const Simulation::Service& service : services) cookies.push_back(sim.Submit(service));
  if (!sim.RunAll(60 * kSecond)) {
    ADD_FAILURE() << "still busy\n" << sim.engine().StatusJson(sim.now());
    return 0;
  }
  for (const uint64_t cookie : cookies)
    EXPECT_EQ(sim.StatusOf(tenant, cookie), SLICE_OK) << sim.Find(tenant, cookie)->text;
  ExpectClean(sim);
  TimeNs makespan = 0;
  for (const VirtualExecutor::OpRun& op : sim.executor().ops)
    makespan = std::max(makespan, op.finish);
  return makespan;
}

struct Totals {
  int seeds = 0, deadlocks = 0;
  double ratios = 0;      // engine's makespan over the control's where that finishes, summed
  double one_by_one = 0;  // likewise of one instance after the other
  int finished() const { return seeds - deadlocks; }
};

// `tightness`: a domain's pool over the largest peak of any instance alone.
Totals RunSeeds(uint64_t first, int count, int strays, double tightness) {
  Totals totals;
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(count); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<PinnedGraph> graphs;
    int64_t peak = 0;
    DurationNs work = 0;
    for (size_t i = 0; i < kInstances; ++i) {
      graphs.emplace_back(&random, strays);
      peak = std::max(peak, PeakAlone(graphs.back()));
      for (const PinnedGraph::Op& op : graphs.back().ops) work += op.duration;
    }
    const auto pool = static_cast<int64_t>(static_cast<double>(peak) * tightness);
    const TimeNs makespan = RunOnEngine(graphs, pool);
    if (::testing::Test::HasFailure()) break;
    const std::optional<TimeNs> control = CheckingPeaksOnly(graphs, pool);
    ++totals.seeds;
    totals.deadlocks += !control;
    if (!control) continue;
    totals.ratios += static_cast<double>(makespan) / static_cast<double>(*control);
    totals.one_by_one += static_cast<double>(work) / static_cast<double>(*control);
  }
  return totals;
}

// Shards, so that they may run side by side.
class EngineAdmission : public ::testing::TestWithParam<uint64_t> {};

TEST_P(EngineAdmission, Happy_spread_instances_all_finish_and_the_control_deadlocks) {
  const Totals totals = RunSeeds(1 + 1000 * GetParam(), 200, 100, 1.25);
  ASSERT_FALSE(HasFailure());
  EXPECT_GE(totals.deadlocks, 180) << "the control is what the rule is for";
}

TEST_P(EngineAdmission, Happy_where_the_control_finishes_reservations_take_no_longer) {
  const Totals totals = RunSeeds(100'001 + 1000 * GetParam(), 300, 10, 1.5);
  ASSERT_FALSE(HasFailure());
  EXPECT_GE(totals.deadlocks, 200);
  ASSERT_GE(totals.finished(), 20);
  EXPECT_LE(totals.ratios / totals.finished(), 1.05);
  EXPECT_GE(totals.one_by_one / totals.finished(), 2) << "one at a time would not pass";
  RecordProperty("finished_by_control", totals.finished());
  RecordProperty("makespan_ratio", std::to_string(totals.ratios / totals.finished()));
}

INSTANTIATE_TEST_SUITE_P(Seeds, EngineAdmission, ::testing::Range<uint64_t>(0, 6));

}  // namespace
}  // namespace slice::testing
