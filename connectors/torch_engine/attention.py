"""Attention over paged KV, with plain torch operations.

One KV tensor serves all layers: ``[pages, layers, 2, tokens, heads, dim]``, so that a page is one run of bytes in the
order the store keeps them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens one request computes in one step: ``num_tokens`` after ``start`` that are in ``pages`` already."""

    start: int
    num_tokens: int
    pages: Sequence[int]

    @property
    def end(self) -> int:
        """Tokens of the request whose KV is there after the step."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of a step that attend in one call: a chunk of one prompt, or several requests that decode.

    They attend to the first ``kv_tokens`` in ``pages``, which is flat, ``num_requests`` times equally many, and None
    where there is nothing; where ``is_causal`` also to each other, each to those before it. ``mask`` is added to the
    scores, ``[requests, 1, queries * group_size, kv_tokens]``.
    """

    rows: slice
    num_requests: int
    kv_tokens: int
    pages: Tensor | None
    is_causal: bool = False
    mask: Tensor | None = None

    @property
    def num_pages(self) -> int:
        """Pages to gather in each layer."""
        return 0 if self.pages is None else len(self.pages)


@dataclass(frozen=True, slots=True)
class Batch:
    """Where each row of a step is in its request and in the pages, and who attends together.

    ``gathered`` [2, pages, tokens, kv_heads, dim] is where every layer puts the KV it reads.
    """

    positions: Tensor
    pages: Tensor
    offsets: Tensor
    groups: Sequence[Group]
    gathered: Tensor


class Scratch:
    """Memory for gathered pages that all steps share: asked of the system anew, it is several times slower."""

    def __init__(self, kv: Tensor) -> None:
        self._pages = kv.new_empty(2, 0, *kv.shape[3:])

    def pages(self, num_pages: int) -> Tensor:
        """Room for K and V of ``num_pages`` in one layer; what was there is overwritten."""
        if num_pages > self._pages.shape[1]:
            self._pages = self._pages.new_empty(2, num_pages, *self._pages.shape[2:])
        return self._pages


