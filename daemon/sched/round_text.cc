#include "daemon/sched/round_text.h"

#include <algorithm>
#include <charconv>

namespace slice::sched {
namespace {

constexpr int64_t kVersion = 1;

class Line {
 public:
  Line(std::string* out, char kind) : out_(out) { out_->push_back(kind); }
  ~Line() { out_->push_back('\n'); }
  Line& Add(int64_t value) {
    *out_ += ' ' + std::to_string(value);
    return *this;
  }
  Line& Mask(uint64_t value) {
    return value == ~uint64_t{0} ? None() : Add(static_cast<int64_t>(value));
  }
  Line& Index(uint32_t value) { return value == sim::kNone ? None() : Add(value); }
  Line& Time(TimeNs value, TimeNs now) { return value == kNever ? None() : Add(value - now); }
  Line& None() {
    *out_ += " -";
    return *this;
  }

 private:
  std::string* out_;
};

// Reads the fields of one line.
class Fields {
 public:
  explicit Fields(std::string_view line) : rest_(line) {}
  int64_t Next(int64_t none) {
    while (!rest_.empty() && rest_.front() == ' ') rest_.remove_prefix(1);
    if (rest_.empty()) {
      wrong_ = true;
      return 0;
    }
    if (rest_.front() == '-' && (rest_.size() == 1 || rest_[1] == ' ')) {
      rest_.remove_prefix(1);
      return none;
    }
    int64_t value = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    wrong_ |= error != std::errc{};
    rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
    wrong_ |= !rest_.empty() && rest_.front() != ' ';
    if (wrong_) rest_ = {};
    return value;
  }
  uint64_t Mask() { return static_cast<uint64_t>(Next(-1)); }
  uint32_t Index() { return static_cast<uint32_t>(Next(sim::kNone)); }
  uint8_t Small(int64_t none = 0) {
    const int64_t value = Next(none);
    wrong_ |= value < 0 || value > 255;
    return static_cast<uint8_t>(value);
  }
  TimeNs Time(TimeNs now) {
    const int64_t value = Next(kNever);
    return value == kNever ? kNever : now + value;
  }
  bool More() {
    while (!rest_.empty() && rest_.front() == ' ') rest_.remove_prefix(1);
    return !rest_.empty();
  }
  bool wrong() const { return wrong_; }

