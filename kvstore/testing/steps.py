"""An executor that a test drives by hand: nothing runs until ``step``, and any order of copies can be tried."""

from collections.abc import Callable


class StepExecutor:
    """Copies of one lane, waiting to be run one at a time in the test's own thread."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def submit(self, run: Callable[[], None], *, urgent: bool = False) -> None:
        """Keep it for a later ``step``."""
        self._waiting.append(run)

    def close(self) -> None:
        """Nothing to end."""

    @property
    def num_waiting(self) -> int:
        """Copies that have not run."""
        return len(self._waiting)

    def step(self, index: int = 0) -> None:
        """Run the copy at ``index`` of the queue, to its end."""
        self._waiting.pop(index)()

    def run_all(self) -> None:
        """Run whatever waits, in order."""
        while self._waiting:
            self.step()


class Steps:
    """The executors of a store's lanes by tier name; pass ``Steps()`` itself as the store's ``executor``."""

    def __init__(self) -> None:
        self.lanes: dict[str, StepExecutor] = {}

    def __call__(self, name: str, num_threads: int) -> StepExecutor:
        """A lane's executor; it is one queue, however many threads the lane would have."""
        return self.lanes.setdefault(name, StepExecutor())

    def run_all(self) -> int:
        """Run whatever waits in any lane; returns how many copies that was."""
        num_run = 0
        while waiting := [lane for lane in self.lanes.values() if lane.num_waiting]:
            waiting[0].step()
            num_run += 1
        return num_run


class FakeClock:
    """A clock that moves when told to; it serves as monotonic and as wall clock."""

    def __init__(self, now_s: float = 1_000_000.0, *, tick_s: float = 0.0) -> None:
        """``tick_s`` passes with every look at it, for code that waits in a loop."""
        self.now_s = now_s
        self.tick_s = tick_s

    def __call__(self) -> float:
        """The time now."""
        self.now_s += self.tick_s
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
