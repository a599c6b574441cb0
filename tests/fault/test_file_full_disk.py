"""A disk that is really full: a small file system that somebody else fills up, and clears."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.config import Config, FileConfig, MemoryConfig
from kvstore.doctor import Verdict, examine
from kvstore.testing.blocks import full_move, layout_of
from kvstore.tiers.base import BlockMove
from kvstore.tiers.file import FileTier
from kvstore.types import Outcome
from tests.file_tiers import ManualClock, opened

LAYOUT = layout_of(1 << 20)
OK, FULL = Outcome.OK, Outcome.FULL


def moves(tier: FileTier, start: int, end: int) -> list[BlockMove]:
    """One block to an extent, so that each asks for space."""
    return [
        replace(full_move(tier, number, LAYOUT), offset_bytes=number * tier.extent_bytes)
        for number in range(start, end)
    ]


def scenario(mount: Path) -> None:
    """CR-015: 24 MiB of disk, a cap of 20 MiB, and 19 MiB that belong to somebody else."""
    stranger = mount / "stranger"
    stranger.write_bytes(bytes(19 << 20))
    clock = ManualClock(0.0)
    with opened(mount / "cache", capacity_bytes=20 << 20, extent_bytes=2 << 20, clock=clock) as tier:
        written = tier.write(moves(tier, 0, 9), 1.0)
        num_written = written.count(OK)
        assert written == [OK] * num_written + [FULL] * (9 - num_written)
        assert 2 <= num_written <= 8
        assert tier.writes_stopped
        assert tier.read(moves(tier, 0, num_written), 1.0) == [OK] * num_written  # reads go on
        assert tier.write(moves(tier, 0, num_written), 1.0) == [OK] * num_written  # as do writes to what is ours
        assert tier.write(moves(tier, 8, 9), 1.0) == [FULL]
        stranger.unlink()
        clock.now_s = 60.0
        assert tier.write(moves(tier, 0, 9), 61.0) == [OK] * 9
        assert [tier.writes_stopped] == [False]
    with opened(mount / "cache", capacity_bytes=20 << 20) as tier:
        assert len(list(tier.scan())) == 9
        assert tier.usage_bytes() <= 20 << 20


def crowded(mount: Path) -> None:
    """A cap of 20 MiB and 14 MiB of disk: what fits is written, as ``kvstore.opening`` opens it."""
    (mount / "stranger").write_bytes(bytes(10 << 20))
    small = layout_of(32 << 10)
    with opened(mount / "cache", capacity_bytes=20 << 20, extent_bytes=None) as tier:
        per_extent = tier.extent_bytes // tier.slot_bytes(small.block_bytes)
        all_moves = [
            replace(
                full_move(tier, number, small),
                offset_bytes=number // per_extent * tier.extent_bytes
                + number % per_extent * tier.slot_bytes(small.block_bytes),
            )
            for number in range(3 * per_extent)
        ]
        written = [tier.write([move], time.monotonic() + 10)[0] for move in all_moves]
        assert set(written) == {OK, FULL}
        assert written.count(OK) * small.block_bytes > 12 << 20
        assert tier.writes_stopped
    with opened(mount / "cache", capacity_bytes=20 << 20) as tier:
        assert len(list(tier.scan())) == written.count(OK)


def examined(mount: Path) -> None:
    """Half a MiB of disk is left, which says nothing of O_DIRECT nor of speed."""
    (mount / "stranger").write_bytes(bytes((24 << 20) - (512 << 10)))
    findings = {found.name: found for found in examine(Config(MemoryConfig(1 << 20), FileConfig((mount,), 1 << 20)))}
    found = findings[f"disk of {mount}"]
    assert (found.verdict, found.advice) == (Verdict.WARN, "free disk space")
    assert [path.name for path in mount.iterdir()] == ["stranger"]


@pytest.mark.parametrize("scene", ["scenario", "crowded", "examined"])
def test_writing_stops_when_the_disk_is_full_and_resumes_when_it_is_not(tmp_path: Path, scene: str) -> None:
    """And the doctor tells a full disk from one that takes no O_DIRECT.

    In a mount namespace of its own, since a limit on a process's files is not the same as a full disk.
    """
    unshare = shutil.which("unshare")
    prefix = [unshare or "", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if unshare is None or subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no mount namespace can be made here: needs unshare, and root or user namespaces")
    script = f'mount -t tmpfs -o size=24m,mode=700 kvstore-test "{tmp_path}" && exec "$@"'
    command = [*prefix, "sh", "-c", script, "sh", sys.executable, "-m", __name__, scene, str(tmp_path)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"


if __name__ == "__main__":
    {"scenario": scenario, "crowded": crowded, "examined": examined}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.write("done\n")
