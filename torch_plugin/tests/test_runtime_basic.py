"""Happy and edge paths of running graphs: binding, inputs, results, options, fallback."""

import gc
import threading
import time

import pytest
import torch
from runtime_fixtures import Mlp, needs_fake, slice_abi  # noqa: F401

import slicescheduler


def compiled(module, **options):
    return torch.compile(module, backend="slicescheduler", fullgraph=True, options=options or None)


def test_Happy_mlp_equals_eager(slice_abi):
    model = Mlp().eval()
    x = torch.randn(3, 16)
    with torch.inference_mode():
        expected = model(x)
        step = compiled(model)
        for _ in range(3):
            assert torch.equal(step(x), expected)


def test_Happy_dynamic_sizes_share_one_graph(slice_abi):
    model = Mlp().eval()
    before = slicescheduler.stats().graphs
    with torch.inference_mode():
        step = compiled(model)
        for n in (5, 2, 9, 33, 9):
            x = torch.randn(n, 16)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            assert torch.equal(step(x), model(x))
    assert slicescheduler.stats().graphs - before == 1


def test_Happy_weights_move_once_keep_identity_and_ties(slice_abi):
    model = Mlp().eval()
    model.second.weight = torch.nn.Parameter(model.first.weight.detach().t())  # a view of the same storage
    model.third = model.first
    before = [id(p) for p in model.parameters()]
    x = torch.randn(2, 16)
    with torch.inference_mode():
        expected = model(x)
        step = compiled(model)
        assert torch.equal(step(x), expected)
        assert [id(p) for p in model.parameters()] == before
        assert model.first.weight.data_ptr() == model.second.weight.data_ptr()
        address = model.first.weight.data_ptr()
        assert torch.equal(step(x), expected) and torch.equal(model(x), expected)
        assert model.first.weight.data_ptr() == address


def test_Happy_share_module_normalises_pieces_of_one_storage(slice_abi):
    class Pieces(torch.nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.randn(40, 16)
            self.a = torch.nn.Parameter(whole[:10])
            self.b = torch.nn.Parameter(whole[10:])

        def forward(self, x):
            return x @ self.a.t(), x @ self.b.t()

    model = Pieces().eval()
    x = torch.randn(2, 16)
    with torch.inference_mode():
        expected = model(x)
        with pytest.raises(slicescheduler.Unsupported, match="share_module"):
            compiled(Pieces().eval())(x)
        assert slicescheduler.share_module(model) is model
        assert model.b.storage_offset() == 0
        for got, want in zip(compiled(model)(x), expected):
            assert torch.equal(got, want)


def test_Edge_strided_and_expanded_inputs(slice_abi):
    def function(a, b, c):
        return a + 1, b * 2, c - 1

    base = torch.randn(6, 8)
    args = (base.t(), torch.randn(1, 8).expand(6, 8), base[2:, 3:])
    with torch.inference_mode():
        for got, want in zip(compiled(function)(*args), function(*args)):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.t(),
        lambda y: y.expand(2, 6, 8),
        lambda y: y.sum(0, keepdim=True).expand(5, 8),
        lambda y: y[1:, ::3],
        lambda y: y[2:].permute(1, 0).unsqueeze(1),
        lambda y: y.as_strided((3, 4), (2, 1), 5),
        lambda y: y[:0].t(),
        lambda y: y[3:].to(torch.int32).t(),
    ],
    ids=["transposed", "expanded", "expanded row", "with gaps", "permuted tail", "overlapping", "empty", "integers"],
)
def test_Edge_a_result_keeps_its_strides_and_offset(slice_abi, view):
    def function(x):
        return view(x * 2)

    x = torch.randn(6, 8)
    with torch.inference_mode():
        expected, result = function(x), compiled(function)(x)
    assert torch.equal(result, expected)
    assert (result.stride(), result.storage_offset()) == (expected.stride(), expected.storage_offset())


def test_Edge_empty_scalar_bool_and_half(slice_abi):
    def function(a, b, c, d):
        return a + 1, b + 1, ~c, d * 2

    args = (torch.empty(0, 3), torch.tensor(2), torch.tensor([True, False]), torch.randn(3).bfloat16())
    with torch.inference_mode():
        for got, want in zip(compiled(function)(*args), function(*args)):
            assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want)


