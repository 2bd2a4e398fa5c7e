"""Expr protobufs: conversion from sympy, limits, both evaluators."""

import random

import pytest
import sympy
import torch.utils._sympy.functions as sf

from slicescheduler._proto import template_pb2 as pb
from slicescheduler.errors import Unsupported
from slicescheduler.expressions import (
    DEPTH_MAX,
    NODES_MAX,
    ExpressionError,
    SymbolTable,
    compile_expressions,
    constant,
    count_nodes,
    evaluate,
    round_up_bound,
)

A, B = sympy.symbols("s0 s1", integer=True, positive=True)


def call(kind, *args):
    expr = pb.Expr()
    expr.call.kind = kind
    expr.call.args.extend(constant(a) if isinstance(a, int) else a for a in args)
    return expr


CASES = [
    (A + 3 * B, lambda a, b: a + 3 * b),
    (A * B * 7 - 5, lambda a, b: a * b * 7 - 5),
    (A**3, lambda a, b: a**3),
    (sf.FloorDiv(A, 3), lambda a, b: a // 3),
    (sf.ModularIndexing(A, 2, 5), lambda a, b: a // 2 % 5),
    (sf.PythonMod(A - 100, 7), lambda a, b: (a - 100) % 7),
    (sf.Mod(A, 7), lambda a, b: a % 7),
    (sf.Max(A, B, 9), lambda a, b: max(a, b, 9)),
    (sf.Min(A, B), min),
    (sf.CeilToInt(sf.IntTrueDiv(A, B)), lambda a, b: -(-a // b)),
    (sf.Where(A < B, A * 2, B + 1), lambda a, b: a * 2 if a < b else b + 1),
    (sf.LShift(A, 3), lambda a, b: a << 3),
    (sf.RShift(A, 1), lambda a, b: a >> 1),
    (sf.PowByNatural(2, B), lambda a, b: 2**b),
    (sympy.Eq(A, B), lambda a, b: int(a == b)),
    (sympy.And(A < B, sympy.Ne(A, 3)), lambda a, b: int(a < b and a != 3)),
    (sympy.Or(A < B, A > 30), lambda a, b: int(a < b or a > 30)),
]


@pytest.mark.parametrize("expression, expected", CASES, ids=lambda x: str(x) if isinstance(x, sympy.Basic) else "")
def test_Happy_both_evaluators_agree_with_python(expression, expected):
    table = SymbolTable()
    table.index(A), table.index(B)
    expr = table.expression(expression)
    fast = compile_expressions([expr, expr])
    generator = random.Random(1)
    for _ in range(50):
        binding = (generator.randint(1, 50), generator.randint(1, 50))
        assert evaluate(expr, binding) == expected(*binding)
        assert fast(binding) == (expected(*binding),) * 2


def test_Happy_symbols_are_numbered_by_first_use_and_ranged():
    table = SymbolTable(lambda s: (2, sympy.oo) if s == A else (0, 9))
    table.expression(B + 1), table.expression(A)
    assert table.symbols == [B, A]
    assert [(s.name, s.min, s.max) for s in table.to_proto()] == [("s1", 0, 9), ("s0", 2, 2**40)]


def test_Edge_plain_integers_and_booleans():
    table = SymbolTable()
    assert table.expression(-5).constant == -5
    assert table.expression(True).constant == 1
    assert compile_expressions([constant(-5)])(()) == (-5,)
    assert compile_expressions([])(()) == ()


@pytest.mark.parametrize("value", [sympy.Rational(1, 2) * A, sympy.sqrt(A), 0.5, sympy.sin(A), A ** (-1)])
def test_Edge_unsupported_nodes_name_the_expression(value):
    with pytest.raises(Unsupported) as caught:
        SymbolTable().expression(value)
    assert str(value) in str(caught.value)


def test_Edge_data_dependent_symbols_are_refused():
    with pytest.raises(Unsupported, match="depends on data"):
        SymbolTable().expression(sympy.Symbol("u0", integer=True) + 1)


def test_Edge_limits_are_exact():
    flat = sympy.Add(*[sympy.Symbol(f"s{i}", integer=True) for i in range(NODES_MAX - 1)])
    assert count_nodes(SymbolTable().expression(flat)) == NODES_MAX
    with pytest.raises(Unsupported, match="more than 256"):
        SymbolTable().expression(flat + sympy.Symbol("s_last", integer=True))
    deep = A
    for _ in range(DEPTH_MAX - 1):
        deep = sf.FloorDiv(B, deep, evaluate=False)
    SymbolTable().expression(deep)
    with pytest.raises(Unsupported, match="deeper than 32"):
        SymbolTable().expression(sf.FloorDiv(B, deep, evaluate=False))
    with pytest.raises(Unsupported, match="64 bits"):
        constant(2**63)


@pytest.mark.parametrize(
    "expr",
    [
        call(pb.Expr.ADD, 2**63 - 1, 1),
        call(pb.Expr.MUL, 2**62, 2),
        call(pb.Expr.POW, 2, 63),
        call(pb.Expr.POW, 2, -1),
        call(pb.Expr.POW, 3, 2**40),
        call(pb.Expr.FLOOR_DIV, 1, 0),
        call(pb.Expr.FLOOR_DIV, -(2**63), -1),
        call(pb.Expr.CEIL_DIV, 1, 0),
        call(pb.Expr.MOD, 1, 0),
        call(pb.Expr.SHIFT_LEFT, 1, 63),
        call(pb.Expr.SHIFT_LEFT, 1, -1),
        call(pb.Expr.SHIFT_RIGHT, 1, 64),
        call(pb.Expr.NOT, 1, 2),
        call(pb.Expr.ADD),
        call(99, 1),
        pb.Expr(symbol=1),
        pb.Expr(),
    ],
    ids=str,
)
def test_Malicious_faulty_expressions_raise(expr):
    with pytest.raises(ExpressionError):
        evaluate(expr, (1,))


def test_Edge_untaken_branch_is_not_evaluated():
    bad = call(pb.Expr.FLOOR_DIV, 1, 0)
    expr = call(pb.Expr.WHERE, 1, 5, bad)
    assert evaluate(expr, ()) == 5
    assert compile_expressions([expr])(()) == (5,)


@pytest.mark.parametrize("a, b", [(7, 3), (-7, 3), (7, -3), (-7, -3)])
def test_Edge_division_signs(a, b):
    for kind, expected in ((pb.Expr.FLOOR_DIV, a // b), (pb.Expr.CEIL_DIV, -(-a // b)), (pb.Expr.MOD, a % b)):
        expr = call(kind, a, b)
        assert evaluate(expr, ()) == expected == compile_expressions([expr])(())[0]


def test_Happy_round_up_bound_is_tight():
    assert round_up_bound(1, 64) == 64 and round_up_bound(128, 64) == 128
    assert round_up_bound(128 * A, 64) == 128 * A
    for value in (4 * A, 4 * A + 2, 100 * A * B, sf.FloorDiv(A, 2) * 4):
        for a in range(1, 80):
            exact, bound = value.subs({A: a, B: 3}), round_up_bound(value, 64).subs({A: a, B: 3})
            assert -(-exact // 64) * 64 <= bound < -(-exact // 64) * 64 + 64
