"""The Dynamo backend: compiled functions become graph templates.

`capture_backend(on_graph)` returns a backend for torch.compile. Dynamo traces the program, AOT autograd makes
the graph functional, `canonical` rewrites operators that the executor does not know, `reinplace` undoes the functional form
for updates of inputs, `serialize` writes the template, and `on_graph(captured)` decides how to run it: it returns a callable
that takes the list of graph arguments and returns the list of graph outputs.

Threads: one captures at a time. Dynamo compiles under a lock of its own, but torch's "somebody traces with FX" is
one flag for the whole process, and every call of a compiled function raises while it is set; `_trace_alone` makes that
flag count only in the thread that traces. Nothing here waits for the daemon. A CapturedGraph is immutable and may be shared.
"""

import contextlib
import dataclasses
import functools
import threading
import time

import torch
from torch._dynamo.backends.common import aot_autograd

from . import reinplace as reinplace_pass
from . import serialize as serializer
from . import weights
from ._proto import template_pb2 as pb
from .canonical import canonicalize, decompositions
from .errors import TrainingGraphError, Unsupported
from .expressions import compile_expressions

_ALIAS_TYPES = ("alias_of_input", "is_input")


@dataclasses.dataclass(frozen=True)
class OutputLayout:
    """Shape of one output for one binding of the symbols: torch dtype, sizes and strides in elements.

    A result lies in its slot as this says: own strides (gaps, permutations, expanded dimensions too), behind
    `storage_offset` elements, which the executor leaves alone. The slot ends with the last element.
    """

    dtype: torch.dtype
    sizes: tuple
    strides: tuple
    storage_offset: int


class CapturedGraph:
    """One captured program, ready to register.

    Attributes:
      template: GraphTemplate.
      template_bytes: its canonical serialization: equal programs give equal bytes.
      moved_arguments: positions of arguments that the graph writes where they are: their memory must be movable.
      input_sources: Dynamo's source text of each graph argument, in the order of the arguments.
      extra_inputs: [(name, tensor)] constants of the graph too big for the template. They are the last
        entries of template.inputs and are bound once; they are no graph arguments.
      example_inputs: the arguments of the call that caused the capture; None after on_graph has returned.
      reinplace_report, capture_seconds: for logs.
    """

    def __init__(self, serialized, input_sources, example_inputs, report, moved_arguments, capture_seconds):
        self.template = serialized.template
        self.template_bytes = self.template.SerializeToString(deterministic=True)
        self.input_sources = tuple(input_sources)
        self.extra_inputs = tuple(serialized.extra_inputs)
        self.example_inputs = example_inputs
        self.reinplace_report = report
        self.moved_arguments = tuple(moved_arguments)
        self.capture_seconds = capture_seconds
        self._bind = _compile_binding(self.template, len(self.input_sources))
        self._layout_of = _compile_layouts(_output_metas(serialized))
        self._integers = _compile_integers(self.template)
        self._layout_cache = (None, None)

    @property
    def argument_count(self):
        """Number of graph arguments: template inputs without the extra ones."""
        return len(self.input_sources)

    def bind_symbols(self, args):
        """Graph arguments -> tuple of symbol values, in template order. Reads only sizes, strides and ints."""
        return self._bind(args)

    def output_layouts(self, symbols):
        """Symbol values -> list with an OutputLayout for each tensor output (aliases too), else None.

        Repeated calls with the same symbols return the same list.
        """
        key, layouts = self._layout_cache
        if key != symbols:
            layouts = self._layout_of(symbols)
            self._layout_cache = (symbols, layouts)
        return layouts

    def output_integers(self, symbols):
        """Symbol values -> {output position: int} for the integer outputs."""
        return self._integers(symbols)

    def input_metas(self, symbols):
        """Symbol values -> per template input (dtype, sizes, strides), or the int of a SYMBOL input. Slow path."""
        described = []
        for entry in self.template.inputs:
            if entry.kind == pb.Input.SYMBOL:
                described.append(compile_expressions([entry.expr])(symbols)[0])
                continue
            meta = self.template.values[entry.value].meta
            dtype = serializer.dtype_from_proto(meta.dtype)
            sizes, strides = compile_expressions(meta.sizes), compile_expressions(meta.strides)
            described.append((dtype, sizes(symbols), strides(symbols)))
        return described


