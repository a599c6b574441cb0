"""An engine process that does what a test says, one line at a time: what can be killed, stopped and woken.

python -m tests.engine_process SOCKET [ENGINE INDEX NUM_RANKS]     a JSON list in, a JSON value out
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.client.rank_client import RankClient
from kvstore.client.store_client import StoreClient
from kvstore.lease import ReadLease, WriteLease
from kvstore.types import Rank
from tests.real_stores import IDENTITY, LAYOUT, chain_of, content, get, put


class Engine:
    """What can be said to it."""

    def __init__(self, socket: Path, rank: Rank | None) -> None:
        self.client = StoreClient(socket, budget_s=5.0) if rank is None else RankClient(rank, socket, budget_s=5.0)
        self.client.wait_connected(20.0)
        self.ns = self.client.open_namespace(IDENTITY, LAYOUT)
        self.write: WriteLease | None = None
        self.read: ReadLease | None = None

    def put(self, number: int, num_blocks: int) -> None:
        put(self.client, self.ns, chain_of(self.ns, num_blocks, number))

    def get(self, number: int, num_blocks: int) -> int:
        return get(self.client, chain_of(self.ns, num_blocks, number))

    def reserve(self, num_blocks: int) -> int:
        self.write = self.client.reserve(self.ns, num_blocks)
        return self.write.num_blocks

    def reserve_stripes(self, number: int, num_blocks: int) -> int:
        assert isinstance(self.client, RankClient)
        self.write = self.client.reserve_stripes(self.ns, chain_of(self.ns, num_blocks, number), None)
        return self.write.num_blocks

    def scribble(self) -> None:
        assert self.write is not None
        for view in self.write.views:
            view[:] = b"\xee" * len(view)

    def commit(self, number: int) -> int:
        assert self.write is not None
        chain = chain_of(self.ns, self.write.num_blocks, number)
        return len(self.client.commit(self.write, chain, None).slots)

    def abort(self) -> None:
        assert self.write is not None
        self.client.abort(self.write)
        self.client.poll()

    def pin(self, number: int, num_blocks: int) -> int:
        self.read = self.client.pin(chain_of(self.ns, num_blocks, number))
        return self.read.num_blocks

    def read_pinned(self) -> dict[str, bool]:
        """Whether the bytes are right, and whether the lease says that they count."""
        assert self.read is not None
        right = all(view == content(key) for key, view in zip(self.read.keys, self.read.views, strict=True))
        return {"right": right, "held": self.read.still_held()}

    def release(self) -> None:
        assert self.read is not None
        self.client.release(self.read)

    def poll(self) -> None:
        self.client.poll()

    def wait_connected(self) -> bool:
        return self.client.wait_connected(20.0)

    def lookup_ms(self) -> float:
        """How long the slowest of some calls took, whatever they answered."""
        slowest_s = 0.0
        for _ in range(20):
            began_s = time.monotonic()
            self.client.lookup(chain_of(self.ns, 4))
            with self.client.pin(chain_of(self.ns, 4)):
                pass
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        return slowest_s * 1000


class EngineProcess:
    """An ``Engine`` in a process of its own, from this side."""

    def __init__(self, socket: Path, rank: Rank | None) -> None:
        command = [sys.executable, "-m", "tests.engine_process", str(socket)]
        command += [rank.engine, str(rank.index), str(rank.num_ranks)] if rank else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.answer() == "ready"

    def do(self, what: str, *arguments: object) -> Any:
        self.begin(what, *arguments)
        return self.answer()

    def begin(self, what: str, *arguments: object) -> None:
        """Say it, and do not wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def answer(self) -> Any:
        """Of the earliest thing said that has not been answered."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def engine_process(socket: Path, rank: Rank | None = None) -> Iterator[EngineProcess]:
    engine = EngineProcess(socket, rank)
    try:
        yield engine
    finally:
        engine.process.kill()
        engine.process.communicate()


def main() -> None:
    socket, *rank = sys.argv[1:]
    engine = Engine(Path(socket), Rank(rank[0], int(rank[1]), int(rank[2])) if rank else None)
    _say("ready")
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        _say(getattr(engine, what)(*arguments))


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
