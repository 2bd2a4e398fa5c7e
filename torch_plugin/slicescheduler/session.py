"""Sessions: one connection to `sliced` per set of options, opened on first use and again after a loss.

A `Session` is what users hold; a `Connection` is one life of it. Everything that belongs to a connection
(arena slots, handles of graphs, weights and bindings) is kept on the Connection object and dies with it;
managed tensors are allocated anew and marked lost. A Connection closes when nobody refers to it any more,
so a result tensor never outlives the arena under it.

Threads: all methods may be called from several threads. Finalizers only append to lists: they may run at any
point of any thread.
"""

import atexit
import ctypes
import gc
import os
import sys
import threading
import time
import weakref

from . import _abi
from .errors import ArenaFull, DaemonUnavailable, InvalidArgument, Quota, SliceError, StateLost

RECONNECT_SECONDS = 10.0
_fork_count = 0


def _after_fork():
    global _fork_count
    _fork_count += 1
    _sessions.clear()


# ---- arena slots -------------------------------------------------------------------------------


def size_class(nbytes):
    """Capacity of the slot for `nbytes`: at most 25 % more, so that slots can be used again."""
    if nbytes <= 256:
        return 256
    step = (nbytes - 1).bit_length() - 3
    step = max(step, 6)
    return (((nbytes - 1) >> step) + 1) << step


class ArenaSlot:
    """A slot of a connection's arena. `give()` returns it to the pool."""

    __slots__ = ("offset", "address", "capacity")

    def __init__(self, offset, address, capacity):
        self.offset = offset
        self.address = address
        self.capacity = capacity


class _ResultBuffer:
    """Mixin of the ctypes arrays that lie under result tensors: frees the slot with the last view."""

    def __del__(self):
        connection, slot = self.owner
        connection.give(slot)


_buffer_classes = {}


def buffer_class(capacity):
    """The ctypes array class for slots of `capacity` bytes (a bounded set: size classes)."""
    found = _buffer_classes.get(capacity)
    if found is None:
        base = ctypes.c_char * capacity
        found = _buffer_classes[capacity] = type("ResultBuffer", (_ResultBuffer, base), {})
    return found


# ---- one connection ----------------------------------------------------------------------------


