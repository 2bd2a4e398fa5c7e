// `slicectl whatif`: a submit that is tried out on a copy of the engine, and what is told about it.
// The copy handles it and runs as the engine would, so its prediction is the one that the engine
// would store; then the copy is thrown away.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "daemon/engine/engine_impl.h"
#include "daemon/gmg/json.h"
#include "daemon/gmg/reader.h"

namespace slice::engine {

using gmg::AccessEntry;
using gmg::JsonWriter;

namespace {

constexpr size_t kListedMax = 16;               // alternatives named in an error
constexpr size_t kEstimatesMax = 5;             // operators named in the answer
constexpr size_t kNameMax = 64;                 // bytes of a name, which a tenant chose
constexpr uint64_t kArena = uint64_t{1} << 62;  // its slots: beyond every real arena

// Hears what a copy has to say, and keeps it to itself.
class Silence final : public Sink {
 public:
  void ToExecutor(uint32_t, std::span<const std::byte>, DeviceIndex) override {}
  void Complete(TenantId, const wire::CompletionSlot& completion,
                const std::string& text) override {
    // Nothing runs: it can only have been refused.
    if (completion.cookie == 0) refusal = {static_cast<StatusCode>(completion.status), text};
  }
  void Trace(const TraceEvent&) override {}
  Status refusal;
};

bool Matches(const graph::Template& graph, const std::string& wanted) {
  return graph.name() == wanted ||
         (!wanted.empty() &&
          gmg::ContentHashText(graph.content_hash()).compare(0, wanted.size(), wanted) == 0);
}

// "a, b, c, and 4 more"
std::string List(const std::set<std::string>& items) {
  std::string text;
  size_t listed = 0;
  for (const std::string& item : items) {
    if (listed == kListedMax) break;
    text += (listed++ == 0 ? "" : ", ") + item;
  }
  if (items.size() > listed) text += ", and " + std::to_string(items.size() - listed) + " more";
  return text.empty() ? "none" : text;
}

std::string Short(const std::string& name) {
  size_t end = std::min(name.size(), kNameMax);
  while (end > 0 && end < name.size() && (static_cast<unsigned char>(name[end]) & 0xc0) == 0x80)
    --end;  // whole characters
  return name.substr(0, end);
}

std::string NameOf(const graph::Template& graph) {
  std::string text = "'";
  text += Short(graph.name());
  text += "' ";
  return text + gmg::ContentHashText(graph.content_hash());
}
std::string NameOf(const TenantConfig& tenant) {
  return "session " + std::to_string(tenant.id.value) + " '" + Short(tenant.name) + "'";
}

std::string Percent(int64_t percent) { return std::to_string(percent) + " %"; }

// The first level at which a candidate is worse than the chosen one (scheduling rules, section 5).
std::string WhyNot(const sched::CandidateScore& score, const sched::CandidateScore& chosen) {
  if (!score.feasible) return "memory is short there, or a pinned tensor is elsewhere";
  if (score.lateness_bucket > chosen.lateness_bucket) {
    return "online sequences would end " +
           std::to_string(score.lateness_bucket - chosen.lateness_bucket) +
           " ms later past their deadlines";
  }
  if (score.online_added_bucket > chosen.online_added_bucket) {
    return "online work would end " +
           Percent(score.online_added_bucket - chosen.online_added_bucket) + " later";
  }
  if (score.batch_finish_bucket > chosen.batch_finish_bucket) {
    return "it would end " + Percent(score.batch_finish_bucket - chosen.batch_finish_bucket) +
           " later";
  }
  if (score.bytes_moved > chosen.bytes_moved) return "more bytes would have to move";
  if (score.defer) return "waiting gains nothing";
  if (score.batch_finish > chosen.batch_finish) return "it would end later";
  return "no better: more is queued there, or it is not home";
}

}  // namespace

// One question: the engine, its copy, and the instance that the copy made of the submit.
class Hypothesis {
 public:
  Hypothesis(const EngineImpl& engine, const Binding& binding, std::span<std::byte> gmg_memory)
      : engine_(engine), copy_(engine, binding, gmg_memory, &silence_), binding_(&binding) {}

