"""What the store's tables cost, in time and in memory, and how long it takes to start."""

import gc
import hashlib
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.engine_side import PATIENCE_S, layout_of
from bench.report import build_folder
from bench.scale import MIB, Scale
from bench.turns import Work, in_turns
from kvstore.config import Config
from kvstore.hashing import Identity, TokenIds, block_keys
from kvstore.layout import slot_bytes
from kvstore.namespace import Namespace
from kvstore.opening import open_store
from kvstore.policy import POLICIES
from kvstore.pool import BlockPool
from kvstore.store import Store
from kvstore.types import BlockKey, Request

IDENTITY = Identity("bench", b"weights")
TOKENS_PER_BLOCK = 16
STEP_BLOCKS = 256
"""What an engine commits at a time."""
BLOCK_BYTES = 4096
"""The tables cost the same whatever the size; small blocks make a benchmark quick."""
ROWS_PER_REPEAT = 4
"""These are short, and so more often disturbed."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One number, beside what it is wanted to be at most and, where there is one, its limit in the same run."""

    what: str
    value: float
    unit: str
    wanted: float | None
    limit: float | None
    repeats: int


def costs(scale: Scale) -> Iterator[Cost]:
    yield from _hashing(scale)
    yield from _lookups(scale)
    yield _eviction(scale)
    yield from _memory(scale)
    yield _import(scale)
    yield _restart(scale)


def _hashing(scale: Scale) -> Iterator[Cost]:
    """Chained keys, beside a loop that only hashes the same bytes."""
    repeats = ROWS_PER_REPEAT * scale.repeats
    tokens = np.random.default_rng(0).integers(0, 150_000, scale.hash_tokens, dtype=np.int32)
    given: dict[str, TokenIds] = {"a numpy array": tokens, "a list of int": tokens.tolist()}
    rows = _messages(tokens)

    def bare() -> None:
        link, sha256 = bytes(32), hashlib.sha256
        for row in rows:
            link = sha256(link + row).digest()

    works: dict[str, Work] = {"bare": bare}
    for name, ids in given.items():
        works[name] = _discard(partial(block_keys, bytes(16), ids, TOKENS_PER_BLOCK))
    seconds = in_turns(works, repeats)
    for name in given:
        yield Cost(
            f"hash {scale.hash_tokens >> 10}K tokens, {TOKENS_PER_BLOCK} per block, sha256, from {name}",
            value=_round(seconds[name] * 1e3),
            unit="ms",
            wanted=_round(seconds["bare"] * 1e3 * 1.5),
            limit=_round(seconds["bare"] * 1e3),
            repeats=repeats,
        )


