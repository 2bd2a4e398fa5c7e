#include "tools/replay/csv.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <memory>

namespace slice::replay {
namespace {

constexpr size_t kBytesMax = size_t{256} << 20;

void Split(std::string_view line, std::vector<std::string>* cells) {
  for (size_t begin = 0;;) {
    const size_t comma = line.find(',', begin);
    cells->emplace_back(line.substr(begin, comma - begin));
    if (comma == std::string_view::npos) return;
    begin = comma + 1;
  }
}

// What spreadsheets put before UTF-8 text.
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

}  // namespace

Result<Csv> Csv::Parse(std::string name, std::string_view text) {
  Csv csv;
  csv.name_ = std::move(name);
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  uint32_t number = 0;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
    ++number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty()) continue;
    if (csv.columns_.empty()) {
      Split(line, &csv.columns_);
      SLICE_RETURN_IF_ERROR(csv.CheckColumns(number));
      continue;
    }
    const size_t before = csv.cells_.size();
    Split(line, &csv.cells_);
    if (csv.cells_.size() - before != csv.columns_.size()) {
      return Error(StatusCode::kInvalid,
                   "%s line %u: %zu cells, the header has %zu: complete the line or leave it out",
                   csv.name_.c_str(), number, csv.cells_.size() - before, csv.columns_.size());
    }
    csv.lines_.push_back(number);
  }
  if (csv.lines_.empty()) {
    return Error(
        StatusCode::kInvalid,
        "%s: no rows below a header line: is it a CSV file, and was it written to its end?",
        csv.name_.c_str());
  }
  return csv;
}

// A name that is there twice would be read from the first one. Row numbers often have no name.
Status Csv::CheckColumns(uint32_t line) const {
  std::vector<std::string_view> names;
  for (const std::string& column : columns_) {
    if (!column.empty()) names.push_back(column);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return Status::Ok();
  return Error(StatusCode::kInvalid,
               "%s line %u: column '%.80s' is there more than once: remove or rename all but one",
               name_.c_str(), line, std::string(*twice).c_str());
}

Result<size_t> Csv::Column(std::string_view column) const {
  const auto found = std::find(columns_.begin(), columns_.end(), column);
  if (found == columns_.end()) {
    return Error(StatusCode::kInvalid, "%s: no column '%s' among its %zu", name_.c_str(),
                 std::string(column).c_str(), columns_.size());
  }
  return static_cast<size_t>(found - columns_.begin());
}

Result<double> Csv::Number(size_t row, size_t column, double min, double max) const {
  const std::string_view cell = Text(row, column);
  double value = 0;
  const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
  if (error != std::errc() || end != cell.data() + cell.size() || !std::isfinite(value)) {
    return Error(StatusCode::kInvalid, "%s line %u, column '%s': '%.40s' is not a number",
                 name_.c_str(), lines_[row], columns_[column].c_str(), std::string(cell).c_str());
  }
  if (value < min || value > max) {
    return Error(
        StatusCode::kInvalid,
        "%s line %u, column '%s': %.10g is not in %.10g to %.10g: correct it or leave the line out",
        name_.c_str(), lines_[row], columns_[column].c_str(), value, min, max);
  }
  return value;
}

Result<int64_t> Csv::Integer(size_t row, size_t column, double min, double max) const {
  SLICE_ASSIGN_OR_RETURN(const double value, Number(row, column, min, max));
  if (value != std::floor(value)) {
    return Error(StatusCode::kInvalid, "%s line %u, column '%s': %g is not a whole number",
                 name_.c_str(), lines_[row], columns_[column].c_str(), value);
  }
  return static_cast<int64_t>(value);
}

Result<Csv> ReadCsv(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (file == nullptr)
    return ErrnoError(StatusCode::kInvalid, errno, "cannot read '%s'", path.c_str());
  std::string text;
  char buffer[1 << 16];
  while (const size_t got = std::fread(buffer, 1, sizeof buffer, file.get())) {
    text.append(buffer, got);
    if (text.size() > kBytesMax)
      return Error(StatusCode::kInvalid, "'%s' is over %zu bytes", path.c_str(), kBytesMax);
  }
  if (std::ferror(file.get()) != 0)
    return ErrnoError(StatusCode::kInvalid, errno, "cannot read '%s'", path.c_str());
  return Csv::Parse(path, text);
}

}  // namespace slice::replay
