"""Identity of blocks: namespace digests and prefix-chained keys. Pure, and the same on every host.

Canonical bytes, so that any implementation can follow (test vectors: ``tests/unit/test_hashing.py``):

* namespace digest = sha256("tkv-namespace-1" ‖ frame(field) for each field in order)[:16]
* chain digest of block i = H(parent ‖ "T" ‖ u32 n ‖ n token ids as u32), then, if the block carries extras,
  ‖ "X" ‖ u32 length ‖ extras; parent of the first block = H("tkv-root-1")
* block key = namespace digest ‖ chain digest

All integers little-endian; frame(x) = u32 length ‖ x; H is sha256, or xxh3_128 (big-endian digest) by choice.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import TokenError
from kvstore.layout import Layout
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey

TokenIds = Sequence[int] | npt.NDArray[np.integer]

DIGESTS: dict[str, Callable[[bytes], bytes]] = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxh3_128": lambda data: xxhash.xxh3_128(data).digest(),
}

_ROOT = b"tkv-root-1"
_NAMESPACE = b"tkv-namespace-1"


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose KV this is. Anything that changes the bytes a model computes for a token belongs here.

    ``weights`` is a digest of the weights themselves (``kvstore.weights``), so that new weights under the same name
    are a miss. ``salt`` isolates tenants. ``epoch`` is raised when weights change in place.
    ``hash_scheme`` names what hashed the chain: one of ``DIGESTS`` or an engine's own (``"vllm-sha256_cbor"``).
    """

    model: str
    weights: bytes
    revision: str = ""
    salt: str = ""
    adapter: str = ""
    adapter_version: str = ""
    epoch: int = 0
    hash_scheme: str = "sha256"


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
    canonical encoding. Raises ``TokenError`` for ids outside [0, 2**32).
    """
    digest = DIGESTS[scheme]
    num_blocks = len(tokens) // tokens_per_block
    rows = _rows(tokens, num_blocks, tokens_per_block)
    row_bytes = 5 + 4 * tokens_per_block
    link = digest(_ROOT) if parent is None else parent[NAMESPACE_DIGEST_BYTES:]
    keys: list[BlockKey] = []
    for index in range(num_blocks):
        message = link + rows[index * row_bytes : (index + 1) * row_bytes]
        if extras and index in extras:
            message += b"X" + len(extras[index]).to_bytes(4, "little") + extras[index]
        link = digest(message)
        keys.append(BlockKey(namespace + link))
    return keys


def _rows(tokens: TokenIds, num_blocks: int, tokens_per_block: int) -> bytes:
    """``"T" ‖ u32 n ‖ ids`` of every block, back to back."""
    try:
        ids = np.asarray(tokens[: num_blocks * tokens_per_block])
    except (OverflowError, ValueError) as error:
        raise TokenError(f"token ids cannot be read as integers: {error}") from error
    if ids.size and ids.dtype.kind not in "iu":
        raise TokenError(f"token ids must be integers, got {ids.dtype}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**32):
        raise TokenError(f"token ids must lie in [0, 2**32), got {int(ids.min())}..{int(ids.max())}")
    rows = np.empty((num_blocks, 5 + 4 * tokens_per_block), dtype=np.uint8)
    rows[:, 0] = ord("T")
    rows[:, 1:5] = np.frombuffer(tokens_per_block.to_bytes(4, "little"), dtype=np.uint8)
    rows[:, 5:] = ids.astype("<u4").reshape(num_blocks, tokens_per_block).view(np.uint8)
    return rows.tobytes()
