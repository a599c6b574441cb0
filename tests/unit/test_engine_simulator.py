"""The simulated engine itself: that it uses the store, and that it finds what it is there to find."""

from collections.abc import Callable

import pytest

from kvstore.errors import LayoutError
from kvstore.layout import Layout
from kvstore.testing.dict_tiers import DictSharedTier
from kvstore.testing.engine import Engine, EngineRequest, Phase
from kvstore.testing.engine_model import Group
from kvstore.tiers.base import BlockMove
from kvstore.types import Outcome
from tests.worlds import World, world

FULL = Group("full", Layout("uint8", 2, 2, (4, 4), 4, num_stripes=2))
WINDOW = Group("window", Layout("float16", 1, 4, (2, 2), 4, num_stripes=2), trailing_blocks=2)
GROUPS = [FULL, WINDOW]
PROMPT = list(range(17))  # four blocks and a token to compute
NUM_OUTPUT_TOKENS = 4


def engine_over(world: World, num_ranks: int = 2, num_pages: int = 12, max_step_tokens: int = 8) -> Engine:
    return Engine(
        world.store,
        GROUPS,
        num_pages=num_pages,
        num_ranks=num_ranks,
        max_step_tokens=max_step_tokens,
        clock=world.clock,
    )


def answered(engine: Engine, world: World, prompt: list[int] = PROMPT) -> EngineRequest:
    request = engine.add("r", prompt, NUM_OUTPUT_TOKENS)
    engine.run(world.settle)
    engine.check_idle()
    world.assert_idle()
    return request


def right_output(
    prompt: list[int] = PROMPT, *, num_ranks: int = 1, num_pages: int = 12, max_step_tokens: int = 8
) -> list[int]:
    engine = Engine(None, GROUPS, num_pages=num_pages, num_ranks=num_ranks, max_step_tokens=max_step_tokens)
    request = engine.add("alone", prompt, NUM_OUTPUT_TOKENS)
    engine.run(lambda: None)
    engine.check_idle()
    return request.output


# ---- it is an engine, and it uses the store


def test_tokens_depend_on_the_prompt_alone() -> None:
    assert right_output(num_ranks=2) == right_output()
    assert right_output(num_pages=6, max_step_tokens=1) == right_output()
    assert right_output(max_step_tokens=99) == right_output()
    assert right_output([*PROMPT[:-1], 99]) != right_output()
    assert right_output([99, *PROMPT[1:]]) != right_output()


