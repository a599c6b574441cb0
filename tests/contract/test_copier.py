"""Copiers against their contract, and each one while copies are held up, fail, or take too long."""

from collections.abc import Callable, Iterator, Sequence
from threading import Event, Thread
from typing import Any

import pytest
import torch

from gpu_io import bounce, calibration, cpu_copier, direct_path, pipeline, staged_path
from gpu_io.copier import Copier
from gpu_io.cpu_copier import CpuCopier, CpuTicket
from gpu_io.device import copier_for
from gpu_io.direction import Direction
from gpu_io.driver_batch import DriverBatch
from gpu_io.packing import packer_for, torch_packer
from gpu_io.pages import PagedKV
from gpu_io.pipeline import PipelineCopier
from gpu_io.simulated import Adversarial, Prompt, Random, Scheduler, SimulatedDevice
from gpu_io.testing import (
    IN_ORDER,
    NUM_LAYERS,
    NUM_PAGES,
    STRIDED,
    CopierContract,
    FakeDriver,
    Pages,
    Slots,
    finish,
    started,
)
from gpu_io.torch_device import TorchDevice
from kvstore.errors import LayoutError

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
WAIT_S = 10.0
"""For what must happen; a test that waits so long fails."""


def filled(axes: str = IN_ORDER[0], seed: int = 1) -> Pages:
    return Pages(axes, seed, dtype=torch.bfloat16, device="cpu")


class TestCpuCopier(CopierContract):
    def open(self, kv: PagedKV) -> Copier:
        return CpuCopier(kv)


class TestCpuCopierLayerByLayer(CopierContract):
    """As it copies pages so large that one layer of them is a run worth a call."""

    @pytest.fixture(autouse=True)
    def large_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_copier, "RUN_BYTES", 1)

    def open(self, kv: PagedKV) -> Copier:
        return CpuCopier(kv)


class SimulatedContract(CopierContract):
    """The pipeline on a device whose every access is checked."""

    scheduler: Scheduler = Prompt()
    slots_are_registered = True
    device_bytes: SimulatedDevice

    @pytest.fixture(autouse=True)
    def simulated(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.device_bytes = SimulatedDevice(self.scheduler)
        monkeypatch.setattr(Direction, "is_registered", lambda *args: self.slots_are_registered)
        self.constrain(monkeypatch)
        yield
        self.device_bytes.finish()

    def constrain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing, by default."""

    def open(self, kv: PagedKV) -> Copier:
        return PipelineCopier(kv, self.device_bytes, torch_packer(kv))

    def pages(self, axes: str, seed: int = 1, *, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Pages:
        engine = super().pages(axes, seed, dtype=dtype, **more)
        for tensor in engine.tensors:
            self.device_bytes.know(tensor, "pages")
        return engine

    def slots(self, kv: PagedKV, num_slots: int, gap_bytes: int = 0) -> Slots:
        slots = super().slots(kv, num_slots, gap_bytes)
        self.device_bytes.know(torch.frombuffer(slots.memory, dtype=torch.uint8), "slots")
        return slots

    def computed(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.device_bytes.finish_compute()
        return compute()


class TestPipelineOnAPromptDevice(SimulatedContract):
    """The bytes an accelerator would move, moved at once."""


class TestPipelineInParts(SimulatedContract):
    """With staging buffers of a layer or two, and streams that run in any mix."""

    scheduler = Random(1)

    def constrain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staged_path, "BUFFER_BYTES", 600)
        monkeypatch.setattr(staged_path, "KERNEL_BYTES", 1)


class TestPipelineAgainstAnAdversary(SimulatedContract):
    """With staging buffers of one layer, and nothing that runs before somebody waits for it."""

    scheduler = Adversarial(1)

    def constrain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staged_path, "BUFFER_BYTES", 1)


class TestDirectPipeline(SimulatedContract):
    """As pages are copied whose runs are large; those that have no runs are staged."""

    scheduler = Adversarial(2)

    def constrain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pipeline, "DIRECT_BYTES", 1)
        monkeypatch.setattr(direct_path, "DIRECT_BYTES", 1)


class TestBatchedPipeline(SimulatedContract):
    """As such pages are copied where the driver is given batches, and those are always faster."""

    scheduler = Adversarial(3)

    def constrain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pipeline, "DIRECT_BYTES", 1)
        monkeypatch.setattr(direct_path, "DIRECT_BYTES", 8)
        monkeypatch.setattr(calibration, "WIN", 1e9)
        monkeypatch.setattr(calibration, "LIMIT_S", WAIT_S)
        self.device_bytes.many_at_once = DriverBatch(FakeDriver(), lambda: 0)


class TestBouncedPipeline(SimulatedContract):
    """From and into slots that the driver does not know, in rounds of one block."""

    scheduler = Random(4)
    slots_are_registered = False

    def constrain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bounce, "BOUNCE_BYTES", 1)


class TestBouncedPipelineInBatches(TestBatchedPipeline):
    """The same with all that is new at once, against an adversary."""

    scheduler = Adversarial(5)
    slots_are_registered = False

    def constrain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().constrain(monkeypatch)
        monkeypatch.setattr(bounce, "BOUNCE_BYTES", 4 << 10)


@pytest.mark.skipif(ACCELERATOR is None, reason="needs an accelerator that torch can use; this machine has none")
class TestPipeline(CopierContract):
    """The real thing, from and into memory that the driver was not told of, which is bounced."""

    device = str(ACCELERATOR)

    def open(self, kv: PagedKV) -> Copier:
        return PipelineCopier(kv, TorchDevice(kv.device), packer_for(kv))


class TestPipelineInBatches(TestPipeline):
    """The same with pages that are copied directly, in the driver's batches, whether or not those are faster."""

    @pytest.fixture(autouse=True)
    def batched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pipeline, "DIRECT_BYTES", 1)
        monkeypatch.setattr(direct_path, "DIRECT_BYTES", 8)
        monkeypatch.setattr(calibration, "WIN", 1e9)


