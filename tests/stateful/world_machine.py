"""What happens to a store whatever is done with it: copies run in any order, time passes, tiers fail."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.testing.dict_tiers import DictSharedTier
from kvstore.tiers.base import BlockMove
from kvstore.types import Outcome
from tests.worlds import World

OUTCOMES = [Outcome.ABSENT, Outcome.DAMAGED, Outcome.FAILED, Outcome.FULL, Outcome.LATE, Outcome.FOREIGN]


class WorldMachine(RuleBasedStateMachine):
    """A machine begins by ``open_world``."""

    def open_world(self, memory: int, file: int, *, admission: str = "always", num_extents: int = 1) -> None:
        self.shared = DictSharedTier()
        self.world = World(memory, file, shared=self.shared, admission=admission, num_extents=num_extents)
        self.shared._clock = self.world.clock
        self.faults: dict[tuple[str, str], Outcome] = {}
        if self.world.file is not None:
            self.world.file.fault = lambda op, move: self._fault("file", op, move)
        self.shared.fault = lambda op, move: self._fault("redis", op, move)

    def _fault(self, tier: str, op: str, move: BlockMove) -> Outcome | None:
        return self.faults.get((tier, op)) if move.key[-1] % 2 else None

    @precondition(lambda self: any(lane.num_waiting for lane in self.world.steps.lanes.values()))
    @rule(data=st.data())
    def one_copy_runs(self, data: st.DataObject) -> None:
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

    @invariant()
    def tables_hold(self) -> None:
        self.world.store.check()
