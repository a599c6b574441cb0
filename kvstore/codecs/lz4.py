"""LZ4 block format: fast, and of use only where bytes repeat."""

import lz4.block

from kvstore.codecs.base import Buffer
from kvstore.layout import Layout


class Lz4Codec:
    """One LZ4 block per stored block, without a length of its own: the block header has it."""

    codec_id = 1
    name = "lz4"

    def encode(self, payload: memoryview, layout: Layout) -> Buffer:
        """``payload`` as one LZ4 block."""
        compressed: bytes = lz4.block.compress(payload, store_size=False)
        return compressed

    def decode(self, stored: memoryview, out: memoryview, layout: Layout) -> bool:
        """Fill ``out``; LZ4 allocates ``len(out)`` and refuses to write more."""
        try:
            plain = lz4.block.decompress(stored, uncompressed_size=len(out))
        except lz4.block.LZ4BlockError:
            return False
        if len(plain) != len(out):
            return False
        out[:] = plain
        return True
