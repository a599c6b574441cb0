"""Engine tensors as byte runs: where the bytes of a page lie, and where they belong in their block.

An engine's KV tensors are described by the names of their axes, outermost first:

    "plane page token head dim"         one tensor per layer, K of all pages before V
    "page plane token head dim"         one tensor per layer, K and V of a page together
    "page plane head token dim"         the same, heads outside tokens (HND)
    "page token dim"                    MLA: one plane of latents, one head
    "page layer plane token head dim"   one tensor for all layers

Strides are the tensors' own, so views are as good as tensors. Whatever the engine's order, a block's bytes are those of
``kvstore.layout.Layout``: ``[stripe][layer][plane][token][head][dim]``, where page j of a block of k pages has the
tokens from ``j * tokens_per_page`` on. Of an engine with several ranks each has pages of its own heads, which are the
stripes of its ``Layout.part``.

Wherever a copy counts *layers*, it means those of every stripe as they lie in a block: all of the first stripe, then
all of the next. With one stripe they are the model's.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, strided

from gpu_io.ranges import Ranges, ranges_of
from kvstore.errors import LayoutError
from kvstore.layout import Layout

Run = tuple[int, int, int]
"""Address in the pages, address in the slots, bytes: what one copy can move in either direction."""

_ORDER = ("page", "layer", "plane", "token", "head", "dim")
_REQUIRED = {"page", "token", "dim"}


class PagedKV:
    """The pages of one engine, ``num_pages`` of them; a block is ``pages_per_block`` of them.

    ``layers`` are views of the engine's tensors, ``[pages, planes, tokens, heads of a stripe, dim]`` each, in any
    strides: the layers of each stripe, one stripe after the other.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        axes: str,
        *,
        pages_per_block: int = 1,
        num_stripes: int = 1,
        quantisation: str = "",
    ) -> None:
        """``num_stripes`` is that of the part of a block that these pages hold; ``quantisation`` is in ``QUANTISED``.

        Raises ``LayoutError`` for tensors whose bytes cannot be told from ``axes`` or do not lie in place, and as
        ``Layout.quantised`` does.
        """
        names = axes.split()
        _require_axes(names, axes)
        _require_tensors(tensors, names, axes)
        if pages_per_block < 1:
            raise LayoutError(f"a block of {pages_per_block} pages is none; pages_per_block must be at least 1")
        whole = _layers(tensors, names)
        self.device = whole[0].device
        self.num_pages, self.num_planes, self.tokens_per_page, num_heads, dim = whole[0].shape
        self.pages_per_block = pages_per_block
        plain = Layout(
            dtype=str(whole[0].dtype).removeprefix("torch."),
            num_layers=len(whole),
            num_heads=num_heads,
            plane_dims=(dim,) * self.num_planes,
            tokens_per_block=self.tokens_per_page * pages_per_block,
            num_stripes=num_stripes,
        )
        self.quantisation = quantisation
        self.layout = plain.quantised(quantisation) if quantisation else plain
        """Of blocks as they are stored."""
        heads = num_heads // num_stripes
        self.layers = tuple(layer.narrow(3, stripe * heads, heads) for stripe in range(num_stripes) for layer in whole)
        first = self.layers[0]
        self.piece_bytes = self.tokens_per_page * heads * dim * first.itemsize
        """Bytes of a page in one layer and plane."""
        self._page_stride_bytes = first.stride(0) * first.itemsize
        self.is_in_order = _is_in_order(first) and not quantisation
        """Whether the bytes of a page in one layer and plane are one run of a block, as they are."""
        self._addresses = np.array(
            [
                layer.data_ptr() + plane * layer.stride(1) * layer.itemsize
                for layer in self.layers
                for plane in range(self.num_planes)
            ],
            dtype=np.int64,
        )
        self._storages = {layer.untyped_storage().data_ptr(): layer.untyped_storage() for layer in self.layers}
        self.is_one_run = self.is_in_order and len(self._pieces(range(len(self.layers)))[0]) == 1
        """Whether all bytes of a page are one run, layer after layer."""

    def runs(self, pages: Sequence[int], slots: Sequence[int], layers: range | None = None) -> list[Run]:
        """As few runs as cover ``layers`` (all, by default) of the blocks in ``pages``, in the order of ``slots``.

        ``pages`` are ids, ``pages_per_block`` for each of ``slots``, which are addresses of the blocks' first bytes.
        Pieces are joined where they are adjacent on both sides. Only for pages that are ``is_in_order``.
        """
        if not self.is_in_order:
            raise LayoutError("the bytes of these pages are not in a block's order, so that they have no runs; a bug")
        addresses, offsets, piece_bytes = self._pieces(layers or range(len(self.layers)))
        # [block, piece, page of the block] is the order of the slots' bytes.
        page_starts = np.asarray(pages, dtype=np.int64).reshape(-1, 1, self.pages_per_block) * self._page_stride_bytes
        steps = np.arange(self.pages_per_block, dtype=np.int64) * piece_bytes
        sources = (addresses[:, None] + page_starts).ravel()
        targets = (np.asarray(slots, dtype=np.int64)[:, None, None] + offsets[:, None] + steps).ravel()
        return _joined(sources, targets, piece_bytes)

    @property
    def run_bytes(self) -> int:
        """The least that one of ``runs`` moves, over all layers; 0 for pages that have none."""
        return self._pieces(range(len(self.layers)))[2] if self.is_in_order else 0

    def bytes_at(self, address: int, num_bytes: int) -> Tensor:
        """Bytes of the pages as a flat uint8 tensor: the part of a run that is on the device."""
        start = max(start for start in self._storages if start <= address)
        flat = torch.empty(0, dtype=torch.uint8, device=self.device)
        return flat.set_(self._storages[start], address - start, (num_bytes,), (1,))

    def ranges(self, pages: Sequence[int], layers: range) -> list[Ranges]:
        """The bytes of ``pages`` in ``layers``, in any arrangement."""
        return [ranges_of(self.layers[layer], {0: pages}) for layer in layers]

    def require_fit(self, pages: Sequence[int], slots: Sequence[memoryview]) -> None:
        """Raises ``LayoutError`` unless ``pages`` exist and are as many as ``slots``, a block each, have room for."""
        if len(pages) != len(slots) * self.pages_per_block:
            raise LayoutError(
                f"{len(pages)} pages do not fill {len(slots)} slots; a block is {self.pages_per_block} pages"
            )
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise LayoutError(f"page {page} does not exist; the engine has {self.num_pages}")
        for slot in slots:
            if slot.nbytes != self.layout.block_bytes or not slot.c_contiguous:
                raise LayoutError(f"a slot is {slot.nbytes} bytes; a block is {self.layout.block_bytes}, contiguous")

    def require_room(self, pages: Sequence[int], slots: Sequence[memoryview]) -> None:
        """``require_fit``, and that slots can be written to."""
        self.require_fit(pages, slots)
        if any(slot.readonly for slot in slots):
            raise LayoutError("a slot to offload into is read-only; reserve slots to write to")

    def _pieces(self, layers: range) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Of page 0: addresses of the pieces in ``layers``, their offsets in a block, and the size of each."""
        wanted = slice(layers.start * self.num_planes, layers.stop * self.num_planes)
        addresses = self._addresses[wanted]
        offsets = np.arange(wanted.start, wanted.stop, dtype=np.int64) * (self.piece_bytes * self.pages_per_block)
        if self.pages_per_block == 1 and (np.diff(addresses) == self.piece_bytes).all():
            return addresses[:1], offsets[:1], len(addresses) * self.piece_bytes
        return addresses, offsets, self.piece_bytes


def _joined(sources: NDArray[np.int64], targets: NDArray[np.int64], piece_bytes: int) -> list[Run]:
    """Pieces of equal size as runs, joined with their successor where that is adjacent on both sides."""
    if not len(sources):
        return []
    breaks = (np.diff(sources) != piece_bytes) | (np.diff(targets) != piece_bytes)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    sizes = np.diff(starts, append=len(sources)) * piece_bytes
    return list(zip(sources[starts].tolist(), targets[starts].tolist(), sizes.tolist(), strict=True))


def _layers(tensors: Sequence[Tensor], names: list[str]) -> tuple[Tensor, ...]:
    """Each layer as a view ``[pages, planes, tokens, heads, dim]``."""
    ordered = []
    for tensor in tensors:
        view = tensor.detach()
        present = list(names)
        for name in _ORDER:
            if name not in present:
                view = view.unsqueeze(-1)
                present.append(name)
        ordered.append(view.permute([present.index(name) for name in _ORDER]))
    return tuple(layer for view in ordered for layer in view.unbind(1))


def _is_in_order(layer: Tensor) -> bool:
    expected = 1
    for axis in (4, 3, 2):
        if layer.shape[axis] > 1 and layer.stride(axis) != expected:
            return False
        expected *= layer.shape[axis]
    return True


def _require_axes(names: list[str], axes: str) -> None:
    unknown = [name for name in names if name not in _ORDER]
    if unknown or len(set(names)) != len(names) or not set(names) >= _REQUIRED:
        raise LayoutError(
            f"axes {axes!r} cannot be used: name each of {', '.join(_ORDER)} at most once,"
            " and page, token and dim in any case"
        )


def _require_tensors(tensors: Sequence[Tensor], names: list[str], axes: str) -> None:
    if not tensors or ("layer" in names and len(tensors) != 1):
        raise LayoutError(f"{len(tensors)} tensors with axes {axes!r}: give one tensor per layer, or one with all")
    first = tensors[0]
    if first.layout is not strided or first.dim() != len(names) or 0 in first.shape:
        raise LayoutError(f"a tensor {tuple(first.shape)} of {first.layout} does not have the axes {axes!r}")
    for number, tensor in enumerate(tensors):
        if (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != (
            first.shape, first.stride(), first.dtype, first.device,
        ):  # fmt: skip
            raise LayoutError(f"layer {number} differs from layer 0 in shape, strides, dtype or device: group them")
    if first.stride(names.index("dim")) != 1:
        raise LayoutError(f"the elements of dim are {first.stride(names.index('dim'))} apart; they must be adjacent")
    if _overlaps(first) or len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        raise LayoutError("pages share bytes with each other (an expanded tensor, or one given for two layers)")


def _overlaps(tensor: Tensor) -> bool:
    """Whether two indices may mean the same element: a stride is less than what lies inside it."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False
