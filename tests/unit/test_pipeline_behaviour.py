"""What the pipeline gives to a device, what it says of a copy, and what it does with a device that fails."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from gpu_io import direction, pipeline, pipeline_ticket, staged_path
from gpu_io.direction import Direction
from gpu_io.packing import TorchPacker
from gpu_io.pipeline import PipelineCopier
from gpu_io.pipeline_ticket import PipelineTicket
from gpu_io.simulated import Adversarial, SimulatedDevice, SimulatedFence, SimulatedStream
from gpu_io.streams import Work
from gpu_io.testing import GUARD, IN_ORDER, NUM_LAYERS, NUM_PAGES, STRIDED, Pages, Slots, finish, started
from gpu_io.works import Copy, Pack, Unpack

BLOCK_BYTES = 768
LAYER_BYTES = BLOCK_BYTES // NUM_LAYERS


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver knows all slots."""
    monkeypatch.setattr(Direction, "is_registered", lambda *args: True)


class Recorder(SimulatedDevice):
    """Remembers what its side streams were given."""

    def __init__(self) -> None:
        super().__init__(Adversarial(1))
        self.works: list[Work] = []

    def stream(self) -> SimulatedStream:
        stream = super().stream()
        submit = stream.submit

        def recorded(work: Work) -> None:
            self.works.append(work)
            submit(work)

        stream.submit = recorded  # type: ignore[method-assign]  # a seam of this test alone
        return stream

    def taken(self) -> list[tuple[str, int]]:
        """Kinds and sizes in bytes of all works since the last call, tables aside."""
        works, self.works = self.works, []
        found = []
        for work in works:
            if isinstance(work, Copy) and work.target.dtype == torch.uint8:
                found.append(("copy", work.target.numel()))
            elif isinstance(work, Pack | Unpack):
                found.append((type(work).__name__.lower(), len(work.pages) * len(work.layers) * LAYER_BYTES))
        return found


def opened(axes: str) -> tuple[Recorder, PipelineCopier, Slots, Pages]:
    device, engine = Recorder(), Pages(axes, 1, dtype=torch.bfloat16, device="cpu")
    slots = Slots(engine.kv, NUM_PAGES)
    for tensor in engine.tensors:
        device.know(tensor, "pages")
    device.know(torch.frombuffer(slots.memory, dtype=torch.uint8), "slots")
    return device, PipelineCopier(engine.kv, device, TorchPacker(engine.kv)), slots, engine


def test_scattered_pages_and_adjacent_slots_are_one_kernel_and_one_copy() -> None:
    device, copier, slots, _ = opened(STRIDED[0])
    finish(copier.offload([7, 2, 5], slots.views[:3]))
    assert device.taken() == [("pack", 3 * BLOCK_BYTES), ("copy", 3 * BLOCK_BYTES)]
    finish(copier.onboard(slots.views[:3], [7, 2, 5]))
    assert device.taken() == [("copy", 3 * BLOCK_BYTES), ("unpack", 3 * BLOCK_BYTES)]


def test_slots_apart_are_a_copy_each() -> None:
    device, copier, slots, _ = opened(STRIDED[0])
    finish(copier.offload([7, 2, 5], [slots.views[0], slots.views[4], slots.views[5]]))
    assert device.taken() == [("pack", 3 * BLOCK_BYTES), ("copy", BLOCK_BYTES), ("copy", 2 * BLOCK_BYTES)]


def test_large_runs_need_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "DIRECT_BYTES", BLOCK_BYTES)
    device, copier, slots, _ = opened(IN_ORDER[0])
    finish(copier.offload([2, 3, 5], slots.views[:3]))
    assert device.taken() == [("copy", 2 * BLOCK_BYTES), ("copy", BLOCK_BYTES)]
    finish(copier.onboard(slots.views[:3], [2, 3, 5]))
    assert device.taken() == [("copy", 2 * BLOCK_BYTES), ("copy", BLOCK_BYTES)]
    monkeypatch.setattr(pipeline, "DIRECT_BYTES", BLOCK_BYTES + 1)
    device, copier, slots, _ = opened(IN_ORDER[0])
    finish(copier.offload([2, 3, 5], slots.views[:3]))
    assert device.taken()[0] == ("pack", 3 * BLOCK_BYTES)