def test_Edge_outputs_alias_none_and_integer(slice_abi):
    class Odd(torch.nn.Module):
        def forward(self, x):
            return x.view(-1), None, x.shape[0], x + 1, x[1:]

    x = torch.randn(4, 3)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    with torch.inference_mode():
        flat, none, count, plus, tail = compiled(Odd())(x)
    assert flat.data_ptr() == x.data_ptr() and none is None and count == 4
    assert torch.equal(plus, x + 1) and torch.equal(tail, x[1:])


def test_Edge_written_argument_reaches_the_callers_tensor(slice_abi):
    def function(x, state):
        state.add_(x)
        return state * 2

    state = torch.zeros(4)
    with torch.inference_mode():
        step = compiled(function)
        for i in range(3):
            assert torch.equal(step(torch.ones(4), state), torch.full((4,), 2.0 * (i + 1)))
    assert torch.equal(state, torch.full((4,), 3.0))


def test_Happy_results_own_their_slot_until_the_last_view_dies(slice_abi):
    model = Mlp().eval()
    with torch.inference_mode():
        step = compiled(model)
        kept = step(torch.ones(2, 16))
        view, copy = kept[1:], kept.clone()
        del kept
        others = [step(torch.full((2, 16), float(i))) for i in range(20)]
        assert torch.equal(view, copy[1:])
        addresses = {other.data_ptr() for other in others}
        assert len(addresses) == 20 and view.untyped_storage().data_ptr() not in addresses
        del others, view
        gc.collect()
        again = [step(torch.ones(2, 16)) for _ in range(20)]
        assert len({t.data_ptr() for t in again} & addresses) > 10  # slots are used again


def test_Happy_results_outlive_the_session(slice_abi):
    session = slicescheduler.session(name="short")
    with torch.inference_mode():
        result = compiled(Mlp().eval(), name="short")(torch.ones(2, 16))
        expected = result.clone()
    session.close()
    gc.collect()
    assert torch.equal(result, expected)


def test_Edge_full_arena_names_the_cure_and_recovers(slice_abi):
    with torch.inference_mode():
        step = compiled(lambda x: x + 1, arena_bytes=1 << 20, name="small arena")
        kept = []
        with pytest.raises(slicescheduler.ArenaFull, match=r"still refers to \(3,.*clone\(\).*arena_bytes") as caught:
            for _ in range(20):
                kept.append(step(torch.zeros(64 * 1024)))
        error = caught.value
        assert (error.results, error.held_bytes) == (len(kept), 3 << 18)
        assert (error.wanted_bytes, error.arena_bytes) == (1 << 18, 1 << 20)
        views = [result[1:] for result in kept]
        kept.clear()
        with pytest.raises(slicescheduler.ArenaFull):
            step(torch.zeros(64 * 1024))
        views.clear()
        assert step(torch.zeros(64 * 1024)).sum() == 64 * 1024


def test_Edge_a_result_larger_than_the_arena_is_told_apart(slice_abi):
    step = compiled(lambda x: x.expand(1 << 20).clone(), arena_bytes=1 << 20, name="small arena")
    with torch.inference_mode(), pytest.raises(slicescheduler.ArenaFull, match="larger than all of it") as caught:
        step(torch.zeros(1))
    assert "clone()" not in str(caught.value) and "arena_bytes" in str(caught.value)


def test_Happy_threads_share_one_graph(slice_abi):
    model = Mlp().eval()
    step = compiled(model)
    with torch.inference_mode():
        step(torch.ones(2, 16))
    wrong, done = [], []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for _ in range(20):
                with slicescheduler.request(deadline_ms=1e4) as request:
                    x = torch.randn(2, 16, generator=generator)
                    if not torch.equal(step(x), model(x)):
                        wrong.append(seed)
                    done.append(len(request.completions))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong and done == [1] * 80


