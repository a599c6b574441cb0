"""Registering host memory, over a runtime that is a fake and says so: no GPU, no driver, nothing is pinned."""

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_io import registration
from gpu_io.host_runtime import LibraryRuntime, host_runtime
from gpu_io.packing import TorchPacker
from gpu_io.pipeline import PipelineCopier
from gpu_io.registration import Registration, span_of
from gpu_io.simulated import Adversarial, SimulatedDevice
from gpu_io.testing import IN_ORDER, STRIDED, FakeLibrary, Pages, Slots, finish, started
from gpu_io.works import Copy
from kvstore.tiers.memory import Arena

PAGE = mmap.PAGESIZE
CHUNK = 16 * PAGE


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "POLL_S", 0.001)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena(4 * CHUNK - PAGE, may_be_huge=False)) as arena:
        yield arena


def of(arena: Arena, library: FakeLibrary, prefix: str = "cuda") -> Registration:
    return Registration(arena.view(0, arena.capacity_bytes), LibraryRuntime(library, prefix), chunk_bytes=CHUNK)


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_all_of_it_in_chunks_and_back(arena: Arena, prefix: str) -> None:
    """PF-019: no single call pins it all."""
    library = FakeLibrary(prefix)
    registered = of(arena, library, prefix)
    wait_for(lambda: registered.registered_bytes == arena.capacity_bytes)
    address, _ = span_of(arena.view(0, 1))
    assert library.registered == {address + at * CHUNK: CHUNK - PAGE * (at == 3) for at in range(4)}
    registered.close()
    registered.close()
    assert not library.registered
    assert registration.CHUNK_BYTES <= 64 << 30


