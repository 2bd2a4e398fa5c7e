#!/usr/bin/env python3
"""An offline tenant: long prompts in chunks of 128 tokens, short answers, one after another, for as long as it may.

Its weights get replicas on every device, so that any of them can take its work. Run by `make demo`. Alone, with a daemon
running:

    python offline_tenant.py --once
"""

import time

import llama_serving as llama
from tenant import Tenant


class OfflineTenant(Tenant):
    service_class = "offline"

    def warm_up(self, rounds):
        """Captures the graphs (chunk of a prompt, step) and lets the daemon see how long they take."""
        self.connect([llama.CHUNK_TOKENS + 40])
        unloaded = []
        for i in range(rounds):
            prompt, output_tokens, _ = self.cases[i % len(self.cases)]
            begin = time.monotonic_ns()
            self.answer(prompt, output_tokens)
            unloaded.append((time.monotonic_ns() - begin) / 1e6)
        return {"unloaded_ms": unloaded}

    def run(self, start_ns):
        """One prompt after another until the driver says stop; the last one is finished."""
        time.sleep(max(0, start_ns - time.monotonic_ns()) / 1e9)
        steps, requests, case = [], [], 0
        while not self.link.stopping.is_set():
            prompt, output_tokens, _ = self.cases[case]
            begin = time.monotonic_ns()
            answer, _ = self.answer(prompt, output_tokens)
            self.answers.append((case, answer))
            steps += answer.step_ns
            requests.append((begin, answer.step_ns[-1][0]))
            case = (case + 1) % len(self.cases)
        return {"steps": steps, "requests": requests}

    def once(self):
        shapes = [[300, 4], [512, 6]]
        self.prepare(shapes, seed=9)
        for shape, milliseconds in zip(shapes, self.warm_up(rounds=len(shapes))["unloaded_ms"]):
            print("%d tokens in, %d out: %.0f ms" % (*shape, milliseconds))


if __name__ == "__main__":
    OfflineTenant.main(__doc__.split("\n\n")[0])
