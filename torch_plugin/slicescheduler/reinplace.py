"""Re-inplacing: turn `copy_(x, f(x, ...))` at the end of a functional graph into `f_(x, ...)` where f stood.

AOT autograd makes every program functional: an update of a KV cache becomes `index_copy(cache, ...)`, which
copies the whole cache, and a trailing `copy_(cache, result)`, which copies it again. Both vanish here.

The pass walks back from the source of a trailing `copy_` to its placeholder, through operators that have an
in-place twin of the same schema, and through slice_scatter/select_scatter (which become a `copy_` into the
view). Writing earlier than the program did must change nothing, so a chain is left alone when
  * an older version of the storage, or a view of it, is read after the write or is an output;
  * the new version is an output that torch takes for a fresh tensor;
  * dtype, shape or strides of a version differ from the placeholder's;
  * another operand of the operator shares the placeholder's storage.
A chain that is left alone stays correct: it keeps its copies.
"""

import collections
import dataclasses

import torch

from .operators import (
    aliased_argument,
    aliased_node,
    allowed_operators,
    argument_of,
    is_operator,
    operator_name,
    storage_root,
    written_arguments,
)

aten = torch.ops.aten
_SCATTERS = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
_COPY = aten.copy_.default


@dataclasses.dataclass
class ReinplaceReport:
    """What the pass did. `refused` counts the reasons why copies stayed."""

    in_placed: int = 0
    copies_removed: int = 0
    nodes_dropped: int = 0
    refused: collections.Counter = dataclasses.field(default_factory=collections.Counter)


def in_place_twin(overload):
    """The allowed `name_` overload with the same arguments as the functional `overload`, or None."""
    if overload.namespace != "aten" or aliased_argument(overload) is not None or written_arguments(overload):
        return None
    packet = getattr(aten, overload._schema.name.split("::")[1] + "_", None)
    if packet is None or overload._overloadname not in packet.overloads():
        return None
    twin = getattr(packet, overload._overloadname)
    ours, theirs = overload._schema.arguments, twin._schema.arguments
    same = len(ours) == len(theirs) and all(
        a.name == b.name and a.kwarg_only == b.kwarg_only for a, b in zip(ours, theirs)
    )
    if not same or written_arguments(twin) != (0,) or operator_name(twin) not in allowed_operators():
        return None
    return twin


def reinplace(graph_module, aliased_outputs=frozenset()):
    """Rewrites `graph_module` (an AOT inference graph with `meta["val"]`) in place.

    `aliased_outputs`: positions of graph outputs that torch regenerates from an input, so that they may share
    a written input's storage.
    Returns: ReinplaceReport.
    """
    graph = graph_module.graph
    report = ReinplaceReport()
    copies = [node for node in graph.nodes if node.op == "call_function" and node.target is _COPY]
    written = {copy.args[0] for copy in copies}
    for copy in copies:
        placeholder, value = copy.args[0], copy.args[1]
        if placeholder.op != "placeholder" or not isinstance(value, torch.fx.Node):
            report.refused["not an update of an input"] += 1
            continue
        chain = _chain(placeholder, value)
        reason = "no in-place twin" if not chain else _hazard(graph, placeholder, chain, copy, aliased_outputs)
        if reason is not None:
            report.refused[reason] += 1
            continue
        _rewrite(graph, chain, copy, written, report)
    _drop_dead(graph, report)
    graph.lint()
    graph_module.recompile()
    return report


def _chain(placeholder, value):
    """The updates from `placeholder` to `value` in program order, or [] if some step cannot be in place."""
    steps, node = [], value
    while is_operator(node) and (node.target in _SCATTERS or in_place_twin(node.target)):
        steps.append(node)
        node = node.args[0]
        if node is placeholder:
            return steps[::-1]
        if not isinstance(node, torch.fx.Node):
            break
    return []


def _views(node, copy):
    """`node` and everything that shares its storage (transitively), but not through the trailing `copy`."""
    found, work = {node}, [node]
    while work:
        current = work.pop()
        for user in current.users:
            # A tuple of views (split) shares the storage too; its getitems come as its users.
            shares = aliased_node(user) is current or (aliased_node(user) is not None and user.args[0] is current)
            if shares and user is not copy and user not in found:
                found.add(user)
                work.append(user)
    return found


