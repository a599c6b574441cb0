"""What only an accelerator can show: kernels on it, its driver's registration, and the reference engine's KV on it."""

import time
from contextlib import closing

import pytest
import torch

from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.opening import open_engine
from connectors.torch_engine.request import EngineRequest
from connectors.torch_engine.sampling import SamplingParams
from gpu_io.host_runtime import host_runtime
from gpu_io.kernels import TritonPacker
from gpu_io.packing import TorchPacker, packer_for
from gpu_io.registration import Registration
from gpu_io.testing import DTYPES, IN_ORDER, MLA, NUM_LAYERS, STRIDED, Pages
from kvstore.config import Config
from kvstore.opening import open_store
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
