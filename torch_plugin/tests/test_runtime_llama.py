"""A tiny Llama with managed and plain caches: equality with eager, generate(), commands, losses."""

import gc

import pytest
import torch
import transformers
from programs import llama_arguments, static_cache, tiny_llama
from runtime_fixtures import needs_fake, slice_abi  # noqa: F401

import slicescheduler

LENGTH = 64
GENERATE = dict(do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=None)


@pytest.fixture(scope="module")
def llama():
    return tiny_llama(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, vocab=256)


def prompt(count, seed=0):
    return torch.randint(1, 256, (1, count), generator=torch.Generator().manual_seed(seed))


def run_tokens(step, cache, ids, count):
    """Logits of the prefill and of `count` greedy decode steps."""
    arguments = llama_arguments(ids, 0, cache, LENGTH)
    for name, axis in (("input_ids", 1), ("attention_mask", 2), ("position_ids", 1)):
        torch._dynamo.maybe_mark_dynamic(arguments[name], axis)
    logits = [step(**arguments).logits.clone()]
    for i in range(count):
        token = logits[-1][:, -1:].argmax(-1)
        logits.append(step(**llama_arguments(token, ids.shape[1] + i, cache, LENGTH)).logits.clone())
    return torch.cat(logits, 1)


@pytest.mark.parametrize("kind", ["managed", "plain"])
@pytest.mark.parametrize("cheap_guards", [False, True])
def test_Happy_llama_equals_eager(slice_abi, llama, kind, cheap_guards):  # noqa: F811
    model, config = llama
    before = slicescheduler.stats().graphs
    with torch.inference_mode():
        if cheap_guards:
            step = slicescheduler.compile(model)
        else:
            step = torch.compile(model, backend="slicescheduler", fullgraph=True)
        cache = slicescheduler.StaticCache(config, LENGTH) if kind == "managed" else static_cache(config, LENGTH)
        for count in (9, 5, 17):
            ids = prompt(count)
            expected = run_tokens(model, static_cache(config, LENGTH), ids, 4)
            cache.reset()
            assert torch.equal(run_tokens(step, cache, ids, 4), expected)
            assert int(cache.get_seq_length()) == count + 4
    assert slicescheduler.stats().graphs - before == 2
    assert slicescheduler.stats().bypassed_operators == 0


def test_Happy_several_caches_take_turns(slice_abi, llama):  # noqa: F811
    model, config = llama
    with torch.inference_mode():
        step = slicescheduler.compile(model)
        caches = [slicescheduler.StaticCache(config, LENGTH) for _ in range(3)]
        logits = {}
        for round_number in range(3):
            for i, cache in enumerate(caches):
                ids = prompt(8, seed=i)
                if round_number == 0:
                    logits[i] = [step(**llama_arguments(ids, 0, cache, LENGTH)).logits.clone()]
                else:
                    token = logits[i][-1][:, -1:].argmax(-1)
                    arguments = llama_arguments(token, 7 + round_number, cache, LENGTH)
                    logits[i].append(step(**arguments).logits.clone())
        for i in range(3):
            expected = run_tokens(model, static_cache(config, LENGTH), prompt(8, seed=i), 2)
            assert torch.equal(torch.cat(logits[i], 1), expected)


def test_Happy_generate_with_compiled_forward(slice_abi, llama):  # noqa: F811
    model, config = llama
    cache = slicescheduler.StaticCache(config, LENGTH)
    forward = model.forward
    with torch.inference_mode():
        expected = [model.generate(prompt(n), **GENERATE) for n in (6, 11, 17)]
        model.forward = torch.compile(model.forward, backend="slicescheduler", fullgraph=True)
        try:
            for n, want in zip((6, 11, 17), expected):
                cache.reset()
                assert torch.equal(model.generate(prompt(n), cache=cache, **GENERATE), want)
        finally:
            model.forward = forward


def test_Happy_crop_and_read_follow_the_graphs(slice_abi, llama):  # noqa: F811
    model, config = llama
    with torch.inference_mode():
        step = slicescheduler.compile(model)
        cache, plain = slicescheduler.StaticCache(config, LENGTH), static_cache(config, LENGTH)
        ids = prompt(10)
        step(**llama_arguments(ids, 0, cache, LENGTH))
        model(**llama_arguments(ids, 0, plain, LENGTH))
        for (keys, values), layer in zip(cache.read(), plain.layers):
            assert torch.equal(keys, layer.keys) and torch.equal(values, layer.values)
        cache.crop(-3)
        assert cache.get_seq_length() == 7
        cache.crop(0)
        cache.crop(7)
        keys, _ = cache.read(0)
        assert torch.equal(keys[:, :, :7], plain.layers[0].keys[:, :, :7]) and keys[:, :, 7:].eq(0).all()
        with pytest.raises(slicescheduler.InvalidArgument, match="holds 7"):
            cache.crop(8)
        plain.crop(-3)
        again = step(**llama_arguments(ids[:, 7:], 7, cache, LENGTH)).logits
        assert torch.equal(again, model(**llama_arguments(ids[:, 7:], 7, plain, LENGTH)).logits)