# ---- the CPU copier


@pytest.fixture
def large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of a page is a run worth a call."""
    monkeypatch.setattr(cpu_copier, "RUN_BYTES", 1)


class HeldCopier(CpuCopier):
    """A copier whose onboards stop before each layer until it is let go, and whose offloads stop at once."""

    def __init__(self, kv: PagedKV) -> None:
        self.go_on = [Event() for _ in kv.layers]
        super().__init__(kv)

    def let_go(self) -> None:
        for event in self.go_on:
            event.set()

    def _offload(self, pages: Sequence[int], slots: Sequence[memoryview], ticket: CpuTicket) -> None:
        assert self.go_on[0].wait(WAIT_S)
        super()._offload(pages, slots, ticket)

    def _onboard(self, slots: Sequence[memoryview], pages: Sequence[int], ticket: CpuTicket) -> None:
        super()._onboard(slots, pages, HeldTicket(ticket, self.go_on))


class HeldTicket(CpuTicket):
    """Advances the real one only when that may go on."""

    def __init__(self, ticket: CpuTicket, go_on: list[Event]) -> None:
        super().__init__(len(go_on))
        self._ticket = ticket
        self._go_on = go_on

    def advance(self, num_ready: int) -> None:
        assert self._go_on[num_ready - 1].wait(WAIT_S)
        self._ticket.advance(num_ready)


def in_a_thread(call: Callable[[], None]) -> Event:
    """Set when ``call`` has returned."""
    returned = Event()

    def run() -> None:
        call()
        returned.set()

    Thread(target=run, daemon=True).start()
    return returned


@pytest.mark.usefixtures("large_pages")
def test_a_layer_is_waited_for_and_the_ones_after_it_are_not() -> None:
    target = filled(seed=2)
    copier = HeldCopier(target.kv)
    ticket = started(copier.onboard(Slots(target.kv, 2).views, [4, 5]))
    first = in_a_thread(lambda: ticket.wait_layer(0))
    second = in_a_thread(lambda: ticket.wait_layer(1))
    last = in_a_thread(ticket.wait)
    assert not first.wait(0.02)
    copier.go_on[0].set()
    assert first.wait(WAIT_S)
    assert not second.is_set()
    assert not ticket.done()
    copier.go_on[1].set()
    assert second.wait(WAIT_S)
    assert not last.wait(0.02)
    copier.go_on[2].set()
    assert last.wait(WAIT_S)
    assert ticket.done()
    copier.close()


@pytest.mark.usefixtures("large_pages")
@pytest.mark.parametrize("axes", [IN_ORDER[0], STRIDED[0]])
def test_a_layer_of_all_pages_comes_before_the_next_layer(axes: str) -> None:
    source, target = filled(axes, 1), filled(axes, 2)
    slots = Slots(source.kv, NUM_PAGES)
    copier = CpuCopier(source.kv)
    finish(copier.offload(range(NUM_PAGES), slots.views))
    copier.close()
    untouched = target.content()
    seen = []

    class Watched(CpuTicket):
        def advance(self, num_ready: int) -> None:
            seen.append((num_ready, target.content()))
            super().advance(num_ready)

    copier = CpuCopier(target.kv)
    copier._onboard(slots.views, range(NUM_PAGES), Watched(NUM_LAYERS))
    copier.close()
    assert [num_ready for num_ready, _ in seen] == [1, 2, 3]
    for num_ready, content in seen:
        assert content[:, :num_ready].equal(source.content()[:, :num_ready])
        assert content[:, num_ready:].equal(untouched[:, num_ready:])


@pytest.mark.parametrize(("run_bytes", "expected"), [(1, [1, 2, 3]), (500, [2, 3]), (1 << 20, [3])])
def test_layers_of_small_pages_are_copied_together(
    run_bytes: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_copier, "RUN_BYTES", run_bytes)
    engine = filled()
    seen = []

    class Watched(CpuTicket):
        def advance(self, num_ready: int) -> None:
            seen.append(num_ready)

    copier = CpuCopier(engine.kv)
    copier._onboard(Slots(engine.kv, 2).views, [3, 5], Watched(NUM_LAYERS))
    copier.close()
    assert seen == expected


def test_too_many_copies_are_refused_and_another_direction_is_not_held_up() -> None:
    engine = filled()
    copier = HeldCopier(engine.kv)
    slots = Slots(engine.kv, 2)
    tickets = [started(copier.offload([0], slots.views[:1])) for _ in range(cpu_copier.MAX_TICKETS)]
    assert copier.offload([0], slots.views[:1]) is None
    onboard = started(copier.onboard(slots.views[1:], [1]))
    copier.let_go()
    finish(onboard)
    for ticket in tickets:
        finish(ticket)
    finish(copier.offload([0], slots.views[:1]))
    copier.close()


def test_a_copy_that_goes_wrong_has_failed_and_the_next_one_has_not(caplog: pytest.LogCaptureFixture) -> None:
    engine = filled()
    copier = CpuCopier(engine.kv)
    slots = Slots(engine.kv, 1)

    def broken(pages: Sequence[int], slots: Sequence[memoryview], ticket: CpuTicket) -> None:
        raise OSError("the bytes are gone")

    copier._offload = broken  # type: ignore[method-assign]  # stands for a fault that copying does not have by itself
    ticket = started(copier.offload([0], slots.views))
    ticket.wait()
    ticket.wait_layer(0)
    assert ticket.done()
    assert ticket.failed
    assert "the bytes are gone" in caplog.text
    del copier._offload
    finish(copier.offload([0], slots.views))
    copier.close()


def test_a_copy_that_takes_too_long_has_failed_but_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_copier, "COPY_TIMEOUT_S", 0.01)
    engine = filled()
    copier = HeldCopier(engine.kv)
    ticket = started(copier.onboard(Slots(engine.kv, 1).views, [3]))
    ticket.wait_layer(0)
    assert ticket.failed
    assert not ticket.done()
    copier.let_go()
    copier.close()


def test_close_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_copier, "COPY_TIMEOUT_S", 0.01)
    engine = filled()
    copier = HeldCopier(engine.kv)
    ticket = started(copier.offload([3], Slots(engine.kv, 1).views))
    copier.close()
    assert not ticket.done()
    copier.let_go()


# ---- which copier


def test_pages_of_a_cpu_get_the_cpu_copier() -> None:
    copier = copier_for(filled().kv)
    assert isinstance(copier, CpuCopier)
    copier.close()


def test_pages_that_no_copier_can_reach_are_refused() -> None:
    kv = PagedKV([torch.zeros(2, 4, 8, device="meta")], "page token dim")
    with pytest.raises(LayoutError):
        copier_for(kv)
    with pytest.raises(LayoutError):
        CpuCopier(kv)
    with pytest.raises(LayoutError):
        TorchDevice(torch.device("cpu"))
