"""Makes the package importable from the source tree and fixes what changes bits: threads, SDPA path."""

import os
import pathlib
import sys

os.environ["TRANSFORMERS_SDPA_FORCE_GQA"] = "1"  # read by transformers at import
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE)]

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_torch():
    """One thread, and no compiled code from other tests."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
