"""The reference engine over a real store: whatever the tiers have, lose or damage, the tokens are the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.engine import Engine
from connectors.torch_engine.opening import open_engine
from connectors.torch_engine.request import EngineRequest
from connectors.torch_engine.sampling import SamplingParams
from kvstore.config import Config
from kvstore.errors import LayoutError
from kvstore.layout import QUANTISED
from kvstore.opening import open_store
from kvstore.pool import SlotState
from kvstore.store import Store
from kvstore.testing.valkey import ValkeyServer
from kvstore.tiers.file_directory import BLOCKS

ANSWER = SamplingParams(max_tokens=24, stop_ids=())
ENGINE = EngineConfig(num_pages=64, max_step_tokens=64)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


PROMPT = prompt_of(300)


@pytest.fixture(scope="module")
def alone() -> list[int]:
    """The answer of an engine without a store."""
    return open_engine(None, ENGINE)[0].generate([PROMPT], ANSWER)[0]


def config_of(directory: Path, *, memory: str = "16MiB", redis: str = "") -> Config:
    tables: dict[str, object] = {
        "memory": {"capacity": memory},
        "file": {"directories": [str(directory / "kv")], "capacity": "128MiB"},
    }
    if redis:
        tables["redis"] = {"url": redis}
    return Config.from_mapping(tables)


@contextmanager
def running(config: Config, engine_config: EngineConfig = ENGINE) -> Iterator[tuple[Engine, Store]]:
    """An engine over a store; at the end nothing may have leaked."""
    store = open_store(config)
    engine, _ = open_engine(None, engine_config, store=store)
    try:
        yield engine, store
        engine.close()
        assert store.drain(30)
        pool = engine.cache.pool
        pool.check()
        assert (pool.num_pinned, pool.num_held, pool.num(SlotState.FILLING)) == (0, 0, 0)
        store.check()
        metrics = store.snapshot()
        assert not any(metrics["kvstore_pinned_blocks"].values())
        assert not any(metrics["kvstore_quarantined_slots"].values())
    finally:
        store.close()


def answer(engine: Engine, prompt: list[int]) -> EngineRequest:
    request = engine.submit(prompt, ANSWER)
    while engine.has_work:
        engine.step()
    return request


def settle(engine: Engine, store: Store) -> None:
    """Let everything the engine offered be stored and copied down."""
    while engine.cache.pool.num_held:
        engine.cache.poll()
    assert store.drain(30)


def empty_pages(engine: Engine) -> None:
    assert engine.cache.pool.evict(ENGINE.num_pages) > 0
    engine.cache.poll()


def test_the_pages_then_ram_then_files_serve_the_same_tokens(tmp_path: Path, alone: list[int]) -> None:
    config = config_of(tmp_path)
    with running(config) as (engine, store):
        cold = answer(engine, PROMPT)
        assert cold.output == alone
        assert cold.metrics.tokens_from_tier == {}
        hbm = answer(engine, PROMPT)
        assert hbm.output == alone
        assert hbm.metrics.tokens_from_tier == {"hbm": 288}
        settle(engine, store)
        empty_pages(engine)
        ram = answer(engine, PROMPT)
        assert ram.output == alone
        assert ram.metrics.tokens_from_tier == {"memory": 288}
        settle(engine, store)
    with running(config) as (engine, _):
        file = answer(engine, PROMPT)
        assert file.output == alone
        assert file.metrics.tokens_from_tier == {"file": 288}
        assert file.metrics.bytes_onboarded == 18 * engine.cache.namespace.layout.block_bytes


def test_a_new_host_is_served_from_redis(tmp_path: Path, alone: list[int]) -> None:
    with ValkeyServer() as server:
        with running(config_of(tmp_path / "one", redis=server.url)) as (engine, store):
            answer(engine, PROMPT)
            settle(engine, store)
        with running(config_of(tmp_path / "two", redis=server.url)) as (engine, _):
            request = answer(engine, PROMPT)
            assert request.output == alone
            assert request.metrics.tokens_from_tier == {"redis": 288}


def test_generated_tokens_are_served_in_the_next_turn(tmp_path: Path) -> None:
    with running(config_of(tmp_path)) as (engine, store):
        first = answer(engine, PROMPT)
        settle(engine, store)
        empty_pages(engine)
        turn = [*PROMPT, *first.output, *prompt_of(20, seed=3)]
        second = answer(engine, turn)
        assert second.metrics.tokens_from_tier == {"memory": (300 + 24 - 1) // 16 * 16}
    assert second.output == open_engine(None, ENGINE)[0].generate([turn], ANSWER)[0]


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_blocks_serve_the_same_tokens_from_every_tier(name: str, tmp_path: Path, alone: list[int]) -> None:
    engine_config = replace(ENGINE, quantisation=name)
    with ValkeyServer() as server:
        config = config_of(tmp_path / "one", redis=server.url)
        with running(config, engine_config) as (engine, store):
            assert answer(engine, PROMPT).output == alone
            settle(engine, store)
            empty_pages(engine)
            served = {"memory": answer(engine, PROMPT)}
            settle(engine, store)
        for tier, directory in (("file", "one"), ("redis", "two")):
            with running(config_of(tmp_path / directory, redis=server.url), engine_config) as (engine, _):
                served[tier] = answer(engine, PROMPT)
    num_elements = engine.cache.kv[0].numel()
    for tier, request in served.items():
        assert request.metrics.tokens_from_tier == {tier: 288}
        assert num_elements < request.metrics.bytes_onboarded / 18 < 1.2 * num_elements
        assert request.output == served["memory"].output


def test_an_engine_misses_what_another_has_stored_in_another_format(tmp_path: Path, alone: list[int]) -> None:
    config = config_of(tmp_path)
    for name in ("int8", "", "fp8"):
        with running(config, replace(ENGINE, quantisation=name)) as (engine, store):
            request = answer(engine, PROMPT)
            settle(engine, store)
            assert request.metrics.tokens_from_tier == {}
            assert request.output == alone


def test_a_format_that_nobody_knows_is_refused_when_the_engine_is_opened() -> None:
    with pytest.raises(LayoutError, match="int4"):
        open_engine(None, replace(ENGINE, quantisation="int4"))


def test_a_damaged_block_on_file_is_recomputed(tmp_path: Path, alone: list[int]) -> None:
    """VERIFY: a flipped bit changes no token; the prefix before it is served."""
    config = config_of(tmp_path)
    with running(config) as (engine, store):
        answer(engine, PROMPT)
        settle(engine, store)
        block_bytes = engine.cache.namespace.layout.block_bytes
        stride = store._file.tier.slot_bytes(block_bytes) if store._file else 0
    assert stride
    path = tmp_path / "kv" / BLOCKS
    data = bytearray(path.read_bytes())
    data[5 * (stride // 4096 * 4096) + 11] ^= 1
    path.write_bytes(data)
    with running(config) as (engine, _):
        request = answer(engine, PROMPT)
        assert request.output == alone
        assert 0 < request.metrics.tokens_from_tier["file"] < 288


def test_many_requests_in_few_pages_and_little_ram_give_the_same_tokens(tmp_path: Path) -> None:
    prompts = [prompt_of(40 + 23 * number, seed=number % 5) + prompt_of(9, seed=number) for number in range(10)]
    expected = [open_engine(None, ENGINE)[0].generate([prompt], ANSWER)[0] for prompt in prompts]
    tight = replace(ENGINE, num_pages=30)
    block_bytes = open_engine(None, ENGINE)[0].cache.namespace.layout.block_bytes
    with running(config_of(tmp_path, memory=f"{24 * block_bytes // 1024}KiB"), tight) as (engine, _):
        for _ in range(3):
            requests = [engine.submit(prompt, ANSWER) for prompt in prompts]
            while engine.has_work:
                engine.step()
                engine.cache.pool.check()
            assert [request.output for request in requests] == expected


def test_aborts_in_any_state_leak_nothing(tmp_path: Path, alone: list[int]) -> None:
    config = config_of(tmp_path)
    with running(config) as (engine, store):
        answer(engine, PROMPT)
        settle(engine, store)
    for num_steps in range(6):
        with running(config) as (engine, _):
            request = engine.submit(PROMPT, ANSWER)
            for _ in range(num_steps):
                engine.step()
            engine.abort(request.request_id)
            engine.step()
            assert answer(engine, PROMPT).output == alone


def test_pages_that_a_load_still_fills_are_neither_found_nor_offered(tmp_path: Path, alone: list[int]) -> None:
    """WK-011: what is named is what was computed or has arrived, not what was allocated."""
    with running(config_of(tmp_path)) as (engine, store):
        answer(engine, PROMPT)
        settle(engine, store)
        empty_pages(engine)
        loading = engine.submit(PROMPT, ANSWER)
        engine.cache.attach(loading)
        assert loading.load is not None
        assert engine.cache.pool.prefix(loading.keys) == []
        assert loading.num_committed == 0  # up to here blocks are offered to the store
        engine.cache.release(loading)
        while engine.has_work:
            engine.step()
        assert loading.output == alone


def test_a_copy_that_does_not_arrive_is_recomputed(
    tmp_path: Path, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """WK-031, WK-032: output with a failed load equals output without a store."""
    with running(config_of(tmp_path)) as (engine, store):
        answer(engine, PROMPT)
        settle(engine, store)
        empty_pages(engine)
        copier = engine.cache._transfers._copier  # type: ignore[union-attr]  # it has a store
        monkeypatch.setattr(type(copier), "_onboard", _fail)
        request = answer(engine, PROMPT)
        assert request.output == alone
        assert request.metrics.tokens_from_tier == {}


def _fail(*args: object) -> None:
    raise OSError("a copy that goes wrong")


def test_a_busy_copier_and_a_full_store_are_misses(
    tmp_path: Path, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(config_of(tmp_path)) as (engine, store):
        monkeypatch.setattr(type(engine.cache._transfers._copier), "offload", lambda *args: None)  # type: ignore[union-attr]  # it has a store
        assert answer(engine, PROMPT).output == alone
        monkeypatch.undo()
        lease = store.reserve(engine.cache.namespace, 10**6)
        assert answer(engine, PROMPT).output == alone
        store.abort(lease)
