// A parsed template: binding symbols to numbers, and small lookups. Parsing is template_parser.cc.
#include "daemon/graph/template.h"

#include <map>
#include <utility>

#include "common/checked.h"

namespace slice::graph {

uint64_t ContentHash(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : bytes) {
    hash ^= static_cast<uint8_t>(c);
    hash *= 0x100000001b3;
  }
  return hash;
}

uint8_t ItemBytes(proto::DType dtype) {
  switch (dtype) {
    case proto::INT8:
    case proto::UINT8:
    case proto::BOOL:
    case proto::FLOAT8_E4M3FN:
    case proto::FLOAT8_E5M2:
      return 1;
    case proto::FLOAT16:
    case proto::BFLOAT16:
    case proto::INT16:
      return 2;
    case proto::FLOAT32:
    case proto::INT32:
      return 4;
    case proto::FLOAT64:
    case proto::INT64:
    case proto::COMPLEX64:
      return 8;
    case proto::COMPLEX128:
      return 16;
    default:
      return 0;
  }
}

Result<int64_t> Template::ValueBytes(uint32_t value, std::span<const int64_t> symbols) const {
  if (value >= values_.size()) {
    return Error(StatusCode::kGraph, "value %u does not exist, there are %zu", value,
                 values_.size());
  }
  const ValueShape& shape = values_[value];
  if (shape.item_bytes == 0) return int64_t{0};
  int64_t extent = 1;
  bool empty = false;
  for (size_t d = 0; d < shape.sizes.size(); ++d) {
    const Result<int64_t> size = expressions_.Evaluate(shape.sizes[d], symbols);
    const Result<int64_t> stride = expressions_.Evaluate(shape.strides[d], symbols);
    for (const Result<int64_t>* number : {&size, &stride}) {
      if (!number->ok()) {
        return Error(StatusCode::kOverflow, "value %u, dimension %zu: %s", value, d,
                     number->status().text().c_str());
      }
      if (**number < 0) {
        return Error(StatusCode::kOverflow, "value %u, dimension %zu: %s is %lld, below 0", value,
                     d, number == &size ? "size" : "stride", static_cast<long long>(**number));
      }
    }
    if (*size == 0) {
      empty = true;
      continue;
    }
    int64_t span = 0;
    if (!CheckedMul(*size - 1, *stride, &span) || !CheckedAdd(extent, span, &extent)) {
      return Error(StatusCode::kOverflow,
                   "value %u: size %lld times stride %lld does not fit in 63 bits", value,
                   static_cast<long long>(*size), static_cast<long long>(*stride));
    }
  }
  if (empty) return int64_t{0};
  if (shape.storage_offset != kNoExpr) {
    SLICE_ASSIGN_OR_RETURN(const int64_t offset,
                           expressions_.Evaluate(shape.storage_offset, symbols));
    if (offset < 0 || !CheckedAdd(extent, offset, &extent)) {
      return Error(StatusCode::kOverflow, "value %u: storage offset %lld is out of range", value,
                   static_cast<long long>(offset));
    }
  }
  int64_t total = 0;
  if (!CheckedMul(extent, shape.item_bytes, &total) || total > limits_.tensor_bytes_max) {
    return Error(StatusCode::kOverflow,
                 "value %u: %lld elements of %d bytes pass the limit of %lld bytes", value,
                 static_cast<long long>(extent), shape.item_bytes,
                 static_cast<long long>(limits_.tensor_bytes_max));
  }
  return total;
}

