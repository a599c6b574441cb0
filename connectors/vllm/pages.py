"""vLLM's KV tensors as pages of bytes, and what those bytes are: the layout of a block of the store.

Every layer is registered as one view ``[pages, heads, tokens, content]`` of whatever lies in memory, and on a CPU the
bytes within a page are packed for its instruction set. So a page is opaque here: its bytes are taken as they lie, and
whatever says how they lie, the parallel degree included, is in the layout's ``engine_format``. A reader whose pages lie
in any other way misses.

A block has a stripe for every rank, one after the other; a stripe is ``[layer][bytes of the page]``. The layers are
those of one group: groups have pages and blocks of their own, though their pages may lie in the same memory.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_io.pages import PagedKV
from kvstore.errors import LayoutError
from kvstore.layout import ITEMSIZE_BYTES, Layout


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What the pages of one rank look like; equal where their bytes mean the same. It travels to the scheduler half."""

    dtype: str
    num_layers: int
    page_bytes: int
    """Of one layer."""
    tokens_per_page: int
    order: str
    """Shape and strides of a page, layer by layer the same, and what packs it."""
    layers: str
    """Digest of the layers' names, in order."""
    window_tokens: int | None = None
    """What a token attends to in these layers, itself among it; None: all."""

    @property
    def stripe_bytes(self) -> int:
        """Bytes of a block that one rank has."""
        return self.num_layers * self.page_bytes

    def layout(self, num_ranks: int, engine: str, quantisation: str) -> Layout:
        """Of a block of all ranks; ``engine`` names the engine and its version."""
        if self.dtype not in ITEMSIZE_BYTES:
            raise LayoutError(f"KV of dtype {self.dtype!r} is not known; use one of {', '.join(ITEMSIZE_BYTES)}")
        token_bytes, left = divmod(self.page_bytes, self.tokens_per_page)
        dim, left_bytes = divmod(token_bytes, ITEMSIZE_BYTES[self.dtype])
        if left or left_bytes:
            raise LayoutError(f"a page of {self.page_bytes} bytes is not whole tokens of {self.dtype}")
        window = "" if self.window_tokens is None else f" window {self.window_tokens}"
        return Layout(
            dtype=self.dtype,
            num_layers=self.num_layers,
            num_heads=num_ranks,
            plane_dims=(dim,),
            tokens_per_block=self.tokens_per_page,
            quantisation=quantisation,
            engine_format=f"{engine} {self.order} layers {self.layers} ranks {num_ranks}{window}",
        )


def paged(
    layers: Mapping[str, Tensor], num_pages: int, tokens_per_page: int, window_tokens: int | None = None
) -> tuple[PagedKV, PageFormat]:
    """The pages that vLLM has registered for the layers of a group, and their format.

    Raises ``LayoutError`` for tensors whose pages are not one run of bytes in each layer, or differ between layers.
    """
    tensors = list(layers.values())
    if not tensors:
        raise LayoutError("vLLM has registered no KV tensors; a model without attention has nothing to store")
    views = [_as_runs(tensor, num_pages, tokens_per_page) for tensor in tensors]
    first = tensors[0]
    kv = PagedKV(views, "page token dim")
    form = PageFormat(
        dtype=str(first.dtype).removeprefix("torch."),
        num_layers=len(tensors),
        page_bytes=views[0][0].numel() * first.itemsize,
        tokens_per_page=tokens_per_page,
        order=f"{first.device.type}{_packing(first)} {tuple(first.shape[1:])} {first.stride()[1:]}",
        layers=hashlib.sha256("\n".join(layers).encode()).hexdigest()[:16],
        window_tokens=window_tokens,
    )
    return kv, form


def stripe(slots: Sequence[memoryview], stripe_bytes: int, rank: int) -> list[memoryview]:
    """The part of each block that is ``rank``'s."""
    return [slot[rank * stripe_bytes : (rank + 1) * stripe_bytes] for slot in slots]


def _as_runs(tensor: Tensor, num_pages: int, tokens_per_page: int) -> Tensor:
    """``[pages, tokens, bytes' worth of elements]`` over the same memory, whatever order lies inside a page."""
    kernel_pages, left = divmod(tensor.shape[0], num_pages)
    per_page = tensor[0].numel() * kernel_pages
    if left or per_page % tokens_per_page or not _is_dense(tensor):
        raise LayoutError(
            f"a KV tensor {tuple(tensor.shape)} with strides {tensor.stride()} has no page that is one run of bytes;"
            " this KV cache layout cannot be stored"
        )
    if kernel_pages > 1 and tensor.stride(0) != tensor[0].numel():
        raise LayoutError(f"{kernel_pages} kernel blocks make a page, and they do not follow one another")
    return torch.as_strided(
        tensor,
        (num_pages, tokens_per_page, per_page // tokens_per_page),
        (tensor.stride(0) * kernel_pages, per_page // tokens_per_page, 1),
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements of one page fill a run."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _packing(tensor: Tensor) -> str:
    """What decides how a CPU packs its pages."""
    if tensor.device.type != "cpu":
        return ""
    return f"-{torch.backends.cpu.get_cpu_capability()}" + ("-amx" if torch.cpu._is_amx_tile_supported() else "")