def test_Edge_eager_use_of_a_managed_cache_is_an_error(slice_abi, llama):  # noqa: F811
    model, config = llama
    cache = slicescheduler.StaticCache(config, LENGTH)
    with torch.inference_mode(), pytest.raises(slicescheduler.InvalidArgument, match="compiled"):
        model(**llama_arguments(prompt(4), 0, cache, LENGTH))
    with pytest.raises(slicescheduler.SliceError):
        cache.layers[0].reset()


def test_Edge_cheap_guards_do_not_accept_another_cache_length(slice_abi, llama):  # noqa: F811
    model, config = llama
    with torch.inference_mode():
        step = slicescheduler.compile(model)
        ids = prompt(5)
        step(**llama_arguments(ids, 0, slicescheduler.StaticCache(config, LENGTH), LENGTH))
        longer = slicescheduler.StaticCache(config, 2 * LENGTH)
        arguments = llama_arguments(ids, 0, longer, LENGTH)  # the mask still fits the old graph
        with pytest.raises(slicescheduler.InvalidArgument, match="compile once per cache size"):
            step(**arguments)


def test_Edge_session_of_cache_and_program_must_agree(slice_abi, llama):  # noqa: F811
    model, config = llama
    cache = slicescheduler.StaticCache(config, LENGTH, session=slicescheduler.session(name="one"))
    with torch.inference_mode(), pytest.raises(slicescheduler.InvalidArgument, match="another session"):
        slicescheduler.compile(model, name="two")(**llama_arguments(prompt(4), 0, cache, LENGTH))


@needs_fake
def test_Edge_state_lost_then_reset_and_prefill_again(slice_abi, llama):  # noqa: F811
    model, config = llama
    with torch.inference_mode():
        step = slicescheduler.compile(model)
        cache = slicescheduler.StaticCache(config, LENGTH)
        ids = prompt(6)
        expected = run_tokens(step, cache, ids, 2)
        slice_abi.kill()
        with pytest.raises(slicescheduler.StateLost):
            step(**llama_arguments(ids[:, :1], 8, cache, LENGTH))
        cache.reset()
        assert torch.equal(run_tokens(step, cache, ids, 2), expected)


@needs_fake
def test_Happy_cache_memory_is_released(slice_abi, llama):  # noqa: F811
    model, config = llama
    with torch.inference_mode():
        step = slicescheduler.compile(model)
        session = slicescheduler.session()
        cache = slicescheduler.StaticCache(config, LENGTH)
        step(**llama_arguments(prompt(4), 0, cache, LENGTH))
        tensors = next(iter(slice_abi.sessions.values())).tensors
        managed = [t for t in tensors.values() if t.kind == "managed"]
        assert len(managed) == 6
        del cache
        gc.collect()
        session.collect()
        assert not [t for t in tensors.values() if t.kind == "managed"]


@needs_fake
def test_Edge_without_daemon_a_lenient_cache_is_plain(slice_abi, llama):  # noqa: F811
    model, config = llama
    slice_abi.down = True
    with pytest.raises(slicescheduler.DaemonUnavailable):
        slicescheduler.StaticCache(config, LENGTH)
    with pytest.warns(UserWarning, match="plain"):
        cache = slicescheduler.StaticCache(config, LENGTH, strict=False)
    assert not cache.managed and isinstance(cache, transformers.StaticCache)
    with torch.inference_mode(), pytest.warns(UserWarning):
        step = slicescheduler.compile(model, strict=False)
        ids = prompt(6)
        expected = run_tokens(model, static_cache(config, LENGTH), ids, 2)
        assert torch.equal(run_tokens(step, cache, ids, 2), expected)
        cache.crop(-2)
        cache.crop(3)
        assert int(cache.get_seq_length()) == 3
        assert cache.read(0)[0].shape == (1, 2, LENGTH, 16)


def test_Edge_sliding_window_cache_is_refused(slice_abi):  # noqa: F811
    config = transformers.MistralConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, sliding_window=16
    )
    with pytest.raises(slicescheduler.Unsupported, match="transformers.StaticCache"):
        slicescheduler.StaticCache(config, LENGTH)
