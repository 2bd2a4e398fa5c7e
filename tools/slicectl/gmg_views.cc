// `slicectl graphs` and `slicectl explain`: the GMG segment as tables.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "common/clock.h"
#include "tools/slicectl/ask.h"
#include "tools/slicectl/gmg_access.h"
#include "tools/slicectl/table.h"

namespace slice::slicectl {
namespace {

using nlohmann::json;

constexpr size_t kHashDigits = 8;  // enough to tell graphs apart in a table

// Names of devices and domains; numbers where a record could not be read.
class Names {
 public:
  explicit Names(const gmg::Reader& reader) {
    for (gmg::DeviceView& device : reader.Devices())
      devices_[device.index] = std::move(device.name);
    for (gmg::DomainView& domain : reader.Domains())
      domains_[domain.index] = std::move(domain.name);
  }
  std::string Device(uint32_t index) const { return Find(devices_, index, "device "); }
  std::string Domain(uint32_t index) const { return Find(domains_, index, "domain "); }

 private:
  using Map = std::map<uint32_t, std::string>;
  static std::string Find(const Map& names, uint32_t index, const char* what) {
    const auto found = names.find(index);
    return found != names.end() ? found->second : what + std::to_string(index);
  }
  Map devices_, domains_;
};

Result<std::string> Checked(const std::string& text) {
  const json whole = json::parse(text, nullptr, false);
  if (whole.is_discarded())
    return Error(StatusCode::kInternal, "the GMG reader made text that is no JSON");
  return Pretty(whole);
}

std::string Count(size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

// Who waits for whom at each piece that somebody uses: the entries of its access queue in order.
std::string QueueTable(const std::vector<gmg::PieceView>& pieces, const Names& names) {
  Table queues({"SET>", "TENSOR>", "DOMAIN", "VERSION>", "PLACE>", "ENTRY", "ID>", "ACCESS",
                "USES LEFT>", "WAITS FOR>"});
  for (const gmg::PieceView& piece : pieces) {
    const std::string state = piece.lost ? " lost" : piece.moving ? " moving" : "";
    const auto row = [&](const std::string& place, const std::vector<std::string>& entry) {
      std::vector<std::string> cells{std::to_string(piece.set), std::to_string(piece.tensor),
                                     names.Domain(piece.domain),
                                     std::to_string(piece.version) + state, place};
      cells.insert(cells.end(), entry.begin(), entry.end());
      queues.Add(cells);
    };
    for (size_t e = 0; e < piece.queue.size(); ++e) {
      const gmg::QueueEntryView& entry = piece.queue[e];
      row(std::to_string(e + 1),
          {std::string(gmg::AccessKindName(entry.kind)), std::to_string(entry.owner),
           std::string(gmg::AccessName(entry)), std::to_string(entry.uses_left),
           entry.waits_for == 0 ? "-" : std::to_string(entry.waits_for) + " before"});
    }
    const size_t hidden = piece.queue_length - piece.queue.size();
    if (hidden > 0) row("...", {std::to_string(hidden) + " more", "", "", "", ""});
    if (piece.queue.empty() && (piece.lost || piece.moving)) row("-", {"-", "-", "-", "-", "-"});
  }
  return queues.Section();
}

std::string TransferTable(const std::vector<gmg::TransferView>& transfers, const Names& names,
                          TimeNs now) {
  Table table({"TRANSFER>", "STATE", "FOR", "FROM", "TO", "CLASS", "BYTES>", "AGE>"});
  for (const gmg::TransferView& item : transfers) {
    table.Add({std::to_string(item.id), std::string(gmg::TransferStateName(item.state)),
               item.instance != 0 ? "instance " + std::to_string(item.instance)
                                  : "set " + std::to_string(item.set),
               names.Domain(item.source_domain), names.Domain(item.destination_domain),
               item.online ? "online" : "offline", FormatBytes(item.bytes),
               FormatDuration(now - item.requested_ns)});
  }
  return table.Section();
}

// The first op of a batch and how many connected ones go with it: "3", "3 +2".
std::string Ops(uint32_t op, uint32_t count) {
  return std::to_string(op) + (count > 1 ? " +" + std::to_string(count - 1) : "");
}

void AddCandidates(const gmg::DecisionView& decision, const Names& names,
                   const std::vector<std::string>& head, Table* table) {
  std::vector<std::string> first = head;
  const auto add = [&](const std::vector<std::string>& cells) {
    std::vector<std::string> row = first;
    row.insert(row.end(), cells.begin(), cells.end());
    table->Add(row);
    first.assign(head.size(), "");
  };
  for (const gmg::CandidateView& item : decision.candidates) {
    const auto figure = [](bool known, int64_t value, const char* unit) {
      return known ? std::to_string(value) + unit : std::string("-");
    };
    // Of one that was beaten, the least that it would be.
    const auto bound = [&item](const std::string& text) {
      return item.beaten && text != "-" ? ">= " + text : text;
    };
    std::string place = item.defer ? "defer" : names.Device(item.device);
    if (item.defer && item.chosen && decision.retry_at_ns != kNever)
      place.append(" ").append(FormatDuration(decision.retry_at_ns - decision.time_ns));
    add({place, item.chosen ? "yes" : "",
         !decision.has_feasible() ? "-"
         : item.feasible          ? "yes"
                                  : "no",
         bound(figure(decision.has_levels(), item.lateness_ms, " ms")),
         bound(figure(decision.has_levels(), item.online_added_percent, " %")),
         bound(figure(decision.has_levels(), item.finish_added_percent, " %")),
         bound(decision.has_bytes_moved() ? FormatBytes(item.bytes_moved) : "-"),
         figure(decision.has_queue() && !item.defer, item.queued_ms, " ms"),
         bound(item.finish_ns == kNever ? "-"
                                        : FormatDuration(item.finish_ns - decision.time_ns))});
  }
  if (decision.candidates.empty()) add({"nowhere to go", "", "-", "-", "-", "-", "-", "-", "-"});
  if (decision.candidates_left_out > 0) {
    add({"and " + std::to_string(decision.candidates_left_out) + " more", "", "", "", "", "", "",
         "", ""});
  }
}

}  // namespace

Result<std::string> Graphs(const Context& context, bool with_ops) {
  SLICE_ASSIGN_OR_RETURN(const GmgAccess access, GmgAccess::Open(context.socket_path));
  const gmg::Reader& reader = access.reader();
  if (context.json) return Checked(reader.GraphsJson(with_ops));
  const Names names(reader);
  std::vector<gmg::InstanceView> live = reader.Instances();
  std::stable_sort(live.begin(), live.end(), [](const auto& a, const auto& b) {
    return a.submit_ns < b.submit_ns;  // the oldest first
  });
  std::map<uint32_t, size_t> live_of;  // by template
  for (const gmg::InstanceView& item : live) ++live_of[item.template_id];
  Table graphs({"GRAPH", "NAME", "LIVE>"});
  std::map<uint32_t, gmg::TemplateView> templates;
  for (gmg::TemplateView& item : reader.Templates()) {
    graphs.Add({gmg::ContentHashText(item.content_hash), item.name.empty() ? "-" : item.name,
                std::to_string(live_of[item.id])});
    templates[item.id] = std::move(item);
  }
  const int64_t now = MonotonicNow();
  Table instances({"INSTANCE>", "STATE", "SESSION>", "CLASS", "GRAPH", "SEQUENCE>", "DONE>", "OPS>",
                   "FRONTIER", "AGE>", "DEADLINE IN>"});
  Table ops({"INSTANCE>", "OP>", "NAME", "STATE", "DEVICE", "PENDING>", "DURATION>", "START IN>"});
  for (const gmg::InstanceView& item : live) {
    const auto found = templates.find(item.template_id);
    const gmg::TemplateView* const graph = found == templates.end() ? nullptr : &found->second;
    std::string title = "-";
    if (graph != nullptr) {
      title = gmg::ContentHashText(graph->content_hash).substr(0, kHashDigits);
      if (!graph->name.empty()) title += " " + graph->name;
    }
    instances.Add(
        {std::to_string(item.id), std::string(gmg::InstanceStateName(item.state)),
         std::to_string(item.tenant), item.online ? "online" : "offline", title,
         item.sequence_id == 0 ? "-" : std::to_string(item.sequence_id),
         std::to_string(item.ops_done), std::to_string(item.ops.size()),
         std::to_string(item.frontier_scheduled) + "/" + std::to_string(item.frontier_unscheduled),
         FormatDuration(now - item.submit_ns),
         item.deadline_ns == 0 || item.deadline_ns == kNever
             ? "-"
             : FormatDuration(item.deadline_ns - now)});
    for (size_t op = 0; with_ops && op < item.ops.size(); ++op) {
      const gmg::OpView& view = item.ops[op];
      const bool has_name = graph != nullptr && op < graph->group_names.size();
      ops.Add({std::to_string(item.id), std::to_string(op), has_name ? graph->group_names[op] : "-",
               std::string(gmg::OpStateName(view.state)),
               view.device == kNoDevice ? "-" : names.Device(view.device),
               std::to_string(view.pending), FormatDuration(view.duration_ns),
               view.predicted_start_ns == 0 ? "-" : FormatDuration(view.predicted_start_ns - now)});
    }
  }
  const std::vector<gmg::TransferView> transfers = reader.Transfers();
  std::string text = "sliced " + std::to_string(reader.daemon_pid()) + ", policy " +
                     reader.policy() + ", written " + FormatDuration(now - reader.updated_ns()) +
                     " ago: " + Count(graphs.size(), "graph") + ", " +
                     Count(live.size(), "instance") + ", " +
                     Count(reader.Sequences().size(), "sequence") + ", " +
                     Count(transfers.size(), "transfer") + "\n";
  text += graphs.Section();
  text += instances.Section();
  text += ops.Section();
  return text + TransferTable(transfers, names, now) + QueueTable(reader.Pieces(), names);
}

Result<std::string> Explain(const Context& context, size_t newest_max) {
  SLICE_ASSIGN_OR_RETURN(const GmgAccess access, GmgAccess::Open(context.socket_path));
  const gmg::Reader& reader = access.reader();
  if (context.json) return Checked(reader.DecisionsJson(newest_max));
  const Names names(reader);
  const int64_t now = MonotonicNow();
  Table table({"DECISION>", "AGO>", "INSTANCE>", "SESSION>", "CLASS", "OPS", "BY", "CANDIDATE",
               "CHOSEN", "FEASIBLE", "LATENESS>", "ONLINE ADDED>", "FINISH ADDED>", "BYTES MOVED>",
               "QUEUED>", "FINISH>"});
  for (const gmg::DecisionView& decision : reader.Decisions(newest_max)) {
    const std::vector<std::string> head = {std::to_string(decision.number),
                                           FormatDuration(now - decision.time_ns),
                                           std::to_string(decision.instance),
                                           std::to_string(decision.tenant),
                                           decision.online ? "online" : "offline",
                                           Ops(decision.op, decision.op_count),
                                           std::string(gmg::DecisionBasisName(decision.basis))};
    AddCandidates(decision, names, head, &table);
  }
  return table.size() == 0 ? std::string("no decisions yet\n") : table.Render();
}

}  // namespace slice::slicectl
