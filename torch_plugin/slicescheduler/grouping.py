"""Layer grouping: cuts the node list into schedulable groups and describes each one.

A group is a straight run of nodes, usually one model layer: the outermost numbered module on
`nn_module_stack` is its key. Long runs without a key are cut by module, crumbs are merged. Then groups are
merged until no group output shares the storage of an input that the graph writes: such a value would be a
second way to managed state, behind the back of the dependency edges.

Each group gets a signature (equal for equal layers, also across templates), its inputs and outputs, the
inputs it reads and writes (through views too), and the three cost expressions of `costs.py`.
"""

import dataclasses
import hashlib
import re

import torch

from . import costs
from ._proto import template_pb2 as pb
from .errors import Unsupported
from .operators import operator_name

CRUMB_NODES = 4  # runs below this never stand alone if they can be merged
SPLIT_NODES = 48  # keyless runs above this are cut by module

# In-place operators that overwrite all of their target: the old bytes are not read.
_OVERWRITES = {"aten::copy_", "aten::zero_", "aten::fill_.Scalar"}


@dataclasses.dataclass
class NodeRecord:
    """One template node with what the protobuf does not carry.

    path: [(module path, class name)], outermost first. used, defined, written: value indices.
    """

    fx: torch.fx.Node
    path: list
    used: list
    defined: list
    written: list


class Program:
    """The nodes and values of one template while it is built.

    tensor[v]: fake tensor of value v. root[v]: the value that first defined the storage of v.
    """

    def __init__(self):
        self.nodes = []
        self.tensor = []
        self.root = []

    def add_value(self, tensor, root):
        """Appends a value."""
        self.tensor.append(tensor)
        self.root.append(root)

    def add_node(self, fx, path, used, defined, written):
        """Appends a node; -1 entries of `defined` are dropped."""
        self.nodes.append(NodeRecord(fx, path, used, [v for v in defined if v >= 0], written))


@dataclasses.dataclass
class Run:
    """Nodes first..last (exclusive) with one key; a layer is never merged with its neighbours as a crumb."""

    key: str
    first: int
    last: int
    layer: bool = False

    @property
    def count(self):
        return self.last - self.first


# ---- where to cut ------------------------------------------------------------------------------


def layer_key(path):
    """The outermost numbered module of a module path, or None."""
    for name, _ in path:
        if re.search(r"(^|\.)\d+$", name):
            return name
    return None


def _runs_by(keys, first):
    runs = []
    for i, key in enumerate(keys, start=first):
        if runs and runs[-1].key == key:
            runs[-1].last = i + 1
        else:
            runs.append(Run(key, i, i + 1))
    return runs


def _absorb_sandwiched(runs):
    """A short keyless run between two runs of one layer belongs to that layer."""
    out = []
    for run in runs:
        same_layer = len(out) >= 2 and out[-1].key is None and out[-2].key == run.key is not None
        if same_layer and out[-1].count <= CRUMB_NODES:
            out.pop()
            out[-1].last = run.last
        else:
            out.append(run)
    return out


def _split_keyless(runs, nodes):
    out = []
    for run in runs:
        if run.key is not None or run.count <= SPLIT_NODES:
            run.layer = run.key is not None and run.count >= CRUMB_NODES
            out.append(run)
            continue
        names = [[name for name, _ in nodes[i].path if name] for i in range(run.first, run.last)]
        out.extend(_runs_by([path[0] if path else None for path in names], run.first))
    return out


def _merge_crumbs(runs):
    out = []
    for run in runs:
        if out and not run.layer and not out[-1].layer:
            last = out[-1]
            crumb = run.count < CRUMB_NODES or last.count < CRUMB_NODES
            if crumb and last.count + run.count <= SPLIT_NODES:
                last.last = run.last
                last.key = last.key or run.key
                continue
        out.append(run)
    return out


def cut(nodes):
    """[NodeRecord] -> [Run], a partition of the nodes in order."""
    runs = _runs_by([layer_key(node.path) for node in nodes], 0)
    return _merge_crumbs(_split_keyless(_absorb_sandwiched(runs), nodes))


def _merge_for_aliases(runs, program, written_roots):
    """Merges runs until no value that shares a written input's storage crosses a boundary."""
    run_of = {}
    for index, run in enumerate(runs):
        for i in range(run.first, run.last):
            run_of[i] = index
    definer = {v: i for i, node in enumerate(program.nodes) for v in node.defined}
    joined = [False] * len(runs)  # joined[k]: run k belongs to the same group as run k - 1
    for i, node in enumerate(program.nodes):
        for value in node.used:
            if value in definer and program.root[value] in written_roots:
                for k in range(run_of[definer[value]] + 1, run_of[i] + 1):
                    joined[k] = True
    out = []
    for index, run in enumerate(runs):
        if joined[index]:
            out[-1].last = run.last
            out[-1].key = out[-1].key or run.key
            out[-1].layer = out[-1].layer or run.layer
        else:
            out.append(run)
    return out


