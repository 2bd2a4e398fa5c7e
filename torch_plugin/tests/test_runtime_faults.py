"""What users see when the daemon, the executor, a signal or a fork gets in the way."""

import gc
import os
import signal
import threading

import pytest
import torch
from runtime_fixtures import Mlp, needs_fake, slice_abi  # noqa: F401

import slicescheduler
from slicescheduler import _abi
from slicescheduler.session import ManagedGroup, size_class

X = torch.ones(2, 16)


@pytest.fixture
def step(slice_abi):  # noqa: F811
    model = Mlp().eval()
    compiled = torch.compile(model, backend="slicescheduler", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(X), model(X))
        yield lambda: compiled(X)


def test_Edge_daemon_absent_names_socket_and_cure(monkeypatch, tmp_path):
    libraries = _abi.library_candidates()
    if not any(path.exists() for path in libraries):
        pytest.skip("libslice is not built")
    monkeypatch.setenv("SLICE_SOCKET", str(tmp_path / "nobody.sock"))
    with torch.inference_mode(), pytest.raises(slicescheduler.DaemonUnavailable) as caught:
        torch.compile(Mlp().eval(), backend="slicescheduler")(X)
    assert "nobody.sock" in str(caught.value) and "sliced" in str(caught.value).replace("nobody.sock", "")
    slicescheduler.close_all()


def test_Edge_missing_library_says_where_it_looked(monkeypatch):
    monkeypatch.setenv("SLICE_LIBRARY", "/nowhere/libslice.so.1")
    monkeypatch.setattr(_abi, "_library", None)
    with pytest.raises(slicescheduler.DaemonUnavailable, match="/nowhere/libslice.so.1|SLICE_LIBRARY"):
        _abi._load()


@needs_fake
def test_Edge_daemon_absent_then_present(slice_abi):  # noqa: F811
    slice_abi.down = True
    model = Mlp().eval()
    with torch.inference_mode():
        step = torch.compile(model, backend="slicescheduler")
        with pytest.raises(slicescheduler.DaemonUnavailable, match="sliced"):
            step(X)
        slice_abi.down = False
        assert torch.equal(step(X), model(X))


@needs_fake
def test_Edge_not_strict_survives_an_absent_daemon(slice_abi):  # noqa: F811
    slice_abi.down = True
    model = Mlp().eval()
    with torch.inference_mode():
        step = torch.compile(model, backend="slicescheduler", options={"strict": False})
        before = slicescheduler.stats().bypassed_operators
        with pytest.warns(UserWarning, match="strict=False"):
            assert torch.equal(step(X), model(X))
        step(X)
        assert slicescheduler.stats().bypassed_operators > before
        slice_abi.down = False
        calls = slicescheduler.stats().calls
        assert torch.equal(step(X), model(X))
        assert slicescheduler.stats().calls == calls + 1


@needs_fake
def test_Happy_stateless_graph_survives_a_daemon_restart(slice_abi, step):  # noqa: F811
    expected = step().clone()
    slice_abi.kill()
    assert torch.equal(step(), expected)
    assert slice_abi.opened == 2 and slice_abi.registered == 2
    gc.collect()
    assert len(slice_abi.sessions) == 1  # the old connection is closed


@needs_fake
def test_Happy_results_of_a_lost_connection_stay_readable(slice_abi, step):  # noqa: F811
    kept = step()
    expected = kept.clone()
    slice_abi.kill()
    step()
    gc.collect()
    assert torch.equal(kept, expected) and len(slice_abi.sessions) == 2
    del kept
    gc.collect()
    assert len(slice_abi.sessions) == 1


@needs_fake
def test_Happy_executor_loss_is_retried_and_given_up(slice_abi, step):  # noqa: F811
    slice_abi.fail_next(_abi.ERR_EXECUTOR_LOST, 2)
    step()
    slice_abi.fail_next(_abi.ERR_EXECUTOR_LOST, 3)
    with pytest.raises(slicescheduler.ExecutorLost) as caught:
        step()
    assert caught.value.retryable
    step()


