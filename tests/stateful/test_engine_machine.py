"""The simulated engine over a store in a tiny world: who comes, goes, gives way and fails, and in what order, is drawn.

Safety: every byte loaded is right, and so are the tokens. Liveness: every request ends, though tiers hang. Accounting:
when idle, no page, pin, slot or copy is left over.
"""

from collections.abc import Callable
from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvstore.layout import Layout
from kvstore.testing.engine import Engine, EngineRequest, Phase
from kvstore.testing.engine_model import Group
from tests.stateful.world_machine import WorldMachine
from tests.worlds import World

FULL = Group("full", Layout("uint8", 2, 2, (4, 4), 4, num_stripes=2))
WINDOW = Group("window", Layout("float16", 1, 4, (2, 2), 4, num_stripes=2), trailing_blocks=2)
STATE = Group("state", WINDOW.layout, trailing_blocks=1)
MODELS = [[FULL], [FULL, WINDOW], [WINDOW, FULL, STATE]]
ROOT = (1, 2, 3, 4, 5, 6, 7, 8)
PROMPTS = [
    (*ROOT, 9),
    (*ROOT, 9, 9, 9, 9, 9, 9),
    (*ROOT, 5, 5, 5, 5, 6),
    (*ROOT[:4], 7, 7, 7, 7, 7),
    (3, 3, 3, 3, 7, 7, 7, 7, 7),  # a block of the same tokens after others
    (2,),
]
NUM_OUTPUT_TOKENS = 5
LIVE = [phase.value for phase in Phase if phase not in (Phase.FINISHED, Phase.ABORTED)]
STORING = "storing"

Interrupt = Callable[[Engine, EngineRequest], None]

prompts = st.sampled_from(PROMPTS)


@cache
def tokens_without_a_store(prompt: tuple[int, ...], model: int) -> list[int]:
    engine = Engine(None, MODELS[model], num_pages=8)
    request = engine.add("alone", prompt, NUM_OUTPUT_TOKENS)
    engine.run(lambda: None)
    return request.output


class EngineMachine(WorldMachine):
    @initialize(
        model=st.integers(0, len(MODELS) - 1),
        num_ranks=st.integers(1, 2),
        num_pages=st.integers(5, 7),
        file=st.sampled_from([10, 0]),
        admission=st.sampled_from(["always", "second_touch", "on_evict"]),
        earlier=st.lists(prompts, min_size=1, max_size=3),
    )
    def open(
        self, model: int, num_ranks: int, num_pages: int, file: int, admission: str, earlier: list[tuple[int, ...]]
    ) -> None:
        self.model = model
        self.open_world(10, file, admission=admission, num_extents=5)
        self.engine = Engine(
            self.world.store, MODELS[model], num_pages=num_pages, num_ranks=num_ranks, clock=self.world.clock
        )
        self.requests: list[tuple[EngineRequest, tuple[int, ...]]] = []
        self.interrupts: dict[str, Interrupt] = {}
        self.arrive(earlier, 0)
        self.engine.run(self.world.settle)
        self.arrive(earlier, 0)

    # ---- the engine

    @precondition(lambda self: len(self.engine.live) < 6)
    @rule(chosen=st.lists(prompts, min_size=1, max_size=3), num_evicted=st.sampled_from([0, 1, 10]))
    def arrive(self, chosen: list[tuple[int, ...]], num_evicted: int) -> None:
        self.world.store.evict(num_evicted)
        for prompt in chosen:
            request = self.engine.add(f"r{len(self.requests)}", prompt, NUM_OUTPUT_TOKENS)
            self.requests.append((request, prompt))

    @rule(
        num_steps=st.integers(1, 4),
        ranks=st.sampled_from([(0, 1), (0,), (1,), ()]),
        settle=st.sampled_from([World.settle, lambda _: None]),
    )
    def steps(self, num_steps: int, ranks: tuple[int, ...], settle: Callable[[World], None]) -> None:
        """Steps after each of which some ranks copy what they have to, and so do the tiers, or not."""
        for _ in range(num_steps):
            self.engine.step()
            self.interrupt()
            for copy in self.engine.copies:
                if copy.rank in ranks:
                    copy.run()
            settle(self.world)

    @precondition(lambda self: self.engine.copies)
    @rule(data=st.data(), num_moves=st.sampled_from([1, 99]))
    def a_rank_copies(self, data: st.DataObject, num_moves: int) -> None:
        copy = data.draw(st.sampled_from(self.engine.copies))
        for _ in range(min(num_moves, len(copy.moves))):
            copy.step()

    @precondition(lambda self: self.engine.copies)
    @rule(data=st.data())
    def a_rank_fails(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.engine.copies)).fail()

    @rule(state=st.sampled_from([*LIVE, STORING]), interrupt=st.sampled_from([Engine.abort, Engine.preempt]))
    def the_next_in_that_state_is_interrupted(self, state: str, interrupt: Interrupt) -> None:
        self.interrupts[state] = interrupt
        self.interrupt()

    def interrupt(self) -> None:
        for state, interrupt in tuple(self.interrupts.items()):
            for request in self.engine.live:
                if state == request.phase.value or (state == STORING and self.engine.is_storing(request)):
                    del self.interrupts[state]
                    interrupt(self.engine, request)
                    break

    # ---- promises

    @rule()
    def everything_ends_though_every_tier_hangs(self) -> None:
        self.engine.run(lambda: self.world.clock.advance(0.1))
        self.engine.check_idle()
        self.tokens_are_right()

    @rule()
    def what_is_in_ram_is_right(self) -> None:
        for request, _ in self.requests:
            self.engine.check_stored(request)

    def tokens_are_right(self) -> None:
        for request, prompt in self.requests:
            right = tokens_without_a_store(prompt, self.model)
            assert request.output == right[: len(request.output)]
            assert request.phase is Phase.ABORTED or request.output == right

    def teardown(self) -> None:
        """Nothing is left over at the end."""
        self.engine.run(self.world.settle)
        self.tokens_are_right()
        self.what_is_in_ram_is_right()
        self.world.clock.advance(30.0)  # copies that were given up count as stuck no more
        self.world.settle()
        self.engine.check_idle()
        self.world.assert_idle()
        self.world.close()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=30)