class Connection:
    """One open C session. Attributes: library, handle, alive, limits, and the handle tables below."""

    def __init__(self, library, handle):
        self.library = library
        self.handle = handle
        self.alive = True
        self.fork_count = _fork_count
        self.limits = library.session_limits(handle)
        self.graphs = {}  # template bytes -> graph handle
        self.graph_users = {}  # template bytes -> WeakSet of the Runners of that graph
        self.imports = {}  # mapping key -> {tensor spec key -> tensor handle}
        self.replicated = set()  # (tensor handle, devices)
        self.replica_versions = {}  # tensor handle -> {id(tensor): weights.version() when it was copied}
        self.bindings = {}  # (graph, tensor handles) -> binding handle
        self.garbage = []  # tensor handles to release; appended to by finalizers
        self._pools = {}
        self._abandoned = []

    def __del__(self):
        if self.handle and not sys.is_finalizing() and self.fork_count == _fork_count:
            self.library.session_close(self.handle)

    def take(self, nbytes):
        """An ArenaSlot of at least `nbytes`. Errors: ArenaFull."""
        capacity = size_class(nbytes)
        try:
            return self._pools[capacity].pop()
        except (KeyError, IndexError):
            return self._allocate(capacity)

    def give(self, slot):
        """Takes back a slot that no submit in flight names. Safe in finalizers."""
        self._pools.setdefault(slot.capacity, []).append(slot)

    def _allocate(self, capacity):
        if self._abandoned:
            self.reap()
        for attempt in range(2):
            try:
                offset, address = self.library.arena_alloc(self.handle, capacity)
                return ArenaSlot(offset, address, capacity)
            except SliceError as error:
                if error.status != _abi.ERR_NO_MEMORY:
                    raise
                if attempt:
                    held = self._held_bytes()
                    raise ArenaFull(
                        capacity, self.limits.arena_bytes, len(held), sum(held), status=error.status
                    ) from None
                self.reap()
                gc.collect()  # results that only a reference cycle keeps
                self._trim()
                pool = self._pools.get(capacity)
                if pool:
                    return pool.pop()
        raise AssertionError("unreachable")

    def _held_bytes(self):
        """Capacities of the slots under living result tensors. Looks at every object of the process."""
        buffers = [thing for thing in gc.get_objects() if issubclass(type(thing), _ResultBuffer)]
        owners = [getattr(buffer, "owner", (None, None)) for buffer in buffers]
        return [slot.capacity for connection, slot in owners if connection is self]

    def _trim(self):
        """Hands all pooled slots back to the client library."""
        for pool in list(self._pools.values()):
            while pool:
                try:
                    slot = pool.pop()
                except IndexError:
                    break
                self.library.arena_free(self.handle, slot.offset)

    def graph_of(self, runner):
        """Handle of the runner's graph, registered where new. Graphs whose programs are gone make room.

        Errors: Quota, GraphRejected, SliceError.
        """
        template = runner.template_bytes
        self.graph_users.setdefault(template, weakref.WeakSet()).add(runner)
        if template not in self.graphs:
            try:
                self.graphs[template] = self.library.graph_register(self.handle, template)
            except Quota as error:
                if not self._drop_unused_graphs():
                    raise Quota(
                        f"{error}. Each size or type that torch specialises on, and each piece between graph breaks, is a "
                        "graph: mark varying dimensions with torch._dynamo.maybe_mark_dynamic, call torch._dynamo.reset() "
                        "to forget programs that you no longer use, or raise graphs_max in the daemon's configuration",
                        status=error.status,
                    ) from None
                self.graphs[template] = self.library.graph_register(self.handle, template)
        return self.graphs[template]

    def _drop_unused_graphs(self):
        """Unregisters graphs that no living Runner has; how many."""
        gc.collect()  # compiled programs are full of cycles
        unused = [template for template in list(self.graphs) if not self.graph_users.get(template)]
        for template in unused:
            graph = self.graphs.pop(template)
            self.graph_users.pop(template, None)
            for key in [key for key in list(self.bindings) if key[0] == graph]:
                self._quietly(self.library.binding_destroy, self.bindings.pop(key))
            self._quietly(self.library.graph_unregister, graph)
        return len(unused)

    def wait(self, ticket, timeout_ns=-1, completion=None):
        """Status of `ticket`; see Library.wait."""
        return self.library.wait(self.handle, ticket, timeout_ns, completion)

    def abandon(self, ticket, slots):
        """Gives up waiting for `ticket`: its slots come back when it has really ended."""
        try:
            self.library.cancel(self.handle, ticket)
        except SliceError:
            pass  # finished meanwhile, or the daemon is gone: reap() finds out
        self._abandoned.append((ticket, slots))

    def reap(self):
        """Collects abandoned tickets that have ended."""
        for entry in list(self._abandoned):
            ticket, slots = entry
            if self.wait(ticket, 0) == _abi.ERR_TIMEOUT:
                continue
            try:
                self._abandoned.remove(entry)
            except ValueError:
                continue  # another thread was faster
            for slot in slots:
                self.give(slot)

    def release_garbage(self):
        """Releases tensors whose last user is gone, and the bindings that name them. Slow path only."""
        if not self.garbage:
            return
        handles = []
        while self.garbage:
            handles.append(self.garbage.pop())
        gone = set(handles)
        self.replicated = {entry for entry in self.replicated if entry[0] not in gone}
        for handle in handles:
            self.replica_versions.pop(handle, None)
        for key in [key for key in list(self.bindings) if not gone.isdisjoint(key[1])]:
            binding = self.bindings.pop(key, None)
            if binding is not None:
                self._quietly(self.library.binding_destroy, binding)
        self._quietly(self.library.tensor_release, handles)

    def _quietly(self, function, argument):
        try:
            function(self.handle, argument)
        except SliceError:
            pass  # the daemon is gone, or dropped it already


