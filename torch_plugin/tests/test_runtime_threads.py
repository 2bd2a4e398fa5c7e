"""Several threads compile and call at once."""

import threading

import pytest
import torch
from runtime_fixtures import Mlp, needs_fake, slice_abi  # noqa: F401
from torch.fx.experimental.proxy_tensor import make_fx

import slicescheduler
from slicescheduler import capture

THREADS = 8
STUCK_SECONDS = 300  # far beyond what a busy machine needs: only a deadlock gets there


@pytest.fixture
def many_recompiles():
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10000):
        yield


def run_together(functions):
    """Runs all at once; raises the first error of any."""
    start, errors = threading.Barrier(len(functions)), []

    def run(function):
        try:
            start.wait(STUCK_SECONDS)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    [thread.start() for thread in threads]
    [thread.join(STUCK_SECONDS) for thread in threads]
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


def test_Race_threads_compile_new_shapes_of_same_and_different_models(slice_abi, many_recompiles):
    models = [Mlp().eval() for _ in range(THREADS // 2)]
    steps = [torch.compile(model, backend="slicescheduler", fullgraph=True) for model in models]
    jobs = []
    with torch.inference_mode():
        for i in range(THREADS):
            shapes = [(i + 1, 16), (2, i + 1, 16), (2, 2, i + 1, 16)]
            chosen = [(steps[j], models[j], torch.randn(shape)) for shape in shapes for j in {0, i % len(models)}]
            jobs.append([(step, x, model(x)) for step, model, x in chosen])
    before, done = slicescheduler.stats().graphs, []

    def work(mine):
        with torch.inference_mode():
            for step, x, expected in mine:
                assert torch.equal(step(x), expected)
                done.append(1)

    run_together([lambda mine=mine: work(mine) for mine in jobs])

    assert len(done) == sum(map(len, jobs))
    assert slicescheduler.stats().graphs - before >= 3, "each rank needs a graph of its own"


def test_Race_calls_go_on_while_another_thread_traces(slice_abi):
    """torch's flag for FX tracing is one for the process: a call meanwhile was refused."""
    model = Mlp().eval()
    step = torch.compile(model, backend="slicescheduler", fullgraph=True)
    x = torch.randn(2, 16)
    with torch.inference_mode():
        expected = model(x)
        step(x)
    flag = torch.fx._symbolic_trace
    traced, answers = [], []

    def slow(y):
        traced.append(flag.is_fx_symbolic_tracing())
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(STUCK_SECONDS)
        return y * 2

    def call():
        with torch.inference_mode():
            answers.append(step(x))

    with capture._trace_alone():
        make_fx(slow)(torch.ones(1))

    assert traced == [True] and torch.equal(answers[0], expected)


@needs_fake
def test_Race_a_graph_registers_while_another_thread_waits_for_its_answer(slice_abi):
    step = torch.compile(lambda x: x + 1, backend="slicescheduler", fullgraph=True, dynamic=False)
    with torch.inference_mode():
        step(torch.zeros(1))
        slice_abi.hold = True  # from here on nobody gets an answer
    registered = slice_abi.registered
    answers = {}

    def call(size):
        with torch.inference_mode():
            answers[size] = step(torch.zeros(size))

    threads = [threading.Thread(target=call, args=(size,), daemon=True) for size in (2, 3)]
    for i, thread in enumerate(threads):
        thread.start()
        while slice_abi.registered < registered + i + 1 and thread.is_alive():
            thread.join(0.01)
    both_registered = slice_abi.registered == registered + 2
    slice_abi.hold = False
    [thread.join(STUCK_SECONDS) for thread in threads]

    assert both_registered, "the second graph waited for the first one's answer"
    assert torch.equal(answers[2], torch.ones(2)) and torch.equal(answers[3], torch.ones(3))
