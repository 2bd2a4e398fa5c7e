// Size expressions: compiled from tenant-written trees to postfix code, evaluated with overflow
// checks.
//
// An error inside a branch that WHERE does not take is not an error: every stack slot carries its
// own failure.
#include <algorithm>
#include <array>

#include "common/checked.h"
#include "daemon/graph/template.h"

namespace slice::graph {
namespace {

constexpr uint8_t kConstantCode = 100;
constexpr uint8_t kSymbolCode = 101;
constexpr uint32_t kStackMax = 256;

enum class Failure : uint8_t { kNone = 0, kArithmetic, kDivisionByZero, kNegativeExponent };

struct Cell {  // no initialisers: a stack of these is left raw
  int64_t value;
  Failure failure;
};

// Number of arguments of a kind; -1 = one or more, -2 = unknown kind.
int Arity(proto::Expr::Kind kind) {
  switch (kind) {
    case proto::Expr::ADD:
    case proto::Expr::MUL:
    case proto::Expr::MAX:
    case proto::Expr::MIN:
    case proto::Expr::AND:
    case proto::Expr::OR:
      return -1;
    case proto::Expr::NOT:
      return 1;
    case proto::Expr::WHERE:
      return 3;
    case proto::Expr::FLOOR_DIV:
    case proto::Expr::CEIL_DIV:
    case proto::Expr::MOD:
    case proto::Expr::POW:
    case proto::Expr::EQ:
    case proto::Expr::NE:
    case proto::Expr::LT:
    case proto::Expr::LE:
    case proto::Expr::GT:
    case proto::Expr::GE:
    case proto::Expr::SHIFT_LEFT:
    case proto::Expr::SHIFT_RIGHT:
      return 2;
    default:
      return -2;
  }
}

Cell FloorDivide(int64_t a, int64_t b, int64_t* remainder) {
  if (b == 0) return {0, Failure::kDivisionByZero};
  if (b == -1) {
    *remainder = 0;
    int64_t result = 0;
    if (!CheckedSub(0, a, &result)) return {0, Failure::kArithmetic};
    return {result, Failure::kNone};
  }
  int64_t quotient = a / b;
  *remainder = a % b;
  if (*remainder != 0 && ((*remainder < 0) != (b < 0))) {
    quotient -= 1;
    *remainder += b;
  }
  return {quotient, Failure::kNone};
}

Cell Power(int64_t base, int64_t exponent) {
  if (exponent < 0) return {0, Failure::kNegativeExponent};
  int64_t result = 1;
  while (exponent > 0) {
    if ((exponent & 1) != 0 && !CheckedMul(result, base, &result)) return {0, Failure::kArithmetic};
    exponent >>= 1;
    if (exponent > 0 && !CheckedMul(base, base, &base)) return {0, Failure::kArithmetic};
  }
  return {result, Failure::kNone};
}

Cell ShiftLeft(int64_t a, int64_t count) {
  if (count < 0) return {0, Failure::kArithmetic};
  if (a == 0) return {0, Failure::kNone};
  int64_t result = 0;
  if (count > 62 || !CheckedMul(a, int64_t{1} << count, &result)) return {0, Failure::kArithmetic};
  return {result, Failure::kNone};
}

Cell ShiftRight(int64_t a, int64_t count) {
  if (count < 0) return {0, Failure::kArithmetic};
  return {a >> std::min<int64_t>(count, 63), Failure::kNone};
}

Cell Binary(proto::Expr::Kind kind, int64_t a, int64_t b) {
  Cell cell{0, Failure::kNone};
  int64_t remainder = 0;
  bool fits = true;
  switch (kind) {
    case proto::Expr::ADD:
      fits = CheckedAdd(a, b, &cell.value);
      break;
    case proto::Expr::MUL:
      fits = CheckedMul(a, b, &cell.value);
      break;
    case proto::Expr::MAX:
      cell.value = std::max(a, b);
      break;
    case proto::Expr::MIN:
      cell.value = std::min(a, b);
      break;
    case proto::Expr::AND:
      cell.value = (a != 0 && b != 0) ? 1 : 0;
      break;
    case proto::Expr::OR:
      cell.value = (a != 0 || b != 0) ? 1 : 0;
      break;
    case proto::Expr::EQ:
      cell.value = a == b ? 1 : 0;
      break;
    case proto::Expr::NE:
      cell.value = a != b ? 1 : 0;
      break;
    case proto::Expr::LT:
      cell.value = a < b ? 1 : 0;
      break;
    case proto::Expr::LE:
      cell.value = a <= b ? 1 : 0;
      break;
    case proto::Expr::GT:
      cell.value = a > b ? 1 : 0;
      break;
    case proto::Expr::GE:
      cell.value = a >= b ? 1 : 0;
      break;
    case proto::Expr::FLOOR_DIV:
      return FloorDivide(a, b, &remainder);
    case proto::Expr::CEIL_DIV:
      cell = FloorDivide(a, b, &remainder);
      if (cell.failure == Failure::kNone && remainder != 0)
        fits = CheckedAdd(cell.value, 1, &cell.value);
      break;
    case proto::Expr::MOD:
      if (b == -1) return {0, Failure::kNone};
      cell = FloorDivide(a, b, &remainder);
      cell.value = remainder;
      return cell;
    case proto::Expr::POW:
      return Power(a, b);
    case proto::Expr::SHIFT_LEFT:
      return ShiftLeft(a, b);
    case proto::Expr::SHIFT_RIGHT:
      return ShiftRight(a, b);
    default:
      fits = false;
  }
  if (!fits) cell.failure = Failure::kArithmetic;
  return cell;
}

// Folds `count` cells into the first.
void Apply(proto::Expr::Kind kind, Cell* cells, uint32_t count) {
  if (kind == proto::Expr::WHERE) {
    if (cells[0].failure == Failure::kNone) cells[0] = cells[0].value != 0 ? cells[1] : cells[2];
    return;
  }
  if (kind == proto::Expr::NOT) {
    cells[0].value = cells[0].value == 0 ? 1 : 0;
    return;
  }
  if (kind == proto::Expr::AND || kind == proto::Expr::OR)
    cells[0].value = cells[0].value != 0 ? 1 : 0;
  for (uint32_t i = 1; i < count; ++i) {
    if (cells[0].failure != Failure::kNone) return;
    if (cells[i].failure != Failure::kNone) {
      cells[0] = cells[i];
      return;
    }
    cells[0] = Binary(kind, cells[0].value, cells[i].value);
  }
}

}  // namespace

Status ExprTable::Compile(const proto::Expr& expr, uint32_t symbol_count, const Limits& limits,
                          uint32_t depth, uint32_t* node_count) {
  if (depth > limits.expr_depth_max) {
    return Error(StatusCode::kOverflow, "expression is deeper than %u levels",
                 limits.expr_depth_max);
  }
  const uint32_t nodes_max = std::min(limits.expr_nodes_max, kStackMax);
  if (++*node_count > nodes_max) {
    return Error(StatusCode::kOverflow, "expression has more than %u nodes", nodes_max);
  }
  switch (expr.node_case()) {
    case proto::Expr::kConstant:
      code_.push_back({kConstantCode, 0, expr.constant()});
      return Status::Ok();
    case proto::Expr::kSymbol:
      if (expr.symbol() >= symbol_count) {
        return Error(StatusCode::kGraph, "expression uses symbol %u, %u are declared",
                     expr.symbol(), symbol_count);
      }
      code_.push_back({kSymbolCode, 0, expr.symbol()});
      return Status::Ok();
    case proto::Expr::kCall: {
      const int arity = Arity(expr.call().kind());
      const int count = expr.call().args_size();
      if (arity == -2) {
        return Error(StatusCode::kGraph, "expression has unknown kind %d",
                     static_cast<int>(expr.call().kind()));
      }
      if (arity == -1 ? count < 1 : count != arity) {
        return Error(StatusCode::kGraph, "expression kind %d has %d arguments, needs %s%d",
                     static_cast<int>(expr.call().kind()), count, arity == -1 ? "at least " : "",
                     arity == -1 ? 1 : arity);
      }
      for (const proto::Expr& arg : expr.call().args()) {
        SLICE_RETURN_IF_ERROR(Compile(arg, symbol_count, limits, depth + 1, node_count));
      }
      code_.push_back({static_cast<uint8_t>(expr.call().kind()), static_cast<uint8_t>(count), 0});
      return Status::Ok();
    }
    default:
      return Error(StatusCode::kGraph, "expression is empty");
  }
}

Result<ExprIndex> ExprTable::Add(const proto::Expr& expr, uint32_t symbol_count,
                                 const Limits& limits) {
  const size_t begin = code_.size();
  uint32_t node_count = 0;
  Status status = Compile(expr, symbol_count, limits, 1, &node_count);
  if (!status.ok()) {
    code_.resize(begin);
    return status;
  }
  if (code_.size() > UINT32_MAX || programs_.size() >= kNoExpr) {
    code_.resize(begin);
    return Error(StatusCode::kOverflow, "too many expressions in one template");
  }
  programs_.push_back({static_cast<uint32_t>(begin), static_cast<uint32_t>(code_.size())});
  return static_cast<ExprIndex>(programs_.size() - 1);
}

Result<int64_t> ExprTable::Evaluate(ExprIndex index, std::span<const int64_t> symbols) const {
  if (index >= programs_.size())
    return Error(StatusCode::kInternal, "expression %u does not exist", index);
  const Program program = programs_[index];
  const Instruction& first = code_[program.begin];
  if (first.kind == kConstantCode && program.end - program.begin == 1)
    return int64_t{first.operand};
  std::array<Cell, kStackMax> stack;
  uint32_t top = 0;
  for (uint32_t at = program.begin; at < program.end; ++at) {
    const Instruction& instruction = code_[at];
    if (instruction.kind == kConstantCode) {
      stack[top++] = {instruction.operand, Failure::kNone};
    } else if (instruction.kind == kSymbolCode) {
      const auto symbol = static_cast<size_t>(instruction.operand);
      if (symbol >= symbols.size()) {
        return Error(StatusCode::kOverflow, "expression uses symbol %zu, %zu values were given",
                     symbol, symbols.size());
      }
      stack[top++] = {symbols[symbol], Failure::kNone};
    } else {
      top -= instruction.arg_count;
      Apply(static_cast<proto::Expr::Kind>(instruction.kind), &stack[top], instruction.arg_count);
      ++top;
    }
  }
  switch (stack[0].failure) {
    case Failure::kNone:
      return stack[0].value;
    case Failure::kDivisionByZero:
      return Error(StatusCode::kOverflow, "division by zero in a size expression");
    case Failure::kNegativeExponent:
      return Error(StatusCode::kOverflow, "negative exponent in a size expression");
    default:
      return Error(StatusCode::kOverflow, "a size expression does not fit in 63 bits");
  }
}

}  // namespace slice::graph
