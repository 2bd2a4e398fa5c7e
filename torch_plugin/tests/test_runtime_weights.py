"""Weights that change between calls, and arguments that programs write."""

import threading

import pytest
import torch
from runtime_fixtures import Mlp, needs_fake, slice_abi  # noqa: F401

import slicescheduler


def compiled(module, **options):
    return torch.compile(module, backend="slicescheduler", fullgraph=True, options=options or None)


def call_from_threads(step, x, expected, threads=4, calls=15):
    """How many answers differ from `expected`. Many at once, so that every device gets some."""
    wrong = []

    def work():
        with torch.no_grad():
            for _ in range(calls):
                if not torch.equal(step(x), expected):
                    wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    return len(wrong)


def test_Regression_weights_changed_in_place_reach_their_replicas(slice_abi):
    model = torch.nn.Linear(256, 256)
    step = compiled(model, service_class="offline", name="replicated")  # replicas on all devices
    x = torch.randn(64, 256)
    with torch.no_grad():
        step(x)
    for change in (
        lambda: model.weight.add_(0.5),
        lambda: model.load_state_dict(torch.nn.Linear(256, 256).state_dict()),
        lambda: model.bias.zero_(),
    ):
        with torch.no_grad():
            change()
            expected = model(x)
        assert call_from_threads(step, x, expected) == 0


def test_Regression_two_programs_notice_a_change_of_shared_weights(slice_abi):
    model = Mlp().eval()
    options = {"service_class": "offline", "name": "replicated"}
    first, second = compiled(model, **options), compiled(lambda x: model.first(x) - 1, **options)
    x = torch.randn(2, 16)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(first(x), model(x))
            assert torch.equal(second(x), model.first(x) - 1)
            assert torch.equal(first(x), model(x))
            model.first.weight.mul_(2)


@needs_fake
def test_Happy_unchanged_replicas_are_made_once_and_changed_ones_released(slice_abi):
    model = Mlp().eval()
    step = compiled(model, service_class="offline")
    with torch.no_grad():
        for _ in range(3):
            step(torch.ones(2, 16))
        assert slice_abi.replicated == [(6, [])]
        model.first.weight.add_(1)
        for _ in range(3):
            step(torch.ones(2, 16))
    assert slice_abi.replicated == [(6, []), (1, [])], "only what changed is copied again"
    session = next(iter(slice_abi.sessions.values()))
    assert len(session.tensors) == 6 and len(session.bindings) == 1


# ---- arguments that programs write -------------------------------------------------------------


def doubling(x):
    x.mul_(2)
    return x.sum()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "view",
    [lambda b: b[:2], lambda b: b[1:3], lambda b: b[:, 1], lambda b: b.t(), lambda b: b.view(-1), lambda b: b],
    ids=["head", "middle", "column", "transposed", "flat", "whole"],
)
def test_Regression_writes_to_a_view_reach_the_base(slice_abi, mode, view):
    step = compiled(doubling)
    with mode():
        for base in (torch.ones(4, 4), torch.arange(16.0).view(4, 4).clone()):
            twin = base.clone()
            expected = doubling(view(twin))
            assert torch.equal(step(view(base)), expected)
            assert torch.equal(base, twin)


def test_Regression_writes_reach_numpy_and_other_views(slice_abi):
    step = compiled(doubling)
    array = torch.ones(3).numpy().copy()
    whole = torch.ones(4)
    tail = whole[1:]
    with torch.no_grad():
        step(torch.from_numpy(array))
        step(whole)
    assert array.tolist() == [2, 2, 2] and whole.tolist() == [2] * 4 and tail.tolist() == [2] * 3


def test_Edge_written_argument_of_varying_size(slice_abi):
    step = compiled(doubling)
    with torch.no_grad():
        for n in (3, 5, 9):
            x = torch.ones(n)
            assert step(x) == 2 * n and torch.equal(x, torch.full((n,), 2.0))


def test_Edge_written_argument_that_comes_back(slice_abi):
    def function(x):
        x.add_(1)
        return x, x[1:], x * 2

    base = torch.zeros(3, 4)
    with torch.no_grad():
        same, tail, double = compiled(function)(base[1:])
    assert same.data_ptr() == base[1:].data_ptr() and tail.data_ptr() == base[2:].data_ptr()
    assert base.sum() == 8 and torch.equal(double, torch.full((2, 4), 2.0)) and torch.equal(tail, torch.ones(1, 4))


def test_Edge_a_shared_argument_after_an_unshared_one_is_refused(slice_abi):
    step = compiled(doubling)
    with torch.no_grad():
        step(torch.ones(4))
        other = torch.ones(4)
        view = other[1:]
        with pytest.raises(slicescheduler.Unsupported, match="shares its memory.*clone"):
            step(other)
    assert other.sum() == 4 and view.sum() == 3


def test_Edge_overlapping_arguments_are_refused_with_advice(slice_abi):
    def function(a, b):
        a.add_(1)
        return a + b

    base = torch.zeros(6)
    with torch.no_grad(), pytest.raises(slicescheduler.Unsupported, match="views of one tensor.*clone"):
        compiled(function)(base[:4], base[2:])


# ---- what is given back ------------------------------------------------------------------------


def test_Regression_inputs_of_forgotten_weights_leave_the_arena(slice_abi):
    model = torch.nn.Linear(16, 16)
    step = compiled(model, arena_bytes=1 << 20, name="small arena")
    x = torch.randn(1024, 16)  # 64 KiB; as much again for the result
    with torch.no_grad():
        for _ in range(20):  # more bindings than are kept
            model.weight = torch.nn.Parameter(torch.randn(16, 16))
            assert torch.equal(step(x), model(x))


def test_Regression_graphs_of_forgotten_programs_make_room(slice_abi):
    x = torch.ones(2)
    with torch.no_grad():
        for i in range(70):  # a session may have 64
            torch._dynamo.reset()
            assert torch.equal(compiled(lambda x, i=i: x * (i + 2))(x), x * (i + 2))


@needs_fake
def test_Edge_too_many_graphs_in_use_say_what_to_do(slice_abi):
    slice_abi.graphs_max = 2
    steps = [compiled(function) for function in (torch.relu, torch.abs, torch.neg)]
    with torch.no_grad():
        for step in steps[:2]:
            step(torch.ones(2))
        with pytest.raises(slicescheduler.Quota, match="maybe_mark_dynamic.*graphs_max"):
            steps[2](torch.ones(2))
