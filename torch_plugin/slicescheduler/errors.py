"""Exceptions of the plugin. Every one derives from SliceError and carries the C ABI's status.

`status` is the number of the C ABI (0 when the error was found in this process, before any call), and
`retryable` says whether repeating the same call can succeed without a change by the caller.
"""


class SliceError(RuntimeError):
    """Base of all errors of this package."""

    status: int = 0
    retryable: bool = False

    def __init__(self, message="", *, status=None, retryable=None):
        super().__init__(message)
        if status is not None:
            self.status = status
        if retryable is not None:
            self.retryable = retryable


# ---- found while capturing, in this process ----------------------------------------------------


class CaptureError(SliceError):
    """A program cannot become a graph template."""


class Unsupported(CaptureError):
    """A construct that the template format cannot carry (an expression, an argument type)."""


class UnsupportedOperatorError(CaptureError):
    """The graph calls operators outside the allow-list; `operators` names all of them, sorted.

    places: operator -> where the program calls it first, for people. hints: sentences on what to do about some of them.
    """

    def __init__(self, operators, places=None, hints=()):
        self.operators = sorted(set(operators))
        places = places or {}
        named = (f"{name} ({places[name]})" if places.get(name) else name for name in self.operators)
        cures = [*hints, "run that part of the model outside the compiled function"]
        super().__init__(
            f"these operators are not on the allow-list of the executor: {', '.join(named)}. What helps: "
            f"{'; '.join(cures)}; or ask the administrator to extend include/slice/allowed_operators.txt."
        )


class TrainingGraphError(CaptureError):
    """A graph that needs gradients reached the backend, which runs inference only."""

    def __init__(self, message=None):
        super().__init__(
            message
            or "slicescheduler runs inference only, but this graph needs gradients. Call the compiled "
            "model under torch.inference_mode() (or torch.no_grad())."
        )


# ---- reported by the daemon --------------------------------------------------------------------


class InvalidArgument(SliceError):
    """The daemon or the client library refused an argument."""


class GraphRejected(SliceError):
    """The daemon refused a graph template."""


class Stale(SliceError):
    """A handle outlived the object it named."""


class Quota(SliceError):
    """The session is over its quota."""


class ArenaFull(SliceError):
    """Results that the program still holds, and inputs in flight, fill the session's shared memory.

    results, held_bytes: the results and their bytes. arena_bytes: size of the whole. wanted_bytes: what did not fit.
    """

    def __init__(self, wanted_bytes, arena_bytes, results, held_bytes, *, status):
        self.wanted_bytes, self.arena_bytes = wanted_bytes, arena_bytes
        self.results, self.held_bytes = results, held_bytes
        if wanted_bytes > arena_bytes:
            why = "one input or result of this call is larger than all of it"
        else:
            why = (
                f"results of earlier calls that your program still refers to ({results}, through tensors or views of "
                f"them) take {held_bytes:,} bytes, inputs and what calls in flight use take the rest"
            )
        cure = "" if wanted_bytes > arena_bytes else "keep clone()s of the results that you need and drop the results, or "
        super().__init__(
            f"no room for {wanted_bytes:,} bytes in the {arena_bytes:,} bytes of memory that this session shares with the "
            f"daemon for inputs and results: {why}. To go on, {cure}give the session more with "
            'options={"arena_bytes": ...}.',
            status=status,
        )


class NeverFits(SliceError):
    """The request needs more memory than the tenant may ever use here."""


class WouldBlock(SliceError):
    """A queue is full at the moment."""

    retryable = True


class DeadlineExceeded(SliceError):
    """The request could not meet its deadline."""


class Cancelled(SliceError):
    """The request was cancelled."""


class OperatorFailed(SliceError):
    """An operator of the request raised an error in the executor."""


class ExecutorLost(SliceError):
    """The executor process died and could not take over in time; nothing was written."""

    retryable = True


class StateLost(SliceError):
    """Managed state (a KV cache) was lost half-written: reset the cache and run the prefill again."""


class DaemonUnavailable(SliceError):
    """No daemon answers on the socket, or it went away."""

    retryable = True


class VersionMismatch(SliceError):
    """Client library and daemon do not speak a common protocol version."""
