"""The re-inplace pass against programs made to break it, each compared with eager bit by bit."""

import random

import pytest
import torch

import programs
from reference import Reference
from slicescheduler._proto import template_pb2 as pb

# ---- programs ----------------------------------------------------------------------------------
# fmt: off
def simple_add(x): x.add_(1); return x * 2
def read_old_clone(x): o = x.clone(); x.add_(1); return o + x
def read_old_expr(x): o = x * 3; x.add_(1); return o + x
def view_returned(x): v = x[0]; x.add_(1); return v * 2
def view_old_then_mutate(x): v = x.t(); x.mul_(2); return v.sum() + x.sum()
def slice_assign(c, k): c[:, 3:5] = k; return c.sum(0)
def slice_assign_twice(c, k): c[:, 3:5] = k; c[:, 0:2] = k * 2; return c.sum(0)
def index_assign(c, p, k): c[:, p] = k; return c.sum(0)
def select_assign(c, k): c[1] = k; return c + 1
def index_copy(c, p, k): c.index_copy_(1, p, k); return c * 2
def index_copy_own_source(c, p): c.index_copy_(0, p, c[1:3]); return c + 1
def chain(x, y): x.add_(y); x.mul_(2); return x + y
def plain_copy(x, y): x.copy_(y); return x + 1
def row_from_row(x): x[0].add_(x[1]); return x * 1
def roll_copy(x): x.copy_(x.roll(-1, 0)); return x + 1
def swap(x, y): t = x.clone(); x.copy_(y); y.copy_(t); return x - y
def returns_self(x): return x.add_(1)
def transposed_mutation(x): x.t().add_(1); return x * 1
def masked(x): x.masked_fill_(x > 3, 0.0); return x + 1
def where_old(x): y = torch.where(x > 2, x, -x); x.zero_(); return y
def self_operand(x): x.add_(x.t()); return x * 1
def old_view_after(x): y = x[:, None]; x.index_fill_(0, torch.tensor([1]), 9.0); return y.sum() + x.sum()
def scatter(x, i, s): x.scatter_(1, i, s); return x + 0
def cat_old(x, y): z = torch.cat([x, y]); x.sub_(1); return z, x * 2
def narrow_chain(c, p, k): c.narrow(1, 1, 4).index_copy_(1, p, k); return c + 1
def two_views(c, k): a, b = c[0], c[1]; a.copy_(k); b.copy_(k * 2); return c + 0

# beyond the first 26
def fresh_output_is_the_update(x): y = x + 1; x.copy_(y); return y
def view_of_fresh_update(x): y = x + 1; x.copy_(y); return y[0], x * 2
def overlapping_rows(x): x[0:3] = x[1:4]; return x * 1
def type_promotion(i): i.copy_(i + 0.5); return i * 1
def broadcast_source(x, y): x.copy_(x + y); return x * 1
def double_read(x): x.mul_(x); return x + 1
def two_caches(a, b, k): a.add_(k); b.add_(a); a.mul_(b); return a + b
def cross_copy(a, b): a.copy_(b); b.add_(1); return a + b
def read_moved_copy(a, b): a[0:2] = b[0:2]; b.add_(1); a.add_(1); return a + b
def split_views(x): a, b = x.split(2); x.add_(1); return a * b
def returned_view(x): x.add_(1); return x[1], x * 2
def counter(n, x): p = torch.arange(3) + n; n.add_(3); return x[p], n + 1
def chain_own_view(x): x.add_(1); x.add_(x.t()); return x * 1
def written_then_viewed(x): x.add_(1); return (x.t() @ x).t()
# fmt: on

# Eager refuses these overlaps; torch traces them as if the source were copied first, and so do we.
EAGER_TWINS = {
    self_operand: lambda x: x.add_(x.t().clone()) * 1,
    chain_own_view: lambda x: x.add_(1).add_(x.t().clone()) * 1,
    index_copy_own_source: lambda c, p: c.index_copy_(0, p, c[1:3].clone()) + 1,
    overlapping_rows: lambda x: (x[0:3].copy_(x[1:4].clone()), x * 1)[1],
}


def ramp(*sizes):
    return lambda: torch.arange(float(torch.Size(sizes).numel())).reshape(sizes) + 1


def ints(*values):
    return lambda: torch.tensor(values)


