"""What only an accelerator can show: kernels on it, its driver's registration, and the reference engine's KV on it."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from mmap import PAGESIZE

import pytest
import torch

from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.opening import open_engine
from connectors.torch_engine.request import EngineRequest
from connectors.torch_engine.sampling import SamplingParams
from gpu_io import calibration, direct_path, pipeline
from gpu_io.calibration import calibrated
from gpu_io.direct_path import DIRECT_BYTES
from gpu_io.host_runtime import host_runtime
from gpu_io.kernels import TritonPacker
from gpu_io.packing import TorchPacker, packer_for, torch_packer
from gpu_io.pages import PagedKV
from gpu_io.pipeline import PipelineCopier
from gpu_io.quantiser_kernels import TritonQuantiser
from gpu_io.registration import Registration
from gpu_io.testing import (
    DTYPES,
    IN_ORDER,
    MLA,
    NUM_LAYERS,
    NUM_PAGES,
    QUANTISED_PAGES,
    STRIDED,
    Pages,
    Slots,
    finish,
    started,
)
from gpu_io.torch_device import TorchDevice
from gpu_io.works import CopyBatch
from kvstore.config import Config
from kvstore.opening import open_store
from kvstore.testing.sidecar import eventually
from kvstore.tiers.memory import Arena

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
DEVICE = str(ACCELERATOR)
WAIT_S = 30.0

pytestmark = pytest.mark.skipif(
    ACCELERATOR is None, reason="needs an accelerator that torch can use; this machine has none"
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", [*IN_ORDER, *STRIDED, MLA])
def test_kernels_are_used_and_move_what_torch_moves(axes: str, dtype: torch.dtype) -> None:
    ours, theirs = (Pages(axes, 1, dtype=dtype, device=DEVICE, pages_per_block=2) for _ in range(2))
    packer, proven = packer_for(ours.kv), TorchPacker(theirs.kv)
    assert isinstance(packer, TritonPacker)
    pages, layers = torch.tensor([7, 2, 3, 5], device=DEVICE), range(1, NUM_LAYERS)
    num_bytes = 2 * ours.kv.layout.block_bytes * len(layers) // NUM_LAYERS
    packed, expected = torch.zeros(2, num_bytes, dtype=torch.uint8, device=DEVICE)
    packer.pack(pages, packed, layers)
    proven.pack(pages, expected, layers)
    assert packed.equal(expected)
    packer.unpack(packed.flip(0), layers, pages, range(2, NUM_LAYERS))
    proven.unpack(packed.flip(0), layers, pages, range(2, NUM_LAYERS))
    assert ours.content().view(torch.uint8).equal(theirs.content().view(torch.uint8))


@pytest.mark.parametrize(("axes", "name", "dtype", "num_stripes"), QUANTISED_PAGES)
def test_kernels_are_used_and_quantise_as_torch_does(
    axes: str, name: str, dtype: torch.dtype, num_stripes: int
) -> None:
    ours, theirs = (
        Pages(axes, 1, dtype=dtype, device=DEVICE, pages_per_block=2, num_stripes=num_stripes, quantisation=name)
        for _ in range(2)
    )
    packer, proven = packer_for(ours.kv), torch_packer(theirs.kv)
    assert isinstance(packer, TritonQuantiser)
    pages, layers = torch.tensor([7, 2, 3, 5], device=DEVICE), range(len(ours.kv.layers))
    packed, expected = torch.zeros(2, 2 * ours.kv.layout.block_bytes, dtype=torch.uint8, device=DEVICE)
    packer.pack(pages, packed, layers)
    proven.pack(pages, expected, layers)
    assert packed.equal(expected)
    assert packed.cpu().numpy().tobytes() == ours.block([7, 2]) + ours.block([3, 5])
    packer.unpack(packed, layers, pages.flip(0), layers[1:])
    proven.unpack(packed, layers, pages.flip(0), layers[1:])
    assert ours.content().equal(theirs.content())


def test_the_driver_registers_an_arena_and_lets_it_go() -> None:
    runtime = host_runtime(torch.device(DEVICE))
    if runtime is None:
        pytest.skip(f"{DEVICE} has no calls that register host memory")
    for _ in range(2):  # an address that was not let go is refused the second time
        with closing(Arena(64 << 20, may_be_huge=False)) as arena:
            registered = Registration(arena.view(0, arena.capacity_bytes), runtime, chunk_bytes=16 << 20)
            deadline_s = time.monotonic() + WAIT_S
            while registered.registered_bytes < arena.capacity_bytes and registered.failure is None:
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
            registered.close()
            assert registered.failure is None


@contextmanager
def arena_of(kv: PagedKV, num_blocks: int) -> Iterator[tuple[memoryview, list[memoryview]]]:
    """Slots for so many blocks, and the memory that they are in."""
    block_bytes = kv.layout.block_bytes
    with closing(Arena(-(-num_blocks * block_bytes // PAGESIZE) * PAGESIZE, may_be_huge=False)) as arena:
        slots = arena.views(range(0, num_blocks * block_bytes, block_bytes), block_bytes)
        yield arena.view(0, arena.capacity_bytes), slots
        slots.clear()


def test_the_drivers_batches_move_what_single_copies_move(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between pages and registered slots, wherever the driver has batches, and though they may be slower."""
    if TorchDevice(torch.device(DEVICE)).batch() is None:
        pytest.skip(f"the driver of {DEVICE} has no batched memcpy")
    monkeypatch.setattr(calibration, "WIN", 1e9)
    monkeypatch.setattr(pipeline, "DIRECT_BYTES", 1)
    monkeypatch.setattr(direct_path, "DIRECT_BYTES", 8)
    batched = CopyBatch.run
    sizes: list[int] = []

    def counted(work: CopyBatch) -> None:
        sizes.append(len(work.rows))
        batched(work)

    engine = Pages(IN_ORDER[0], 1, dtype=torch.bfloat16, device=DEVICE)
    copier = PipelineCopier(engine.kv, TorchDevice(engine.kv.device), TorchPacker(engine.kv))
    monkeypatch.setattr(CopyBatch, "run", counted)
    with arena_of(engine.kv, 4) as (memory, slots):
        copier.reach(memory)
        eventually(lambda: copier.registered_bytes == memory.nbytes)
        finish(copier.offload([7, 2, 5, 0], slots))
        assert b"".join(map(bytes, slots)) == b"".join(engine.block([page]) for page in (7, 2, 5, 0))
        finish(copier.onboard(slots, [1, 3, 6, 8]))
        assert [engine.block([page]) for page in (1, 3, 6, 8)] == [engine.block([page]) for page in (7, 2, 5, 0)]
        copier.close()
    assert sizes == [4] * (1 + NUM_LAYERS)
    assert not caplog.records


