#include "daemon/server/estimates_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "common/fd.h"
#include "common/log.h"

namespace slice::server {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "slicescheduler-estimates";
constexpr int kVersion = 1;
constexpr size_t kBytesMax = size_t{64} << 20;
constexpr size_t kEntriesMax = 1'000'000;  // shapes and points together
constexpr int kAsideMax = 1'000;

Status Bad(const char* what) { return Error(StatusCode::kInvalid, "no estimates in it: %s", what); }

std::optional<uint8_t> KindOf(std::string_view name) {
  const auto& kinds = estimate::kDeviceKinds;
  const auto found = std::find(std::begin(kinds), std::end(kinds), name);
  if (found == std::end(kinds)) return std::nullopt;
  return static_cast<uint8_t>(found - std::begin(kinds));
}
std::optional<DomainIndex> DomainOf(const json& name,
                                    std::span<const engine::DomainConfig> domains) {
  for (size_t i = 0; i < domains.size(); ++i) {
    if (name.is_string() && domains[i].name == name.get_ref<const std::string&>())
      return static_cast<DomainIndex>(i);
  }
  return std::nullopt;
}

// A reference: copying a value recurses into it, and a bad file may nest deeper than the stack.
const json& Member(const json& object, const char* key) {
  static const json kNone;
  const auto found = object.find(key);
  return found == object.end() ? kNone : *found;
}

// Numbers of an array [a, b, ...]: as many as asked for, finite and in [0, max].
bool Numbers(const json& array, std::span<double> numbers, double max) {
  if (!array.is_array() || array.size() != numbers.size()) return false;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (!array[i].is_number()) return false;
    numbers[i] = array[i].get<double>();
    if (!(numbers[i] >= 0) || numbers[i] > max) return false;
  }
  return true;
}
constexpr double kNumberMax = 4e18;  // below 2^62: safe as int64_t

std::optional<uint64_t> Hash(const json& text) {
  if (!text.is_string()) return std::nullopt;
  const std::string& digits = text.get_ref<const std::string&>();
  uint64_t value = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}
std::string HashText(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

Status ParseSignature(const json& item, uint8_t kind, size_t* left,
                      std::vector<estimate::SavedSignature>* signatures) {
  if (!item.is_object()) return Bad("a signature is no object");
  const std::optional<uint64_t> hash = Hash(Member(item, "signature"));
  const json& shapes = Member(item, "shapes");
  if (!hash.has_value() || !shapes.is_array()) return Bad("a signature without hash or shapes");
  if (shapes.size() > *left) return Bad("too many shapes");
  *left -= shapes.size();
  estimate::SavedSignature& signature = signatures->emplace_back();
  signature.signature = *hash;
  signature.device_kind = kind;
  for (const json& shape : shapes) {
    std::array<double, 6> n{};
    if (!Numbers(shape, n, kNumberMax))
      return Bad("a shape is not [flops, bytes, size, ns, deviation, samples]");
    signature.shapes.push_back({static_cast<int64_t>(n[0]), static_cast<int64_t>(n[1]),
                                static_cast<int64_t>(n[2]), n[3], n[4],
                                static_cast<uint32_t>(std::min(n[5], 1e9))});
  }
  return Status::Ok();
}

Status ParseLink(const json& item, std::span<const engine::DomainConfig> domains, size_t* left,
                 std::vector<estimate::SavedLink>* links) {
  if (!item.is_object()) return Bad("a link is no object");
  const json& points = Member(item, "points");
  if (!points.is_array()) return Bad("a link without points");
  if (points.size() > *left) return Bad("too many points");
  *left -= points.size();
  const auto source = DomainOf(Member(item, "source"), domains);
  const auto destination = DomainOf(Member(item, "destination"), domains);
  estimate::SavedLink link;
  for (const json& point : points) {
    std::array<double, 2> n{};
    if (!Numbers(point, n, kNumberMax)) return Bad("a point is not [bytes, ns]");
    link.points.push_back({static_cast<int64_t>(n[0]), n[1]});
  }
  if (!source.has_value() || !destination.has_value()) return Status::Ok();
  link.source = *source;
  link.destination = *destination;
  links->push_back(std::move(link));
  return Status::Ok();
}

Status WriteWhole(const std::string& path, std::string_view text) {
  const Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!file.valid())
    return ErrnoError(StatusCode::kInvalid, errno, "cannot write '%s'", path.c_str());
  while (!text.empty()) {
    const ssize_t put = ::write(file.get(), text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return ErrnoError(StatusCode::kInvalid, errno, "cannot write '%s'", path.c_str());
    text.remove_prefix(static_cast<size_t>(put));
  }
  if (::fsync(file.get()) != 0)
    return ErrnoError(StatusCode::kInvalid, errno, "cannot write '%s'", path.c_str());
  return Status::Ok();
}

// `found` false: there is no file.
Status ReadWhole(const std::string& path, std::string* text, bool* found) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  *found = file.valid() || errno != ENOENT;
  if (!file.valid())
    return ErrnoError(StatusCode::kInvalid, errno, "cannot read '%s'", path.c_str());
  struct stat info {};
  if (::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode))
    return Error(StatusCode::kInvalid, "'%s' is not a regular file", path.c_str());
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = ::read(file.get(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoError(StatusCode::kInvalid, errno, "cannot read '%s'", path.c_str());
    if (got == 0) return Status::Ok();
    text->append(buffer, static_cast<size_t>(got));
    if (text->size() > kBytesMax) {
      return Error(StatusCode::kInvalid, "'%s' is over %zu bytes", path.c_str(), kBytesMax);
    }
  }
}