def _output_positions(output, node):
    return {i for i, value in enumerate(output.args[0]) if value is node}


def _hazard(graph, placeholder, chain, copy, aliased_outputs):
    """Why writing the placeholder at each step of `chain` would be wrong; None if it is safe."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    output = next(node for node in graph.nodes if node.op == "output")
    previous = placeholder
    versions = {placeholder}  # each will live in the placeholder's storage
    for step in chain:
        if not _same_layout(placeholder, step):
            return "dtype, shape or strides differ"
        if any(node is not previous and storage_root(node) in versions for node in step.all_input_nodes):
            return "an operand shares the storage"
        if sum(1 for arg in _flat(step) if arg is previous) != 1:
            return "an operand shares the storage"
        views = _views(previous, copy)
        for view in views:
            for user in view.users:
                if user is step or user is copy or user in views:
                    continue
                if user is output or order[user] > order[step]:
                    return "an older version is read later"
        previous = step
        versions.add(step)
    for view in _views(previous, copy) | _views(copy, copy):
        if output in view.users and not _output_positions(output, view) <= aliased_outputs:
            return "the new version is a fresh output"
    return None


def _flat(node):
    found = []
    torch.fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _same_layout(a, b):
    """Same dtype, sizes and strides (those of dimensions of size 1 do not matter)."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.dtype != y.dtype:
        return False
    if x.dim() != y.dim() or x.device != y.device:
        return False
    for i in range(x.dim()):
        if not _equal(x.shape[i], y.shape[i]):
            return False
        if not _equal(x.shape[i], 1) and not _equal(x.stride(i), y.stride(i)):
            return False
    return True


def _equal(a, b):
    """Statically equal sizes, without adding a guard."""
    a = a.node.expr if isinstance(a, torch.SymInt) else a
    b = b.node.expr if isinstance(b, torch.SymInt) else b
    return bool(a == b)


def _rewrite(graph, chain, copy, written, report):
    for step in chain:
        if step.target in _SCATTERS:
            _scatter_to_copy(graph, step, written)
        else:
            step.target = in_place_twin(step.target)
        report.in_placed += 1
    copy.replace_all_uses_with(copy.args[1])  # the last version
    graph.erase_node(copy)
    report.copies_removed += 1


def _scatter_to_copy(graph, step, written):
    """slice_scatter(base, source, ...) -> copy_(slice(base, ...), source)."""
    base, source, *rest = step.args
    kwargs = {name: value for name, value in step.kwargs.items() if name != "src"}
    part = source.meta["val"]
    if is_operator(source) and source.target is aten.copy.default:
        # copy(view, x) only casts and broadcasts x, which copy_ does by itself. That moves the read of x down
        # to here, so x must not live in a storage that the graph writes.
        inner = argument_of(source, 1)
        if isinstance(inner, torch.fx.Node) and storage_root(inner) not in written:
            source = inner
    with graph.inserting_before(step):
        view = graph.call_function(_SCATTERS[step.target], (base, *rest), kwargs)
        write = graph.call_function(_COPY, (view, source))
    view.meta = dict(step.meta, val=_view_value(view, part))
    write.meta = dict(view.meta)
    step.replace_all_uses_with(base)
    graph.erase_node(step)


def _view_value(view, part):
    """meta["val"] of the written view: that of an equal view elsewhere in the graph, or computed anew."""
    base = view.args[0]
    for other in base.users:
        if other is not view and other.target is view.target and (other.args, other.kwargs) == (view.args, view.kwargs):
            return other.meta["val"]
    if any(isinstance(arg, torch.fx.Node) for arg in view.args[1:]):
        return part  # right sizes; strides of a dense tensor
    return view.target(base.meta["val"], *view.args[1:], **view.kwargs)


def _drop_dead(graph, report):
    """Removes pure operators without users (checks and asserts stay: the serializer deals with them)."""
    for node in reversed(list(graph.nodes)):
        if node.users or not is_operator(node):
            continue
        schema = node.target._schema
        if schema.is_mutable or node.target.namespace != "aten":
            continue
        if schema.name.startswith(("aten::_assert", "aten::sym_con")):
            continue
        graph.erase_node(node)
        report.nodes_dropped += 1