  // Errors: what the submit is refused with.
  Status Submit(const WhatIfQuery& query, TimeNs now);
  std::string Answer(TimeNs now);

 private:
  struct End {
    TimeNs batch = kNever, graph = kNever;  // kNever: not simulated, or beyond the horizon
  };
  struct Choice {     // of the first batch
    uint32_t op = 0;  // its first
    uint32_t op_count = 0;
    bool made_now = false;  // in the run; else what the policy says of the state after it
    sched::Decision decision;
    std::vector<End> ends;  // by candidate
  };
  void Note(bool made_now, const sched::Decision& decision, TimeNs now);
  void AskPolicy(TimeNs now);
  void AddWhen(JsonWriter* json, TimeNs now);
  void AddChoice(JsonWriter* json, TimeNs now);
  void AddEstimates(JsonWriter* json);
  void AddMemory(JsonWriter* json);
  void AddQueues(JsonWriter* json);
  int64_t MemoryNeeded(DomainIndex domain) const;
  sim::Rules rules() const {
    return {copy_.policy_->RespectsSlices(), copy_.policy_->ClassesOrderQueues()};
  }
  std::string_view DeviceName(DeviceIndex device) const {
    return engine_.config_.devices[device].name;
  }

  const EngineImpl& engine_;
  Silence silence_;
  EngineImpl copy_;
  const Binding* const binding_;  // the engine's
  Instance* instance_ = nullptr;  // the copy's
  std::vector<int64_t> peaks_, lanes_;
  std::optional<Choice> choice_;
};

Status Hypothesis::Submit(const WhatIfQuery& query, TimeNs now) {
  const Binding& binding = *binding_;
  const graph::Template& graph = *binding.graph->graph;
  std::vector<int64_t> symbols = query.symbols.empty() ? binding.last_symbols : query.symbols;
  graph::BoundSizes sizes;
  SLICE_RETURN_IF_ERROR(graph.Bind(symbols, &sizes));
  std::vector<wire::ArenaRange> inputs, outputs;
  uint64_t offset = kArena;
  const auto add = [&offset](std::vector<wire::ArenaRange>* slots, int64_t bytes) {
    slots->push_back({offset, static_cast<uint64_t>(bytes)});
    offset += static_cast<uint64_t>(bytes);
  };
  for (size_t i = 0; i < sizes.dynamic_count(); ++i) add(&inputs, sizes.dynamic_bytes(i));
  for (size_t i = 0; i < sizes.result_count(); ++i) add(&outputs, sizes.result_bytes(i));
  engine::Submit submit;
  submit.tenant = binding.config.tenant;
  submit.binding = binding.config.id;
  submit.symbols = symbols;
  submit.inputs = inputs;
  submit.outputs = outputs;
  if (query.service_class.has_value()) {
    OpenSequence open;
    open.tenant = submit.tenant;
    open.service_class = *query.service_class;
    open.sequence = UINT64_MAX;
    while (engine_.FindSequence(open.tenant, open.sequence) != nullptr) --open.sequence;
    submit.sequence = open.sequence;
    copy_.Handle(open, now);
  }
  copy_.Handle(submit, now);
  SLICE_RETURN_IF_ERROR(silence_.refusal);
  instance_ = copy_.FindTenant(submit.tenant)->instances.back();
  copy_.on_decision_ = [this, now](const Instance& instance, const sched::Decision& decision) {
    if (&instance == instance_ && !choice_.has_value()) Note(true, decision, now);
  };
  copy_.Run(now);
  copy_.ComputePeaks(*instance_, &peaks_, &lanes_);
  return Status::Ok();
}

std::string Hypothesis::Answer(TimeNs now) {
  const graph::Template& graph = *binding_->graph->graph;
  const TenantConfig& tenant = binding_->tenant->config;
  JsonWriter json;
  json.BeginObject().Key("graph").BeginObject();
  json.Field("name", std::string_view(Short(graph.name())))
      .Field("content_hash", std::string_view(gmg::ContentHashText(graph.content_hash())))
      .Field("ops", graph.groups().size());
  json.Key("symbols").BeginObject();
  for (uint32_t s = 0; s < graph.symbol_count(); ++s) {
    std::string name = Short(graph.program().symbols(static_cast<int>(s)).name());
    if (name.empty()) name.append("s").append(std::to_string(s));
    json.Field(name, instance_->symbols[s]);
  }
  json.EndObject().EndObject();
  json.Field("binding", binding_->config.id.value).Field("tenant", tenant.id.value);
  json.Field("tenant_name", std::string_view(tenant.name))
      .Field("class", instance_->service_class == ServiceClass::kOnline ? "online" : "offline")
      .Field("policy", copy_.policy_->name())
      .Field("home_device", DeviceName(tenant.home));
  AddWhen(&json, now);
  AddChoice(&json, now);
  AddEstimates(&json);
  AddMemory(&json);
  AddQueues(&json);
  json.Field("now_ns", now).EndObject();
  return json.Take();
}

// Its place in the simulation that predicted the finish.
void Hypothesis::AddWhen(JsonWriter* json, TimeNs now) {
  const char *state = "placed", *because = "";
  if (instance_->parked) {
    state = "parked";
    because = "the policy takes no offline work";
  } else if (instance_->phase == Phase::kWaiting) {
    bool fits = true;
    for (DomainIndex d = 0; d < peaks_.size(); ++d)
      fits = fits && MemoryNeeded(d) <= engine_.ledger_.pool_free(d);
    state = "waiting";
    because = !copy_.EarlierStarted(*instance_) ? "earlier users of its tensors have not started"
              : !fits                           ? "memory is short"
                                                : "others are before it in line for memory";
  } else if (instance_->unscheduled == instance_->ops.size()) {
    state = instance_->retry_at > now ? "deferred" : "started";
    because = instance_->retry_at > now ? "running it now would cost more than waiting"
                                        : "the devices have enough to do for now";
  }
  json->Field("state", state);
  if (*because != 0) json->Field("because", because);
  if (instance_->parked) return;
  copy_.BuildSnapshot(now, instance_);
  copy_.simulator_.Run(copy_.snapshot_, {}, rules(), &copy_.timeline_);
  TimeNs start = kNever;
  std::map<DeviceIndex, uint32_t> ops;  // by device
  for (size_t i = 0; i < copy_.snapshot_.ops.size(); ++i) {
    if (copy_.snapshot_.ops[i].instance != instance_->snapshot) continue;
    start = std::min(start, copy_.timeline_.start[i]);
    if (copy_.timeline_.start[i] != kNever) ++ops[copy_.timeline_.device[i]];
  }
  const TimeNs finish = instance_->predicted_finish;
  json->Field("predicted_finish_ns", finish).Field("finish_in_ns", finish - now);
  // Beyond the simulated time, the finish is the least that it can be, and the start unknown.
  const bool reached = copy_.timeline_.instance_finish[instance_->snapshot] != kNever;
  json->Field("beyond_horizon", !reached);
  if (start != kNever) {
    json->Field("predicted_start_ns", start)
        .Field("start_in_ns", start - now)
        .Field("duration_ns", finish - start);
  }
  json->Key("devices").BeginArray();
  for (const auto& [device, count] : ops)
    json->BeginObject().Field("device", DeviceName(device)).Field("ops", count).EndObject();
  json->EndArray();
}

// Called while snapshot, batch and batch_snapshot_ of the copy are those of the decision. Policies
// stop candidates that are beaten: here each is simulated to its end.
void Hypothesis::Note(bool made_now, const sched::Decision& decision, TimeNs now) {
  choice_.emplace();
  choice_->made_now = made_now;
  choice_->op = copy_.batch_[0];
  choice_->decision = decision;
  std::span<const sim::OpIndex> batch = copy_.batch_snapshot_;
  if (decision.op_count != 0)
    batch = batch.first(std::min<size_t>(decision.op_count, batch.size()));
  choice_->op_count = static_cast<uint32_t>(batch.size());
  sim::Timeline timeline;
  std::vector<sim::Placement> placements;
  for (const sched::CandidateScore& score : decision.candidates) {
    End& end = choice_->ends.emplace_back();
    if (score.defer) continue;
    placements.clear();
    for (const sim::OpIndex op : batch) placements.push_back({op, score.device, 0});
    copy_.simulator_.Run(copy_.snapshot_, placements, rules(), &timeline);
    end.batch = now;
    for (const sim::OpIndex op : batch) end.batch = std::max(end.batch, timeline.finish[op]);
    end.graph = timeline.instance_finish[instance_->snapshot];
  }
}

// Nothing was decided in the run: what the policy would say if it were asked.
void Hypothesis::AskPolicy(TimeNs now) {
  uint64_t devices = 0;
  if (instance_->parked || !copy_.CollectBatch(instance_, &copy_.batch_, &devices)) return;
  if (devices == 0) return;
  copy_.BuildSnapshot(now, instance_);
  copy_.batch_snapshot_.clear();
  for (const uint32_t op : copy_.batch_)
    copy_.batch_snapshot_.push_back(copy_.SnapshotOf(*instance_, op));
  Note(
      false,
      copy_.policy_->Decide(copy_.snapshot_, copy_.batch_snapshot_, instance_->tenant->config.home),
      now);
}

void Hypothesis::AddChoice(JsonWriter* json, TimeNs now) {
  if (!choice_.has_value()) AskPolicy(now);
  if (!choice_.has_value()) return;
  const sched::Decision& decision = choice_->decision;
  const auto chosen = std::find_if(
      decision.candidates.begin(), decision.candidates.end(),
      [&decision](const sched::CandidateScore& score) { return decision.Chose(score); });
  json->Key("decision").BeginObject();
  json->Field("made_now", choice_->made_now)
      .Field("op", choice_->op)
      .Field("op_count", choice_->op_count);
  json->Field("placed", decision.placed);
  if (decision.placed) json->Field("device", DeviceName(decision.device));
  if (!decision.placed) {
    const TimeNs retry_at = instance_->retry_at > now ? instance_->retry_at : decision.retry_at;
    json->Field("retry_in_ns", std::max<DurationNs>(retry_at - now, 0));
  }
  json->Key("candidates").BeginArray();
  uint64_t asked = 0;
  for (auto score = decision.candidates.begin(); score != decision.candidates.end(); ++score) {
    json->BeginObject().Field("defer", score->defer);
    if (!score->defer) json->Field("device", DeviceName(score->device));
    if (!score->defer) asked |= uint64_t{1} << score->device;
    json->Field("chosen", score == chosen).Field("feasible", score->feasible);
    const End& end = choice_->ends[static_cast<size_t>(score - decision.candidates.begin())];
    const TimeNs finish = end.batch != kNever ? end.batch : score->batch_finish;
    if (finish != kNever) json->Field("finish_in_ns", finish - now);
    if (end.graph != kNever) json->Field("graph_finish_in_ns", end.graph - now);
    json->Field("lateness_ms", score->lateness_bucket)
        .Field("online_added_percent", score->online_added_bucket)
        .Field("bytes_moved", score->bytes_moved);
    if (score != chosen && chosen != decision.candidates.end())
      json->Field("why_not", std::string_view(WhyNot(*score, *chosen)));
    json->EndObject();
  }
  const uint64_t allowed = copy_.AllowedDevices(*instance_, choice_->op);
  for (DeviceIndex device = 0; device < engine_.devices_.size(); ++device) {
    if ((asked >> device & 1) != 0) continue;
    const bool session = (instance_->tenant->config.device_mask >> device & 1) != 0;
    json->BeginObject().Field("defer", false).Field("device", DeviceName(device));
    json->Field("chosen", false).Field("feasible", false);
    json->Field("why_not", !session                       ? "the session may not use it"
                           : (allowed >> device & 1) == 0 ? "its tensors or memory are not there"
                                                          : "others promised more: not simulated");
    json->EndObject();
  }
  json->EndArray().EndObject();
}

// Operators by signature, the longest first: how well their durations are known.
void Hypothesis::AddEstimates(JsonWriter* json) {
  struct Share {
    std::string name;
    uint32_t ops = 0;
    DurationNs duration = 0, spread = 0;
    estimate::Prediction::Level level = estimate::Prediction::Level::kExact;  // the least specific
  };
  std::map<uint64_t, Share> shares;
  DurationNs work = 0, spread = 0;
  const uint8_t kind = engine_.config_.devices[instance_->tenant->config.home].kind;
  for (uint32_t op = 0; op < instance_->ops.size(); ++op) {
    const graph::Group& group = instance_->graph->groups()[op];
    const estimate::Prediction prediction =
        engine_.op_estimator_.Predict(copy_.FeaturesOf(*instance_, op, kind));
    const DurationNs duration = copy_.Duration(*instance_, op);
    Share& share = shares[group.signature];
    if (share.ops++ == 0) share.name = Short(group.name);
    share.duration += duration;
    share.spread += prediction.spread;
    share.level = std::min(share.level, prediction.level);
    work += duration;
    spread += prediction.spread;
  }
  std::vector<Share> longest;
  for (const auto& [signature, share] : shares) longest.push_back(share);
  std::stable_sort(longest.begin(), longest.end(),
                   [](const Share& a, const Share& b) { return a.duration > b.duration; });
  json->Field("work_ns", work).Field("work_spread_ns", spread);
  json->Key("estimates").BeginArray();
  for (size_t i = 0; i < std::min(longest.size(), kEstimatesMax); ++i) {
    const Share& share = longest[i];
    json->BeginObject().Field("op", std::string_view(share.name)).Field("ops", share.ops);
    json->Field("duration_ns", share.duration)
        .Field("spread_ns", share.spread)
        .Field("level", estimate::LevelName(share.level))
        .EndObject();
  }
  json->EndArray();
}

int64_t Hypothesis::MemoryNeeded(DomainIndex domain) const {
  int64_t needed = peaks_[domain];
  for (DeviceIndex device = 0; device < lanes_.size(); ++device) {
    if (engine_.DomainOf(device) == domain)
      needed += engine_.ledger_.LaneRaise(device, lanes_[device]);
  }
  return needed;
}

void Hypothesis::AddMemory(JsonWriter* json) {
  json->Key("memory").BeginArray();
  for (DomainIndex d = 0; d < peaks_.size(); ++d) {
    if (peaks_[d] == 0 && MemoryNeeded(d) == 0) continue;
    json->BeginObject().Field("domain", std::string_view(engine_.config_.domains[d].name));
    json->Field("peak_bytes", peaks_[d])
        .Field("workspace_bytes", MemoryNeeded(d) - peaks_[d])
        .Field("free_bytes", engine_.ledger_.pool_free(d))
        .Field("pool_bytes", engine_.ledger_.pool_capacity(d))
        .Field("fits", MemoryNeeded(d) <= engine_.ledger_.pool_free(d))
        .EndObject();
  }
  json->EndArray();
}

// What it must wait for on its pieces: reads for earlier writes, writes for everything.
void Hypothesis::AddQueues(JsonWriter* json) {
  std::set<std::pair<AccessEntry::Kind, uint32_t>> before;
  size_t entries = 0;
  for (const PieceUse& use : binding_->pieces) {
    for (const AccessEntry& entry : use.piece->queue.entries()) {
      if (!entry.write && !use.write) continue;
      ++entries;
      before.emplace(entry.kind, entry.owner);
    }
  }
  json->Key("access_queues").BeginObject();
  json->Field("pieces", binding_->pieces.size())
      .Field("entries_before", entries)
      .Field("users_before", before.size())
      .EndObject();
}

namespace {

// Which binding a question is about: of the graph that it names, in the session that it names.
Result<const Binding*> Choose(const std::vector<const Binding*>& bindings,
                              const WhatIfQuery& query) {
  const char* const wanted = query.graph.c_str();
  const auto graph_of = [](const Binding* binding) { return NameOf(*binding->graph->graph); };
  const auto session_of = [](const Binding* binding) { return NameOf(binding->tenant->config); };
  // Texts are for errors only: there may be thousands of bindings.
  const auto list = [](const std::vector<const Binding*>& of, const auto& text_of) {
    std::set<std::string> texts;
    for (const Binding* const binding : of) texts.insert(text_of(binding));
    return List(texts);
  };
  std::vector<const Binding*> bound, found;
  bool one_graph = true, one_session = true;
  for (const Binding* const binding : bindings) {
    const graph::Template& graph = *binding->graph->graph;
    if (query.tenant && binding->tenant->config.id != query.tenant) continue;
    bound.push_back(binding);
    if (!Matches(graph, query.graph)) continue;
    found.push_back(binding);
    one_graph &= graph.content_hash() == found[0]->graph->graph->content_hash();
    one_session &= binding->tenant == found[0]->tenant;
  }
  if (found.empty()) {
    const auto both = [&](const Binding* binding) {
      return graph_of(binding) + " of " + session_of(binding);
    };
    return Error(StatusCode::kInvalid, "no session%s has bound a graph '%.64s'; bound are: %s",
                 query.tenant ? " of that number" : "", wanted, list(bound, both).c_str());
  }
  if (!one_graph) {
    return Error(StatusCode::kInvalid, "'%.64s' is more than one graph: %s; say the content hash",
                 wanted, list(found, graph_of).c_str());
  }
  if (!one_session) {
    return Error(StatusCode::kInvalid,
                 "'%.64s' is bound in more than one session: %s; say which (--tenant)", wanted,
                 list(found, session_of).c_str());
  }
  return *std::max_element(found.begin(), found.end(), [](const Binding* a, const Binding* b) {
    return a->config.id < b->config.id;
  });
}

Status CheckSymbols(const Binding& binding, const WhatIfQuery& query) {
  const graph::Template& graph = *binding.graph->graph;
  const size_t given = query.symbols.empty() ? binding.last_symbols.size() : query.symbols.size();
  if (given == graph.symbol_count()) return Status::Ok();
  std::string names;
  for (const proto::Symbol& symbol : graph.program().symbols()) {
    names += (names.empty() ? " " : ", ") + Short(symbol.name()) + " (" +
             std::to_string(symbol.min()) + " to " + std::to_string(symbol.max()) + ")";
  }
  return Error(StatusCode::kInvalid,
               "graph %s needs %u symbols, %zu are given%s; in order (--symbol):%s",
               NameOf(graph).c_str(), graph.symbol_count(), query.symbols.size(),
               query.symbols.empty() ? " and nothing was submitted yet" : "",
               names.empty() ? " none" : names.c_str());
}

}  // namespace

Result<std::string> EngineImpl::WhatIf(const WhatIfQuery& query, TimeNs now) const {
  if (!executor_up_ && !given_up_)
    return Error(StatusCode::kExecutorLost, "the executor is being started; try again");
  std::vector<const Binding*> bindings;
  for (const auto& [id, binding] : bindings_) {
    if (!binding->removing && !binding->tenant->removing) bindings.push_back(binding.get());
  }
  SLICE_ASSIGN_OR_RETURN(const Binding* const binding, Choose(bindings, query));
  SLICE_RETURN_IF_ERROR(CheckSymbols(*binding, query));
  const TenantConfig& tenant = binding->tenant->config;
  if (query.service_class == ServiceClass::kOnline && tenant.class_max == ServiceClass::kOffline) {
    return Error(StatusCode::kInvalid,
                 "%s may only be offline, and would be whatever it asks for; ask for --class "
                 "offline, or for none",
                 NameOf(tenant).c_str());
  }
  // Zero pages that are made when they are touched: few are.
  const size_t bytes = GmgBytes(config_);
  const std::unique_ptr<void, void (*)(void*)> memory(std::calloc(1, bytes + 64), std::free);
  if (memory == nullptr)
    return Error(StatusCode::kNoMemory, "no %zu bytes for a copy of the graph store", bytes);
  void* aligned = memory.get();
  size_t space = bytes + 64;
  std::align(64, bytes, aligned, space);
  Hypothesis hypothesis(*this, *binding, {static_cast<std::byte*>(aligned), bytes});
  SLICE_RETURN_IF_ERROR(hypothesis.Submit(query, now));
  return hypothesis.Answer(now);
}

}  // namespace slice::engine
