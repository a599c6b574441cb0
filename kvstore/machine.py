"""What this machine gives to a process: memory under every limit, and room on file systems."""

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")


def memory_bytes(root: Path = _ROOT) -> int:
    """The RAM that this process may use: the machine's, or the least limit of the control groups around it."""
    return min([_ram_bytes(root), *_group_limits_bytes(root)])


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """The least memory limit of the control groups around this process, below the machine's RAM; None if none is."""
    limits_bytes = [limit for limit in _group_limits_bytes(root) if limit < _ram_bytes(root)]
    return min(limits_bytes, default=None)


def existing(path: Path) -> Path:
    """``path`` or the nearest directory above it that exists and may be seen."""
    return next(candidate for candidate in (path, *path.absolute().parents) if os.path.exists(candidate))


def by_file_system(directories: Sequence[Path]) -> list[list[Path]]:
    """``directories``, which need not exist yet, grouped by the file system they lie on."""
    groups: dict[int, list[Path]] = {}
    for directory in directories:
        groups.setdefault(existing(directory).stat().st_dev, []).append(directory)
    return list(groups.values())


def room_bytes(directories: Sequence[Path]) -> int:
    """What ``directories``, all on one file system, can hold: what is free there, and what their files have already."""
    free = os.statvfs(existing(directories[0]))
    return free.f_bavail * free.f_frsize + sum(map(_held_bytes, directories))


def _held_bytes(directory: Path) -> int:
    """What the files in ``directory`` take. Nobody owns it yet: one may be renamed or go while it is looked at."""
    held_bytes = 0
    if os.path.isdir(directory) and os.access(directory, os.R_OK | os.X_OK):
        for entry in os.scandir(directory):
            with suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    held_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
    return held_bytes


def default_socket() -> Path:
    """Where this user's sidecar listens if nothing else is said: a directory that nobody else can write to."""
    if os.geteuid() == 0:
        return _ROOT / "run" / "kvstore" / "kvstore.sock"
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/kvstore-{os.geteuid()}"
    return Path(runtime) / "kvstore" / "kvstore.sock"


def is_served(socket: Path) -> bool:
    """Whether a sidecar is running that listens at ``socket``: it holds the lock beside it."""
    try:
        with socket.with_name(socket.name + ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def disk_bytes(directory: Path) -> int:
    """The size of the file system under ``directory``, without what it reserves for root."""
    found = os.statvfs(existing(directory))
    return (found.f_blocks - found.f_bfree + found.f_bavail) * found.f_frsize


def _ram_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemTotal":
            return int(amount.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemTotal")


def _group_limits_bytes(root: Path) -> list[int]:
    """Limits from this process's control group up to the root, versions 1 and 2."""
    limits_bytes = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, file_name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, file_name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inside = mount / group.strip("/")
        # in a container the group's own path is often not there, and its limit lies at the mount
        for directory in (inside, *inside.parents):
            limit = directory / file_name
            if limit.is_file() and limit.read_text().strip() != "max":
                limits_bytes.append(int(limit.read_text()))
            if directory == mount:
                break
    return limits_bytes