def test_the_bytes_stay_mapped_until_they_are_unregistered() -> None:
    """LK-024: a mapping that goes before its registration makes the next one at that address fail."""
    library, arena = FakeLibrary(), Arena(CHUNK, may_be_huge=False)
    registered = of(arena, library)
    wait_for(lambda: registered.registered_bytes == CHUNK)
    address, _ = span_of(arena.view(0, 1))
    arena.close()
    del arena
    assert is_mapped(address)
    unregister = library.unregister

    def checked(pointer: ctypes.c_void_p) -> int:
        assert is_mapped(pointer.value or 0)
        return unregister(pointer)

    library.cudaHostUnregister = checked  # type: ignore[attr-defined]  # the library's own name of it
    registered.close()
    assert library.calls[-1] == ("unregister", CHUNK)
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "kvstore-arena" in line]
    spans = [line.split(maxsplit=1)[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def test_pages_are_made_before_they_are_pinned() -> None:
    """What is pinned cannot become huge pages any more."""
    with closing(Arena(2 * CHUNK, prefault=False, may_be_huge=False)) as arena:
        library = FakeLibrary()
        registered = of(arena, library)
        time.sleep(0.05)
        assert not library.calls
        arena.populate(0, CHUNK)
        wait_for(lambda: registered.registered_bytes == CHUNK)
        time.sleep(0.02)
        assert len(library.calls) == 1
        arena.populate(CHUNK, CHUNK)
        wait_for(lambda: registered.registered_bytes == 2 * CHUNK)
        registered.close()


def test_pages_that_nobody_makes_are_made_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "PATIENCE_S", 0.01)
    with closing(Arena(CHUNK, prefault=False, may_be_huge=False)) as arena:
        registered = of(arena, FakeLibrary())
        wait_for(lambda: registered.registered_bytes == CHUNK)
        registered.close()


@pytest.mark.parametrize("fail_at", range(4))
def test_a_failure_costs_the_rest_and_says_so_and_leaves_no_error(
    arena: Arena, fail_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """CR-034, CR-036, UX-016: what is pinned stays; the driver's error is taken away; the message names the knob."""
    library = FakeLibrary(fail_at=fail_at)
    registered = of(arena, library)
    wait_for(lambda: registered.failure is not None)
    assert registered.registered_bytes == fail_at * CHUNK == sum(library.registered.values())
    assert library.last_error == 0
    size = CHUNK if fail_at < 3 else CHUNK - PAGE
    for said in (f"pinned {fail_at * CHUNK} of {4 * CHUNK - PAGE} bytes", f"next {size}", "a fake that pins nothing"):
        assert said in caplog.text
    assert "not the GPU's: lower memory.capacity" in caplog.text
    registered.close()
    assert not library.registered


def test_what_somebody_else_has_registered_is_theirs(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    library = FakeLibrary()
    address, _ = span_of(arena.view(0, 1))
    library.registered[address + CHUNK] = PAGE
    registered = of(arena, library)
    wait_for(lambda: registered.registered_bytes == 3 * CHUNK - PAGE)
    assert library.last_error == 0
    assert "registered by somebody else" in caplog.text
    registered.close()
    assert library.registered == {address + CHUNK: PAGE}


def test_nothing_is_not_registered() -> None:
    """CR-036."""
    library = FakeLibrary()
    Registration(memoryview(b""), LibraryRuntime(library, "cuda")).close()
    assert not library.calls


def test_closing_does_not_wait_for_pages() -> None:
    with closing(Arena(CHUNK, prefault=False, may_be_huge=False)) as arena:
        library = FakeLibrary()
        of(arena, library).close()
        assert not library.calls


def test_an_unregistering_that_fails_is_said_and_leaves_no_error(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    library = FakeLibrary()
    registered = of(arena, library)
    wait_for(lambda: registered.registered_bytes == arena.capacity_bytes)
    library.registered.clear()
    registered.close()
    assert "could not be unregistered" in caplog.text
    assert library.last_error == 0


def test_a_cpu_has_no_such_calls() -> None:
    assert host_runtime(torch.device("cpu")) is None


# ---- the pipeline's use of it


@pytest.mark.parametrize("axes", [STRIDED[0], IN_ORDER[0]])
def test_no_copy_crosses_two_registrations(axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver refuses one that does."""
    monkeypatch.setattr(registration, "CHUNK_BYTES", PAGE)
    monkeypatch.setattr("gpu_io.pipeline.DIRECT_BYTES", 1)
    monkeypatch.setattr("gpu_io.pipeline.Registration", partial_chunks)
    device, library = SimulatedDevice(Adversarial(1)), FakeLibrary()
    device.runtime = LibraryRuntime(library, "cuda")
    engine = Pages(axes, 1, dtype=torch.bfloat16, device="cpu")
    slots = Slots(engine.kv, 9)
    for tensor in engine.tensors:
        device.know(tensor, "pages")
    device.know(torch.frombuffer(slots.memory, dtype=torch.uint8), "slots")
    copier = PipelineCopier(engine.kv, device, TorchPacker(engine.kv))
    copier.reach(memoryview(slots.memory))
    wait_for(lambda: sum(library.registered.values()) == len(slots.memory))
    finish(copier.offload(range(9), slots.views))
    assert bytes(slots.memory) == b"".join(engine.block([page]) for page in range(9))
    kept = engine.content()
    for tensor in engine.tensors:
        tensor.zero_()
    copied: list[tuple[int, int]] = []
    run = Copy.run

    def noted(work: Copy) -> None:
        copied.append(span_in(work, slots))
        run(work)

    monkeypatch.setattr(Copy, "run", noted)
    finish(copier.onboard(slots.views, range(9)))
    assert engine.content().equal(kept)
    crossing = [(start, end) for start, end in copied if start // PAGE != (end - 1) // PAGE]
    assert copied
    assert not crossing
    copier.close()
    assert not library.registered


@pytest.mark.parametrize(
    ("start", "size", "expected"),
    [
        (10, 20, [(0, 20)]),
        (90, 20, [(0, 10), (10, 10)]),
        (50, 200, [(0, 50), (50, 100), (150, 50)]),
        (-30, 40, [(0, 30), (30, 10)]),
        (240, 30, [(0, 10), (10, 20)]),
        (-30, 20, [(0, 20)]),
        (250, 20, [(0, 20)]),
        (-10, 300, [(0, 10), (10, 100), (110, 100), (210, 50), (260, 40)]),
    ],
)
def test_a_copy_is_cut_where_a_registration_begins_or_ends(
    start: int, size: int, expected: list[tuple[int, int]]
) -> None:
    """Of 250 bytes in chunks of 100; memory that is pinned apart may lie right beside them."""
    memory = memoryview(bytearray(250))
    registered = Registration(memory, LibraryRuntime(FakeLibrary(), "cuda"), chunk_bytes=100)
    assert registered.cuts(span_of(memory)[0] + start, size) == expected
    registered.close()


def partial_chunks(memory: memoryview, runtime: LibraryRuntime) -> Registration:
    return Registration(memory, runtime, chunk_bytes=PAGE)


def span_in(work: Copy, slots: Slots) -> tuple[int, int]:
    """Where in the slots a copy begins and ends."""
    start = work.source.data_ptr() - np.frombuffer(slots.memory, dtype=np.uint8).ctypes.data
    return (start, start + work.source.numel()) if 0 <= start < len(slots.memory) else (0, 1)


def test_other_memory_is_registered_once_no_copy_is_in_flight() -> None:
    device, library = SimulatedDevice(Adversarial(1)), FakeLibrary()
    device.runtime = LibraryRuntime(library, "cuda")
    engine = Pages(STRIDED[0], 1, dtype=torch.bfloat16, device="cpu")
    slots, others = Slots(engine.kv, 2), Slots(engine.kv, 3)
    for tensor in engine.tensors:
        device.know(tensor, "pages")
    device.know(torch.frombuffer(slots.memory, dtype=torch.uint8), "slots")
    copier = PipelineCopier(engine.kv, device, TorchPacker(engine.kv))
    copier.reach(memoryview(slots.memory))
    wait_for(lambda: list(library.registered.values()) == [len(slots.memory)])
    device.is_held = True
    ticket = started(copier.offload([1, 2], slots.views))
    copier.reach(memoryview(others.memory))
    time.sleep(0.02)
    assert list(library.registered.values()) == [len(slots.memory)]
    device.is_held = False
    finish(ticket)
    copier.reach(memoryview(others.memory))
    wait_for(lambda: list(library.registered.values()) == [len(others.memory)])
    copier.close()
    assert not library.registered


@pytest.mark.parametrize("num_pinned", [0, 1])
def test_memory_that_could_not_be_pinned_is_copied_all_the_same(
    num_pinned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CR-034: a limit on what may be pinned costs speed and a warning, and no byte; the rest is bounced."""
    monkeypatch.setattr("gpu_io.pipeline.Registration", partial_chunks)
    device = SimulatedDevice(Adversarial(1))
    device.runtime = LibraryRuntime(FakeLibrary(fail_at=num_pinned), "cuda")
    engine = Pages(STRIDED[0], 1, dtype=torch.bfloat16, device="cpu")
    slots = Slots(engine.kv, 9)
    for tensor in engine.tensors:
        device.know(tensor, "pages")
    device.know(torch.frombuffer(slots.memory, dtype=torch.uint8), "slots")
    copier = PipelineCopier(engine.kv, device, TorchPacker(engine.kv))
    copier.reach(memoryview(slots.memory))
    wait_for(lambda: "copies with the rest are slower, through a pinned buffer" in caplog.text)
    bounced: list[int] = []
    host_copy = device.host_copy

    def noted(target: torch.Tensor, source: torch.Tensor) -> None:
        bounced.append(target.numel())
        host_copy(target, source)

    monkeypatch.setattr(device, "host_copy", noted)
    finish(copier.offload(range(9), slots.views))
    assert bytes(slots.memory) == b"".join(engine.block([page]) for page in range(9))
    assert len(bounced) == 9 - num_pinned * (PAGE // engine.kv.layout.block_bytes)
    copier.close()
