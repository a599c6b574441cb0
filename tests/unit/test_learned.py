"""What policies have learned, over a restart: known at the first decision, and never in doubt."""

import errno
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvstore.config import Config
from kvstore.hashing import Identity
from kvstore.namespace import Namespace
from kvstore.notebook import SAVE_INTERVAL_S
from kvstore.policy.hix import HIX
from kvstore.policy.learned import Learned, pack, parse
from kvstore.policy.life_table import Traits
from kvstore.store import Store
from kvstore.testing.blocks import key_of
from kvstore.testing.file_faults import Fault, FaultyFiles, fails
from kvstore.testing.policy_contract import AtOnce
from kvstore.testing.steps import FakeClock
from kvstore.tiers.file import FileTier
from kvstore.tiers.file_directory import MAX_NOTE_BYTES
from kvstore.tiers.memory import Arena, MemoryTier
from kvstore.types import BlockKey, Request
from tests.file_tiers import CAPACITY_BYTES, LAYOUT

NUM_SLOTS = 8


def teach(policy: HIX[BlockKey]) -> None:
    """What an engine says of a session's end is true."""
    numbers = itertools.count()
    for round_ in range(40):
        for ends in (False, True):
            chain = [key_of(round_ * 1000 + 500 * ends + depth) for depth in range(5)]
            for turn in range(1 if ends else 3):
                now_s = 300.0 * round_ + 30 * turn
                hinted = Request(str(next(numbers)), now_s, b"", 1000, {"session_end": ends})
                policy.arrive(hinted, chain[: 3 + turn])
                policy.finish(hinted, 10)
        job = policy.refit()
        if job is not None:
            job()()


def first_to_leave(policy: HIX[BlockKey]) -> str:
    """Of a session that goes on and, a second later, one that ends."""
    policy.resize(100)
    chains = {"goes on": [key_of(91), key_of(92)], "ends": [key_of(95), key_of(96)]}
    for number, (name, chain) in enumerate(chains.items()):
        hinted = Request(name, 50_000.0 + number, b"", 1000, {"session_end": name == "ends"})
        policy.arrive(hinted, chain)
        for parent, key in zip([None, *chain], chain, strict=False):
            policy.insert(key, parent)
        policy.finish(hinted, 10)
    victim = policy.victim(lambda _: True)
    return next(name for name, chain in chains.items() if victim in chain)


@pytest.fixture(scope="module")
def packed() -> bytes:
    policy: HIX[BlockKey] = HIX()
    teach(policy)
    return pack(policy.learned())


def test_the_first_decision_after_a_restart_is_as_learned(packed: bytes) -> None:
    assert first_to_leave(HIX()) == "goes on", "it was used before the other"
    policy: HIX[BlockKey] = HIX()
    learned = parse(packed)
    assert learned is not None
    policy.resume(learned)
    assert first_to_leave(policy) == "ends"


def test_what_is_known_of_a_key_is_known_of_it_although_others_came_before() -> None:
    """Keys are told apart by numbers, which are given anew."""
    roots = [key_of(1), key_of(2)]
    old: HIX[BlockKey] = HIX()
    for number in range(120):
        for root in roots[: 1 + (number == 0)]:
            old.arrive(Request(f"{number}", 10.0 * number, b"", 100), [root, key_of(100), key_of(101)])
    job = old.refit()
    assert job is not None
    job()()
    new: HIX[BlockKey] = HIX()
    for number in range(5):
        new.arrive(Request("r", 0.0, b"", 100), [key_of(50 + number)])
    learned = parse(pack(old.learned()))
    assert learned is not None
    new.resume(learned)
    after = new.learned()

    def uses_of(learned: Learned[BlockKey], root: BlockKey) -> int:
        code = dict(learned.codes["root"])[root]
        rows = learned.observations.traits[:, Traits._fields.index("root")] == code
        return int((learned.observations.state[rows] == 1).sum())

    assert uses_of(after, roots[0]) == uses_of(old.learned(), roots[0]) > 100
    assert uses_of(after, roots[1]) == uses_of(old.learned(), roots[1])


def test_what_is_damaged_or_cut_is_not_read(packed: bytes) -> None:
    assert parse(b"") is None
    for at in (0, 8, 20, len(packed) // 2, len(packed) - 1):
        assert parse(packed[:at]) is None
        assert parse(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]) is None


