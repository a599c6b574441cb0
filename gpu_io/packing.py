"""Pages to staging memory and back, on the device: bytes that lie scattered become a row of pieces of blocks.

Staged bytes are ``[block][layer]`` and in each the bytes of the layer as they lie in a block, of some of the layers:
with all of them they are blocks as they lie in slots.
"""

import logging
from typing import Protocol

import torch
from torch import Tensor

from gpu_io.pages import PagedKV
from gpu_io.quantiser import TorchQuantiser

_log = logging.getLogger(__name__)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""What to move elements as: not every device indexes every type of float."""


class Packer(Protocol):
    """Moves pages of one ``PagedKV``, in the stream that is current.

    ``pages`` are ids, int64 on the device, of at least one block; ``staged`` is uint8, flat and exactly as large as
    ``pages`` in all layers that are staged.
    """

    def pack(self, pages: Tensor, staged: Tensor, layers: range) -> None:
        """Gather ``layers`` of ``pages`` into ``staged``."""

    def unpack(self, staged: Tensor, staged_layers: range, pages: Tensor, layers: range) -> None:
        """Scatter ``layers`` of ``staged``, which has those in ``staged_layers``, to ``pages``."""


class TorchPacker:
    """With torch's own indexing, which every device has. Takes the memory of one layer of the pages beside it.

    Elements are moved as they are, whatever ``kv`` says of their quantisation.
    """

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


def torch_packer(kv: PagedKV) -> Packer:
    """What moves and quantises the pages of ``kv`` on every device."""
    return TorchQuantiser(kv) if kv.quantisation else TorchPacker(kv)


def packer_for(kv: PagedKV) -> Packer:
    """Triton's kernels where they work on the device of ``kv``, whose pages nobody uses yet; else torch's indexing."""
    proven = torch_packer(kv)
    try:
        packer = _triton_packer(kv)
        _require_same(packer, proven, kv)
    except Exception as error:  # noqa: BLE001 - an edge: a compiler for a device that it does not know raises anything
        _log.warning("Triton's kernels do not work on %s; torch gathers and scatters, slower: %s", kv.device, error)
        return proven
    return packer


def _triton_packer(kv: PagedKV) -> Packer:
    from gpu_io.kernels import TritonPacker  # noqa: PLC0415 - not every machine has triton
    from gpu_io.quantiser_kernels import TritonQuantiser  # noqa: PLC0415 - it needs triton as well

    return TritonQuantiser(kv) if kv.quantisation else TritonPacker(kv)


def _require_same(packer: Packer, proven: Packer, kv: PagedKV) -> None:
    """Raises ``RuntimeError`` unless both make the same of the last pages, and the same pages of what is staged.

    The last ones, because addresses there are the largest. They have their own bytes again in the end.
    """
    plain = TorchPacker(kv)
    pages = torch.arange(kv.num_pages - kv.pages_per_block, kv.num_pages, device=kv.device).flip(0)
    layers = range(len(kv.layers))
    before, *found = torch.zeros(3, _plain_bytes(kv), dtype=torch.uint8, device=kv.device)
    packed, expected = torch.zeros(2, kv.layout.block_bytes, dtype=torch.uint8, device=kv.device)
    plain.pack(pages, before, layers)
    plain.unpack(_chance(kv), layers, pages, layers)
    packer.pack(pages, packed, layers)
    proven.pack(pages, expected, layers)
    for each, content in zip((packer, proven), found, strict=True):
        plain.unpack(before, layers, pages, layers)
        each.unpack(expected, layers, pages, layers)
        plain.pack(pages, content, layers)
    plain.unpack(before, layers, pages, layers)
    if not (packed.equal(expected) and found[0].equal(found[1])):
        raise RuntimeError("they move other bytes than torch does")


def _plain_bytes(kv: PagedKV) -> int:
    """Of a block before it is quantised."""
    return kv.piece_bytes * kv.num_planes * kv.pages_per_block * len(kv.layers)


def _chance(kv: PagedKV) -> Tensor:
    """A block's plain bytes at random; of what is quantised, numbers."""
    chance = torch.Generator().manual_seed(1)
    num_bytes, first = _plain_bytes(kv), kv.layers[0]
    if kv.quantisation:
        sent = torch.randn(num_bytes // first.itemsize, generator=chance).to(first.dtype).view(torch.uint8)
    else:
        sent = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=chance)
    return sent.to(kv.device)
