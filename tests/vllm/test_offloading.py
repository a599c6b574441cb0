"""Our tiers under the CPU tier of vLLM's own OffloadingConnector: with an engine, and with its managers alone."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvstore.errors import ConfigError
from kvstore.testing.valkey import ValkeyServer
from tests.vllm.cpu_offload import CPUSpec
from tests.vllm.engine import EngineProcess, engine, offloading
from tests.vllm.prompts import CROWD, NUM_TOKENS, PAGE_TOKENS, PROMPT
from tests.vllm.test_tiers import damage

ROW_BYTES = 8192
WHOLE_CHUNKS = 10 * PAGE_TOKENS
Expected = dict[str, list[list[int]]]


def ours(**tables: Any) -> dict[str, Any]:
    return {"type": "KVStoreTier", "module_path": "connectors.vllm_tier", **tables}


def ask(process: EngineProcess) -> tuple[list[int], int]:
    answer = process.generate([PROMPT], NUM_TOKENS)[0]
    return answer["tokens"], answer["cached"]


@pytest.mark.engine
def test_files_and_redis_lie_under_vllms_cpu_tier(model: Path, expected: Expected, tmp_path: Path) -> None:
    (tokens,) = expected["one"]
    file = {"directories": [str(tmp_path / "kv")], "capacity": "128MiB"}
    with ValkeyServer() as valkey:
        redis = {"url": valkey.url}
        both = offloading(ours(file=file, redis=redis))
        with engine(model, tmp_path / "1.log", kv_transfer_config=both) as first:
            assert ask(first) == (tokens, 0)
        with engine(model, tmp_path / "2.log", kv_transfer_config=offloading(ours(file=file))) as restarted:
            assert ask(restarted) == (tokens, WHOLE_CHUNKS), "from files, after a restart"
            answers = restarted.generate(CROWD, NUM_TOKENS)
            assert [answer["tokens"] for answer in answers] == expected["crowd"], "more than vLLM's CPU tier holds"
        elsewhere = offloading(ours(redis=redis, prefetch_deadline="3s"))
        with engine(model, tmp_path / "3.log", kv_transfer_config=elsewhere) as other:
            assert ask(other) == (tokens, WHOLE_CHUNKS), "from Redis, on another host"
            valkey.pause()
            answers = other.generate(CROWD[:4], NUM_TOKENS)
            assert [answer["tokens"] for answer in answers] == expected["crowd"][:4], "while Redis hangs"
            valkey.resume()


class Managers:
    """vLLM's tiering manager, its CPU tier of ``num_rows`` and our tier under it. Chunk ``n`` holds bytes ``n``."""

    def __init__(self, model: Path, engine_id: str, tier: dict[str, Any], num_rows: int) -> None:
        parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=True)
        extra = {"cpu_bytes_to_use": num_rows * ROW_BYTES, "secondary_tiers": [tier]}
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(PAGE_TOKENS, ("layer",), 0),),
            worker_kv_bytes_per_block=ROW_BYTES,
            enable_kv_cache_events=False,
            extra_config=extra,
            engine_id=engine_id,
            model=OffloadingModelConfig(str(model), "float32"),
            cache=OffloadingCacheConfig(PAGE_TOKENS, 1),
            parallel=parallel,
        )
        init_none_hash(get_hash_fn_by_name("sha256"))
        self.manager: Any = CPUSpec(config).get_manager()
        self.rows = self.manager.primary_tier.get_kv_memoryview().cast("B")
        self._num_requests = 0

    @property
    def tier(self) -> Any:
        return self.manager.secondary_tiers[0]

    @contextmanager
    def request(self, chunks: range) -> Iterator[tuple[ReqContext, list[OffloadKey]]]:
        self._num_requests += 1
        context = ReqContext(f"r{self._num_requests}")
        keys = [key_of(chunk) for chunk in chunks]
        for chunk, key in zip(chunks, keys, strict=True):
            if hasattr(context, "set_offload_key_position"):  # from vLLM 0.31 on
                context.set_offload_key_position(key, chunk * PAGE_TOKENS)
        self.manager.on_new_request(context)
        yield context, keys
        self.manager.on_request_finished(context)
        self.settle()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        end_s = time.monotonic() + 20
        while self.manager.has_pending_work():
            assert time.monotonic() < end_s, "a job never ends"
            self.step()

    def store(self, chunks: range) -> None:
        """As if a request had computed them."""
        with self.request(chunks) as (context, keys):
            prepared = self.manager.prepare_store(keys, context)
            assert len(prepared.keys_to_store) == len(keys)
            for chunk, row in zip(chunks, prepared.store_spec.chunk_ids, strict=True):
                self.rows[row * ROW_BYTES : (row + 1) * ROW_BYTES] = bytes([chunk]) * ROW_BYTES
            self.manager.complete_store(keys, context)

    def load(self, chunks: range) -> int:
        """How many leading chunks a request is served; each is compared."""
        with self.request(chunks) as (context, keys):
            end_s = time.monotonic() + 20
            while True:
                found = [self.manager.lookup(key, context) for key in keys]
                if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                    break
                assert time.monotonic() < end_s, "a lookup is never answered"
                self.step()
            hits = next((index for index, one in enumerate(found) if one is not LookupResult.HIT), len(found))
            if hits:
                spec = self.manager.prepare_load(keys[:hits], context)
                for chunk, row in zip(chunks, spec.chunk_ids, strict=False):
                    assert self.rows[row * ROW_BYTES : (row + 1) * ROW_BYTES] == bytes([chunk]) * ROW_BYTES
                self.manager.complete_load(keys[:hits], context)
            return hits

    def reset(self) -> None:
        """As if weights changed."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # from vLLM 0.34 on
            self.manager.on_reset_flushed()

    def close(self) -> None:
        self.rows.release()
        self.manager.shutdown()


def key_of(chunk: int) -> OffloadKey:
    return make_offload_key(bytes([chunk]) * 32, 0)


@contextmanager
def managers(model: Path, tmp_path: Path, tier: dict[str, Any], num_rows: int = 32) -> Iterator[Managers]:
    made = Managers(model, f"test-{tmp_path.name}-{time.monotonic_ns()}", tier, num_rows)
    try:
        yield made
    finally:
        made.close()


def test_chunks_outlive_the_engine_and_the_cpu_tier(model: Path, tmp_path: Path) -> None:
    tier = ours(file={"directories": [str(tmp_path / "kv")], "capacity": "16MiB"})
    with managers(model, tmp_path, tier) as first:
        first.store(range(1, 33))
        first.store(range(33, 65))  # they take the place of the others
        assert first.load(range(1, 33)) == 32
    with managers(model, tmp_path, tier) as second:
        assert second.load(range(1, 33)) == 32
        assert second.load(range(60, 70)) == 5
        assert second.tier._jobs == []
        assert second.tier._asked == {}
    damage(tmp_path / "kv")
    with managers(model, tmp_path, tier) as third:
        assert third.load(range(1, 33)) == 0, "damaged chunks are misses, and are not asked for for ever"


def test_redis_is_asked_once_and_not_waited_for_beyond_the_deadline(model: Path, tmp_path: Path) -> None:
    with ValkeyServer() as valkey:
        tier = ours(redis={"url": valkey.url}, prefetch_deadline="500ms")
        with managers(model, tmp_path, tier) as first:
            first.store(range(1, 21))
        with managers(model, tmp_path, tier, num_rows=10) as second:
            assert second.load(range(1, 11)) == 10
            assert second.load(range(11, 21)) == 10, "the first ones make room in the CPU tier"
            valkey.pause()
            assert second.load(range(1, 5)) == 0, "known to be there, and late"
            assert second.load(range(41, 61)) == 0, "not known"
            valkey.resume()
            assert second.load(range(41, 61)) == 0
            deadline_s = time.monotonic() + 20
            while second.load(range(1, 5)) < 4:
                assert time.monotonic() < deadline_s, "a server that is back is not asked again"


def test_weights_that_change_in_place_make_nothing_for_those_on_disk(model: Path, tmp_path: Path) -> None:
    """WK-017: vLLM resets its own cache before that, and leaves the tiers below it as they are."""
    tier = ours(file={"directories": [str(tmp_path / "kv")], "capacity": "16MiB"})
    with managers(model, tmp_path, tier) as changed:
        changed.store(range(1, 9))
        changed.reset()
        assert changed.load(range(1, 9)) == 0
        changed.store(range(1, 13))
        changed.store(range(33, 65))  # the CPU tier has nothing else any more
        assert changed.load(range(1, 13)) == 12
    with managers(model, tmp_path, tier) as restarted:
        assert restarted.load(range(1, 13)) == 8, "of before, and no more"


def test_a_tier_that_cannot_work_says_so(model: Path, tmp_path: Path) -> None:
    file = {"directories": [str(tmp_path / "kv")], "capacity": "16MiB"}
    for tier, said in (
        (ours(), "a file or a redis"),
        (ours(file=file, memory={"capacity": "1GiB"}), "cpu_bytes_to_use"),
        (ours(file=file, weights="/nowhere"), "weights"),
    ):
        with pytest.raises(ConfigError, match=said), managers(model, tmp_path, tier):
            pass
