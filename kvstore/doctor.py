"""What this machine gives the store, tried out rather than read off, and what to do where it gives less."""

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kvstore import machine
from kvstore.config import Config, FileConfig, MemoryConfig
from kvstore.errors import ConfigError
from kvstore.mapping import HUGE_PAGE_BYTES
from kvstore.quantity import format_size
from kvstore.servers import ServerReport, survey
from kvstore.tiers.disk_speed import DiskSpeed, measure
from kvstore.tiers.memory import Arena
from kvstore.tiers.os_files import OsFiles, is_disk_full, refuses_direct

MIN_FILE_DESCRIPTORS = 1024
NUMA_NODES = Path("/sys/devices/system/node")
MEMORY_SHARE = 0.8
"""An arena beyond this share of the memory leaves the engine too little."""

PACKAGES = ("numpy", "xxhash", "redis", "hiredis", "lz4", "zstandard", "torch")

_ASK_TORCH = """
import json, torch
print(json.dumps({
    "version": torch.__version__,
    "built_for": "ROCm " + torch.version.hip if torch.version.hip else "CUDA " + str(torch.version.cuda),
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))
"""
_TORCH_TIMEOUT_S = 60


class Verdict(Enum):
    """What a finding means: nothing to do, slower or smaller than it could be, or the store will not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``advice`` is what to do, where there is something to do."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine(config: Config) -> Iterator[Finding]:
    """Every finding, as it is made."""
    yield _versions()
    yield _memory(config.memory)
    yield _huge_pages(config.memory)
    yield _shared_memory()
    yield _locked_memory(config.memory)
    yield _file_descriptors()
    if config.file is not None:
        yield from map(_disk, config.file.directories)
        yield _disk_space(config.file)
    if config.redis is not None:
        yield from map(_server, survey(config.redis))
    yield _numa()
    yield _accelerator()


def _versions() -> Finding:
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    packages = ", ".join(f"{package} {number}" for package, number in installed.items())
    return _ok("versions", f"Python {platform.python_version()}, Linux {platform.release()}, {packages}")


def _memory(config: MemoryConfig) -> Finding:
    limit_bytes, memory_bytes = machine.memory_limit_bytes(), machine.memory_bytes()
    whose = "the machine has" if limit_bytes is None else "the container's limit is"
    found = f"memory.capacity {format_size(config.capacity_bytes)}, {whose} {format_size(memory_bytes)}"
    if config.capacity_bytes > memory_bytes:
        return _fail("memory", found, "lower memory.capacity, or raise the limit")
    if config.capacity_bytes > MEMORY_SHARE * memory_bytes:
        return _warn("memory", found, "leave the engine more room: lower memory.capacity")
    return _ok("memory", found)


def _huge_pages(config: MemoryConfig) -> Finding:
    free = int(_read("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0"))
    needed = -(-config.capacity_bytes // HUGE_PAGE_BYTES)
    with closing(Arena(HUGE_PAGE_BYTES, prefault=False, may_be_huge=False)) as arena:
        arena.populate(0, HUGE_PAGE_BYTES)
        collapses = arena.collapsed_bytes > 0
    found = f"{free} of 2 MiB are reserved, {needed} needed; the kernel {'makes' if collapses else 'makes no'} others"
    if free >= needed or collapses:
        return _ok("huge pages", found)
    advice = (
        f"without them file I/O runs at half its speed: sysctl vm.nr_hugepages={needed}, or Linux 6.1 or newer with"
        " /sys/kernel/mm/transparent_hugepage/shmem_enabled on anything but deny"
    )
    return _warn("huge pages", found, advice)


def _shared_memory() -> Finding:
    try:
        mount = os.statvfs("/dev/shm")
    except OSError as error:
        return _warn("/dev/shm", str(error), "engines with several workers need it: mount a tmpfs there")
    size_bytes = mount.f_blocks * mount.f_frsize
    # The arena is a memfd and needs none of it; the 64 MiB that container runtimes give are too little for NCCL.
    if size_bytes > 64 << 20:
        return _ok("/dev/shm", format_size(size_bytes))
    advice = "enough for the store, too little for engines with several workers: start containers with --shm-size=1g"
    return _warn("/dev/shm", format_size(size_bytes), advice)


def _locked_memory(config: MemoryConfig) -> Finding:
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit_bytes == resource.RLIM_INFINITY:
        return _ok("memlock", "unlimited")
    if os.geteuid() == 0:
        return _ok("memlock", f"{format_size(limit_bytes)}, which does not bind root")
    if limit_bytes >= config.capacity_bytes:
        return _ok("memlock", format_size(limit_bytes))
    advice = "an accelerator may refuse to pin the arena: ulimit -l unlimited; for containers --ulimit memlock=-1"
    return _warn("memlock", format_size(limit_bytes), advice)


def _file_descriptors() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit >= MIN_FILE_DESCRIPTORS:
        return _ok("file descriptors", str(limit))
    return _warn("file descriptors", str(limit), f"ulimit -n {MIN_FILE_DESCRIPTORS}")


def _disk(directory: Path) -> Finding:
    """Write and read past the page cache, in a file that has no name where the file system allows."""
    name = f"disk of {directory}"
    try:
        file = tempfile.TemporaryFile(dir=machine.existing(directory), prefix=".kvstore-doctor-")  # noqa: SIM115 - closed below
    except OSError as error:
        return _fail(name, f"no file can be made: {error.strerror}", "let this user write there")
    with file:
        try:
            speed = _disk_speed(f"/proc/self/fd/{file.fileno()}")
        except OSError as error:
            if is_disk_full(error):
                return _warn(name, f"too full to be tried: {error.strerror}", "free disk space")
            if not refuses_direct(error):
                return _fail(name, str(error.strerror), "do not use this disk")
            advice = "blocks go through the page cache, at 15 times the CPU: use a local ext4 or xfs"
            return _warn(name, f"O_DIRECT is refused: {error.strerror}", advice)
    found = f"O_DIRECT works; one thread {speed}"
    if speed.is_slow:
        return _warn(name, found, "recomputing is likely to be faster than loading from it: use a local NVMe")
    return _ok(name, found)


def _disk_speed(path: str) -> DiskSpeed:
    fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        return measure(OsFiles(), fd, time.monotonic)
    finally:
        os.close(fd)


def _disk_space(config: FileConfig) -> Finding:
    room_bytes = sum(machine.room_bytes(group) for group in machine.by_file_system(config.directories))
    found = f"file.capacity {format_size(config.capacity_bytes)}, room for {format_size(room_bytes)}"
    try:
        config.validate_against_machine()
    except ConfigError as error:
        return _fail("disk space", found, str(error))
    if config.capacity_bytes > room_bytes:
        return _warn("disk space", found, "free disk space or lower file.capacity: a full disk stops writes, not reads")
    return _ok("disk space", found)


def _server(report: ServerReport) -> Finding:
    name = f"redis at {report.address}"
    if report.error:
        return _fail(name, report.error, "check redis.url, the login and the network")
    limit = format_size(report.max_bytes) if report.max_bytes else "no limit"
    found = f"{report.version}, {format_size(report.used_bytes)} used, {limit}, {report.eviction}"
    return _warn(name, found, report.advice) if report.advice else _ok(name, found)


def _numa() -> Finding:
    num_nodes = len(list(NUMA_NODES.glob("node[0-9]*")))
    if num_nodes <= 1:
        return _ok("NUMA", "one node")
    advice = "keep the process on the accelerator's node: numactl --cpunodebind=N --membind=N"
    return _warn("NUMA", f"{num_nodes} nodes", advice)


def _accelerator() -> Finding:
    """Devices by their nodes; whether torch can use them by asking it in a process of its own."""
    nodes = [str(path) for pattern in ("nvidia[0-9]*", "kfd") for path in sorted(Path("/dev").glob(pattern))]
    if not nodes:
        return _ok("accelerator", "none: blocks move between RAM and CPU tensors")
    devices = ", ".join(nodes)
    if find_spec("torch") is None:
        return _warn("accelerator", f"{devices}; torch is not installed", "install the torch built for this device")
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return _warn("accelerator", f"{devices}; torch does not start: {error}", "reinstall torch")
    answer = json.loads(output)
    found = f"{devices}; torch {answer['version']} for {answer['built_for']} sees {answer['devices'] or 'none of them'}"
    if answer["devices"]:
        return _ok("accelerator", found)
    advice = "install a driver and a torch that fit each other, and let this user open the devices"
    return _warn("accelerator", found, advice)


def _ok(name: str, found: str) -> Finding:
    return Finding(name, Verdict.OK, found)


def _warn(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.WARN, found, advice)


def _fail(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.FAIL, found, advice)


def _read(path: str, otherwise: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return otherwise
