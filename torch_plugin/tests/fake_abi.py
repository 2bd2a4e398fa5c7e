"""FakeSlice: the functions of slice.h in Python, running templates in this process with the reference interpreter.

Takes exactly the ctypes arguments that the real library takes, so `_abi.Library` and everything above it are
tested as they are. Strict where the daemon is strict: exact slot sizes, handles of the right kind, no free of a slot
in flight. Managed tensors are mapped read-only for the "tenant", so that a stray write crashes the test.

Faults: `fail_next(status)`, `kill()` (connections are lost), `down` (nobody answers), `before_wait` (a hook).
Threads: one lock; a submit runs at once in the caller, in submit order.
"""

import ctypes
import errno
import itertools
import mmap
import os
import threading
import time

import numpy
import torch
from reference import Reference, store_result

from slicescheduler import _abi
from slicescheduler._proto import template_pb2 as pb
from slicescheduler.expressions import evaluate
from slicescheduler.serialize import dtype_from_proto
from slicescheduler.tensors import extent

_NAMES = {value: name for name, value in vars(_abi).items() if name.startswith("ERR_")}


class Fault(Exception):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class _Memory:
    """A memfd mapped writable for the fake and, for managed tensors, read-only for the tenant."""

    def __init__(self, nbytes, fd=None, tenant_read_only=False):
        self.nbytes = max(64, nbytes)
        if fd is None:
            fd = os.memfd_create("fake", os.MFD_CLOEXEC)
            os.ftruncate(fd, self.nbytes)
            own = fd
        else:
            own = None
        self.map = mmap.mmap(fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.address = numpy.frombuffer(self.map, dtype=numpy.uint8).ctypes.data
        self.tenant_map = mmap.mmap(fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ) if tenant_read_only else None
        self.tenant_address = None
        if tenant_read_only:
            self.tenant_address = numpy.frombuffer(self.tenant_map, dtype=numpy.uint8).ctypes.data
        if own is not None:
            os.close(own)


class _Tensor:
    def __init__(self, memory, spec, kind):
        self.memory = memory
        self.kind = kind
        self.dtype = dtype_from_proto(spec.dtype)
        self.sizes = tuple(spec.sizes[: spec.dim_count])
        self.strides = tuple(spec.strides[: spec.dim_count])
        self.offset = spec.offset
        self.name = (spec.name or b"").decode()
        self.lost = False
        self.nbytes = extent(self.sizes, self.strides) * self.dtype.itemsize

    def view(self):
        return tensor_at(self.memory.map, self.offset, self.dtype, self.sizes, self.strides)


def tensor_at(buffer, offset, dtype, sizes, strides):
    count = extent(sizes, strides)
    if count == 0:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, offset=offset, count=count).as_strided(sizes, strides)


class _Program:
    """A registered template."""

    def __init__(self, template_bytes):
        self.template_bytes = template_bytes
        self.extra_inputs = ()
        self.reference = Reference(self)
        self.template = self.reference.template

    def bytes_of(self, value, symbols):
        meta = self.template.values[value].meta
        sizes = [evaluate(e, symbols) for e in meta.sizes]
        strides = [evaluate(e, symbols) for e in meta.strides]
        count = extent(sizes, strides)
        offset = evaluate(meta.storage_offset, symbols) if meta.HasField("storage_offset") and count else 0
        return dtype_from_proto(meta.dtype), sizes, strides, offset, count


class _Session:
    def __init__(self, number, options):
        self.number = number
        self.arena = _Memory(options.arena_bytes or 64 << 20)
        self.arena_bytes = options.arena_bytes or 64 << 20
        self.service_class = options.service_class or _abi.CLASS_ONLINE
        self.slots = {}
        self.cursor = 0
        self.tensors, self.graphs, self.bindings, self.sequences = {}, {}, {}, {}
        self.completions = {}
        self.lost = False
        self.closed = False


