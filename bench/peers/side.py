"""A side of the comparison: a process of its own that does a round of work whenever it is told to.

Every side, ours too, speaks lines of JSON. It is started with its task and answers with what it can do, for each op the
ways to do it. Then it does one round for each ``[op, way]`` that it reads, and answers with the seconds that count. It
ends when its input does; what goes wrong it answers as ``{"error": why}`` before it ends.
"""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from bench.pages import Bytes
from bench.turns import Work

ROOT = Path(__file__).parents[2]
OUR_PYTHON = Path(sys.executable)
END_TIMEOUT_S = 10.0
TOKENS_PER_BLOCK = 16
INDEX_BLOCK_BYTES = 4096
"""Of blocks that are only looked up."""

Ways = Mapping[str, Work]
"""How a side does something: the fastest way that it has counts."""
Rig = Callable[["Task"], AbstractContextManager[Mapping[str, Ways]]]
"""Sets up for a task, and yields the ways of each op."""


class SideError(Exception):
    """A side cannot do its work."""


@dataclass(frozen=True, slots=True)
class Task:
    """What all sides do at the same time."""

    work: str
    block_bytes: int
    num_blocks: int
    folder: str
    """For files, on the disk that is measured; each side has its own."""
    redis_url: str


class Side:
    """The process, as its parent sees it."""

    def __init__(self, python: Path, module: str, task: Task, log: IO[str]) -> None:
        """Raises ``SideError`` with the reason if it cannot do the task."""
        self.failure = ""
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(asdict(task))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            self.ways: dict[str, list[str]] = self._answer()
        except SideError:
            self.close()
            raise

    def round(self, op: str, way: str) -> float:
        """Do it once; returns the seconds that count, or NaN when it fails or did before."""
        if self.failure:
            return math.nan
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([op, way]) + "\n")
            self._process.stdin.flush()
            return float(self._answer())
        except (SideError, BrokenPipeError) as error:
            self.failure = f"{op}: {error}"
            return math.nan

    def close(self) -> None:
        """Let it end, and end whatever it left running."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process ended"}
        if isinstance(answer, dict) and "error" in answer:
            raise SideError(answer["error"])
        return answer


def serve(rigs: Mapping[str, Rig]) -> None:
    """What a side's own process does."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print, too
    task = Task(**json.loads(sys.argv[1]))
    try:
        with rigs[task.work](task) as ops:
            print(json.dumps({op: list(ways) for op, ways in ops.items()}), file=answers)
            for line in sys.stdin:
                op, way = json.loads(line)
                print(_seconds(ops[op][way]), file=answers)
    except (Exception, SystemExit) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}), file=answers)
        raise


def counted(work: Callable[[], object], before: Callable[[], object], after: Callable[[], object] = bool) -> Work:
    """A round of which only ``work`` counts."""

    def round_() -> float:
        before()
        began_s = time.perf_counter()
        work()
        took_s = time.perf_counter() - began_s
        after()
        return took_s

    return round_


def require_equal(loaded: Bytes, computed: Bytes) -> None:
    """What came back is what was given."""
    if not np.array_equal(loaded, computed):
        raise SystemExit("other bytes came back than were given")


def free_port() -> int:
    """On loopback, for a server that wants to be told one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _seconds(work: Work) -> float:
    began_s = time.perf_counter()
    counted_s = work()
    return time.perf_counter() - began_s if counted_s is None else counted_s