# ---- per-call functions ------------------------------------------------------------------------


def _compile_binding(template, argument_count):
    """`args -> symbol values`, as one generated function. Errors: Unsupported for symbols no input carries."""
    where = {}
    for i, entry in enumerate(template.inputs[:argument_count]):
        if entry.kind == pb.Input.SYMBOL and entry.expr.WhichOneof("node") == "symbol":
            where.setdefault(entry.expr.symbol, f"int(a[{i}])")
    for i, entry in enumerate(template.inputs[:argument_count]):
        if entry.kind == pb.Input.SYMBOL:
            continue
        meta = template.values[entry.value].meta
        for axis, size in enumerate(meta.sizes):
            if size.WhichOneof("node") == "symbol":
                where.setdefault(size.symbol, f"a[{i}].shape[{axis}]")
        for axis, stride in enumerate(meta.strides):
            if stride.WhichOneof("node") == "symbol":
                where.setdefault(stride.symbol, f"a[{i}].stride({axis})")
    missing = [s.name for i, s in enumerate(template.symbols) if i not in where]
    if missing:
        raise Unsupported(f"no graph input carries the size {', '.join(missing)}")
    body = "".join(where[i] + ", " for i in range(len(template.symbols)))
    return eval(f"lambda a: ({body})", {"__builtins__": {}, "int": int})  # noqa: S307


def _output_metas(serialized):
    """TensorMeta of each output, None for integers and none. Alias outputs: the view the caller makes."""
    metas = []
    for i, out in enumerate(serialized.template.outputs):
        if out.WhichOneof("kind") == "value":
            metas.append(serialized.template.values[out.value].meta)
        else:
            metas.append(serialized.alias_metas.get(i))
    return metas


def _compile_layouts(metas):
    exprs, spans = [], []
    for meta in metas:
        if meta is None:
            spans.append(None)
            continue
        rank, first = len(meta.sizes), len(exprs)
        exprs.extend(meta.sizes)
        exprs.extend(meta.strides)
        exprs.append(meta.storage_offset if meta.HasField("storage_offset") else pb.Expr(constant=0))
        spans.append((serializer.dtype_from_proto(meta.dtype), first, rank))
    function = compile_expressions(exprs)

    def layouts(symbols):
        values = function(symbols)
        out = []
        for span in spans:
            if span is None:
                out.append(None)
                continue
            dtype, first, rank = span
            middle, last = first + rank, first + 2 * rank
            out.append(OutputLayout(dtype, values[first:middle], values[middle:last], values[last]))
        return out

    return layouts


def _compile_integers(template):
    positions = [i for i, out in enumerate(template.outputs) if out.WhichOneof("kind") == "expr"]
    function = compile_expressions([template.outputs[i].expr for i in positions])
    return lambda symbols: dict(zip(positions, function(symbols)))


# ---- the backend -------------------------------------------------------------------------------