class FakeSlice:
    """`fake = FakeSlice(); _abi.use_library(fake)`. Public fields show what happened."""

    def __init__(self):
        self._lock = threading.RLock()
        self._error = threading.local()
        self._numbers = itertools.count(1)
        self.sessions = {}
        self.opened = 0
        self.imports = 0
        self.imported_bytes = 0
        self.replicated = []
        self.registered = 0
        self.graphs_max = 64
        self.submits = []  # (session number, binding, sequence, deadline, priority)
        self.sequences_opened = []
        self.cancelled = []
        self.down = False
        self.no_views = False  # managed tensors live where the tenant cannot look
        self.queue_full = 0  # the next submits that return WOULD_BLOCK
        self.before_wait = None
        self.hold = False  # completions do not come while True
        self._faults = []

    # ---- faults ------------------------------------------------------------------------------

    def fail_next(self, status, times=1):
        """The next `times` submits complete with `status`, without running."""
        self._faults += [status] * times

    def kill(self):
        """Every connection is lost, as when the daemon restarts."""
        with self._lock:
            for session in self.sessions.values():
                session.lost = True

    # ---- plumbing ----------------------------------------------------------------------------

    def __getattr__(self, name):
        if not name.startswith("slice_"):
            raise AttributeError(name)
        function = getattr(type(self), "_" + name.removeprefix("slice_"))

        def call(*args):
            try:
                with self._lock:
                    return function(self, *args) or 0
            except Fault as fault:
                self._error.text = str(fault).encode()
                return fault.status

        self.__dict__[name] = call
        return call

    def slice_status_name(self, status):
        return b"SLICE_" + _NAMES.get(status, "ERR_?").encode()

    def slice_status_is_retryable(self, status):
        return int(status in (_abi.ERR_WOULD_BLOCK, _abi.ERR_EXECUTOR_LOST, _abi.ERR_DAEMON_LOST))

    def slice_last_error(self):
        return getattr(self._error, "text", b"")

    def slice_abi_version(self):
        return _abi.ABI_MAJOR << 16 | _abi.ABI_MINOR

    def slice_wait(self, handle, ticket, timeout_ns, completion):
        if self.before_wait is not None:
            hook, self.before_wait = self.before_wait, None
            if hook() == "interrupted":
                ctypes.set_errno(errno.EINTR)
                return _abi.ERR_CANCELLED
        end = None if timeout_ns < 0 else time.monotonic_ns() + timeout_ns
        while self.hold:
            if end is not None and time.monotonic_ns() >= end:
                return _abi.ERR_TIMEOUT
            time.sleep(0.001)
        with self._lock:
            session = self.sessions.get(handle)
            if session is None or session.lost:
                self._error.text = b"the connection to sliced was lost"
                return _abi.ERR_DAEMON_LOST
            if ticket not in session.completions:
                self._error.text = b"no such ticket"
                return _abi.ERR_STALE
            status, text, times = session.completions.pop(ticket)
            self._error.text = text.encode()
            if completion is not None:
                out = completion._obj
                out.status, out.failed_op = status, _abi.NO_FAILED_OP
                out.submit_ns, out.start_ns, out.finish_ns = times
                out.predicted_finish_ns = times[2]
            return status

    def _session(self, handle):
        session = self.sessions.get(handle)
        if session is None:
            raise Fault(_abi.ERR_INVALID, "not a session")
        if session.lost:
            raise Fault(_abi.ERR_DAEMON_LOST, "the connection to sliced was lost")
        return session

    @staticmethod
    def _one(table, key, what):
        if key not in table:
            raise Fault(_abi.ERR_STALE, f"no {what} {key}")
        return table[key]

    def _complete(self, session, status, text, begin, ticket):
        number = next(self._numbers)
        now = time.monotonic_ns()
        session.completions[number] = (status, text, (begin, begin, now))
        ticket._obj.value = number

    # ---- sessions and arena ------------------------------------------------------------------

    def _session_open(self, options, out):
        if self.down:
            raise Fault(_abi.ERR_DAEMON_LOST, "cannot connect to /fake/sliced.sock: start sliced")
        number = next(self._numbers)
        self.sessions[number] = _Session(number, options._obj)
        self.opened += 1
        out._obj.value = number

    def _session_close(self, handle):
        self.sessions[handle].closed = True
        self.sessions.pop(handle)

    def _session_limits(self, handle, out):
        session, limits = self._session(handle), out._obj
        limits.service_class = session.service_class
        limits.queue_slots, limits.device_count, limits.session_number = 64, 2, session.number
        limits.arena_bytes = session.arena_bytes

    def _arena_alloc(self, handle, nbytes, offset, pointer):
        session = self._session(handle)
        nbytes = -(-nbytes // 64) * 64
        place, taken = 0, sorted(session.slots.items())
        for begin, length in taken:
            if begin - place >= nbytes:
                break
            place = begin + length
        if place + nbytes > session.arena_bytes:
            raise Fault(_abi.ERR_NO_MEMORY, f"the arena of {session.arena_bytes} bytes is full")
        session.slots[place] = nbytes
        offset._obj.value, pointer._obj.value = place, session.arena.address + place

    def _arena_free(self, handle, offset):
        self._one(self._session(handle).slots, offset, "slot at")
        del self._session(handle).slots[offset]

    def _slot(self, session, offset, nbytes):
        for begin, length in session.slots.items():
            if begin <= offset and offset + nbytes <= begin + length:
                return
        raise Fault(_abi.ERR_BOUNDS, f"[{offset}, +{nbytes}) is no live slot")

    # ---- tensors -----------------------------------------------------------------------------

    def _tensor_import(self, handle, memfd, kind, specs, count, out):
        session = self._session(handle)
        memory = _Memory(os.fstat(memfd).st_size, fd=memfd)
        for i in range(count):
            tensor = _Tensor(memory, specs[i], kind)
            if tensor.offset % 64 or tensor.offset + tensor.nbytes > memory.nbytes:
                raise Fault(_abi.ERR_BOUNDS, f"{tensor.name}: offset {tensor.offset}")
            out[i] = next(self._numbers)
            session.tensors[out[i]] = tensor
            self.imported_bytes += tensor.nbytes
        self.imports += 1

    def _tensor_replicate(self, handle, handles, count, devices, device_count):
        session = self._session(handle)
        for i in range(count):
            if self._one(session.tensors, handles[i], "tensor").kind != _abi.TENSOR_CONSTANT:
                raise Fault(_abi.ERR_INVALID, "not a constant")
        self.replicated.append((count, [devices[i].decode() for i in range(device_count)]))

    def _tensor_alloc(self, handle, specs, count, out, views):
        session = self._session(handle)
        for i in range(count):
            tensor = _Tensor(None, specs[i], "managed")
            tensor.memory = _Memory(tensor.nbytes, tenant_read_only=True)
            out[i] = next(self._numbers)
            session.tensors[out[i]] = tensor
            views[i] = None if self.no_views else tensor.memory.tenant_address

    def _tensor_release(self, handle, handles, count):
        for i in range(count):
            self._one(self._session(handle).tensors, handles[i], "tensor")
            del self._session(handle).tensors[handles[i]]

    def _managed(self, session, handle):
        tensor = self._one(session.tensors, handle, "tensor")
        if tensor.kind != "managed":
            raise Fault(_abi.ERR_INVALID, "not a managed tensor")
        return tensor

    def _command(self, handle, handles, count, ticket, action, heals=False):
        session = self._session(handle)
        status = _abi.OK
        for i in range(count):
            tensor = self._managed(session, handles[i])
            if heals:
                tensor.lost = False
            if tensor.lost:
                status = _abi.ERR_STATE_LOST
            else:
                with torch.inference_mode():
                    action(tensor.view())
        self._complete(session, status, "a managed tensor is lost", time.monotonic_ns(), ticket)

    def _tensor_reset(self, handle, handles, count, ticket):
        self._command(handle, handles, count, ticket, lambda view: view.zero_(), heals=True)

    def _tensor_fill(self, handle, handles, count, element, ticket):
        def fill(view):
            bits = element.to_bytes(8, "little")[: view.element_size()]
            view.copy_(torch.frombuffer(bytearray(bits), dtype=view.dtype)[0])

        self._command(handle, handles, count, ticket, fill)

    def _tensor_crop(self, handle, handles, count, dimension, length, ticket):
        def crop(view):
            view.narrow(dimension, length, view.shape[dimension] - length).zero_()

        self._command(handle, handles, count, ticket, crop)

    def _tensor_read(self, handle, tensor, offset, nbytes, ticket):
        session = self._session(handle)
        self._slot(session, offset, nbytes)

        def read(view):
            if nbytes != view.numel() * view.element_size():
                raise Fault(_abi.ERR_BOUNDS, f"{nbytes} bytes for {list(view.shape)}")
            ctypes.memmove(session.arena.address + offset, view.contiguous().data_ptr(), nbytes)

        self._command(handle, [tensor], 1, ticket, read)

    # ---- graphs, bindings, sequences ---------------------------------------------------------

    def _graph_register(self, handle, data, size, out):
        session = self._session(handle)
        assert len(data) == size
        found = [key for key, program in session.graphs.items() if program.template_bytes == data]
        out._obj.value = found[0] if found else next(self._numbers)
        if not found:
            if len(session.graphs) >= self.graphs_max:
                raise Fault(_abi.ERR_QUOTA, f"{self.graphs_max} graphs are registered")
            self.registered += 1
            session.graphs[out._obj.value] = _Program(data)

    def _graph_unregister(self, handle, graph):
        del self._session(handle).graphs[graph]

    def _binding_create(self, handle, graph, handles, count, out):
        session = self._session(handle)
        program = self._one(session.graphs, graph, "graph")
        kinds = {
            pb.Input.STATIC_CONSTANT: _abi.TENSOR_CONSTANT,
            pb.Input.STATIC_MUTABLE: _abi.TENSOR_MUTABLE,
            pb.Input.MANAGED: "managed",
        }
        wanted = [entry for entry in program.template.inputs if entry.kind in kinds]
        if count != len(wanted):
            raise Fault(_abi.ERR_INVALID, f"{count} tensors for {len(wanted)} static inputs")
        for entry, tensor_handle in zip(wanted, handles):
            tensor = self._one(session.tensors, tensor_handle, "tensor")
            if tensor.kind != kinds[entry.kind]:
                raise Fault(_abi.ERR_INVALID, f"{entry.name}: kind {tensor.kind} for input kind {entry.kind}")
        out._obj.value = next(self._numbers)
        session.bindings[out._obj.value] = (program, list(handles)[:count])

    def _binding_destroy(self, handle, binding):
        self._one(self._session(handle).bindings, binding, "binding")
        del self._session(handle).bindings[binding]

    def _sequence_open(self, handle, options, out):
        session = self._session(handle)
        number = next(self._numbers)
        session.sequences[number] = True
        raw = options._obj
        self.sequences_opened.append((raw.service_class, raw.priority, raw.deadline_ns))
        out._obj.value = number

    def _sequence_close(self, handle, sequence):
        self._one(self._session(handle).sequences, sequence, "sequence")
        del self._session(handle).sequences[sequence]

    # ---- running -----------------------------------------------------------------------------

    def _submit(self, handle, args, ticket):
        session, args = self._session(handle), args._obj
        if self.queue_full:
            self.queue_full -= 1
            raise Fault(_abi.ERR_WOULD_BLOCK, "the queue is full")
        program, handles = self._one(session.bindings, args.binding, "binding")
        if args.sequence:
            self._one(session.sequences, args.sequence, "sequence")
        self.submits.append((session.number, args.binding, args.sequence, args.deadline_ns, args.priority))
        begin = time.monotonic_ns()
        status, text = _abi.OK, ""
        try:
            if self._faults:
                raise Fault(self._faults.pop(0), "an injected fault")
            self._run(session, program, handles, args)
        except Fault as fault:
            status, text = fault.status, str(fault)
        self._complete(session, status, text, begin, ticket)

    def _run(self, session, program, handles, args):
        template, reference = program.template, program.reference
        symbols = tuple(args.symbols[i] for i in range(args.symbol_count))
        if len(symbols) != len(template.symbols):
            raise Fault(_abi.ERR_INVALID, "symbols")
        arguments, static, dynamic = [], 0, 0
        for entry in template.inputs:
            if entry.kind == pb.Input.SYMBOL:
                arguments.append(evaluate(entry.expr, symbols))
            elif entry.kind == pb.Input.DYNAMIC:
                dtype, sizes, strides, offset, count = program.bytes_of(entry.value, symbols)
                slot = args.inputs[dynamic]
                dynamic += 1
                nbytes = (count + offset) * dtype.itemsize
                if slot.bytes != nbytes:
                    raise Fault(_abi.ERR_BOUNDS, f"{entry.name}: {slot.bytes} bytes, {nbytes} needed")
                self._slot(session, slot.offset, nbytes)
                place = slot.offset + offset * dtype.itemsize
                arguments.append(tensor_at(session.arena.map, place, dtype, sizes, strides).clone())
            else:
                tensor = self._one(session.tensors, handles[static], "tensor")
                static += 1
                if tensor.lost:
                    raise Fault(_abi.ERR_STATE_LOST, f"{tensor.name} is lost")
                arguments.append(tensor.view())
        assert (dynamic, static) == (args.input_count, len(handles))
        with torch.inference_mode():
            frame = reference._bind(arguments, symbols)
            for group in template.groups:
                reference._run_group(group, frame, symbols)
            results = [out.value for out in template.outputs if out.WhichOneof("kind") == "value"]
            assert len(results) == args.output_count
            for k, value in enumerate(results):
                dtype, sizes, strides, offset, count = program.bytes_of(value, symbols)
                slot = args.outputs[k]
                if slot.bytes != (offset + count) * dtype.itemsize:
                    raise Fault(_abi.ERR_BOUNDS, f"result {k}: {slot.bytes} bytes")
                self._slot(session, slot.offset, slot.bytes)
                place = slot.offset + offset * dtype.itemsize
                store_result(tensor_at(session.arena.map, place, dtype, sizes, strides), frame[value])

    def _cancel(self, handle, ticket):
        self._session(handle)
        self.cancelled.append(ticket)

    def lose_state(self):
        """All managed tensors are lost, as after a death of the executor in the middle of a write."""
        for session in self.sessions.values():
            for tensor in session.tensors.values():
                tensor.lost = tensor.kind == "managed"
