"""The pipeline on a simulated device: nothing is unordered, and every wait in it is there for a reason."""

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch

from gpu_io import (
    bounce,
    bounced_ticket,
    calibration,
    direct_path,
    direction,
    pipeline,
    pipeline_ticket,
    staged_path,
)
from gpu_io.direction import Direction
from gpu_io.driver_batch import DriverBatch
from gpu_io.packing import TorchPacker
from gpu_io.pages import PagedKV
from gpu_io.pipeline import PipelineCopier
from gpu_io.ranges import Ranges
from gpu_io.simulated import Adversarial, Prompt, Random, Scheduler, SimulatedDevice
from gpu_io.testing import (
    IN_ORDER,
    NUM_LAYERS,
    NUM_PAGES,
    STRIDED,
    FakeDriver,
    Pages,
    Slots,
    finish,
    started,
)

ALL_LAYERS = range(NUM_LAYERS)
NUM_SLOTS = 18
SIX, THREE = [7, 2, 3, 4, 5, 0], [1, 6, 8]


def distinct(tensor: torch.Tensor) -> list[float]:
    return sorted(set(tensor.flatten().tolist()))


@dataclass
class Fill:
    """Compute that writes all of ``pages``: ``value`` and the number of the page."""

    kv: PagedKV
    pages: Sequence[int]
    value: int

    def run(self) -> None:
        for layer in self.kv.layers:
            for page in self.pages:
                layer[page] = self.value + page

    def reads(self) -> list[Ranges]:
        return []

    def writes(self) -> list[Ranges]:
        return self.kv.ranges(self.pages, ALL_LAYERS)


@dataclass
class Attend:
    """Compute that reads ``pages``, and keeps what it saw."""

    kv: PagedKV
    pages: Sequence[int]
    layers: range
    seen: list[float]

    def run(self) -> None:
        for layer in self.layers:
            self.seen += [value for page in self.pages for value in distinct(self.kv.layers[layer][page])]

    def reads(self) -> list[Ranges]:
        return self.kv.ranges(self.pages, self.layers)

    def writes(self) -> list[Ranges]:
        return []


class Path(NamedTuple):
    """A way that pages may go."""

    axes: str
    is_direct: bool = False
    is_batched: bool = False
    is_registered: bool = True
    """Whether the driver knows the slots."""


class World:
    """An engine's pages, slots, and a copier on a simulated device."""

    def __init__(self, device: SimulatedDevice, path: Path, refuse_from: int | None = None) -> None:
        self.device = device
        device.many_at_once = DriverBatch(FakeDriver(refuse_from=refuse_from), lambda: 0) if path.is_batched else None
        self.engine = Pages(path.axes, 1, dtype=torch.bfloat16, device="cpu")
        self.kv = self.engine.kv
        for tensor in self.engine.tensors:
            device.know(tensor, "pages")
        self.slots = Slots(self.kv, NUM_SLOTS)
        self.host = [torch.frombuffer(view, dtype=torch.uint8) for view in self.slots.views]
        device.know(torch.frombuffer(self.slots.memory, dtype=torch.uint8), "slots")
        self.copier = PipelineCopier(self.kv, device, TorchPacker(self.kv))

    def values(self, slots: Sequence[int]) -> list[float]:
        """What is in slots, as the host sees it: one value each, if all is well."""
        for slot in slots:
            self.device.host_reads(self.host[slot])
        return [value for slot in slots for value in distinct(self.host[slot].view(torch.bfloat16))]

    def spin(self, is_true: Callable[[], bool]) -> None:
        for _ in range(1000):
            if is_true():
                return
        raise AssertionError("the device does not go on")


def first_onboard(device: SimulatedDevice, path: Path) -> None:
    """The first use of buffers is one that does not wait for compute; what comes is read as soon as it may be."""
    world = World(device, path)
    for number, slot in enumerate(world.host):
        device.host_writes(slot)
        slot.view(torch.bfloat16).fill_(number)
    seen: list[float] = []
    few = started(world.copier.onboard(world.slots.views[:3], THREE))
    for layer in ALL_LAYERS:
        few.wait_layer(layer)
        device.compute.submit(Attend(world.kv, THREE, range(layer, layer + 1), seen))
    finish(few)
    finish(world.copier.onboard(world.slots.views[:NUM_PAGES], range(NUM_PAGES)))
    world.copier.close()
    device.finish_compute()
    assert seen == [0, 1, 2] * NUM_LAYERS


