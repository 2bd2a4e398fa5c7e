"""Facts about ATen operators: the allow-list, names, and which results share storage with which arguments.

The allow-list is one file for executor and plugin (include/slice/allowed_operators.txt). Alias facts come
from the operators' schemas; `_unsafe_view` is the one allowed operator whose schema hides its aliasing.
"""

import functools
import operator
import pathlib

import torch

_HERE = pathlib.Path(__file__).resolve().parent
# Installed beside the package, or in the source tree.
_ALLOW_LIST_PATHS = (
    _HERE / "allowed_operators.txt",
    _HERE.parent.parent / "include" / "slice" / "allowed_operators.txt",
)
_UNDECLARED_VIEWS = {"aten::_unsafe_view"}


@functools.cache
def allowed_operators():
    """The allow-list as a frozenset of names. Errors: FileNotFoundError."""
    for path in _ALLOW_LIST_PATHS:
        if path.is_file():
            lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
            return frozenset(line for line in lines if line)
    raise FileNotFoundError(f"allowed_operators.txt is at none of {[str(p) for p in _ALLOW_LIST_PATHS]}")


@functools.cache
def operator_name(overload):
    """OpOverload -> "aten::add.Tensor"; the default overload has no suffix."""
    suffix = overload._overloadname
    return overload._schema.name + ("" if suffix == "default" else "." + suffix)


def is_operator(node):
    """True for an FX node that calls a dispatcher operator."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


@functools.cache
def written_arguments(overload):
    """Positions of the arguments that the operator writes, in schema order."""
    arguments = overload._schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def aliased_argument(overload):
    """Position of the argument whose storage the results share (views and in-place operators), or None."""
    if operator_name(overload) in _UNDECLARED_VIEWS:
        return 0
    schema = overload._schema
    results = set()
    for result in schema.returns:
        if result.alias_info is not None:
            results |= set(result.alias_info.before_set)
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and results & set(argument.alias_info.before_set):
            return i
    return None


@functools.cache
def is_view(overload):
    """True if the operator only describes its argument's storage anew: no bytes are read or written."""
    return aliased_argument(overload) is not None and not written_arguments(overload)


def argument_of(node, position):
    """The argument at schema `position` of an FX operator node; None if it is left at its default."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(node.target._schema.arguments[position].name)


def aliased_node(node):
    """The FX node whose storage `node`'s result shares, one step back; None for fresh storage."""
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        return aliased_node(source) if is_operator(source) else None
    if not is_operator(node):
        return None
    position = aliased_argument(node.target)
    source = None if position is None else argument_of(node, position)
    return source if isinstance(source, torch.fx.Node) else None


def storage_root(node):
    """The FX node that first defined the storage of `node`'s result, through views and in-place writes."""
    while True:
        source = aliased_node(node)
        if source is None:
            return node
        node = source
