"""What every file of results says of itself: which commit, when, and on what machine."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]


def provenance() -> dict[str, object]:
    """Commit, date and host; a commit with ``+`` had changes on top of it."""
    commit = _git("rev-parse", "HEAD")
    if commit and _git("status", "--porcelain", "--untracked-files=no", "--", "kvstore", "bench"):
        commit += "+"
    return {
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {
            "machine": platform.machine(),
            "cpu": _cpu(),
            "num_cpus": os.cpu_count(),
            "kernel": platform.release(),
            "libc": " ".join(platform.libc_ver()),
            "python": platform.python_version(),
        },
    }


def build_folder() -> Path:
    """For results and for the files that a benchmark works on: a directory for temporary files is often RAM."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    return folder


def save(path: Path, content: Mapping[str, object]) -> None:
    """Write the results, and say where."""
    keep(path, content)
    print(f"wrote {path}")


def keep(path: Path, content: Mapping[str, object]) -> None:
    """Write what there is so far, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(path)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
