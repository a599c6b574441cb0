"""Every codec, by the name a person configures and by the number in a block's header."""

from kvstore.codecs.base import Buffer, Codec
from kvstore.codecs.lz4 import Lz4Codec
from kvstore.codecs.none import NoneCodec
from kvstore.codecs.planes import PlanesCodec
from kvstore.codecs.zstd import ZstdCodec
from kvstore.layout import Layout

NONE = NoneCodec()

_LZ4 = Lz4Codec()
_ZSTD = ZstdCodec()
_ALL: tuple[Codec, ...] = (NONE, _LZ4, _ZSTD, PlanesCodec(3, _LZ4), PlanesCodec(4, _ZSTD))

CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}
CODECS_BY_ID: dict[int, Codec] = {codec.codec_id: codec for codec in _ALL}


def encode(codec: Codec, payload: memoryview, layout: Layout) -> tuple[int, Buffer]:
    """The codec id and stored form of ``payload``: as it is, under id 0, where the codec does not make it smaller."""
    stored = codec.encode(payload, layout)
    return (codec.codec_id, stored) if len(stored) < len(payload) else (NONE.codec_id, payload)
