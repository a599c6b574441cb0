"""What is loaded, stored and prefetched. Ids are those of failures that people reported of such caches."""

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from connectors.plan import (
    NOTHING,
    Draft,
    EngineTraits,
    HitSearch,
    Load,
    Planner,
    blocks_to_load,
    blocks_to_store,
    needed_blocks,
    usable_blocks,
)

TOKENS = 16
"""Per block."""


def planner_of(traits: EngineTraits | None = None) -> Planner:
    planner = Planner(traits or EngineTraits(TOKENS), TOKENS, wait_s=2.0)
    planner.arrive("r")
    return planner


# ---- loading


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2), (1000, 62)]
)
def test_a_whole_prompt_that_is_there_leaves_a_token_to_compute(num_tokens: int, expected: int) -> None:
    """WK-037: of N tokens at most N - 1 are loaded, in whole blocks."""
    assert usable_blocks(num_tokens, TOKENS) == expected
    assert blocks_to_load(num_tokens, 0, num_tokens // TOKENS, TOKENS).blocks == range(expected)


@pytest.mark.parametrize(
    ("num_computed_tokens", "num_ready_blocks", "expected"),
    [
        (0, 5, Load(range(5))),
        (32, 5, Load(range(2, 5))),
        (80, 5, Load()),
        (64, 2, Load()),
        (17, 5, Load(range(2, 5), gap_tokens=15)),
        (79, 5, Load()),
        (1000, 5, Load()),
    ],
)
def test_a_load_begins_where_the_engines_own_blocks_end(
    num_computed_tokens: int, num_ready_blocks: int, expected: Load
) -> None:
    """SC-012, SC-005, WK-036, UX-011: never a negative number, never a block the engine has a part of, never raises."""
    assert blocks_to_load(100, num_computed_tokens, num_ready_blocks, TOKENS) == expected


@given(
    num_tokens=st.integers(0, 300),
    num_computed_tokens=st.integers(0, 400),
    num_ready_blocks=st.integers(0, 30),
    tokens_per_block=st.integers(1, 20),
)
def test_a_load_is_new_ready_whole_and_never_the_last_token(
    num_tokens: int, num_computed_tokens: int, num_ready_blocks: int, tokens_per_block: int
) -> None:
    load = blocks_to_load(num_tokens, num_computed_tokens, num_ready_blocks, tokens_per_block)
    assert 0 <= load.gap_tokens < tokens_per_block
    if load.blocks:
        assert load.blocks.start * tokens_per_block == num_computed_tokens + load.gap_tokens
        assert load.blocks.stop <= num_ready_blocks
        assert load.blocks.stop * tokens_per_block <= num_tokens - 1
    else:
        assert load == Load()


def test_a_load_is_decided_once() -> None:
    """SC-003: asked again, with whatever counts, the answer is the one that blocks were pinned for."""
    planner = planner_of()
    load = planner.load("r", 100, 0, 4)
    planner.arrive("r")
    assert planner.load("r", 100, 64, 6) == load == Load(range(4))


def test_a_resumed_request_loads_generated_tokens_too() -> None:
    """SC-002: a preempted request is longer than its prompt, and all of it counts."""
    planner = planner_of()
    assert planner.load("r", 33, 0, 0) == Load()
    assert planner.store("r", 80) == range(5)
    planner.restart("r")
    assert planner.load("r", 82, 0, 5) == Load(range(5))
    assert planner.store("r", 82) == NOTHING


def test_a_draft_model_computes_the_last_block_of_a_hit() -> None:
    """WK-043: it reads hidden states, which the store does not have."""
    planner = planner_of(EngineTraits(TOKENS, draft=Draft.IN_BLOCK))
    assert planner.load("r", 100, 0, 6) == Load(range(5))
    planner.arrive("short")
    assert planner.load("short", 33, 0, 6) == Load(range(1))
    planner.arrive("nothing")
    assert planner.load("nothing", 33, 0, 0) == Load()


# ---- groups of layers that need different things


@pytest.mark.parametrize(
    ("window_tokens", "expected"), [(None, None), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3), (1024, 64)]
)
def test_a_window_needs_the_blocks_of_the_tokens_before_the_next(window_tokens: int | None, expected: int) -> None:
    """The next token attends to itself and the ``window_tokens - 1`` before it, and a hit ends with a block."""
    assert EngineTraits(TOKENS, window_tokens=(window_tokens,)).window_blocks(TOKENS) == (expected,)


