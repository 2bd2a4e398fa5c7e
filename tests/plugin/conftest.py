"""The plugin's fixtures for tests that need a real daemon: run them under on_daemon.py, or they skip."""

import os
import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "torch_plugin"), str(_ROOT / "torch_plugin" / "tests"), str(_ROOT / "tests" / "plugin")]
os.environ["TRANSFORMERS_SDPA_FORCE_GQA"] = "1"  # read by transformers at import
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_torch():
    """One thread, and no compiled code from other tests."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def daemon(monkeypatch):
    """The real daemon's socket is where the plugin looks. Counters begin at 0; sessions end with the test."""
    socket = os.environ.get("SLICE_TEST_SOCKET")
    if socket is None:
        pytest.skip("needs a daemon: tests/plugin/on_daemon.py BUILD_FOLDER pytest tests/plugin")
    import slicescheduler

    monkeypatch.setenv("SLICE_SOCKET", socket)
    slicescheduler.statistics.counters.__init__()
    yield socket
    slicescheduler.close_all()
