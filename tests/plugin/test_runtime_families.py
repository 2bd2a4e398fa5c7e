"""Architectures of transformers on a real daemon, bit by bit against eager. docs/models.md is the table for people.

SLICE_TEST_ALL_MODELS=1 adds the variants, a minute more.
"""

import os

import model_families
import pytest
from case import check

MORE = pytest.mark.skipif("SLICE_TEST_ALL_MODELS" not in os.environ, reason="a variant: set SLICE_TEST_ALL_MODELS=1")


@pytest.mark.parametrize(
    "make", [*model_families.QUICK.values(), *(pytest.param(make, marks=MORE) for make in model_families.MORE.values())],
    ids=[*model_families.QUICK, *model_families.MORE],
)
def test_Happy_a_model_equals_eager(daemon, make):
    check(make())
