"""Shape expressions: sympy -> Expr protobuf, and two ways to evaluate one.

* `SymbolTable.expression()` turns a Python int, a SymInt or a sympy expression into an `Expr` over the
  template's symbols, inside the limits of the format (256 nodes, depth 32).
* `evaluate()` is the reference: typed, with the overflow checks of signed 64-bit arithmetic.
* `compile_expressions()` builds one Python function for the per-call path. It uses Python's big integers
  and checks only the results.

Pure Python over sympy and protobuf; no torch graph, no IO. Not thread-safe while a table grows.
"""

import math

import sympy
import torch
import torch.utils._sympy.functions as torch_functions
from torch.utils._sympy.numbers import int_oo

from ._proto import template_pb2 as pb
from .errors import SliceError, Unsupported

NODES_MAX = 256
DEPTH_MAX = 32
INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
# Upper end given to a symbol that torch leaves unbounded: far beyond any extent, small enough that the
# product with an element size and a few small factors stays inside 64 bits.
SYMBOL_MAX_DEFAULT = 2**40

_Kind = pb.Expr


class ExpressionError(SliceError):
    """Evaluation failed: overflow, division by zero, a negative exponent or shift."""


def _functions(names):
    """The classes of torch.utils._sympy.functions that exist in this torch, with their kinds."""
    return {getattr(torch_functions, name): kind for name, kind in names.items() if hasattr(torch_functions, name)}


_DIRECT = _functions({
    "FloorDiv": _Kind.FLOOR_DIV,
    "CleanDiv": _Kind.FLOOR_DIV,
    "Mod": _Kind.MOD,
    "PythonMod": _Kind.MOD,
    "Where": _Kind.WHERE,
    "Max": _Kind.MAX,
    "Min": _Kind.MIN,
    "PowByNatural": _Kind.POW,
    "LShift": _Kind.SHIFT_LEFT,
    "RShift": _Kind.SHIFT_RIGHT,
}) | {
    sympy.Add: _Kind.ADD,
    sympy.Mul: _Kind.MUL,
    sympy.Max: _Kind.MAX,
    sympy.Min: _Kind.MIN,
    sympy.Eq: _Kind.EQ,
    sympy.Ne: _Kind.NE,
    sympy.Lt: _Kind.LT,
    sympy.Le: _Kind.LE,
    sympy.Gt: _Kind.GT,
    sympy.Ge: _Kind.GE,
    sympy.And: _Kind.AND,
    sympy.Or: _Kind.OR,
    sympy.Not: _Kind.NOT,
}
# Rounding of an exact quotient of integers. The float division itself never reaches a template.
_ROUNDED = _functions({"CeilToInt": _Kind.CEIL_DIV, "FloorToInt": _Kind.FLOOR_DIV})
_TRUE_DIVISIONS = tuple(_functions({"IntTrueDiv": 0, "FloatTrueDiv": 0}))


def constant(value):
    """An Expr that is the integer `value`. Errors: Unsupported outside int64."""
    value = int(value)
    if not INT64_MIN <= value <= INT64_MAX:
        raise Unsupported(f"the constant {value} does not fit into 64 bits")
    return pb.Expr(constant=value)


class SymbolTable:
    """Symbols of one template, numbered in order of first use.

    `range_of(sympy.Symbol) -> (min, max)` gives the inclusive range; infinite ends become
    SYMBOL_MAX_DEFAULT.
    """

    def __init__(self, range_of=None):
        self._range_of = range_of
        self._index = {}

    @property
    def symbols(self):
        """The sympy symbols in template order."""
        return list(self._index)

    def index(self, symbol):
        """Position of `symbol`, added if new. Errors: Unsupported for data-dependent symbols."""
        if symbol not in self._index:
            if str(symbol).startswith(("u", "zuf", "zf")):
                raise Unsupported(f"the size {symbol} depends on data, which a template cannot express")
            self._index[symbol] = len(self._index)
        return self._index[symbol]

    def range(self, symbol):
        """Inclusive (min, max) of `symbol` as Python ints."""
        low, high = self._range_of(symbol) if self._range_of else (0, int_oo)
        low = 0 if low in (-int_oo, -sympy.oo) else int(low)
        high = SYMBOL_MAX_DEFAULT if high in (int_oo, sympy.oo) else min(int(high), SYMBOL_MAX_DEFAULT)
        return low, max(low, high)

    def to_proto(self):
        """The `symbols` field of the template."""
        ranges = [self.range(symbol) for symbol in self._index]
        return [
            pb.Symbol(name=str(symbol), min=low, max=high) for symbol, (low, high) in zip(self._index, ranges)
        ]

    def expression(self, value):
        """int, bool, SymInt, SymBool or sympy expression -> Expr.

        Errors: Unsupported, with the expression's text, for nodes outside the format and past its limits.
        """
        source = sympy_of(value)
        if isinstance(source, int):
            return constant(source)
        budget = [NODES_MAX]
        result = pb.Expr()
        self._fill(result, source, source, 1, budget)
        return result

    def _fill(self, out, node, whole, depth, budget):
        budget[0] -= 1
        if budget[0] < 0:
            raise Unsupported(f"expression with more than {NODES_MAX} nodes: {_shorten(whole)}")
        if depth > DEPTH_MAX:
            raise Unsupported(f"expression deeper than {DEPTH_MAX} levels: {_shorten(whole)}")
        if isinstance(node, (sympy.Integer, int)) or node in (sympy.true, sympy.false):
            out.CopyFrom(constant(bool(node) if node in (sympy.true, sympy.false) else node))
            return
        if isinstance(node, sympy.Symbol):
            out.symbol = self.index(node)
            return
        name = type(node).__name__
        if name == "Identity":
            return self._fill(out, node.args[0], whole, depth, budget)
        if name == "IntInfinity":
            out.constant = INT64_MAX
            return
        kind, args = self._kind_and_args(node, whole)
        out.call.kind = kind
        for arg in args:
            self._fill(out.call.args.add(), arg, whole, depth + 1, budget)

    @staticmethod
    def _kind_and_args(node, whole):
        kind = _DIRECT.get(type(node))
        if kind is not None:
            return kind, node.args
        if type(node) in _ROUNDED and isinstance(node.args[0], _TRUE_DIVISIONS):
            return _ROUNDED[type(node)], node.args[0].args
        if type(node).__name__ == "ModularIndexing":
            base, divisor, modulus = node.args
            return _Kind.MOD, (torch_functions.FloorDiv(base, divisor), modulus)
        if isinstance(node, sympy.Pow) and node.exp.is_Integer and node.exp >= 0:
            return _Kind.POW, node.args
        raise Unsupported(f"expression node {type(node).__name__} in {_shorten(whole)}")


