"""The simulated engine over a store in a tiny world: who comes, goes, gives way and fails, and in what order, is drawn.

Safety: every byte loaded is right, and so are the tokens. Liveness: every request ends, though tiers hang. Accounting:
when idle, no page, pin, slot or copy is left over.
"""

from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.layout import Layout
from kvstore.testing.dict_tiers import DictSharedTier
from kvstore.testing.engine import Engine, EngineRequest, Phase
from kvstore.testing.engine_model import Group
from kvstore.tiers.base import BlockMove
from kvstore.types import Outcome
from tests.worlds import World

FULL = Group("full", Layout("uint8", 2, 2, (4, 4), 4, num_stripes=2))
WINDOW = Group("window", Layout("float16", 1, 4, (2, 2), 4, num_stripes=2), trailing_blocks=2)
STATE = Group("state", WINDOW.layout, trailing_blocks=1)
MODELS = [[FULL], [FULL, WINDOW], [WINDOW, FULL, STATE]]
ROOT = (1, 2, 3, 4, 5, 6, 7, 8)
PROMPTS = [ROOT, (*ROOT, 9), (*ROOT, 9, 9, 9, 9, 9, 9), (*ROOT, 5, 5, 5, 5, 6), (*ROOT[:4], 7, 7, 7, 7, 7), (2,)]
OUTCOMES = [Outcome.ABSENT, Outcome.DAMAGED, Outcome.FAILED, Outcome.FULL, Outcome.LATE, Outcome.FOREIGN]
NUM_OUTPUT_TOKENS = 5

prompts = st.sampled_from(PROMPTS)


@cache
def tokens_without_a_store(prompt: tuple[int, ...], model: int) -> list[int]:
    engine = Engine(None, MODELS[model], num_pages=8)
    request = engine.add("alone", prompt, NUM_OUTPUT_TOKENS)
    engine.run(lambda: None)
    return request.output


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        model=st.integers(0, len(MODELS) - 1),
        num_ranks=st.integers(1, 2),
        num_pages=st.sampled_from([5, 6, 9]),
        file=st.sampled_from([10, 0]),
        admission=st.sampled_from(["always", "second_touch", "on_evict"]),
        earlier=st.lists(prompts, max_size=3),
    )
    def open(
        self, model: int, num_ranks: int, num_pages: int, file: int, admission: str, earlier: list[tuple[int, ...]]
    ) -> None:
        self.model = model
        self.shared = DictSharedTier()
        self.world = World(10, file, shared=self.shared, admission=admission, num_extents=5)
        self.shared._clock = self.world.clock
        self.faults: dict[tuple[str, str], Outcome] = {}
        if self.world.file is not None:
            self.world.file.fault = lambda op, move: self._fault("file", op, move)
        self.shared.fault = lambda op, move: self._fault("redis", op, move)
        self.engine = Engine(
            self.world.store, MODELS[model], num_pages=num_pages, num_ranks=num_ranks, clock=self.world.clock
        )
        self.requests: list[tuple[EngineRequest, tuple[int, ...]]] = []
        for prompt in earlier:
            self.arrive(prompt, num_evicted=0, num_steps=0)
            self.engine.run(self.world.settle)

    def _fault(self, tier: str, op: str, move: BlockMove) -> Outcome | None:
        return self.faults.get((tier, op)) if move.key[-1] % 2 else None

    def draw_request(self, data: st.DataObject) -> EngineRequest:
        return data.draw(st.sampled_from(self.engine.live))

    # ---- the engine

    @rule(prompt=prompts, num_evicted=st.sampled_from([0, 1, 10]), num_steps=st.integers(0, 1))
    def arrive(self, prompt: tuple[int, ...], num_evicted: int, num_steps: int) -> None:
        self.world.store.evict(num_evicted)
        request = self.engine.add(f"r{len(self.requests)}", prompt, NUM_OUTPUT_TOKENS)
        self.requests.append((request, prompt))
        for _ in range(num_steps):
            self.engine.step()

    @rule()
    def step(self) -> None:
        self.engine.step()

    @rule(num_rounds=st.integers(1, 4))
    def all_goes_well_for_a_while(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self.engine.step()
            for copy in self.engine.copies:
                copy.run()
            self.world.settle()

    @precondition(lambda self: self.engine.copies)
    @rule(data=st.data(), num_blocks=st.integers(1, 3))
    def a_rank_copies(self, data: st.DataObject, num_blocks: int) -> None:
        copy = data.draw(st.sampled_from(self.engine.copies))
        for _ in range(min(num_blocks, len(copy.moves))):
            copy.step()

    @precondition(lambda self: self.engine.copies)
    @rule(data=st.data())
    def a_rank_fails(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.engine.copies)).fail()

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.preempt(self.draw_request(data))

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(self.draw_request(data))

    # ---- the world

    @precondition(lambda self: any(lane.num_waiting for lane in self.world.steps.lanes.values()))
    @rule(data=st.data())
    def a_copy_between_tiers_runs(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([lane for lane in self.world.steps.lanes.values() if lane.num_waiting]))
        lane.step(data.draw(st.integers(0, lane.num_waiting - 1)))

    @rule(seconds=st.sampled_from([0.3, 1.1, 15.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule(
        tier=st.sampled_from(["file", "redis"]),
        op=st.sampled_from(["read", "write"]),
        outcome=st.sampled_from([None, *OUTCOMES]),
    )
    def fault(self, tier: str, op: str, outcome: Outcome | None) -> None:
        self.faults.pop((tier, op), None)
        if outcome is not None:
            self.faults[tier, op] = outcome

    # ---- promises

    @rule()
    def everything_ends_though_every_tier_hangs(self) -> None:
        self.engine.run(lambda: self.world.clock.advance(0.1))
        self.engine.check_idle()
        self.tokens_are_right()

    @invariant()
    def tables_hold(self) -> None:
        self.world.store.check()

    def tokens_are_right(self) -> None:
        for request, prompt in self.requests:
            right = tokens_without_a_store(prompt, self.model)
            assert request.output == right[: len(request.output)]
            assert request.phase is Phase.ABORTED or request.output == right
            self.engine.check_stored(request)

    def teardown(self) -> None:
        """Nothing is left over at the end."""
        self.engine.run(self.world.settle)
        self.tokens_are_right()
        self.world.clock.advance(30.0)  # copies that were given up count as stuck no more
        self.world.settle()
        self.engine.check_idle()
        self.world.assert_idle()
        self.world.close()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
