"""One client of the soak: does at random whatever an engine may do, and checks every byte that counts.

python -m tests.soak.client SOCKET SEED     until its standard input ends; then says how much it did, as JSON
"""

import json
import random
import select
import sys
import time
from collections import Counter
from pathlib import Path

from kvstore.client.store_client import StoreClient
from kvstore.lease import LeaseState, ReadLease, WriteLease
from kvstore.types import BlockKey, Outcome, Request
from tests.real_stores import IDENTITY, LAYOUT, chain_of, content

NUM_CHAINS = 12
MAX_BLOCKS = 12
CONTENT: dict[BlockKey, bytes] = {}
"""The right bytes by key: making them takes longer than anything that is tested."""


class Client:
    """One engine process and its habits."""

    def __init__(self, socket: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = StoreClient(socket, budget_s=0.5)
        self.ns = self.store.open_namespace(IDENTITY, LAYOUT)
        self.counts: Counter[str] = Counter()
        self.reads: list[ReadLease] = []
        self.quarantined: list[WriteLease] = []
        self.habits = (
            [self.put] * 6
            + [self.get] * 8
            + [self.hold_on, self.let_go] * 2
            + [self.scribble_and_abort, self.quarantine, self.reclaim, self.commit_a_part, self.commit_too_late]
            + [self.lend, self.borrow] * 2
        )

    def step(self) -> None:
        self.random.choice(self.habits)()
        self.store.poll()

    def chain(self) -> list[BlockKey]:
        return chain_of(self.ns, self.random.randint(1, MAX_BLOCKS), self.random.randrange(NUM_CHAINS))

    def right(self, key: BlockKey) -> bytes:
        if key not in CONTENT:
            CONTENT[key] = content(key)
        return CONTENT[key]

    def put(self) -> None:
        chain = self.chain()
        self.store.arrive(Request("r", time.time(), self.ns.digest, 16 * len(chain)), chain)
        with self.store.reserve(self.ns, len(chain)) as lease:
            keys = chain[: lease.num_blocks]
            for key, view in zip(keys, lease.views, strict=True):
                view[:] = self.right(key)
            if keys:
                self.store.commit(lease, keys, None)
                self.counts["stored"] += len(keys)

    def get(self) -> None:
        chain = self.chain()
        prefetch = self.store.prefetch(chain, time.monotonic() + self.random.choice((0.05, 0.5)))
        while not prefetch.done:
            self.store.wait(0.05)
            self.store.poll()
        with self.store.pin(chain) as lease:
            self.check(lease)

    def check(self, lease: ReadLease) -> None:
        """Compare, then ask whether it counts."""
        right = [view == self.right(key) for key, view in zip(lease.keys, lease.views, strict=True)]
        if not lease.still_held():
            self.counts["lost leases"] += 1
        elif not all(right):
            raise SystemExit(f"wrong bytes in block {right.index(False)} of {len(right)}")
        else:
            self.counts["loaded"] += len(right)

    def hold_on(self) -> None:
        if len(self.reads) < 4:
            self.reads.append(self.store.pin(self.chain()))

    def let_go(self) -> None:
        if self.reads:
            lease = self.reads.pop(self.random.randrange(len(self.reads)))
            self.check(lease)
            self.store.release(lease)

    def scribble_and_abort(self) -> None:
        with self.store.reserve(self.ns, self.random.randint(1, 4)) as lease:
            self.scribble(lease)
        self.counts["aborted"] += lease.num_blocks

    def scribble(self, lease: WriteLease) -> None:
        for view in lease.views:
            view[:] = b"\xee" * len(view)

    def quarantine(self) -> None:
        if len(self.quarantined) < 2:
            lease = self.store.reserve(self.ns, self.random.randint(1, 3))
            self.store.quarantine(lease)
            self.quarantined.append(lease)

    def reclaim(self) -> None:
        if self.quarantined:
            lease = self.quarantined.pop()
            self.scribble(lease)
            self.store.reclaim(lease)

    def commit_a_part(self) -> None:
        chain = self.chain()
        with self.store.reserve(self.ns, len(chain)) as lease:
            part = chain[: lease.num_blocks // 2]
            for key, view in zip(part, lease.views, strict=False):
                view[:] = self.right(key)
            if part:
                self.store.commit(lease, part, None)

    def commit_too_late(self) -> None:
        """Die between reserve and commit, or nearly so."""
        chain = self.chain()
        with self.store.reserve(self.ns, len(chain)) as lease:
            for key, view in zip(chain, lease.views, strict=False):
                view[:] = self.right(key)
            time.sleep(self.random.choice((0.0, 0.05)))
            if lease.num_blocks and lease.state is LeaseState.HELD:
                self.store.commit(lease, chain[: lease.num_blocks], None)

    def lend(self) -> None:
        chain = self.chain()
        buffers = [memoryview(self.right(key)) for key in chain]
        transfer = self.store.store_from(self.ns, chain, None, buffers, time.monotonic() + 0.5)
        self.finish(transfer)

    def borrow(self) -> None:
        chain = self.chain()
        buffers = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in chain]
        transfer = self.store.load_into(self.ns, chain, buffers, time.monotonic() + 0.5)
        self.finish(transfer)
        for key, buffer, outcome in zip(chain, buffers, transfer.outcomes, strict=True):
            if outcome is Outcome.OK and buffer != self.right(key):
                raise SystemExit("wrong bytes in a lent buffer")

    def finish(self, transfer: object) -> None:
        while not transfer.done or transfer.busy:  # type: ignore[attr-defined]  # a Transfer
            self.store.wait(0.05)
            self.store.poll()

    def end(self) -> None:
        for lease in self.reads:
            self.store.release(lease)
        for write in self.quarantined:
            self.store.reclaim(write)
        self.store.close()


def main() -> None:
    client = Client(Path(sys.argv[1]), int(sys.argv[2]))
    while not select.select([sys.stdin], [], [], 0)[0]:
        client.step()
    client.end()
    sys.stdout.write(json.dumps(client.counts) + "\n")


if __name__ == "__main__":
    main()