namespace {
Status CheckSymbols(const proto::GraphTemplate& program, std::span<const int64_t> symbols) {
  if (symbols.size() != static_cast<size_t>(program.symbols_size())) {
    return Error(StatusCode::kOverflow, "%zu symbol values given, the template has %d symbols",
                 symbols.size(), program.symbols_size());
  }
  for (int i = 0; i < program.symbols_size(); ++i) {
    const proto::Symbol& symbol = program.symbols(i);
    const int64_t value = symbols[static_cast<size_t>(i)];
    if (value < symbol.min() || value > symbol.max()) {
      return Error(StatusCode::kOverflow, "symbol %d '%s' is %lld, its range is %lld to %lld", i,
                   symbol.name().c_str(), static_cast<long long>(value),
                   static_cast<long long>(symbol.min()), static_cast<long long>(symbol.max()));
    }
  }
  return Status::Ok();
}
}  // namespace

// Equal expressions have equal indices (the parser compiles each once), so equal shapes have equal
// keys.
void Template::PlanBind() {
  std::map<std::vector<uint32_t>, uint32_t> shapes;
  const auto shape_slot = [&](uint32_t value) {
    const ValueShape& shape = values_[value];
    std::vector<uint32_t> key{shape.item_bytes, shape.storage_offset};
    key.insert(key.end(), shape.sizes.begin(), shape.sizes.end());
    key.insert(key.end(), shape.strides.begin(), shape.strides.end());
    const auto slot = static_cast<uint32_t>(plan_.shapes.size());
    const auto [found, fresh] = shapes.emplace(std::move(key), slot);
    if (fresh) plan_.shapes.push_back(value);
    return found->second;
  };
  for (const ValueUse& use : crossing_) plan_.crossing.push_back(shape_slot(use.value));
  for (const uint32_t input : dynamics_) plan_.dynamic.push_back(shape_slot(inputs_[input].value));
  for (const uint32_t value : results_) plan_.result.push_back(shape_slot(value));
  std::map<std::pair<ExprIndex, int64_t>, uint32_t> numbers;
  const auto number_slot = [&](const char* what, uint32_t group, ExprIndex expr,
                               int64_t value_max) {
    const auto slot = static_cast<uint32_t>(plan_.shapes.size() + plan_.numbers.size());
    const auto [found, fresh] = numbers.emplace(std::pair(expr, value_max), slot);
    if (fresh) plan_.numbers.push_back({what, group, expr, value_max});
    return found->second;
  };
  for (uint32_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    plan_.workspace_bytes.push_back(
        number_slot("workspace_bytes", g, group.workspace_bytes, limits_.tensor_bytes_max));
    plan_.flops.push_back(number_slot("flops", g, group.flops, INT64_MAX));
    plan_.bytes.push_back(number_slot("bytes", g, group.bytes, INT64_MAX));
  }
}

Status Template::Bind(std::span<const int64_t> symbols, BoundSizes* out) const {
  SLICE_RETURN_IF_ERROR(CheckSymbols(program_, symbols));
  // *out is written on success alone: results wait here, in memory that every bind of this thread
  // uses again.
  static thread_local std::vector<int64_t> slots;
  slots.clear();
  for (const uint32_t value : plan_.shapes) {
    SLICE_ASSIGN_OR_RETURN(const int64_t bytes, ValueBytes(value, symbols));
    slots.push_back(bytes);
  }
  for (const BindPlan::Number& number : plan_.numbers) {
    const auto refuse = [&](const std::string& text) {
      return Error(StatusCode::kOverflow, "group %u '%s': %s%s", number.group,
                   groups_[number.group].name.c_str(), number.what, text.c_str());
    };
    int64_t value = 0;
    if (number.expr != kNoExpr) {
      const Result<int64_t> evaluated = expressions_.Evaluate(number.expr, symbols);
      if (!evaluated.ok()) return refuse(": " + evaluated.status().text());
      value = *evaluated;
    }
    if (value < 0 || value > number.value_max) {
      return refuse(" is " + std::to_string(value) + ", allowed is 0 to " +
                    std::to_string(number.value_max));
    }
    slots.push_back(value);
  }
  out->plan_ = &plan_;
  out->slots_.assign(slots.begin(), slots.end());
  return Status::Ok();
}

}  // namespace slice::graph
