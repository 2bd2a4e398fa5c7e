#include "tools/slicectl/table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "common/check.h"

namespace slice::slicectl {
namespace {

// Cells hold ASCII or names of tenants: what could move the terminal's cursor is replaced.
std::string Clean(std::string cell) {
  for (char& c : cell) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return cell;
}

std::string Number(double value, const char* unit) {
  char text[48];
  std::snprintf(text, sizeof text,
                std::abs(value) < 10    ? "%.2f %s"
                : std::abs(value) < 100 ? "%.1f %s"
                                        : "%.0f %s",
                value, unit);
  return text;
}

}  // namespace

Table::Table(std::vector<std::string> columns) : columns_(std::move(columns)) {
  for (std::string& column : columns_) {
    right_.push_back(!column.empty() && column.back() == '>');
    if (right_.back()) column.pop_back();
  }
}

void Table::Add(std::vector<std::string> cells) {
  SLICE_CHECK(cells.size() == columns_.size(), "a row has as many cells as the table has columns");
  for (std::string& cell : cells) cell = Clean(std::move(cell));
  rows_.push_back(std::move(cells));
}

std::string Table::Render() const {
  std::vector<size_t> widths;
  for (const std::string& column : columns_) widths.push_back(column.size());
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string row;
    for (size_t i = 0; i < cells.size(); ++i) {
      const std::string pad(widths[i] - cells[i].size(), ' ');
      row += (i == 0 ? "" : "  ") + (right_[i] ? pad + cells[i] : cells[i] + pad);
    }
    row.erase(row.find_last_not_of(' ') + 1);
    text += row + "\n";
  };
  line(columns_);
  for (const auto& row : rows_) line(row);
  return text;
}

std::string Table::Section() const {
  if (rows_.empty()) return "";
  std::string text(1, '\n');
  text += Render();
  return text;
}

std::string FormatBytes(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; unit + 1 < kUnits.size() && std::abs(value) >= 1024; ++unit) value /= 1024;
  return unit == 0 ? std::to_string(bytes) + " B" : Number(value, kUnits[unit]);
}

std::string FormatDuration(int64_t ns) {
  if (ns == 0) return "-";
  const auto value = static_cast<double>(ns);
  if (std::abs(value) < 1e3) return Number(value, "ns");
  if (std::abs(value) < 1e6) return Number(value / 1e3, "us");
  if (std::abs(value) < 1e9) return Number(value / 1e6, "ms");
  return Number(value / 1e9, "s");
}

}  // namespace slice::slicectl