@needs_fake
@pytest.mark.parametrize(
    "status, kind",
    [
        (_abi.ERR_DEADLINE, slicescheduler.DeadlineExceeded),
        (_abi.ERR_NEVER_FITS, slicescheduler.NeverFits),
        (_abi.ERR_OP_FAILED, slicescheduler.OperatorFailed),
        (_abi.ERR_QUOTA, slicescheduler.Quota),
        (_abi.ERR_CANCELLED, slicescheduler.Cancelled),
    ],
)
def test_Edge_failed_run_raises_its_kind_and_leaks_nothing(slice_abi, step, status, kind):  # noqa: F811
    step()
    slots = dict(next(iter(slice_abi.sessions.values())).slots)
    for _ in range(5):
        slice_abi.fail_next(status)
        with pytest.raises(kind) as caught:
            step()
        assert caught.value.status == status
    step()
    assert next(iter(slice_abi.sessions.values())).slots == slots


@needs_fake
def test_Happy_full_queue_is_waited_for(slice_abi, step):  # noqa: F811
    slice_abi.queue_full = 5
    step()
    assert slice_abi.queue_full == 0


@needs_fake
def test_Happy_signal_without_exception_continues_the_wait(slice_abi, step):  # noqa: F811
    heard = []
    old = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:

        def interrupt():
            os.kill(os.getpid(), signal.SIGUSR1)
            return "interrupted"

        slice_abi.before_wait = interrupt
        step()
        assert heard == [1]
    finally:
        signal.signal(signal.SIGUSR1, old)


@needs_fake
def test_Happy_ctrl_c_leaves_the_wait_and_slots_come_back_later(slice_abi, step):  # noqa: F811
    def interrupt():
        raise KeyboardInterrupt

    session = next(iter(slice_abi.sessions.values()))
    slice_abi.before_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        step()
    assert len(slice_abi.cancelled) == 1 and len(session.completions) == 1
    kept = [step() for _ in range(3)]  # needs fresh slots: reaps the abandoned ones on the way
    slicescheduler.session().connection().reap()
    assert not session.completions
    del kept


def test_Happy_ctrl_c_on_any_daemon(slice_abi, step):  # noqa: F811
    """Real SIGINTs while calls run in a loop end the loop, and the session still works.

    More than one signal: Python swallows a KeyboardInterrupt that falls into a finalizer.
    """
    ended = threading.Event()

    def interrupt():
        while not ended.wait(0.05):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            while True:
                step()
    finally:
        ended.set()
        thread.join()
    step()


