"""Running captured graphs through the daemon: binding, inputs, submit, wait, results.

One `Runner` per captured graph. A call goes: symbols from the arguments' sizes; identity compare of the static
arguments with those of the last call (another model or cache: `_bind`); dynamic arguments copied into arena
slots; submit; wait; results as torch tensors over their arena slots, without a copy. All that depends only on
the symbols is kept in a `_Plan`, all that depends on the binding in a `_Bound`, and one call's C arguments and
input slots in a `_Frame`, taken from a pool, so that threads do not meet.

Weights that are replaced, or given other storage (`param.data = ...`), are noticed by identity and address and bound anew.

Threads: a Runner may be called by several threads at once. Blocks: until the graph has run.
"""

import collections
import ctypes
import operator
import threading
import time

import torch

from . import _abi, weights
from ._proto import template_pb2 as pb
from .errors import DaemonUnavailable, InvalidArgument, SliceError, StateLost, Unsupported
from .expressions import compile_expressions
from .request import current_request
from .serialize import dtype_from_proto
from .session import buffer_class, session
from .statistics import counters
from .tensors import contiguous_strides, extent, from_buffer, view_of

BOUNDS_KEPT = 8  # models or caches that take turns on one graph before bindings are looked up anew
PLANS_KEPT = 256
FRAMES_KEPT = 4
ATTEMPTS = 3  # of a submit that failed without having changed anything
STATIC_KINDS = (pb.Input.STATIC_CONSTANT, pb.Input.STATIC_MUTABLE, pb.Input.MANAGED)

_is = operator.is_
_data_ptr = torch.Tensor.data_ptr
_memmove = ctypes.memmove
_byref = ctypes.byref


def kind_of(tensor, _source, written, default):
    """Kind of one graph input: what belongs to a managed cache is MANAGED; what the graph writes stays put."""
    if hasattr(tensor, "_slice_managed"):
        return pb.Input.MANAGED
    if written and default == pb.Input.DYNAMIC:
        return pb.Input.STATIC_MUTABLE  # the write must reach the caller's tensor
    return default


class _ConnectionLost(DaemonUnavailable):
    """The daemon went away during a call; `submitted`: the graph may have run, or half of it."""

    def __init__(self, message, *, status, submitted):
        super().__init__(message, status=status)
        self.submitted = submitted


class _InputPlan:
    """One dynamic input: where it is in the arguments and how it lies in its slot."""

    __slots__ = ("argument", "dtype", "sizes", "strides", "offset_bytes", "nbytes", "movable")

    def __init__(self, argument, dtype, sizes, strides, offset):
        self.argument = argument
        self.dtype = dtype
        self.sizes = sizes
        self.strides = strides
        count = extent(sizes, strides)
        self.offset_bytes = offset * dtype.itemsize
        self.nbytes = (offset + count) * dtype.itemsize if count else 0
        dense = all(a == b for a, b, n in zip(strides, contiguous_strides(sizes), sizes) if n != 1)
        self.movable = dense and offset == 0 and not dtype.is_complex


class _ResultPlan:
    """One tensor result. It lies in its slot as its meta says: own strides, behind its storage offset."""

    __slots__ = ("dtype", "sizes", "strides", "offset", "count", "nbytes")

    def __init__(self, layout):
        self.dtype = layout.dtype
        self.sizes = tuple(layout.sizes)
        self.strides = tuple(layout.strides)
        self.offset = layout.storage_offset
        count = extent(self.sizes, self.strides)
        self.count = count + self.offset if count else 0
        self.nbytes = self.count * self.dtype.itemsize
        if self.offset == 0 and self.strides == contiguous_strides(self.sizes):
            self.strides = None  # the usual case: a plain view is enough


class _Plan:
    """What follows from one binding of the symbols. `outputs` has one entry per graph output:
    None, an int, a _ResultPlan, or (argument, OutputLayout) for an alias."""

    __slots__ = ("symbols", "inputs", "outputs", "results")

    def __init__(self, symbols, inputs, outputs):
        self.symbols = symbols
        self.inputs = inputs
        self.outputs = outputs
        self.results = [out for out in outputs if type(out) is _ResultPlan]


