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
    """Rows of a step that attend in one call: one chunk of a prompt, or several requests that decode.

    ``pages`` is flat, ``num_requests`` times equally many; None for the first chunk of a prompt, which has nothing
    but itself to attend to. ``mask`` is added to the scores, ``[requests, 1, queries * group_size, kv]``.
    """

    rows: slice
    num_requests: int
    kv_tokens: int
    pages: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """Where each row of a step is in its request and in the pages, and who attends together."""

    positions: Tensor
    pages: Tensor
    offsets: Tensor
    groups: Sequence[Group]


def build_batch(chunks: Sequence[Chunk], tokens_per_page: int, group_size: int, like: Tensor) -> Batch:
    """The batch of ``chunks``, whose rows are in the same order; ``like`` gives device and dtype of masks.

    Requests that decode one token attend together if they are neighbours and of similar length.
    """
    device = like.device
    positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
    pages = torch.tensor([chunk.pages[p // tokens_per_page] for chunk in chunks for p in range(chunk.start, chunk.end)])
    groups = []
    row = 0
    for members in _neighbours(chunks):
        num_rows = sum(chunk.num_tokens for chunk in members)
        groups.append(_group(members, slice(row, row + num_rows), tokens_per_page, group_size, like))
        row += num_rows
    return Batch(
        positions=positions.to(device),
        pages=pages.to(device),
        offsets=(positions % tokens_per_page).to(device),
        groups=groups,
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


def _group(members: list[Chunk], rows: slice, tokens_per_page: int, group_size: int, like: Tensor) -> Group:
    first = members[0]
    if len(members) == 1 and first.start == 0:
        return Group(rows, 1, first.end, None, None)
    num_pages = max(-(-member.end // tokens_per_page) for member in members)
    table = [
        page
        for member in members
        for page in (*member.pages[:num_pages], *[member.pages[0]] * (num_pages - len(member.pages)))
    ]
    pages = torch.tensor(table, device=like.device)
    if len(members) == 1:
        return Group(rows, 1, first.end, pages, _causal_mask(first, group_size, like))
    kv_tokens = num_pages * tokens_per_page
    ends = torch.tensor([member.end for member in members])
    hidden = torch.arange(kv_tokens) >= ends[:, None]
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(like)
    return Group(rows, len(members), kv_tokens, pages, mask[:, None, None])


def _causal_mask(chunk: Chunk, group_size: int, like: Tensor) -> Tensor | None:
    """Hides from each token what comes after it; one token sees everything."""
    if chunk.num_tokens == 1:
        return None
    mask = like.new_zeros(chunk.num_tokens, group_size, chunk.end)
    hidden = torch.ones(chunk.num_tokens, chunk.num_tokens, dtype=torch.bool, device=like.device).triu_(1)
    mask[:, :, chunk.start :].masked_fill_(hidden[:, None], -torch.inf)
    return mask.view(1, 1, chunk.num_tokens * group_size, chunk.end)


def attend(query: Tensor, kv_rows: Tensor, kv_layer: Tensor, group: Group) -> Tensor:
    """One group's attention in one layer: ``query`` [rows, heads, dim] to [rows, heads * dim].

    ``kv_rows`` [rows, 2, kv_heads, dim] is the group's own KV, which ``kv_layer`` [pages, 2, tokens, kv_heads, dim]
    has too.
    """
    rows, heads, dim = query.shape
    if group.pages is None:
        key, value = (kv_rows[:, plane].transpose(0, 1)[None] for plane in (0, 1))
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key, value, is_causal=True, enable_gqa=heads != key.shape[1]
        )
        return out[0].transpose(0, 1).reshape(rows, heads * dim)
    key, value = (_gather(kv_layer[:, plane], group) for plane in (0, 1))
    # The query heads of a KV head become rows of one matrix: KV is read once, not repeated.
    kv_heads = key.shape[1]
    folded = query.view(group.num_requests, -1, kv_heads, heads // kv_heads, dim).transpose(1, 2)
    shape = folded.shape
    out = F.scaled_dot_product_attention(folded.flatten(2, 3), key, value, attn_mask=group.mask)
    return out.view(shape).transpose(1, 2).reshape(rows, heads * dim)


def _gather(plane: Tensor, group: Group) -> Tensor:
    """K or V of a group's requests, ``[requests, kv_heads, kv, dim]``."""
    assert group.pages is not None
    pages = plane.index_select(0, group.pages)
    tokens = pages.view(group.num_requests, -1, *pages.shape[2:])[:, : group.kv_tokens]
    return tokens.transpose(1, 2)