def test_Happy_request_names_the_sequence_and_keeps_completions(slice_abi):
    with torch.inference_mode():
        step = compiled(Mlp().eval())
        step(torch.ones(2, 16))
        with slicescheduler.request(deadline_ms=500, priority=3) as request:
            step(torch.ones(2, 16))
            step(torch.ones(2, 16))
    assert len(request.completions) == 2
    for completion in request.completions:
        assert completion.status == 0
        assert 0 < completion.submit_ns <= completion.start_ns <= completion.finish_ns <= time.monotonic_ns()
    if slice_abi is not None:
        outside, first, second = slice_abi.submits[-3:]
        assert outside[2] == 0 and first[2] == second[2] != 0
        assert first[3] == request.deadline_ns and first[4] == 3
        assert not next(iter(slice_abi.sessions.values())).sequences


@needs_fake
def test_Happy_deadline_option_counts_from_each_submit(slice_abi):
    with torch.inference_mode():
        step = compiled(Mlp().eval(), deadline_ms=100)
        begin = time.monotonic_ns()
        step(torch.ones(2, 16))
    assert slice_abi.submits[-1][3] - begin > 99e6


@needs_fake
def test_Happy_replication_follows_class_and_option(slice_abi):
    with torch.inference_mode():
        compiled(Mlp().eval(), **{"class": "online"})(torch.ones(2, 16))
        assert slice_abi.replicated == []
        compiled(Mlp().eval(), **{"class": "offline"})(torch.ones(2, 16))
        assert slice_abi.replicated == [(6, [])]
        compiled(Mlp().eval(), replicate=["cpu1"], **{"class": "online"})(torch.ones(2, 16))
        assert slice_abi.replicated[1:] == [(6, ["cpu1"])]


def test_Edge_unknown_option_is_named(slice_abi):
    with torch.inference_mode(), pytest.raises(slicescheduler.InvalidArgument, match='mean "replicate"'):
        compiled(Mlp().eval(), replicat="all")(torch.ones(2, 16))
    with pytest.raises(slicescheduler.InvalidArgument, match="unknown option"):
        slicescheduler.compile(Mlp(), nonsense=1)


@pytest.mark.parametrize(
    "name, value",
    [("home_device", 77), ("name", 7), ("weight", "a"), ("weight", -1.0), ("arena_bytes", "1GiB"), ("deadline_ms", float("inf"))],
)
def test_Edge_option_of_a_wrong_type_is_named(slice_abi, name, value):
    with pytest.raises(slicescheduler.SliceError, match=name):
        compiled(Mlp().eval(), **{name: value})(torch.randn(2, 16))


@pytest.mark.parametrize("deadline", ["x", 0, -1.5, float("nan"), float("inf"), True])
def test_Edge_deadline_of_a_request_is_checked(deadline):
    with pytest.raises(slicescheduler.InvalidArgument, match="deadline_ms must be a positive number"):
        slicescheduler.request(deadline_ms=deadline)


def test_Edge_training_graph_is_refused(slice_abi):
    with pytest.raises(slicescheduler.TrainingGraphError, match="inference"):
        compiled(Mlp())(torch.ones(2, 16))


def test_Edge_unsupported_operator_is_named(slice_abi):
    with torch.inference_mode(), pytest.raises(slicescheduler.UnsupportedOperatorError, match="lgamma"):
        compiled(lambda x: torch.lgamma(x))(torch.ones(3))


def test_Edge_unsupported_operator_is_placed_in_the_users_program_with_advice(slice_abi):
    def function(x):
        return torch.nn.functional.dropout(x, 0.5) + torch.lgamma(x)  # this line is named

    with torch.inference_mode(), pytest.raises(slicescheduler.UnsupportedOperatorError) as caught:
        compiled(function)(torch.ones(3))
    text = str(caught.value)
    assert "test_runtime_basic.py" in text and "this line is named" in text and "model.eval()" in text
    assert {"aten::native_dropout", "aten::lgamma"} == set(caught.value.operators)


