"""Host memory that a device is told of, so that copies from and to it are DMAs of the driver's own and nobody waits.

It is pinned in the background and in chunks, each when its pages are there: what is pinned cannot be put together to
huge pages any more, and a driver that pins much at once holds locks that everybody wants. Only for memory whose pages
stay: a device goes on with the old pages where others have taken their place.

Invariant: what is registered is mapped, because a view of it is held until the last chunk is unregistered.
"""

import ctypes
import logging
import mmap
import threading
from bisect import bisect_left, bisect_right
from itertools import pairwise

import numpy as np

from gpu_io.host_runtime import AlreadyRegisteredError, HostRuntime

CHUNK_BYTES = 1 << 30
"""Of one call. A copy is cut where one chunk ends, for a driver refuses one that crosses two registrations."""
POLL_S = 0.05
PATIENCE_S = 5.0
"""Pages that do not come for so long are not on their way: the driver makes them."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)


class Registration:
    """``memory``, chunk by chunk, in a thread of its own."""

    def __init__(self, memory: memoryview, runtime: HostRuntime, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """``memory`` is writable, begins on a page, and is the caller's to keep mapped no longer than it likes."""
        self._memory = memory[:]
        self._runtime = runtime
        self._address, self._num_bytes = span_of(memory)
        self._chunk_bytes = chunk_bytes
        end = self._address + self._num_bytes
        self._edges = [*range(self._address, end, chunk_bytes), end]
        self.registered_bytes = 0
        """So far, and by this object."""
        self.failure: str | None = None
        """Why no more will be."""
        self._ours: set[int] = set()
        """Numbers of the chunks that are ours to unregister."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-register", daemon=True)
        self._thread.start()

    def cuts(self, address: int, num_bytes: int) -> list[tuple[int, int]]:
        """Offset and size of the pieces of a copy, none of which crosses from one chunk into the next, or in or out."""
        end = address + num_bytes
        inside = self._edges[bisect_right(self._edges, address) : bisect_left(self._edges, end)]
        return [(start - address, stop - start) for start, stop in pairwise([address, *inside, end])]

    def has(self, address: int, num_bytes: int) -> bool:
        """Whether all of this is registered by now, and by this object: who else has done so may undo it."""
        first, last = address - self._address, address + num_bytes - 1 - self._address
        chunks = range(first // self._chunk_bytes, last // self._chunk_bytes + 1)
        return first >= 0 and all(chunk in self._ours for chunk in chunks)

    def let_go(self) -> None:
        """Begin to unregister. No copy is under way, and none begins."""
        self._closing.set()

    def close(self) -> None:
        """Unregister. Safe to call twice."""
        self.let_go()
        self._thread.join()

    # ---- in the thread

    def _run(self) -> None:
        self._register()
        self._closing.wait()
        ours, self._ours = self._ours, set()
        for chunk in ours:
            address = self._address + chunk * self._chunk_bytes
            try:
                self._runtime.unregister(address)
            except RuntimeError as error:
                _log.warning("memory at %#x could not be unregistered: %s", address, error)
        self.registered_bytes = 0
        self._memory.release()

    def _register(self) -> None:
        for chunk, offset in enumerate(range(0, self._num_bytes, self._chunk_bytes)):
            address, num_bytes = self._address + offset, min(self._chunk_bytes, self._num_bytes - offset)
            if not self._wait_for_pages(address, num_bytes):
                break
            try:
                self._runtime.register(address, num_bytes)
            except AlreadyRegisteredError:
                _log.warning("%d bytes of RAM at %#x are registered by somebody else; left to them", num_bytes, address)
                continue
            except RuntimeError as error:
                failure = (
                    f"the accelerator's driver pinned {self.registered_bytes} of {self._num_bytes} bytes of the memory"
                    f" tier and not the next {num_bytes}: {error}; copies with the rest are slower, through a pinned"
                    " buffer. Host RAM is short, not the GPU's: lower memory.capacity, or raise the container's memory"
                    " and ulimit -l"
                )
                _log.warning("%s", failure)
                self.failure = failure
                break
            self._ours.add(chunk)
            self.registered_bytes += num_bytes

    def _wait_for_pages(self, address: int, num_bytes: int) -> bool:
        """Wait until somebody has made the pages, or nobody does; whether to go on."""
        num_resident, patience_s = -1, PATIENCE_S
        while (now_resident := _resident_pages(address, num_bytes)) * mmap.PAGESIZE < num_bytes and patience_s > 0:
            patience_s = PATIENCE_S if now_resident > num_resident else patience_s - POLL_S
            num_resident = now_resident
            if self._closing.wait(POLL_S):
                return False
        return not self._closing.is_set()


def span_of(memory: memoryview) -> tuple[int, int]:
    """Where it begins and how many bytes it is."""
    return (np.frombuffer(memory, dtype=np.uint8).ctypes.data if memory.nbytes else 0), memory.nbytes


def _resident_pages(address: int, num_bytes: int) -> int:
    """How many pages of a mapped range are in RAM; all, where the kernel does not say."""
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    resident = np.empty(num_pages, dtype=np.uint8)
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_void_p(resident.ctypes.data)
    return int((resident & 1).sum()) if _LIBC.mincore(*arguments) == 0 else num_pages
