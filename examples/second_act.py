"""The second act of the demo: two engine processes share a sidecar, and go on when it is killed.

One answers the first question cold, the other from what the first computed. Then the sidecar is killed, and both answer
the second question on their own.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvstore.client.store_client import StoreClient
from kvstore.testing.sidecar import Sidecar

ROOT = Path(__file__).parents[1]
STAGES = ("sidecar-first", "sidecar-second")


def perform(command: Callable[[str, Path], list[str]]) -> None:
    """Run both engines; ``command`` is what to start, given the name of a stage and the sidecar's socket."""
    with Sidecar(MEMORY_CAPACITY="1GiB") as served:
        engines = [_first_answer(command(stage, served.socket)) for stage in STAGES]
        served.kill()
        for engine in engines:
            engine.communicate(b"go on\n")
        if any(engine.returncode for engine in engines):
            sys.exit("an engine did not outlive the sidecar")


def _first_answer(command: list[str]) -> subprocess.Popen[bytes]:
    """An engine that has answered the first question."""
    engine = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    engine.stdout.readline()
    return engine


def connected(socket: Path) -> StoreClient:
    """In an engine's process: a client of the sidecar."""
    client = StoreClient(socket, budget_s=1.0)
    if not client.wait_connected(20.0):
        sys.exit(f"no sidecar at {socket}")
    return client


def await_the_kill() -> None:
    """In an engine's process: say that the first answer is complete, and wait for the word to go on."""
    sys.stdout.write("answered\n")
    sys.stdout.flush()
    sys.stdin.readline()
