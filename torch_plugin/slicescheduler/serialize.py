"""FX graph -> GraphTemplate.

The input is an AOT inference graph (after re-inplacing): ATen overloads with `meta["val"]` fake tensors whose
sizes are expressions over torch's symbols. The output is the protobuf of include/slice/proto/template.proto.

Numbering of values: tensor placeholders first, then constants and node results in program order. Symbolic
integers of the graph (sym_size and Python arithmetic on sizes) are not nodes of the template: every use
carries its expression.
"""

import dataclasses
import math
import operator
import os
import re

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from . import grouping
from ._proto import template_pb2 as pb
from .errors import Unsupported, UnsupportedOperatorError
from .expressions import SymbolTable, constant
from .operators import (
    aliased_node,
    allowed_operators,
    argument_of,
    is_operator,
    operator_name,
    storage_root,
    written_arguments,
)

FORMAT = 1
CONSTANT_BYTES_MAX = 64 * 1024

_DTYPES = {
    torch.float32: pb.FLOAT32, torch.float64: pb.FLOAT64, torch.float16: pb.FLOAT16,
    torch.bfloat16: pb.BFLOAT16, torch.int64: pb.INT64, torch.int32: pb.INT32, torch.int16: pb.INT16,
    torch.int8: pb.INT8, torch.uint8: pb.UINT8, torch.bool: pb.BOOL, torch.complex64: pb.COMPLEX64,
    torch.complex128: pb.COMPLEX128, torch.float8_e4m3fn: pb.FLOAT8_E4M3FN,
    torch.float8_e5m2: pb.FLOAT8_E5M2,
}  # fmt: skip
_TORCH_DTYPES = {number: dtype for dtype, number in _DTYPES.items()}
_DEVICES = {"cpu": pb.CPU, "cuda": pb.CUDA}
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Checks on sizes: torch's guards made them before the call; they compute nothing.
_DROPPED_PREFIXES = ("aten::sym_", "aten::_assert_scalar", "aten::_assert_tensor_metadata")


_RANDOM = "draw random numbers outside and pass them as an argument"
_DATA_SIZED = (
    "sizes that depend on data fit no graph template: keep all elements and blank out the unwanted ones with a mask "
    "(torch.where, masked_fill)"
)
# What to do about operators that ordinary models meet: part of the name -> advice.
_HINTS = {
    "native_dropout": "call model.eval(), which switches dropout off",
    "_native_batch_norm_legit_functional": "call model.eval(), so that batch norms use their running statistics",
    "_transformer_encoder_layer_fwd": "torch.backends.mha.set_fastpath_enabled(False) takes encoder layers apart",
    "_native_multi_head_attention": "torch.backends.mha.set_fastpath_enabled(False) takes attention apart",
    "_weight_norm_interface": "torch.nn.utils.parametrize.remove_parametrizations makes it a plain weight",
    "rrelu_with_noise": "use leaky_relu with the mean slope, which is what rrelu does in eval mode",
    "grouped_mm_fallback": 'model.set_experts_implementation("batched_mm") computes the experts of a mixture without it',
    "nonzero": 'loops over the experts of transformers\' mixtures go away with model.set_experts_implementation("grouped_mm")',
    "repeat_interleave.Tensor": "an integer number of repeats gives a known size",
    "_fft_c2r": "torch.fft.ifft(...).real of the whole spectrum computes the same",
    "flex_attention": 'use scaled_dot_product_attention (transformers: attn_implementation="sdpa")',
    "cond": "compute both branches and choose with torch.where",
    **dict.fromkeys(("aten::nonzero", "aten::_unique", "aten::unique", "aten::bincount", "repeat_interleave.T"), _DATA_SIZED),
    **dict.fromkeys(
        ("aten::rand", "aten::bernoulli", "aten::multinomial", "aten::normal", "aten::exponential", "aten::uniform"), _RANDOM
    ),
}


def dtype_to_proto(dtype):
    """torch.dtype -> DType number. Errors: Unsupported."""
    if dtype not in _DTYPES:
        raise Unsupported(f"tensors of {dtype}")
    return _DTYPES[dtype]


def dtype_from_proto(number):
    """DType number -> torch.dtype. Errors: Unsupported."""
    if number not in _TORCH_DTYPES:
        raise Unsupported(f"dtype number {number}")
    return _TORCH_DTYPES[number]


@dataclasses.dataclass
class SerializedGraph:
    """A template and what the caller must know to feed it.

    template: GraphTemplate.
    symbols: the sympy symbols in template order.
    extra_inputs: (name, tensor) of constants too big for the template; they are its last inputs, in order.
    alias_metas: output position -> TensorMeta, for outputs that are views of an input.
    """

    template: pb.GraphTemplate
    symbols: list
    extra_inputs: list
    alias_metas: dict


