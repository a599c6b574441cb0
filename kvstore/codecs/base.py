"""The protocol of a codec: a lossless encoding of one block's bytes."""

from typing import Protocol

from kvstore.layout import Layout

Buffer = bytes | bytearray | memoryview


class Codec(Protocol):
    """Encodes and decodes whole blocks. Stateless and thread-safe."""

    codec_id: int
    """Written in the block header; never reused for another encoding."""
    name: str

    def encode(self, payload: memoryview, layout: Layout) -> Buffer:
        """The stored form of ``payload`` (``layout.block_bytes`` long)."""

    def decode(self, stored: memoryview, out: memoryview, layout: Layout) -> bool:
        """Fill ``out`` exactly; False if ``stored`` does not decode to just ``layout.block_bytes``.

        Never allocates more than a block for a hostile input.
        """
