from kvstore.api.v1 import kvstore_pb2 as _kvstore_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NamespaceOf(_message.Message):
    __slots__ = ("identity", "layout")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    identity: _kvstore_pb2.Identity
    layout: _kvstore_pb2.Layout
    def __init__(self, identity: _Optional[_Union[_kvstore_pb2.Identity, _Mapping]] = ..., layout: _Optional[_Union[_kvstore_pb2.Layout, _Mapping]] = ...) -> None: ...

class FindBlocksRequest(_message.Message):
    __slots__ = ("of", "chain")
    OF_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    of: NamespaceOf
    chain: _kvstore_pb2.Chain
    def __init__(self, of: _Optional[_Union[NamespaceOf, _Mapping]] = ..., chain: _Optional[_Union[_kvstore_pb2.Chain, _Mapping]] = ...) -> None: ...

class LoadBlocksRequest(_message.Message):
    __slots__ = ("of", "chain")
    OF_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    of: NamespaceOf
    chain: _kvstore_pb2.Chain
    def __init__(self, of: _Optional[_Union[NamespaceOf, _Mapping]] = ..., chain: _Optional[_Union[_kvstore_pb2.Chain, _Mapping]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("index", "data", "checksum")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    checksum: int
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class StorePart(_message.Message):
    __slots__ = ("of", "chain", "parent", "part")
    OF_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    of: NamespaceOf
    chain: _kvstore_pb2.Chain
    parent: bytes
    part: Part
    def __init__(self, of: _Optional[_Union[NamespaceOf, _Mapping]] = ..., chain: _Optional[_Union[_kvstore_pb2.Chain, _Mapping]] = ..., parent: _Optional[bytes] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class StoreBlocksReply(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
