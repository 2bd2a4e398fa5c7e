"""What the model and module tests share: a program with the calls to compare, and the comparison."""

import dataclasses

import torch

import slicescheduler

# Where a result may differ from eager's in the last bits because torch takes an operator apart while it traces.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 1e-2}


@dataclasses.dataclass
class Case:
    """A program and the calls to compare with eager.

    program: what is compiled. calls: (positional arguments, keyword arguments) of each call, in order.
    dynamic: {position or keyword: axes} to mark as dynamic in every call. graphs: how many graphs are captured.
    exact: results equal eager's bit by bit; otherwise within TOLERANCE.
    """

    program: object
    calls: list
    dynamic: dict = dataclasses.field(default_factory=dict)
    graphs: int = 1
    exact: bool = True


def leaves(result):
    """The tensors and numbers of a nested result, in order; of a KV cache its keys and values."""
    if result is None:
        return []
    if isinstance(result, dict):
        return [leaf for value in result.values() for leaf in leaves(value)]
    if isinstance(result, (list, tuple)):
        return [leaf for value in result for leaf in leaves(value)]
    if hasattr(result, "layers"):
        return [leaf for layer in result.layers for leaf in (layer.keys, layer.values)]
    return [result]


def check(case):
    """Compiles the program, runs every call on the daemon, and compares results, sizes, types and strides with eager's."""
    with torch.inference_mode():
        step = torch.compile(case.program, backend="slicescheduler", fullgraph=True)
        for arguments, keywords in case.calls:
            expected = leaves(case.program(*arguments, **keywords))
            for key, axes in case.dynamic.items():
                for axis in axes:
                    torch._dynamo.mark_dynamic(arguments[key] if isinstance(key, int) else keywords[key], axis)
            results = leaves(step(*arguments, **keywords))
            assert len(results) == len(expected) > 0
            for result, wanted in zip(results, expected):
                _compare(result, wanted, case.exact)
    stats = slicescheduler.stats()
    assert (stats.graphs, stats.bypassed_operators) == (case.graphs, 0)


def _compare(result, wanted, exact):
    if not isinstance(wanted, torch.Tensor):
        assert type(result) is type(wanted) and result == wanted
        return
    tolerance = 0.0 if exact else TOLERANCE.get(wanted.dtype, 0.0)
    torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=wanted.numel() > 1)