def capture_backend(on_graph, kind_of=None):
    """A backend for torch.compile that captures every inference graph.

    Args:
      on_graph: `CapturedGraph -> callable(list of arguments) -> list of outputs`. The callable owns the
        argument list. Alias outputs (template.outputs[i].alias_of_input) may be any tensor of the layout in
        output_layouts: torch makes the view of the caller's tensor itself.
      kind_of: `(tensor, source, written, default kind) -> Input.Kind or None`; see serialize().
    The returned backend raises UnsupportedOperatorError, Unsupported and TrainingGraphError.
    """

    def backend(graph_module, example_inputs, **_options):
        sources = placeholder_sources(graph_module)

        def compile_inference(aot_module, _fake_inputs):
            returned = _return_writes(aot_module, list(example_inputs))
            captured = _capture(aot_module, sources, list(example_inputs), kind_of, len(returned))
            run = on_graph(captured)
            captured.example_inputs = None  # they would keep the caller's tensors alive

            def call(args):
                arguments = list(args)
                args.clear()
                if not returned:
                    return run(arguments)
                outputs = run(list(arguments))
                for position, value in zip(returned, outputs[-len(returned) :]):
                    arguments[position].copy_(value)
                return outputs[: -len(returned)]

            call._boxed_call = True
            return call

        def refuse_training(_module, _inputs):
            raise TrainingGraphError()

        with _trace_alone():
            return aot_autograd(
                fw_compiler=refuse_training,
                bw_compiler=refuse_training,
                inference_compiler=compile_inference,
                decompositions=decompositions(),
                keep_inference_input_mutations=True,
            )(graph_module, example_inputs)

    return backend


_capture_lock = threading.RLock()  # a capture may compile an inner function
_tracing_thread = None


@contextlib.contextmanager
def _trace_alone():
    """Keeps captures apart, and what they set in torch from being taken for other threads' doing."""
    global _tracing_thread
    with _capture_lock:
        outer, _tracing_thread = _tracing_thread, threading.get_ident()
        try:
            yield
        finally:
            _tracing_thread = outer


@functools.cache
def prepare_torch():
    """Mends what torch 2.11 does wrong when several threads compile. Called before any program is compiled.

    - torch.compile asks whether anybody in the process traces with FX; it must ask about *this* thread. Other
      tracers than ours are answered as before. The function is looked up when torch wraps a program.
    - With a CUDA build and no GPU, the first fake tensors of two threads at once crash the process while both
      replace the device guard; after one call alone nothing is left to replace.
    """
    anybody_traces = torch.fx._symbolic_trace.is_fx_symbolic_tracing

    @functools.wraps(anybody_traces)
    def this_thread_traces():
        return _tracing_thread in (None, threading.get_ident()) and anybody_traces()

    torch.fx._symbolic_trace.is_fx_symbolic_tracing = this_thread_traces
    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def placeholder_sources(graph_module):
    """Dynamo's source text of each placeholder, in order; the placeholder's name where it has none."""
    sources = []
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node.meta.get("grapharg"), "source", None)
            name = getattr(source, "name", None)
            sources.append(str(name() if callable(name) else name or node.name))
    return sources


def _static_positions():
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return set(metadata.static_input_indices) if metadata is not None else set()


def _return_writes(aot_module, example_inputs):
    """Makes new contents of written arguments results where the arguments cannot be shared with the daemon.

    What a program writes where it is must lie in shared memory at one address. Parameters, buffers and caches move
    there, and so does an argument that nobody else sees. A view of something larger, memory of numpy or a tensor of
    varying size stays where it is: the caller copies the last results into these arguments, whose positions are returned.
    """
    static, returned = _static_positions(), []
    placeholders = [node for node in aot_module.graph.nodes if node.op == "placeholder"]
    output = next(node for node in aot_module.graph.nodes if node.op == "output")
    values = []
    for node in list(aot_module.graph.nodes):
        if node.target is not torch.ops.aten.copy_.default or node.args[0] not in placeholders:
            continue
        position = placeholders.index(node.args[0])
        example, fake = example_inputs[position], node.args[0].meta["val"]
        stays = position in static or isinstance(example, torch.nn.Parameter) or hasattr(example, "_slice_managed")
        fixed = all(isinstance(number, int) for number in (*fake.shape, *fake.stride()))
        if stays or (fixed and (weights.locate(example) is not None or weights.may_move(example))):
            continue
        returned.append(position)
        values.append(node.args[1])
        node.replace_all_uses_with(node.args[1])
        aot_module.graph.erase_node(node)
    if returned:
        output.args = ([*output.args[0], *values],)
        aot_module.recompile()
    return returned


