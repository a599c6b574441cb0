"""The quantiser: what becomes of numbers, in torch and in triton's interpreter; compiled for real chips."""

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from gpu_io import quantiser_kernels
from gpu_io.code_definition import magnitudes
from gpu_io.packing import Packer, packer_for, torch_packer
from gpu_io.pages import PagedKV
from gpu_io.quantiser import LEAST_SCALE, TorchQuantiser
from gpu_io.testing import IN_ORDER, MLA, QUANTISED_PAGES, STRIDED, Pages
from kvstore.errors import LayoutError
from kvstore.layout import QUANTISED
from tests.unit.test_kernels import ACCESS, TABLE, TARGETS, WIDE, assembly, interpreting

WIDE_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PAGES = [7, 2, 3, 5]
"""Two blocks."""


@pytest.fixture(scope="module")
def interpreted() -> Iterator[ModuleType]:
    with interpreting(quantiser_kernels) as module:
        yield module


def hostile(axes: str, name: str, dtype: torch.dtype, num_stripes: int) -> Pages:
    """Pages of any bits, some NaN and some infinite; in layer 2 a block of largest numbers, and one of zeros."""
    engine = Pages(axes, 1, dtype=dtype, device="cpu", pages_per_block=2, num_stripes=num_stripes, quantisation=name)
    chance = torch.Generator().manual_seed(1)
    for tensor in engine.tensors:
        bits = torch.randint(0, 256, (tensor.numel() * tensor.itemsize,), dtype=torch.uint8, generator=chance)
        tensor.copy_(bits.view(dtype).view(tensor.shape))
    engine.kv.layers[2][PAGES[:2]] = torch.finfo(dtype).max
    engine.kv.layers[2][PAGES[2:]] = 0
    return engine


