"""One bar for the whole run on a terminal, one line per step elsewhere."""

import sys
import time

WIDTH = 30


class Progress:
    """steps: [(name, expected seconds)]. Call `begin` for each in order, `tick` now and then, `end` at last."""

    def __init__(self, steps, stream=None):
        self.steps = steps
        self.stream = stream or sys.stderr
        self.total = sum(seconds for _, seconds in steps)
        self.done = 0.0
        self.index = -1
        self.step_start = self.start = time.monotonic()

    def begin(self, note=""):
        if self.index >= 0:
            self.done += self.steps[self.index][1]
        self.index += 1
        self.step_start = time.monotonic()
        self.note = note
        if not self.stream.isatty():
            name = self.steps[self.index][0]
            print(f"[{self.step_start - self.start:5.1f} s] {name}{' ' + note if note else ''}", file=self.stream, flush=True)
        self.tick()

    def tick(self):
        if not self.stream.isatty():
            return
        name, expected = self.steps[self.index]
        part = min(time.monotonic() - self.step_start, expected)
        share = min(1.0, (self.done + part) / self.total)
        bar = "#" * int(share * WIDTH)
        elapsed = time.monotonic() - self.start
        print(f"\r[{bar:<{WIDTH}}] {share:4.0%} {elapsed:4.0f} s  {name} {self.note:<20.20}\033[K", end="", file=self.stream, flush=True)

    def end(self):
        if self.stream.isatty():
            print("\r\033[K", end="", file=self.stream, flush=True)