def _capture(aot_module, sources, example_inputs, kind_of, returned_count):
    started = time.perf_counter()
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    output = next(node for node in aot_module.graph.nodes if node.op == "output")
    placeholders = [node for node in aot_module.graph.nodes if node.op == "placeholder"]
    _check_order(placeholders, sources, example_inputs)
    aliases = _output_aliases(metadata, len(output.args[0]) - returned_count) + [None] * returned_count
    canonicalize(aot_module)
    report = reinplace_pass.reinplace(aot_module, {i for i, alias in enumerate(aliases) if alias is not None})
    serialized = serializer.serialize(
        aot_module,
        sources=sources,
        static_indices=list(metadata.static_input_indices) if metadata is not None else (),
        example_inputs=example_inputs,
        output_aliases=aliases,
        kind_of=kind_of,
        range_of=_range_function(context, placeholders),
        metadata=_metadata(aot_module, placeholders),
    )
    static = _static_positions()
    moved = [
        i
        for i, (entry, example) in enumerate(zip(serialized.template.inputs, example_inputs))
        if entry.kind == pb.Input.STATIC_MUTABLE and i not in static and not isinstance(example, torch.nn.Parameter)
    ]
    return CapturedGraph(serialized, sources, example_inputs, report, moved, time.perf_counter() - started)


def _check_order(placeholders, sources, example_inputs):
    """AOT must not have dropped, added or reordered arguments."""
    if not len(placeholders) == len(sources) == len(example_inputs):
        raise Unsupported(
            f"torch made {len(placeholders)} graph arguments of {len(example_inputs)} ({', '.join(sources)}). It does so "
            "when some of them are views of one tensor and the program writes one: clone() them before the call, or "
            "return the new contents instead of writing them"
        )
    for node, example in zip(placeholders, example_inputs):
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor) != isinstance(example, torch.Tensor):
            raise Unsupported(f"torch reordered the graph arguments at {node.name}")
        if isinstance(fake, torch.Tensor) and (fake.dtype != example.dtype or fake.dim() != example.dim()):
            raise Unsupported(f"torch reordered the graph arguments at {node.name}")


def _output_aliases(metadata, output_count):
    """Per graph output the argument that torch regenerates it from, or None."""
    aliases = [None] * output_count
    if metadata is None:
        return aliases
    infos = metadata.output_info
    first = output_count - len(infos) - metadata.num_intermediate_bases
    if first < 0:
        raise Unsupported(f"{output_count} graph outputs but torch describes {len(infos)}")
    for i, info in enumerate(infos):
        if info.output_type.name in _ALIAS_TYPES:
            aliases[first + i] = info.base_idx
    return aliases


def _range_function(context, placeholders):
    """`sympy.Symbol -> (min, max)` from torch's shape environment."""
    environment = None
    if context is not None and context.fake_mode is not None:
        environment = context.fake_mode.shape_env
    if environment is None:
        for node in placeholders:
            if isinstance(node.meta.get("val"), torch.SymInt):
                environment = node.meta["val"].node.shape_env

    def range_of(symbol):
        bounds = environment.var_to_range[symbol]
        return bounds.lower, bounds.upper

    return range_of if environment is not None else None


def _metadata(aot_module, placeholders):
    tensors = [n.meta["val"] for n in placeholders if isinstance(n.meta.get("val"), torch.Tensor)]
    # A 0-d tensor of the CPU may meet tensors of any device, as in eager.
    devices = {tensor.device.type for tensor in tensors if tensor.dim()} or {"cpu"}
    if len(devices) > 1:
        raise Unsupported(f"one graph with tensors on {' and '.join(sorted(devices))}: a graph runs on one device")
    model = ""
    for node in aot_module.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            model = getattr(next(iter(stack.values()))[1], "__name__", "")
            break
    return pb.Metadata(
        framework=f"torch {torch.__version__}",
        model=model,
        threads=torch.get_num_threads(),
        device=pb.CUDA if "cuda" in devices else pb.CPU,
    )
