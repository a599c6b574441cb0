"""The exact shape of a block's bytes, and its fingerprint. Pure."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from math import prod

from kvstore.errors import LayoutError

FINGERPRINT_BYTES = 16
SLOT_ALIGN_BYTES = 4096
"""O_DIRECT moves whole pages; a slot is a block rounded up to them."""

ITEMSIZE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

MAX_COUNT = (1 << 32) - 1

_FORMAT = b"tkv-layout-1"


def slot_bytes(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


@dataclass(frozen=True)
class Layout:
    """Bytes of one block: ``[layer][plane][token][head][dim]``, contiguous, little-endian, no padding.

    ``plane_dims`` is the content per token and head of each plane: ``(head_dim, head_dim)`` for K and V,
    ``(latent_dim,)`` with ``num_heads=1`` for MLA. ``num_heads`` counts KV heads of the whole model.
    ``quantisation`` names a scheme and its scales. ``engine_format`` is set where an engine's pages are opaque
    (packed for an instruction set); such blocks never match those of another engine. Raises ``LayoutError`` for what
    can be no block.
    """

    dtype: str
    num_layers: int
    num_heads: int
    plane_dims: tuple[int, ...]
    tokens_per_block: int
    quantisation: str = ""
    engine_format: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in ITEMSIZE_BYTES:
            raise LayoutError(f"layout dtype {self.dtype!r} is not known; use one of {', '.join(ITEMSIZE_BYTES)}")
        for name in ("num_layers", "num_heads", "tokens_per_block"):
            _require_count(f"layout {name}", getattr(self, name))
        if not isinstance(self.plane_dims, tuple) or not self.plane_dims:
            raise LayoutError(f"layout plane_dims is {self.plane_dims!r}; give (head_dim, head_dim) for K and V")
        for dim in self.plane_dims:
            _require_count("layout plane_dims: a plane's elements", dim)
        if not (isinstance(self.quantisation, str) and isinstance(self.engine_format, str)):
            raise LayoutError("layout quantisation and engine_format are texts; leave out what there is none of")

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return ITEMSIZE_BYTES[self.dtype] * prod((self.num_layers, self.num_heads, sum(self.plane_dims)))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.tokens_per_block

    @cached_property
    def fingerprint(self) -> bytes:
        """16-byte digest over every field; two layouts share it only if their bytes mean the same."""
        parts = (
            self.dtype.encode(),
            self.num_layers.to_bytes(4, "little"),
            self.num_heads.to_bytes(4, "little"),
            b"".join(dim.to_bytes(4, "little") for dim in self.plane_dims),
            self.tokens_per_block.to_bytes(4, "little"),
            self.quantisation.encode(),
            self.engine_format.encode(),
        )
        framed = _FORMAT + b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hashlib.sha256(framed).digest()[:FINGERPRINT_BYTES]


def _require_count(name: str, value: object) -> None:
    """Raises ``LayoutError`` unless it is a whole number that the fingerprint has room for."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_COUNT:
        raise LayoutError(f"{name} is {value!r}; it must be a whole number from 1 to {MAX_COUNT}")


@dataclass(frozen=True)
class FoundLayout(Layout):
    """The layout of a block that a scan found: its length and fingerprint are known, and suffice to verify or erase."""

    found: bytes = b""

    @classmethod
    def of(cls, block_bytes: int, fingerprint: bytes) -> "FoundLayout":
        """What ``tiers.base.StoredBlock`` says of it."""
        return cls("uint8", 1, 1, (block_bytes,), 1, found=fingerprint)

    @cached_property
    def fingerprint(self) -> bytes:
        """As the scan found it."""
        return self.found