# program, inputs, operator that must appear in place (None: any correct result will do)
PATTERNS = [
    (simple_add, [ramp(3, 3)], "aten::add_.Tensor"),
    (read_old_clone, [ramp(3, 3)], "aten::add_.Tensor"),
    (read_old_expr, [ramp(3, 3)], "aten::add_.Tensor"),
    (view_returned, [ramp(3, 3)], "aten::add_.Tensor"),
    (view_old_then_mutate, [ramp(3, 3)], "aten::mul_.Tensor"),
    (slice_assign, [ramp(2, 6), ramp(2, 2)], "aten::copy_"),
    (slice_assign_twice, [ramp(2, 6), ramp(2, 2)], "aten::copy_"),
    (index_assign, [ramp(2, 6), ints(1, 4), ramp(2, 2)], "aten::index_put_"),
    (select_assign, [ramp(3, 4), ramp(4)], "aten::copy_"),
    (index_copy, [ramp(2, 6), ints(1, 4), ramp(2, 2)], "aten::index_copy_"),
    (index_copy_own_source, [ramp(4, 3), ints(0, 1)], None),
    (chain, [ramp(3, 3), ramp(3, 3)], "aten::mul_.Tensor"),
    (plain_copy, [ramp(3), ramp(3)], "aten::copy_"),
    (row_from_row, [ramp(3, 3)], None),
    (roll_copy, [ramp(5)], None),
    (swap, [ramp(3), lambda: -ramp(3)()], None),
    (returns_self, [ramp(3)], "aten::add_.Tensor"),
    (transposed_mutation, [ramp(3, 3)], None),
    (masked, [ramp(3, 3)], "aten::masked_fill_.Scalar"),
    (where_old, [ramp(3)], None),
    (self_operand, [ramp(3, 3)], None),
    (old_view_after, [ramp(3)], None),
    (scatter, [ramp(2, 4), lambda: torch.tensor([[0, 2], [1, 3]]), ramp(2, 2)], "aten::scatter_.src"),
    (cat_old, [ramp(3), ramp(2)], "aten::sub_.Tensor"),
    (narrow_chain, [ramp(2, 6), ints(0, 2), ramp(2, 2)], None),
    (two_views, [ramp(2, 3), ramp(3)], "aten::copy_"),
    (fresh_output_is_the_update, [ramp(3)], None),
    (view_of_fresh_update, [ramp(3, 2)], None),
    (overlapping_rows, [ramp(5, 2)], None),
    (type_promotion, [ints(1, 2, 3)], None),
    (broadcast_source, [ramp(3, 3), ramp(3)], "aten::copy_"),
    (double_read, [ramp(3)], None),
    (two_caches, [ramp(3), ramp(3), ramp(3)], None),
    (cross_copy, [ramp(3), ramp(3)], None),
    (read_moved_copy, [ramp(4), ramp(4)], None),
    (split_views, [ramp(4, 2)], None),
    (returned_view, [ramp(3, 2)], "aten::add_.Tensor"),
    (counter, [lambda: torch.tensor(0), ramp(6)], "aten::add_.Tensor"),
    (chain_own_view, [ramp(3, 3)], None),
    (written_then_viewed, [ramp(3, 3)], "aten::add_.Tensor"),
]