def test_a_window_reaches_before_the_block_that_a_draft_model_computes_anew() -> None:
    traits = EngineTraits(TOKENS, draft=Draft.IN_BLOCK, window_tokens=(None, 33))
    assert traits.window_blocks(TOKENS) == (None, 3)


@pytest.mark.parametrize(
    ("windows", "there", "expected"),
    [
        ((None,), ["####....##"], 4),
        ((2,), ["####....##"], 10),
        ((3,), ["####....##"], 4),
        ((2,), [".........."], 0),
        ((2,), ["#........."], 1),
        ((2,), [".#........"], 0),
        ((2,), [".##.##.#.#"], 6),
        ((None, 2), ["########..", "##..##.#.#"], 6),
        ((None, 2), ["#####.....", "##..##.#.#"], 2),
        ((2, None), ["##..##.#.#", "##########"], 6),
        ((2, 3), ["##########", "###....###"], 10),
        ((2, 3), ["########..", ".###...###"], 4),
        ((None, None, 1), ["#######...", "######....", "....#....."], 5),
    ],
)
def test_a_hit_ends_where_every_group_has_what_it_needs(
    windows: tuple[int | None, ...], there: list[str], expected: int
) -> None:
    assert longest_hit(10, windows, [[mark == "#" for mark in marks] for marks in there]) == expected


def longest_hit(most: int, windows: tuple[int | None, ...], there: list[list[bool]]) -> int:
    """What a search comes to in groups of which ``there`` says who has which block."""
    search = HitSearch(most, windows)
    num_rounds = 0
    while asked := search.open():
        before = search.num_blocks
        for group, blocks in asked.items():
            assert blocks == needed_blocks(before, windows[group]), "not what a hit of this length needs"
            missing = next((block for block in blocks if not there[group][block]), blocks.stop)
            search.found(group, blocks, missing - blocks.start)
        num_rounds += 1
        assert num_rounds <= 2 + 2 * most, "it goes on for ever"
    return search.num_blocks


