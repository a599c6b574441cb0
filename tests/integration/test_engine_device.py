"""The reference engine's use of the pipeline, on a simulated device: who touches pages and slots is in order, always.

What the model reads and writes is declared to the device's compute stream before it happens, what the store does with
slots to its host: so a wait that the engine does not make is found, in whatever order things ran.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

from connectors.torch_engine import cache, transfers
from connectors.torch_engine.attention import Batch
from connectors.torch_engine.cache import PagedCache
from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.engine import Engine
from connectors.torch_engine.model import Model
from connectors.torch_engine.opening import open_engine
from connectors.torch_engine.request import EngineRequest
from connectors.torch_engine.sampling import SamplingParams
from gpu_io.copier import Ticket
from gpu_io.hazards import HazardError
from gpu_io.host_runtime import LibraryRuntime
from gpu_io.packing import torch_packer
from gpu_io.pages import PagedKV
from gpu_io.pipeline import PipelineCopier
from gpu_io.ranges import Ranges
from gpu_io.simulated import Adversarial, Prompt, Random, Scheduler, SimulatedDevice
from gpu_io.testing import FakeLibrary
from kvstore.config import Config
from kvstore.layout import QUANTISED
from kvstore.lease import ReadLease, WriteLease
from kvstore.opening import open_store
from kvstore.store import Store
from kvstore.testing.sidecar import eventually

CONFIG = EngineConfig(num_pages=14, max_step_tokens=48)
ANSWER = SamplingParams(max_tokens=6, stop_ids=())
SCHEDULERS: tuple[Callable[[], Scheduler], ...] = (Prompt, lambda: Random(1), lambda: Adversarial(1))


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


PROMPTS = [prompt_of(130, 1), prompt_of(90, 2), prompt_of(130, 1)[:100] + prompt_of(20, 3), prompt_of(130, 4)]
ASKED = [*PROMPTS, *PROMPTS, PROMPTS[0], prompt_of(130, 5), prompt_of(150, 6)]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The answers of an engine without a store."""
    return [open_engine(None, CONFIG)[0].generate([prompt], ANSWER)[0] for prompt in ASKED]


@dataclass
class Use:
    """Compute that touches pages in one layer."""

    kv: PagedKV
    layers: range
    read: Sequence[int]
    written: Sequence[int]

    def run(self) -> None:
        pass  # the model does, right after

    def reads(self) -> list[Ranges]:
        return self.kv.ranges(self.read, self.layers)

    def writes(self) -> list[Ranges]:
        return self.kv.ranges(self.written, self.layers)


@dataclass
class Careless:
    """A ticket whose owner does not make one of its waits."""

    ticket: Ticket
    without: str
    waits: set[str] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        return self.ticket.failed

    def done(self) -> bool:
        return self.without == "done" or self.ticket.done()

    def pages_free(self) -> bool:
        return self.without == "pages_free" or self.ticket.pages_free()

    def wait(self) -> None:
        if self.without != "wait":
            self.ticket.wait()

    def wait_layer(self, layer: int) -> None:
        if self.without != "wait_layer":
            self.ticket.wait_layer(layer)


class CarelessCopier(PipelineCopier):
    """Gives out such tickets in one direction."""

    def __init__(self, kv: PagedKV, device: SimulatedDevice, direction: str, without: str) -> None:
        super().__init__(kv, device, torch_packer(kv))
        self._direction, self._without = direction, without

    def offload(self, pages: Sequence[int], slots: Sequence[memoryview]) -> Ticket | None:
        return self._given(super().offload(pages, slots), "offload")

    def onboard(self, slots: Sequence[memoryview], pages: Sequence[int]) -> Ticket | None:
        return self._given(super().onboard(slots, pages), "onboard")

    def _given(self, ticket: Ticket | None, direction: str) -> Ticket | None:
        return ticket if ticket is None or direction != self._direction else Careless(ticket, self._without)


WAITS = [
    ("onboard", "wait_layer"),
    ("onboard", "wait"),
    ("onboard", "done"),
    ("offload", "pages_free"),
    ("offload", "done"),
]


@contextmanager
def watched(
    scheduler: Scheduler,
    patch: pytest.MonkeyPatch,
    direction: str = "",
    without: str = "",
    engine_config: EngineConfig = CONFIG,
) -> Iterator[tuple[Engine, Store, SimulatedDevice]]:
    """An engine over a store, on a device that sees what both of them touch."""
    device, library = SimulatedDevice(scheduler), FakeLibrary()
    device.runtime = LibraryRuntime(library, "cuda")
    store = open_store(Config.from_mapping({"memory": {"capacity": "2MiB"}}))
    memory = store.fixed_memory()
    assert memory is not None
    device.know(torch.frombuffer(memory, dtype=torch.uint8), "slots")
    pages: list[PagedKV] = []

    def opened(kv: PagedKV) -> PipelineCopier:
        pages.append(kv)
        return CarelessCopier(kv, device, direction, without)

    watch_store(store, device, patch)
    attend, grow = Model._attend, PagedCache.grow

    def watched_attend(self: Model, qkv: torch.Tensor, kv_layer: torch.Tensor, batch: Batch) -> torch.Tensor:
        (kv,) = pages
        layer = next(n for n, each in enumerate(kv.layers) if each.data_ptr() == kv_layer.data_ptr())
        read = {page for group in batch.groups if group.pages is not None for page in group.pages.tolist()}
        written = set(batch.pages.tolist())
        device.compute.submit(Use(kv, range(layer, layer + 1), sorted(read), sorted(written)))
        if not device.is_held:  # then what compute waits for never comes, and these pages wait for nothing
            device.finish_compute()
        return attend(self, qkv, kv_layer, batch)

    def watched_grow(self: PagedCache, request: EngineRequest, num_tokens: int) -> bool:
        (kv,) = pages
        before = len(request.pages)
        has_grown = grow(self, request, num_tokens)
        if has_grown and len(request.pages) > before:
            device.compute.submit(Use(kv, range(len(kv.layers)), [], request.pages[-1:]))
        return has_grown

    patch.setattr(Model, "_attend", watched_attend)
    patch.setattr(PagedCache, "grow", watched_grow)
    engine, _ = open_engine(None, engine_config, store=store, open_copier=opened)
    device.know(engine.cache.kv, "pages")
    try:
        yield engine, store, device
        eventually(lambda: sum(library.registered.values()) == len(memory))  # in a thread of its own
        engine.close()
        device.finish()
        assert not library.registered
    finally:
        store.close()


