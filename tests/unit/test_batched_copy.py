"""Batches of copies over a driver that is a fake and says so: no GPU, and bytes move by memmove."""

import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch

from gpu_io import calibration, direct_path, direction, pipeline
from gpu_io.calibration import calibrated
from gpu_io.copier import Ticket
from gpu_io.driver_batch import DriverBatch
from gpu_io.host_runtime import LibraryRuntime, cuda_driver
from gpu_io.packing import TorchPacker
from gpu_io.pipeline import PipelineCopier
from gpu_io.registration import Registration
from gpu_io.simulated import Adversarial, Prompt, Scheduler, SimulatedDevice
from gpu_io.testing import IN_ORDER, NUM_LAYERS, FakeDriver, FakeLibrary, Pages, Slots, finish, started
from gpu_io.works import CopyBatch
from kvstore.testing.sidecar import eventually

STREAM = 0x5EA
PAGES_APART = [7, 2, 5, 0]
"""No two of them follow each other, so that each is a run."""


def batch_of(driver: FakeDriver) -> DriverBatch:
    return DriverBatch(driver, lambda: STREAM)


def no_refusal(error: RuntimeError) -> None:
    raise error


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration of few bytes that takes the time it needs, and pages that are large runs."""
    monkeypatch.setattr(calibration, "LIMIT_S", 10)
    monkeypatch.setattr(direct_path, "DIRECT_BYTES", 64)
    monkeypatch.setattr(pipeline, "DIRECT_BYTES", 1)


# ---- the call


@pytest.mark.parametrize(("version", "asked"), [(12080, 12080), (12090, 12080), (13000, 13000), (13020, 13000)])
def test_the_driver_is_called_as_its_version_wants_it(version: int, asked: int) -> None:
    driver = FakeDriver(version=version)
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    at, to = source.data_ptr(), target.data_ptr()
    copies = [(to + 50, at, 10), (to, at + 90, 3)]
    CopyBatch(batch_of(driver), np.array(copies), no_refusal).run()
    assert driver.asked == [asked]
    assert driver.calls == [copies]
    # sources in the order of the stream, no hints, no flags; these attributes from copy 0 on, one set, this stream
    assert driver.attributes == [(1, 0, 0, 0, 0, 0, 0, 1, STREAM)]
    assert target[50:60].equal(source[:10])
    assert target[:3].equal(source[90:93])
    assert int(target[3:50].sum()) == int(target[60:].sum()) == 0


def test_a_batch_declares_the_bytes_that_the_driver_is_given() -> None:
    driver = FakeDriver()
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    at, to = source.data_ptr(), target.data_ptr()
    work = CopyBatch(
        batch_of(driver), np.array([(to + 50, at, 10), (to, at + 90, 3), (to + 20, at + 40, 10)]), no_refusal
    )
    work.run()
    for side, declared in ((0, work.writes()), (1, work.reads())):
        given = {(copy[side], copy[2]) for copy in driver.calls[0]}
        assert {(start, ranges.num_bytes) for ranges in declared for start in ranges.starts.tolist()} == given


@pytest.mark.parametrize(("version", "fault"), [(12080, "of 2 copies, at copy 1"), (13000, "of 2 copies$")])
def test_a_driver_that_refuses_says_which_copy_where_it_can(version: int, fault: str) -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    rows = np.array([(memory.data_ptr(), memory.data_ptr() + 8, 4), (memory.data_ptr() + 4, memory.data_ptr() + 12, 4)])
    with pytest.raises(RuntimeError, match=f"error 1 {fault}"):
        CopyBatch(batch_of(FakeDriver(version=version, refuse_from=0)), rows, no_refusal).run()


def test_a_driver_without_the_call_is_told_apart() -> None:
    with pytest.raises(RuntimeError, match="the driver is of CUDA 12060"):
        batch_of(FakeDriver(version=12060))
    driver = FakeDriver()
    driver._entries.clear()
    with pytest.raises(RuntimeError, match="no cuMemcpyBatchAsync"):
        batch_of(driver)
    with pytest.raises(RuntimeError, match="no CUDA driver in this process"):
        cuda_driver()


# ---- whether it is worth it


def device_with(driver: FakeDriver, scheduler: Scheduler | None = None) -> SimulatedDevice:
    device = SimulatedDevice(scheduler or Prompt())
    device.many_at_once = batch_of(driver)
    return device


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("seconds", "is_used"),
    [([1, 2, 1, 2], True), ([1, 1, 1, 2], False), ([1, 2, 1, 1], False), ([0.97, 1, 0.97, 1], False)],
    ids=["both ways", "only out", "only in", "hardly"],
)
def test_a_batch_that_is_faster_both_ways_is_used(
    seconds: list[float], is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``seconds`` are those of batched and single copies in, then out."""
    timed, answers = calibration._timed, cycle(seconds)

    def pretended(*args: Any) -> float:
        timed(*args)
        return next(answers)

    monkeypatch.setattr(calibration, "_timed", pretended)
    device = device_with(FakeDriver())
    assert calibrated(device, 64) is (device.many_at_once if is_used else None)


