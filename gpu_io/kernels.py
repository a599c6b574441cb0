"""Gather and scatter as Triton kernels: one program moves a part of one page in one layer and plane.

Pages are found through tables on the device: of the addresses at which each layer's planes begin, and of page ids. All
addresses are the device's own, never those of host memory, which a kernel may know by another one or by none. Elements
move as integers, in accesses of 128 bits wherever rows and strides are whole multiples of them.
"""

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_io.pages import PagedKV

PROGRAM_BYTES = 4096
"""What one program moves: 256 accesses of 128 bits."""
VECTOR_BYTES = 16

_FOR_ANY: dict[str, Any] = {
    "do_not_specialize": ["page_stride", "first_plane", "first_staged", "num_staged"],
    "do_not_specialize_on_alignment": ["pages"],
}
"""Compiled once for all values: the first copy of each kind would wait for the compiler."""
_WORDS = {1: (torch.uint8, tl.uint8), 2: (torch.int16, tl.int16), 4: (torch.int32, tl.int32)}


@triton.jit(**_FOR_ANY)
def pack_kernel(
    bases, pages, staged, page_stride, first_plane, first_staged, num_staged,
    PAGES: tl.constexpr, PIECE: tl.constexpr, ROW: tl.constexpr, HEADS: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr, PROGRAM: tl.constexpr,
):  # fmt: skip
    """Gather: ``staged`` has ``num_staged`` planes of each block, the program's first is number ``first_staged``."""
    word = tl.program_id(2) * PROGRAM + tl.arange(0, PROGRAM)
    from_page = _in_page(
        bases, pages, page_stride, first_plane, word, ROW, HEADS, TOKEN_STRIDE, HEAD_STRIDE, WORD, VECTOR
    )
    to_block = staged + _piece(first_staged, num_staged, PAGES) * PIECE + word
    tl.store(to_block, tl.load(from_page, mask=word < PIECE), mask=word < PIECE)


@triton.jit(**_FOR_ANY)
def unpack_kernel(
    bases, pages, staged, page_stride, first_plane, first_staged, num_staged,
    PAGES: tl.constexpr, PIECE: tl.constexpr, ROW: tl.constexpr, HEADS: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr, PROGRAM: tl.constexpr,
):  # fmt: skip
    """Scatter: the mirror image."""
    word = tl.program_id(2) * PROGRAM + tl.arange(0, PROGRAM)
    to_page = _in_page(
        bases, pages, page_stride, first_plane, word, ROW, HEADS, TOKEN_STRIDE, HEAD_STRIDE, WORD, VECTOR
    )
    from_block = staged + _piece(first_staged, num_staged, PAGES) * PIECE + word
    tl.store(to_page, tl.load(from_block, mask=word < PIECE), mask=word < PIECE)


@triton.jit
def _in_page(
    bases, pages, page_stride, first_plane, word,
    ROW: tl.constexpr, HEADS: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    WORD: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Where words of the program's piece are in its page."""
    page = tl.load(pages + tl.program_id(0))
    base = tl.load(bases + first_plane + tl.program_id(1)).to(tl.pointer_type(WORD))
    base = tl.multiple_of(base, VECTOR * (WORD.primitive_bitwidth // 8)) + page * page_stride * VECTOR
    row = word // ROW
    return base + (row // HEADS) * TOKEN_STRIDE + (row % HEADS) * HEAD_STRIDE + word % ROW


@triton.jit
def _piece(first_staged, num_staged, PAGES: tl.constexpr):
    """The program's piece among those that are staged, ``[block][plane][page of the block]``."""
    number = tl.program_id(0)
    block = (number // PAGES).to(tl.int64)
    return (block * num_staged + first_staged + tl.program_id(1)) * PAGES + number % PAGES


class TritonPacker:
    """Gathers and scatters the pages of one ``PagedKV``."""

    def __init__(self, kv: PagedKV) -> None:
        """Compile both kernels for the device. Raises what triton raises where it cannot."""
        first = kv.layers[0]
        strides = [stride * first.itemsize for stride in first.stride()]
        page_bytes, _, token_bytes, head_bytes, _ = strides
        row_bytes, num_heads = first.shape[4] * first.itemsize, first.shape[3]
        if kv.is_in_order:
            row_bytes, num_heads, token_bytes, head_bytes = kv.piece_bytes, 1, 0, 0
        starts = [layer[:, plane].data_ptr() for layer in kv.layers for plane in range(kv.num_planes)]
        self.align_bytes = align_bytes = gcd(VECTOR_BYTES, page_bytes, token_bytes, head_bytes, row_bytes, *starts)
        word_bytes = min(align_bytes, 4)
        self._word, word = _WORDS[word_bytes]
        self._num_planes = kv.num_planes
        self._bases = torch.tensor(starts, dtype=torch.int64, device=kv.device)
        self._page_stride = page_bytes // align_bytes
        self._num_parts = triton.cdiv(kv.piece_bytes, PROGRAM_BYTES)
        self.constants: dict[str, Any] = {
            "PAGES": kv.pages_per_block,
            "PIECE": kv.piece_bytes // word_bytes,
            "ROW": row_bytes // word_bytes,
            "HEADS": num_heads,
            "TOKEN_STRIDE": token_bytes // word_bytes,
            "HEAD_STRIDE": head_bytes // word_bytes,
            "WORD": word,
            "VECTOR": align_bytes // word_bytes,
            "PROGRAM": PROGRAM_BYTES // word_bytes,
        }

    def pack(self, pages: Tensor, staged: Tensor, layers: range) -> None:
        """Gather ``layers`` of ``pages`` into ``staged``."""
        self._launch(pack_kernel, pages, staged, layers, layers)

    def unpack(self, staged: Tensor, staged_layers: range, pages: Tensor, layers: range) -> None:
        """Scatter ``layers`` of ``staged``, which has those in ``staged_layers``, to ``pages``."""
        self._launch(unpack_kernel, pages, staged, staged_layers, layers)

    def _launch(self, kernel: Any, pages: Tensor, staged: Tensor, staged_layers: range, layers: range) -> None:
        num_planes = self._num_planes
        kernel[(len(pages), len(layers) * num_planes, self._num_parts)](
            self._bases,
            pages,
            staged.view(self._word),
            self._page_stride,
            layers.start * num_planes,
            (layers.start - staged_layers.start) * num_planes,
            len(staged_layers) * num_planes,
            **self.constants,
        )
