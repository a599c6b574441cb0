"""The quantiser as Triton kernels: one program moves some groups of one block in one layer and plane.

The bytes are those of ``quantiser.TorchQuantiser``, on every chip: codes of fp8 are made and read with integers, since
not every chip that Triton knows has e4m3, and quotients are divided as IEEE 754 says. Pages are found as in
``kernels``.
"""

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_io.kernels import VECTOR_BYTES
from gpu_io.pages import PagedKV
from gpu_io.quantiser import FORMATS, LEAST_SCALE, NAN_BITS

PROGRAM_ELEMENTS = 4096
"""Of one program: 32 for each thread. A single group may be more."""

_FOR_ANY: dict[str, Any] = {
    "do_not_specialize": ["page_stride", "first_layer", "first_staged", "num_staged"],
    "do_not_specialize_on_alignment": ["pages"],
}
"""Compiled once for all values: the first copy of each kind would wait for the compiler."""
_ELEMENTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_INFINITY = tl.constexpr(0x7F800000)
"""The bits of a float32; the magnitude of a NaN has more."""
_NAN = tl.constexpr(NAN_BITS)


@triton.jit(**_FOR_ANY)
def quantise_kernel(
    bases, pages, staged, page_stride, first_layer, first_staged, num_staged,
    PLANE: tl.constexpr, PAGES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, ELEMENT: tl.constexpr, VECTOR: tl.constexpr,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, IS_FP8: tl.constexpr, RECIPROCAL: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Gather: ``staged`` has ``num_staged`` layers of each block, the program's first is number ``first_staged``."""
    group, token, head, dim, is_there = _place(PLANE, PAGES * TOKENS, HEADS, DIM, GROUPS, MEMBERS)
    from_page = _in_page(
        bases, pages, page_stride, first_layer, token, head, dim,
        PLANE, PAGES, TOKENS, TOKEN_STRIDE, HEAD_STRIDE, ELEMENT, VECTOR,
    )  # fmt: skip
    codes, scales = _in_block(staged, first_staged, num_staged, PLANE, PAGES * TOKENS, HEADS, DIM)
    element = tl.load(from_page, mask=is_there, other=0.0).to(tl.float32)
    # As integers magnitudes have the same order, and a NaN is the largest: a maximum of floats may pass over it.
    largest = tl.reduce(element.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, _larger, keep_dims=True)
    is_finite = largest < _INFINITY
    least = tl.where(is_finite, largest, 0).to(tl.float32, bitcast=True) * RECIPROCAL
    scale = _bfloat16(tl.maximum(least, LEAST))
    quotient = tl.div_rn(tl.where(is_finite, element, 0.0), (scale << 16).to(tl.float32, bitcast=True))
    code = _fp8(quotient) if IS_FP8 else _int8(quotient)
    num_groups: tl.constexpr = HEADS * DIM if PLANE == 0 else PAGES * TOKENS * HEADS
    tl.store(codes + (token * HEADS + head) * DIM + dim, code.to(tl.uint8), mask=is_there)
    tl.store(scales + group, tl.where(is_finite, scale, _NAN).to(tl.int16), mask=group < num_groups)


@triton.jit(**_FOR_ANY)
def dequantise_kernel(
    bases, pages, staged, page_stride, first_layer, first_staged, num_staged,
    PLANE: tl.constexpr, PAGES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, ELEMENT: tl.constexpr, VECTOR: tl.constexpr,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, IS_FP8: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Scatter: the mirror image."""
    group, token, head, dim, is_there = _place(PLANE, PAGES * TOKENS, HEADS, DIM, GROUPS, MEMBERS)
    to_page = _in_page(
        bases, pages, page_stride, first_layer, token, head, dim,
        PLANE, PAGES, TOKENS, TOKEN_STRIDE, HEAD_STRIDE, ELEMENT, VECTOR,
    )  # fmt: skip
    codes, scales = _in_block(staged, first_staged, num_staged, PLANE, PAGES * TOKENS, HEADS, DIM)
    code = tl.load(codes + (token * HEADS + head) * DIM + dim, mask=is_there, other=0)
    number = _of_fp8(code.to(tl.int32)) if IS_FP8 else code.to(tl.int8, bitcast=True).to(tl.float32)
    num_groups: tl.constexpr = HEADS * DIM if PLANE == 0 else PAGES * TOKENS * HEADS
    scale = tl.load(scales + group, mask=group < num_groups, other=0).to(tl.int32) << 16
    element = number * scale.to(tl.float32, bitcast=True)
    element = tl.where(element > LARGEST, LARGEST, tl.where(element < -LARGEST, -LARGEST, element))  # a NaN stays one
    if ELEMENT.is_bf16():
        tl.store(to_page, _bfloat16(element).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=is_there)
    else:
        tl.store(to_page, element.to(ELEMENT), mask=is_there)


@triton.jit
def _place(
    PLANE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """The program's groups, ``[group, 1]``; of each element its token, head and dim; and whether there is one."""
    group = tl.program_id(2) * GROUPS + tl.arange(0, GROUPS)[:, None]
    member = tl.arange(0, MEMBERS)[None, :]
    if PLANE == 0:
        token, head, dim = member, group // DIM, group % DIM
    else:
        token, head, dim = group // HEADS, group % HEADS, member
    return group, token, head, dim, (token < TOKENS) & (head < HEADS) & (dim < DIM)


@triton.jit
def _in_page(
    bases, pages, page_stride, first_layer, token, head, dim,
    PLANE: tl.constexpr, PAGES: tl.constexpr, TOKENS: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, ELEMENT: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Where elements of the program's block are in its pages."""
    number = tl.minimum(token // TOKENS, PAGES - 1)
    page = tl.load(pages + tl.program_id(0) * PAGES + number)
    base = tl.load(bases + (first_layer + tl.program_id(1)) * 2 + PLANE).to(tl.pointer_type(ELEMENT))
    base = tl.multiple_of(base, VECTOR * (ELEMENT.primitive_bitwidth // 8)) + page * page_stride * VECTOR
    return base + (token % TOKENS) * TOKEN_STRIDE + head * HEAD_STRIDE + dim


@triton.jit
def _in_block(
    staged, first_staged, num_staged, PLANE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr
):
    """Where the program's codes and scales begin."""
    num_codes: tl.constexpr = TOKENS * HEADS * DIM
    num_scales: tl.constexpr = HEADS * (DIM + TOKENS)
    layer = tl.program_id(0).to(tl.int64) * num_staged + first_staged + tl.program_id(1)
    codes = staged + layer * (2 * num_codes + 2 * num_scales)
    scales = (codes + 2 * num_codes).to(tl.pointer_type(tl.int16)) + PLANE * HEADS * DIM
    return codes + PLANE * num_codes, scales


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def _bfloat16(number):
    """The bits of a float32 rounded to the nearest, ties to even; triton's interpreter cuts them off."""
    bits = number.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > _INFINITY, _NAN, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@triton.jit
def _int8(number):
    """To the nearest, ties to even: at this distance from 0 the numbers of a float32 are the integers."""
    return ((number + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def _fp8(number):
    """The code of e4m3fn: a sign, four bits of exponent with a bias of 7, three of mantissa. Numbers are up to 448."""
    bits = number.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes are a 2**-9 apart, as the numbers of a float32 are from 2**14 on.
    low = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0x3C800000, low, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _of_fp8(code):
    """The number of a code of e4m3fn."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    signed = number.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)  # in triton the negative of 0 is 0
    return signed.to(tl.float32, bitcast=True)


class TritonQuantiser:
    """Quantises the pages of one ``PagedKV``."""

    def __init__(self, kv: PagedKV) -> None:
        """Raises what triton raises where it cannot compile the kernels, when they are first used."""
        first = kv.layers[0]
        page_stride, _, token_stride, head_stride, _ = first.stride()
        _, _, page_tokens, heads, dim = first.shape
        tokens = kv.layout.tokens_per_block
        starts = [layer[:, plane].data_ptr() for layer in kv.layers for plane in range(2)]
        vector = gcd(VECTOR_BYTES, *starts, page_stride * first.itemsize) // first.itemsize
        self._pages_per_block = kv.pages_per_block
        self._bases = torch.tensor(starts, dtype=torch.int64, device=kv.device)
        self._page_stride = page_stride // vector
        shared: dict[str, Any] = {
            "PAGES": kv.pages_per_block,
            "TOKENS": page_tokens,
            "HEADS": heads,
            "DIM": dim,
            "TOKEN_STRIDE": token_stride,
            "HEAD_STRIDE": head_stride,
            "ELEMENT": _ELEMENTS[first.dtype],
            "VECTOR": vector,
            "IS_FP8": kv.quantisation == "fp8",
        }
        groups = (heads * dim, tokens * heads)
        tiles = [_tile(*counts) for counts in zip(groups, (tokens, dim), strict=True)]
        planes = [{"PLANE": plane, **tile, **shared} for plane, tile in enumerate(tiles)]
        limits = {"RECIPROCAL": 1 / FORMATS[kv.quantisation].limit, "LEAST": LEAST_SCALE}
        self.packing = [constants | limits for constants in planes]
        """Constants of the kernel for K, and for V."""
        self.unpacking = [constants | {"LARGEST": torch.finfo(first.dtype).max} for constants in planes]
        self._num_parts = [triton.cdiv(count, tile["GROUPS"]) for count, tile in zip(groups, tiles, strict=True)]

    def pack(self, pages: Tensor, staged: Tensor, layers: range) -> None:
        """Gather ``layers`` of ``pages`` into ``staged``."""
        self._launch(quantise_kernel, self.packing, pages, staged, layers, layers)

    def unpack(self, staged: Tensor, staged_layers: range, pages: Tensor, layers: range) -> None:
        """Scatter ``layers`` of ``staged``, which has those in ``staged_layers``, to ``pages``."""
        self._launch(dequantise_kernel, self.unpacking, pages, staged, staged_layers, layers)

    def _launch(
        self,
        kernel: Any,
        planes: list[dict[str, Any]],
        pages: Tensor,
        staged: Tensor,
        staged_layers: range,
        layers: range,
    ) -> None:
        num_blocks = len(pages) // self._pages_per_block
        for constants, num_parts in zip(planes, self._num_parts, strict=True):
            kernel[(num_blocks, len(layers), num_parts)](
                self._bases,
                pages,
                staged,
                self._page_stride,
                layers.start,
                layers.start - staged_layers.start,
                len(staged_layers),
                **constants,
            )


def _tile(num_groups: int, num_members: int) -> dict[str, int]:
    """How many groups a program has, and room for how many members of each; powers of two, as Triton wants them."""
    members = triton.next_power_of_2(num_members)
    groups = min(triton.next_power_of_2(num_groups), max(1, PROGRAM_ELEMENTS // members))
    return {"GROUPS": groups, "MEMBERS": members}