def staged_bytes(kv: PagedKV, num_blocks: int, layers: range) -> Tensor:
    return torch.full((kv.layout.block_bytes // len(kv.layers) * len(layers) * num_blocks,), 0xAA, dtype=torch.uint8)


def packed(packer: Packer, kv: PagedKV, pages: list[int], layers: range | None = None) -> Tensor:
    layers = layers or range(len(kv.layers))
    staged = staged_bytes(kv, len(pages) // kv.pages_per_block, layers)
    packer.pack(torch.tensor(pages), staged, layers)
    return staged


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, but for what kind of NaN a NaN is."""
    bits = (torch.where(each.isnan(), torch.nan, each).view(torch.uint8) for each in (ours, theirs))
    return torch.equal(*bits)


# ---- the kernels


@pytest.mark.parametrize(("axes", "name", "dtype", "num_stripes"), QUANTISED_PAGES)
def test_kernels_make_what_torch_makes_of_any_bits(
    interpreted: ModuleType, axes: str, name: str, dtype: torch.dtype, num_stripes: int
) -> None:
    ours, theirs = (hostile(axes, name, dtype, num_stripes) for _ in range(2))
    kernels, proven = interpreted.TritonQuantiser(ours.kv), TorchQuantiser(theirs.kv)
    layers = range(1, len(ours.kv.layers))
    staged = packed(kernels, ours.kv, PAGES, layers)
    assert staged.equal(packed(proven, theirs.kv, PAGES, layers))
    pages = torch.tensor([5, 0, 2, 1])
    kernels.unpack(staged, layers, pages, layers[1:])
    proven.unpack(staged, layers, pages, layers[1:])
    assert same(ours.content(), theirs.content())


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(3, 1, 5), (5, 3, 7), (1, 1, 1)])
def test_groups_that_no_power_of_two_counts_are_moved_in_parts(
    interpreted: ModuleType, name: str, tokens: int, heads: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreted, "PROGRAM_ELEMENTS", 32)
    content = torch.randn(4, 2, tokens, heads, dim, generator=torch.Generator().manual_seed(1))
    before = content.clone()
    kv = PagedKV([content], "page plane token head dim", pages_per_block=2, quantisation=name)
    kernels = interpreted.TritonQuantiser(kv)
    staged = packed(kernels, kv, [3, 1])
    assert staged.equal(packed(TorchQuantiser(kv), kv, [3, 1]))
    kernels.unpack(staged, range(1), torch.tensor([0, 2]), range(1))
    ours = content.clone()
    TorchQuantiser(kv).unpack(staged, range(1), torch.tensor([0, 2]), range(1))
    assert ours.equal(content)
    assert ours[[1, 3]].equal(before[[1, 3]])


SIZES = {"page": 4, "layer": 2, "plane": 2, "token": 16, "head": 8, "dim": 128}
COMPILED: list[tuple[str, str, torch.dtype, dict[str, int], int]] = [
    (IN_ORDER[3], "fp8", torch.bfloat16, {}, 0),
    (STRIDED[1], "int8", torch.float16, {"head": 5, "dim": 80}, 1),
    (IN_ORDER[0], "fp8", torch.float32, {"head": 1}, 1),
]
"""Arrangement, format, dtype, sizes and plane, so that each of what a kernel is put together from is in one."""
SCALE = re.compile(r"b16\b|_u?short|_u16")
"""How a scale is read and written where it does not lie beside others of the thread: 2 bytes."""
ROUNDED = {"cuda": r"div\.rn\.f32", "hip": "v_div_fixup_f32"}
"""How a division as IEEE 754 has it ends."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.arch))
@pytest.mark.parametrize("kernel", ["quantise_kernel", "dequantise_kernel"])
def test_kernels_compile_for_every_chip_with_exact_division_and_elements_in_128_bits(
    target: GPUTarget, kernel: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    for axes, name, dtype, sizes, plane in COMPILED:
        shape = [(SIZES | sizes)[axis] for axis in axes.split()]
        tensors = [torch.zeros(shape, dtype=dtype) for _ in range(1 if "layer" in axes else 2)]
        packer = quantiser_kernels.TritonQuantiser(PagedKV(tensors, axes, pages_per_block=2, quantisation=name))
        constants = (packer.packing if kernel == "quantise_kernel" else packer.unpacking)[plane]
        text = assembly(getattr(quantiser_kernels, kernel), constants, "*u8", target)
        accesses = ACCESS.findall(text)
        wide = [access for access in accesses if WIDE.search(access)]
        others = set(accesses) - set(wide)
        assert all(TABLE.search(access) or SCALE.search(access) for access in others), (axes, others)
        assert any("ld" in access or "load" in access for access in wide), axes
        assert any("st" in access for access in wide), axes
        assert not re.search(r"approx|div\.full|\.ftz", text)
        if kernel == "quantise_kernel":
            assert re.search(ROUNDED[target.backend], text)


# ---- what becomes of numbers


@pytest.mark.parametrize(("axes", "name", "dtype", "num_stripes"), QUANTISED_PAGES)
def test_any_bits_become_the_nearest_codes_of_their_group(
    axes: str, name: str, dtype: torch.dtype, num_stripes: int
) -> None:
    engine = hostile(axes, name, dtype, num_stripes)
    blocks = engine.block(PAGES[:2]) + engine.block(PAGES[2:])
    assert packed(TorchQuantiser(engine.kv), engine.kv, PAGES).numpy().tobytes() == blocks


def one_group(numbers: Tensor, name: str) -> tuple[PagedKV, Tensor]:
    """A page whose every channel of K, and whose every token of V, is ``numbers``; and K and V of page 0."""
    key = numbers[:, None].expand(-1, len(numbers))
    content = torch.stack([key, key.T])[None, :, :, None].contiguous()
    return PagedKV([content], "page plane token head dim", quantisation=name), content[0, :, :, 0]


def there_and_back(kv: PagedKV) -> Tensor:
    """The scales of what is stored of page 0, which becomes what it is loaded as."""
    packer = torch_packer(kv)
    staged = packed(packer, kv, [0])
    packer.unpack(staged, range(1), torch.tensor([0]), range(1))
    return staged[-kv.layout.scales_bytes :].view(torch.bfloat16)


@pytest.mark.parametrize("name", QUANTISED)
def test_numbers_halfway_between_two_codes_become_the_even_one(name: str) -> None:
    exact = torch.from_numpy(magnitudes(name))
    halves = (exact[:-1] + exact[1:]) / 2
    for numbers, expected in [
        (halves, torch.where(torch.arange(len(halves)) % 2 == 0, exact[:-1], exact[1:])),
        (halves.nextafter(exact[:-1]), exact[:-1]),
        (halves.nextafter(exact[1:]), exact[1:]),
    ]:
        kv, content = one_group(torch.cat([numbers, -numbers, exact[-1:]]), name)  # the last one makes the scale 1
        assert (there_and_back(kv) == 1).all()
        for rows in (content[0], content[1].T):
            assert rows[:, 0].equal(torch.cat([expected, -expected, exact[-1:]]))


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", WIDE_FLOATS)
def test_the_largest_numbers_stay_finite_and_the_smallest_become_zero(dtype: torch.dtype, name: str) -> None:
    info = torch.finfo(dtype)
    kv, content = one_group(torch.tensor([info.max, -info.max, info.max / 3, info.tiny], dtype=dtype), name)
    there_and_back(kv)
    loaded = content[1, 0].float()
    assert loaded.isfinite().all()
    torch.testing.assert_close(loaded[:3], torch.tensor([1, -1, 1 / 3]) * info.max, rtol=1 / 16, atol=0)
    assert loaded[3] == 0


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", WIDE_FLOATS)
def test_zeros_are_zeros_again(dtype: torch.dtype, name: str) -> None:
    kv, content = one_group(torch.zeros(5, dtype=dtype), name)
    assert (there_and_back(kv) == LEAST_SCALE).all()
    assert not content.any()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", WIDE_FLOATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_group_with_a_number_that_is_not_finite_is_nan_and_no_other(
    value: float, dtype: torch.dtype, name: str
) -> None:
    numbers = torch.linspace(-2, 2, 6, dtype=dtype)
    kv, content = one_group(numbers, name)
    content[0, 4, 1] = content[1, 4, 1] = value
    there_and_back(kv)
    is_lost = torch.zeros(2, 6, 6, dtype=torch.bool)
    is_lost[0, :, 1] = True
    is_lost[1, 4] = True
    assert content.isnan().equal(is_lost)
    torch.testing.assert_close(content[0, :, 0], numbers, rtol=1 / 16, atol=2 / 127)


@pytest.mark.parametrize("name", QUANTISED)
def test_equal_pages_give_equal_bytes_wherever_they_lie_and_whatever_is_copied_with_them(name: str) -> None:
    engine = Pages(IN_ORDER[0], 1, dtype=torch.bfloat16, device="cpu", pages_per_block=2, quantisation=name)
    (pages,) = engine.tensors
    pages[[0, 8]] = pages[[3, 5]]
    packer = torch_packer(engine.kv)
    alone = packed(packer, engine.kv, [3, 5])
    together = packed(packer, engine.kv, [7, 2, 0, 8, 1, 4]).view(3, -1)
    assert together[1].equal(alone)
    assert not together[0].equal(alone)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_ranks_of_every_degree_make_their_stripes_of_the_same_block(degree: int) -> None:
    model: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "pages_per_block": 2, "num_heads": 8}
    whole = Pages(IN_ORDER[3], 1, num_stripes=4, quantisation="int8", **model)
    block = whole.block(PAGES[:2])
    for rank in range(degree):
        heads = slice(rank * 8 // degree, (rank + 1) * 8 // degree)
        part = Pages(STRIDED[0], 1, heads=heads, num_stripes=4 // degree, quantisation="int8", **model)
        assert part.kv.layout == whole.kv.layout.part(degree)
        stripes = packed(torch_packer(part.kv), part.kv, PAGES[:2])
        assert stripes.numpy().tobytes() == block[whole.kv.layout.bytes_of(rank, degree)]


# ---- which packer


def test_pages_that_are_not_k_and_v_in_wide_floats_are_refused() -> None:
    for axes, dtype in [(MLA, torch.bfloat16), (IN_ORDER[0], torch.float8_e4m3fn)]:
        with pytest.raises(LayoutError, match="cannot be quantised"):
            Pages(axes, 1, dtype=dtype, device="cpu", quantisation="int8")


def test_kernels_that_work_quantise(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantiser_kernels, "TritonQuantiser", interpreted.TritonQuantiser)
    engine = Pages(STRIDED[0], 1, dtype=torch.bfloat16, device="cpu", quantisation="fp8")
    before = engine.content()
    assert isinstance(packer_for(engine.kv), interpreted.TritonQuantiser)
    assert engine.content().equal(before)


class Flipping(TorchQuantiser):
    def pack(self, pages: Tensor, staged: Tensor, layers: range) -> None:
        super().pack(pages, staged, layers)
        staged[-1] ^= 1


class Idle(TorchQuantiser):
    def unpack(self, staged: Tensor, staged_layers: range, pages: Tensor, layers: range) -> None:
        pass


@pytest.mark.parametrize("wrong", [Flipping, Idle])
def test_kernels_that_quantise_to_other_bytes_are_not_used(
    wrong: type[TorchQuantiser], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quantiser_kernels, "TritonQuantiser", wrong)
    zeros = [torch.zeros(3, 2, 4, 8, dtype=torch.bfloat16) for _ in range(2)]  # as an engine's pages are at first
    kv = PagedKV(zeros, "page plane token dim", quantisation="int8")
    assert type(packer_for(kv)) is TorchQuantiser
    assert "other bytes than torch" in caplog.text
    assert not any(tensor.any() for tensor in zeros)
