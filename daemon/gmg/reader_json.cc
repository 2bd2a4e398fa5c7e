// What the reader sees as JSON texts: `slicectl graphs --json` and `slicectl explain --json`.
#include <algorithm>

#include "daemon/gmg/json.h"
#include "daemon/gmg/reader.h"

namespace slice::gmg {

namespace {
void WriteOps(const InstanceView& instance, const std::vector<TemplateView>& templates,
              JsonWriter* json) {
  const auto graph = std::find_if(templates.begin(), templates.end(), [&](const TemplateView& t) {
    return t.id == instance.template_id;
  });
  json->Key("ops").BeginArray();
  for (size_t op = 0; op < instance.ops.size(); ++op) {
    const OpView& o = instance.ops[op];
    json->BeginObject().Field("op", op);
    if (graph != templates.end() && op < graph->group_names.size()) {
      json->Field("name", std::string_view(graph->group_names[op]));
    }
    json->Field("state", OpStateName(o.state))
        .Field("home_domain", o.home_domain)
        .Field("pending", o.pending);
    if (o.device != kNoDevice) json->Field("device", o.device);
    json->Field("duration_ns", o.duration_ns)
        .Field("issue_ns", o.issue_ns)
        .Field("start_ns", o.start_ns);
    json->Field("finish_ns", o.finish_ns).Field("predicted_start_ns", o.predicted_start_ns);
    json->Field("predicted_finish_ns", o.predicted_finish_ns).EndObject();
  }
  json->EndArray();
}
}  // namespace

std::string Reader::GraphsJson(bool with_ops) const {
  JsonWriter json;
  json.BeginObject().Field("epoch", epoch()).Field("pid", daemon_pid());
  json.Field("policy", std::string_view(policy())).Field("updated_ns", updated_ns());
  json.Key("devices").BeginArray();
  for (const DeviceView& d : Devices()) {
    json.BeginObject()
        .Field("device", d.index)
        .Field("name", std::string_view(d.name))
        .Field("domain", d.domain);
    json.Field("running_instance", d.running_instance)
        .Field("running_op", d.running_op)
        .Field("issued", d.issued);
    json.Field("placed", d.placed).Field("ops_done", d.ops_done).Field("busy_ns", d.busy_ns);
    json.Field("free_at_ns", d.free_at_ns)
        .Field("hosts_online", d.hosts_online)
        .Field("overrun", d.overrun);
    json.Field("phantom_until_ns", d.phantom_until_ns).EndObject();
  }
  json.EndArray().Key("domains").BeginArray();
  for (const DomainView& d : Domains()) {
    json.BeginObject()
        .Field("domain", d.index)
        .Field("name", std::string_view(d.name))
        .Field("pool_bytes", d.pool_bytes);
    json.Field("lane_bytes", d.lane_bytes)
        .Field("reserved_bytes", d.reserved_bytes)
        .Field("granted_bytes", d.granted_bytes);
    json.Field("retained_bytes", d.retained_bytes)
        .Field("retained_bytes_max", d.retained_bytes_max)
        .EndObject();
  }
  json.EndArray().Key("tenants").BeginArray();
  for (const TenantView& t : Tenants()) {
    json.BeginObject()
        .Field("tenant", t.id)
        .Field("name", std::string_view(t.name))
        .Field("uid", t.uid)
        .Field("pid", t.pid);
    json.Field("class", t.online ? "online" : "offline").Field("live_instances", t.live_instances);
    json.Field("pool_bytes", t.pool_bytes).Field("retained_bytes", t.retained_bytes).EndObject();
  }
  const std::vector<TemplateView> templates = Templates();
  json.EndArray().Key("templates").BeginArray();
  for (const TemplateView& t : templates) {
    json.BeginObject()
        .Field("template", t.id)
        .Field("name", std::string_view(t.name))
        .Field("content_hash", std::string_view(ContentHashText(t.content_hash)))
        .Field("groups", t.group_names.size())
        .EndObject();
  }
  json.EndArray().Key("instances").BeginArray();
  for (const InstanceView& i : Instances()) {
    json.BeginObject()
        .Field("instance", i.id)
        .Field("state", InstanceStateName(i.state))
        .Field("tenant", i.tenant);
    json.Field("class", i.online ? "online" : "offline")
        .Field("priority", i.priority)
        .Field("template", i.template_id);
    json.Field("sequence", i.sequence_id)
        .Field("attempt", i.attempt)
        .Field("op_count", i.ops.size())
        .Field("ops_done", i.ops_done);
    json.Field("frontier_unscheduled", i.frontier_unscheduled)
        .Field("frontier_scheduled", i.frontier_scheduled);
    json.Field("submit_ns", i.submit_ns)
        .Field("start_ns", i.start_ns)
        .Field("predicted_finish_ns", i.predicted_finish_ns);
    json.Field("deadline_ns", i.deadline_ns);
    if (with_ops) WriteOps(i, templates, &json);
    json.EndObject();
  }
  json.EndArray().Key("sequences").BeginArray();
  for (const SequenceView& s : Sequences()) {
    json.BeginObject().Field("sequence", s.id).Field("number", s.number).Field("tenant", s.tenant);
    json.Field("class", s.online ? "online" : "offline")
        .Field("steps", s.steps)
        .Field("live", s.live);
    json.Field("arrival_ns", s.arrival_ns).Field("deadline_ns", s.deadline_ns).EndObject();
  }
  json.EndArray().Key("pieces").BeginArray();
  for (const PieceView& p : Pieces()) {
    json.BeginObject()
        .Field("set", p.set)
        .Field("tensor", p.tensor)
        .Field("tenant", p.tenant)
        .Field("domain", p.domain);
    json.Field("managed", p.managed).Field("lost", p.lost).Field("moving", p.moving);
    json.Field("version", p.version).Field("bytes", p.bytes).Field("queue_length", p.queue_length);
    json.Key("queue").BeginArray();
    for (const QueueEntryView& e : p.queue) {
      json.BeginObject()
          .Field("kind", AccessKindName(e.kind))
          .Field("id", e.owner)
          .Field("access", AccessName(e));
      json.Field("uses_left", e.uses_left).Field("waits_for", e.waits_for).EndObject();
    }
    json.EndArray().EndObject();
  }
  json.EndArray().Key("transfers").BeginArray();
  for (const TransferView& t : Transfers()) {
    json.BeginObject()
        .Field("transfer", t.id)
        .Field("state", TransferStateName(t.state))
        .Field("instance", t.instance);
    json.Field("set", t.set).Field("value", t.value).Field("source_domain", t.source_domain);
    json.Field("destination_domain", t.destination_domain)
        .Field("bytes", t.bytes)
        .Field("requested_ns", t.requested_ns);
    json.Field("admitted_ns", t.admitted_ns).EndObject();
  }
  json.EndArray().EndObject();
  return json.Take();
}

std::string Reader::DecisionsJson(size_t newest_max) const {
  const std::vector<DeviceView> devices = Devices();
  JsonWriter json;
  const auto device = [&](uint32_t index) {
    json.Field("device", index);
    for (const DeviceView& d : devices) {
      if (d.index == index) json.Field("device_name", std::string_view(d.name));
    }
  };
  json.BeginObject().Key("decisions").BeginArray();
  for (const DecisionView& d : Decisions(newest_max)) {
    json.BeginObject()
        .Field("number", d.number)
        .Field("time_ns", d.time_ns)
        .Field("instance", d.instance);
    json.Field("tenant", d.tenant)
        .Field("class", d.online ? "online" : "offline")
        .Field("op", d.op)
        .Field("op_count", d.op_count)
        .Field("by", DecisionBasisName(d.basis));
    if (d.deferred()) {
      json.Field("deferred_until_ns", d.retry_at_ns);
    } else {
      device(d.device);
    }
    json.Key("candidates").BeginArray();
    for (const CandidateView& c : d.candidates) {
      json.BeginObject().Field("chosen", c.chosen).Field("defer", c.defer);
      if (!c.defer) device(c.device);
      json.Field("beaten", c.beaten);
      if (d.has_feasible()) json.Field("feasible", c.feasible);
      if (d.has_levels()) {
        json.Field("lateness_ms", c.lateness_ms)
            .Field("online_added_percent", c.online_added_percent)
            .Field("finish_added_percent", c.finish_added_percent);
      }
      if (d.has_bytes_moved()) json.Field("bytes_moved", c.bytes_moved);
      if (d.has_queue() && !c.defer) json.Field("queued_ms", c.queued_ms);
      if (c.finish_ns != kNever) json.Field("finish_ns", c.finish_ns);
      json.EndObject();
    }
    json.EndArray().Field("candidates_left_out", d.candidates_left_out).EndObject();
  }
  json.EndArray().EndObject();
  return json.Take();
}

}  // namespace slice::gmg
