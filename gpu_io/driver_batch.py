"""CUDA's call that copies many runs at once: ``cuMemcpyBatchAsync``, looked up in the driver that torch has loaded.

It has two signatures under one name: as of 13.0 the argument that names the copy at fault is gone. Each is asked for by
the version it came with, and only where the driver is as new: NVIDIA's driver API reference, and ``cudaTypedefs.h``.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

STREAM_ORDER = 1
"""``CU_MEMCPY_SRC_ACCESS_ORDER_STREAM``: sources are read when the stream comes to it, maybe long after the call."""

_COLUMN, _COUNT = ctypes.c_void_p, ctypes.c_size_t
_ARGUMENTS = (_COLUMN, _COLUMN, _COLUMN, _COUNT, _COLUMN, _COLUMN, _COUNT)
"""Targets, sources, sizes, how many; attributes, the first copy that each is of, how many."""


class _Location(ctypes.Structure):
    """``CUmemLocation``: a hint that nothing pinned and nothing on a device needs; zeros are none."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``, of both versions."""

    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class _Signature(NamedTuple):
    since: int
    """The version as the driver writes it: 1000 * major + 10 * minor."""
    prototype: Any
    names_fault: bool
    """Whether there is an argument for the number of the copy that it refuses."""


_SIGNATURES = (
    _Signature(13000, ctypes.CFUNCTYPE(ctypes.c_int, *_ARGUMENTS, ctypes.c_void_p), names_fault=False),
    _Signature(12080, ctypes.CFUNCTYPE(ctypes.c_int, *_ARGUMENTS, ctypes.c_void_p, ctypes.c_void_p), names_fault=True),
)
"""The newest first; the last argument is the stream."""


class DriverBatch:
    """A ``Batch`` over CUDA's driver."""

    def __init__(self, library: Any, current_stream: Callable[[], int]) -> None:
        """``library`` is libcuda. Raises ``RuntimeError`` for a driver that has no such call."""
        version, entry, status = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        code = library.cuDriverGetVersion(ctypes.byref(version))
        signature = next((each for each in _SIGNATURES if each.since <= version.value), None)
        if code != 0 or signature is None:
            raise RuntimeError(f"the driver is of CUDA {version.value}, and batches came with 12080 (error {code})")
        code = library.cuGetProcAddress_v2(
            ctypes.c_char_p(b"cuMemcpyBatchAsync"),
            ctypes.byref(entry),
            ctypes.c_int(signature.since),
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        if code != 0 or not entry.value:
            raise RuntimeError(f"the driver has no cuMemcpyBatchAsync (error {code}, status {status.value})")
        self._library = library  # kept, since the entry is in it
        self._call = signature.prototype(entry.value)
        self._names_fault = signature.names_fault
        self._current_stream = current_stream

    def copy(self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """In one call."""
        columns = [np.ascontiguousarray(column) for column in (targets, sources, sizes)]
        attributes, first, fault = _Attributes(source_order=STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._call(
            *(column.ctypes.data for column in columns),
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            *([ctypes.addressof(fault)] if self._names_fault else []),
            self._current_stream(),
        )
        if code != 0:
            at = f", at copy {fault.value}" if self._names_fault else ""
            raise RuntimeError(f"cuMemcpyBatchAsync: error {code} of {len(sizes)} copies{at}")
