"""Byte planes: all first bytes of the elements, then all second ones, each encoded on its own.

The upper byte of a float holds sign and exponent, which are skewed; the lowest is noise that only costs time. Elements
of two bytes give two planes, of four bytes four, of one byte one. Stored: a u32 length per plane, lowest byte's plane
first, then the planes; one whose length is that of the plain plane is stored plain. Little-endian.
"""

import struct

import numpy as np
import numpy.typing as npt

from kvstore.codecs.base import Buffer, Codec
from kvstore.layout import ITEMSIZE_BYTES, Layout

Bytes = npt.NDArray[np.uint8]


class PlanesCodec:
    """Another codec over the byte planes of a block."""

    def __init__(self, codec_id: int, inner: Codec) -> None:
        self.codec_id = codec_id
        self.name = f"{inner.name}-planes"
        self._inner = inner

    def encode(self, payload: memoryview, layout: Layout) -> Buffer:
        """The encoded planes of ``payload`` behind their lengths."""
        planes = _split(payload, ITEMSIZE_BYTES[layout.dtype])
        parts = [self._encode_plane(plane, layout) for plane in planes]
        return b"".join((_lengths(len(parts)).pack(*map(len, parts)), *parts))

    def decode(self, stored: memoryview, out: memoryview, layout: Layout) -> bool:
        """Fill ``out``; False unless every plane decodes to its full length."""
        itemsize = ITEMSIZE_BYTES[layout.dtype]
        lengths = _lengths(itemsize)
        if len(stored) < lengths.size:
            return False
        part_bytes = lengths.unpack_from(stored)
        if lengths.size + sum(part_bytes) != len(stored):
            return False
        planes = np.empty((itemsize, len(out) // itemsize), dtype=np.uint8)
        start = lengths.size
        for plane, num_bytes in zip(planes, part_bytes, strict=True):
            if not self._decode_plane(stored[start : start + num_bytes], plane.data, layout):
                return False
            start += num_bytes
        _join(planes, out)
        return True

    def _encode_plane(self, plane: Bytes, layout: Layout) -> Buffer:
        plain = plane.data
        encoded = self._inner.encode(plain, layout)
        return encoded if len(encoded) < len(plain) else plain

    def _decode_plane(self, part: memoryview, plane: memoryview, layout: Layout) -> bool:
        if len(part) == len(plane):
            plane[:] = part
            return True
        return self._inner.decode(part, plane, layout)


def _lengths(num_planes: int) -> struct.Struct:
    return struct.Struct(f"<{num_planes}I")


def _split(payload: memoryview, itemsize: int) -> Bytes:
    """Planes of ``payload``: [plane][element]. Shifts, not strides: they are three times as fast."""
    words = np.frombuffer(payload, dtype=f"<u{itemsize}")
    planes = np.empty((itemsize, len(words)), dtype=np.uint8)
    for index, plane in enumerate(planes):
        np.right_shift(words, 8 * index, out=plane, casting="unsafe")
    return planes


def _join(planes: Bytes, out: memoryview) -> None:
    """The inverse of ``_split``."""
    itemsize = len(planes)
    words = np.frombuffer(out, dtype=f"<u{itemsize}")
    np.copyto(words, planes[-1])
    for plane in planes[-2::-1]:
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)
