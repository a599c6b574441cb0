"""The file tier's system calls, with faults where a test wants them: errors, short or torn moves, flips, stalls.

    files = FaultyFiles()
    fault = files.inject(Fault("pwritev", fails(errno.EIO), file="blocks", skip=3))
    tier = FileTier([directory], capacity_bytes, files=files)

The fourth write of blocks then fails, once. ``fault.num_hits`` says whether it came to that. A new kind of fault is a
function of a ``Call``.
"""

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.testing.blocks import aligned_buffer
from kvstore.tiers.os_files import Buffers, OsFiles


@dataclass(slots=True)
class Call:
    """A system call that is about to be made."""

    name: str
    """That of the method of ``OsFiles``."""
    path: Path
    flags: int
    """The file was opened with."""
    proceed: Callable[..., Any]
    """Makes the call; for ``preadv`` and ``pwritev`` with the buffers it is given."""
    buffers: Buffers = ()
    offset: int = 0


Effect = Callable[[Call], Any]
"""Does what the call would have done, or something else, and returns what the call shall return."""


@dataclass(eq=False, slots=True)
class Fault:
    """What goes wrong, and in which calls: of those that fit, ``times`` (None: all) after the first ``skip``."""

    call: str
    effect: Effect
    file: str = ""
    """The name of a file; empty: any."""
    flags: int = 0
    """Only where the file was opened with all of these."""
    skip: int = 0
    times: int | None = 1
    probability: float = 1.0
    """Of a call that fits; drawn from the seed of the ``FaultyFiles``."""
    where: Callable[[Call], bool] | None = None
    """Looks closer at a call that fits."""
    num_hits: int = 0

    def fits(self, call: Call) -> bool:
        """Whether the call is of the kind that goes wrong."""
        is_named = self.call == call.name and self.file in ("", call.path.name)
        return is_named and call.flags & self.flags == self.flags and (self.where is None or self.where(call))


class FaultyFiles(OsFiles):
    """Real files with faults. Thread-safe."""

    def __init__(self, seed: int = 0) -> None:
        self.open_files: dict[int, tuple[Path, int]] = {}
        """Path and flags of every descriptor that is open."""
        self._faults: list[Fault] = []
        self._random = random.Random(seed)
        self._guard = threading.Lock()

    def inject(self, fault: Fault) -> Fault:
        """Let it happen from now on."""
        self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """No faults from now on."""
        self._faults.clear()

    def open(self, path: Path, flags: int) -> int:
        """As ``OsFiles``."""
        fd: int = self._make(Call("open", path, flags, lambda: OsFiles.open(self, path, flags)))
        self.open_files[fd] = (path, flags)
        return fd

    def close(self, fd: int) -> None:
        """As ``OsFiles``, without faults."""
        del self.open_files[fd]
        OsFiles.close(self, fd)

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """As ``OsFiles``."""
        num_bytes: int = self._make(
            self._call("preadv", fd, lambda some: OsFiles.preadv(self, fd, some, offset), buffers, offset)
        )
        return num_bytes

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """As ``OsFiles``."""
        num_bytes: int = self._make(
            self._call("pwritev", fd, lambda some: OsFiles.pwritev(self, fd, some, offset), buffers, offset)
        )
        return num_bytes

    def preallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """As ``OsFiles``."""
        self._make(
            self._call("preallocate", fd, lambda: OsFiles.preallocate(self, fd, offset, num_bytes), offset=offset)
        )

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        """As ``OsFiles``."""
        self._make(self._call("punch", fd, lambda: OsFiles.punch(self, fd, offset, num_bytes), offset=offset))

    def truncate(self, fd: int, num_bytes: int) -> None:
        """As ``OsFiles``."""
        self._make(self._call("truncate", fd, lambda: OsFiles.truncate(self, fd, num_bytes)))

    def stat(self, fd: int) -> os.stat_result:
        """As ``OsFiles``."""
        found: os.stat_result = self._make(self._call("stat", fd, lambda: OsFiles.stat(self, fd)))
        return found

    def sync(self, fd: int) -> None:
        """As ``OsFiles``."""
        self._make(self._call("sync", fd, lambda: OsFiles.sync(self, fd)))

    def _call(self, name: str, fd: int, proceed: Callable[..., Any], buffers: Buffers = (), offset: int = 0) -> Call:
        path, flags = self.open_files[fd]
        return Call(name, path, flags, proceed, buffers, offset)

    def _make(self, call: Call) -> Any:
        fault = self._drawn(call)
        if fault is not None:
            return fault.effect(call)
        return _proceed(call)

    def _drawn(self, call: Call) -> Fault | None:
        """The first fault that strikes now."""
        with self._guard:
            for fault in self._faults:
                if not fault.fits(call) or fault.times == fault.num_hits:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                elif fault.probability == 1.0 or self._random.random() < fault.probability:
                    fault.num_hits += 1
                    return fault
        return None


def fails(number: int) -> Effect:
    """The call fails with this ``errno``, having done nothing."""

    def effect(call: Call) -> Any:
        raise OSError(number, os.strerror(number), str(call.path))

    return effect


def moves_only(num_bytes: int) -> Effect:
    """A short read or write, which says so; in whole pages where O_DIRECT is used."""
    return lambda call: call.proceed(_head(call.buffers, num_bytes))


def tears(num_bytes: int) -> Effect:
    """A write of which only the start reaches the file, and which says that all is well."""

    def effect(call: Call) -> int:
        call.proceed(_head(call.buffers, num_bytes))
        return sum(map(len, call.buffers))

    return effect


def flips(bit: int) -> Effect:
    """A read or write in which this bit of the bytes, counted from their start, is the wrong way round."""

    def effect(call: Call) -> Any:
        if call.name == "pwritev":
            whole = bytearray(b"".join(call.buffers))
            if bit < 8 * len(whole):
                whole[bit // 8] ^= 1 << bit % 8
            return call.proceed([_on_pages(whole)])
        num_bytes = call.proceed(call.buffers)
        position = bit // 8
        for buffer in call.buffers:
            if position < len(buffer):
                memoryview(buffer)[position] ^= 1 << bit % 8
                break
            position -= len(buffer)
        return num_bytes

    return effect


def stalls(has_begun: threading.Event, until: threading.Event) -> Effect:
    """The call says that it ``has_begun``, then hangs ``until`` it is let go."""

    def effect(call: Call) -> Any:
        has_begun.set()
        until.wait()
        return _proceed(call)

    return effect


def _proceed(call: Call) -> Any:
    return call.proceed(call.buffers) if call.name in ("preadv", "pwritev") else call.proceed()


def _head(buffers: Buffers, num_bytes: int) -> list[memoryview]:
    """The first ``num_bytes`` of ``buffers``."""
    head = []
    for buffer in buffers:
        head.append(memoryview(buffer)[:num_bytes])
        num_bytes -= len(head[-1])
    return [part for part in head if len(part)]


def _on_pages(data: bytearray) -> memoryview:
    """A copy that O_DIRECT takes."""
    copy = aligned_buffer(len(data))[: len(data)]
    copy[:] = data
    return copy
