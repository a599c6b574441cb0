"""What policies learn on the way to the thread and back: one at a time, and no failure costs another pool its turn."""

from collections.abc import Callable

import pytest

from kvstore.policy.base import Refit
from kvstore.policy.lru import LRU
from kvstore.pool import BlockPool
from kvstore.refits import Refits
from kvstore.testing.steps import StepExecutor
from kvstore.types import BlockKey


class Learner(LRU[BlockKey]):
    """Has these jobs to give out, one after the other."""

    def __init__(self, *jobs: Refit) -> None:
        super().__init__()
        self.jobs = list(jobs)

    def refit(self) -> Refit | None:
        return self.jobs.pop(0) if self.jobs else None


def pool_of(*jobs: Refit) -> BlockPool:
    return BlockPool(Learner(*jobs))


def finding(found: list[str], name: str) -> Refit:
    """A job that finds its name, written down when that is applied."""

    def job() -> Callable[[], None]:
        return lambda: found.append(name)

    return job


def failing() -> Callable[[], None]:
    raise ValueError("a bug")


def test_one_job_is_at_work_at_a_time_and_applied_by_poll() -> None:
    executor, found = StepExecutor(), list[str]()
    pools = [pool_of(finding(found, "a")), pool_of(finding(found, "b"))]
    refits = Refits(executor)
    refits.poll(pools)
    refits.poll(pools)
    assert executor.num_waiting == 1
    executor.step()
    assert found == []
    refits.poll(pools)
    assert (found, executor.num_waiting) == (["a"], 1)
    executor.step()
    refits.poll(pools)
    assert found == ["a", "b"]


def test_a_job_that_fails_is_logged_and_costs_no_other_pool_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    executor, found = StepExecutor(), list[str]()
    pools = [pool_of(failing), pool_of(finding(found, "b"), finding(found, "c"))]
    refits = Refits(executor)
    for _ in range(4):
        refits.poll(pools)
        executor.run_all()
    assert found == ["b", "c"]
    assert "could not learn" in caplog.text
