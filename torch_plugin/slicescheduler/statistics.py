"""Counters of this process: what was captured, what ran, what escaped the scheduler.

Threads: increments are plain additions under the interpreter lock; a lost count under contention would only
blur a statistic, except `bypassed_operators`, which takes the lock.
"""

import dataclasses
import threading

_lock = threading.Lock()


@dataclasses.dataclass
class Stats:
    """
    graphs: programs captured.
    calls: graph runs through the daemon.
    eager_calls: graph runs that fell back to eager (strict=False only).
    bypassed_operators: operators run eagerly that way; 0 in strict mode.
    recompiles: captures of an already captured function since the last warmup() ended.
    rebinds: times a graph met other weights or another cache than in its last call.
    retries: submits repeated after a loss that changed nothing.
    states_lost: StateLost raised.
    """

    graphs: int = 0
    calls: int = 0
    eager_calls: int = 0
    bypassed_operators: int = 0
    recompiles: int = 0
    rebinds: int = 0
    retries: int = 0
    states_lost: int = 0


counters = Stats()


def stats():
    """A copy of the process's counters."""
    return dataclasses.replace(counters)


def count_bypassed(operators):
    """Notes one eager run of a graph with `operators` operators."""
    with _lock:
        counters.eager_calls += 1
        counters.bypassed_operators += operators
