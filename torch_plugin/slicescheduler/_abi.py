"""The C ABI (include/slice/slice.h) in ctypes, and its statuses as exceptions.

`Library` wraps either the real libslice or any object with the same functions (the tests' fake). It adds
nothing but error handling: every method raises the class of errors.py that fits the status, with the text of
slice_last_error(). Only `Library.wait` returns the status, because callers treat several of them as normal.

Threads: as the C library: everything may be called from several threads. ctypes releases the interpreter
lock around each call. Must not import torch or anything that does.
"""

import ctypes
import errno
import os
import pathlib
import threading
import time
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

from . import errors

ABI_MAJOR = 1
ABI_MINOR = 0

OK = 0
ERR_INVALID = 1
ERR_GRAPH = 2
ERR_OP_NOT_ALLOWED = 3
ERR_OVERFLOW = 4
ERR_BOUNDS = 5
ERR_STALE = 6
ERR_QUOTA = 7
ERR_NEVER_FITS = 8
ERR_WOULD_BLOCK = 9
ERR_DEADLINE = 10
ERR_CANCELLED = 11
ERR_OP_FAILED = 12
ERR_EXECUTOR_LOST = 13
ERR_STATE_LOST = 14
ERR_DAEMON_LOST = 15
ERR_VERSION = 16
ERR_PROTOCOL = 17
ERR_NO_MEMORY = 18
ERR_INTERNAL = 19
ERR_TIMEOUT = 20

CLASS_DEFAULT = 0
CLASS_ONLINE = 1
CLASS_OFFLINE = 2
CLASSES = {None: CLASS_DEFAULT, "online": CLASS_ONLINE, "offline": CLASS_OFFLINE}

TENSOR_CONSTANT = 1
TENSOR_MUTABLE = 2
DIMS_MAX = 8
NO_FAILED_OP = 2**32 - 1

DTYPE_FLOAT32 = 1
DTYPE_FLOAT64 = 2
DTYPE_FLOAT16 = 3
DTYPE_BFLOAT16 = 4
DTYPE_INT64 = 5
DTYPE_INT32 = 6
DTYPE_INT16 = 7
DTYPE_INT8 = 8
DTYPE_UINT8 = 9
DTYPE_BOOL = 10
DTYPE_COMPLEX64 = 11
DTYPE_COMPLEX128 = 12
DTYPE_FLOAT8_E4M3FN = 13
DTYPE_FLOAT8_E5M2 = 14

DEFAULT_SOCKET = "/run/slicescheduler/sliced.sock"