@needs_fake
def test_Edge_forked_child_gets_a_clear_error_and_may_open_its_own(slice_abi, step):  # noqa: F811
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # no pytest machinery here
        try:
            step()
            os.write(write, b"ran")
        except slicescheduler.InvalidArgument as error:
            text = str(error)
            try:
                slicescheduler.session().connection()
                text += " reopened"
            except BaseException as other:
                text += repr(other)
            os.write(write, text.encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    text = os.read(read, 4000).decode()
    os.close(read)
    assert "fork" in text and "_dynamo.reset" in text and text.endswith(" reopened")
    step()


@needs_fake
def test_Edge_closed_session_says_so(slice_abi, step):  # noqa: F811
    slicescheduler.session().close()
    with pytest.raises(slicescheduler.InvalidArgument, match="closed"):
        step()


def test_Happy_sessions_are_one_per_option_set(slice_abi):  # noqa: F811
    first = slicescheduler.session(service_class="online")
    assert slicescheduler.session(service_class="online") is first
    assert slicescheduler.session() is first
    assert slicescheduler.session(service_class="offline") is not first
    with pytest.raises(slicescheduler.InvalidArgument):
        slicescheduler.session(service_class="fast")


def test_Happy_size_classes_waste_at_most_a_quarter():
    for nbytes in [*range(1, 5000), 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**30 + 7]:
        capacity = size_class(nbytes)
        assert nbytes <= capacity and capacity % 64 == 0
        assert nbytes <= 256 or capacity <= 1.25 * nbytes + 64


# ---- managed tensors --------------------------------------------------------------------------


def managed_group(count=2):
    return ManagedGroup(slicescheduler.session(), [(f"t{i}", torch.float32, (2, 8)) for i in range(count)])


@pytest.fixture
def accumulate(slice_abi):  # noqa: F811
    """(group, call): call(x) adds x to both managed tensors and returns their sum."""
    group = managed_group()

    def function(x, a, b):
        a.add_(x)
        b.add_(x)
        return a + b

    step = torch.compile(function, backend="slicescheduler", fullgraph=True)
    with torch.inference_mode():
        yield group, lambda: step(torch.ones(2, 8), *group.tensors)


def test_Happy_commands_are_ordered_with_graphs(accumulate):
    group, call = accumulate
    assert call()[0, 0] == 2 and call()[0, 0] == 4
    group.crop([0], 1, 3)
    a, b = group.read([0, 1])
    assert a.sum() == 2 * 2 * 3 and b.sum() == 2 * 2 * 8
    group.fill([1], 0x40A00000)  # 5.0f
    assert group.read([1])[0].eq(5).all()
    group.reset()
    assert call()[0, 0] == 2


@needs_fake
def test_Edge_managed_tensors_without_a_view(slice_abi):  # noqa: F811
    slice_abi.no_views = True
    group = managed_group()
    session = next(iter(slice_abi.sessions.values()))
    step = torch.compile(lambda x, a, b: a.add_(x) + b, backend="slicescheduler", fullgraph=True)
    with torch.inference_mode():
        for i in range(1, 3):
            assert step(torch.ones(2, 8), *group.tensors)[0, 0] == i
    assert group.read([0])[0].eq(2).all() and group.tensors[0].eq(0).all()
    slicescheduler.session().retired.append(group)
    del group
    torch._dynamo.reset()
    slicescheduler.session().collect()
    assert not session.tensors


@needs_fake
def test_Edge_state_lost_until_reset_after_a_daemon_restart(slice_abi, accumulate):  # noqa: F811
    group, call = accumulate
    identities = [id(tensor) for tensor in group.tensors]
    call()
    slice_abi.kill()
    for _ in range(2):
        with pytest.raises(slicescheduler.StateLost, match="reset"):
            call()
    with pytest.raises(slicescheduler.StateLost):
        group.read([0])
    group.reset()
    assert call()[0, 0] == 2
    assert [id(tensor) for tensor in group.tensors] == identities
    assert slicescheduler.stats().states_lost >= 2


@needs_fake
def test_Edge_state_lost_by_the_executor_until_reset(slice_abi, accumulate):  # noqa: F811
    group, call = accumulate
    call()
    slice_abi.lose_state()
    with pytest.raises(slicescheduler.StateLost):
        call()
    group.reset()
    assert call()[0, 0] == 2


@needs_fake
def test_Edge_reset_itself_survives_a_daemon_restart(slice_abi, accumulate):  # noqa: F811
    group, call = accumulate
    call()
    slice_abi.kill()
    group.reset()
    assert call()[0, 0] == 2


@needs_fake
def test_Edge_managed_graph_never_runs_eagerly(slice_abi):  # noqa: F811
    group = managed_group(1)
    with torch.inference_mode():
        step = torch.compile(
            lambda x, a: torch.lgamma(x) + a, backend="slicescheduler", fullgraph=True, options={"strict": False}
        )
        with pytest.raises(slicescheduler.UnsupportedOperatorError):
            step(torch.ones(2, 8), group.tensors[0])


@needs_fake
def test_Happy_managed_memory_is_released_with_the_last_view(slice_abi):  # noqa: F811
    group = managed_group()
    session = next(iter(slice_abi.sessions.values()))
    kept = group.tensors[0]
    assert len(session.tensors) == 2
    del group.tensors[:], kept._slice_managed, group
    gc.collect()
    slicescheduler.session().collect()
    assert len(session.tensors) == 1 and kept.sum() == 0