def test_whether_batches_are_faster_is_known_soon_and_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    device = TorchDevice(torch.device(DEVICE))
    torch.accelerator.synchronize()
    started_s = time.perf_counter()
    calibrated(device, DIRECT_BYTES)
    assert time.perf_counter() - started_s < 1
    assert not caplog.records


def test_slots_that_are_not_registered_do_not_make_the_host_wait() -> None:
    """While the accelerator computes, copies are begun and not done; then they are, and every byte is there."""
    engine = Pages(STRIDED[0], 1, dtype=torch.bfloat16, device=DEVICE)
    expected = [engine.block([page]) for page in range(NUM_PAGES)]
    one, result = torch.ones(2, 8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    copier = PipelineCopier(engine.kv, TorchDevice(engine.kv.device), packer_for(engine.kv))
    slots = Slots(engine.kv, NUM_PAGES)
    torch.accelerator.synchronize()
    for _ in range(200):
        torch.mm(one, one, out=result)
    computed = torch.accelerator.current_stream().record_event()
    ticket = started(copier.offload(range(NUM_PAGES), slots.views))
    assert not ticket.done()
    assert not computed.query()
    finish(ticket)
    assert [bytes(view) for view in slots.views] == expected
    copier.close()


def test_the_engine_answers_the_same_from_ram_as_from_its_pages() -> None:
    """Both compute the same tail over the same prefix, so that not even rounding may differ."""
    prompt = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    with closing(open_store(Config.from_mapping({"memory": {"capacity": "16MiB"}}))) as store:
        engine, _ = open_engine(None, EngineConfig(num_pages=64, max_step_tokens=64), device=DEVICE, store=store)

        def answer() -> EngineRequest:
            request = engine.submit(prompt, SamplingParams(max_tokens=24, stop_ids=()))
            while engine.has_work:
                engine.step()
            return request

        assert answer().metrics.tokens_from_tier == {}
        from_pages = answer()
        assert from_pages.metrics.tokens_from_tier == {"hbm": 288}
        while engine.cache.pool.num_held:
            engine.cache.poll()
        engine.cache.pool.evict(64)
        engine.cache.kv.zero_()
        from_ram = answer()
        assert from_ram.metrics.tokens_from_tier == {"memory": 288}
        assert from_ram.output == from_pages.output
        engine.close()