def test_Edge_not_strict_runs_eagerly_and_counts(slice_abi):
    before = slicescheduler.stats()
    with torch.inference_mode():
        with pytest.warns(UserWarning, match="strict=False"):
            result = compiled(lambda x: torch.lgamma(x) + 1, strict=False)(torch.full((2,), 3.0))
    after = slicescheduler.stats()
    assert torch.equal(result, torch.lgamma(torch.full((2,), 3.0)) + 1)
    assert after.eager_calls - before.eager_calls == 1
    assert after.bypassed_operators - before.bypassed_operators == 2


def test_Edge_weights_replaced_by_new_parameters_are_bound_anew(slice_abi):
    model = Mlp().eval()
    x = torch.randn(2, 16)
    with torch.inference_mode():
        step = compiled(model)
        step(x)
        with torch.inference_mode(False):
            model.first.weight = torch.nn.Parameter(torch.randn(16, 16))
        assert torch.equal(step(x), model(x))


@needs_fake
def test_Regression_weights_with_new_storage_are_bound_anew(slice_abi):
    model = Mlp().eval()
    x = torch.randn(2, 16)
    step = compiled(model)
    with torch.no_grad():
        assert torch.equal(step(x), model(x))
        rebinds = slicescheduler.stats().rebinds
        model.first.weight.data = torch.randn_like(model.first.weight)
        assert torch.equal(step(x), model(x))
        torch.nn.utils.vector_to_parameters(torch.randn(sum(p.numel() for p in model.parameters())), model.parameters())
        assert torch.equal(step(x), model(x))
        model.first.weight.data.add_(1)  # now shared: seen without binding anew
        assert torch.equal(step(x), model(x))
        assert slicescheduler.stats().rebinds == rebinds + 2


def test_Edge_argument_on_another_device_is_refused(slice_abi):
    step = compiled(lambda x: x * 2)
    with pytest.raises(slicescheduler.SliceError, match="meta"):
        step(torch.ones(3, device="meta"))


def test_Edge_function_that_computes_nothing_returns_its_argument(slice_abi):
    x = torch.randn(3)
    assert torch.equal(compiled(torch.nn.Identity())(x), x)
    assert torch.equal(compiled(lambda a: a, strict=False)(x), x)


def test_Happy_two_models_take_turns_on_one_code(slice_abi):
    models = [Mlp().eval() for _ in range(3)]
    x = torch.randn(2, 16)

    def run(model, value):
        return model(value)

    with torch.inference_mode():
        step = torch.compile(run, backend="slicescheduler", fullgraph=True)
        for _ in range(3):
            for model in models:
                assert torch.equal(step(model, x), model(x))


@needs_fake
def test_Happy_big_constant_is_bound_once(slice_abi):
    table = torch.randn(40000)

    class WithConstant(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table  # neither parameter nor buffer

        def forward(self, x):
            return x + self.table[:3]

    with torch.inference_mode():
        step = compiled(WithConstant())
        for _ in range(2):
            assert torch.equal(step(torch.ones(3)), torch.ones(3) + table[:3])


def test_Happy_warmup_counts_recompiles(slice_abi):
    model = Mlp().eval()
    with torch.inference_mode():
        step = slicescheduler.compile(model)
        slicescheduler.warmup(step, [(torch.ones(2, 16),)])
        assert slicescheduler.stats().recompiles == 0
        step(torch.ones(5, 16))
        assert slicescheduler.stats().recompiles == 1
        torch._dynamo.reset()
        calls = iter(range(2, 100))

        def another_size():
            step(torch.ones(next(calls), 16, 1).squeeze(2))

        with pytest.raises(slicescheduler.RecompileError):
            slicescheduler.warmup(None, [another_size])


def test_Happy_warmup_may_forbid_compiling_from_now_on(slice_abi):
    model = Mlp().eval()
    with torch.inference_mode():
        step = slicescheduler.compile(model)
        try:
            slicescheduler.warmup(step, [{"x": torch.ones(2, 16)}], fail_on_recompile=True)
            assert torch.equal(step(x=torch.ones(2, 16)), model(torch.ones(2, 16)))
            with pytest.raises(RuntimeError, match="recompile"):
                step(x=torch.ones(5, 16))
        finally:
            torch.compiler.set_stance("default")
