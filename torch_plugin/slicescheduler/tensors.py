"""torch views of memory that others own, and descriptions of tensors for the C ABI.

Every view has its own storage that begins at offset 0 of its place: AOT autograd treats tensors that share one
storage as aliases and fails. Views are made outside inference mode, so that they may become `.data` of
parameters. No IO, no calls into the client library.
"""

import ctypes
import functools
import math
import mmap
import warnings

import torch

from . import _abi
from .errors import Unsupported
from .serialize import dtype_to_proto


def extent(sizes, strides):
    """Elements from the first to just behind the last one of a strided tensor; 0 if it is empty."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))


def contiguous_strides(sizes):
    """Row-major strides, in elements."""
    out, stride = [], 1
    for size in reversed(sizes):
        out.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(out))


def tensor_spec(name, dtype, sizes, strides=None, offset=0):
    """An _abi.TensorSpec. Errors: Unsupported for more than DIMS_MAX dimensions."""
    if len(sizes) > _abi.DIMS_MAX:
        raise Unsupported(f"the tensor {name} has {len(sizes)} dimensions; at most {_abi.DIMS_MAX} are possible")
    spec = _abi.TensorSpec(
        name=name.encode() if name else None,
        dtype=dtype_to_proto(dtype),
        dim_count=len(sizes),
        offset=offset,
    )
    for i, (size, stride) in enumerate(zip(sizes, strides or contiguous_strides(sizes))):
        spec.sizes[i], spec.strides[i] = size, stride
    return spec


def from_buffer(buffer, dtype, sizes, strides=None, offset_bytes=0):
    """A tensor over a Python buffer that it keeps alive. `strides` None: row-major."""
    count = extent(sizes, strides) if strides is not None else math.prod(sizes)
    if count == 0:
        return torch.empty(sizes, dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset_bytes)
    return flat.view(sizes) if strides is None else flat.as_strided(sizes, strides)


class DenseView:
    """Makes row-major tensors of one shape at an address. The memory must outlive the tensor."""

    def __init__(self, dtype, sizes):
        self.dtype = dtype
        self.sizes = tuple(sizes)
        self.nbytes = math.prod(self.sizes) * dtype.itemsize

    def __call__(self, address):
        if self.nbytes == 0:
            return torch.empty(self.sizes, dtype=self.dtype)
        return from_buffer((ctypes.c_char * self.nbytes).from_address(address), self.dtype, self.sizes)


def dense_view_function(spec):
    """DenseView of a managed spec (name, dtype, sizes)."""
    return DenseView(spec[1], spec[2])


class _ManagedBuffer:
    """Mixin of ctypes arrays under managed tensors: releases the handle with the last view."""

    def __del__(self):
        connection, handle = self.owner
        connection.garbage.append(handle)


@functools.lru_cache(maxsize=256)
def _managed_class(nbytes):
    return type("ManagedBuffer", (_ManagedBuffer, ctypes.c_char * nbytes), {})


class _HiddenBuffer(_ManagedBuffer, mmap.mmap):
    """Stands for a managed tensor that the daemon shows no view of: zeros that take no memory."""

    def __new__(cls, nbytes):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        return super().__new__(cls, -1, nbytes, flags=flags, prot=mmap.PROT_READ)


def managed_view(connection, handle, address, spec):
    """A tensor over the read-only home copy of a managed tensor (address None: over zeros that stand for it).

    Writing through it crashes the process.
    """
    _, dtype, sizes = spec
    nbytes = math.prod(sizes) * dtype.itemsize
    buffer = _managed_class(nbytes).from_address(address) if address else _HiddenBuffer(max(1, nbytes))
    buffer.owner = (connection, handle)
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        tensor = from_buffer(buffer, dtype, tuple(sizes))
    torch._dynamo.mark_static_address(tensor)
    return tensor


def repoint(tensor, view):
    """Gives `tensor` the storage of `view`; the Python object stays the same."""
    with torch.inference_mode(False), torch.no_grad():
        tensor.data = view


def view_of(source, layout):
    """`source`, or the view of its storage with the dtype, sizes, strides and offset of `layout` (an OutputLayout)."""
    if source.dtype is not layout.dtype:  # view_as_real, view(dtype): the layout counts in elements of the result
        view = torch.empty(0, dtype=layout.dtype)
        return view.set_(source.untyped_storage(), layout.storage_offset, layout.sizes, layout.strides)
    same = source.shape == layout.sizes and source.stride() == layout.strides
    if same and source.storage_offset() == layout.storage_offset:
        return source
    return source.as_strided(layout.sizes, layout.strides, layout.storage_offset)
