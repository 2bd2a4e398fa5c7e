"""Shared by the runtime tests. They run against FakeSlice, or the real daemon if $SLICE_TEST_SOCKET is set."""

import os

import pytest
import torch
from fake_abi import FakeSlice

import slicescheduler
from slicescheduler import _abi, statistics

REAL_SOCKET = os.environ.get("SLICE_TEST_SOCKET")
needs_fake = pytest.mark.skipif(bool(REAL_SOCKET), reason="looks into the fake or injects faults")


class Mlp(torch.nn.Module):
    """x [n, 16] -> [n, 16], three layers."""

    def __init__(self, width=16):
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, width)
        self.third = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


@pytest.fixture
def slice_abi(monkeypatch):
    """The FakeSlice in use, or None on the real daemon. Counters begin at 0."""
    statistics.counters.__init__()
    if REAL_SOCKET:
        monkeypatch.setenv("SLICE_SOCKET", REAL_SOCKET)
        yield None
        slicescheduler.close_all()
        return
    fake = FakeSlice()
    _abi.use_library(fake)
    yield fake
    slicescheduler.close_all()
    _abi.use_library(None)