@pytest.mark.usefixtures("small")
def test_what_a_batch_takes_is_measured_until_its_bytes_are_there() -> None:
    driver = FakeDriver()
    copy = driver._copy_13000

    def slowly(*arguments: int) -> int:
        time.sleep(0.02)
        return copy(*arguments)

    driver._entries[13000] = type(driver._entries[13000])(slowly)
    assert calibrated(device_with(driver, Adversarial(1)), 64) is None
    assert len(driver.calls) == 2 * (calibration.REPEATS + 1)


def test_a_device_without_batches_has_none() -> None:
    assert calibrated(SimulatedDevice(), 64) is None


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(3))
def test_calibration_leaves_no_memory_and_nothing_unordered(seed: int) -> None:
    device = device_with(FakeDriver(), Adversarial(seed))
    calibrated(device, 64)
    assert not device._known
    device.finish()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("refuse_from", [0, 1, 4])
def test_a_batch_that_is_refused_when_it_is_tried_is_not_used_and_costs_no_memory(
    refuse_from: int, caplog: pytest.LogCaptureFixture
) -> None:
    device = device_with(FakeDriver(refuse_from=refuse_from))
    assert calibrated(device, 64) is None
    assert "batches of copies are not used: cuMemcpyBatchAsync: error 1" in caplog.text
    assert not device._known


@pytest.mark.usefixtures("small")
def test_a_batch_that_moves_other_bytes_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    driver._entries[13000] = type(driver._entries[13000])(lambda *arguments: 0)  # it says that it has, and has not
    device = device_with(driver)
    assert calibrated(device, 64) is None
    assert "moved other bytes" in caplog.text
    assert not device._known