class _Bound:
    """A graph bound to its static tensors on one connection. Keeps the tensors alive: identity is the key."""

    __slots__ = ("connection", "statics", "addresses", "versions", "binding", "groups", "frames")

    def __init__(self, connection, statics, binding, groups, replicated):
        """`replicated`: the static tensors of which the daemon has copies; changes in place make those old."""
        self.connection = connection
        self.statics = statics
        self.addresses = list(map(_data_ptr, statics))  # `param.data = ...` keeps the identity
        self.versions = [(tensor, weights.version(tensor)) for tensor in replicated]
        self.binding = binding
        self.groups = groups
        self.frames = []

    def fits(self, connection, statics):
        return (
            self.connection is connection
            and all(map(_is, statics, self.statics))
            and list(map(_data_ptr, statics)) == self.addresses
            and all(weights.version(tensor) == known for tensor, known in self.versions)
        )


class _Frame:
    """C arguments and input slots of one call in flight."""

    def __init__(self, runner, bound):
        symbols, inputs, results = runner.symbol_count, len(runner.dynamics), runner.result_count
        self.connection = bound.connection
        self.slots = [None] * inputs
        self.plan = None
        self.symbols = (ctypes.c_int64 * max(1, symbols))()
        self.inputs = (_abi.Slot * max(1, inputs))()
        self.outputs = (_abi.Slot * max(1, results))()
        # The same memory as plain integers: offset, bytes, offset, bytes, ...
        self.input_words = (ctypes.c_uint64 * (2 * max(1, inputs))).from_buffer(self.inputs)
        self.output_words = (ctypes.c_uint64 * (2 * max(1, results))).from_buffer(self.outputs)
        self.ticket = ctypes.c_uint64()
        self.args = _abi.SubmitArgs(
            binding=bound.binding,
            symbol_count=symbols,
            symbols=self.symbols,
            inputs=self.inputs,
            outputs=self.outputs,
            input_count=inputs,
            output_count=results,
        )
        self.args_reference = _byref(self.args)
        self.ticket_reference = _byref(self.ticket)

    def __del__(self):  # its program, weights or cache are gone
        for slot in filter(None, self.slots):
            self.connection.give(slot)

    def fill(self, arguments, plan):
        """Copies the dynamic arguments into their slots. Errors: InvalidArgument, ArenaFull."""
        slots, words = self.slots, self.input_words
        if plan is not self.plan:
            self.plan = None
            for i, item in enumerate(plan.inputs):
                slot = slots[i]
                if slot is None or slot.capacity < item.nbytes:
                    slots[i] = None
                    if slot is not None:
                        self.connection.give(slot)
                    slots[i] = slot = self.connection.take(item.nbytes)
                words[2 * i] = slot.offset
                words[2 * i + 1] = item.nbytes
            for i, value in enumerate(plan.symbols):
                self.symbols[i] = value
            for k, item in enumerate(plan.results):
                self.output_words[2 * k + 1] = item.nbytes
            self.plan = plan
        for slot, item in zip(slots, plan.inputs):
            tensor = arguments[item.argument]
            if tensor.shape != item.sizes or tensor.dtype is not item.dtype:
                raise InvalidArgument(
                    f"argument {item.argument} is {tensor.dtype}{list(tensor.shape)}, the captured program takes "
                    f"{item.dtype}{list(item.sizes)}"
                )
            if not tensor.is_cpu:
                raise InvalidArgument(f"argument {item.argument} lies on {tensor.device}, the program was captured for cpu")
            if item.movable and tensor.is_contiguous() and not tensor.is_neg():
                _memmove(slot.address, tensor.data_ptr(), item.nbytes)
            elif item.nbytes:
                place = (ctypes.c_char * item.nbytes).from_address(slot.address)
                _copy_strided(place, item, tensor)


