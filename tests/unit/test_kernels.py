"""The kernels: exact in triton's interpreter, in all arrangements; compiled for real chips, in accesses of 128 bits."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu_io import kernels, packing
from gpu_io.packing import TorchPacker, packer_for
from gpu_io.pages import PagedKV
from gpu_io.testing import BY_STRIPE, DTYPES, IN_ORDER, MLA, NUM_LAYERS, STRIDED, Pages

TARGETS = [
    GPUTarget("cuda", 80, 32),
    GPUTarget("cuda", 90, 32),
    GPUTarget("hip", "gfx90a", 64),
    GPUTarget("hip", "gfx942", 64),
    GPUTarget("hip", "gfx1100", 32),
]
ALL_LAYERS = range(NUM_LAYERS)


@contextmanager
def interpreting(of: ModuleType) -> Iterator[ModuleType]:
    """A module of kernels as it is where TRITON_INTERPRET is set; one launch at a time, it is not thread-safe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec = importlib.util.spec_from_file_location("interpreted_kernels", of.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def interpreted() -> Iterator[ModuleType]:
    with interpreting(kernels) as module:
        yield module


def staged_bytes(engine: Pages, num_pages: int, layers: range) -> torch.Tensor:
    num_bytes = engine.kv.layout.block_bytes * num_pages // engine.kv.pages_per_block
    return torch.full((num_bytes * len(layers) // len(engine.kv.layers),), 0xAA, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("axes", "num_stripes"),
    [*((axes, 1) for axes in (*IN_ORDER, *STRIDED, MLA)), (IN_ORDER[0], 2), (STRIDED[0], 2), (BY_STRIPE, 2)],
)
def test_kernels_move_what_torch_moves(
    interpreted: ModuleType, axes: str, num_stripes: int, dtype: torch.dtype
) -> None:
    ours, theirs = (
        Pages(axes, 1, dtype=dtype, device="cpu", pages_per_block=2, num_stripes=num_stripes) for _ in range(2)
    )
    packer, expected = interpreted.TritonPacker(ours.kv), TorchPacker(theirs.kv)
    pages = torch.tensor([7, 2, 3, 5])
    staged = range(1, len(ours.kv.layers))
    packed, proven = staged_bytes(ours, 4, staged), staged_bytes(theirs, 4, staged)
    packer.pack(pages, packed, staged)
    expected.pack(pages, proven, staged)
    assert packed.equal(proven)
    packer.unpack(packed.flip(0), staged, pages, range(2, 3))
    expected.unpack(packed.flip(0), staged, pages, range(2, 3))
    assert ours.content().view(torch.uint8).equal(theirs.content().view(torch.uint8))


def test_a_piece_larger_than_a_program_is_moved_whole(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreted, "PROGRAM_BYTES", 32)
    engine = Pages(STRIDED[0], 1, dtype=torch.bfloat16, device="cpu")
    packed, proven = staged_bytes(engine, 2, ALL_LAYERS), staged_bytes(engine, 2, ALL_LAYERS)
    pages = torch.tensor([4, 1])
    interpreted.TritonPacker(engine.kv).pack(pages, packed, ALL_LAYERS)
    TorchPacker(engine.kv).pack(pages, proven, ALL_LAYERS)
    assert packed.equal(proven)


@pytest.mark.parametrize(("tokens", "dim", "align_bytes"), [(4, 8, 16), (3, 8, 8), (3, 6, 2), (3, 5, 1), (4, 16, 16)])
def test_rows_that_are_no_whole_accesses_are_moved_in_smaller_ones(
    interpreted: ModuleType, tokens: int, dim: int, align_bytes: int
) -> None:
    content = torch.randint(0, 256, (5, tokens, dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    kv = PagedKV([content], "page token dim")
    packer = interpreted.TritonPacker(kv)
    assert align_bytes % packer.align_bytes == 0
    packed, pages = torch.zeros(2 * tokens * dim, dtype=torch.uint8), torch.tensor([4, 1])
    packer.pack(pages, packed, range(1))
    assert packed.equal(content[[4, 1]].flatten())
    packer.unpack(packed, range(1), torch.tensor([0, 3]), range(1))
    assert content[[0, 3]].equal(content[[4, 1]])


# ---- compiled

SIZES = {"page": 4, "layer": 2, "plane": 2, "token": 16, "head": 8, "dim": 128}
ODD = [
    ("page plane head token dim", {"head": 5, "dim": 80}, torch.float16),
    ("page plane token head dim", {"head": 1}, torch.bfloat16),
    ("page token dim", {"dim": 576}, torch.bfloat16),
]
"""Heads of 80, one rank of eight, and the latents of a model with MLA."""


def compiled_for(axes: str, sizes: dict[str, int], dtype: torch.dtype) -> PagedKV:
    """Pages of two layers of a model of a size that people run; nothing is ever in them."""
    names = axes.split()
    shape = [(SIZES | sizes)[name] for name in names]
    num_tensors = 1 if "layer" in names else SIZES["layer"]
    return PagedKV([torch.zeros(shape, dtype=dtype) for _ in range(num_tensors)], axes, pages_per_block=2)


@cache
def to_compile() -> dict[str, PagedKV]:
    """One arrangement of each kind that is compiled to something else; every layout and dtype is one of them."""
    every: list[tuple[str, dict[str, int], torch.dtype]] = [
        (axes, {}, dtype) for axes in (*IN_ORDER, *STRIDED, MLA) for dtype in DTYPES
    ]
    kinds: dict[str, PagedKV] = {}
    for axes, sizes, dtype in (*every, *ODD):
        kv = compiled_for(axes, sizes, dtype)
        kinds.setdefault(str(kernels.TritonPacker(kv).constants), kv)
    return kinds


def assembly(kernel: Any, constants: dict[str, Any], staged: str, target: GPUTarget) -> str:
    """What is compiled of ``kernel``, with what a launch knows of its arguments; ``staged`` is their type."""
    pointers = {"bases": "*i64", "pages": "*i64", "staged": staged}
    numbers = dict.fromkeys([name for name in kernel.arg_names if name.islower() and name not in pointers], "i32")
    signature = pointers | numbers | dict.fromkeys(constants, "constexpr")
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(pointers) if name != "pages"}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=target, options={"num_warps": 4})
    text: str = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    return text


ACCESS = re.compile(r"\b((?:ld|st)\.global\S*|(?:global|buffer|flat)_(?:load|store)_\S+)")
WIDE = re.compile(r"\.v4\.b32|\.v2\.b64|dwordx4|b128")
TABLE = re.compile(r"ld\.global\.b64|load_dwordx2|load_b64")
"""How an entry of a table is read: 8 bytes."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.arch))
@pytest.mark.parametrize("kernel", ["pack_kernel", "unpack_kernel"])
def test_kernels_compile_for_every_chip_in_accesses_of_128_bits(
    target: GPUTarget, kernel: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    for name, kv in to_compile().items():
        constants = kernels.TritonPacker(kv).constants
        staged = f"*{constants['WORD'].name.replace('int', 'i')}"
        accesses = ACCESS.findall(assembly(getattr(kernels, kernel), constants, staged, target))
        narrow = [access for access in accesses if not WIDE.search(access) and not TABLE.search(access)]
        wide = [access for access in accesses if WIDE.search(access)]
        assert not narrow, name
        assert any("ld" in access or "load" in access for access in wide), name
        assert any("st" in access for access in wide), name


# ---- which packer


def test_without_a_chip_that_triton_knows_torch_does_it_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = Pages(STRIDED[0], 1, dtype=torch.bfloat16, device="cpu")
    assert isinstance(packer_for(engine.kv), TorchPacker)
    assert "Triton's kernels do not work on cpu" in caplog.text


def test_kernels_that_work_are_used(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TritonPacker", interpreted.TritonPacker)
    engine = Pages(STRIDED[0], 1, dtype=torch.bfloat16, device="cpu")
    before = engine.content()
    assert isinstance(packer_for(engine.kv), interpreted.TritonPacker)
    assert engine.content().equal(before)


class Flipping(TorchPacker):
    def pack(self, pages: torch.Tensor, staged: torch.Tensor, layers: range) -> None:
        super().pack(pages, staged, layers)
        staged[-1] ^= 1


class Idle(TorchPacker):
    def unpack(self, staged: torch.Tensor, staged_layers: range, pages: torch.Tensor, layers: range) -> None:
        pass


@pytest.mark.parametrize("wrong", [Flipping, Idle])
def test_kernels_that_move_other_bytes_are_not_used(
    wrong: type[TorchPacker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "TritonPacker", wrong)
    zeros = [torch.zeros(3, 2, 4, 8, dtype=torch.bfloat16) for _ in range(2)]  # as an engine's pages are at first
    assert type(packer_for(PagedKV(zeros, "page plane token dim"))) is TorchPacker
    assert "other bytes than torch" in caplog.text
    assert not any(tensor.any() for tensor in zeros)


def test_a_machine_without_triton_has_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "gpu_io.kernels", None)
    kv = Pages(STRIDED[0], 1, dtype=torch.bfloat16, device="cpu").kv
    assert type(packing.packer_for(kv)) is TorchPacker
    assert "torch gathers and scatters" in caplog.text
