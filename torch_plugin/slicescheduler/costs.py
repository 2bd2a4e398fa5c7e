"""Cost expressions of a group: workspace, flops and bytes, over the template's symbols.

workspace_bytes  peak of the interior: storages that are born in the group and are not its outputs, each
                 rounded up to 64 bytes. The maximum over the program points that dominate at sampled sizes.
flops            matrix products, attention and convolution by formula, one per result element otherwise.
bytes            read and written by operators that touch memory; views are free, gathers and partial writes
                 count what they move and not the table they move it from.

Expressions are summed in sympy (one polynomial per group as a rule) and become protobufs at the end.
"""


import sympy
import torch

from ._proto import template_pb2 as pb
from .errors import Unsupported
from .expressions import NODES_MAX, compile_expressions, count_nodes, evaluate, round_up_bound, sympy_of
from .operators import argument_of, is_view, operator_name

BLOCK_BYTES = 64  # allocation granule of the executor's pools
_SAMPLE_STEPS = 7
_SAMPLE_MAX = 1 << 16  # sizes beyond this do not change which point dominates


def _product(factors):
    total = 1
    for factor in factors:
        total = total * factor
    return total


def _sizes(tensor):
    return [sympy_of(size) for size in tensor.shape]


def numel(tensor):
    """Elements of a (fake) tensor: int or sympy."""
    return _product(_sizes(tensor))


def stored_bytes(tensor):
    """Bytes that a (fake) tensor really occupies: expanded dimensions count once."""
    sizes = [size for size, stride in zip(_sizes(tensor), tensor.stride()) if not _is_zero(stride)]
    return _product(sizes) * tensor.element_size()


def _is_zero(stride):
    return isinstance(stride, int) and stride == 0


# ---- flops -------------------------------------------------------------------------------------


def _mm(node, a, b, *_):
    return 2 * numel(a) * _sizes(b)[-1]


def _addmm(node, bias, a, b, *_):
    return 2 * numel(a) * _sizes(b)[-1] + numel(node.meta["val"])


def _mv(node, a, b, *_):
    return 2 * numel(a)


def _attention(node, query, key, value, *_):
    # Two products: scores (l x d x s) and the weighted sum (l x s x dv), for each query head.
    return 2 * numel(query) * _sizes(key)[-2] + 2 * _product(_sizes(query)[:-1]) * _sizes(key)[-2] * _sizes(value)[-1]


def _convolution(node, image, weight, *_):
    transposed = bool(argument_of(node, 6))
    taps = _product(_sizes(weight)[1:])  # channels of one group times the kernel
    return 2 * numel(image if transposed else node.meta["val"]) * taps


_FLOPS = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _addmm,
    "aten::mv": _mv,
    "aten::dot": _mv,
    "aten::_grouped_mm": _mm,
    "aten::convolution": _convolution,
}
_NO_FLOPS = {
    "aten::copy_", "aten::clone", "aten::_to_copy", "aten::cat", "aten::stack", "aten::fill_.Scalar",
    "aten::zero_", "aten::full", "aten::zeros", "aten::ones", "aten::arange", "aten::scalar_tensor",
    "aten::lift_fresh_copy", "aten::embedding", "aten::index_copy_", "aten::index_copy", "aten::index_put_",
}  # fmt: skip
# Read as many elements of their first argument as they produce.
_GATHERS = {
    "aten::embedding", "aten::index.Tensor", "aten::_unsafe_index.Tensor", "aten::index_select",
    "aten::gather", "aten::_embedding_bag",
}  # fmt: skip
# Write as many bytes as their last tensor argument has.
_PARTIAL_WRITES = {
    "aten::index_copy_", "aten::index_put_", "aten::scatter_.src", "aten::scatter_add_", "aten::index_add_",
}  # fmt: skip
_INDEXED_WRITES = {"aten::scatter_.value", "aten::index_fill_.int_Scalar"}