def _copy_strided(place, item, tensor):
    """Copies into a slot whose strides are not row-major. Expanded dimensions are written once."""
    target = from_buffer(place, item.dtype, item.sizes, item.strides, item.offset_bytes)
    for axis, (size, stride) in enumerate(zip(item.sizes, item.strides)):
        if stride == 0 and size > 1:
            target, tensor = target.narrow(axis, 0, 1), tensor.narrow(axis, 0, 1)
    target.copy_(tensor)


class Runner:
    """Runs one captured graph; see the text of the module."""

    def __init__(self, captured, options):
        template = captured.template
        self.template = template
        self.template_bytes = captured.template_bytes
        self.name = template.metadata.model or "graph"
        self.options = options
        self.operator_count = len(template.nodes)
        self.symbol_count = len(template.symbols)
        self._captured = captured
        self._bind_symbols = captured.bind_symbols
        captured.example_inputs = None  # they would keep the first call's tensors alive
        count = captured.argument_count
        entries = list(template.inputs)
        self.static_entries = [e for e in entries if e.kind in STATIC_KINDS]
        self.dynamics = [i for i, e in enumerate(entries) if e.kind == pb.Input.DYNAMIC]
        self.result_count = sum(1 for out in template.outputs if out.WhichOneof("kind") == "value")
        self.has_managed = any(e.kind == pb.Input.MANAGED for e in entries)
        self.writes_state = any(e.written for e in self.static_entries)
        statics = [i for i, e in enumerate(entries[:count]) if e.kind in STATIC_KINDS]
        self._moved = [statics.index(i) for i in captured.moved_arguments]  # positions among the statics
        self._extra = tuple(tensor for _, tensor in captured.extra_inputs)
        self._statics_of = _getter(statics)
        self._input_numbers = _compile_inputs(template, self.dynamics)
        self._static_numbers = _compile_static_sizes(template, self.static_entries)
        self._session = None
        self._bound = None
        self._bounds = collections.OrderedDict()  # ids of the static arguments -> _Bound
        self._plans = {}
        self._lock = threading.RLock()  # collect() inside _bind() calls forget()

    def forget(self, group=None):
        """Drops bindings that use `group` (None: all), so that its tensors can be freed."""
        with self._lock:
            for key, bound in list(self._bounds.items()):
                if group is None or group in bound.groups:
                    del self._bounds[key]
            bound = self._bound
            if bound is not None and (group is None or group in bound.groups):
                self._bound = None

    def __call__(self, arguments):
        """Graph arguments -> graph outputs. Errors: SliceError of any kind."""
        attempt = 1
        while True:
            try:
                return self._run(arguments)
            except SliceError as error:
                if attempt == ATTEMPTS or not self._repeatable(error):
                    if isinstance(error, StateLost):
                        counters.states_lost += 1
                    raise
            counters.retries += 1
            time.sleep(0.05 * attempt * attempt)
            attempt += 1

    def _repeatable(self, error):
        """True if the failed run changed nothing and the same call may succeed."""
        if error.status == _abi.ERR_EXECUTOR_LOST:
            return True
        if not isinstance(error, _ConnectionLost) or not self.options.strict:
            return False
        return not (error.submitted and self.writes_state)

    # ---- one run -----------------------------------------------------------------------------

    def _run(self, arguments):
        symbols = self._bind_symbols(arguments)
        if not self.operator_count and not self.result_count:  # hands its arguments back: nothing to run
            return self._outputs(None, self._make_plan(symbols), [], arguments)
        statics = self._statics_of(arguments)
        tenant = self._session
        if tenant is None:
            tenant = self._choose_session(statics)
        connection = tenant.connection(None if self.options.strict else 0.0)
        try:
            bound = self._bound
            if bound is None or not bound.fits(connection, statics):
                bound = self._bind(tenant, connection, statics, symbols)
            for group in bound.groups:
                if group.lost:
                    raise group.state_lost()
            plan = self._plans.get(symbols)
            if plan is None:
                plan = self._make_plan(symbols)
            return self._run_bound(connection, bound, plan, arguments)
        except DaemonUnavailable as error:
            tenant.lost(connection)
            submitted = isinstance(error, _ConnectionLost)
            if submitted and self.has_managed:
                groups = _groups(statics)
                for group in groups:
                    group.lost = True
                raise groups[0].state_lost() from error
            raise _ConnectionLost(str(error), status=error.status, submitted=submitted) from error

    def _run_bound(self, connection, bound, plan, arguments):
        try:
            frame = bound.frames.pop()
        except IndexError:
            frame = _Frame(self, bound)
        slots = []
        in_flight = False
        try:
            frame.fill(arguments, plan)
            words = frame.output_words
            for k, item in enumerate(plan.results):
                slot = connection.take(item.nbytes)
                slots.append(slot)
                words[2 * k] = slot.offset
            request = self._address(connection, frame)
            in_flight = True
            status = self._submit(connection, frame)
            if request is None:
                status = status or connection.wait(frame.ticket.value)
            else:
                completion = _abi.Completion()
                status = status or connection.wait(frame.ticket.value, -1, completion)
                request.add(completion)
            in_flight = False
            if status:
                self._fail(connection, bound, status)
        except BaseException:
            if in_flight and frame.ticket.value:
                inputs, frame.slots = frame.slots, []
                connection.abandon(frame.ticket.value, slots + [s for s in inputs if s is not None])
            else:
                for slot in slots:
                    connection.give(slot)
                self._recycle(bound, frame)
            raise
        self._recycle(bound, frame)
        counters.calls += 1
        return self._outputs(connection, plan, slots, arguments)

    @staticmethod
    def _recycle(bound, frame):
        if len(bound.frames) < FRAMES_KEPT:
            bound.frames.append(frame)

    def _address(self, connection, frame):
        """Fills sequence and deadline. Returns the current Request or None."""
        request, args = current_request(), frame.args
        if request is not None:
            args.sequence = request.sequence(connection)
            args.deadline_ns = request.deadline_ns
            args.priority = request.priority
            return request
        args.sequence = args.priority = 0
        deadline_ms = self.options.deadline_ms
        args.deadline_ns = 0 if deadline_ms is None else time.monotonic_ns() + int(deadline_ms * 1e6)
        return None

    @staticmethod
    def _submit(connection, frame):
        """Queues the run; returns OK or the status. Blocks while the queue is full."""
        frame.ticket.value = 0
        pause = 20e-6
        while True:
            status = connection.library.submit_raw(connection.handle, frame.args_reference, frame.ticket_reference)
            if status != _abi.ERR_WOULD_BLOCK:
                return status
            connection.reap()
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)

    @staticmethod
    def _fail(connection, bound, status):
        """Raises what `status` of a finished or refused run means."""
        error = connection.library.error(status)
        if status == _abi.ERR_DAEMON_LOST:
            raise _ConnectionLost(str(error), status=status, submitted=True)
        if status == _abi.ERR_STATE_LOST:
            for group in bound.groups:
                group.lost = True
        raise error

    def _outputs(self, connection, plan, slots, arguments):
        outputs = []
        k = 0
        for item in plan.outputs:
            kind = type(item)
            if kind is _ResultPlan:
                outputs.append(_result(connection, slots[k], item))
                k += 1
            elif kind is tuple:
                position, layout = item
                outputs.append(view_of(arguments[position], layout))
            else:
                outputs.append(item)
        return outputs

    # ---- slow paths --------------------------------------------------------------------------

    def _make_plan(self, symbols):
        template = self.template
        inputs = [
            _InputPlan(position, dtype, sizes, strides, offset)
            for position, (dtype, sizes, strides, offset) in zip(self.dynamics, self._input_numbers(symbols))
        ]
        layouts = self._captured.output_layouts(symbols)
        integers = self._captured.output_integers(symbols)
        outputs = []
        for i, out in enumerate(template.outputs):
            kind = out.WhichOneof("kind")
            if kind == "value":
                outputs.append(_ResultPlan(layouts[i]))
            elif kind == "alias_of_input":
                outputs.append((out.alias_of_input, layouts[i]))
            else:
                outputs.append(integers.get(i))
        plan = _Plan(symbols, inputs, outputs)
        if len(self._plans) >= PLANS_KEPT:
            self._plans.clear()
        self._plans[symbols] = plan
        return plan

    def _choose_session(self, statics):
        """The session of the managed cache among the arguments, else the one that the options name."""
        groups = _groups(statics)
        wanted = self.options.session_options
        named = any(value is not None for value in wanted.values())
        tenant = groups[0].session if groups else session(**wanted)
        if groups and named and session(**wanted) is not tenant:
            raise InvalidArgument(
                "the cache belongs to another session than the one that the options of this compiled program name: "
                "make the cache with StaticCache(..., session=slicescheduler.session(<the same options>)), or "
                "leave the session's options out of torch.compile"
            )
        tenant.add_runner(self)
        self._session = tenant
        return tenant

    def _bind(self, tenant, connection, statics, symbols):
        """The _Bound for these static arguments. Errors: InvalidArgument, Unsupported, SliceError."""
        with self._lock:
            key = tuple(map(id, statics))
            bound = self._bounds.get(key)
            known = bound is not None and bound.fits(connection, statics)
            if self._bound is not None:
                counters.rebinds += 1
            if known:
                self._bounds.move_to_end(key)
                self._bound = bound
                return bound
            self._check_statics(statics, symbols)
            groups = _groups(statics)
            for group in groups:
                if group.session is not tenant:
                    raise InvalidArgument(
                        "this compiled program runs in one session and the cache lives in another: use one "
                        "slicescheduler.session() for both"
                    )
                if group.connection is not connection:  # another thread has connected again meanwhile
                    raise DaemonUnavailable("the connection was replaced", status=_abi.ERR_DAEMON_LOST)
            tenant.collect()
            binding, replicated = self._create_binding(connection, statics)
            bound = _Bound(connection, statics, binding, groups, replicated)
            self._bounds[key] = bound
            while len(self._bounds) > BOUNDS_KEPT:
                self._bounds.popitem(last=False)
            self._bound = bound
            return bound

    def _create_binding(self, connection, statics):
        tensors = [*statics, *self._extra]
        entries = self.static_entries
        shared = [i for i, entry in enumerate(entries) if entry.kind != pb.Input.MANAGED]
        weights.share_tensors([tensors[i] for i in shared])
        mutable = {pb.Input.STATIC_MUTABLE: _abi.TENSOR_MUTABLE}
        imported = weights.import_handles(
            connection,
            [tensors[i] for i in shared],
            [entries[i].name for i in shared],
            [mutable.get(entries[i].kind, _abi.TENSOR_CONSTANT) for i in shared],
        )
        handles = [0] * len(entries)
        for i, handle in zip(shared, imported):
            handles[i] = handle
        for i, entry in enumerate(entries):
            if entry.kind == pb.Input.MANAGED:
                handles[i] = tensors[i]._slice_managed.handle_of(tensors[i])
        constants = [i for i in shared if entries[i].kind == pb.Input.STATIC_CONSTANT]
        have_replicas = weights.replicate(
            connection, [handles[i] for i in constants], [tensors[i] for i in constants], self._replication(connection)
        )
        connection.release_garbage()  # of weights that changed: their replicas take memory
        library = connection.library
        graph = connection.graph_of(self)
        key = (graph, tuple(handles))
        binding = connection.bindings.get(key)
        if binding is None:
            binding = connection.bindings[key] = library.binding_create(connection.handle, graph, handles)
        return binding, [tensors[i] for i in constants] if have_replicas else []

    def _replication(self, connection):
        if self.options.replicate is not None:
            return self.options.replicate
        return "all" if connection.limits.service_class == _abi.CLASS_OFFLINE else "home"

    def _check_statics(self, statics, symbols):
        """What torch's guards check otherwise: kinds, sizes and types of the static arguments."""
        for i in self._moved:
            if weights.locate(statics[i]) is None and not weights.may_move(statics[i]):
                raise Unsupported(
                    f"{self.static_entries[i].name} is written by {self.name} and shares its memory with other tensors or "
                    "numpy, which would not see the new contents: pass a clone() and copy it back, or return the new contents"
                )
        numbers = self._static_numbers(symbols)
        for entry, tensor, (dtype, sizes, offset) in zip(self.static_entries, [*statics, *self._extra], numbers):
            if tensor.shape != sizes or tensor.dtype is not dtype:
                raise InvalidArgument(
                    f"{entry.name} is {tensor.dtype}{list(tensor.shape)}, but {self.name} was compiled for "
                    f"{dtype}{list(sizes)}: compile once per cache size, or compile with torch.compile, which "
                    "keeps the guards on sizes that slicescheduler.compile drops"
                )
            if (entry.kind == pb.Input.MANAGED) != hasattr(tensor, "_slice_managed"):
                raise InvalidArgument(
                    f"{entry.name} {'must' if entry.kind == pb.Input.MANAGED else 'must not'} belong to a managed "
                    "cache, as it did when the program was compiled: keep to one kind of cache per compiled program"
                )
            if offset:
                raise Unsupported(
                    f"{entry.name} begins {offset} elements into its storage: call slicescheduler.share_module(model) "
                    "before the first call, which gives every weight its own storage"
                )


