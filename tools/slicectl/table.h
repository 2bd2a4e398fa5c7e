// Aligned text tables for people. Pure.
#pragma once

#include <string>
#include <vector>

namespace slice::slicectl {

class Table {
 public:
  // Columns whose name ends in ">" are right-aligned; the sign is not shown.
  explicit Table(std::vector<std::string> columns);
  // As many cells as columns.
  void Add(std::vector<std::string> cells);
  size_t size() const { return rows_.size(); }
  std::string Render() const;
  // An empty line and the table; nothing if it has no rows.
  std::string Section() const;

 private:
  std::vector<std::string> columns_;
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

std::string FormatBytes(int64_t bytes);  // "1.5 GiB"
std::string FormatDuration(int64_t ns);  // "12.3 ms"; "-" for 0

}  // namespace slice::slicectl
