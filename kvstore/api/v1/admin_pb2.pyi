from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SidecarStats(_message.Message):
    __slots__ = ("version", "uptime_s", "samples", "clients", "namespaces")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_s: float
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    clients: _containers.RepeatedCompositeFieldContainer[ClientStats]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    def __init__(self, version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., clients: _Optional[_Iterable[_Union[ClientStats, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("metric", "labels", "value")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    metric: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    value: float
    def __init__(self, metric: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., value: _Optional[float] = ...) -> None: ...

class ClientStats(_message.Message):
    __slots__ = ("name", "incarnation", "num_reads", "num_writes", "num_quarantined_slots", "idle_ticks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_READS_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITES_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_TICKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    num_reads: int
    num_writes: int
    num_quarantined_slots: int
    idle_ticks: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., num_reads: _Optional[int] = ..., num_writes: _Optional[int] = ..., num_quarantined_slots: _Optional[int] = ..., idle_ticks: _Optional[int] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("digest", "model", "block_bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    model: str
    block_bytes: int
    def __init__(self, digest: _Optional[bytes] = ..., model: _Optional[str] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class EvictBlocksRequest(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class ClearNamespaceRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class CheckTablesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TableCheck(_message.Message):
    __slots__ = ("broken",)
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    broken: str
    def __init__(self, broken: _Optional[str] = ...) -> None: ...

class BlockCount(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