def build_batch(chunks: Sequence[Chunk], kv: Tensor, scratch: Scratch, group_size: int) -> Batch:
    """The batch of ``chunks``, whose rows are in the same order, over ``kv``.

    Requests that decode one token attend together if they are neighbours and of similar length.
    """
    device, tokens_per_page = kv.device, kv.shape[3]
    positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
    pages = torch.tensor([chunk.pages[p // tokens_per_page] for chunk in chunks for p in range(chunk.start, chunk.end)])
    groups = []
    row = 0
    for members in _neighbours(chunks):
        num_rows = sum(chunk.num_tokens for chunk in members)
        groups.append(_group(members, slice(row, row + num_rows), kv, group_size))
        row += num_rows
    return Batch(
        positions=positions.to(device),
        pages=pages.to(device),
        offsets=(positions % tokens_per_page).to(device),
        groups=groups,
        gathered=scratch.pages(max(group.num_pages for group in groups)),
    )


def _neighbours(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks that attend in one call: padding them to the longest wastes less than as much again."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        last = groups[-1] if groups else None
        if last and chunk.num_tokens == last[0].num_tokens == 1:
            ends = [member.end for member in last] + [chunk.end]
            if max(ends) * len(ends) <= 2 * sum(ends):
                last.append(chunk)
                continue
        groups.append([chunk])
    return groups


def _group(members: list[Chunk], rows: slice, kv: Tensor, group_size: int) -> Group:
    first, tokens_per_page = members[0], kv.shape[3]
    if first.num_tokens > 1 and first.start == 0:
        return Group(rows, 1, 0, None, is_causal=True)
    # Only on a CPU does torch give what it takes to join two attentions.
    is_causal = first.num_tokens > 1 and kv.device.type == "cpu"
    num_pages = max(-(-(first.start if is_causal else member.end) // tokens_per_page) for member in members)
    table = [
        page
        for member in members
        for page in (*member.pages[:num_pages], *[member.pages[0]] * (num_pages - len(member.pages)))
    ]
    pages = torch.tensor(table, device=kv.device)
    if is_causal:
        return Group(rows, 1, first.start, pages, is_causal=True)
    if len(members) == 1:
        return Group(rows, 1, first.end, pages, mask=_causal_mask(first, group_size, kv))
    kv_tokens = num_pages * tokens_per_page
    ends = torch.tensor([member.end for member in members])
    hidden = torch.arange(kv_tokens) >= ends[:, None]
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(kv)
    return Group(rows, len(members), kv_tokens, pages, mask=mask[:, None, None])


def _causal_mask(chunk: Chunk, group_size: int, kv: Tensor) -> Tensor | None:
    """Hides from each token what comes after it; one token sees everything."""
    if chunk.num_tokens == 1:
        return None
    mask = kv.new_zeros(chunk.num_tokens, group_size, chunk.end)
    hidden = torch.ones(chunk.num_tokens, chunk.num_tokens, dtype=torch.bool, device=kv.device).triu_(1)
    mask[:, :, chunk.start :].masked_fill_(hidden[:, None], -torch.inf)
    return mask.view(1, 1, chunk.num_tokens * group_size, chunk.end)


def attend(query: Tensor, kv_rows: Tensor, kv_layer: Tensor, group: Group, gathered: Tensor) -> Tensor:
    """One group's attention in one layer: ``query`` [rows, heads, dim] to [rows, heads * dim].

    ``kv_rows`` [rows, 2, kv_heads, dim] is the group's own KV, which ``kv_layer`` [pages, 2, tokens, kv_heads, dim]
    has too. ``gathered`` is overwritten.
    """
    rows, heads, dim = query.shape
    if not group.is_causal:
        out = _attend_to_pages(query, kv_layer, group, gathered)
    elif group.pages is None:
        key, value = kv_rows.permute(1, 2, 0, 3)[:, None]
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key, value, is_causal=True, enable_gqa=heads != key.shape[1]
        ).transpose(1, 2)
    else:
        out = _attend_to_both(query, kv_rows, kv_layer, group, gathered)
    return out.reshape(rows, heads * dim)


def _attend_to_pages(query: Tensor, kv_layer: Tensor, group: Group, gathered: Tensor) -> Tensor:
    _, heads, dim = query.shape
    key, value = (_gather(kv_layer[:, plane], group, gathered[plane]) for plane in (0, 1))
    # The query heads of a KV head become rows of one matrix: KV is read once, not repeated.
    kv_heads = key.shape[1]
    folded = query.view(group.num_requests, -1, kv_heads, heads // kv_heads, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(folded.flatten(2, 3), key, value, attn_mask=group.mask)
    return out.view(folded.shape).transpose(1, 2)


def _attend_to_both(query: Tensor, kv_rows: Tensor, kv_layer: Tensor, group: Group, gathered: Tensor) -> Tensor:
    """Pages and own rows apart, joined by their log-sum-exp: no score is computed only to be masked."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own_key, own_value = kv_rows.permute(1, 2, 0, 3)[:, None]
    key, value = (_gather(kv_layer[:, plane], group, gathered[plane]) for plane in (0, 1))
    query = query.transpose(0, 1).contiguous()[None]
    folded = query.view(1, key.shape[1], -1, query.shape[-1])
    own, own_lse = attention(query, own_key, own_value, is_causal=True)
    before, before_lse = attention(folded, key, value)
    weight = torch.sigmoid(before_lse.reshape(own_lse.shape) - own_lse)[..., None]
    return torch.lerp(own, before.reshape(query.shape), weight.to(own.dtype)).transpose(1, 2)


def _gather(plane: Tensor, group: Group, gathered: Tensor) -> Tensor:
    """K or V of a group's requests, ``[requests, kv_heads, kv, dim]``, in ``gathered``."""
    assert group.pages is not None
    pages = gathered[: group.num_pages]
    torch.index_select(plane, 0, group.pages, out=pages)
    tokens = pages.view(group.num_requests, -1, *pages.shape[2:])[:, : group.kv_tokens]
    return tokens.transpose(1, 2)