def test_what_is_too_large_for_a_buffer_comes_by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_path, "BUFFER_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(staged_path, "DIRECT_BYTES", LAYER_BYTES)
    device, copier, slots, _ = opened(STRIDED[0])
    finish(copier.onboard(slots.views[:3], [7, 2, 5]))
    assert device.taken() == [*[("copy", LAYER_BYTES)] * 3, ("unpack", 3 * LAYER_BYTES)] * NUM_LAYERS


def test_staging_memory_is_bounded_and_given_back() -> None:
    device, copier, slots, engine = opened(STRIDED[0])
    finish(copier.offload(range(NUM_PAGES), slots.views))
    pages_and_slots = len(engine.tensors) + 1
    buffers = 2 * pipeline.NUM_BUFFERS
    tables, bounces = 2, 2
    assert len(device._known) == pages_and_slots + buffers + tables + bounces
    copier.close()
    assert len(device._known) == pages_and_slots


def test_a_ticket_that_is_kept_keeps_no_tables() -> None:
    _, copier, slots, _ = opened(STRIDED[0])
    ticket = copier.offload([1], slots.views[:1])
    assert isinstance(ticket, PipelineTicket)
    assert ticket.tables
    copier.close()
    assert not ticket.tables


def test_no_kernel_is_given_a_host_address() -> None:
    """CR-037: on HIP it may mean other bytes on the device; only copies of the runtime know slots."""
    device, copier, slots, _ = opened(STRIDED[0])
    finish(copier.offload([1, 2], slots.views[:2]))
    finish(copier.onboard(slots.views[:2], [3, 4]))
    start = torch.frombuffer(slots.memory, dtype=torch.uint8).data_ptr()
    in_slots = {
        type(work).__name__
        for work in device.works
        for starts, _ in (*work.reads(), *work.writes())
        if ((starts >= start) & (starts < start + len(slots.memory))).any()
    }
    assert in_slots == {"Copy"}
    assert {"Pack", "Unpack"} <= {type(work).__name__ for work in device.works}


def test_buffers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_path, "BUFFER_BYTES", BLOCK_BYTES)
    device, copier, slots, _ = opened(STRIDED[0])
    finish(copier.offload(range(NUM_PAGES), slots.views))
    used = [work.staged.data_ptr() for work in device.works if isinstance(work, Pack)]
    assert len(set(used)) == pipeline.NUM_BUFFERS
    assert used[pipeline.NUM_BUFFERS :] == used[: -pipeline.NUM_BUFFERS]


def test_compute_waits_for_its_layer_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_path, "KERNEL_BYTES", 1)
    device, copier, slots, engine = opened(STRIDED[0])
    source = engine.content()
    finish(copier.offload([1, 2], slots.views[:2]))
    for tensor in engine.kv.layers:
        tensor[[3, 5]] = 0
    ticket = started(copier.onboard(slots.views[:2], [3, 5]))
    for layer in range(NUM_LAYERS):
        ticket.wait_layer(layer)
        device.finish_compute()
        content = engine.content()
        assert content[[3, 5], : layer + 1].equal(source[[1, 2], : layer + 1])
        assert (content[[3, 5], layer + 1 :] == 0).all()  # an adversary does no more than it must
    finish(ticket)


def test_pages_are_free_before_the_copy_is_done() -> None:
    for seed in range(8):
        device, copier, slots, _ = opened(STRIDED[0])
        device.scheduler = Adversarial(seed)
        ticket = started(copier.offload([1, 2], slots.views[:2]))
        assert not ticket.pages_free()
        while not ticket.pages_free():
            pass
        if set(slots.memory) == {GUARD}:
            break
    assert set(slots.memory) == {GUARD}
    assert not ticket.done()
    finish(ticket)
    assert GUARD not in bytes(slots.views[1][:16])


