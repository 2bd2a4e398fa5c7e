"""Architectures of transformers on a real daemon, bit by bit against eager. docs/models.md is the table for people.

SLICE_TEST_ALL_MODELS=1 adds the variants, a minute more.
"""

import os

import model_families
import pytest
import torch
from case import check

import slicescheduler

MORE = pytest.mark.skipif("SLICE_TEST_ALL_MODELS" not in os.environ, reason="a variant: set SLICE_TEST_ALL_MODELS=1")


@pytest.mark.parametrize(
    "make", [*model_families.QUICK.values(), *(pytest.param(make, marks=MORE) for make in model_families.MORE.values())],
    ids=[*model_families.QUICK, *model_families.MORE],
)
def test_Happy_a_model_equals_eager(daemon, make):
    check(make())


def test_Edge_experts_of_odd_sizes_are_refused_until_they_are_batched(daemon):
    case = model_families.decoder("Mixtral", num_local_experts=4, intermediate_size=47, **model_families.MOE)
    ((_, keywords),) = case.calls
    with torch.inference_mode(), pytest.raises(slicescheduler.UnsupportedOperatorError, match="batched_mm"):
        torch.compile(case.program, backend="slicescheduler", fullgraph=True)(**keywords)
    torch._dynamo.reset()
    slicescheduler.statistics.counters.__init__()
    case.program.set_experts_implementation("batched_mm")
    check(case)
