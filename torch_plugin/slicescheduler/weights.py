"""Weights in shared memory: moved once, in place, and imported by every session that needs them.

`share_tensors` copies tensors into one sealed memfd and re-points them (`.data`), so parameters keep their
identity, ties stay ties, and the old storages are freed one by one. A tensor of the process lies in shared
memory at most once, whatever the number of sessions. The pages live as long as any tensor over them.

Contract with the daemon: constants do not change while they are registered. A change in place is seen at once by
the device that reads these pages, but replicas on other devices are copies. So tensors with replicas are imported anew
when their version counter (torch's `_version`) has moved. Changes that do not count, through `.data`, numpy, or to
tensors made in inference mode, do not reach replicas.

Threads: one lock around moving; lookups are lock-free.
"""

import bisect
import fcntl
import mmap
import os
import threading
import weakref

import torch

from .errors import InvalidArgument, Unsupported
from .tensors import extent, tensor_spec

_ALIGN = 64
_MFD_NOEXEC_SEAL = 0x8
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4

_lock = threading.RLock()
_bases = []  # sorted start addresses of mappings
_mappings = weakref.WeakValueDictionary()  # start address -> Mapping


class Mapping(mmap.mmap):
    """A sealed memfd mapped into this process. Attributes: fd, base, nbytes, key."""

    fd = -1
    base = 0
    nbytes = 0
    key = 0


_next_key = 0


