"""Requests: what one user waits for, usually a prefill and its decode steps.

`with slicescheduler.request(deadline_ms=200):` makes every graph that this thread (or task) runs inside part of
one sequence of the daemon: deadline, fairness and metrics count for the whole. Held in a context variable, so
threads and asyncio tasks do not see each other's requests. Inner requests hide outer ones.
"""

import contextvars
import dataclasses
import time

from . import _abi
from .errors import InvalidArgument, SliceError
from .options import is_positive

_current = contextvars.ContextVar("slicescheduler_request", default=None)


@dataclasses.dataclass(frozen=True)
class Completion:
    """Times of one graph run, CLOCK_MONOTONIC nanoseconds (time.monotonic_ns()); 0 = unknown."""

    status: int
    submit_ns: int
    start_ns: int
    finish_ns: int
    predicted_finish_ns: int


class Request:
    """One sequence of graph runs. Use as a context manager, in one thread at a time.

    Attributes:
      deadline_ns: absolute, CLOCK_MONOTONIC; 0 = none.
      completions: a Completion per graph run so far, in order.
    """

    def __init__(self, *, deadline_ms=None, priority=0, service_class=None):
        if service_class not in _abi.CLASSES:
            raise InvalidArgument(f'service_class must be "online" or "offline", not {service_class!r}')
        if deadline_ms is not None and not is_positive(deadline_ms):
            raise InvalidArgument(f"deadline_ms must be a positive number of milliseconds, not {deadline_ms!r}")
        self.deadline_ms = deadline_ms
        self.priority = int(priority)
        self.service_class = service_class
        self.deadline_ns = 0
        self.completions = []
        self._sequences = []  # (connection, sequence handle); nearly always one
        self._token = None

    def __enter__(self):
        if self._token is not None:
            raise InvalidArgument("this request is already entered")
        if self.deadline_ms is not None:
            self.deadline_ns = time.monotonic_ns() + int(self.deadline_ms * 1e6)
        self._token = _current.set(self)
        return self

    def __exit__(self, *_exception):
        _current.reset(self._token)
        self._token = None
        while self._sequences:
            connection, sequence = self._sequences.pop()
            if connection.alive:
                try:
                    connection.library.sequence_close(connection.handle, sequence)
                except SliceError:
                    pass  # the daemon went away: so did the sequence

    def sequence(self, connection):
        """This request's sequence on `connection`, opened on first use. Errors: WouldBlock, DaemonUnavailable."""
        for known, sequence in self._sequences:
            if known is connection:
                return sequence
        options = _abi.SequenceOptions(
            service_class=_abi.CLASSES[self.service_class],
            priority=self.priority,
            deadline_ns=self.deadline_ns,
        )
        sequence = connection.library.sequence_open(connection.handle, options)
        self._sequences.append((connection, sequence))
        return sequence

    def add(self, raw):
        """Keeps a copy of an _abi.Completion."""
        self.completions.append(
            Completion(raw.status, raw.submit_ns, raw.start_ns, raw.finish_ns, raw.predicted_finish_ns)
        )


def request(*, deadline_ms=None, priority=0, service_class=None):
    """A Request to use as `with slicescheduler.request(deadline_ms=200) as r: ...`.

    Args:
      deadline_ms: milliseconds from entering the block until all its graph runs should be done.
      priority: inside the service class; higher first.
      service_class: "online" or "offline"; may lower the session's class, never raise it.
    """
    return Request(deadline_ms=deadline_ms, priority=priority, service_class=service_class)


def current_request():
    """The innermost Request of this thread or task, or None."""
    return _current.get()
