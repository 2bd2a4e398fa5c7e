#!/usr/bin/env python3
"""An online tenant: answers short prompts as they come, one after another, each with a deadline.

Run by `make demo`, which says on standard input what to answer and when. Alone, with a daemon running:

    python online_tenant.py --once
"""

import time

import llama_serving as llama
from tenant import Tenant


class OnlineTenant(Tenant):
    service_class = "online"

    def warm_up(self, rounds):
        """Captures the graphs, then measures what each request takes on idle devices."""
        lengths = sorted(prompt.shape[1] for prompt, _, _ in self.cases)
        self.connect([lengths[0], lengths[-1]])
        prompts, steps = [], []
        for i in range(rounds):
            prompt, output_tokens, _ = self.cases[i % len(self.cases)]
            begin = time.monotonic_ns()
            times = [ns for ns, _ in self.answer(prompt, output_tokens, deadline_ms=10_000)[0].step_ns]
            prompts.append((prompt.shape[1], times[0] - begin))
            steps += [after - before for before, after in zip(times, times[1:])]
        # A line through the prompts (of one chunk each) and the median of the steps give any request's time.
        prompt_ns, step_ns = fit_line(prompts), sorted(steps)[len(steps) // 2]
        self.unloaded_ms = [
            (prompt_ns(prompt.shape[1]) + step_ns * (tokens - 1)) / 1e6 for prompt, tokens, _ in self.cases
        ]
        return {"unloaded_ms": self.unloaded_ms}

    def run(self, start_ns, requests, deadline_factor):
        """Answers `requests` ([seconds after start_ns, case]); sleeps in between. A deadline counts from the arrival."""
        results = []
        for at, case in requests:
            prompt, output_tokens, _ = self.cases[case]
            arrival = start_ns + int(at * 1e9)
            time.sleep(max(0, arrival - time.monotonic_ns()) / 1e9)
            deadline = arrival + int(self.unloaded_ms[case] * deadline_factor * 1e6)
            left_ms = max(1.0, (deadline - time.monotonic_ns()) / 1e6)  # it may have waited for the one before
            answer, completions = self.answer(prompt, output_tokens, left_ms)
            self.answers.append((case, answer))
            results.append({
                "arrival_ns": arrival,
                "first_ns": answer.step_ns[0][0],
                "finish_ns": answer.step_ns[-1][0],
                "deadline_ns": deadline,
                "input_tokens": prompt.shape[1],
                "output_tokens": output_tokens,
                "runs": [(c.submit_ns, c.finish_ns, c.predicted_finish_ns) for c in completions],
            })
        return {"results": results}

    def once(self):
        self.prepare([[32, 12]], seed=1)
        print("unloaded: %.1f ms" % self.warm_up(rounds=5)["unloaded_ms"][0])
        prompt, output_tokens, expected = self.cases[0]
        answer, _ = self.answer(prompt, output_tokens, deadline_ms=1000)
        print("tokens:", *answer.tokens)
        print("check:", llama.difference(expected, answer) or "equal to plain PyTorch")


def fit_line(points):
    """x -> y of least squares through [(x, y)]; the mean of y when x never changes."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return lambda x: mean_y + slope * (x - mean_x)


if __name__ == "__main__":
    OnlineTenant.main(__doc__.split("\n\n")[0])