def watch_store(store: Store, device: SimulatedDevice, patch: pytest.MonkeyPatch) -> None:
    """Whoever ends a lease hands its slots to the store, which reads them and gives them to others."""

    def host(touch: Callable[[torch.Tensor], None], views: Sequence[memoryview]) -> None:
        for view in views:
            touch(torch.frombuffer(view, dtype=torch.uint8))

    commit, abort, release = store.commit, store.abort, store.release

    def watched_commit(lease: WriteLease, keys: Sequence[object], parent: object) -> object:
        host(device.host_reads, lease.views[lease.num_named : lease.num_named + len(keys)])
        return commit(lease, keys, parent)  # type: ignore[arg-type]  # as they came

    def watched_abort(lease: WriteLease) -> None:
        host(device.host_writes, lease.views[lease.num_named :])
        abort(lease)

    def watched_release(lease: ReadLease) -> None:
        # Evicted and reused at once, as far as the device can tell; what others still pin is only read.
        host(device.host_writes if store_has_no_other_pin(store, lease) else device.host_reads, lease.views)
        release(lease)

    patch.setattr(store, "commit", watched_commit)
    patch.setattr(store, "abort", watched_abort)
    patch.setattr(store, "release", watched_release)


def store_has_no_other_pin(store: Store, lease: ReadLease) -> bool:
    pinned = store.snapshot()["kvstore_pinned_blocks"]
    return sum(pinned.values()) == lease.num_blocks


def answer(engine: Engine, prompt: list[int]) -> EngineRequest:
    request = engine.submit(prompt, ANSWER)
    while request.finish_reason is None:
        engine.step()
    return request


def leave_the_pages(engine: Engine) -> None:
    while engine.cache.pool.num_held:
        engine.cache.poll()
    engine.cache.pool.evict(CONFIG.num_pages)
    engine.cache.poll()


def live(engine: Engine, store: Store, device: SimulatedDevice) -> list[EngineRequest]:
    """Requests with too few pages for all, that load, that give up a load, and that meet a device that hangs."""
    requests = []
    for prompt in ASKED[:8]:
        requests.append(answer(engine, prompt))
        while not store.lookup(engine.cache.namespace.keys(prompt)).ready:
            engine.cache.poll()
        leave_the_pages(engine)
    given_up = engine.submit(PROMPTS[0], ANSWER)
    engine.cache.attach(given_up)
    assert given_up.load is not None
    engine.cache.release(given_up)
    while given_up.finish_reason is None:
        engine.step()
    leave_the_pages(engine)
    device.is_held = True
    held = answer(engine, ASKED[-2])
    engine.cache.poll()
    engine.cache.pool.evict(CONFIG.num_pages)
    last = engine.submit(ASKED[-1], ANSWER)
    engine.step()
    device.is_held = False
    while last.finish_reason is None:
        engine.step()
    return [*requests, given_up, held, last]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=["prompt", "random", "adversarial"])
def test_tokens_are_the_same_and_nothing_is_unordered(
    scheduler: Callable[[], Scheduler], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(scheduler(), monkeypatch) as (engine, store, device):
        requests = live(engine, store, device)
        assert [request.output for request in requests] == alone
        loaded = [request.metrics.tokens_from_tier.get("memory", 0) for request in requests]
        assert loaded == [0, 0, 96, 0, 128, 80, 112, 128, 128, 0, 0]


@pytest.mark.parametrize("name", QUANTISED)
def test_tokens_from_quantised_blocks_do_not_depend_on_how_streams_run(
    name: str, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for scheduler in SCHEDULERS:
        with (
            monkeypatch.context() as patch,
            watched(scheduler(), patch, engine_config=replace(CONFIG, quantisation=name)) as (engine, store, device),
        ):
            requests = live(engine, store, device)
            runs.append([(request.output, request.metrics.tokens_from_tier.get("memory", 0)) for request in requests])
    assert runs[1:] == runs[:-1]
    assert [loaded for _, loaded in runs[0]] == [0, 0, 96, 0, 128, 80, 112, 128, 128, 0, 0]
    assert all(output == expected for (output, loaded), expected in zip(runs[0], alone, strict=True) if not loaded)


@pytest.mark.parametrize(("direction", "without"), WAITS)
@pytest.mark.parametrize("scheduler", SCHEDULERS[::2], ids=["prompt", "adversarial"])
def test_a_wait_that_the_engine_does_not_make_is_found(
    scheduler: Callable[[], Scheduler], direction: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HazardError), watched(scheduler(), monkeypatch, direction, without) as (engine, store, device):
        live(engine, store, device)


def test_these_are_all_the_waits_that_it_makes() -> None:
    made = {wait for module in (cache, transfers) for wait in re.findall(r"ticket\.(\w+)\(", inspect.getsource(module))}
    assert made == {without for _, without in WAITS}
