"""The store in a tiny world: five keys, 2 + 3 slots, a shared tier; faults, time and the order of copies are drawn.

Safety: bytes served belong to their key. Liveness: what lies on a healthy file tier arrives. Accounting: when idle, no
pin, slot or copy is left over.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvstore.lease import ReadLease, WriteLease
from kvstore.lending import Transfer
from kvstore.types import BlockKey
from tests.stateful.world_machine import WorldMachine
from tests.worlds import LAYOUT, REQUEST, content

PATHS = [[0, 1, 2], [0, 3], [4]]

paths = st.sampled_from(PATHS)


class StoreMachine(WorldMachine):
    def __init__(self) -> None:
        super().__init__()
        self.open_world(2, 3)
        root = self.world.ns.keys([0] * 4)[0]
        one = self.world.ns.keys([1] * 4, parent=root)[0]
        keys = [root, one]
        keys.append(self.world.ns.keys([2] * 4, parent=one)[0])
        keys.append(self.world.ns.keys([3] * 4, parent=root)[0])
        keys.append(self.world.ns.keys([4] * 4)[0])
        self.keys = keys
        self.writes: list[WriteLease] = []
        self.reads: list[ReadLease] = []
        self.quarantined: list[WriteLease] = []
        self.lent: list[tuple[Transfer, list[BlockKey], list[memoryview]]] = []

    def chain(self, path: list[int]) -> list[BlockKey]:
        return [self.keys[index] for index in path]

    # ---- engines

    @rule(num_blocks=st.integers(1, 3))
    def reserve(self, num_blocks: int) -> None:
        self.writes.append(self.world.store.reserve(self.world.ns, num_blocks))

    @precondition(lambda self: self.writes)
    @rule(path=paths)
    def commit(self, path: list[int]) -> None:
        lease = self.writes.pop()
        chain = self.chain(path)[: lease.num_blocks]
        for key, view in zip(chain, lease.views, strict=False):
            view[:] = content(key)
        self.world.store.commit(lease, chain, None)
        if lease.unnamed:
            self.world.store.abort(lease)

    @precondition(lambda self: self.writes)
    @rule()
    def abort(self) -> None:
        lease = self.writes.pop()
        self.world.store.abort(lease)

    @precondition(lambda self: self.writes)
    @rule()
    def quarantine(self) -> None:
        lease = self.writes.pop()
        self.world.store.quarantine(lease)
        self.quarantined.append(lease)

    @precondition(lambda self: self.quarantined)
    @rule()
    def late_copy_returns(self) -> None:
        """The copy that nobody waited for writes into its old slots, then ends: no block may have changed."""
        lease = self.quarantined.pop()
        for view in lease.views:
            view[:] = b"\xee" * len(view)
        self.world.store.reclaim(lease)

    @rule(path=paths)
    def arrive(self, path: list[int]) -> None:
        self.world.store.arrive(REQUEST, self.chain(path))

    @rule(path=paths)
    def pin(self, path: list[int]) -> None:
        self.reads.append(self.world.store.pin(self.chain(path)))

    @precondition(lambda self: self.reads)
    @rule()
    def release(self) -> None:
        self.world.store.release(self.reads.pop(0))

    @rule(path=paths, seconds=st.sampled_from([0.0, 0.5, 20.0]))
    def prefetch(self, path: list[int], seconds: float) -> None:
        self.world.store.prefetch(self.chain(path), self.world.clock() + seconds)

    @rule(path=paths)
    def load_into(self, path: list[int]) -> None:
        chain = self.chain(path)
        buffers = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in chain]
        transfer = self.world.store.load_into(self.world.ns, chain, buffers, self.world.clock() + 1)
        self.lent.append((transfer, chain, buffers))

    @rule(path=paths)
    def store_from(self, path: list[int]) -> None:
        chain = self.chain(path)
        buffers = [memoryview(content(key)) for key in chain]
        self.world.store.store_from(self.world.ns, chain, None, buffers, self.world.clock() + 1)

    @rule()
    def evict(self) -> None:
        self.world.store.evict(1)

    @rule()
    def clear(self) -> None:
        self.world.store.clear(self.world.ns)
        assert all(self.world.store.lookup(self.chain(path)).found == 0 for path in PATHS)

    # ---- the world

    @rule()
    def poll(self) -> None:
        self.world.store.poll()

    # ---- promises

    @rule(path=paths)
    def everything_settles_and_what_is_below_arrives(self, path: list[int]) -> None:
        world = self.world
        self.faults.clear()
        for lease in self.reads:
            world.store.release(lease)
        for write in self.writes:
            world.store.abort(write)
        for write in self.quarantined:
            world.store.reclaim(write)
        self.reads, self.writes, self.quarantined = [], [], []
        world.settle()
        world.clock.advance(30.0)  # breakers may try again
        world.settle()
        world.assert_idle()
        world.store.evict(len(self.keys))
        chain = self.chain(path)
        found = min(world.store.lookup(chain).found, 2)  # RAM has two slots
        on_file = {kept.move.key for kept in world.file.kept.values()} if world.file else set()
        if all(key in on_file for key in chain[:found]):
            assert world.get(chain) >= found, "what prefetch promised did not arrive"
        world.settle()
        world.assert_idle()

    @invariant()
    def what_is_pinned_is_right(self) -> None:
        for lease in self.reads:
            for key, view in zip(lease.keys, lease.views, strict=True):
                assert view == content(key), "wrong bytes under a pin"
        for transfer, chain, buffers in self.lent:
            if transfer.done:
                for key, buffer in zip(chain[: transfer.num_blocks], buffers, strict=False):
                    assert buffer == content(key), "wrong bytes in a lent buffer"
        self.lent = [item for item in self.lent if not item[0].done]

    def teardown(self) -> None:
        self.world.close()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=120, stateful_step_count=40)