# ---- sessions ----------------------------------------------------------------------------------


class Session:
    """A tenant's connection to the daemon, opened on first use.

    Made by `slicescheduler.session()`. After the daemon went away the next call connects again (waiting up to
    RECONNECT_SECONDS) and registers everything anew; contents of managed tensors are lost then, and
    graphs that use them raise StateLost until they are reset.
    """

    def __init__(
        self, *, socket=None, name=None, service_class=None, weight=0.0, home_device=None, arena_bytes=0
    ):
        if service_class not in _abi.CLASSES:
            raise InvalidArgument(f'service_class must be "online" or "offline", not {service_class!r}')
        self.socket = socket
        self.name = name
        self.service_class = service_class
        self.weight = float(weight or 0.0)
        self.home_device = home_device
        self.arena_bytes = int(arena_bytes or 0)
        self.retired = []  # managed groups whose cache is gone; appended to by finalizers
        self._lock = threading.RLock()
        self._connection = None
        self._opened_before = False
        self._closed = False
        self._fork_count = _fork_count
        self._managed = weakref.WeakSet()
        self._runners = weakref.WeakSet()

    def __repr__(self):
        state = "closed" if self._closed else "open" if self._connection is not None else "not open"
        return f"<slicescheduler.Session {self.name or ''} {self.service_class or 'default class'} {state}>"

    @property
    def socket_path(self):
        """Path of the daemon's socket that this session uses."""
        return self.socket or os.environ.get("SLICE_SOCKET") or _abi.DEFAULT_SOCKET

    def connection(self, patience_seconds=None):
        """The live Connection, opened if need be.

        Blocks: until the daemon answers; after a loss up to `patience_seconds` for it to come back (None:
        RECONNECT_SECONDS).

        Errors: DaemonUnavailable, VersionMismatch, Quota; InvalidArgument in a forked child.
        """
        connection = self._connection
        if connection is not None and connection.alive and connection.fork_count == _fork_count:
            return connection
        return self._open(patience_seconds)

    def limits(self):
        """The limits in force (`_abi.SessionLimits`)."""
        return self.connection().limits

    def _open(self, patience_seconds=None):
        if self._fork_count != _fork_count:
            raise InvalidArgument(
                "this session, and what was compiled for it, belongs to the parent process: start workers with the "
                "spawn method instead of fork, or call torch._dynamo.reset() in the child and compile again there",
                status=_abi.ERR_INVALID,
            )
        with self._lock:
            if self._closed:
                raise InvalidArgument(
                    "the session is closed: programs compiled for it end with it. Call torch.compile again after "
                    "torch._dynamo.reset(); they use a new session then",
                    status=_abi.ERR_INVALID,
                )
            if self._connection is None or not self._connection.alive:
                self._connection = None
                connection = self._connect(patience_seconds)
                for group in list(self._managed):
                    group.attach(connection)
                self._connection = connection
                self._opened_before = True
            return self._connection

    def _connect(self, patience_seconds):
        options = _abi.SessionOptions(
            socket_path=self.socket.encode() if self.socket else None,
            name=self.name.encode() if self.name else None,
            service_class=_abi.CLASSES[self.service_class],
            weight=self.weight,
            arena_bytes=self.arena_bytes,
            home_device=self.home_device.encode() if self.home_device else None,
        )
        patience = RECONNECT_SECONDS if patience_seconds is None else patience_seconds
        end = time.monotonic() + (patience if self._opened_before else 0)
        pause = 0.02
        while True:
            try:
                library = _abi.library()
                return Connection(library, library.session_open(options))
            except DaemonUnavailable as error:
                if time.monotonic() + pause > end or not error.retryable:
                    raise self._unavailable(error) from None
            time.sleep(pause)
            pause = min(pause * 2, 0.5)

    def _unavailable(self, error):
        text = str(error)
        if self.socket_path not in text:
            text += f" (socket {self.socket_path})"
        if "sliced" not in text.replace(self.socket_path, ""):
            text += f'. Start the daemon with "sliced --socket {self.socket_path}", or name another one with '
            text += "SLICE_SOCKET."
        return type(error)(text, status=error.status, retryable=error.retryable)

    def lost(self, connection):
        """Notes that `connection` is dead; the next use opens a new one."""
        connection.alive = False
        with self._lock:
            if self._connection is connection:
                self._connection = None

    def close(self):
        """Ends the session. Result tensors stay readable; the connection ends with the last of them."""
        with self._lock:
            self._closed = True
            self._connection = None
            runners = list(self._runners)
        for runner in runners:
            runner.forget()
        with _sessions_lock:
            for key in [key for key, value in _sessions.items() if value is self]:
                del _sessions[key]

    # ---- managed tensors and commands ----------------------------------------------------------

    def add_managed(self, group):
        """Registers a managed group to be allocated again after a loss."""
        with self._lock:
            self._managed.add(group)

    def add_runner(self, runner):
        """Registers a graph runner, which must drop bindings of retired groups."""
        with self._lock:
            self._runners.add(runner)

    def collect(self):
        """Frees what finalizers left behind. Called on slow paths."""
        while self.retired:
            group = self.retired.pop()
            with self._lock:
                self._managed.discard(group)
                runners = list(self._runners)
            for runner in runners:
                runner.forget(group)
            group.retire()
            del group  # the last reference: its handles become garbage now
        connection = self._connection
        if connection is not None and connection.alive:
            connection.release_garbage()
            connection.reap()

    def command(self, connection, ticket):
        """Waits for a command's ticket and raises what it reports."""
        try:
            status = connection.wait(ticket)
        except BaseException:
            connection.abandon(ticket, [])
            raise
        if status == _abi.ERR_DAEMON_LOST:
            error = connection.library.error(status)
            self.lost(connection)
            raise error
        connection.library.check(status)

    def replay_safe(self, action, attempts=2):
        """Runs `action(connection)`; once more on a new connection if the daemon went away."""
        for attempt in range(attempts):
            connection = self.connection()
            try:
                return action(connection)
            except DaemonUnavailable:
                self.lost(connection)
                if attempt + 1 == attempts:
                    raise
        raise AssertionError("unreachable")