def offloads(device: SimulatedDevice, path: Path) -> None:
    """Of what compute has hardly written, and writes again as soon as it may."""
    world = World(device, path)
    device.compute.submit(Fill(world.kv, SIX, 10))
    first = started(world.copier.offload(SIX, world.slots.views[:6]))
    world.spin(first.pages_free)
    device.compute.submit(Fill(world.kv, SIX, 20))
    first.wait()
    assert world.values(range(6)) == [10 + page for page in SIX]
    second = started(world.copier.offload(SIX, world.slots.views[:6]))
    world.spin(second.done)
    assert world.values(range(6)) == [20 + page for page in SIX]
    device.compute.submit(Fill(world.kv, range(NUM_PAGES), 30))
    world.copier.offload(SIX, world.slots.views[:6])
    world.copier.offload(THREE, world.slots.views[6:9])
    world.copier.close()
    assert world.values(range(9)) == [30 + page for page in SIX + THREE]
    device.finish_compute()


def onboards(device: SimulatedDevice, path: Path) -> None:
    """Into pages that compute still reads; then it reads what came, layer by layer, and the slots are used again."""
    world = World(device, path)
    for number, slot in enumerate(world.host):
        device.host_writes(slot)
        slot.view(torch.bfloat16).fill_(number)
    seen: list[float] = []
    device.compute.submit(Fill(world.kv, range(NUM_PAGES), 30))
    device.compute.submit(Attend(world.kv, SIX + THREE, ALL_LAYERS, seen))
    tickets = [
        started(world.copier.onboard(world.slots.views[:6], SIX)),
        started(world.copier.onboard(world.slots.views[6:9], THREE)),
    ]
    for layer in ALL_LAYERS:
        for ticket in tickets:
            ticket.wait_layer(layer)
        device.compute.submit(Attend(world.kv, SIX + THREE, range(layer, layer + 1), seen))
    for ticket in tickets:
        ticket.wait()
    for slot in world.host:
        device.host_writes(slot)
        slot.fill_(0)
    world.copier.close()
    device.finish_compute()
    assert seen == [30 + page for page in SIX + THREE] * NUM_LAYERS + list(range(9)) * NUM_LAYERS


def refusals(device: SimulatedDevice, path: Path) -> None:
    """By the driver, of batches: when they are tried, and later."""
    for refuse_from in range(8):
        world = World(device, path, refuse_from)
        device.compute.submit(Fill(world.kv, range(NUM_PAGES), 50))
        finish(world.copier.offload(SIX, world.slots.views[:6]))
        assert world.values(range(6)) == [50 + page for page in SIX]
        world.copier.close()


def failures(device: SimulatedDevice, path: Path) -> None:
    """Copies that cannot be submitted whole, each with one after it that can and goes through the same buffers."""
    world = World(device, path)
    views = world.slots.views
    device.compute.submit(Fill(world.kv, range(NUM_PAGES), 40))
    for num_works in range(1, 7):
        device.is_held = True  # or the host may learn what the streams are to wait for
        device.fail_after = num_works
        failed = [started(world.copier.offload([7, 2, 3], views[0:6:2]))]
        device.fail_after = None
        whole = [started(world.copier.offload([0, 1], views[1:5:2])), started(world.copier.offload([8], views[5:6]))]
        device.fail_after = num_works
        failed.append(started(world.copier.onboard(views[8:9], [4])))
        device.fail_after = None
        whole += [started(world.copier.onboard(views[9 + page :][:1], [page])) for page in (5, 6)]
        device.is_held = False
        for ticket in whole:
            finish(ticket)
        assert world.values([1, 3, 5]) == [40, 41, 48]
        for ticket in failed:
            ticket.wait()
            assert ticket.done()
        device.host_writes(torch.frombuffer(world.slots.memory, dtype=torch.uint8))
        device.compute.submit(Fill(world.kv, range(NUM_PAGES), 40))
    world.copier.close()


def hang(device: SimulatedDevice, path: Path) -> None:
    """A device that does nothing takes so much and no more, and keeps what it may still touch."""
    world = World(device, path)
    device.is_held = True
    views = world.slots.views
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direction, "MAX_WORKS", 5)
        assert None in [world.copier.offload([1], views[:1]) for _ in range(6)]
        assert None in [world.copier.onboard(views[1:2], [2]) for _ in range(6)]
        patch.setattr(pipeline_ticket, "COPY_TIMEOUT_S", 0)
        world.copier.close()
    device.is_held = False
    device.finish()


LIFE = (first_onboard, offloads, onboards, refusals, failures, hang)


def live(device: SimulatedDevice, path: Path) -> None:
    """All that pages, slots and copiers go through. Raises ``AssertionError`` where a byte is wrong or nobody's."""
    for part_of_it in LIFE:
        part_of_it(device, path)


PATHS = {
    "staged": Path(STRIDED[0]),
    "direct": Path(IN_ORDER[0], is_direct=True),
    "batched": Path(IN_ORDER[0], is_direct=True, is_batched=True),
    "bounced": Path(STRIDED[0], is_registered=False),
    "bounced in batches": Path(IN_ORDER[0], is_direct=True, is_batched=True, is_registered=False),
}