def _shorten(expression):
    text = str(expression)
    return text if len(text) <= 300 else text[:297] + "..."


def sympy_of(value):
    """int or sympy expression behind `value` (int, bool, SymInt, SymBool, sympy). Errors: Unsupported."""
    if isinstance(value, bool) or isinstance(value, int):
        return int(value)
    if isinstance(value, (torch.SymInt, torch.SymBool)):
        value = value.node.expr
    if isinstance(value, torch.SymFloat) or isinstance(value, float):
        raise Unsupported(f"a floating point size: {value}")
    if isinstance(value, sympy.Integer):
        return int(value)
    if isinstance(value, (sympy.Basic,)):
        return value
    raise Unsupported(f"{type(value).__name__} is not an integer expression: {value}")


def count_nodes(expr):
    """Number of nodes of an Expr."""
    if expr.WhichOneof("node") != "call":
        return 1
    return 1 + sum(count_nodes(arg) for arg in expr.call.args)


# ---- reference evaluator -----------------------------------------------------------------------


def _checked(value):
    if not INT64_MIN <= value <= INT64_MAX:
        raise ExpressionError("64-bit overflow in a shape expression")
    return value


def _divide(a, b):
    if b == 0:
        raise ExpressionError("division by zero in a shape expression")
    return a // b


def _fold(step):
    def apply(args):
        total = args[0]
        for arg in args[1:]:
            total = _checked(step(total, arg))
        return total

    return apply


def _power(args):
    base, exponent = args
    if exponent < 0:
        raise ExpressionError("negative exponent in a shape expression")
    if abs(base) > 1 and exponent > 63:
        raise ExpressionError("64-bit overflow in a shape expression")
    return base**exponent


def _shift_left(args):
    if not 0 <= args[1] < 64:
        raise ExpressionError("shift distance outside 0..63 in a shape expression")
    return args[0] << args[1]


def _shift_right(args):
    if not 0 <= args[1] < 64:
        raise ExpressionError("shift distance outside 0..63 in a shape expression")
    return args[0] >> args[1]


def _modulo(args):
    return args[0] - _divide(args[0], args[1]) * args[1]


_EVALUATE = {
    _Kind.ADD: _fold(lambda a, b: a + b),
    _Kind.MUL: _fold(lambda a, b: a * b),
    _Kind.FLOOR_DIV: lambda args: _divide(*args),
    _Kind.CEIL_DIV: lambda args: -_divide(-args[0], args[1]),
    _Kind.MOD: _modulo,
    _Kind.POW: _power,
    _Kind.MAX: max,
    _Kind.MIN: min,
    _Kind.EQ: lambda args: int(args[0] == args[1]),
    _Kind.NE: lambda args: int(args[0] != args[1]),
    _Kind.LT: lambda args: int(args[0] < args[1]),
    _Kind.LE: lambda args: int(args[0] <= args[1]),
    _Kind.GT: lambda args: int(args[0] > args[1]),
    _Kind.GE: lambda args: int(args[0] >= args[1]),
    _Kind.AND: lambda args: int(all(args)),
    _Kind.OR: lambda args: int(any(args)),
    _Kind.NOT: lambda args: int(not args[0]),
    _Kind.SHIFT_LEFT: _shift_left,
    _Kind.SHIFT_RIGHT: _shift_right,
}
_ARITY = {
    _Kind.FLOOR_DIV: 2, _Kind.CEIL_DIV: 2, _Kind.MOD: 2, _Kind.POW: 2, _Kind.WHERE: 3, _Kind.EQ: 2,
    _Kind.NE: 2, _Kind.LT: 2, _Kind.LE: 2, _Kind.GT: 2, _Kind.GE: 2, _Kind.NOT: 1,
    _Kind.SHIFT_LEFT: 2, _Kind.SHIFT_RIGHT: 2,
}  # fmt: skip


