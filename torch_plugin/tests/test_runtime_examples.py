"""The examples run as printed, and say that they agree with plain PyTorch."""

import importlib
import pathlib
import sys

from runtime_fixtures import slice_abi  # noqa: F401

import slicescheduler

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"


def example(name, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def test_Happy_simple(slice_abi, monkeypatch):  # noqa: F811
    assert example("simple", monkeypatch).main()


def test_Happy_generate(slice_abi, monkeypatch, capsys):  # noqa: F811
    assert example("generate", monkeypatch).main(tokens=4)
    assert capsys.readouterr().out.count("equal to plain PyTorch") == 3
    assert slicescheduler.stats().bypassed_operators == 0


def test_Happy_serving_loop_of_the_demo(slice_abi, monkeypatch):  # noqa: F811
    tenant = example("tenant", monkeypatch)
    tenant.Tenant.service_class = "online"
    one = tenant.Tenant("demo-test", None, eager=False)
    one.prepare([[40, 4], [150, 3]], seed=1)
    one.connect([40, 150])
    for case, (prompt, tokens, _) in enumerate(one.cases):
        answer, completions = one.answer(prompt, tokens, deadline_ms=60_000)
        one.answers.append((case, answer))
        assert len(completions) == (prompt.shape[1] + 127) // 128 + tokens - 1
    checked = one.check()
    assert checked["checked"] == 2 and checked["wrong"] == 0 and checked["examples"] == []
    assert checked["recompiles"] == 0 and checked["bypassed"] == 0
