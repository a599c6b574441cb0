"""Between the nouns of the store and the messages of the wire. Keys travel as chain digests, packed.

The namespace of a key is not on the wire but for its number: the server puts it in front, so that no client can ask for
a key of a namespace that it has not opened.
"""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.errors import WireError
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey, Rank, Request

MAX_MESSAGE_BYTES = 8 << 20
MAX_CHAIN_BLOCKS = 128 << 10
"""2M tokens in blocks of 16; with sha256 4 MiB."""
_DIGEST_BYTES = range(8, 65)
_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
MAX_HANDSHAKE_BYTES = 64 << 10
PART_BYTES = 1 << 20
"""How the bytes of a block are cut for another host."""
_TOKEN_KEY = "authorization"


def pack_chain(number: int, chain: Sequence[BlockKey]) -> api.Chain:
    """``chain``, whose keys are all of the namespace with that ``number``."""
    if not chain:
        return api.Chain(namespace=number)
    start = NAMESPACE_DIGEST_BYTES
    digests = b"".join([key[start:] for key in chain])
    return api.Chain(namespace=number, digest_bytes=len(chain[0]) - start, digests=digests)


def unpack_chain(namespace: bytes, chain: api.Chain) -> list[BlockKey]:
    """The keys in the namespace with that digest. Raises ``WireError`` for what is no chain."""
    size, digests = chain.digest_bytes, chain.digests
    if not digests:
        return []
    if size not in _DIGEST_BYTES or len(digests) % size or len(digests) > size * MAX_CHAIN_BLOCKS:
        raise WireError(f"{len(digests)} bytes are no chain of digests of {size} bytes")
    return cast(list[BlockKey], [namespace + digest for (digest,) in struct.iter_unpack(f"{size}s", digests)])


def pack_identity(identity: Identity) -> api.Identity:
    """As a message."""
    return api.Identity(
        model=identity.model,
        weights=identity.weights,
        revision=identity.revision,
        salt=identity.salt,
        adapter=identity.adapter,
        adapter_version=identity.adapter_version,
        epoch=identity.epoch,
        hash_scheme=identity.hash_scheme,
    )


def unpack_identity(message: api.Identity) -> Identity:
    """From a message."""
    return Identity(
        model=message.model,
        weights=message.weights,
        revision=message.revision,
        salt=message.salt,
        adapter=message.adapter,
        adapter_version=message.adapter_version,
        epoch=message.epoch,
        hash_scheme=message.hash_scheme,
    )


def pack_opening(number: int, ns: Namespace, max_age_s: int | None) -> api.OpenNamespace:
    """The opening of a namespace that the client calls ``number``."""
    return api.OpenNamespace(
        namespace=number,
        identity=pack_identity(ns.identity),
        layout=pack_layout(ns.layout),
        max_age_s=max_age_s,
        prefill_tokens_per_s=ns.prefill_tokens_per_s,
    )


def pack_layout(layout: Layout) -> api.Layout:
    """As a message."""
    return api.Layout(
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_heads=layout.num_heads,
        plane_dims=layout.plane_dims,
        tokens_per_block=layout.tokens_per_block,
        quantisation=layout.quantisation,
        engine_format=layout.engine_format,
        num_stripes=layout.num_stripes,
    )


def unpack_layout(message: api.Layout) -> Layout:
    """From a message. Raises ``LayoutError`` for an impossible one."""
    return Layout(
        dtype=message.dtype,
        num_layers=message.num_layers,
        num_heads=message.num_heads,
        plane_dims=tuple(message.plane_dims),
        tokens_per_block=message.tokens_per_block,
        quantisation=message.quantisation,
        engine_format=message.engine_format,
        num_stripes=message.num_stripes or 1,
    )


def pack_request(request: Request) -> api.Request:
    """As a message; of the hints those that are flags."""
    return api.Request(
        request_id=request.request_id,
        now_s=request.now_s,
        input_tokens=request.input_tokens,
        hints={name: hint for name, hint in request.hints.items() if isinstance(hint, bool)},
    )


def unpack_request(namespace: bytes, message: api.Request) -> Request:
    """From a message."""
    return Request(message.request_id, message.now_s, namespace, message.input_tokens, dict(message.hints))


def pack_rank(rank: Rank) -> api.Rank:
    """As a message."""
    return api.Rank(engine=rank.engine, index=rank.index, num_ranks=rank.num_ranks)


def unpack_rank(message: api.Rank) -> Rank:
    """From a message."""
    return Rank(message.engine, message.index, message.num_ranks)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that carry a token."""
    return ((_TOKEN_KEY, f"Bearer {token}"),)


def token_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The token that came with a call; empty where none did."""
    for name, value in metadata or ():
        if name == _TOKEN_KEY and isinstance(value, str):
            return value.removeprefix("Bearer ")
    return ""


def frame(message: api.Hello | api.Welcome) -> bytes:
    """A message of the handshake behind its length."""
    payload = message.SerializeToString()
    return _HEADER.pack(len(payload)) + payload


def frame_bytes(received: bytes) -> int:
    """How long the frame that ``received`` starts is, header included; the header alone while that has not come.

    Raises ``WireError`` for one that is too long.
    """
    if len(received) < HEADER_BYTES:
        return HEADER_BYTES
    length = int(_HEADER.unpack_from(received)[0])
    if length > MAX_HANDSHAKE_BYTES:
        raise WireError(f"a handshake of {length} bytes; the other side is no store or no client")
    return HEADER_BYTES + length


def unframe(received: bytes) -> bytes:
    """The payload of a whole frame."""
    return received[HEADER_BYTES:]


def arena_socket(path: Path) -> Path:
    """Where the descriptor is handed out, given where the store is served."""
    return path.with_name(path.name + ".arena")


def admin_socket(path: Path) -> Path:
    """Where the operator is answered."""
    return path.with_name(path.name + ".admin")
