"""Zstandard, tuned to entropy coding: KV has skewed bytes but hardly ever a repeated string."""

import threading

import zstandard

from kvstore.codecs.base import Buffer
from kvstore.layout import Layout


class _Contexts(threading.local):
    """One compressor and decompressor per thread: neither may be shared by two."""

    def __init__(self) -> None:
        # A tiny match table leaves the literals to Huffman: on real KV faster and smaller than level 1 as it is.
        tuned = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7)
        self.compressor = zstandard.ZstdCompressor(compression_params=tuned)
        self.decompressor = zstandard.ZstdDecompressor()


class ZstdCodec:
    """One Zstandard frame, which states its content size."""

    codec_id = 2
    name = "zstd"

    def __init__(self) -> None:
        self._contexts = _Contexts()

    def encode(self, payload: memoryview, layout: Layout) -> Buffer:
        """``payload`` as one frame."""
        return self._contexts.compressor.compress(payload)

    def decode(self, stored: memoryview, out: memoryview, layout: Layout) -> bool:
        """Fill ``out`` straight from the frame, once its stated size is known to be that of ``out``."""
        try:
            frame = zstandard.get_frame_parameters(stored)
            if frame.content_size != len(out) or frame.window_size > max(len(out), _SMALLEST_WINDOW_BYTES):
                return False  # a larger window would be allocated before a byte is decoded
            with self._contexts.decompressor.stream_reader(stored) as reader:
                return bool(reader.readinto(out) == len(out))
        except zstandard.ZstdError:
            return False


_SMALLEST_WINDOW_BYTES = 1 << 10  # of the format; a tiny block's frame may name it