class _Sized(ctypes.Structure):
    """Base of the structs that begin with their own size."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.size = ctypes.sizeof(self)


class SessionOptions(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("socket_path", c_char_p),
        ("name", c_char_p),
        ("service_class", c_uint32),
        ("reserved", c_uint32),
        ("weight", c_double),
        ("arena_bytes", c_uint64),
        ("home_device", c_char_p),
    ]


class SessionLimits(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("service_class", c_uint32),
        ("queue_slots", c_uint32),
        ("memory_bytes_max", c_uint64),
        ("arena_bytes", c_uint64),
        ("offline_op_ns_max", c_uint64),
        ("deadline_ns_min", c_uint64),
        ("daemon_epoch", c_uint64),
        ("device_count", c_uint32),
        ("session_number", c_uint32),
    ]


class TensorSpec(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("dtype", c_uint32),
        ("dim_count", c_uint32),
        ("sizes", c_int64 * DIMS_MAX),
        ("strides", c_int64 * DIMS_MAX),
        ("offset", c_uint64),
    ]


class SequenceOptions(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("service_class", c_uint32),
        ("priority", c_int32),
        ("deadline_ns", c_uint64),
    ]


class Slot(ctypes.Structure):
    _fields_ = [("offset", c_uint64), ("bytes", c_uint64)]


class SubmitArgs(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("binding", c_uint64),
        ("sequence", c_uint64),
        ("deadline_ns", c_uint64),
        ("priority", c_int32),
        ("symbol_count", c_uint32),
        ("symbols", POINTER(c_int64)),
        ("inputs", POINTER(Slot)),
        ("outputs", POINTER(Slot)),
        ("input_count", c_uint32),
        ("output_count", c_uint32),
    ]


class Completion(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("status", c_int),
        ("failed_op", c_uint32),
        ("submit_ns", c_int64),
        ("start_ns", c_int64),
        ("finish_ns", c_int64),
        ("predicted_finish_ns", c_int64),
    ]


_HANDLES = POINTER(c_uint64)
_TICKET = POINTER(c_uint64)
# name: (result, arguments)
SIGNATURES = {
    "slice_status_name": (c_char_p, [c_int]),
    "slice_status_is_retryable": (c_int, [c_int]),
    "slice_last_error": (c_char_p, []),
    "slice_abi_version": (c_uint32, []),
    "slice_session_open": (c_int, [POINTER(SessionOptions), POINTER(c_void_p)]),
    "slice_session_close": (None, [c_void_p]),
    "slice_session_fd": (c_int, [c_void_p]),
    "slice_session_limits": (c_int, [c_void_p, POINTER(SessionLimits)]),
    "slice_arena_alloc": (c_int, [c_void_p, c_uint64, POINTER(c_uint64), POINTER(c_void_p)]),
    "slice_arena_free": (c_int, [c_void_p, c_uint64]),
    "slice_tensor_import": (c_int, [c_void_p, c_int, c_uint32, POINTER(TensorSpec), c_size_t, _HANDLES]),
    "slice_tensor_replicate": (c_int, [c_void_p, _HANDLES, c_size_t, POINTER(c_char_p), c_size_t]),
    "slice_tensor_alloc": (c_int, [c_void_p, POINTER(TensorSpec), c_size_t, _HANDLES, POINTER(c_void_p)]),
    "slice_tensor_release": (c_int, [c_void_p, _HANDLES, c_size_t]),
    "slice_tensor_reset": (c_int, [c_void_p, _HANDLES, c_size_t, _TICKET]),
    "slice_tensor_fill": (c_int, [c_void_p, _HANDLES, c_size_t, c_uint64, _TICKET]),
    "slice_tensor_crop": (c_int, [c_void_p, _HANDLES, c_size_t, c_int32, c_uint64, _TICKET]),
    "slice_tensor_write": (c_int, [c_void_p, c_uint64, c_uint64, c_uint64, _TICKET]),
    "slice_tensor_read": (c_int, [c_void_p, c_uint64, c_uint64, c_uint64, _TICKET]),
    "slice_graph_register": (c_int, [c_void_p, c_char_p, c_size_t, POINTER(c_uint64)]),
    "slice_graph_unregister": (c_int, [c_void_p, c_uint64]),
    "slice_binding_create": (c_int, [c_void_p, c_uint64, _HANDLES, c_size_t, POINTER(c_uint64)]),
    "slice_binding_destroy": (c_int, [c_void_p, c_uint64]),
    "slice_sequence_open": (c_int, [c_void_p, POINTER(SequenceOptions), POINTER(c_uint64)]),
    "slice_sequence_close": (c_int, [c_void_p, c_uint64]),
    "slice_submit": (c_int, [c_void_p, POINTER(SubmitArgs), _TICKET]),
    "slice_wait": (c_int, [c_void_p, c_uint64, c_int64, POINTER(Completion)]),
    "slice_cancel": (c_int, [c_void_p, c_uint64]),
}

_ERRORS = {
    ERR_INVALID: errors.InvalidArgument,
    ERR_GRAPH: errors.GraphRejected,
    ERR_OP_NOT_ALLOWED: errors.GraphRejected,
    ERR_OVERFLOW: errors.InvalidArgument,
    ERR_BOUNDS: errors.InvalidArgument,
    ERR_STALE: errors.Stale,
    ERR_QUOTA: errors.Quota,
    ERR_NEVER_FITS: errors.NeverFits,
    ERR_WOULD_BLOCK: errors.WouldBlock,
    ERR_DEADLINE: errors.DeadlineExceeded,
    ERR_CANCELLED: errors.Cancelled,
    ERR_OP_FAILED: errors.OperatorFailed,
    ERR_EXECUTOR_LOST: errors.ExecutorLost,
    ERR_STATE_LOST: errors.StateLost,
    ERR_DAEMON_LOST: errors.DaemonUnavailable,
    ERR_VERSION: errors.VersionMismatch,
}


def handle_array(handles):
    """A ctypes array of 64-bit handles."""
    return (c_uint64 * max(1, len(handles)))(*handles)


def library_candidates():
    """Paths where libslice may lie, most specific first."""
    named = os.environ.get("SLICE_LIBRARY")
    if named:
        return [pathlib.Path(named)]
    package = pathlib.Path(__file__).resolve().parent
    builds = sorted(
        (package.parent.parent / "build").glob("*/lib/libslice.so.1"),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    return [package / "libslice.so.1", *builds]


def _load():
    candidates = library_candidates()
    fallback = str(candidates[0]) if os.environ.get("SLICE_LIBRARY") else "libslice.so.1"
    path = next((str(path) for path in candidates if path.exists()), fallback)
    try:
        return ctypes.CDLL(path, use_errno=True)
    except OSError as error:
        looked = ", ".join(str(path) for path in candidates) or "nowhere"
        raise errors.DaemonUnavailable(
            f"the client library libslice.so.1 cannot be loaded: {error}. Looked at {looked} and the system's "
            "library path. Build it (cmake --build build/release --target slice) or set SLICE_LIBRARY to its path.",
            retryable=False,
        ) from error


class Library:
    """The C ABI with Python arguments. `raw` has the functions of SIGNATURES."""

    def __init__(self, raw):
        self.raw = raw
        if isinstance(raw, ctypes.CDLL):
            for name, (result, arguments) in SIGNATURES.items():
                function = getattr(raw, name)
                function.restype, function.argtypes = result, arguments
        version = raw.slice_abi_version()
        if version >> 16 != ABI_MAJOR:
            raise errors.VersionMismatch(
                f"libslice has ABI {version >> 16}.{version & 0xFFFF}, this package needs {ABI_MAJOR}.x: "
                "install matching versions of both",
                status=ERR_VERSION,
            )
        self.submit_raw = raw.slice_submit  # looked up once: the per-call path
        self._wait = raw.slice_wait

    # ---- errors ------------------------------------------------------------------------------

    def error(self, status, text=None):
        """The exception for `status`; `text` defaults to the thread's last error."""
        if text is None:
            text = (self.raw.slice_last_error() or b"").decode(errors="replace")
        name = (self.raw.slice_status_name(status) or b"?").decode()
        return _ERRORS.get(status, errors.SliceError)(
            text if name in text else f"{name}: {text}",
            status=status,
            retryable=bool(self.raw.slice_status_is_retryable(status)),
        )

    def check(self, status):
        """Raises unless `status` is OK."""
        if status != OK:
            raise self.error(status)

    # ---- sessions ----------------------------------------------------------------------------

    def session_open(self, options):
        session = c_void_p()
        self.check(self.raw.slice_session_open(ctypes.byref(options), ctypes.byref(session)))
        return session.value

    def session_close(self, session):
        self.raw.slice_session_close(session)

    def session_limits(self, session):
        limits = SessionLimits()
        self.check(self.raw.slice_session_limits(session, ctypes.byref(limits)))
        return limits

    def arena_alloc(self, session, nbytes):
        """-> (offset, address). Errors: SliceError with ERR_NO_MEMORY when the arena is full."""
        offset, pointer = c_uint64(), c_void_p()
        self.check(self.raw.slice_arena_alloc(session, nbytes, ctypes.byref(offset), ctypes.byref(pointer)))
        return offset.value, pointer.value

    def arena_free(self, session, offset):
        self.check(self.raw.slice_arena_free(session, offset))

    # ---- tensors -----------------------------------------------------------------------------

    def tensor_import(self, session, memfd, kind, specs):
        handles = (c_uint64 * len(specs))()
        array = (TensorSpec * len(specs))(*specs)
        self.check(self.raw.slice_tensor_import(session, memfd, kind, array, len(specs), handles))
        return list(handles)

    def tensor_replicate(self, session, handles, devices):
        names = (c_char_p * max(1, len(devices)))(*[device.encode() for device in devices])
        self.check(
            self.raw.slice_tensor_replicate(session, handle_array(handles), len(handles), names, len(devices))
        )

    def tensor_alloc(self, session, specs):
        """-> (handles, addresses of the read-only views)."""
        handles, views = (c_uint64 * len(specs))(), (c_void_p * len(specs))()
        array = (TensorSpec * len(specs))(*specs)
        self.check(self.raw.slice_tensor_alloc(session, array, len(specs), handles, views))
        return list(handles), list(views)

    def tensor_release(self, session, handles):
        self.check(self.raw.slice_tensor_release(session, handle_array(handles), len(handles)))

    def tensor_reset(self, session, handles):
        ticket = c_uint64()
        self.check(
            self.raw.slice_tensor_reset(session, handle_array(handles), len(handles), ctypes.byref(ticket))
        )
        return ticket.value

    def tensor_fill(self, session, handles, element):
        ticket = c_uint64()
        self.check(
            self.raw.slice_tensor_fill(
                session, handle_array(handles), len(handles), element & (2**64 - 1), ctypes.byref(ticket)
            )
        )
        return ticket.value

    def tensor_crop(self, session, handles, dimension, length):
        ticket = c_uint64()
        self.check(
            self.raw.slice_tensor_crop(
                session, handle_array(handles), len(handles), dimension, length, ctypes.byref(ticket)
            )
        )
        return ticket.value

    def tensor_write(self, session, handle, offset, nbytes):
        ticket = c_uint64()
        self.check(self.raw.slice_tensor_write(session, handle, offset, nbytes, ctypes.byref(ticket)))
        return ticket.value

    def tensor_read(self, session, handle, offset, nbytes):
        ticket = c_uint64()
        self.check(self.raw.slice_tensor_read(session, handle, offset, nbytes, ctypes.byref(ticket)))
        return ticket.value

    # ---- graphs, bindings, sequences ---------------------------------------------------------

    def graph_register(self, session, template):
        graph = c_uint64()
        self.check(self.raw.slice_graph_register(session, template, len(template), ctypes.byref(graph)))
        return graph.value

    def graph_unregister(self, session, graph):
        self.check(self.raw.slice_graph_unregister(session, graph))

    def binding_create(self, session, graph, handles):
        binding = c_uint64()
        self.check(
            self.raw.slice_binding_create(
                session, graph, handle_array(handles), len(handles), ctypes.byref(binding)
            )
        )
        return binding.value

    def binding_destroy(self, session, binding):
        self.check(self.raw.slice_binding_destroy(session, binding))

    def sequence_open(self, session, options):
        sequence = c_uint64()
        self.check(self.raw.slice_sequence_open(session, ctypes.byref(options), ctypes.byref(sequence)))
        return sequence.value

    def sequence_close(self, session, sequence):
        self.check(self.raw.slice_sequence_close(session, sequence))

    # ---- running -----------------------------------------------------------------------------

    def cancel(self, session, ticket):
        self.check(self.raw.slice_cancel(session, ticket))

    def wait(self, session, ticket, timeout_ns=-1, completion=None):
        """Waits for `ticket`; returns the status (TIMEOUT included), never raises on it.

        Python's signal handlers run when a signal interrupts the wait, so Ctrl-C raises KeyboardInterrupt
        here; the ticket stays valid then.
        """
        reference = ctypes.byref(completion) if completion is not None else None
        end = None if timeout_ns <= 0 else time.monotonic_ns() + timeout_ns
        while True:
            ctypes.set_errno(0)
            status = self._wait(session, ticket, timeout_ns, reference)
            if status != ERR_CANCELLED or ctypes.get_errno() != errno.EINTR:
                return status
            if end is not None:
                timeout_ns = max(0, end - time.monotonic_ns())


_library = None
_lock = threading.Lock()


def library():
    """The process's library, loaded on first use. Errors: DaemonUnavailable, VersionMismatch."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = Library(_load())
    return _library


def use_library(raw):
    """Replaces the library (tests). `raw` None: back to the real one, loaded again on next use."""
    global _library
    with _lock:
        _library = None if raw is None else Library(raw)
