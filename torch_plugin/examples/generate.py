#!/usr/bin/env python3
"""transformers' generate() through SliceScheduler, compared with plain PyTorch.

Prefill and decode both run in the daemon, with a KV cache that it owns and places. A request that fails because the
cache was lost (the executor died in the middle of a write) is repeated with an empty cache.

    python generate.py [--tokens 16]       # needs a running sliced; SLICE_SOCKET names another socket
"""

import argparse
import os
import time

os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")  # do not copy the whole KV cache in every layer

import torch  # noqa: E402

import llama_serving as llama  # noqa: E402
import slicescheduler  # noqa: E402

PROMPT_TOKENS = (12, 40, 25)


def generate(model, cache, prompt, options):
    """Token ids, [1, prompt + new]; starts over once if the state is lost."""
    for attempt in range(2):
        cache.reset()
        try:
            with slicescheduler.request(deadline_ms=60_000):
                return model.generate(prompt, cache=cache, **options)
        except slicescheduler.StateLost:
            if attempt:
                raise


def main(tokens=16):
    torch.set_num_threads(1)  # as the executor computes: equal numbers, not only close ones
    model, config = llama.build_model()
    options = dict(do_sample=False, max_new_tokens=tokens, pad_token_id=0, eos_token_id=None)
    prompts = [llama.make_prompt(seed, count) for seed, count in enumerate(PROMPT_TOKENS)]
    with torch.inference_mode():
        expected = [model.generate(prompt, **options) for prompt in prompts]

        model.forward = slicescheduler.compile(model.forward, service_class="online")
        cache = slicescheduler.StaticCache(config, max_cache_len=llama.CACHE_TOKENS)

        equal = True
        for prompt, want in zip(prompts, expected):
            begin = time.monotonic()
            got = generate(model, cache, prompt, options)
            equal &= torch.equal(got, want)
            print(f"{prompt.shape[1]} tokens in, {tokens} out: {time.monotonic() - begin:.2f} s, "
                  f"{'equal to' if torch.equal(got, want) else 'DIFFERENT from'} plain PyTorch")
    print(slicescheduler.stats())
    return equal


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=16, help="new tokens per prompt")
    raise SystemExit(0 if main(parser.parse_args().tokens) else 1)
