"""What the demo's online and offline tenants have in common: one Llama served through SliceScheduler.

All that makes an ordinary PyTorch program a tenant is in `connect` and `answer`, on the lines marked (*).
"""

import argparse
import os

os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")  # do not copy the whole KV cache in every layer

import torch  # noqa: E402

import llama_serving as llama  # noqa: E402
from tenant_link import Link  # noqa: E402

ATTEMPTS_MAX = 3


class Tenant:
    """eager: plain PyTorch without the daemon, for comparison."""

    service_class = None

    def __init__(self, name, home, eager):
        torch.set_num_threads(1)
        self.model, self.config = llama.build_model()
        self.options = dict(name=name, service_class=self.service_class, home_device=home)
        self.eager = eager
        self.link = None
        self.server = None
        self.cases = []    # (prompt, output tokens, expected Answer)
        self.answers = []  # (case index, Answer) of every completed request

    def prepare(self, shapes, seed):
        """Expected answers, by plain PyTorch in this process."""
        reference = llama.Server(self.model, llama.eager_cache(self.config))
        for i, (input_tokens, output_tokens) in enumerate(shapes):
            prompt = llama.make_prompt(seed * 1000 + i, input_tokens)
            self.cases.append((prompt, output_tokens, reference.answer(prompt, output_tokens)))
        return {"expected": len(self.cases)}

    def connect(self, warm_up_lengths):
        """Compiles for the daemon and runs prompts of these lengths, so that all graphs are captured."""
        if self.eager:
            self.server = llama.Server(self.model, llama.eager_cache(self.config))
            return
        import slicescheduler

        session = slicescheduler.session(**self.options)
        step = torch.compile(self.model, backend="slicescheduler", fullgraph=True, options=self.options)  # (*)
        cache = slicescheduler.StaticCache(self.config, llama.CACHE_TOKENS, session=session)  # (*)
        self.server = llama.Server(step, cache)
        prompts = [llama.make_prompt(length, length) for length in warm_up_lengths]
        slicescheduler.warmup(None, [lambda p=prompt: self.server.answer(p, 4) for prompt in prompts])  # (*)

    def answer(self, prompt, output_tokens, deadline_ms=None):
        """(Answer, completions of its graph runs)."""
        if self.eager:
            return self.server.answer(prompt, output_tokens), []
        import slicescheduler

        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                with slicescheduler.request(deadline_ms=deadline_ms) as request:  # (*)
                    return self.server.answer(prompt, output_tokens), request.completions
            except slicescheduler.StateLost:  # the executor died in the middle of a write to the cache:
                if attempt == ATTEMPTS_MAX:
                    raise
                self.server.cache.reset()  # start over with an empty one

    def check(self):
        """Compares every answer given with what plain PyTorch says; and what must not have happened meanwhile."""
        wrong = []
        for case, answer in self.answers:
            why = llama.difference(self.cases[case][2], answer)
            if why is not None:
                wrong.append(f"prompt {case}: {why}")
        counts = {"recompiles": 0, "bypassed": 0}
        if not self.eager:
            import slicescheduler

            stats = slicescheduler.stats()
            counts = {"recompiles": stats.recompiles, "bypassed": stats.bypassed_operators}
        return {"checked": len(self.answers), "wrong": len(wrong), "examples": wrong[:5], **counts}

    @classmethod
    def main(cls, description):
        """Serves the demo's driver; with --once runs `once` instead."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--name", default=cls.service_class, help="as slicectl shows it")
        parser.add_argument("--home", help="home device, e.g. cpu0 (default: the daemon chooses)")
        parser.add_argument("--eager", action="store_true", help="plain PyTorch, without the daemon: for comparison")
        parser.add_argument("--once", action="store_true", help="answer a few prompts, print times, and end")
        arguments = parser.parse_args()
        tenant = cls(arguments.name, arguments.home, arguments.eager)
        if arguments.once:
            tenant.once()
        else:
            tenant.link = Link()
            tenant.link.serve({name: getattr(tenant, name) for name in ("prepare", "warm_up", "run", "check")})

    def once(self):
        raise NotImplementedError