class Costs:
    """Cost expressions for runs of nodes of one program."""

    def __init__(self, template, program, table):
        self.template = template
        self.program = program
        self.table = table
        self.sizes = {}  # root value -> bytes with rounding, int or sympy
        self.samples = None

    def flops(self, first, last):
        """Floating point operations of nodes first..last (exclusive), as Expr."""
        return self._expr(sum(self._node_flops(record.fx) for record in self.program.nodes[first:last]))

    def bytes(self, first, last):
        """Bytes moved by nodes first..last (exclusive), as Expr."""
        return self._expr(sum(self._node_bytes(record) for record in self.program.nodes[first:last]))

    def _tensors(self, values):
        return [self.program.tensor[v] for v in values]

    def _arguments(self, node):
        found = [argument_of(node, i) for i in range(len(node.target._schema.arguments))]
        fakes = [a.meta.get("val") for a in found if isinstance(a, torch.fx.Node)]
        return [fake for fake in fakes if isinstance(fake, torch.Tensor)]

    def _node_flops(self, node):
        if is_view(node.target):
            return 0
        name = operator_name(node.target)
        if name in _NO_FLOPS:
            return 0
        if name.startswith("aten::_scaled_dot_product"):
            return _attention(node, *self._arguments(node))
        if name in _FLOPS:
            return _FLOPS[name](node, *self._arguments(node))
        result = node.meta.get("val")
        results = result if isinstance(result, (tuple, list)) else [result]
        return sum(numel(r) for r in results if isinstance(r, torch.Tensor))

    def _node_bytes(self, record):
        node = record.fx
        if is_view(node.target):
            return 0
        name = operator_name(node.target)
        used = self._tensors(record.used)
        results = self._tensors(record.defined)
        if name in _PARTIAL_WRITES and len(used) > 1:
            return sum(map(stored_bytes, used[1:])) + stored_bytes(used[-1])
        if name in _INDEXED_WRITES:
            return sum(map(stored_bytes, used[1:]))
        if name in _GATHERS:
            return sum(map(stored_bytes, used[1:])) + 2 * stored_bytes(results[0])
        if name == "aten::copy_" and len(used) > 1:
            return stored_bytes(used[0]) + stored_bytes(used[1])
        return sum(map(stored_bytes, used)) + sum(map(stored_bytes, results))

    # ---- workspace ---------------------------------------------------------------------------

    def workspace_bytes(self, first, last, outputs):
        """Peak bytes of the interior of nodes first..last (exclusive), as Expr. `outputs`: its live-out values."""
        spans = self._interior(first, last, outputs)
        if not spans:
            return pb.Expr(constant=0)
        roots = list(spans)
        at_samples = self._evaluate([self._size(root) for root in roots])
        winners = []
        for sizes in at_samples:
            point = max(range(first, last), key=lambda i: sum(
                size for root, size in zip(roots, sizes) if spans[root][0] <= i <= spans[root][1]
            ))
            live = frozenset(root for root in roots if spans[root][0] <= point <= spans[root][1])
            if live not in winners:
                winners.append(live)
        exprs = [self._expr(sum(self._size(root) for root in sorted(live))) for live in winners]
        unique = list({expr.SerializeToString(deterministic=True): expr for expr in exprs}.values())
        if len(unique) == 1:
            return unique[0]
        result = pb.Expr()
        result.call.kind = pb.Expr.MAX
        result.call.args.extend(unique)
        if count_nodes(result) > NODES_MAX:  # the largest sizes bound every candidate
            return pb.Expr(constant=max(evaluate(expr, self._top_binding()) for expr in unique))
        return result

    def _interior(self, first, last, outputs):
        """root value -> (first node, last node) of each storage that lives and dies inside."""
        program, spans = self.program, {}
        for i in range(first, last):
            record = program.nodes[i]
            for value in record.defined:
                if program.root[value] == value:
                    spans[value] = [i, i]
            for value in record.used:
                if program.root[value] in spans:
                    spans[program.root[value]][1] = i
        for value in outputs:
            root = program.root[value]
            if root not in spans:
                continue
            if numel(program.tensor[value]) == numel(program.tensor[root]):
                del spans[root]  # the output is the storage: accounted as an output
            else:
                spans[root][1] = last - 1  # a view keeps a bigger storage alive to the end
        return spans

    def _size(self, root):
        if root not in self.sizes:
            self.sizes[root] = round_up_bound(stored_bytes(self.program.tensor[root]), BLOCK_BYTES)
        return self.sizes[root]

    def _evaluate(self, values):
        """[int or sympy] -> one tuple of ints per sample binding."""
        function = compile_expressions([self.table.expression(v) for v in values])
        return [function(binding) for binding in self._sample_bindings()]

    def _sample_bindings(self):
        ranges = [self.table.range(symbol) for symbol in self.table.symbols]
        if not ranges:
            return [()]
        if self.samples is None or len(self.samples[0]) != len(ranges):
            self.samples = sample_bindings(ranges)
        return self.samples

    def _expr(self, value):
        if isinstance(value, sympy.Basic):
            value = sympy.expand(value)
        try:
            return self.table.expression(value)
        except Unsupported:
            # Too long: the value at the largest sizes is a bound.
            return self.table.expression(int(value.subs(dict(zip(self.table.symbols, self._top_binding())))))

    def _top_binding(self):
        return tuple(min(self.table.range(symbol)[1], _SAMPLE_MAX) for symbol in self.table.symbols)


def sample_bindings(ranges):
    """Bindings that cover `ranges` geometrically: all symbols together, then each alone at its maximum."""
    ranges = [(low, max(low, min(high, _SAMPLE_MAX))) for low, high in ranges]
    bindings = []
    for step in range(_SAMPLE_STEPS):
        share = step / (_SAMPLE_STEPS - 1)
        bindings.append(tuple(
            min(high, max(low, round(max(low, 1) * (max(high, 1) / max(low, 1)) ** share))) for low, high in ranges
        ))
    for alone in range(len(ranges) if len(ranges) > 1 else 0):
        bindings.append(tuple(high if i == alone else low for i, (low, high) in enumerate(ranges)))
    return list(dict.fromkeys(bindings))
