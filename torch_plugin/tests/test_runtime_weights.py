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
