"""The peers, and a virtual environment for each: from public packages, at the versions in its file of requirements."""

import subprocess
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.peers.side import SideError
from bench.report import build_folder

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
"""With what it needs, which depends on the index: CONTRIBUTING.md says how to get the build for CPUs."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What to install, and which module does which work."""

    name: str
    distribution: str
    modules: Mapping[str, str]
    needs_torch: bool

    @property
    def requirements(self) -> Path:
        return HERE / f"{self.name.lower().partition(' ')[0]}.requirements.txt"


PEERS = (
    Peer(
        "LMCache",
        "lmcache",
        {
            "memory": "bench.peers.lmcache",
            "tables": "bench.peers.lmcache",
            "daemon": "bench.peers.lmcache_server",
            "daemon tables": "bench.peers.lmcache_server",
            "file": "bench.peers.lmcache_adapters",
            "redis": "bench.peers.lmcache_adapters",
        },
        needs_torch=True,
    ),
    Peer(
        "Mooncake Store",
        "mooncake-transfer-engine-non-cuda",
        dict.fromkeys(("memory", "daemon", "tables"), "bench.peers.mooncake"),
        needs_torch=False,
    ),
    Peer(
        "AIBrix",
        "aibrix-kvcache",
        dict.fromkeys(("memory", "tables"), "bench.peers.aibrix"),
        needs_torch=True,
    ),
)


def python_of(peer: Peer) -> Path:
    """Its interpreter; makes the environment first where there is none. Raises ``SideError`` if that cannot be done."""
    folder = build_folder() / "peers" / peer.requirements.name.partition(".")[0]
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = peer.requirements.read_text()
    if not ready.exists() or ready.read_text() != wanted:
        print(f"installing {peer.name} into {folder}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        if peer.needs_torch:
            _run(python, "-m", "pip", "install", "--quiet", TORCH)
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(peer.requirements))
        for module in sorted(set(peer.modules.values())):
            _run(python, "-c", f"import {module}")
        ready.write_text(wanted)
    return python


def version_of(peer: Peer) -> str:
    """The one that is pinned."""
    for line in peer.requirements.read_text().splitlines():
        name, _, version = line.partition("==")
        if name == peer.distribution:
            return version
    raise ValueError(f"{peer.requirements} does not pin {peer.distribution}")


def _run(python: Path, *arguments: str) -> None:
    done = subprocess.run([python, *arguments], cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SideError(f"cannot be installed: {last[:200]}")
