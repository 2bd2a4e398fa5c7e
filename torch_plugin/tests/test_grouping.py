"""Grouping rules on programs small enough to see what must come out."""

import pytest
import torch

import programs
from reference import Reference
from slicescheduler import costs
from slicescheduler._proto import template_pb2 as pb
from slicescheduler.expressions import evaluate


def capture(module, *args, dynamic=None):
    """Captures `module(*args)`, compares with eager, returns the template."""
    recorder = programs.Recorder(run=Reference)
    compiled = torch.compile(module, backend=recorder.backend, fullgraph=True)
    with torch.inference_mode():
        mine = [arg.clone() for arg in args]
        for i, axis in (dynamic or {}).items():
            torch._dynamo.mark_dynamic(mine[i], axis)
        got = compiled(*mine)
        expected = module(*args)
    for a, b in zip(got if isinstance(got, tuple) else [got], expected if isinstance(expected, tuple) else [expected]):
        assert torch.equal(a, b)
    return recorder.captured[0].template


class Block(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(torch.nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embed = torch.nn.Linear(16, 32)
        self.layers = torch.nn.ModuleList(Block() for _ in range(layers))
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def check_partition(template):
    """Groups partition the nodes; inputs and outputs are exactly what crosses their borders."""
    position, defined_by, crossing = 0, {}, {}
    for index, group in enumerate(template.groups):
        assert group.first_node == position and group.node_count > 0
        position += group.node_count
        inside = template.nodes[group.first_node : position]
        for node in inside:
            for arg in node.args:
                kind = arg.WhichOneof("kind")
                used = [arg.value] if kind == "value" else list(arg.values.value) if kind == "values" else []
                for value in used:
                    if value >= 0 and defined_by.get(value) != index:
                        assert value in group.inputs
                        crossing.setdefault(value, index)
            for value in node.outputs:
                defined_by[value] = index
    assert position == len(template.nodes)
    results = {out.value for out in template.outputs if out.WhichOneof("kind") == "value"}
    for index, group in enumerate(template.groups):
        mine = {value for value in (*crossing, *results) if defined_by.get(value) == index}
        assert set(group.outputs) == mine


def test_Happy_one_group_per_layer():
    template = capture(Stack(), torch.randn(5, 16), dynamic={0: 0})
    check_partition(template)
    names = [group.name for group in template.groups]
    assert names == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    signatures = [group.signature for group in template.groups]
    assert len(set(signatures[1:4])) == 1 and len(set(signatures)) == 3


def test_Happy_signature_is_equal_across_templates_and_differs_by_shape():
    torch.manual_seed(0)
    first = capture(Stack(2), torch.randn(5, 16), dynamic={0: 0})
    torch._dynamo.reset()
    second = capture(Stack(3), torch.randn(9, 16), dynamic={0: 0})
    torch._dynamo.reset()
    static = capture(Stack(2), torch.randn(5, 16))
    layer = [next(g.signature for g in t.groups if g.name == "layers.0") for t in (first, second, static)]
    assert layer[0] == layer[1] != layer[2]


def test_Happy_reads_and_costs():
    template = capture(Stack(1), torch.randn(5, 16), dynamic={0: 0})
    (layer,) = [group for group in template.groups if group.name == "layers.0"]
    assert sorted(template.inputs[i].name for i in layer.reads) == sorted(
        f"L['self'].layers.0.{name}"
        for name in ("up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias")
    )
    assert list(layer.writes) == []
    rows = 10
    products = 2 * rows * 32 * 128 * 2
    assert products <= evaluate(layer.flops, [rows]) <= products * 1.2
    weights = 4 * (2 * 32 * 128 + 128 + 32 + 2 * 32)
    assert weights <= evaluate(layer.bytes, [rows]) <= weights + 4 * rows * 1000
    # The widest moment: both sides of the relu, 128 wide.
    assert evaluate(layer.workspace_bytes, [rows]) == 2 * 4 * rows * 128
    assert evaluate(layer.workspace_bytes, [1]) >= 2 * 4 * 128


class SharedState(torch.nn.Module):
    """Layer 0 updates the state, layer 1 reads it through the updated value."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, state):
        x = self.layers[0](x)
        state.add_(x)
        x = self.layers[1](x) + state
        return self.layers[2](x)


def test_Edge_no_group_output_shares_a_written_input():
    template = capture(SharedState(), torch.randn(5, 32), torch.zeros(5, 32))
    check_partition(template)
    (written,) = [i for i, entry in enumerate(template.inputs) if entry.written]
    writers = [group for group in template.groups if written in group.writes]
    assert len(writers) == 1
    # The write is merged with its reader; layer 2 stands alone.
    assert len(template.groups) >= 2 and template.groups[-1].name == "layers.2"


def test_Edge_view_made_early_is_a_read_later():
    class Early(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Block() for _ in range(2))
            self.table = torch.nn.Parameter(torch.randn(32, 5))

        def forward(self, x):
            table = self.table.t()
            for layer in self.layers:
                x = layer(x)
            return x * table

    template = capture(Early(), torch.randn(5, 32))
    check_partition(template)
    (table,) = [i for i, entry in enumerate(template.inputs) if entry.name.endswith("table")]
    assert table in template.groups[-1].reads


def test_Edge_in_place_overwrite_is_a_write_and_no_read():
    def overwrite(x, y):
        x.copy_(y)
        return y + 1

    template = capture(overwrite, torch.zeros(8), torch.ones(8))
    (group,) = template.groups
    assert [template.inputs[i].written for i in group.writes] == [True]
    assert not set(group.reads) & set(group.writes)


def test_Edge_long_program_without_modules_stays_one_group():
    def long(x):
        for i in range(60):
            x = torch.sin(x) + i
        return x

    template = capture(long, torch.zeros(8))
    check_partition(template)
    assert template.groups[0].name == "graph"


def test_Edge_integers_and_constants_among_the_outputs():
    def mixed(x):
        big = torch.tensor([1.0] * 20000)
        return x * 2, x.shape[0] * 3 + 1, x + torch.tensor([1.0, 2.0]), big[: x.shape[0]] + 1

    recorder = programs.Recorder(run=Reference)
    compiled = torch.compile(mixed, backend=recorder.backend, fullgraph=True)
    x = torch.ones(7, 2)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.inference_mode():
        got, expected = compiled(x), mixed(x)
    assert got[1] == expected[1] == 22
    assert all(torch.equal(got[i], expected[i]) for i in (0, 2, 3))
    (captured,) = recorder.captured
    assert [len(constant.data) for constant in captured.template.constants] == [8]
    ((name, tensor),) = captured.extra_inputs
    assert tensor.shape == (20000,) and type(tensor) is torch.Tensor
    assert captured.template.inputs[-1].name == name
    assert captured.template.inputs[-1].kind == pb.Input.STATIC_CONSTANT
    assert len(captured.template.inputs) == captured.argument_count + 1


def test_Edge_uninitialized_memory_becomes_zeros():
    def program(x):
        order = torch.empty_like(x)
        order[torch.tensor([2, 0, 1])] = x
        return order

    template = capture(program, torch.randn(3))
    assert "aten::zeros_like" in template.operators


def test_Happy_samples_cover_the_ranges():
    bindings = costs.sample_bindings([(2, 640), (1, 8)])
    assert (2, 1) in bindings and (640, 8) in bindings and (640, 1) in bindings and (2, 8) in bindings
    assert all(2 <= a <= 640 and 1 <= b <= 8 for a, b in bindings)
    assert costs.sample_bindings([(0, 2**40)])[0] == (1,) or costs.sample_bindings([(0, 2**40)])


def test_Happy_attention_flops_by_formula():
    def attention(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    template = capture(attention, torch.randn(1, 4, 6, 8), torch.randn(1, 4, 10, 8), torch.randn(1, 4, 10, 8))
    (group,) = template.groups
    assert evaluate(group.flops, []) == 4 * 4 * 6 * 10 * 8
    assert pb.GraphTemplate.FromString(template.SerializeToString()) == template


@pytest.mark.parametrize("transposed", [False, True])
def test_Happy_convolution_flops_by_formula(transposed):
    layer = (torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d)(4, 8, 3, padding=1)
    template = capture(layer, torch.randn(2, 4, 6, 6))
    (group,) = template.groups
    assert evaluate(group.flops, []) == 2 * 2 * 4 * 8 * 9 * 36
