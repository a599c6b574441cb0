"""Simulated engines that share a sidecar, each with a client of its own: what it finds out late, loses and survives."""

from collections.abc import Iterator
from contextlib import closing
from functools import cache

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.layout import Layout
from kvstore.testing.engine import Engine, EngineRequest, Phase
from kvstore.testing.engine_model import Group
from kvstore.testing.sidecar import PATIENCE_S, Sidecar, eventually

GROUPS = [
    Group("full", Layout("uint8", 2, 2, (4, 4), 4, num_stripes=2)),
    Group("window", Layout("float16", 1, 4, (2, 2), 4, num_stripes=2), trailing_blocks=2),
]
PROMPTS = [(number % 3, *range(16 - number)) for number in range(6)]
"""Of at least two whole blocks, which half of them share with another."""


NUM_OUTPUT_TOKENS = 4

Client = tuple[Engine, StoreClient]


@pytest.fixture
def served() -> Iterator[Sidecar]:
    with Sidecar() as served:
        yield served


@pytest.fixture
def engines(served: Sidecar) -> Iterator[list[Client]]:
    """Two, the second of two ranks."""
    with closing(served.client()) as one, closing(served.client()) as other:
        yield [
            (Engine(client, GROUPS, num_pages=32, num_ranks=num_ranks), client)
            for num_ranks, client in enumerate((one, other), start=1)
        ]


@cache
def right_output(prompt: tuple[int, ...]) -> list[int]:
    engine = Engine(None, GROUPS, num_pages=8)
    request = engine.add("alone", prompt, NUM_OUTPUT_TOKENS)
    engine.run(lambda: None)
    return request.output


def add_all(engine: Engine) -> list[EngineRequest]:
    return [engine.add(f"r{number}", prompt, NUM_OUTPUT_TOKENS) for number, prompt in enumerate(PROMPTS)]


def assert_right(requests: list[EngineRequest]) -> None:
    assert [request.output for request in requests] == [right_output(prompt) for prompt in PROMPTS]


def settle(served: Sidecar) -> None:
    """Nothing is left over in the sidecar."""
    for name in ("kvstore_pinned_blocks", "kvstore_quarantined_slots"):
        eventually(lambda name=name: served.metric(name, "memory") == 0)  # type: ignore[misc]  # a lambda's default
    with served.admin() as admin:
        assert admin.check() == ""


def test_what_one_engine_computed_another_of_more_ranks_loads(served: Sidecar, engines: list[Client]) -> None:
    for engine, client in engines:
        requests = add_all(engine)
        engine.run(lambda client=client: client.wait(0.01))  # type: ignore[misc]  # a lambda's default
        assert_right(requests)
        engine.check_idle()
        assert sum(engine.check_stored(request) for request in requests) > 0
    assert [request.num_loaded_blocks for request in requests] == [(len(prompt) - 1) // 4 for prompt in PROMPTS]
    settle(served)


def test_engines_that_compute_the_same_at_the_same_time_agree(served: Sidecar, engines: list[Client]) -> None:
    requests = [add_all(engine) for engine, _ in engines]
    (one, _), (other, client) = engines

    def turn() -> None:
        one.step()
        for copy in one.copies:
            copy.step()
        client.wait(0.01)

    other.run(turn)
    one.run(lambda: client.wait(0.01))
    for asked, (engine, _) in zip(requests, engines, strict=True):
        assert_right(asked)
        assert sum(engine.check_stored(request) for request in asked) > 0
        engine.check_idle()
    settle(served)


@pytest.mark.parametrize("phase", [Phase.PREFETCHING, Phase.LOADING, Phase.DECODING])
def test_a_sidecar_that_is_killed_costs_no_token(served: Sidecar, engines: list[Client], phase: Phase) -> None:
    (one, _), (other, client) = engines
    computed = add_all(one)
    one.run(lambda: client.wait(0.01))
    assert sum(one.check_stored(request) for request in computed) > 0
    requests = add_all(other)

    def is_there() -> bool:
        for copy in other.copies:
            copy.run()
        other.step()
        return any(request.phase is phase for request in requests)

    eventually(is_there)
    served.kill()
    other.run(lambda: client.wait(0.01))
    assert_right(requests)
    other.check_idle()
    served.restart()
    served.wait_ready()
    assert client.wait_connected(PATIENCE_S)
    again = add_all(other)
    other.run(lambda: client.wait(0.01))
    assert_right(again)
    settle(served)