# ---- what a group is ---------------------------------------------------------------------------


def _name(run, nodes):
    if run.key:
        return run.key
    paths = [[name for name, _ in nodes[i].path if name] for i in range(run.first, run.last)]
    first = next((path[-1] for path in paths if path), "")
    last = next((path[-1] for path in reversed(paths) if path), "")
    return first or "graph" if first == last else f"{first} .. {last}"


def _signature(template, program, run):
    """First 64 bits of a hash of the operators, arguments and sizes, with values and symbols renumbered."""
    values, symbols, text = {}, {}, []

    def expression(expr):
        node = expr.WhichOneof("node")
        if node == "constant":
            return str(expr.constant)
        if node == "symbol":
            return f"s{symbols.setdefault(expr.symbol, len(symbols))}"
        return f"({expr.call.kind} {' '.join(map(expression, expr.call.args))})"

    def value(index):
        if index < 0:
            return "none"
        if index in values:
            return f"v{values[index]}"
        values[index] = len(values)
        meta = template.values[index].meta
        sizes = ",".join(map(expression, meta.sizes))
        strides = ",".join(map(expression, meta.strides))
        return f"v{values[index]}:{meta.dtype}[{sizes}][{strides}]"

    def argument(arg):
        kind = arg.WhichOneof("kind")
        content = getattr(arg, kind)
        if kind == "value":
            shown = value(content)
        elif kind == "values":
            shown = ",".join(map(value, content.value))
        elif kind == "integer":
            shown = expression(content)
        elif kind == "integers":
            shown = ",".join(map(expression, content.value))
        elif kind in ("floatings", "booleans"):
            shown = repr(list(content.value))
        elif kind == "complex":
            shown = f"{content.real!r}+{content.imag!r}j"
        else:
            shown = repr(content)
        return f"{arg.name}={kind}:{shown}"

    for i in range(run.first, run.last):
        node = template.nodes[i]
        arguments = ";".join(map(argument, node.args))
        results = ";".join(map(value, node.outputs))
        text.append(f"{template.operators[node.operator_index]}({arguments})->{results}")
    return int.from_bytes(hashlib.sha256("\n".join(text).encode()).digest()[:8], "little")


def _reads_and_writes(program, run, input_of_value, static_inputs):
    reads, writes = set(), set()
    for record in program.nodes[run.first : run.last]:
        targets = set(record.written)
        for value in targets:
            if program.root[value] in input_of_value:
                writes.add(input_of_value[program.root[value]])
        name = operator_name(record.fx.target)
        for value in record.used:
            root = program.root[value]
            if root not in input_of_value or input_of_value[root] not in static_inputs:
                continue
            overwritten = value in targets and value == root and name in _OVERWRITES
            if not overwritten:
                reads.add(input_of_value[root])
    return sorted(reads), sorted(writes)


def add_groups(template, program, table):
    """Fills `template.groups` (its nodes, values, inputs and outputs must be complete).

    Errors: Unsupported if a graph output shares the storage of a written input and is not declared so.
    """
    input_of_value = {
        entry.value: i for i, entry in enumerate(template.inputs) if entry.kind != pb.Input.SYMBOL
    }
    static_inputs = {
        i for i, entry in enumerate(template.inputs) if entry.kind not in (pb.Input.SYMBOL, pb.Input.DYNAMIC)
    }
    written_roots = {template.inputs[i].value for i in input_of_value.values() if template.inputs[i].written}
    results = {out.value for out in template.outputs if out.WhichOneof("kind") == "value"}
    for value in results:
        if program.root[value] in written_roots:
            raise Unsupported("a graph output shares the storage of an input that the graph writes")
    if not program.nodes:
        return
    runs = _merge_for_aliases(cut(program.nodes), program, written_roots)
    pieces = [_inputs_and_outputs(program, run, results) for run in runs]
    cost = costs.Costs(template, program, table)
    for run, (inputs, outputs) in zip(runs, pieces):
        reads, writes = _reads_and_writes(program, run, input_of_value, static_inputs)
        template.groups.add(
            name=_name(run, program.nodes),
            signature=_signature(template, program, run),
            first_node=run.first,
            node_count=run.count,
            inputs=inputs,
            outputs=outputs,
            reads=reads,
            writes=writes,
            workspace_bytes=cost.workspace_bytes(run.first, run.last, outputs),
            flops=cost.flops(run.first, run.last),
            bytes=cost.bytes(run.first, run.last),
        )


def _inputs_and_outputs(program, run, results):
    inside = range(run.first, run.last)
    defined = {v for i in inside for v in program.nodes[i].defined}
    inputs = {v for i in inside for v in program.nodes[i].used if v not in defined}
    later = {v for record in program.nodes[run.last :] for v in record.used}
    return sorted(inputs), sorted(defined & (later | results))
