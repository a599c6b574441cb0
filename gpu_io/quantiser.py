"""A gather that quantises, and a scatter that undoes it: a byte for each element, and scales beside them in the block.

Elements that share a scale are a *group*: of K a channel of a head, over the tokens of the block; of V a token of a
head, over its channels. K has channels that are large in every token, V has not (KIVI, arXiv 2402.02750). No group
reaches beyond its block, so that equal pages give equal bytes, whatever is copied with them.

All arithmetic is float32's, one rounding for each operation, to the nearest and ties to even:

    scale   = bfloat16(largest magnitude * float32(1 / limit)), at least ``LEAST_SCALE``
    code    = float8_e4m3fn or int8 of (element / scale), which the scale keeps within the limit
    element = code * scale, which is exact, rounded to the pages' dtype, and to its largest number where that is less

A group with a NaN or an infinity has NaN for a scale and 0 for codes, and comes back as NaN whole: no number is made up
for it, and whoever reads a block attends to all of it anyway. A group of zeros has the least scale, and is zeros again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gpu_io.pages import PagedKV

LEAST_SCALE = 2.0**-100
"""With less, subnormal elements would count, which some devices take for 0 and others do not."""

NAN_BITS = 0x7FC0
"""The scale of a group that has no number; of all the NaNs of bfloat16 this one, so that bytes are the same."""


class Format(NamedTuple):
    """What codes are."""

    dtype: torch.dtype
    limit: float
    """Of their magnitude."""


FORMATS = {"fp8": Format(torch.float8_e4m3fn, 448.0), "int8": Format(torch.int8, 127.0)}
"""Of every name in ``kvstore.layout.QUANTISED``."""

_GROUPED_OVER = (1, 3)
"""Of K and of V: which axis of ``[block, token, head, dim]`` the elements of a group lie along."""


class TorchQuantiser:
    """Packs with torch's own operations, on every device. Takes some times the memory of one layer of the pages."""

    def __init__(self, kv: PagedKV) -> None:
        self._layers = kv.layers
        self._format = FORMATS[kv.quantisation]
        self._pages_per_block = kv.pages_per_block
        self._layer_bytes = kv.layout.block_bytes // len(kv.layers)
        heads, dim = kv.layers[0].shape[3:]
        self._shape = (kv.layout.tokens_per_block, heads, dim)

    def pack(self, pages: Tensor, staged: Tensor, layers: range) -> None:
        """Gather, a layer at a time."""
        pieces = staged.view(-1, len(layers), self._layer_bytes)
        for at, layer in enumerate(layers):
            gathered = self._layers[layer].index_select(0, pages)
            by_block = gathered.view(-1, self._pages_per_block, *gathered.shape[1:]).transpose(1, 2)
            for plane, (codes, scales) in enumerate(self._stored(pieces[:, at])):
                elements = by_block[:, plane].reshape(-1, *self._shape).float()
                self._quantise(elements, _GROUPED_OVER[plane], codes, scales)

    def unpack(self, staged: Tensor, staged_layers: range, pages: Tensor, layers: range) -> None:
        """Scatter, a layer at a time."""
        pieces = staged.view(-1, len(staged_layers), self._layer_bytes)
        for layer in layers:
            target = self._layers[layer]
            largest = torch.finfo(target.dtype).max
            planes = [
                (codes.float() * scales.float().unsqueeze(_GROUPED_OVER[plane])).clamp_(-largest, largest)
                for plane, (codes, scales) in enumerate(self._stored(pieces[:, layer - staged_layers.start]))
            ]
            elements = torch.stack(planes, dim=1).to(target.dtype)
            by_page = elements.view(-1, 2, self._pages_per_block, *target.shape[2:]).transpose(1, 2)
            target.index_copy_(0, pages, by_page.flatten(0, 1))

    def _quantise(self, elements: Tensor, axis: int, codes: Tensor, scales: Tensor) -> None:
        """Fill ``codes`` and ``scales`` with what ``elements``, ``[block, token, head, dim]``, become."""
        largest = elements.abs().amax(axis)
        scale = (largest * (1 / self._format.limit)).clamp_(min=LEAST_SCALE).to(torch.bfloat16).view(torch.int16)
        scales.view(torch.int16).copy_(torch.where(largest.isfinite(), scale, NAN_BITS))
        quotients = (elements / scales.float().unsqueeze(axis)).nan_to_num_(nan=0.0)
        codes.copy_(quotients.round_() if self._format.dtype is torch.int8 else quotients)

    def _stored(self, piece: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of K and of V: codes ``[block, token, head, dim]`` and scales, without the axis of a group, in one layer."""
        tokens, heads, dim = self._shape
        num_code_bytes = 2 * tokens * heads * dim
        codes = piece[:, :num_code_bytes].view(self._format.dtype).view(-1, 2, *self._shape)
        scales = piece[:, num_code_bytes:].view(torch.bfloat16)
        of_key, of_value = scales[:, : heads * dim], scales[:, heads * dim :]
        return [(codes[:, 0], of_key.view(-1, heads, dim)), (codes[:, 1], of_value.view(-1, tokens, heads))]
