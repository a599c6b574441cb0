"""Pages to staging memory and back, on the device: bytes that lie scattered become a row of pieces of blocks.

Staged bytes are ``[block][layer][plane][page of the block][token][head][dim]``, of some of the layers: with all of them
they are blocks as they lie in slots.
"""

import logging
from typing import Protocol

import torch
from torch import Tensor

from gpu_io.pages import PagedKV

_log = logging.getLogger(__name__)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""What to move elements as: not every device indexes every type of float."""


class Packer(Protocol):
    """Moves pages of one ``PagedKV``, in the stream that is current.

    ``pages`` are ids, int64 on the device; ``staged`` is uint8, flat and exactly as large as ``pages`` in all layers
    that are staged.
    """

    def pack(self, pages: Tensor, staged: Tensor, layers: range) -> None:
        """Gather ``layers`` of ``pages`` into ``staged``."""

    def unpack(self, staged: Tensor, staged_layers: range, pages: Tensor, layers: range) -> None:
        """Scatter ``layers`` of ``staged``, which has those in ``staged_layers``, to ``pages``."""


class TorchPacker:
    """With torch's own indexing, which every device has. Takes the memory of one layer of the pages beside it."""

    def __init__(self, kv: PagedKV) -> None:
        self._bits = _BITS[kv.layers[0].itemsize]
        self._layers = [layer.view(self._bits) for layer in kv.layers]
        self._pages_per_block = kv.pages_per_block

    def pack(self, pages: Tensor, staged: Tensor, layers: range) -> None:
        """Gather, a layer at a time."""
        pieces = self._pieces(staged, layers)
        for at, layer in enumerate(layers):
            gathered = self._layers[layer].index_select(0, pages)
            by_block = gathered.view(-1, self._pages_per_block, *gathered.shape[1:])
            pieces[:, at].copy_(by_block.transpose(1, 2))

    def unpack(self, staged: Tensor, staged_layers: range, pages: Tensor, layers: range) -> None:
        """Scatter, a layer at a time."""
        pieces = self._pieces(staged, staged_layers)
        for layer in layers:
            piece = pieces[:, layer - staged_layers.start]
            self._layers[layer].index_copy_(0, pages, piece.transpose(1, 2).flatten(0, 1))

    def _pieces(self, staged: Tensor, layers: range) -> Tensor:
        """``[block, layer, plane, page, token, head, dim]``."""
        num_planes, *page_shape = self._layers[0].shape[1:]
        return staged.view(self._bits).view(-1, len(layers), num_planes, self._pages_per_block, *page_shape)


def packer_for(kv: PagedKV) -> Packer:
    """Triton's kernels where they work on the device of ``kv``, whose pages nobody uses yet; else torch's indexing."""
    try:
        from gpu_io.kernels import TritonPacker  # noqa: PLC0415 - not every machine has triton

        packer = TritonPacker(kv)
        _require_same(packer, TorchPacker(kv), kv)
    except Exception as error:  # noqa: BLE001 - an edge: a compiler for a device that it does not know raises anything
        _log.warning("Triton's kernels do not work on %s; torch gathers and scatters, slower: %s", kv.device, error)
        return TorchPacker(kv)
    return packer


def _require_same(packer: Packer, proven: Packer, kv: PagedKV) -> None:
    """Raises ``RuntimeError`` unless both move random bytes alike, out of the last pages and into them.

    The last ones, because addresses there are the largest. They have their own bytes again in the end.
    """
    pages = torch.arange(kv.num_pages - kv.pages_per_block, kv.num_pages, device=kv.device).flip(0)
    layers, num_bytes = range(len(kv.layers)), kv.layout.block_bytes
    chance = torch.Generator().manual_seed(1)
    sent = torch.randint(0, 256, (2, num_bytes), dtype=torch.uint8, generator=chance).to(kv.device)
    before, *received = torch.zeros(3, num_bytes, dtype=torch.uint8, device=kv.device)
    proven.pack(pages, before, layers)
    proven.unpack(sent[0], layers, pages, layers)
    packer.pack(pages, received[0], layers)
    packer.unpack(sent[1], layers, pages, layers)
    proven.pack(pages, received[1], layers)
    proven.unpack(before, layers, pages, layers)
    if not sent.equal(torch.stack(received)):
        raise RuntimeError("they move other bytes than torch does")