def make_small(patch: pytest.MonkeyPatch, name: str) -> Path:
    """Have pages go this way, in copies so small that there are many."""
    path = PATHS[name]
    patch.setattr(calibration, "WIN", 1e9)
    patch.setattr(calibration, "LIMIT_S", 10)
    patch.setattr(calibration, "NUM_COPIES", 2)
    patch.setattr(calibration, "REPEATS", 1)
    patch.setattr(Direction, "is_registered", lambda *args: path.is_registered)
    patch.setattr(pipeline, "DIRECT_BYTES", 1 if path.is_direct else 1 << 60)
    patch.setattr(direct_path, "DIRECT_BYTES", 8)
    patch.setattr(staged_path, "DIRECT_BYTES", 1)
    patch.setattr(staged_path, "BUFFER_BYTES", 2 * 768)  # two blocks
    patch.setattr(staged_path, "KERNEL_BYTES", 1)
    patch.setattr(pipeline, "NUM_BUFFERS", 2)
    patch.setattr(bounce, "BOUNCE_BYTES", 6 * 768)  # rounds of three blocks
    patch.setattr(pipeline_ticket, "_QUERY_INTERVAL_S", 0)
    return path


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_unordered(path: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    way = make_small(monkeypatch, path)
    for scheduler in (Prompt(), Random(seed), Adversarial(seed)):
        live(SimulatedDevice(scheduler), way)


def misses(scheduler: Scheduler, path: str, without: str, kind: type[SimulatedDevice] = SimulatedDevice) -> bool:
    """Whether something is seen to go wrong without this wait."""
    with pytest.MonkeyPatch.context() as patch:
        way = make_small(patch, path)
        try:
            live(kind(scheduler, without=without), way)
        except (AssertionError, IndexError):  # an index of poison is one
            return True
    return False


def all_waits() -> dict[str, list[str]]:
    """Every wait that the pipeline makes, and the paths it is made on."""
    paths: dict[str, list[str]] = {}
    for path in PATHS:
        with pytest.MonkeyPatch.context() as patch:
            way = make_small(patch, path)
            device = SimulatedDevice()
            live(device, way)
        for wait in device.waits:
            paths.setdefault(wait, []).append(path)
    return paths


def written_waits() -> set[str]:
    """Every line of the pipeline that waits for a fence or asks for one."""
    return {
        f"{module.__name__.rpartition('.')[2]}.py:{node.lineno}"
        for module in (
            bounce,
            bounced_ticket,
            calibration,
            direct_path,
            direction,
            pipeline,
            pipeline_ticket,
            staged_path,
        )
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"wait", "query"}
    }


def test_every_wait_is_missed_when_it_is_left_out() -> None:
    """WK-004, WK-005, WK-006, WK-007, WK-051, WK-058: each wait alone, under every scheduler, every time.

    Those of offload and onboard count apart, and so do those of the host, for whom a wait is to ask for a fence.
    """
    waits = all_waits()
    assert written_waits() <= {place for wait in waits for place in wait.split(" < ")}
    schedulers: list[Callable[[], Scheduler]] = [Prompt]
    schedulers += [partial(kind, seed) for kind in (Random, Adversarial) for seed in range(2)]
    assert not [
        f"{wait}, {scheduler}"
        for wait, paths in waits.items()
        for scheduler in schedulers
        if not any(misses(scheduler(), path, wait) for path in paths)
    ]


@pytest.mark.parametrize("name", ["direct", "batched"])
def test_copies_are_seen_whether_they_are_made_one_by_one_or_in_batches(name: str) -> None:
    """A batch is as good as its declared ranges: each wait beside it is missed on that path alone."""
    waits = [wait for wait, paths in all_waits().items() if wait.startswith("direct_path.py") and name in paths]
    assert len(waits) == 2
    assert all(misses(Prompt(), name, wait) for wait in waits)


class Blind(SimulatedDevice):
    """Looks at no access: only bytes that come out wrong show that a wait is missing."""

    def __init__(self, scheduler: Scheduler, *, without: str | None = None) -> None:
        super().__init__(scheduler, without=without)
        self.hazards.access = lambda *args: None  # type: ignore[method-assign]  # the point of it


def test_without_a_wait_bytes_do_come_out_wrong() -> None:
    """The simulated device does what a real one might, at its worst; it does not only say so."""
    seeds = range(40)
    assert not [
        wait
        for wait, paths in all_waits().items()
        # What is wrong there is in buffers, in copies that have failed, or in no copy of anybody's.
        if not wait.startswith(("direction.py", "calibration.py"))
        and not any(misses(Adversarial(seed), path, wait, Blind) for seed in seeds for path in paths)
    ]


def test_with_every_wait_no_byte_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in PATHS:
        for seed in range(3):
            live(Blind(Adversarial(seed)), make_small(monkeypatch, path))