@pytest.mark.parametrize("axes", [STRIDED[0], IN_ORDER[0]])
def test_a_device_that_hangs_is_given_so_much_and_then_nothing(axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direction, "MAX_WORKS", 8)
    device, copier, slots, _ = opened(axes)
    device.is_held = True
    copies: list[Callable[[], object]] = [
        lambda: copier.offload([1], slots.views[:1]),
        lambda: copier.onboard(slots.views[1:2], [2]),
    ]
    for copy in copies:
        answers = [copy() for _ in range(10)]
        assert None not in answers[:2]
        assert answers[-1] is None
        num_works = len(device.works)
        assert copy() is None
        assert len(device.works) == num_works
    device.is_held = False
    device.finish()
    for copy in copies:
        assert copy() is not None


def test_a_copy_that_takes_too_long_has_failed_but_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """WK-058: its pages and slots stay in quarantine, and no memory of its direction is given back."""
    monkeypatch.setattr(pipeline_ticket, "COPY_TIMEOUT_S", 0.01)
    device, copier, slots, _ = opened(STRIDED[0])
    device.is_held = True
    ticket = started(copier.offload([0], slots.views[:1]))
    num_known = len(device._known)
    copier.close()
    assert ticket.failed
    assert not ticket.done()
    assert not ticket.pages_free()
    assert len(device._known) == num_known - pipeline.NUM_BUFFERS - 1  # buffers and bounce of the other direction
    copier.close()
    assert len(device._known) == num_known - pipeline.NUM_BUFFERS - 1
    device.is_held = False
    device.finish()
    assert ticket.done()
    assert ticket.failed


@pytest.mark.parametrize("num_works", range(6))
def test_a_copy_the_device_has_no_memory_for_has_failed(num_works: int, caplog: pytest.LogCaptureFixture) -> None:
    device, copier, slots, engine = opened(STRIDED[0])
    before = engine.content()
    device.fail_after = num_works
    ticket = started(copier.offload([0, 3, 4], [slots.views[0], slots.views[2], slots.views[4]]))
    device.fail_after = None
    ticket.wait()
    assert ticket.done()
    assert ticket.failed == (num_works < 5)
    assert ("out of memory" in caplog.text) == ticket.failed
    finish(copier.offload([1], slots.views[8:]))
    assert bytes(slots.views[8]) == engine.block([1])
    assert engine.content().equal(before)


@pytest.mark.parametrize("axes", [STRIDED[0], IN_ORDER[0]])
def test_a_work_that_fails_on_its_way_to_the_device_may_have_reached_it(
    axes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "DIRECT_BYTES", 1)
    device, copier, slots, _ = opened(axes)
    device.is_held = True
    submits = {stream: stream.submit for stream in device._streams[1:]}

    def reached(stream: SimulatedStream, work: Work) -> None:
        submits[stream](work)
        raise RuntimeError("out of memory")

    for stream in submits:
        monkeypatch.setattr(stream, "submit", partial(reached, stream))
    ticket = started(copier.onboard(slots.views[:1], [4]))
    assert ticket.failed
    assert not ticket.done()
    device.is_held = False
    ticket.wait()
    assert ticket.done()
    copier.close()


class LostFence(SimulatedFence):
    """What a device whose driver reports an error has left."""

    def query(self) -> bool:
        raise RuntimeError("an illegal memory access was encountered")


def test_a_copy_of_a_device_that_is_lost_has_failed_and_is_never_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline_ticket, "COPY_TIMEOUT_S", 0.01)
    _, copier, slots, _ = opened(STRIDED[0])
    ticket = started(copier.onboard(slots.views[:1], [4]))
    monkeypatch.setattr(SimulatedFence, "query", LostFence.query)
    assert not ticket.done()
    assert ticket.failed
    copier.close()
    assert not ticket.done()
    assert caplog.text.count("the device failed while it copied") == 1


def test_a_device_that_is_lost_while_a_copy_is_submitted_fails_no_caller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline_ticket, "COPY_TIMEOUT_S", 0.01)
    _, copier, slots, _ = opened(STRIDED[0])

    def lost(stream: SimulatedStream) -> SimulatedFence:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(SimulatedStream, "fence", lost)
    ticket = started(copier.onboard(slots.views[:1], [4]))
    assert ticket.failed
    monkeypatch.undo()
    ticket = started(copier.onboard(slots.views[:1], [4]))
    finish(ticket)