GROUPS = st.lists(
    st.tuples(st.none() | st.integers(1, 5), st.lists(st.booleans() | st.just(True), min_size=12, max_size=12)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=500)
@given(most=st.integers(0, 12), groups=GROUPS)
def test_a_search_finds_what_trying_every_length_finds(most: int, groups: list[tuple[int | None, list[bool]]]) -> None:
    windows, there = tuple(window for window, _ in groups), [blocks for _, blocks in groups]
    legal = [
        length
        for length in range(most + 1)
        if all(has[block] for window, has in groups for block in needed_blocks(length, window))
    ]
    assert longest_hit(most, windows, there) == legal[-1]


def test_each_group_stores_on_from_where_it_had_room() -> None:
    planner = planner_of(EngineTraits(TOKENS, window_tokens=(None, 33)))
    planner.load("r", 100, 0, 0)
    assert [planner.store("r", 64, group) for group in (0, 1)] == [range(4), range(4)]
    planner.not_stored("r", 2, 1)
    assert [planner.store("r", 80, group) for group in (0, 1)] == [range(4, 5), range(2, 5)]


def test_no_hit_is_looked_for_beyond_what_was_decided_or_failed() -> None:
    planner = planner_of(EngineTraits(TOKENS, window_tokens=(None, 33)))
    assert planner.max_hit_blocks("r", 97) == 6
    planner.load("r", 97, 0, 4)
    assert planner.max_hit_blocks("r", 97) == 4
    planner.failed("r", 3)
    planner.restart("r")
    assert planner.max_hit_blocks("r", 97) == 3
    assert planner.max_hit_blocks("unknown", 97) == 0


# ---- loads that fail


def test_a_block_that_did_not_arrive_ends_the_load() -> None:
    """WK-030, CR-005: of [ok, ok, not, ok] two are there; the rest is computed, and stored again."""
    planner = planner_of()
    planner.load("r", 100, 0, 4)
    assert planner.failed("r", 2) == Load(range(2))
    assert planner.load("r", 100, 0, 4) == Load(range(2))
    assert planner.store("r", 100) == range(2, 6)


def test_a_load_that_lost_its_first_block_is_none() -> None:
    planner = planner_of()
    planner.load("r", 100, 17, 4)
    assert planner.failed("r", 2) == Load()


def test_what_failed_to_load_is_not_tried_again() -> None:
    """HG-012: a table that still says the block is there cannot keep a request from going on."""
    planner = planner_of()
    planner.load("r", 100, 0, 4)
    planner.failed("r", 1)
    planner.restart("r")
    assert planner.load("r", 100, 0, 4) == Load(range(1))
    planner.failed("r", 0)
    planner.restart("r")
    assert planner.load("r", 100, 0, 4) == Load()
    assert planner.prefetch("r", 100, 0, 0) == NOTHING


def test_a_pending_answer_is_asked_for_until_the_deadline() -> None:
    """HG-010: "ask again" ends, whatever the store says."""
    planner = planner_of()
    assert planner.may_wait("r", 10.0)
    assert planner.may_wait("r", 11.9)
    assert not planner.may_wait("r", 12.0)
    planner.restart("r")
    assert planner.may_wait("r", 20.0)
    planner.load("r", 100, 0, 4)
    assert not planner.may_wait("r", 20.0)


# ---- prefetching


@pytest.mark.parametrize(
    ("num_computed_tokens", "num_ready_blocks", "expected"),
    [(0, 0, range(6)), (0, 4, range(4, 6)), (64, 0, range(4, 6)), (0, 6, NOTHING), (96, 0, NOTHING)],
)
def test_what_neither_the_engine_nor_ram_has_is_prefetched_once(
    num_computed_tokens: int, num_ready_blocks: int, expected: range
) -> None:
    planner = planner_of()
    assert planner.prefetch("r", 97, num_computed_tokens, num_ready_blocks) == expected
    assert planner.prefetch("r", 97, num_computed_tokens, num_ready_blocks) == NOTHING
    planner.restart("r")
    assert planner.prefetch("r", 97, num_computed_tokens, num_ready_blocks) == expected


# ---- storing


@pytest.mark.parametrize(
    ("num_verified_tokens", "num_stored_blocks", "expected"),
    [(15, 0, range(0)), (16, 0, range(1)), (100, 2, range(2, 6)), (20, 4, range(4, 4)), (0, 0, range(0))],
)
def test_complete_blocks_are_stored(num_verified_tokens: int, num_stored_blocks: int, expected: range) -> None:
    assert blocks_to_store(num_verified_tokens, num_stored_blocks, TOKENS) == expected


def test_a_count_that_falls_back_stores_nothing_and_nothing_twice() -> None:
    """HG-016: rejected drafts may take a request back over the end of a block."""
    planner = planner_of()
    planner.load("r", 100, 0, 0)
    assert planner.store("r", 80) == range(5)
    assert planner.store("r", 60) == NOTHING
    assert planner.store("r", 97) == range(5, 6)


def test_what_ram_has_is_not_stored_and_what_only_the_engine_has_is() -> None:
    planner = planner_of()
    planner.load("r", 100, 64, 2)
    assert planner.store("r", 64) == range(2, 4)
    planner.arrive("hit")
    planner.load("hit", 96, 0, 6)
    assert planner.store("hit", 96) == NOTHING


def test_what_the_store_had_no_room_for_is_planned_again() -> None:
    """CR-006: fewer slots than asked for leave no gap in the chain."""
    planner = planner_of()
    planner.load("r", 100, 0, 0)
    assert planner.store("r", 64) == range(4)
    planner.not_stored("r", 1)
    assert planner.store("r", 80) == range(1, 5)


# ---- whom


@pytest.mark.parametrize(
    ("traits", "tokens_per_block", "reason"),
    [
        (EngineTraits(16, attention=frozenset({"full", "mamba"})), 16, "mamba"),
        (EngineTraits(16, attention=frozenset({"chunked local"})), 16, "chunked local"),
        (EngineTraits(16, window_tokens=(None, 1)), 16, "one token"),
        (EngineTraits(16, num_hosts=2), 16, "2 hosts"),
        (EngineTraits(16, draft=Draft.ELSEWHERE), 16, "draft"),
        (EngineTraits(16), 24, "24 tokens"),
        (EngineTraits(16), 0, "0 tokens"),
    ],
)
def test_an_engine_that_cannot_be_served_is_told_why_and_gets_nothing(
    traits: EngineTraits, tokens_per_block: int, reason: str
) -> None:
    """SC-006, SC-009: no hit is claimed that the engine could not use."""
    planner = Planner(traits, tokens_per_block, wait_s=2.0)
    assert len(planner.refusals) == 1
    assert reason in planner.refusals[0]
    planner.arrive("r")
    assert planner.prefetch("r", 100, 0, 0) == NOTHING
    assert not planner.may_wait("r", 0.0)
    assert planner.load("r", 100, 0, 4) == Load()
    assert planner.store("r", 100) == NOTHING
    assert planner.num_requests == 0


def test_an_engine_that_can_be_served_is_not_refused() -> None:
    assert EngineTraits(16, attention=frozenset({"full", "mla"}), draft=Draft.IN_BLOCK).refusals(64) == []


def test_nothing_is_left_of_a_request_that_ended_and_late_calls_do_nothing() -> None:
    """CR-011: an end, then an abort, then a copy that reports."""
    planner = planner_of()
    planner.load("r", 100, 0, 4)
    planner.end("r")
    planner.end("r")
    assert planner.failed("r", 2) == Load()
    assert planner.load("r", 100, 0, 4) == Load()
    assert planner.prefetch("r", 100, 0, 0) == NOTHING
    assert planner.store("r", 100) == NOTHING
    assert not planner.may_wait("r", 0.0)
    planner.not_stored("r", 1)
    planner.restart("r")
    assert planner.num_requests == 0


# ---- a request's whole life


@dataclass
class World:
    """One request of an engine that prefills in chunks, generates, is preempted, and whose loads may fail."""

    num_tokens: int
    ready: int
    planner: Planner = field(default_factory=planner_of)
    computed: int = 0
    stored_to: int = 0

    def begin(self, resident_tokens: int) -> None:
        """A life begins: the engine has some tokens itself and takes what the planner says."""
        self.computed = min(resident_tokens, self.num_tokens - 1)
        self.load = self.planner.load("r", self.num_tokens, self.computed, self.ready)
        self.stored_to = self.ready
        if self.load.blocks:
            assert self.load.blocks.start * TOKENS >= self.computed
            assert self.load.blocks.stop * TOKENS < self.num_tokens
            self.computed = self.load.blocks.stop * TOKENS

    def fail(self, block: int) -> None:
        left = self.planner.failed("r", block)
        assert all(index < block for index in left.blocks)
        self.ready = self.stored_to = min(self.ready, block)
        self.computed = min(self.computed, block * TOKENS)
        self.load = left

    def compute(self, num_tokens: int) -> None:
        self.computed = min(self.num_tokens, self.computed + num_tokens)
        blocks = self.planner.store("r", self.computed)
        assert self.planner.store("r", self.computed) == range(blocks.stop, blocks.stop), "planned twice"
        assert not blocks or blocks.start == self.stored_to, "a gap, or a block stored again"
        assert not blocks or blocks.stop * TOKENS <= self.computed, "tokens that are not there"
        if blocks:
            self.ready = self.stored_to = blocks.stop
        assert self.stored_to >= self.computed // TOKENS, "a block was left out"


STEPS = st.one_of(
    st.tuples(st.just("compute"), st.integers(1, 70)),
    st.tuples(st.just("generate"), st.integers(1, 20)),
    st.tuples(st.just("preempt"), st.integers(0, 100)),
    st.tuples(st.just("evict"), st.integers(0, 8)),
    st.tuples(st.just("fail"), st.integers(0, 8)),
)


@settings(max_examples=500)
@example(17, 0, 0, [("compute", 16), ("preempt", 0), ("fail", 0), ("compute", 16), ("preempt", 0), ("compute", 16)])
@given(
    prompt_tokens=st.integers(1, 130),
    ready=st.integers(0, 8),
    resident_tokens=st.integers(0, 100),
    steps=st.lists(STEPS, max_size=12),
)
def test_a_life_with_chunks_preemptions_and_failures(
    prompt_tokens: int, ready: int, resident_tokens: int, steps: list[tuple[str, int]]
) -> None:
    world = World(prompt_tokens, min(ready, prompt_tokens // TOKENS))
    world.begin(resident_tokens)
    for action, amount in steps:
        match action:
            case "compute":
                world.compute(amount)
            case "generate":
                world.num_tokens += amount
            case "evict":
                world.planner.restart("r")
                world.ready = min(world.ready, amount)
                world.begin(0)
            case "preempt":
                world.planner.restart("r")
                world.begin(amount)
            case "fail" if amount in world.load.blocks:
                world.fail(amount)
    world.planner.end("r")
    assert world.planner.num_requests == 0
