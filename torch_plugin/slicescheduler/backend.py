"""The torch.compile backend "slicescheduler", and `slicescheduler.compile`.

The backend captures each inference graph (capture.py) and hands it to a Runner (runtime.py). Errors of ours
leave the first call with their own type: torch would wrap what a backend raises, so the backend returns a
callable that raises it.
"""

import functools
import warnings

import torch

from .capture import capture_backend, prepare_torch
from .errors import CaptureError, DaemonUnavailable, ExecutorLost, InvalidArgument, SliceError
from .options import parse_options
from .runtime import Runner, kind_of
from .session import session
from .statistics import count_bypassed, counters

BACKEND = "slicescheduler"
# What a non-strict program survives: the scheduler cannot run it, or is not there.
_SURVIVABLE = (CaptureError, DaemonUnavailable, ExecutorLost)


def backend(graph_module, example_inputs, *, options=None, mode=None, **_others):
    """Compiles one Dynamo graph; called by torch. `options`: see Options. `mode` is accepted and ignored."""
    del mode  # transformers passes "reduce-overhead" by default
    try:
        parsed = parse_options(options)
    except InvalidArgument as error:
        return _raiser(error)
    managed = any(hasattr(tensor, "_slice_managed") for tensor in example_inputs)
    try:
        compiled = _capture(graph_module, example_inputs, parsed)
    except Exception as error:
        cause = _slice_error(error)
        if cause is None:
            raise
        if parsed.strict or managed:
            return _raiser(cause)
        return _eager(graph_module, cause)
    if parsed.strict or managed:
        return compiled
    return _with_fallback(compiled, graph_module)


def _capture(graph_module, example_inputs, parsed):
    def on_graph(captured):
        counters.graphs += 1
        compile_id = torch._guards.CompileContext.current_compile_id()
        if compile_id is not None and getattr(compile_id, "frame_compile_id", 0):
            counters.recompiles += 1
        return Runner(captured, parsed)

    return capture_backend(on_graph, kind_of)(graph_module, example_inputs)


def _slice_error(error):
    """The SliceError that `error` is or wraps, or None."""
    while error is not None:
        if isinstance(error, SliceError):
            return error
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return None


def _raiser(error):
    def call(*_arguments):
        raise error.with_traceback(None)

    return call


def _operator_count(graph_module):
    return sum(node.op in ("call_function", "call_method", "call_module") for node in graph_module.graph.nodes)


def _warn_eager(error):
    warnings.warn(
        f"slicescheduler: running eagerly, outside the scheduler, because strict=False and: {error}", stacklevel=3
    )


def _eager(graph_module, error):
    _warn_eager(error)
    operators = _operator_count(graph_module)

    def call(*arguments):
        count_bypassed(operators)
        return graph_module(*arguments)

    return call


def _with_fallback(compiled, graph_module):
    operators = _operator_count(graph_module)
    warned = []

    def call(*arguments):
        try:
            return compiled(*arguments)
        except _SURVIVABLE as error:
            if not warned:
                warned.append(True)
                _warn_eager(error)
        count_bypassed(operators)
        return graph_module(*arguments)

    return call


# ---- guards ------------------------------------------------------------------------------------

_STATE_GUARDS = {
    "SHAPE_ENV", "GRAD_MODE", "GLOBAL_STATE", "TORCH_FUNCTION_STATE", "DETERMINISTIC_ALGORITHMS",
    "DEFAULT_DEVICE", "AUTOCAST_STATE",
}  # fmt: skip
_VALUE_GUARDS = {"CONSTANT_MATCH", "EQUALS_MATCH"}
# About classes and module attributes: true for the life of a serving process.
_STRUCTURE_GUARDS = {"DICT_CONTAINS", "NOT_PRESENT_IN_GENERIC_DICT", "HASATTR", "CLOSURE_MATCH", "FUNCTION_MATCH"}
_STRUCTURE_NAMES = ("_modules", "_parameters", "_buffers", ".layers[", ".config", "__mro__")


def guard_filter(guards):
    """Which of torch's guards to keep: `options={"guard_filter_fn": slicescheduler.guard_filter}`.

    Kept: global state, shapes, and everything about the arguments of the call. Dropped: guards on the module
    tree (weights, submodules, configuration) and on the layers of a cache, which cost most of a call's
    overhead. So do not change a model's structure, its configuration or train/eval mode after the first call;
    the binder checks sizes and types of weights and caches whenever it meets new ones.
    """
    return [_keeps(guard) for guard in guards]


def _keeps(guard):
    if guard.guard_type in _STATE_GUARDS:
        return True
    name = guard.orig_guard.name
    name = name() if callable(name) else name
    if guard.guard_type in _STRUCTURE_GUARDS or any(part in name for part in _STRUCTURE_NAMES):
        return False
    if name.startswith("L['self']"):
        return False
    if guard.is_global or name.startswith("G["):
        return guard.guard_type in _VALUE_GUARDS and "__import_" not in name
    return True


def compile(model, *, dynamic=None, fullgraph=True, **options):
    """torch.compile for this backend with cheap guards: `step = slicescheduler.compile(model, service_class="online")`.

    Args:
      model: a module or function.
      dynamic, fullgraph: as for torch.compile.
      options: see slicescheduler.Options.
    Differs from `torch.compile(model, backend="slicescheduler")` by guard_filter (see there for what it asks
    of you) and by checking the options at once. Errors: InvalidArgument.
    """
    parsed = parse_options(options)
    session(**parsed.session_options)  # caches made from now on use this session by default
    passed = {**options, "guard_filter_fn": guard_filter}
    return torch.compile(model, backend=BACKEND, fullgraph=fullgraph, dynamic=dynamic, options=passed)


@functools.cache
def register():
    """Makes the name "slicescheduler" known to torch.compile. The entry point does it too once installed."""
    prepare_torch()
    if BACKEND in torch._dynamo.list_backends(exclude_tags=()):
        return
    torch._dynamo.register_backend(backend, name=BACKEND)