bool IsRegular(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

// The name that a bad file got; "" if it could not be moved. Devices such as /dev/null, pipes and
// folders are others' and stay.
std::string MoveAside(const std::string& path) {
  if (!IsRegular(path)) return "";
  for (int n = 1; n <= kAsideMax; ++n) {
    const std::string aside = path + ".bad-" + std::to_string(n);
    struct stat info {};
    if (::lstat(aside.c_str(), &info) == 0) continue;
    return std::rename(path.c_str(), aside.c_str()) == 0 ? aside : "";
  }
  return "";
}

}  // namespace

Result<estimate::Saved> ParseEstimates(std::string_view text,
                                       std::span<const engine::DomainConfig> domains) {
  const json root = json::parse(text, nullptr, false);
  if (!root.is_object()) return Bad("it is no JSON object");
  if (Member(root, "format") != kFormat) return Bad("it is some other program's");
  if (Member(root, "version") != kVersion) return Bad("it is of another version");
  estimate::Saved saved;
  size_t left = kEntriesMax;
  const json& kinds = Member(root, "kinds");
  const json& links = Member(root, "links");
  if (!kinds.is_object() || !links.is_array()) return Bad("kinds or links are missing");
  for (const auto& [name, signatures] : kinds.items()) {
    const std::optional<uint8_t> kind = KindOf(name);
    if (!kind.has_value()) continue;
    if (!signatures.is_array()) return Bad("a device kind without signatures");
    for (const json& item : signatures)
      SLICE_RETURN_IF_ERROR(ParseSignature(item, *kind, &left, &saved.signatures));
  }
  for (const json& item : links)
    SLICE_RETURN_IF_ERROR(ParseLink(item, domains, &left, &saved.links));
  return saved;
}

std::string FormatEstimates(const estimate::Saved& saved,
                            std::span<const engine::DomainConfig> domains) {
  json kinds = json::object(), links = json::array();
  for (const estimate::SavedSignature& signature : saved.signatures) {
    json shapes = json::array();
    for (const estimate::SavedShape& s : signature.shapes)
      shapes.push_back({s.flops, s.bytes, s.size, s.ns, s.deviation, s.samples});
    kinds[std::string(estimate::DeviceKindName(signature.device_kind))].push_back(
        {{"signature", HashText(signature.signature)}, {"shapes", std::move(shapes)}});
  }
  for (const estimate::SavedLink& link : saved.links) {
    if (link.source >= domains.size() || link.destination >= domains.size()) continue;
    json points = json::array();
    for (const auto& point : link.points) points.push_back({point.bytes, point.ns});
    links.push_back({{"source", domains[link.source].name},
                     {"destination", domains[link.destination].name},
                     {"points", std::move(points)}});
  }
  const json root = {
      {"format", kFormat}, {"version", kVersion}, {"kinds", kinds}, {"links", links}};
  return root.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

estimate::Saved LoadEstimates(const std::string& path,
                              std::span<const engine::DomainConfig> domains) {
  std::string text;
  bool found = false;
  Status status = ReadWhole(path, &text, &found);
  if (!found) return {};
  if (status.ok()) {
    Result<estimate::Saved> saved = ParseEstimates(text, domains);
    if (saved.ok()) return std::move(*saved);
    status = saved.status();
  }
  const std::string aside = MoveAside(path);
  SLICE_LOG_WARN("server", "estimates file '%s': %s; starting without, %s%s", path.c_str(),
                 status.text().c_str(), aside.empty() ? "and it stays" : "it is now ",
                 aside.c_str());
  return {};
}

Status SaveEstimates(const std::string& path, const estimate::Saved& saved,
                     std::span<const engine::DomainConfig> domains) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) == 0 && !IsRegular(path))
    return Error(StatusCode::kInvalid, "'%s' is not a regular file", path.c_str());
  const std::string partial = path + ".partial";
  Status status = WriteWhole(partial, FormatEstimates(saved, domains));
  if (status.ok() && std::rename(partial.c_str(), path.c_str()) != 0) {
    status = ErrnoError(StatusCode::kInvalid, errno, "cannot rename '%s' to '%s'", partial.c_str(),
                        path.c_str());
  }
  if (!status.ok()) ::unlink(partial.c_str());
  return status;
}

}  // namespace slice::server