class ManagedGroup:
    """Managed tensors that live and are lost together: one cache.

    `tensors` are torch tensors over the daemon's read-only mapping, replaced in place (`.data`) after a
    reconnect. They show the contents only while the daemon keeps them at home: use `read`.
    """

    def __init__(self, session, specs):
        """`specs`: [(name, torch dtype, sizes)]."""
        self.session = session
        self.specs = list(specs)
        self.tensors = []
        self.handles = []
        self.lost = False
        self.connection = None  # the one that the handles belong to
        session.collect()
        connection = session.connection()
        with session._lock:
            self.attach(connection)
            session.add_managed(self)

    def attach(self, connection):
        """Allocates on `connection`. Existing tensors are re-pointed and the group is marked lost."""
        from . import tensors as views

        specs = [views.tensor_spec(name, dtype, sizes) for name, dtype, sizes in self.specs]
        handles, addresses = connection.library.tensor_alloc(connection.handle, specs)
        allocations = [views.managed_view(connection, *item) for item in zip(handles, addresses, self.specs)]
        if self.tensors:
            for tensor, view in zip(self.tensors, allocations):
                views.repoint(tensor, view)
            self.lost = True
        else:
            self.tensors = allocations
            for tensor in self.tensors:
                tensor._slice_managed = self
        self.handles = handles
        self.connection = connection
        self.position = {id(tensor): i for i, tensor in enumerate(self.tensors)}

    def retire(self):
        """Breaks the cycle between group and tensors: memory goes when nobody holds a tensor any more."""
        self.tensors = []

    def handle_of(self, tensor):
        """The present handle of one of `tensors`."""
        return self.handles[self.position[id(tensor)]]

    def current(self, action):
        """Runs `action(connection, handles)` on live handles. Errors: StateLost, SliceError."""
        connection = self.session.connection()
        if self.lost:
            raise self.state_lost()
        try:
            return action(connection, self.handles)
        except DaemonUnavailable as error:
            self.session.lost(connection)
            self.lost = True
            raise self.state_lost() from error

    def state_lost(self):
        """The exception to raise while the contents are lost."""
        return StateLost(
            "the contents of a managed cache are lost (the daemon or its executor went away): call its reset() "
            "and run the prefill again",
            status=_abi.ERR_STATE_LOST,
        )

    def reset(self):
        """Zeroes everything, ordered with the graphs; makes a lost group usable again."""

        def action(connection):
            ticket = connection.library.tensor_reset(connection.handle, self.handles)
            self.session.command(connection, ticket)

        self.session.replay_safe(action)
        self.lost = False

    def fill(self, positions, element):
        """Sets every element of the tensors at `positions` to the bits `element`."""

        def action(connection, handles):
            chosen = [handles[i] for i in positions]
            self.session.command(connection, connection.library.tensor_fill(connection.handle, chosen, element))

        self.current(action)

    def crop(self, positions, dimension, length):
        """Zeroes the tensors at `positions` from `length` on along `dimension`."""

        def action(connection, handles):
            chosen = [handles[i] for i in positions]
            ticket = connection.library.tensor_crop(connection.handle, chosen, dimension, length)
            self.session.command(connection, ticket)

        self.current(action)

    def read(self, positions):
        """Copies of the tensors at `positions`, ordered with the graphs."""
        from . import tensors as views

        def action(connection, handles):
            return [self._read(connection, handles[i], views.dense_view_function(self.specs[i])) for i in positions]

        return self.current(action)

    def _read(self, connection, handle, view):
        slot = connection.take(view.nbytes)
        ticket = connection.library.tensor_read(connection.handle, handle, slot.offset, view.nbytes)
        try:
            status = connection.wait(ticket)
        except BaseException:
            connection.abandon(ticket, [slot])
            raise
        connection.library.check(status)
        copy = view(slot.address).clone()
        connection.give(slot)
        return copy