def evaluate(expr, bindings):
    """Value of `expr` with symbol i bound to `bindings[i]`.

    Errors: ExpressionError on overflow of int64, division by zero, unknown symbols or malformed calls.
    """
    node = expr.WhichOneof("node")
    if node == "constant":
        return expr.constant
    if node == "symbol":
        if expr.symbol >= len(bindings):
            raise ExpressionError(f"symbol {expr.symbol} of {len(bindings)} in a shape expression")
        return _checked(int(bindings[expr.symbol]))
    if node != "call":
        raise ExpressionError("an empty shape expression")
    kind, args = expr.call.kind, expr.call.args
    if not args or len(args) != _ARITY.get(kind, len(args)):
        raise ExpressionError(f"{len(args)} arguments for expression kind {kind}")
    if kind == _Kind.WHERE:  # only the taken branch is evaluated
        return evaluate(args[1] if evaluate(args[0], bindings) else args[2], bindings)
    if kind not in _EVALUATE:
        raise ExpressionError(f"unknown expression kind {kind}")
    return _checked(_EVALUATE[kind]([evaluate(arg, bindings) for arg in args]))


# ---- compiled evaluator ------------------------------------------------------------------------

_INFIX = {
    _Kind.ADD: " + ", _Kind.MUL: " * ", _Kind.FLOOR_DIV: " // ", _Kind.MOD: " % ", _Kind.POW: " ** ",
    _Kind.EQ: " == ", _Kind.NE: " != ", _Kind.LT: " < ", _Kind.LE: " <= ", _Kind.GT: " > ", _Kind.GE: " >= ",
    _Kind.SHIFT_LEFT: " << ", _Kind.SHIFT_RIGHT: " >> ",
}  # fmt: skip
_COMPARISONS = {_Kind.EQ, _Kind.NE, _Kind.LT, _Kind.LE, _Kind.GT, _Kind.GE}


def _source(expr):
    """Python source of `expr` over the tuple `s`."""
    node = expr.WhichOneof("node")
    if node == "constant":
        return f"({expr.constant})" if expr.constant < 0 else str(expr.constant)
    if node == "symbol":
        return f"s[{expr.symbol}]"
    if node != "call":
        raise ExpressionError("an empty shape expression")
    kind = expr.call.kind
    args = [_source(arg) for arg in expr.call.args]
    if kind in _COMPARISONS:
        return f"int({_INFIX[kind].join(args)})"
    if kind in _INFIX:
        return "(" + _INFIX[kind].join(args) + ")"
    if kind == _Kind.CEIL_DIV:
        return f"(-((-{args[0]}) // {args[1]}))"
    if kind in (_Kind.MAX, _Kind.MIN):
        name = "max" if kind == _Kind.MAX else "min"
        return args[0] if len(args) == 1 else f"{name}({', '.join(args)})"
    if kind == _Kind.WHERE:
        return f"({args[1]} if {args[0]} else {args[2]})"
    if kind == _Kind.AND:
        return "int(" + " != 0 and ".join(args) + " != 0)"
    if kind == _Kind.OR:
        return "int(" + " != 0 or ".join(args) + " != 0)"
    if kind == _Kind.NOT:
        return f"int(not {args[0]})"
    raise ExpressionError(f"unknown expression kind {kind}")


def compile_expressions(exprs):
    """One function `f(symbols: tuple[int, ...]) -> tuple[int, ...]` that evaluates all of `exprs`.

    Built for the per-call path: about 0.1 us per simple expression. Intermediate values are big integers;
    callers that hand results to 64-bit code check them there. Errors (of f): ZeroDivisionError,
    ValueError for negative shifts.
    """
    exprs = list(exprs)
    if not exprs:
        return lambda symbols: ()
    if all(expr.WhichOneof("node") == "constant" for expr in exprs):
        values = tuple(expr.constant for expr in exprs)
        return lambda symbols: values
    body = ", ".join(_source(expr) for expr in exprs)
    return eval(f"lambda s: ({body},)", {"__builtins__": {}, "max": max, "min": min, "int": int})  # noqa: S307


# ---- sizes in bytes ----------------------------------------------------------------------------


def round_up_bound(value, block):
    """Smallest easy upper bound of `value` (int or sympy) rounded up to a multiple of `block`.

    Exact for constants and for polynomials whose coefficients are all multiples of `block`. Otherwise
    value + block - gcd(coefficients, block): never below the rounded value, less than one block above it,
    and still a polynomial, so sums of many tensors stay small.
    """
    if isinstance(value, (int, sympy.Integer)):
        return -(-int(value) // block) * block
    content = block
    for term in sympy.Add.make_args(value):
        coefficient, _ = term.as_coeff_Mul()
        if not coefficient.is_Integer:
            return value + block - 1
        content = math.gcd(content, int(coefficient))
    return value + (block - content)