def _groups(statics):
    """The managed groups among tensors, in order of appearance."""
    found = {}
    for tensor in statics:
        group = getattr(tensor, "_slice_managed", None)
        if group is not None:
            found[id(group)] = group
    return tuple(found.values())


def _result(connection, slot, item):
    """A tensor over the slot; the slot is freed when the tensor's storage dies."""
    if item.count == 0:
        connection.give(slot)
        return torch.empty_strided(item.sizes, item.strides or contiguous_strides(item.sizes), dtype=item.dtype)
    buffer = buffer_class(slot.capacity).from_address(slot.address)
    buffer.owner = (connection, slot)
    flat = torch.frombuffer(buffer, dtype=item.dtype, count=item.count)
    if item.strides is None:
        return flat.view(item.sizes)
    return flat.as_strided(item.sizes, item.strides, item.offset)


def _getter(positions):
    if not positions:
        return lambda arguments: ()
    if len(positions) == 1:
        (only,) = positions
        return lambda arguments: (arguments[only],)
    return operator.itemgetter(*positions)


def _compile_inputs(template, positions):
    """`symbols -> [(dtype, sizes, strides, storage offset)]` of the inputs at `positions`."""
    exprs, shapes = [], []
    for position in positions:
        meta = template.values[template.inputs[position].value].meta
        shapes.append((dtype_from_proto(meta.dtype), len(meta.sizes)))
        exprs.extend([*meta.sizes, *meta.strides, meta.storage_offset if meta.HasField("storage_offset") else _ZERO])
    function = compile_expressions(exprs)

    def numbers(symbols):
        values, at, out = function(symbols), 0, []
        for dtype, rank in shapes:
            middle, end = at + rank, at + 2 * rank
            out.append((dtype, tuple(values[at:middle]), tuple(values[middle:end]), values[end]))
            at = end + 1
        return out

    return numbers


_ZERO = pb.Expr(constant=0)


def _compile_static_sizes(template, entries):
    """`symbols -> [(dtype, sizes, storage offset)]` of the static inputs."""
    function = _compile_inputs(template, [i for i, e in enumerate(template.inputs) if e.kind in STATIC_KINDS])
    return lambda symbols: [(dtype, sizes, offset) for dtype, sizes, _, offset in function(symbols)]
