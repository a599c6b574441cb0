"""One model's blocks as one tenant sees them: layout, identity, keys, age limit. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kvstore.errors import ConfigError, LayoutError
from kvstore.hashing import DIGESTS, Identity, TokenIds, block_keys, namespace_digest
from kvstore.layout import Layout
from kvstore.types import BlockKey

MAX_AGE_S = (1 << 32) - 1
"""136 years."""
MAX_TOKENS_PER_S = (1 << 32) - 1


@dataclass(frozen=True)
class Namespace:
    """Everything of a block's key but its tokens. ``max_age_s`` 0: blocks may stay for ever.

    ``prefill_tokens_per_s`` is what the engine computes, so that nothing is loaded that it has faster; 0: not known.
    Raises ``ConfigError`` for others.
    """

    identity: Identity
    layout: Layout
    max_age_s: int = 0
    prefill_tokens_per_s: int = 0

    def __post_init__(self) -> None:
        age = self.max_age_s
        if not isinstance(age, int) or not 0 <= age <= MAX_AGE_S:
            raise ConfigError(f"max_age_s is {age!r}; it must be whole seconds from 0, for ever, to {MAX_AGE_S}")
        rate = self.prefill_tokens_per_s
        if not isinstance(rate, int) or not 0 <= rate <= MAX_TOKENS_PER_S:
            raise ConfigError(
                f"prefill_tokens_per_s is {rate!r}; it must be a whole number from 0, not known, to {MAX_TOKENS_PER_S}"
            )

    @cached_property
    def digest(self) -> bytes:
        """The first 16 bytes of every key here."""
        return namespace_digest(self.identity, self.layout)

    @cached_property
    def fingerprint(self) -> bytes:
        """The layout's fingerprint."""
        return self.layout.fingerprint

    def keys(
        self, tokens: TokenIds, *, parent: BlockKey | None = None, extras: Mapping[int, bytes] | None = None
    ) -> list[BlockKey]:
        """Keys of the whole blocks in ``tokens``; see ``hashing.block_keys``.

        Raises ``TokenError``, and ``LayoutError`` for a ``parent`` of another namespace.
        """
        if parent is not None and not (parent.startswith(self.digest) and len(parent) > len(self.digest)):
            raise LayoutError(f"the parent is no key of the namespace of model {self.identity.model!r}")
        scheme = self.identity.hash_scheme
        if scheme not in DIGESTS:
            raise LayoutError(f"keys of scheme {scheme!r} are the engine's own: wrap its block hashes with key()")
        return block_keys(
            self.digest, tokens, self.layout.tokens_per_block, scheme=scheme, parent=parent, extras=extras
        )

    def key(self, chain_digest: bytes) -> BlockKey:
        """The key of a block that an engine has hashed itself, under its own ``hash_scheme``."""
        return BlockKey(self.digest + chain_digest)

    def oldest_unix_s(self, now_unix_s: float) -> int:
        """Blocks computed before this moment are too old to be served; 0: none is."""
        return int(now_unix_s) - self.max_age_s if self.max_age_s else 0
