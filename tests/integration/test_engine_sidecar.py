"""The reference engine over a sidecar: two engines share what either computed, and neither needs it to answer."""

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.engine import Engine
from connectors.torch_engine.opening import open_engine
from connectors.torch_engine.sampling import SamplingParams
from kvstore.client.store_client import StoreClient
from kvstore.testing.sidecar import Sidecar, eventually
from tests.integration.test_engine_store import prompt_of

ANSWER = SamplingParams(max_tokens=6, stop_ids=())
ENGINE = EngineConfig(num_pages=16, max_step_tokens=32)
PROMPT = prompt_of(100)
NUM_SERVED = (len(PROMPT) - 1) // ENGINE.tokens_per_block * ENGINE.tokens_per_block


@pytest.fixture(scope="module")
def alone() -> list[int]:
    """The answer of an engine without a store."""
    return open_engine(None, ENGINE)[0].generate([PROMPT], ANSWER)[0]


@contextmanager
def engine_of(served: Sidecar) -> Iterator[tuple[Engine, StoreClient]]:
    with closing(served.client(budget_s=2.0)) as client:
        engine, _ = open_engine(None, ENGINE, store=client)
        yield engine, client
        engine.close()


def answer(engine: Engine, params: SamplingParams = ANSWER) -> tuple[list[int], dict[str, int]]:
    request = engine.submit(PROMPT, params)
    while engine.has_work:
        engine.step()
    return request.output, request.metrics.tokens_from_tier


def settle(engine: Engine) -> None:
    """Let everything be stored."""

    def is_settled() -> bool:
        engine.cache.poll()
        return engine.cache.pool.num_held == 0

    eventually(is_settled)


def test_one_engine_answers_from_what_another_computed(alone: list[int]) -> None:
    with Sidecar(MEMORY_CAPACITY="16MiB") as served:
        with engine_of(served) as (one, _):
            assert answer(one) == (alone, {})
            settle(one)
            with engine_of(served) as (other, _):
                tokens, tokens_from = answer(other)
                assert tokens == alone
                assert tokens_from == {"memory": NUM_SERVED}
        eventually(lambda: served.metric("kvstore_pinned_blocks", "memory") == 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_goes_on_when_the_sidecar_is_gone(alone: list[int], number: signal.Signals) -> None:
    with Sidecar(MEMORY_CAPACITY="16MiB") as served, engine_of(served) as (engine, _):
        assert answer(engine)[0] == alone
        settle(engine)
        engine.cache.pool.evict(engine.cache.num_pages)
        request = engine.submit(PROMPT, ANSWER)
        engine.step()
        served.send(number)
        while engine.has_work:
            engine.step()
        assert request.output == alone
        engine.cache.pool.evict(engine.cache.num_pages)
        assert answer(engine)[0] == alone
        served.kill()
