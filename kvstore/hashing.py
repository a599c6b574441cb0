"""Identity of blocks: namespace digests and prefix-chained keys. Pure, and the same on every host.

Canonical bytes, so that any implementation can follow (test vectors: ``tests/unit/test_hashing.py``):

* namespace digest = sha256("tkv-namespace-1" ‖ frame(field) for each field in order)[:16]
* chain digest of block i = H(parent ‖ "T" ‖ u32 n ‖ n token ids as u32), then, if the block carries extras,
  ‖ "X" ‖ u32 length ‖ extras; parent of the first block = H("tkv-root-1")
* block key = namespace digest ‖ chain digest

All integers little-endian; frame(x) = u32 length ‖ x; H is sha256, or xxh3_128 (big-endian digest) by choice.
"""

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import IdentityError, TokenError
from kvstore.layout import Layout
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey

TokenIds = Sequence[int] | npt.NDArray[np.integer]


class Hash(Protocol):
    """What a hash function's constructor returns."""

    def digest(self) -> bytes:
        """Of the bytes given to the constructor."""


DIGESTS: dict[str, Callable[[bytes], Hash]] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}

_ROOT = b"tkv-root-1"
_NAMESPACE = b"tkv-namespace-1"


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose KV this is. Anything that changes the bytes a model computes for a token belongs here.

    ``weights`` is a digest of the weights themselves (``kvstore.weights``), so that new weights under the same name
    are a miss. ``salt`` isolates tenants. ``epoch`` is raised when weights change in place.
    ``hash_scheme`` names what hashed the chain: one of ``DIGESTS`` or an engine's own (``"vllm-sha256_cbor"``).
    Raises ``IdentityError``.
    """

    model: str
    weights: bytes
    revision: str = ""
    salt: str = ""
    adapter: str = ""
    adapter_version: str = ""
    epoch: int = 0
    hash_scheme: str = "sha256"

    def __post_init__(self) -> None:
        for name in ("model", "revision", "salt", "adapter", "adapter_version", "hash_scheme"):
            _require_text(name, getattr(self, name))
        if not isinstance(self.weights, bytes):
            raise IdentityError(
                f"identity weights is a {type(self.weights).__name__}: give bytes, such as those of kvstore.weights"
            )
        if not isinstance(self.epoch, int) or not 0 <= self.epoch < 1 << 64:
            raise IdentityError(f"identity epoch is {self.epoch!r}; it must be a whole number in [0, 2**64)")


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise IdentityError(f"identity {name} is {value!r}; it must be a text, empty where there is none")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise IdentityError(f"identity {name} has characters that cannot be written: {error}") from error


def namespace_digest(identity: Identity, layout: Layout) -> bytes:
    """16-byte digest of everything but the tokens."""
    fields = (
        layout.fingerprint,
        identity.model.encode(),
        identity.revision.encode(),
        identity.weights,
        identity.salt.encode(),
        identity.adapter.encode(),
        identity.adapter_version.encode(),
        identity.epoch.to_bytes(8, "little"),
        identity.hash_scheme.encode(),
    )
    framed = _NAMESPACE + b"".join(len(part).to_bytes(4, "little") + part for part in fields)
    return hashlib.sha256(framed).digest()[:NAMESPACE_DIGEST_BYTES]


def block_keys(
    namespace: bytes,
    tokens: TokenIds,
    tokens_per_block: int,
    *,
    scheme: str = "sha256",
    parent: BlockKey | None = None,
    extras: Mapping[int, bytes] | None = None,
) -> list[BlockKey]:
    """Keys of the whole blocks in ``tokens``, root first; a trailing partial block has none.

    ``parent`` is the key of the block before ``tokens[0]``, when the chain goes on. ``extras`` maps a block's index in
    this call to what else determines its content, such as image digests with their offsets, in bytes of the caller's
    canonical encoding. Raises ``TokenError`` for what is no row of ids in [0, 2**32).
    """
    make = DIGESTS[scheme]
    link = make(_ROOT).digest() if parent is None else parent[NAMESPACE_DIGEST_BYTES:]
    rows: Iterable[tuple[bytes]] = struct.iter_unpack(f"{5 + 4 * tokens_per_block}s", _rows(tokens, tokens_per_block))
    if extras:
        rows = _with_extras(rows, extras)
    keys = [namespace + (link := make(link + row).digest()) for (row,) in rows]
    return cast(list[BlockKey], keys)  # a call of BlockKey for each costs as much as a fifth of its hash


def _with_extras(rows: Iterable[tuple[bytes]], extras: Mapping[int, bytes]) -> Iterator[tuple[bytes]]:
    for index, (row,) in enumerate(rows):
        extra = extras.get(index)
        yield (row if extra is None else row + b"X" + len(extra).to_bytes(4, "little") + extra,)


def _rows(tokens: TokenIds, tokens_per_block: int) -> bytes:
    """``"T" ‖ u32 n ‖ ids`` of every whole block, back to back."""
    try:
        num_blocks = len(tokens) // tokens_per_block
        ids = _uint32(tokens[: num_blocks * tokens_per_block])
    except TypeError as error:
        raise TokenError(f"token ids must be a sequence of integers, got a {type(tokens).__name__}") from error
    if ids.ndim != 1:
        raise TokenError(f"token ids must be one row of integers, got an array of shape {ids.shape}")
    rows = np.empty((num_blocks, 5 + 4 * tokens_per_block), dtype=np.uint8)
    rows[:, 0] = ord("T")
    rows[:, 1:5] = np.frombuffer(tokens_per_block.to_bytes(4, "little"), dtype=np.uint8)
    rows[:, 5:] = ids.reshape(num_blocks, tokens_per_block).view(np.uint8)
    return rows.tobytes()


def _uint32(tokens: TokenIds) -> npt.NDArray[np.uint32]:
    """Token ids as they are hashed, little-endian."""
    try:
        if isinstance(tokens, list | tuple):
            tokens = np.frombuffer(array("I", tokens), dtype=np.uint32)  # in a quarter of the time of np.asarray
        tokens = np.asarray(tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise TokenError(f"token ids must be integers in [0, 2**32): {error}") from error
    if tokens.size and tokens.dtype.kind not in "iu":
        raise TokenError(f"token ids must be integers, got {tokens.dtype}")
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= 2**32):
        raise TokenError(f"token ids must lie in [0, 2**32), got {int(tokens.min())}..{int(tokens.max())}")
    return tokens.astype("<u4")
