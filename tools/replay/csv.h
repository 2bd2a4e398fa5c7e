// Plain CSV files with a header line: numbers and short words, no quotes. Pure but for ReadCsv.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace slice::replay {

class Csv {
 public:
  // Errors: INVALID with the line when a row has another number of cells than the header, a column
  // is there twice, or there is no row. `name` is for texts. Empty lines and a byte order mark are
  // skipped; CRLF is as good as LF.
  static Result<Csv> Parse(std::string name, std::string_view text);

  const std::string& name() const { return name_; }
  const std::vector<std::string>& columns() const { return columns_; }
  size_t rows() const { return lines_.size(); }
  // Errors: INVALID names the column and what there is.
  Result<size_t> Column(std::string_view column) const;
  std::string_view Text(size_t row, size_t column) const {
    return cells_[row * columns_.size() + column];
  }
  bool Empty(size_t row, size_t column) const { return Text(row, column).empty(); }
  // Errors: INVALID names line, column and cell, unless it is a finite number in [min, max].
  Result<double> Number(size_t row, size_t column, double min, double max) const;
  // The same for a whole number; `max` is at most 2^53.
  Result<int64_t> Integer(size_t row, size_t column, double min, double max) const;
  uint32_t Line(size_t row) const { return lines_[row]; }  // of the file; the first is 1

 private:
  Status CheckColumns(uint32_t line) const;

  std::string name_;
  std::vector<std::string> columns_;
  std::vector<std::string> cells_;
  std::vector<uint32_t> lines_;  // of the file, by row; the first is 1
};

// Errors: INVALID (cannot be read, over 256 MiB) and those of Parse.
Result<Csv> ReadCsv(const std::string& path);

}  // namespace slice::replay