def as_list(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def run_both(function, makers, calls=2):
    """Runs `function` eager and through the reference interpreter on equal inputs; returns the capture."""
    runs = []
    eager = EAGER_TWINS.get(function, function)
    recorder = programs.Recorder(run=lambda captured: runs.append(Reference(captured)) or runs[-1])
    compiled = torch.compile(function, backend=recorder.backend, fullgraph=True)
    with torch.inference_mode():
        eager_args = [make() for make in makers]
        our_args = [tensor.clone(memory_format=torch.preserve_format) for tensor in eager_args]
        kept = []  # earlier results too: they must not change when the program runs again
        for _ in range(calls):
            expected, got = as_list(eager(*eager_args)), as_list(compiled(*our_args))
            kept.append((expected, got))
            for ours, theirs in zip(our_args, eager_args):
                assert torch.equal(ours, theirs), "an input differs after the call"
            for expected, got in kept:
                assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert all(run.calls for run in runs)
    (captured,) = recorder.captured
    return captured


@pytest.mark.parametrize("function, makers, in_place", PATTERNS, ids=lambda p: getattr(p, "__name__", ""))
def test_Happy_pattern_equals_eager(function, makers, in_place):
    captured = run_both(function, makers)
    if in_place is not None:
        operators = [captured.template.operators[n.operator_index] for n in captured.template.nodes]
        assert in_place in operators
        assert in_place == "aten::copy_" or "aten::copy_" not in operators


def test_Edge_strided_input_with_gaps_equals_eager():
    # index_copy gives a dense result, index_copy_ keeps the gaps of the input: strides differ, so no twin.
    def update(c, p, k):
        c.index_copy_(1, p, k)
        return c.view(-1) if c.is_contiguous() else c * 2

    recorder = programs.Recorder(run=Reference)
    with torch.inference_mode():
        base, mine = ramp(4, 12)(), ramp(4, 12)()
        compiled = torch.compile(update, backend=recorder.backend, fullgraph=True)
        arguments = (torch.tensor([1, 4]), ramp(4, 2)())
        expected = update(base[:, ::2], *arguments)
        assert torch.equal(compiled(mine[:, ::2], *arguments), expected)
        assert torch.equal(base, mine)


def test_Happy_cache_update_has_no_copy_of_the_cache():
    captured = run_both(index_copy, [ramp(2, 6), ints(1, 4), ramp(2, 2)])
    assert "aten::copy_" not in captured.template.operators
    assert [entry.written for entry in captured.template.inputs] == [True, False, False]
    assert captured.reinplace_report.copies_removed == 1


def test_Happy_alias_outputs_move_no_bytes():
    captured = run_both(returns_self, [ramp(3)])
    assert captured.template.outputs[0].alias_of_input == 0
    assert captured.template.inputs[0].kind == pb.Input.MANAGED


# ---- random programs ---------------------------------------------------------------------------


class RandomProgram:
    """A random straight-line program over two 4 x 4 tensors x and y: views, in-place writes, reads, outputs."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.names = {"x": (4, 4), "y": (4, 4)}  # name -> sizes
        self.lines = []
        for _ in range(self.random.randint(3, 9)):
            self.random.choice([self.view, self.write, self.write, self.write, self.read])()
        results = self.random.sample(sorted(self.names), k=min(3, len(self.names)))
        self.lines.append("return " + ", ".join(self.random.choice([r, f"{r} * 1"]) for r in results) + ",")
        self.source = "def program(x, y):\n    " + "\n    ".join(self.lines)

    def pick(self, sizes=None):
        return self.random.choice([n for n, s in self.names.items() if sizes is None or s == sizes])

    def assign(self, expression, sizes):
        name = f"v{len(self.names)}"
        self.lines.append(f"{name} = {expression}")
        self.names[name] = sizes

    def view(self):
        base = self.pick((4, 4))
        form, sizes = self.random.choice([(".t()", (4, 4)), ("[1]", (4,)), ("[1:3]", (2, 4)), (".view(-1)[:4]", (4,))])
        if ".view" in form:
            base = self.random.choice(["x", "y"])
        self.assign(base + form, sizes)

    def read(self):
        base = self.pick()
        form = self.random.choice([" * 3", ".clone()", ".flip(0)", " + 1", ".relu()"])
        self.assign(base + form, self.names[base])

    def write(self):
        target = self.pick()
        same = self.pick(self.names[target])
        form = self.random.choice([
            ".add_(1)", ".mul_(2)", f".add_({same})", f".copy_({same})", f".copy_({same} * 2)", ".zero_()",
            f".sub_({same}.flip(0))", "[0:2] = 7", f".copy_({target}.flip(0))", ".masked_fill_(x.sum() > 3, 1)",
        ])  # fmt: skip
        self.lines.append(target + form)
        if self.names[target] == (4, 4) and self.random.random() < 0.5:
            self.lines.append(f"{target}[1:3] = {self.pick((4, 4))}[0:2]")
            self.lines.append(f"{target}.index_copy_(0, torch.tensor([0, 3]), {self.pick((4, 4))}[1:3] * 2)")


@pytest.mark.parametrize("first_seed", range(0, 160, 20))
def test_Malicious_random_programs_equal_eager(first_seed):
    for seed in range(first_seed, first_seed + 20):
        torch._dynamo.reset()
        program = RandomProgram(seed)
        scope = {"torch": torch}
        exec(program.source, scope)
        try:
            with torch.inference_mode():
                scope["program"](ramp(4, 4)(), -ramp(4, 4)())
        except RuntimeError:  # eager refuses writes between overlapping views
            continue
        try:
            run_both(scope["program"], [ramp(4, 4), lambda: -ramp(4, 4)()], calls=1)
        except Exception as error:
            raise AssertionError(f"seed {seed}:\n{program.source}") from error
