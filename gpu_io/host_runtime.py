"""The calls of CUDA and HIP that make host memory fast for a device to reach; they differ in their prefix.

torch binds two of them and not the one that clears an error, so they are called in the library that torch has loaded.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

_PORTABLE = 1
"""For every device of the process, not only the one that is current."""
_SUCCESS = 0
_ALREADY_REGISTERED = 712


class AlreadyRegisteredError(RuntimeError):
    """Somebody else in this process has registered some of these bytes."""


class HostRuntime(Protocol):
    """Registers memory of this process. Calls may take seconds."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin memory. Raises ``RuntimeError`` if the driver refuses; no later call of anybody fails for it."""

    def unregister(self, address: int) -> None:
        """Let memory go that was registered at ``address``. Raises ``RuntimeError`` as ``register`` does."""


class LibraryRuntime:
    """A ``HostRuntime`` over a library."""

    def __init__(self, library: Any, prefix: str, enter_thread: Callable[[], None] = lambda: None) -> None:
        """``prefix`` is ``cuda`` or ``hip``. ``enter_thread`` makes the right device current, in whatever thread."""
        self._library = library
        self._prefix = prefix
        self._enter_thread = enter_thread

    def register(self, address: int, num_bytes: int) -> None:
        """Pin memory."""
        size = ctypes.c_size_t(num_bytes)
        self._call("HostRegister", ctypes.c_void_p(address), size, ctypes.c_uint(_PORTABLE))

    def unregister(self, address: int) -> None:
        """Let memory go."""
        self._call("HostUnregister", ctypes.c_void_p(address))

    def _call(self, name: str, *args: object) -> None:
        self._enter_thread()
        code = self._function(name)(*args)
        if code == _SUCCESS:
            return
        self._function("GetLastError")()  # or the next call of whoever else uses the device fails for this one
        error = AlreadyRegisteredError if code == _ALREADY_REGISTERED else RuntimeError
        raise error(f"{self._prefix}{name}: {self._reason(code)} ({code})")

    def _reason(self, code: int) -> str:
        describe = self._function("GetErrorString")
        describe.restype = ctypes.c_char_p
        text: bytes = describe(ctypes.c_int(code))
        return text.decode()

    def _function(self, name: str) -> Any:
        return getattr(self._library, self._prefix + name)


def host_runtime(device: torch.device) -> HostRuntime | None:
    """Of the runtime that serves ``device`` in this process; None for a device that has no such calls."""
    if device.type != "cuda":
        return None
    prefix, soname = ("hip", "libamdhip64.so") if torch.version.hip else ("cuda", "libcudart.so")
    path = _loaded(soname)
    index = torch.cuda.current_device() if device.index is None else device.index
    return None if path is None else LibraryRuntime(ctypes.CDLL(path), prefix, lambda: torch.cuda.set_device(index))


def cuda_driver() -> Any:
    """CUDA's driver in this process. Raises ``RuntimeError`` where torch uses another one, or none."""
    path = None if torch.version.hip else _loaded("libcuda.so")
    if path is None:
        raise RuntimeError("there is no CUDA driver in this process")
    return ctypes.CDLL(path)


def _loaded(soname: str) -> str | None:
    """The file of a library that this process has loaded: another version of it would have a state of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(soname):
            return f"/{path}"
    return None
