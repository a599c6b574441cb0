"""The exact shape of a block's bytes, and its fingerprint. Pure."""

import hashlib
from dataclasses import dataclass, replace
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

QUANTISED = {"fp8": "float8_e4m3fn", "int8": "int8"}
"""What elements are stored as, by the name of the format that a setting asks for."""
SCALE_BYTES = 2
"""A scale is a bfloat16."""
_SCALES = {f"channel-token of {dtype}": dtype for dtype in ("float32", "float16", "bfloat16")}
"""``quantisation`` of blocks with scales, and the dtype of the elements before."""

MAX_COUNT = (1 << 32) - 1

_FORMAT = b"tkv-layout-1"


def slot_bytes(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


@dataclass(frozen=True)
class Layout:
    """Bytes of one block: ``[stripe][layer][plane][token][head][dim]``, contiguous, little-endian, no padding.

    Where it has scales (``quantised``), each layer of a stripe is followed by its own: K's, ``[head][dim]``, then V's,
    ``[token][head]``.

    ``plane_dims`` is the content per token and head of each plane: ``(head_dim, head_dim)`` for K and V,
    ``(latent_dim,)`` with ``num_heads=1`` for MLA. ``num_heads`` counts KV heads of the whole model.
    ``quantisation`` names a scheme, with its scales where a block has them. ``engine_format`` is set where an engine's
    pages are opaque (packed for an instruction set); such blocks never match those of another engine. Each of
    ``num_stripes`` has as many heads, in their order, so that ranks of every degree that divides it share the blocks.
    ``owner`` is whose blocks they are, where a sidecar tells its tenants apart: no client can name it. Raises
    ``LayoutError`` for what can be no block.
    """

    dtype: str
    num_layers: int
    num_heads: int
    plane_dims: tuple[int, ...]
    tokens_per_block: int
    quantisation: str = ""
    engine_format: str = ""
    num_stripes: int = 1
    owner: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in ITEMSIZE_BYTES:
            raise LayoutError(f"layout dtype {self.dtype!r} is not known; use one of {', '.join(ITEMSIZE_BYTES)}")
        for name in ("num_layers", "num_heads", "tokens_per_block", "num_stripes"):
            _require_count(f"layout {name}", getattr(self, name))
        if not isinstance(self.plane_dims, tuple) or not self.plane_dims:
            raise LayoutError(f"layout plane_dims is {self.plane_dims!r}; give (head_dim, head_dim) for K and V")
        for dim in self.plane_dims:
            _require_count("layout plane_dims: a plane's elements", dim)
        if not all(isinstance(text, str) for text in (self.quantisation, self.engine_format, self.owner)):
            raise LayoutError("layout quantisation, engine_format and owner are texts; leave out what there is none of")
        if self.num_heads % self.num_stripes:
            raise LayoutError(f"{self.num_heads} heads do not make {self.num_stripes} stripes of as many heads each")
        if self.num_stripes > 1 and (self.engine_format or (self.quantisation and not self.has_scales)):
            raise LayoutError("bytes of a foreign scheme make no stripes: nobody knows whose heads they are")
        if self.has_scales and (self.dtype not in QUANTISED.values() or not self._has_plain_planes):
            raise LayoutError(
                f"a layout of {self.dtype} {self.plane_dims} cannot have scales; Layout.quantised makes it"
            )

    def quantised(self, name: str) -> "Layout":
        """Of the same blocks in the format ``name``: a byte an element, with scales per channel of K and token of V.

        The dtype of the elements before stays a part of it. Raises ``LayoutError`` for a format that is not in
        ``QUANTISED``, and for blocks that are not K and V, of the same dims, in floats of 16 or 32 bits.
        """
        if name not in QUANTISED:
            raise LayoutError(f"quantisation {name!r} is not known; use one of {', '.join(QUANTISED)}")
        if self.dtype not in _SCALES.values() or self.quantisation or not self._has_plain_planes:
            raise LayoutError(
                f"blocks of {self.dtype} {self.plane_dims}{self.quantisation}{self.engine_format} cannot be quantised,"
                " only K and V as they are, in float32, float16 or bfloat16"
            )
        return replace(self, dtype=QUANTISED[name], quantisation=f"channel-token of {self.dtype}")

    @property
    def has_scales(self) -> bool:
        """Whether it is ``quantised``."""
        return self.quantisation in _SCALES

    @property
    def _has_plain_planes(self) -> bool:
        """Whether there are K and V, alike, and not packed."""
        return len(self.plane_dims) == 2 and len(set(self.plane_dims)) == 1 and not self.engine_format

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, without scales."""
        return ITEMSIZE_BYTES[self.dtype] * prod((self.num_layers, self.num_heads, sum(self.plane_dims)))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block, with its scales."""
        return self.token_bytes * self.tokens_per_block + self.scales_bytes

    @cached_property
    def scales_bytes(self) -> int:
        """Bytes of a block's scales: each layer and head has one for each of K's channels and each of V's tokens."""
        if not self.has_scales:
            return 0
        return SCALE_BYTES * self.num_layers * self.num_heads * (self.plane_dims[0] + self.tokens_per_block)

    def part(self, num_ranks: int) -> "Layout":
        """Of what one of ``num_ranks`` tensor-parallel ranks has of a block: whole stripes, and so one run of bytes.

        Raises ``LayoutError`` where the ranks' heads are not whole stripes: they cannot write or read such blocks.
        """
        if num_ranks < 1 or self.num_stripes % num_ranks:
            raise LayoutError(
                f"blocks of {self.num_stripes} stripes cannot be shared by {num_ranks} ranks; to them they are a miss"
            )
        return replace(self, num_heads=self.num_heads // num_ranks, num_stripes=self.num_stripes // num_ranks)

    def bytes_of(self, rank: int, num_ranks: int) -> slice:
        """Where in a block the ``part`` of ``rank`` lies. Raises ``LayoutError`` as ``part`` does."""
        num_bytes = self.part(num_ranks).block_bytes
        if not 0 <= rank < num_ranks:
            raise LayoutError(f"there is no rank {rank} of {num_ranks}")
        return slice(rank * num_bytes, (rank + 1) * num_bytes)

    @cached_property
    def fingerprint(self) -> bytes:
        """16-byte digest over every field; two layouts share it only if their bytes mean the same."""
        parts = [
            self.dtype.encode(),
            self.num_layers.to_bytes(4, "little"),
            self.num_heads.to_bytes(4, "little"),
            b"".join(dim.to_bytes(4, "little") for dim in self.plane_dims),
            self.tokens_per_block.to_bytes(4, "little"),
            self.quantisation.encode(),
            self.engine_format.encode(),
        ]
        if self.num_stripes > 1:  # of one, as before there were stripes
            parts.append(self.num_stripes.to_bytes(4, "little"))
        if self.owner:
            parts.append(b"owner:" + self.owner.encode())
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
