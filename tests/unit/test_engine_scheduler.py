"""Who computes how many tokens: decoding first, prompts in chunks, preemption from the end, no waiting for a prefix."""

from dataclasses import dataclass, field

import torch

from connectors.torch_engine.request import EngineRequest, Metrics
from connectors.torch_engine.sampling import SamplingParams
from connectors.torch_engine.scheduler import Admission, Scheduler
from kvstore.types import Request

PAGE = 4


@dataclass
class CountedPages:
    """A number of pages, and which requests have how many."""

    num_free: int
    on_its_way: set[str] = field(default_factory=set)
    hits: dict[str, int] = field(default_factory=dict)

    def attach(self, request: EngineRequest) -> Admission:
        if request.request_id in self.on_its_way:
            return Admission.NOT_YET
        if -(-len(request.tokens) // PAGE) > self.num_free:
            return Admission.NO_ROOM
        self.grow(request, self.hits.get(request.request_id, 0))
        request.num_computed = self.hits.get(request.request_id, 0)
        return Admission.ADMITTED

    def grow(self, request: EngineRequest, num_tokens: int) -> bool:
        missing = -(-(request.num_computed + num_tokens) // PAGE) - len(request.pages)
        if missing > self.num_free:
            return False
        request.pages += [0] * missing
        self.num_free -= missing
        return True

    def release(self, request: EngineRequest) -> None:
        self.num_free += len(request.pages)
        request.pages, request.num_computed = [], 0


def new(name: str, num_tokens: int) -> EngineRequest:
    return EngineRequest(
        Request(name, 0.0, b"", num_tokens),
        list(range(num_tokens)),
        SamplingParams(),
        torch.Generator(),
        Metrics(0.0),
        num_tokens,
    )


def step(scheduler: Scheduler) -> dict[str, int]:
    """Run a step: everybody computes, and who is at the end chooses a token."""
    work = scheduler.schedule()
    for request, num_tokens in work:
        request.num_computed += num_tokens
        if request.num_left == 0:
            request.tokens.append(0)
    return {request.request_id: num_tokens for request, num_tokens in work}


def test_prompts_are_cut_to_what_decoding_leaves_of_the_budget() -> None:
    scheduler = Scheduler(CountedPages(100), max_running=4, max_step_tokens=10)
    scheduler.add(new("a", 3))
    scheduler.add(new("b", 20))
    assert step(scheduler) == {"a": 3, "b": 7}
    assert step(scheduler) == {"a": 1, "b": 9}
    scheduler.add(new("c", 30))
    assert step(scheduler) == {"a": 1, "b": 4, "c": 5}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 8}


def test_no_more_run_than_allowed() -> None:
    scheduler = Scheduler(CountedPages(100), max_running=2, max_step_tokens=100)
    for name in "abc":
        scheduler.add(new(name, 5))
    assert step(scheduler) == {"a": 5, "b": 5}
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == {"b": 1, "c": 5}


def test_a_prefix_on_its_way_delays_only_its_own_request() -> None:
    pages = CountedPages(100, on_its_way={"a"}, hits={"a": 8})
    scheduler = Scheduler(pages, max_running=4, max_step_tokens=100)
    scheduler.add(new("a", 10))
    scheduler.add(new("b", 5))
    assert step(scheduler) == {"b": 5}
    pages.on_its_way.clear()
    assert step(scheduler) == {"b": 1, "a": 2}


def test_the_line_is_kept_where_there_is_no_room() -> None:
    scheduler = Scheduler(CountedPages(4), max_running=4, max_step_tokens=100)
    for name, num_tokens in (("a", 8), ("b", 12), ("c", 4)):
        scheduler.add(new(name, num_tokens))
    assert step(scheduler) == {"a": 8}


def test_the_last_admitted_gives_way_and_comes_back_first_with_its_tokens() -> None:
    pages = CountedPages(4)
    scheduler = Scheduler(pages, max_running=4, max_step_tokens=100)
    scheduler.add(new("a", 7))
    scheduler.add(new("b", 7))
    scheduler.add(new("c", 4))
    assert step(scheduler) == {"a": 7, "b": 7}
    assert step(scheduler) == {"a": 1, "b": 1}
    # Both are at a page's end and no page is left: b gives way, and nobody passes it.
    assert step(scheduler) == {"a": 1}
    assert [request.request_id for request in scheduler.waiting] == ["b", "c"]
    (victim, _) = scheduler.waiting
    assert (len(victim.tokens), victim.num_computed, victim.metrics.num_preemptions) == (9, 0, 1)
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == {"b": 9, "c": 4}
    assert pages.num_free == 0


def test_alone_it_waits_for_pages_under_copies_and_keeps_what_it_has() -> None:
    pages = CountedPages(2)
    scheduler = Scheduler(pages, max_running=4, max_step_tokens=100)
    scheduler.add(new("a", 4))
    step(scheduler)
    pages.num_free = 0
    assert step(scheduler) == {}
    assert scheduler.running[0].num_computed == 4
    pages.num_free = 1
    assert step(scheduler) == {"a": 1}


def test_leaving_gives_every_page_back_from_wherever_it_was() -> None:
    pages = CountedPages(8)
    scheduler = Scheduler(pages, max_running=1, max_step_tokens=100)
    requests = [new("a", 8), new("b", 8)]
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    for request in requests:
        scheduler.remove(request)
    assert pages.num_free == 8
    assert not scheduler.running
    assert not scheduler.waiting