def default_kind(static, written):
    """Kind of a tensor input that the caller does not decide about."""
    if not static:
        return pb.Input.DYNAMIC
    return pb.Input.STATIC_MUTABLE if written else pb.Input.STATIC_CONSTANT


def serialize(
    graph_module,
    *,
    sources,
    static_indices=(),
    example_inputs=None,
    output_aliases=None,
    kind_of=None,
    range_of=None,
    metadata=None,
):
    """Builds the template of an AOT inference graph.

    Args:
      graph_module: the re-inplaced graph.
      sources: name of each placeholder, in order, as Dynamo gives it.
      static_indices: positions of placeholders whose tensors keep their address between calls.
      example_inputs: the real arguments, same order; passed to kind_of (None: the fake tensors are).
      output_aliases: per graph output the placeholder whose storage it is a view of, or None.
      kind_of: `(tensor, source, written, default) -> Input.Kind`; None keeps the default.
      range_of: `sympy.Symbol -> (min, max)`.
      metadata: pb.Metadata.
    Errors: UnsupportedOperatorError (all offenders at once), Unsupported.
    """
    return _Serializer(graph_module, sources, range_of).run(
        set(static_indices), example_inputs, output_aliases, kind_of, metadata
    )


class _Serializer:
    def __init__(self, graph_module, sources, range_of):
        self.module = graph_module
        self.nodes = list(graph_module.graph.nodes)
        self.sources = list(sources)
        self.table = SymbolTable(range_of)
        self.template = pb.GraphTemplate(format=FORMAT)
        self.value_of = {}  # FX node -> value, or list of values for tuples
        self.program = grouping.Program()
        self.operator_index = {}
        self.attribute_values = {}
        self.extra_inputs = []
        self.alias_metas = {}

    def run(self, static_indices, example_inputs, output_aliases, kind_of, metadata):
        self._check_operators()
        if metadata is not None:
            self.template.metadata.CopyFrom(metadata)
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        if len(placeholders) != len(self.sources):
            raise Unsupported(f"{len(placeholders)} graph inputs but {len(self.sources)} sources")
        written = self._written_placeholders()
        for i, node in enumerate(placeholders):
            example = example_inputs[i] if example_inputs is not None else node.meta.get("val")
            self._input(node, self.sources[i], i in static_indices, node in written, example, kind_of)
        for node in self.nodes:
            if node.op == "get_attr":
                self._attribute(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._outputs(node, placeholders, output_aliases)
            elif node.op != "placeholder":
                raise Unsupported(f"a graph node of kind {node.op}: {node}")
        grouping.add_groups(self.template, self.program, self.table)
        self.template.symbols.extend(self.table.to_proto())
        return SerializedGraph(self.template, self.table.symbols, self.extra_inputs, self.alias_metas)

    # ---- checks ------------------------------------------------------------------------------

    def _check_operators(self):
        bad, places = set(), {}
        for node in self.nodes:
            if node.op != "call_function" or node.target is operator.getitem:
                continue
            if not is_operator(node):
                if not isinstance(node.meta.get("val"), (*_SYMBOLIC, int, float, bool)):
                    name = getattr(node.target, "__name__", str(node.target))
                    bad.add(name)
                    places.setdefault(name, _place(node))
                continue
            name = operator_name(node.target)
            if not name.startswith(_DROPPED_PREFIXES) and name not in allowed_operators():
                bad.add(name)
                places.setdefault(name, _place(node))
        if bad:
            hints = dict.fromkeys(hint for part, hint in _HINTS.items() if any(part in name for name in bad))
            raise UnsupportedOperatorError(bad, places, hints)
        for node in self.nodes:
            if is_operator(node) and any(map(_has_data_size, _tensors(node.meta.get("val")))):
                place = f" ({_place(node)})" if _place(node) else ""
                raise Unsupported(f"the size of the result of {operator_name(node.target)}{place} depends on data: {_DATA_SIZED}")

    def _written_placeholders(self):
        written = set()
        for node in self.nodes:
            if not is_operator(node):
                continue
            for position in written_arguments(node.target):
                root = storage_root(argument_of(node, position))
                if root.op == "get_attr":
                    raise Unsupported(f"{operator_name(node.target)} writes a constant of the graph")
                if root.op == "placeholder":
                    written.add(root)
        return written

    # ---- values ------------------------------------------------------------------------------

    def _meta(self, tensor):
        """Fake tensor -> TensorMeta."""
        if tensor.layout != torch.strided:
            raise Unsupported(f"tensors of layout {tensor.layout}")
        meta = pb.TensorMeta(dtype=dtype_to_proto(tensor.dtype))
        meta.sizes.extend(self.table.expression(size) for size in tensor.shape)
        meta.strides.extend(self.table.expression(stride) for stride in tensor.stride())
        offset = tensor.storage_offset()
        if not (isinstance(offset, int) and offset == 0):
            meta.storage_offset.CopyFrom(self.table.expression(offset))
        return meta

    def _define(self, tensor, root=None):
        """A new value; `root` is the value that first defined its storage (None: this one)."""
        value = len(self.template.values)
        self.template.values.add(meta=self._meta(tensor))
        self.program.add_value(tensor, value if root is None else root)
        return value

    def _input(self, node, source, static, written, example, kind_of):
        fake = node.meta.get("val")
        entry = self.template.inputs.add(name=readable_source(source))
        if isinstance(fake, (torch.SymInt, int)) and not isinstance(fake, bool):
            entry.kind = pb.Input.SYMBOL
            entry.expr.CopyFrom(self.table.expression(fake))
            return
        if not isinstance(fake, torch.Tensor):
            raise Unsupported(f"the graph input {source} is a {type(fake).__name__}, not a tensor or an int")
        entry.value = self.value_of[node] = self._define(fake)
        entry.written = written
        default = default_kind(static or isinstance(example, torch.nn.Parameter), written)
        chosen = kind_of(example, source, written, default) if kind_of is not None else None
        entry.kind = default if chosen is None else chosen

    def _attribute(self, node):
        if node.target in self.attribute_values:
            self.value_of[node] = self.attribute_values[node.target]
            return
        tensor = self.module
        for part in node.target.split("."):
            tensor = getattr(tensor, part)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedOperatorError([f"higher-order operator with body {node.target}"])
        with unset_fake_temporarily(), torch.no_grad():
            tensor = tensor.detach()
            if tensor.numel() * tensor.element_size() <= CONSTANT_BYTES_MAX:
                tensor = tensor.contiguous()
                value = self._define(tensor)
                flat = tensor.cpu().reshape(-1)
                data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
                self.template.constants.add(value=value, data=data)
            else:
                value = self._define(tensor)
                self.extra_inputs.append((node.target, tensor))
                self.template.inputs.add(name=node.target, kind=pb.Input.STATIC_CONSTANT, value=value)
        self.value_of[node] = self.attribute_values[node.target] = value

    # ---- nodes -------------------------------------------------------------------------------

    def _call(self, node):
        result = node.meta.get("val")
        if node.target is operator.getitem:
            source, index = node.args
            if source in self.value_of:
                self.value_of[node] = self.value_of[source][index]
            return
        if not is_operator(node) or operator_name(node.target).startswith(_DROPPED_PREFIXES):
            return
        arguments = self._arguments(node)
        source = aliased_node(node)
        root = None if source is None else self.program.root[self.value_of[source]]
        results = result if isinstance(result, (tuple, list)) else () if result is None else (result,)
        values = [self._define(r, root) if isinstance(r, torch.Tensor) else -1 for r in results]
        self.value_of[node] = values if isinstance(result, (tuple, list)) else (values or [-1])[0]
        name = operator_name(node.target)
        index = self.operator_index.setdefault(name, len(self.operator_index))
        if index == len(self.template.operators):
            self.template.operators.append(name)
        self.template.nodes.add(operator_index=index, args=arguments, outputs=values)
        writes = [self.value_of[argument_of(node, i)] for i in written_arguments(node.target)]
        self.program.add_node(node, module_path(node), self._values_used(node), values, writes)

    def _values_used(self, node):
        used = []

        def visit(argument):
            value = self.value_of.get(argument)
            if isinstance(value, int) and value >= 0:
                used.append(value)
            return argument

        torch.fx.node.map_arg((node.args, node.kwargs), visit)
        return list(dict.fromkeys(used))

    def _arguments(self, node):
        arguments = []
        for position, parameter in enumerate(node.target._schema.arguments):
            if position < len(node.args):
                value = node.args[position]
            elif parameter.name in node.kwargs:
                value = node.kwargs[parameter.name]
            else:
                continue
            if parameter.has_default_value() and _is_default(value, parameter.default_value):
                continue
            argument = pb.Argument(name=parameter.name)
            self._encode(argument, value, parameter, node)
            arguments.append(argument)
        return arguments

    def _plain(self, value):
        """FX nodes that stand for sizes become those sizes; tensors stay nodes."""
        if isinstance(value, torch.fx.Node) and value not in self.value_of:
            return value.meta.get("val")
        return value

    def _encode(self, out, value, parameter, node):
        value = self._plain(value)
        real = getattr(parameter, "real_type", None) or parameter.type
        wants = str(real).removeprefix("Optional[").removesuffix("]")
        if value is None:
            out.none = True
        elif isinstance(value, torch.fx.Node):
            index = self.value_of[value]
            if not isinstance(index, int) or index < 0:
                raise Unsupported(f"{node.target} takes the result of {value.target}, which is no tensor")
            out.value = index
        elif isinstance(value, (list, tuple)):
            self._encode_list(out, [self._plain(item) for item in value], wants, node)
        elif isinstance(value, bool):
            out.boolean = value
        elif isinstance(value, (int, torch.SymInt)):
            if wants == "float" and isinstance(value, int):
                out.floating = value
            elif wants.startswith("List["):
                out.integers.value.append(self.table.expression(value))
            else:
                out.integer.CopyFrom(self.table.expression(value))
        elif isinstance(value, float):
            out.floating = value
        elif isinstance(value, complex):
            out.complex.real, out.complex.imag = value.real, value.imag
        elif isinstance(value, str):
            out.text = value
        elif isinstance(value, torch.dtype):
            out.dtype = dtype_to_proto(value)
        elif isinstance(value, torch.device):
            if value.type not in _DEVICES:
                raise Unsupported(f"{node.target} on device {value}")
            out.device = _DEVICES[value.type]
        elif isinstance(value, torch.layout):
            out.layout = str(value).removeprefix("torch.")
        elif isinstance(value, torch.memory_format):
            out.memory_format = str(value).removeprefix("torch.")
        else:
            raise Unsupported(f"{node.target}: argument {parameter.name} of type {type(value).__name__}: {value}")

    def _encode_list(self, out, items, wants, node):
        if any(isinstance(item, torch.fx.Node) for item in items) or "Tensor" in wants:
            values = [-1 if item is None else self.value_of[item] for item in items]
            out.values.value.extend(values)
            out.values.SetInParent()
        elif wants == "List[bool]":
            out.booleans.value.extend(bool(item) for item in items)
            out.booleans.SetInParent()
        elif wants in ("List[float]",) or any(isinstance(item, float) for item in items):
            if not all(isinstance(item, (int, float)) for item in items):
                raise Unsupported(f"{node.target}: a list of symbolic floats")
            out.floatings.value.extend(float(item) for item in items)
            out.floatings.SetInParent()
        elif all(isinstance(item, (int, torch.SymInt)) for item in items):
            out.integers.value.extend(self.table.expression(item) for item in items)
            out.integers.SetInParent()
        else:
            raise Unsupported(f"{node.target}: a list of {sorted({type(i).__name__ for i in items})}")

    # ---- outputs -----------------------------------------------------------------------------

    def _outputs(self, node, placeholders, output_aliases):
        position = {placeholder: i for i, placeholder in enumerate(placeholders)}
        for i, result in enumerate(node.args[0]):
            out = self.template.outputs.add()
            alias = output_aliases[i] if output_aliases is not None else None
            if result is None:
                out.none = True
                continue
            fake = result.meta.get("val") if isinstance(result, torch.fx.Node) else result
            if not isinstance(fake, torch.Tensor):
                out.expr.CopyFrom(constant(fake) if isinstance(fake, int) else self.table.expression(fake))
            elif alias is not None or result in position:
                out.alias_of_input = position[result] if alias is None else alias
                self.alias_metas[i] = self._meta(fake)
            else:
                out.value = self.value_of[result]


def _is_default(value, default):
    """True if listing `value` says nothing new. Types must match: True, 1 and 1.0 differ here."""
    if value is None or default is None:
        return value is default
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return len(value) == len(default) and all(map(_is_default, value, default))
    if type(value) is not type(default) or isinstance(value, torch.fx.Node):
        return False
    return value == default and not (isinstance(value, float) and math.isnan(value))


def _tensors(value):
    return [item for item in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(item, torch.Tensor)]


def _has_data_size(tensor):
    return any(isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for size in tensor.shape)


def _place(node):
    """The innermost line of the user's program that called an FX node: 'model.py:12: y = torch.lgamma(x)', or None."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    for i in reversed(range(len(lines))):
        found = re.match(r'File "(.*)", line (\d+)', lines[i])
        if found and f"{os.sep}torch{os.sep}" not in found[1]:
            code = f": {lines[i + 1]}" if i + 1 < len(lines) else ""
            return f"{os.path.basename(found[1])}:{found[2]}{code}"
    path = module_path(node)
    return f"in {path[-1][0]}, {path[-1][1]}" if path and path[-1][0] else None


def readable_source(source):
    """Dynamo's source text without its module plumbing: L['self'].model.norm.weight."""
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", str(source))
    return text.replace(".__dict__", "")


def module_path(node):
    """[(path, class name)] of the modules around an FX node, outermost first; paths without the root."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(clean_path(str(path)), getattr(cls, "__name__", str(cls))) for path, cls in stack.values()]


def clean_path(path):
    """L['self']._modules['layers'][3] -> layers.3"""
    path = re.sub(r"^L\[[^\]]*\](\[\d+\])?\.?", "", path)
    path = re.sub(r"\.?_modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path)
    path = re.sub(r"\.__(\w+)__", r".\1", path)
    return path.strip(".")