# ---- the process's sessions --------------------------------------------------------------------

_sessions = {}
_sessions_lock = threading.Lock()


def session(
    *, socket=None, name=None, service_class=None, weight=None, home_device=None, arena_bytes=None
):
    """The process's session for these options; made on first use, opened when something runs.

    Args:
      socket: path of the daemon's socket (default: $SLICE_SOCKET, else /run/slicescheduler/sliced.sock).
      name: for people, e.g. "chat-frontend" (default: the program's name).
      service_class: "online" (latency-critical) or "offline" (fills idle slices); default as configured.
      weight: share among the tenants of one class (default as configured).
      home_device: e.g. "cpu0"; the daemon chooses by default.
      arena_bytes: shared memory for inputs and results (default 64 MiB).
    Without any option: the first session of this process, if there is one.
    """
    options = dict(
        socket=socket,
        name=name,
        service_class=service_class,
        weight=weight,
        home_device=home_device,
        arena_bytes=arena_bytes,
    )
    key = tuple(options.values())
    with _sessions_lock:
        if all(value is None for value in key) and _sessions:
            return next(iter(_sessions.values()))
        if key not in _sessions:
            _sessions[key] = Session(**options)
        return _sessions[key]


def close_all():
    """Closes every session of the process; runs at exit too."""
    for open_session in list(_sessions.values()):
        open_session.close()


atexit.register(close_all)
os.register_at_fork(after_in_child=_after_fork)
