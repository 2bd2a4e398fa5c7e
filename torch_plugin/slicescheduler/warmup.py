"""Warm-up: capture everything before traffic, and make sure that nothing is captured later."""

import torch

from .errors import SliceError
from .statistics import counters


class RecompileError(SliceError):
    """A call after the warm-up was captured anew: it would stall a real request for seconds."""


def warmup(function, calls, *, passes=2, fail_on_recompile=False):
    """Runs `function` on every call, then again, and raises if the later passes captured anything.

    Args:
      function: a compiled module or function.
      calls: list of argument tuples, of dicts of keyword arguments, or of callables without arguments
        (then `function` may be None). Cover prefill and decode, and mark variable dimensions with
        torch._dynamo.maybe_mark_dynamic. Reset caches inside such callables.
      passes: how often; the first one captures.
      fail_on_recompile: from now on torch raises instead of compiling, in this whole process
        (torch.compiler.set_stance).
    Afterwards stats().recompiles counts from 0. Errors: RecompileError.
    """
    for number in range(passes):
        before = counters.graphs
        for call in calls:
            _run(function, call)
        if number and counters.graphs != before:
            raise RecompileError(
                f"pass {number + 1} of the warm-up captured {counters.graphs - before} more graphs: some argument "
                "differs between calls in a way that torch specialises on. TORCH_LOGS=recompiles names it."
            )
    counters.recompiles = 0
    if fail_on_recompile:
        torch.compiler.set_stance("fail_on_recompile")


def _run(function, call):
    if callable(call):
        return call()
    if isinstance(call, dict):
        return function(**call)
    return function(*(call if isinstance(call, tuple) else (call,)))