 private:
  std::string_view rest_;
  bool wrong_ = false;
};

// Whether every index of the round lies in its table.
bool Sound(const Round& round) {
  const sim::Snapshot& s = round.snapshot;
  const auto ops = s.ops.size(), tensors = s.tensors.size(), domains = s.domains.size();
  bool sound = s.devices.size() <= kDevicesMax && domains <= kDevicesMax && !round.batch.empty();
  const uint64_t known = domains >= 64 ? ~uint64_t{0} : (uint64_t{1} << domains) - 1;
  for (const sim::SnapDevice& device : s.devices)
    sound &= device.domain < domains && (device.running == sim::kNone || device.running < ops);
  for (const sim::SnapTensor& tensor : s.tensors) {
    sound &= (tensor.resident & ~known) == 0;
    sound &= tensor.instance == sim::kNone || tensor.instance < s.instances.size();
  }
  for (const sim::SnapOp& op : s.ops) {
    sound &= op.instance < s.instances.size();
    sound &= op.state == sim::OpState::kUnscheduled || op.device < s.devices.size();
  }
  for (const sim::SnapTransfer& copy : s.transfers)
    sound &= copy.tensor < tensors && copy.source < domains && copy.destination < domains;
  for (const sim::OpIndex op : s.edges) sound &= op < ops;
  for (const sim::TensorIndex tensor : s.uses) sound &= tensor < tensors;
  for (const sim::OpIndex op : round.batch) sound &= op < ops;
  return sound;
}

void ParseOp(Fields* fields, sim::Snapshot* s) {
  sim::SnapOp op;
  op.instance = fields->Index();
  op.state = static_cast<sim::OpState>(fields->Small() & 3);
  op.device = fields->Small(kNoDevice);
  op.service_class = static_cast<ServiceClass>(fields->Small() & 1);
  op.priority = static_cast<int32_t>(fields->Next(0));
  op.order = static_cast<uint64_t>(fields->Next(0));
  op.earliest = fields->Next(kNever);
  if (op.earliest != 0 && op.earliest != kNever) op.earliest += s->now;
  op.duration = fields->Next(0);
  op.allowed_devices = fields->Mask();
  op.pending = fields->Index();
  op.memory_bytes = fields->Next(0);
  const auto list = [fields](std::vector<uint32_t>* to, uint32_t* begin, uint32_t* end) {
    *begin = static_cast<uint32_t>(to->size());
    for (int64_t left = fields->Next(0); left > 0 && !fields->wrong(); --left)
      to->push_back(fields->Index());
    *end = static_cast<uint32_t>(to->size());
  };
  list(&s->uses, &op.reads_begin, &op.reads_end);
  list(&s->uses, &op.writes_begin, &op.writes_end);
  list(&s->edges, &op.successors_begin, &op.successors_end);
  s->ops.push_back(op);
}

void ParseLine(char kind, Fields* fields, Round* round) {
  sim::Snapshot& s = round->snapshot;
  switch (kind) {
    case 'K':
      s.kind_scale.push_back(static_cast<double>(fields->Next(0)) / 1e6);
      break;
    case 'D': {
      sim::SnapDevice device;
      device.domain = fields->Small();
      device.kind = fields->Small();
      device.free_at = fields->Time(s.now);
      device.running = fields->Index();
      device.hosts_online = fields->Next(0) != 0;
      device.phantom_from = fields->Time(s.now);
      device.phantom_until = fields->More() ? fields->Time(s.now) : 0;
      s.devices.push_back(device);
      break;
    }
    case 'M':
      s.domains.push_back({fields->Next(0)});
      break;
    case 'I': {
      sim::SnapInstance instance;
      instance.service_class = static_cast<ServiceClass>(fields->Small() & 1);
      instance.priority = static_cast<int32_t>(fields->Next(0));
      instance.arrival = fields->Time(s.now);
      instance.deadline = fields->Time(s.now);
      instance.rest_of_sequence = fields->Next(0);
      instance.tenant = fields->Index();
      instance.reserved_domains = fields->Mask();
      instance.gap_p10 = fields->Next(0);
      instance.gap_p90 = fields->Next(0);
      s.instances.push_back(instance);
      break;
    }
    case 'O':
      ParseOp(fields, &s);
      break;
    case 'T': {
      sim::SnapTensor tensor;
      tensor.bytes = fields->Next(0);
      tensor.resident = fields->Mask();
      tensor.consumers = fields->Index();
      tensor.instance = fields->Index();
      const uint8_t flags = fields->Small();
      tensor.managed = (flags & 1) != 0;
      tensor.pinned = (flags & 2) != 0;
      tensor.slots = fields->Mask();
      s.tensors.push_back(tensor);
      break;
    }
    case 'X': {
      sim::SnapTransfer copy;
      copy.tensor = fields->Index();
      copy.source = fields->Small();
      copy.destination = fields->Small();
      copy.service_class = static_cast<ServiceClass>(fields->Small() & 1);
      copy.finish = fields->Time(s.now);
      s.transfers.push_back(copy);
      break;
    }
    default:  // 'B'
      while (fields->More() && !fields->wrong()) round->batch.push_back(fields->Index());
  }
}

}  // namespace

std::string RoundText(const sim::Snapshot& s, std::span<const sim::OpIndex> batch,
                      DeviceIndex home) {
  std::string text = "round " + std::to_string(kVersion) + ' ' + std::to_string(s.now) + ' ' +
                     std::to_string(home) + ' ' +
                     (s.offline_op_max == kNever ? "-" : std::to_string(s.offline_op_max)) + '\n';
  for (const double scale : s.kind_scale)
    Line(&text, 'K').Add(static_cast<int64_t>(scale * 1e6 + 0.5));
  for (const sim::SnapDevice& device : s.devices) {
    Line line(&text, 'D');
    line.Add(device.domain).Add(device.kind).Time(device.free_at, s.now).Index(device.running);
    line.Add(device.hosts_online ? 1 : 0).Time(device.phantom_from, s.now);
    if (device.phantom_until != 0) line.Time(device.phantom_until, s.now);
  }
  for (const sim::SnapDomain& domain : s.domains) Line(&text, 'M').Add(domain.free_bytes);
  for (const sim::SnapInstance& instance : s.instances) {
    Line line(&text, 'I');
    line.Add(static_cast<int64_t>(instance.service_class)).Add(instance.priority);
    line.Time(instance.arrival, s.now).Time(instance.deadline, s.now);
    line.Add(instance.rest_of_sequence).Index(instance.tenant).Mask(instance.reserved_domains);
    line.Add(instance.gap_p10).Add(instance.gap_p90);
  }
  for (const sim::SnapOp& op : s.ops) {
    Line line(&text, 'O');
    line.Index(op.instance).Add(static_cast<int64_t>(op.state));
    op.device == kNoDevice ? line.None() : line.Add(op.device);
    line.Add(static_cast<int64_t>(op.service_class)).Add(op.priority);
    line.Add(static_cast<int64_t>(op.order));
    line.Time(op.earliest, op.earliest == 0 ? 0 : s.now).Add(op.duration);
    line.Mask(op.allowed_devices).Add(op.pending).Add(op.memory_bytes);
    const auto list = [&line](const std::vector<uint32_t>& from, uint32_t begin, uint32_t end) {
      line.Add(end - begin);
      for (uint32_t i = begin; i < end; ++i) line.Add(from[i]);
    };
    list(s.uses, op.reads_begin, op.reads_end);
    list(s.uses, op.writes_begin, op.writes_end);
    list(s.edges, op.successors_begin, op.successors_end);
  }
  for (const sim::SnapTensor& tensor : s.tensors) {
    Line line(&text, 'T');
    line.Add(tensor.bytes).Mask(tensor.resident).Add(tensor.consumers).Index(tensor.instance);
    line.Add((tensor.managed ? 1 : 0) | (tensor.pinned ? 2 : 0)).Mask(tensor.slots);
  }
  for (const sim::SnapTransfer& copy : s.transfers) {
    Line line(&text, 'X');
    line.Add(copy.tensor).Add(copy.source).Add(copy.destination);
    line.Add(static_cast<int64_t>(copy.service_class)).Time(copy.finish, s.now);
  }
  {
    Line line(&text, 'B');
    for (const sim::OpIndex op : batch) line.Add(op);
  }
  return text + "end\n";
}

Result<std::vector<Round>> ParseRounds(std::string_view text) {
  std::vector<Round> rounds;
  bool open = false;
  size_t number = 0;
  const auto refuse = [&number](const char* why) {
    return Error(StatusCode::kInvalid, "line %zu of the rounds: %s", number, why);
  };
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    if (line.empty() || line.front() == '#') continue;
    if (line == "end") {
      if (!open || !Sound(rounds.back())) return refuse("an index lies outside its table");
      open = false;
      continue;
    }
    if (line.starts_with("round ")) {
      if (open) return refuse("a round begins inside a round");
      Fields fields(line.substr(6));
      if (fields.Next(0) != kVersion) return refuse("unknown version");
      open = true;
      Round& round = rounds.emplace_back();
      round.snapshot.now = fields.Next(0);
      round.home = fields.Small();
      round.snapshot.offline_op_max = fields.Next(kNever);
      if (fields.wrong()) return refuse("not a round's header");
      continue;
    }
    if (!open || std::string_view("KDMIOTXB").find(line.front()) == std::string_view::npos)
      return refuse("not a line of a round");
    Fields fields(line.substr(1));
    ParseLine(line.front(), &fields, &rounds.back());
    if (fields.wrong()) return refuse("not the integers that belong there");
  }
  if (open) return refuse("the last round does not end");
  return rounds;
}

}  // namespace slice::sched
