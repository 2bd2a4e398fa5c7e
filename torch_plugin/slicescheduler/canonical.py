"""Rewriting operators that the executor does not know into equal ones that it does.

torch writes some things in more than one way, and some of the ways are no good in a template: results that share storage
although the schema says otherwise, flags on tensors that a copy of the bytes loses, uninitialized memory, operators that
exist in Python only. Each has a twin on the allow-list with the same values. The pass runs on the functional graph, before
`reinplace`, so nothing that is written in place depends on which of the two shares storage.

Others are taken apart by torch itself while it traces (`decompositions`): their kernels trust sizes that only torch's Python
functions check, or they are plain compositions.
"""

import functools

import torch
from torch._decomp import get_decompositions

from .operators import is_operator

aten = torch.ops.aten

# Same arguments, except those that the twin's schema lacks; same result.
_TWINS = {
    # Uninitialized memory is not deterministic.
    aten.empty_like.default: aten.zeros_like.default,
    aten.empty.memory_format: aten.zeros.default,
    aten.new_empty.default: aten.new_zeros.default,
    # Views of their argument that their schemas hide: the forms that declare it.
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    # Views that differ from their argument in a flag only, which a transfer of the bytes would lose.
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    # The forms that promise good indices; the checks cost little.
    aten._unsafe_index_put.default: aten.index_put.default,
    # How torch writes arithmetic on Python numbers that change between calls.
    aten.true_divide.Tensor: aten.div.Tensor,
}
_FLAG_VIEWS = (aten._conj.default, aten._neg_view.default)
_GROUPED_MM_ALIGNMENT = 16  # bytes; what aten::_grouped_mm asks of rows

_TAKEN_APART = (
    aten._native_batch_norm_legit.no_stats,
    aten._weight_norm_interface,
    aten.affine_grid_generator,
    aten.binary_cross_entropy_with_logits,
    aten.block_diag,
    aten.channel_shuffle,
    aten.col2im,
    aten.deg2rad,
    aten.grid_sampler_2d,
    aten.huber_loss,
    aten.im2col,
    aten.mse_loss,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
    aten.rad2deg,
    aten.rot90,
    aten.smooth_l1_loss,
)


@functools.cache
def decompositions():
    """OpOverload -> function that computes it from allowed operators, for AOT autograd."""
    return get_decompositions(_TAKEN_APART)


def canonicalize(graph_module):
    """Rewrites `graph_module` (an AOT inference graph with `meta["val"]`) in place; operators without a twin stay."""
    for node in graph_module.graph.nodes:
        if not is_operator(node):
            continue
        if node.target in _TWINS:
            _replace(node, _TWINS[node.target])
        elif node.target is torch.ops.prims.convert_element_type.default:
            value, dtype = node.args
            node.target, node.args, node.kwargs = aten._to_copy.default, (value,), {"dtype": dtype}
        elif node.target._schema.name == "transformers::grouped_mm_fallback" and _is_aligned(node):
            # Written in Python. transformers uses it only while a model is compiled; eagerly it calls _grouped_mm.
            node.target = aten._grouped_mm.default
    graph_module.recompile()


def _replace(node, twin):
    flag_view = node.target in _FLAG_VIEWS
    node.target = twin
    known = {argument.name for argument in twin._schema.arguments}
    node.kwargs = {name: value for name, value in node.kwargs.items() if name in known}
    if flag_view:  # the twin's result has the flag resolved, and may have other strides
        with node.meta["val"].fake_mode:
            node.meta["val"] = twin(node.args[0].meta["val"])


def _is_aligned(node):
    """True if every row of both matrices of a grouped product begins where aten::_grouped_mm wants it."""
    for matrix in (node.args[0].meta["val"], node.args[1].meta["val"]):
        steps = [stride for stride in matrix.stride()[-2:] if not (isinstance(stride, int) and stride == 1)]
        if not all(isinstance(step, int) and step * matrix.dtype.itemsize % _GROUPED_MM_ALIGNMENT == 0 for step in steps):
            return False
    return True
