"""Works touch what they declare and nothing else: what the simulated device believes is true."""

import ctypes

import pytest
import torch

from gpu_io import calibration, direct_path, pipeline, staged_path
from gpu_io.direction import Direction
from gpu_io.driver_batch import DriverBatch
from gpu_io.packing import torch_packer
from gpu_io.pipeline import PipelineCopier
from gpu_io.ranges import Ranges
from gpu_io.simulated import POISON, Prompt, SimulatedDevice, SimulatedStream
from gpu_io.streams import Work
from gpu_io.testing import IN_ORDER, MLA, NUM_PAGES, STRIDED, FakeDriver, Pages, Slots, finish


class Confined:
    """A work that runs where all it does not declare to read is poison; what it does not declare to write must stay."""

    def __init__(self, device: SimulatedDevice, work: Work) -> None:
        self._device = device
        self._work = work

    def run(self) -> None:
        regions = {address: memory.numel() * memory.itemsize for address, memory in self._device._known.items()}
        before = {address: ctypes.string_at(address, size) for address, size in regions.items()}
        for address, size in regions.items():
            ctypes.memset(address, POISON, size)
        self._put(before, self._work.reads())
        blank = {address: ctypes.string_at(address, size) for address, size in regions.items()}
        self._work.run()
        after = {address: ctypes.string_at(address, size) for address, size in regions.items()}
        for address, content in blank.items():
            ctypes.memmove(address, content, len(content))
        self._put(after, self._work.writes())
        assert {address: ctypes.string_at(address, size) for address, size in regions.items()} == after
        for address, content in before.items():
            ctypes.memmove(address, content, len(content))
        self._put(after, self._work.writes())

    def reads(self) -> list[Ranges]:
        return self._work.reads()

    def writes(self) -> list[Ranges]:
        return self._work.writes()

    @staticmethod
    def _put(memory: dict[int, bytes], ranges: list[Ranges]) -> None:
        for starts, num_bytes in ranges:
            for start in starts.tolist():
                base = max(address for address in memory if address <= start)
                ctypes.memmove(start, memory[base][start - base : start - base + num_bytes], num_bytes)


class ConfinedDevice(SimulatedDevice):
    def stream(self) -> SimulatedStream:
        stream = super().stream()
        submit = stream.submit
        stream.submit = lambda work: submit(Confined(self, work))  # type: ignore[method-assign]  # a seam of this test
        return stream


@pytest.mark.parametrize("way", ["staged", "direct", "batched", "bounced"])
@pytest.mark.parametrize(
    ("axes", "quantisation"),
    [*((axes, "") for axes in (*IN_ORDER, *STRIDED, MLA)), (IN_ORDER[0], "int8"), (STRIDED[1], "fp8")],
)
@pytest.mark.parametrize("pages_per_block", [1, 2])
def test_works_touch_what_they_declare(
    axes: str, quantisation: str, pages_per_block: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "DIRECT_BYTES", 1 if way in {"direct", "batched"} else 1 << 60)
    monkeypatch.setattr(direct_path, "DIRECT_BYTES", 8)
    monkeypatch.setattr(calibration, "WIN", 1e9)
    monkeypatch.setattr(calibration, "LIMIT_S", 10)
    monkeypatch.setattr(Direction, "is_registered", lambda *args: way != "bounced")
    monkeypatch.setattr(staged_path, "BUFFER_BYTES", 3000)
    monkeypatch.setattr(staged_path, "KERNEL_BYTES", 1)
    device = ConfinedDevice(Prompt())
    device.many_at_once = DriverBatch(FakeDriver(), lambda: 0) if way == "batched" else None
    dtype = torch.float32 if quantisation else torch.bfloat16  # quantised again, float32 becomes the same bytes
    engine = Pages(axes, 1, dtype=dtype, device="cpu", pages_per_block=pages_per_block, quantisation=quantisation)
    slots = Slots(engine.kv, NUM_PAGES // pages_per_block, gap_bytes=16)
    for tensor in engine.tensors:
        device.know(tensor, "pages")
    device.know(torch.frombuffer(slots.memory, dtype=torch.uint8), "slots")
    pages = [7, 2, 3, 4, 5, 0, 1, 8]
    blocks = [pages[at : at + pages_per_block] for at in range(0, len(pages), pages_per_block)]
    before = [engine.block(block) for block in blocks]
    copier = PipelineCopier(engine.kv, device, torch_packer(engine.kv))
    finish(copier.offload(pages, slots.views[: len(blocks)]))
    assert [bytes(view) for view in slots.views[: len(blocks)]] == before
    finish(copier.onboard(slots.views[: len(blocks)], pages[::-1]))
    blocks = [pages[::-1][at : at + pages_per_block] for at in range(0, len(pages), pages_per_block)]
    assert [engine.block(block) for block in blocks] == before
    copier.close()