def test_it_takes_a_megabyte_at_most() -> None:
    policy: HIX[BlockKey] = HIX()
    for number in range(9000):
        policy.arrive(Request("r", 1.0 * number, b"", 100), [key_of(number % 300), key_of(1000 + number)])
    assert 500_000 < len(pack(policy.learned())) < 1 << 20


# ---- in a store


@contextmanager
def opened(directory: Path, clock: FakeClock, files: FaultyFiles | None = None) -> Iterator[Store]:
    file = FileTier([directory], CAPACITY_BYTES, files=files)
    memory = MemoryTier(Arena(NUM_SLOTS * LAYOUT.block_bytes, prefault=False))
    config = Config.from_mapping({"file": {"directories": [str(directory)], "capacity": "16MiB"}})
    with closing(
        Store(memory=memory, file=file, notes=file, config=config, executor=lambda *_: AtOnce(), clock=clock)
    ) as store:
        yield store


def ask(store: Store, number: int, now_s: float, chain: Sequence[BlockKey], *, ends: bool) -> Request:
    hinted = Request(str(number), now_s, b"", 1000, {"session_end": ends})
    store.arrive(hinted, chain)
    store.finish(hinted, chain, 10)
    store.poll()
    return hinted


def work(store: Store, ns: Namespace, rounds: int = 40) -> None:
    """The same as ``teach``, of an engine that stores nothing."""
    for round_ in range(rounds):
        goes_on, ends = (ns.keys(range(10_000 * round_ + first, 10_000 * round_ + first + 5)) for first in (0, 5000))
        for turn in range(3):
            ask(store, 10 * round_ + turn, 300.0 * round_ + 30 * turn, goes_on[: 3 + turn], ends=False)
        ask(store, 10 * round_ + 9, 300.0 * round_, ends[:3], ends=True)


def survivor(store: Store, ns: Namespace) -> str:
    """Of two sessions, as ``first_to_leave``, which one has more in RAM after others asked for room."""
    chains = {"goes on": ns.keys(range(900_000, 900_004)), "ends": ns.keys(range(910_000, 910_004))}
    for number, (name, chain) in enumerate(chains.items()):
        ask(store, number, 50_000.0 + number, chain, ends=name == "ends")
        with store.reserve(ns, len(chain)) as lease:
            store.commit(lease, chain, None)
        store.poll()
    store.evict(2)
    return max(chains, key=lambda name: store.lookup(chains[name]).ready)


def open_namespace(store: Store) -> Namespace:
    return store.open_namespace(Identity("model", b"weights"), LAYOUT)


def test_a_store_knows_after_a_restart_what_it_had_learned(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(tmp_path / "a", clock) as store:
        work(store, open_namespace(store))
    with opened(tmp_path / "a", clock) as store:
        assert survivor(store, open_namespace(store)) == "goes on"
    with opened(tmp_path / "b", clock) as store:
        assert survivor(store, open_namespace(store)) == "ends", "it was used last, and nothing is known"


def test_a_store_that_is_killed_loses_minutes_of_learning_at_most(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(tmp_path, clock) as store:
        ns = open_namespace(store)
        work(store, ns)
        clock.advance(SAVE_INTERVAL_S)
        store.poll()
        saved = (tmp_path / "note").read_bytes()
        clock.advance(SAVE_INTERVAL_S)
        (tmp_path / "note").unlink()
        store.poll()
        assert not (tmp_path / "note").exists(), "nothing was learned, so nothing is written"
    assert parse(saved[5 + len(ns.fingerprint) :]) is not None


def test_a_note_that_cannot_be_written_costs_nothing_but_itself(tmp_path: Path) -> None:
    clock, files = FakeClock(), FaultyFiles()
    with opened(tmp_path, clock) as store:
        work(store, open_namespace(store))
    before = (tmp_path / "note").read_bytes()
    with opened(tmp_path, clock, files) as store:
        work(store, open_namespace(store))
        fault = files.inject(Fault("pwritev", fails(errno.ENOSPC), file="note.new"))
    assert fault.num_hits == 1
    assert (tmp_path / "note").read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda note: note[:1000], lambda _: b"\xff" * 1000, lambda note: note + bytes(MAX_NOTE_BYTES)],
)
def test_a_note_that_cannot_be_read_starts_learning_afresh(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """It is cut, damaged, or larger than a note ever is."""
    clock, note = FakeClock(), tmp_path / "note"
    with opened(tmp_path, clock) as store:
        work(store, open_namespace(store))
    note.write_bytes(damage(note.read_bytes()))
    with opened(tmp_path, clock) as store:
        assert survivor(store, open_namespace(store)) == "ends"
