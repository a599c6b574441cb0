"""The soak: some clients against a host full of faults, for as long as it is told; at the end nothing may be left.

make soak                       ten minutes; what was done goes to build/soak.json
make soak ARGS="--seconds 60 --seed 7"
"""

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.report import build_folder, provenance, save
from kvstore.testing.redis_proxy import (
    CLUSTERDOWN,
    DROP,
    LOADING,
    MOVED,
    OOM,
    READONLY,
    Alter,
    Cut,
    Fault,
    Hold,
    RedisProxy,
)
from kvstore.testing.sidecar import Sidecar, eventually
from kvstore.testing.valkey import ValkeyServer

NUM_CLIENTS = 4
LEASE_S = 1.0
ACTS_OF_A_HOST = 3
"""After so much has happened to clients the host is killed, and another one starts over the same files."""
MAX_GROWTH_BYTES = 48 << 20
"""Of the host's own memory: pools, tables and buffers that it keeps once it has made them."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process has of what it must give back."""

    num_descriptors: int
    num_threads: int
    own_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        own_bytes = int(fields["RssAnon"].split()[0]) * 1024
        return cls(len(list(Path(f"/proc/{pid}/fd").iterdir())), int(fields["Threads"]), own_bytes)


class Crowd:
    """The clients, and what happens to them."""

    def __init__(self, socket: Path, seed: int) -> None:
        self._socket = socket
        self._random = random.Random(seed)
        self._seeds = iter(range(seed * 1000, (seed + 1) * 1000))
        self._clients = [self._start() for _ in range(NUM_CLIENTS)]
        self.counts: Counter[str] = Counter()

    def act(self) -> None:
        """Something happens to somebody."""
        index = self._random.randrange(NUM_CLIENTS)
        client = self._clients[index]
        match self._random.choice(("kill", "kill", "stop", "leave", "stop and kill")):
            case "kill":
                client.kill()
                self._replace(index, "killed")
            case "stop":
                self._stop(client, self._random.choice((0.3, 2 * LEASE_S)))
                self.counts["stopped"] += 1
            case "leave":
                self._end(client)
                self._replace(index, "left")
            case "stop and kill":
                self._stop(client, 1.5 * LEASE_S)
                client.kill()
                self._replace(index, "killed")

    def end(self) -> None:
        """Everybody goes home."""
        for client in self._clients:
            self._end(client)

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.soak.client", str(self._socket), str(next(self._seeds))]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _replace(self, index: int, why: str) -> None:
        self._clients[index].communicate()
        self._clients[index] = self._start()
        self.counts[why] += 1

    def _stop(self, client: subprocess.Popen[str], seconds: float) -> None:
        client.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        client.send_signal(signal.SIGCONT)

    def _end(self, client: subprocess.Popen[str]) -> None:
        output, _ = client.communicate()  # which ends its standard input
        if client.returncode != 0:
            raise SystemExit(f"a client failed with status {client.returncode}")
        self.counts.update(json.loads(output))


def flipped(reply: bytes) -> bytes:
    """A reply with one wrong byte in its middle."""
    middle = len(reply) // 2
    return reply[:middle] + bytes([reply[middle] ^ 1]) + reply[middle + 1 :] if len(reply) > 100 else reply


def trouble_redis(proxy: RedisProxy, seed: int, over: threading.Event) -> None:
    """In a thread: what networks and servers do on bad days."""
    dice = random.Random(seed)
    while not over.wait(0.1):
        held = Hold(threading.Event())
        faults: tuple[Fault, ...] = (OOM, LOADING, READONLY, MOVED, CLUSTERDOWN, DROP, Cut(50), Alter(flipped), held)
        fault = dice.choice(faults)
        proxy.inject(fault, dice.choice((b"GET", b"SET", b"EXISTS", b"PEXPIRE")))
        if fault is held:
            threading.Timer(dice.choice((0.2, 2.0)), held.release.set).start()


def soak(seconds: float, seed: int, directory: Path) -> Mapping[str, int]:
    """Run it; returns what was done. Raises AssertionError or SystemExit for what must not be."""
    over = threading.Event()
    with ValkeyServer(maxmemory="64mb", maxmemory_policy="allkeys-lru") as server, RedisProxy(server.port) as proxy:
        settings = {
            "MEMORY_CAPACITY": "2MiB",
            "FILE_DIRECTORIES": str(directory / "kv"),
            "FILE_CAPACITY": "64MiB",
            "REDIS_URL": proxy.url,
            "SERVER_LEASE": f"{int(LEASE_S * 1000)}ms",
        }
        with Sidecar([sys.executable, "-m", "tests.soak.host", str(seed)], **settings) as served:
            before = warmed_up(served, seed)
            troubles = threading.Thread(target=trouble_redis, args=(proxy, seed, over))
            troubles.start()
            crowd = Crowd(served.socket, seed)
            try:
                until_s = time.monotonic() + seconds
                for number in itertools.count(1):
                    time.sleep(0.5)
                    crowd.act()
                    assert served.process.poll() is None, served.log.read_text()
                    if number % ACTS_OF_A_HOST == 0:
                        served.restart()
                        crowd.counts["hosts killed"] += 1
                    if time.monotonic() > until_s:
                        break
                crowd.end()
            finally:
                over.set()
                troubles.join()
            served.send(signal.SIGUSR1)
            require_nothing_left(served, before)
    return crowd.counts


def warmed_up(served: Sidecar, seed: int) -> Footprint:
    """Of the host when it has opened whatever it keeps."""
    crowd = Crowd(served.socket, seed + 1)
    time.sleep(1.0)
    crowd.end()
    eventually(lambda: not served.stats().clients)
    return Footprint.of(served.process.pid)


def require_nothing_left(served: Sidecar, before: Footprint) -> None:
    """Pins, leases, slots, descriptors, threads and memory are back where they began."""
    eventually(lambda: not served.stats().clients)
    for name in ("kvstore_pinned_blocks", "kvstore_quarantined_slots", "kvstore_in_flight_bytes"):
        eventually(lambda: served.metric(name, "memory") == 0)  # noqa: B023 - used up within the iteration
    for tier in ("file", "redis"):
        eventually(lambda: served.metric("kvstore_in_flight_bytes", tier) == 0)  # noqa: B023 - same as above
    with served.admin() as admin:
        assert admin.check() == ""
        admin.evict(1 << 40)
    assert served.metric("kvstore_used_bytes", "memory") == 0

    def is_back() -> bool:
        after = Footprint.of(served.process.pid)
        return after.num_descriptors <= before.num_descriptors and after.num_threads <= before.num_threads

    eventually(is_back)
    after = Footprint.of(served.process.pid)
    assert after.own_bytes <= before.own_bytes + MAX_GROWTH_BYTES, (before, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=build_folder() / "soak.json")
    arguments = parser.parse_args()
    head = provenance()
    with tempfile.TemporaryDirectory(prefix="kvstore-soak-", dir=build_folder()) as directory:
        counts = soak(arguments.seconds, arguments.seed, Path(directory))
    sys.stdout.write(json.dumps(counts, indent=1) + "\n")
    save(arguments.output, {**head, "seconds": arguments.seconds, "seed": arguments.seed, "counts": counts})


if __name__ == "__main__":
    main()
