"""Reference interpreter of GraphTemplate: slow, strict, for tests.

Runs the groups in order through torch.ops. After every node it checks dtype and sizes of the results against
the template, and it gives a group only the values that it declares. Strides are counted when they differ (those
of dimensions of size 1 do not matter): a few operators, such as aten::zero, break torch's own promise.
"""

import collections

import torch

from slicescheduler._proto import template_pb2 as pb
from slicescheduler.expressions import evaluate
from slicescheduler.serialize import dtype_from_proto
from slicescheduler.tensors import extent

_DEVICES = {pb.CPU: "cpu", pb.CUDA: "cuda"}


class Mismatch(AssertionError):
    """The template says one thing, the operators did another."""


class Reference:
    """Executes one captured graph: `reference(args) -> outputs`."""

    def __init__(self, captured):
        self.captured = captured
        self.template = pb.GraphTemplate.FromString(captured.template_bytes)
        self.operators = [_resolve(name) for name in self.template.operators]
        self.calls = 0
        self.stride_differences = collections.Counter()
        self.peaks = {}  # group index -> (peak bytes of the interior in the last call, declared bytes)

    def __call__(self, args):
        template = self.template
        self.calls += 1
        symbols = self.captured.bind_symbols(args)
        for symbol, value in zip(template.symbols, symbols):
            if not symbol.min <= value <= symbol.max:
                raise Mismatch(f"{symbol.name} = {value} outside [{symbol.min}, {symbol.max}]")
        frame = self._bind(list(args) + [tensor for _, tensor in self.captured.extra_inputs], symbols)
        with torch.inference_mode():
            for index, group in enumerate(template.groups):
                peak = self._run_group(group, frame, symbols)
                self.peaks[index] = (peak, evaluate(group.workspace_bytes, symbols))
        return self._results(frame, args, symbols)

    def _bind(self, args, symbols):
        template, frame = self.template, {}
        for entry, arg in zip(template.inputs, args, strict=True):
            if entry.kind == pb.Input.SYMBOL:
                if evaluate(entry.expr, symbols) != arg:
                    raise Mismatch(f"{entry.name}: {arg}")
            else:
                self._check(entry.value, arg, symbols, entry.name)
                frame[entry.value] = arg
        for constant in template.constants:
            meta = template.values[constant.value].meta
            sizes = [evaluate(e, symbols) for e in meta.sizes]
            if constant.data:
                flat = torch.frombuffer(bytearray(constant.data), dtype=dtype_from_proto(meta.dtype))
            else:
                flat = torch.empty(0, dtype=dtype_from_proto(meta.dtype))
            frame[constant.value] = flat.reshape(sizes)
        return frame

    def _run_group(self, group, frame, symbols):
        """Runs one group; returns the peak bytes of the storages that live and die inside it."""
        nodes = self.template.nodes[group.first_node : group.first_node + group.node_count]
        visible = {index: frame[index] for index in group.inputs}
        last_use = {index: i for i, node in enumerate(nodes) for index in (*_values_of(node), *node.outputs)}
        foreign = {_storage(tensor) for tensor in visible.values()}
        kept, moments = [], []  # kept: so that no storage's address is used twice
        for i, node in enumerate(nodes):
            self._run_node(node, visible, symbols)
            kept.extend(visible[v] for v in node.outputs if v in visible)
            moments.append({_storage(tensor): tensor.untyped_storage().nbytes() for tensor in visible.values()})
            for index in [v for v in visible if last_use.get(v) == i and v not in group.outputs]:
                del visible[index]
        for index in group.outputs:
            frame[index] = visible[index]
        other = foreign | {_storage(visible[index]) for index in group.outputs}
        return max(
            sum(-(-size // 64) * 64 for storage, size in moment.items() if storage not in other)
            for moment in moments
        )

    def _run_node(self, node, frame, symbols):
        overload = self.operators[node.operator_index]
        given = {argument.name: self._decode(argument, frame, symbols) for argument in node.args}
        positional, keywords = [], {}
        for parameter in overload._schema.arguments:
            value = given.pop(parameter.name) if parameter.name in given else parameter.default_value
            if parameter.kwarg_only:
                keywords[parameter.name] = value
            else:
                positional.append(value)
        if given:
            raise Mismatch(f"{overload} has no arguments {sorted(given)}")
        result = overload(*positional, **keywords)
        results = list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]
        if len(results) != len(node.outputs):
            raise Mismatch(f"{overload}: {len(results)} results, {len(node.outputs)} values")
        for index, tensor in zip(node.outputs, results):
            if index >= 0:
                self._check(index, tensor, symbols, str(overload))
                frame[index] = tensor

    def _check(self, index, tensor, symbols, where):
        meta = self.template.values[index].meta
        sizes = tuple(evaluate(e, symbols) for e in meta.sizes)
        strides = tuple(evaluate(e, symbols) for e in meta.strides)
        if dtype_from_proto(meta.dtype) != tensor.dtype or sizes != tuple(tensor.shape):
            raise Mismatch(f"{where}: {tensor.dtype}{list(tensor.shape)} but declared {list(sizes)}")
        for size, declared, actual in zip(sizes, strides, tensor.stride()):
            if size != 1 and declared != actual and tensor.numel():
                self.stride_differences[where] += 1

    def _decode(self, argument, frame, symbols):
        kind = argument.WhichOneof("kind")
        content = getattr(argument, kind)
        if kind == "none":
            return None
        if kind == "value":
            return frame[content]
        if kind == "values":
            return [None if index < 0 else frame[index] for index in content.value]
        if kind == "integer":
            return evaluate(content, symbols)
        if kind == "integers":
            return [evaluate(e, symbols) for e in content.value]
        if kind in ("floatings", "booleans"):
            return list(content.value)
        if kind == "dtype":
            return dtype_from_proto(content)
        if kind == "device":
            return torch.device(_DEVICES[content])
        if kind in ("layout", "memory_format"):
            return getattr(torch, content)
        if kind == "complex":
            return complex(content.real, content.imag)
        return content

    def _results(self, frame, args, symbols):
        layouts = self.captured.output_layouts(symbols)
        results = []
        for out, layout in zip(self.template.outputs, layouts, strict=True):
            kind = out.WhichOneof("kind")
            if kind == "none":
                results.append(None)
            elif kind == "expr":
                results.append(evaluate(out.expr, symbols))
            elif kind == "alias_of_input":
                source = args[out.alias_of_input]
                results.append(source.as_strided(layout.sizes, layout.strides, layout.storage_offset))
            else:
                place = torch.empty(layout.storage_offset + extent(layout.sizes, layout.strides), dtype=layout.dtype)
                slot = place.as_strided(layout.sizes, layout.strides, layout.storage_offset)
                store_result(slot, frame[out.value])
                results.append(slot)
        return results


def store_result(slot, value):
    """Copies a result into a tensor over its slot. Expanded dimensions are written once, as the executor does."""
    for axis, (size, stride) in enumerate(zip(slot.shape, slot.stride())):
        if stride == 0 and size > 1:
            slot, value = slot.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    slot.copy_(value)


def _values_of(node):
    """Values that a template node uses."""
    for argument in node.args:
        kind = argument.WhichOneof("kind")
        if kind == "value":
            yield argument.value
        elif kind == "values":
            yield from (index for index in argument.values.value if index >= 0)


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def _resolve(name):
    namespace, rest = name.split("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
