"""The model of the simulated engine: the KV of a token is a digest of all tokens up to it. Pure.

It differs for every group, layer, plane and head, so that a block, stripe or token in the wrong place is a wrong byte.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import LayoutError
from kvstore.layout import ITEMSIZE_BYTES, Layout

NUM_TOKENS = 1 << 16
"""Of the vocabulary."""
STATE_BYTES = 16

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one kind, whose blocks have a layout and a namespace of their own.

    Raises ``LayoutError`` for a layout whose planes differ in size or that has scales: the model cannot fill it.
    """

    name: str
    layout: Layout
    trailing_blocks: int | None = None
    """How many blocks before a token its layers look at; None: all."""

    def __post_init__(self) -> None:
        if self.layout.has_scales or len(set(self.layout.plane_dims)) > 1:
            raise LayoutError(f"group {self.name!r}: the model knows planes of one size, without scales")

    def needs(self, num_blocks: int) -> range:
        """Which blocks it must have for the request to go on after ``num_blocks`` of them."""
        return range(0 if self.trailing_blocks is None else max(0, num_blocks - self.trailing_blocks), num_blocks)

    def sees(self, token: int) -> range:
        """The tokens whose KV the token at this place looks at, its own among them."""
        if self.trailing_blocks is None:
            return range(token + 1)
        return range(max(0, token - self.trailing_blocks * self.layout.tokens_per_block), token + 1)

    def shape(self, num_ranks: int) -> tuple[int, ...]:
        """What a rank has of a block: ``[stripe][layer][plane][token][head][byte]``."""
        layout = self.layout
        heads, dim_bytes = layout.num_heads // layout.num_stripes, layout.plane_dims[0] * ITEMSIZE_BYTES[layout.dtype]
        planes, tokens = len(layout.plane_dims), layout.tokens_per_block
        return layout.num_stripes // num_ranks, layout.num_layers, planes, tokens, heads, dim_bytes

    def token_kv(self, state: bytes) -> Bytes:
        """The KV of the token that led to ``state``: ``[stripe][layer][plane][head][byte]``, of all ranks."""
        stripes, layers, planes, _, heads, dim_bytes = self.shape(1)
        digest = hashlib.shake_128(state + self.name.encode()).digest(self.layout.token_bytes)
        return np.frombuffer(digest, np.uint8).reshape(stripes, layers, planes, heads, dim_bytes)

    def block(self, states: Sequence[bytes]) -> Bytes:
        """The right bytes of the block whose tokens led to ``states``."""
        return np.stack([self.token_kv(state) for state in states], axis=3).reshape(-1)


def states_after(state: bytes, tokens: Iterable[int]) -> list[bytes]:
    """What stands for all tokens up to each of ``tokens``; ``state`` is that of the one before them, or empty."""
    states = []
    for token in tokens:
        state = hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=STATE_BYTES).digest()
        states.append(state)
    return states


def next_token(seen: Iterable[bytes]) -> int:
    """The token after those whose KV is ``seen``: any other byte in it gives another token."""
    digest = hashlib.blake2b(digest_size=8)
    for part in seen:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") % NUM_TOKENS
