"""The bytes as they are."""

from kvstore.codecs.base import Buffer
from kvstore.layout import Layout


class NoneCodec:
    """Stores a block unchanged; also what an incompressible block falls back to."""

    codec_id = 0
    name = "none"

    def encode(self, payload: memoryview, layout: Layout) -> Buffer:
        """``payload`` itself, without a copy."""
        return payload

    def decode(self, stored: memoryview, out: memoryview, layout: Layout) -> bool:
        """Copy ``stored`` to ``out``."""
        if len(stored) != len(out):
            return False
        out[:] = stored
        return True