def test_a_second_request_loads_from_ram() -> None:
    with world(32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        assert answered(engine, tiny).num_loaded_blocks == 0
        second = answered(engine, tiny)
        assert second.num_loaded_blocks == 4
        assert second.output == right_output()
        assert answered(engine, tiny, [*PROMPT[:9], 99, 99, 99, 99]).num_loaded_blocks == 2


@pytest.mark.parametrize("tier", ["file", "redis"])
def test_a_second_request_loads_from_below(tier: str) -> None:
    shared = DictSharedTier() if tier == "redis" else None
    with world(32, 32 if tier == "file" else 0, shared=shared, num_extents=4) as tiny:
        if shared:
            shared._clock = tiny.clock
        engine = engine_over(tiny)
        answered(engine, tiny)
        assert tiny.store.evict(32) == 10  # five blocks in two groups
        second = answered(engine, tiny)
        assert second.num_loaded_blocks == 4
        assert second.output == right_output()
        # A group that looks at two blocks needs no more of them.
        assert tiny.store.snapshot()["kvstore_copies_total"][tier, "read", "ok"] == 4 + 2


def test_requests_share_steps_and_give_way_where_pages_run_out() -> None:
    with world(32, num_extents=4) as tiny:
        engine = engine_over(tiny, num_pages=8)
        prompts = [[number, *PROMPT[1:]] for number in range(4)]
        requests = [engine.add(f"r{number}", prompt, NUM_OUTPUT_TOKENS) for number, prompt in enumerate(prompts)]
        engine.run(tiny.settle)
        assert [request.output for request in requests] == [right_output(prompt) for prompt in prompts]
        assert sum(request.num_preemptions for request in requests) > 0
        engine.check_idle()
        tiny.assert_idle()


@pytest.mark.parametrize(
    ("group", "block", "num_loaded"),
    [(0, 3, 3), (0, 1, 1), (0, 0, 0), (1, 3, 3), (1, 2, 2), (1, 1, 4), (1, 0, 4)],
)
def test_a_hit_is_the_longest_of_which_every_group_has_what_it_needs(group: int, block: int, num_loaded: int) -> None:
    with world(32, 32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        lost = answered(engine, tiny).chains.keys[group][block]
        tiny.store.evict(32)

        def fault(op: str, move: BlockMove) -> Outcome | None:
            return Outcome.DAMAGED if op == "read" and move.key == lost else None

        assert tiny.file is not None
        tiny.file.fault = fault
        second = engine.add("second", PROMPT, NUM_OUTPUT_TOKENS)
        engine.run(tiny.settle)
        assert second.num_loaded_blocks == num_loaded
        assert second.output == right_output()


def test_groups_of_one_layout_have_blocks_of_their_own() -> None:
    with world(32, num_extents=4) as tiny:
        groups = [WINDOW, Group("state", WINDOW.layout, trailing_blocks=1)]
        engine = Engine(tiny.store, groups, num_pages=12, clock=tiny.clock)
        assert answered(engine, tiny).num_loaded_blocks == 0
        second = answered(engine, tiny)
        assert second.num_loaded_blocks == 4
        assert engine.check_stored(second) == 10


# ---- what it finds


@pytest.mark.parametrize(("group", "rank"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_wrong_byte_in_ram_is_found(group: int, rank: int) -> None:
    with world(32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        request = answered(engine, tiny)
        stripe = GROUPS[group].layout.bytes_of(rank, 2)
        with tiny.store.pin([request.chains.keys[group][3]]) as lease:
            lease.views[0][stripe.stop - 1] ^= 1
        with pytest.raises(AssertionError, match="in RAM"):
            engine.check_stored(request)
        with pytest.raises(AssertionError, match=f"group '{GROUPS[group].name}', rank {rank}"):
            answered(engine, tiny)


@pytest.mark.parametrize("group", [0, 1])
def test_a_wrong_byte_in_a_page_changes_the_tokens(group: int) -> None:
    engine = Engine(None, GROUPS, num_pages=12, num_ranks=2)
    request = engine.add("r", PROMPT, NUM_OUTPUT_TOKENS)
    while request.phase is not Phase.DECODING:
        engine.step()
    engine.pages.part(request.pages[3], GROUPS[group], 1)[-1] ^= 1
    engine.run(lambda: None)
    assert request.output[0] == right_output()[0]
    assert request.output[1:] != right_output()[1:]


def test_blocks_that_a_group_needs_and_was_not_given_change_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        answered(engine, tiny)
        monkeypatch.setattr(Group, "needs", lambda group, num_blocks: range(num_blocks - 1, num_blocks))
        assert answered(engine, tiny).output != right_output()


def test_a_hang_is_said() -> None:
    with world(32, 32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        answered(engine, tiny)
        tiny.store.evict(32)
        engine.add("r", PROMPT, NUM_OUTPUT_TOKENS)
        with pytest.raises(AssertionError, match="prefetching"):
            engine.run(lambda: None, max_steps=50)  # no copy runs and no time passes


def test_a_page_that_is_left_over_is_found() -> None:
    engine = Engine(None, GROUPS, num_pages=4)
    engine.check_idle()
    engine.pages.take(1)
    with pytest.raises(AssertionError, match="leaked"):
        engine.check_idle()


def test_what_the_model_cannot_fill_is_refused() -> None:
    with pytest.raises(LayoutError, match="planes of one size"):
        Group("odd", Layout("uint8", 1, 1, (4, 8), 4))
    with pytest.raises(LayoutError, match="3 ranks"):
        Engine(None, GROUPS, num_pages=4, num_ranks=3)


# ---- ranks, and copies that take their time


def until(engine: Engine, world: World, is_so: Callable[[], bool]) -> None:
    """Step until it is so, and copy between steps."""
    for _ in range(100):
        engine.step()
        if is_so():
            return
        for copy in engine.copies:
            copy.run()
        world.settle()
    raise AssertionError("it never came about")


def test_a_block_is_stored_when_every_rank_has_done_its_part() -> None:
    with world(32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        request = engine.add("r", PROMPT, NUM_OUTPUT_TOKENS)
        engine.step()
        late, early = engine.copies
        early.run()
        late.step()
        engine.step()
        assert engine.check_stored(request) == 0
        late.run()
        engine.step()
        assert engine.check_stored(request) == 4  # two blocks in two groups
        engine.run(tiny.settle)
        assert request.output == right_output()


def test_what_is_being_loaded_stays_though_others_come() -> None:
    with world(12, num_extents=2) as tiny:
        engine = engine_over(tiny)
        answered(engine, tiny)
        request = engine.add("r", PROMPT, NUM_OUTPUT_TOKENS)
        until(engine, tiny, lambda: request.phase is Phase.LOADING)
        tiny.store.evict(12)
        other = engine_over(tiny, num_ranks=1)
        other.add("other", [7] * 17, NUM_OUTPUT_TOKENS)
        other.run(tiny.settle)
        engine.run(tiny.settle)
        assert request.num_loaded_blocks == 4
        assert request.output == right_output()
        tiny.assert_idle()


@pytest.mark.parametrize("late", [0, 1])
def test_a_load_is_over_when_every_rank_has_done_its_part(late: int) -> None:
    with world(32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        answered(engine, tiny)
        request = engine.add("r", PROMPT, NUM_OUTPUT_TOKENS)
        until(engine, tiny, lambda: request.phase is Phase.LOADING)
        engine.copies[1 - late].run()
        engine.step()
        assert request.phase is Phase.LOADING
        engine.run(tiny.settle)
        assert request.num_loaded_blocks == 4


def test_a_rank_that_fails_costs_the_block_and_nothing_else() -> None:
    with world(32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        request = engine.add("r", PROMPT, NUM_OUTPUT_TOKENS)
        engine.step()
        engine.copies[1].fail()
        engine.run(tiny.settle)
        assert request.output == right_output()
        assert engine.check_stored(request) == 6  # blocks 2, 3 and 4, which no chain leads to
        tiny.assert_idle()
        assert answered(engine, tiny).num_loaded_blocks == 0
        assert answered(engine, tiny).num_loaded_blocks == 4


@pytest.mark.parametrize("num_copied", [0, 1, 4])
def test_a_load_that_fails_in_one_rank_fails_for_all_and_a_shorter_one_is_tried(num_copied: int) -> None:
    with world(32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        answered(engine, tiny)
        request = engine.add("r", PROMPT, NUM_OUTPUT_TOKENS)
        until(engine, tiny, lambda: request.phase is Phase.LOADING)
        good, bad = engine.copies
        good.run()
        for _ in range(num_copied):
            bad.step()
        failed_block = bad.moves[0].block
        bad.fail()
        engine.run(tiny.settle)
        assert request.num_loaded_blocks == failed_block
        assert request.output == right_output()
        engine.check_idle()
        tiny.assert_idle()


def test_a_load_whose_lease_was_lost_counts_for_nothing() -> None:
    with world(32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        answered(engine, tiny)
        request = engine.add("r", PROMPT, NUM_OUTPUT_TOKENS)
        until(engine, tiny, lambda: request.phase is Phase.LOADING)
        assert request.load is not None
        request.load.hit.leases[1].still_held = lambda: False
        engine.run(tiny.settle)
        assert request.num_loaded_blocks == 0
        assert request.output == right_output()
        tiny.assert_idle()


def test_pages_of_a_store_are_nobody_elses_until_it_is_done() -> None:
    with world(32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        request = engine.add("r", PROMPT, NUM_OUTPUT_TOKENS)
        while not request.has_ended:
            engine.step()
        assert engine.pages.num_free == 12 - 5
        engine.run(tiny.settle)
        engine.check_idle()
        assert engine.check_stored(request) == 10


# ---- requests that end, or lose their pages, in every state


@pytest.fixture(params=[phase for phase in Phase if phase not in (Phase.FINISHED, Phase.ABORTED)])
def phase(request: pytest.FixtureRequest) -> Phase:
    phase: Phase = request.param
    return phase


def in_phase(engine: Engine, world: World, phase: Phase) -> EngineRequest:
    """A request in that phase, beside one that decodes and has most of the pages."""
    other = engine.add("other", [7] * 17, 2 * NUM_OUTPUT_TOKENS)
    until(engine, world, lambda: other.phase is Phase.DECODING)
    if phase in (Phase.PREFETCHING, Phase.PINNED, Phase.LOADING):
        world.store.evict(32)
    request = engine.add("r", PROMPT if phase is not Phase.PREFILLING else [8] * 17, NUM_OUTPUT_TOKENS)
    if phase is Phase.LOADING:
        engine.abort(other)
    if phase is not Phase.WAITING:
        until(engine, world, lambda: request.phase is phase)
    assert request.phase is phase
    return request


def test_an_abort_in_any_state_leaves_nothing_behind(phase: Phase) -> None:
    with world(32, 32, num_extents=4) as tiny:
        engine = engine_over(tiny, num_pages=8)
        answered(engine, tiny)
        request = in_phase(engine, tiny, phase)
        engine.abort(request)
        assert request.has_ended
        engine.run(tiny.settle)
        tiny.settle()
        engine.check_idle()
        tiny.assert_idle()
        assert answered(engine, tiny).output == right_output()


def test_a_request_that_is_preempted_in_any_state_has_the_same_tokens(phase: Phase) -> None:
    with world(32, 32, num_extents=4) as tiny:
        engine = engine_over(tiny, num_pages=8)
        answered(engine, tiny)
        request = in_phase(engine, tiny, phase)
        engine.preempt(request)
        assert request.phase is Phase.WAITING
        assert not request.pages
        engine.run(tiny.settle)
        assert request.output == right_output(request.tokens[:17])
        engine.check_idle()
        tiny.assert_idle()


def test_slots_that_an_aborted_request_was_storing_to_wait_for_its_ranks() -> None:
    with world(32, num_extents=4) as tiny:
        engine = engine_over(tiny)
        request = engine.add("r", PROMPT, NUM_OUTPUT_TOKENS)
        engine.step()
        assert engine.is_storing(request)
        engine.abort(request)
        engine.copies[0].run()
        engine.step()
        quarantined = tiny.store.snapshot()["kvstore_quarantined_slots"]
        assert sum(quarantined.values()) == 4
        engine.run(tiny.settle)
        assert engine.check_stored(request) == 0
        engine.check_idle()
        tiny.assert_idle()