def _messages(tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> list[bytes]:
    head = b"T" + TOKENS_PER_BLOCK.to_bytes(4, "little")
    return [head + row.astype("<u4").tobytes() for row in tokens.reshape(-1, TOKENS_PER_BLOCK)]


def _lookups(scale: Scale) -> Iterator[Cost]:
    repeats = ROWS_PER_REPEAT * scale.repeats
    with closing(_open_store(scale.prefix_blocks)) as store:
        ns = store.open_namespace(IDENTITY, layout_of(BLOCK_BYTES))
        chain = _chain(ns, scale.prefix_blocks)
        _commit(store, ns, chain)
        request = Request("bench", time.time(), ns.digest, scale.prefix_blocks * TOKENS_PER_BLOCK)

        def pin_and_touch() -> float:
            began_s = time.perf_counter()
            store.arrive(request, chain)
            lease = store.pin(chain)
            took_s = time.perf_counter() - began_s
            store.release(lease)
            return took_s

        def release() -> float:
            lease = store.pin(chain)
            began_s = time.perf_counter()
            store.release(lease)
            return time.perf_counter() - began_s

        works: dict[str, tuple[Work, float | None]] = {
            f"lookup of a prefix of {scale.prefix_blocks} blocks": (_discard(partial(store.lookup, chain)), 1.5),
            "pin and touch of it": (pin_and_touch, 3.0),
            "release of it": (release, None),
            "poll while nothing happens": (_discard(store.poll), 0.05),
        }
        seconds = in_turns({what: work for what, (work, _) in works.items()}, repeats)
    for what, (_, wanted) in works.items():
        yield Cost(what, _round(seconds[what] * 1e3), "ms", wanted, None, repeats)


def _eviction(scale: Scale) -> Cost:
    """A full RAM tier: every block that is committed takes another one's place."""
    repeats = ROWS_PER_REPEAT * scale.repeats
    with closing(_open_store(scale.prefix_blocks)) as store:
        ns = store.open_namespace(IDENTITY, layout_of(BLOCK_BYTES))
        chains = iter([_chain(ns, scale.prefix_blocks, number) for number in range(repeats + 3)])
        _commit(store, ns, next(chains))
        seconds = in_turns({"commit": lambda: _commit(store, ns, next(chains))}, repeats)
    per_block_us = seconds["commit"] / scale.prefix_blocks * 1e6
    return Cost("reserve and commit with eviction, per block", _round(per_block_us), "us", 6.0, None, repeats)


def _memory(scale: Scale) -> Iterator[Cost]:
    """A pool full of chains; the key counts, and nothing else that others hold."""
    for name, policy in POLICIES.items():
        gc.collect()
        tracemalloc.start()
        before_bytes, _ = tracemalloc.get_traced_memory()
        pool = BlockPool(policy())
        pool.grow(0, scale.indexed_blocks)
        for number in range(scale.indexed_blocks // 100):
            parent = None
            for slot, key in zip(
                pool.reserve(100), _chain(Namespace(IDENTITY, layout_of(BLOCK_BYTES)), 100, number), strict=True
            ):
                pool.commit(slot, key, parent, 1_700_000_000)
                parent = key
        gc.collect()
        after_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        yield Cost(
            what=f"memory per indexed block and tier with {name}, key included, at {scale.indexed_blocks} blocks",
            value=_round((after_bytes - before_bytes) / scale.indexed_blocks),
            unit="B",
            wanted=300.0,
            limit=None,
            repeats=1,
        )


def _import(scale: Scale) -> Cost:
    seconds = in_turns({name: _importing(name) for name in ("kvstore.store", "numpy")}, scale.processes)
    ours_ms, numpy_ms = (_round(seconds[name] * 1e3) for name in ("kvstore.store", "numpy"))
    return Cost(
        "import kvstore.store, beside import numpy, without torch",
        ours_ms,
        "ms",
        3 * numpy_ms,
        numpy_ms,
        scale.processes,
    )


def _importing(name: str) -> Work:
    program = (
        f"import time; began_s = time.perf_counter(); import {name}; took_s = time.perf_counter() - began_s\n"
        "import sys; assert 'torch' not in sys.modules; print(took_s)"
    )
    return lambda: float(_output_of(program))


def _restart(scale: Scale) -> Cost:
    """From the start of a process to its first answer, over files that an earlier one left."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=build_folder()) as folder:
        capacity_bytes = scale.restart_blocks * (2 * slot_bytes(BLOCK_BYTES) + 256) + 64 * MIB
        tables = {
            "memory": {"capacity": f"{64 * MIB}B"},
            "file": {"directories": [folder], "capacity": f"{capacity_bytes}B"},
        }
        with closing(open_store(Config.from_mapping(tables))) as store:
            ns = store.open_namespace(IDENTITY, layout_of(BLOCK_BYTES))
            chain = _chain(ns, scale.restart_blocks)
            for start in range(0, len(chain), STEP_BLOCKS):  # in step with the files, which take all that is accepted
                _commit(store, ns, chain[start : start + STEP_BLOCKS], chain[start - 1] if start else None)
                store.drain(PATIENCE_S)
        program = f"from bench.costs import first_answer\nprint(*first_answer({tables!r}, {scale.restart_blocks}))"

        def restart() -> float:
            began_s = time.monotonic()
            found, answered_s = _output_of(program).split()
            if int(found) != scale.restart_blocks:
                raise SystemExit(f"of {scale.restart_blocks} blocks a restart found {found}")
            return float(answered_s) - began_s

        seconds = in_turns({"restart": restart}, scale.processes)
    return Cost(
        f"restart with {scale.restart_blocks} blocks of {BLOCK_BYTES >> 10} KiB on file, from exec to the first answer",
        _round(seconds["restart"]),
        "s",
        2.0,
        None,
        scale.processes,
    )


def first_answer(tables: dict[str, object], num_blocks: int) -> tuple[int, float]:
    """In a process of its own: open the store and look the whole chain up; how many it found and when, monotonic."""
    with closing(open_store(Config.from_mapping(tables))) as store:
        ns = store.open_namespace(IDENTITY, layout_of(BLOCK_BYTES))
        return store.lookup(_chain(ns, num_blocks)).found, time.monotonic()


def _open_store(num_blocks: int) -> Store:
    return open_store(Config.from_mapping({"memory": {"capacity": f"{num_blocks * slot_bytes(BLOCK_BYTES)}B"}}))


def _chain(ns: Namespace, num_blocks: int, number: int = 0) -> list[BlockKey]:
    """No two numbers share a block."""
    tokens = np.arange(num_blocks * TOKENS_PER_BLOCK, dtype=np.uint32)
    tokens[0] = 1_000_000 + number
    return ns.keys(tokens)


def _commit(store: Store, ns: Namespace, chain: list[BlockKey], parent: BlockKey | None = None) -> None:
    """Step by step."""
    for start in range(0, len(chain), STEP_BLOCKS):
        keys = chain[start : start + STEP_BLOCKS]
        lease = store.reserve(ns, len(keys))
        while lease.num_blocks < len(keys):
            store.abort(lease)
            store.wait(PATIENCE_S)
            store.poll()
            lease = store.reserve(ns, len(keys))
        store.commit(lease, keys, chain[start - 1] if start else parent)
    store.poll()


def _discard(call: Callable[[], object]) -> Work:
    def work() -> None:
        call()

    return work


def _output_of(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    return done.stdout


def _round(number: float) -> float:
    """Four digits that count."""
    return float(f"{number:.4g}")