@pytest.mark.usefixtures("small")
def test_a_device_without_memory_has_no_batches_and_keeps_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(num_bytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("the simulated device is out of memory")

    device = device_with(FakeDriver())
    monkeypatch.setattr(device, "memory", none_left)
    assert calibrated(device, 64) is None
    assert "out of memory" in caplog.text
    assert not device._known


def test_a_device_that_hangs_is_given_up_soon_and_what_it_may_touch_is_kept_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Given back, it would be somebody else's when the device goes on."""
    kept: list[list[torch.Tensor]] = []
    monkeypatch.setattr(direction, "_kept_for_good", kept)
    driver = FakeDriver()
    device = device_with(driver)
    device.is_held = True
    started_s = time.monotonic()
    assert calibrated(device, 64) is None
    assert time.monotonic() - started_s < 2
    assert calibration.LIMIT_S <= 0.1
    assert [[id(memory) for memory in each] for each in kept] == [[id(memory) for memory in device._known.values()]]
    assert len(device._known) == 2
    assert "the device may still write to" in caplog.text
    device.is_held = False
    device.finish()
    assert len(driver.calls) == 1  # it went on, and touched nothing that was not its own


# ---- the pipeline's use of it


class World:
    """A copier of pages that are large runs, over a driver that is better at batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, scheduler: Scheduler | None = None) -> None:
        monkeypatch.setattr(calibration, "WIN", 1e9)
        self.driver, self.cudart = FakeDriver(), FakeLibrary()
        self.device = device_with(self.driver, scheduler)
        self.device.runtime = LibraryRuntime(self.cudart, "cuda")
        self.engine = Pages(IN_ORDER[0], 1, dtype=torch.bfloat16, device="cpu")
        self.slots = Slots(self.engine.kv, 4)
        for tensor in self.engine.tensors:
            self.device.know(tensor, "pages")
        self.device.know(torch.frombuffer(self.slots.memory, dtype=torch.uint8), "slots")
        self.copier = PipelineCopier(self.engine.kv, self.device, TorchPacker(self.engine.kv))
        self.driver.calls.clear()

    def register(self) -> None:
        self.copier.reach(memoryview(self.slots.memory))
        eventually(lambda: self.copier.registered_bytes == len(self.slots.memory))  # in a thread of its own

    def blocks(self, pages: list[int]) -> bytes:
        return b"".join(self.engine.block([page]) for page in pages)

    def batches(self) -> list[int]:
        """How many copies each call of the driver has had."""
        return [len(copies) for copies in self.driver.calls]


@pytest.mark.usefixtures("small")
def test_large_runs_go_to_the_driver_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, scheduler=Adversarial(1))
    world.register()
    finish(world.copier.offload(PAGES_APART, world.slots.views))
    assert bytes(world.slots.memory) == world.blocks(PAGES_APART)
    assert world.batches() == [4]
    finish(world.copier.onboard(world.slots.views, [1, 3, 6, 8]))
    assert world.blocks([1, 3, 6, 8]) == world.blocks(PAGES_APART) == bytes(world.slots.memory)
    assert world.batches() == [4] + [4] * NUM_LAYERS
    world.copier.close()


@pytest.mark.usefixtures("small")
def test_a_single_run_needs_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.register()
    finish(world.copier.offload([7], world.slots.views[:1]))
    assert world.batches() == []
    world.copier.close()


@pytest.mark.usefixtures("small")
def test_no_batch_is_larger_than_drivers_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    assert direct_path.BATCH_COPIES < 1000
    monkeypatch.setattr(direct_path, "BATCH_COPIES", 3)
    world = World(monkeypatch)
    world.register()
    finish(world.copier.offload(PAGES_APART, world.slots.views))
    assert bytes(world.slots.memory) == world.blocks(PAGES_APART)
    assert world.batches() == [3, 1]
    world.copier.close()


@pytest.mark.usefixtures("small")
def test_every_copy_of_a_batch_counts_for_what_a_device_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direction, "MAX_WORKS", 8)
    world = World(monkeypatch)
    world.register()
    world.device.is_held = True
    assert [world.copier.offload(PAGES_APART, world.slots.views) is None for _ in range(3)] == [False, False, True]
    world.device.is_held = False
    world.copier.close()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("way", ["offload", "onboard"])
def test_a_batch_that_is_refused_later_is_copied_one_by_one_and_no_other_is_tried(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ADR 40: no block is lost, and it is said once, however many batches were on their way."""
    world = World(monkeypatch, scheduler=Adversarial(1))
    world.register()
    world.driver.refuse_from = 1
    moved = {"offload": world.blocks(PAGES_APART), "onboard": bytes(world.slots.memory)}[way]
    copy: Callable[[], Ticket | None] = {
        "offload": lambda: world.copier.offload(PAGES_APART, world.slots.views),
        "onboard": lambda: world.copier.onboard(world.slots.views, PAGES_APART),
    }[way]
    world.device.is_held = True
    tickets = [copy() for _ in range(3)]
    world.device.is_held = False
    for ticket in tickets:
        finish(ticket)
    assert bytes(world.slots.memory) == world.blocks(PAGES_APART) == moved
    assert caplog.text.count("refused a batch of copies") == 1
    num_calls = len(world.driver.calls)
    finish(copy())
    assert len(world.driver.calls) == num_calls
    world.copier.close()


@pytest.mark.usefixtures("small")
def test_what_cannot_be_copied_one_by_one_either_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real device a batch is given to the driver while it is submitted."""
    world = World(monkeypatch)
    world.register()
    world.driver.refuse_from = 0
    monkeypatch.setattr("gpu_io.works.Copy.run", lost)
    ticket = started(world.copier.offload(PAGES_APART, world.slots.views))
    assert ticket.failed
    ticket.wait()
    assert ticket.done()
    monkeypatch.undo()
    world.copier.close()


def lost(work: object) -> None:
    raise RuntimeError("an illegal memory access was encountered")


def test_what_somebody_else_has_registered_is_not_ours_to_count_on() -> None:
    memory, library = memoryview(bytearray(4096)), FakeLibrary()
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    library.registered[address + 1024] = 10
    registered = Registration(memory, LibraryRuntime(library, "cuda"), chunk_bytes=1024)
    eventually(lambda: registered.registered_bytes == 3 * 1024)
    assert registered.has(address, 1024)
    assert registered.has(address + 2048, 2048)
    assert not registered.has(address, 1025)
    assert not registered.has(address + 1024, 10)
    assert not registered.has(address + 2047, 10)
    assert not registered.has(address - 1, 10)
    assert not registered.has(address + 4096, 1)
    registered.close()
    assert not registered.has(address, 1)