def _create(nbytes):
    global _next_key, _bases
    nbytes = max(_ALIGN, nbytes)
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("slice-weights", flags | _MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create("slice-weights", flags)  # kernels before 6.3
    os.ftruncate(fd, nbytes)
    os.posix_fallocate(fd, 0, nbytes)
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
    mapping = Mapping(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    weakref.finalize(mapping, os.close, fd).atexit = False
    _next_key += 1
    mapping.fd, mapping.nbytes, mapping.key = fd, nbytes, _next_key
    mapping.base = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    _mappings[mapping.base] = mapping
    _bases = sorted(_mappings.keys())  # a new list: readers take no lock
    return mapping


def locate(tensor):
    """(Mapping, byte offset of the tensor's storage) or None if it does not lie in shared memory."""
    address = tensor.untyped_storage().data_ptr()
    bases = _bases
    i = bisect.bisect_right(bases, address) - 1
    mapping = _mappings.get(bases[i]) if i >= 0 else None
    if mapping is None or address >= mapping.base + mapping.nbytes:
        return None
    return mapping, address - mapping.base


def may_move(tensor):
    """True if no other tensor and nobody outside torch sees this tensor's memory, as far as torch knows."""
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    # Memory of numpy and the like cannot be resized. Users of a storage: `tensor` and the local variable.
    return whole and storage.resizable() and torch._C._storage_Use_Count(storage._cdata) == 2


def _round(nbytes):
    return -(-nbytes // _ALIGN) * _ALIGN


def share_tensors(tensors):
    """Moves tensors into one new memfd; those already there, empty ones and managed ones stay.

    Blocks: for one copy of the bytes. Memory: peaks at the sum plus the largest storage.
    Errors: Unsupported for tensors that are not dense CPU tensors; OSError when shared memory is short.
    """
    with _lock:
        groups = {}
        for tensor in tensors:
            if hasattr(tensor, "_slice_managed") or tensor.numel() == 0:
                continue
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise Unsupported(
                    f"a weight on {tensor.device} with layout {tensor.layout}: only dense CPU tensors can be "
                    "shared with the daemon in this version"
                )
            if locate(tensor) is None:
                members = groups.setdefault(tensor.untyped_storage()._cdata, {})
                members[id(tensor)] = tensor
        regions = [region for members in groups.values() for region in _regions(list(members.values()))]
        del groups
        if not regions:
            return
        mapping = _create(sum(_round(end - begin) for begin, end, _ in regions))
        offset = 0
        with torch.no_grad():
            for i, (begin, end, members) in enumerate(regions):
                _move(members, mapping, offset, begin, end)
                regions[i] = None
                offset += _round(end - begin)


def _regions(members):
    """Tensors of one storage -> [(first byte, end byte, tensors)], overlapping ones together.

    Ties and overlapping views keep one place; views that do not touch (a fused weight cut in pieces) each get
    their own, so that their storage offsets become 0.
    """
    spans = []
    for tensor in members:
        begin = tensor.storage_offset() * tensor.element_size()
        spans.append((begin, begin + extent(tensor.shape, tensor.stride()) * tensor.element_size(), tensor))
    spans.sort(key=lambda span: span[:2])
    regions = []
    for begin, end, tensor in spans:
        if regions and begin < regions[-1][1]:
            first, last, together = regions[-1]
            regions[-1] = (first, max(last, end), [*together, tensor])
        else:
            regions.append((begin, end, [tensor]))
    return regions


def _move(members, mapping, offset, begin, end):
    """Copies bytes [begin, end) of the members' one storage to `offset` and re-points them.

    A tensor made in inference mode stays one: torch's guards would take the change for another tensor.
    """
    with torch.inference_mode(False):
        place = torch.frombuffer(mapping, dtype=torch.uint8, offset=offset, count=end - begin)
    source = torch.empty(0, dtype=torch.uint8).set_(members[0].untyped_storage())
    place.copy_(source[begin:end])
    for tensor in members:
        shift = tensor.storage_offset() - begin // tensor.element_size()
        with torch.inference_mode(tensor.is_inference()):
            view = torch.empty(0, dtype=tensor.dtype)
            view.set_(place.untyped_storage(), shift, tensor.size(), tensor.stride())
            tensor.data = view


def share_module(module):
    """Moves all parameters and buffers of `module` into shared memory, in place.

    Optional: a compiled model does it for the tensors of a graph at its first call. Doing it right after
    loading avoids holding them twice. Returns the module.
    """
    tensors = [*module.parameters(), *module.buffers()]
    share_tensors([tensor for tensor in tensors if not tensor.is_meta])
    return module


# ---- handles -----------------------------------------------------------------------------------


_nothing = None


def _empty_mapping():
    """Where tensors without elements are imported from."""
    global _nothing
    if _nothing is None:
        _nothing = _create(_ALIGN)
    return _nothing


def import_handles(connection, tensors, names, kinds):
    """Tensor handles on `connection`, imported where new or changed since replicas were made of them.

    Args: parallel lists; kinds are _abi.TENSOR_*. All tensors must be shared or empty.
    """
    with _lock:
        handles = [None] * len(tensors)
        missing = {}  # (mapping key, kind) -> (mapping, {spec key: (spec, [positions])})
        for i, tensor in enumerate(tensors):
            mapping, offset = locate(tensor) or (_empty_mapping(), 0)
            sizes, strides = tuple(tensor.shape), tensor.stride()
            key = (kinds[i], offset, tensor.storage_offset(), tensor.dtype, sizes, strides)
            known = connection.imports.get(mapping.key)
            if known is None:
                known = connection.imports[mapping.key] = {}
                weakref.finalize(mapping, _forget, weakref.ref(connection), mapping.key).atexit = False
            if key in known and not _replicas_are_old(connection, known[key], tensor):
                handles[i] = known[key]
                continue
            if key in known:  # whoever still uses the old handle finds out as this caller did
                connection.garbage.append(known.pop(key))
            _, fresh = missing.setdefault((mapping.key, kinds[i]), (mapping, {}))
            if key not in fresh:
                fresh[key] = (tensor_spec(names[i], tensor.dtype, sizes, strides, offset), [])
            fresh[key][1].append(i)
        for (mapping_key, kind), (mapping, fresh) in missing.items():
            specs = [spec for spec, _ in fresh.values()]
            made = connection.library.tensor_import(connection.handle, mapping.fd, kind, specs)
            for (key, (_, positions)), handle in zip(fresh.items(), made):
                connection.imports[mapping_key][key] = handle
                for i in positions:
                    handles[i] = handle
        return handles


def _forget(connection, mapping_key):
    """The last tensor of a mapping is gone: its handles may go too."""
    connection = connection()
    if connection is not None:
        connection.garbage.extend(connection.imports.pop(mapping_key, {}).values())


def version(tensor):
    """Counts the changes in place of `tensor` that torch knows of; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _replicas_are_old(connection, handle, tensor):
    versions = connection.replica_versions.get(handle)
    return versions is not None and versions.setdefault(id(tensor), version(tensor)) != version(tensor)


def replicate(connection, handles, tensors, devices):
    """Makes replicas of constants as the option says: "home", "all" or a list of device names.

    Returns whether these tensors have replicas now: their `version`s matter then. `tensors`: of the handles.
    """
    if devices == "home":
        return False
    if devices != "all" and (isinstance(devices, str) or not all(isinstance(d, str) for d in devices)):
        raise InvalidArgument(f'replicate must be "all", "home" or a list of devices, not {devices!r}')
    names = () if devices == "all" else tuple(devices)
    fresh = [handle for handle in handles if (handle, names) not in connection.replicated]
    if fresh and (connection.limits.device_count > 1 or names):
        connection.library.tensor_replicate(connection.handle, fresh, names)
        connection.replicated.update((handle, names) for handle in fresh)
        for handle, tensor in zip(handles, tensors):
            connection.replica_versions.setdefault(handle, {}).setdefault(id(tensor), version(tensor))
    return any(handle in connection.replica_versions for handle in handles)

