from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("server", "last")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    server: bytes
    last: int
    def __init__(self, server: _Optional[bytes] = ..., last: _Optional[int] = ...) -> None: ...

class Changes(_message.Message):
    __slots__ = ("server", "last", "is_new_beginning", "runs")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_BEGINNING_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    server: bytes
    last: int
    is_new_beginning: bool
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    def __init__(self, server: _Optional[bytes] = ..., last: _Optional[int] = ..., is_new_beginning: bool = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("is_here", "tier", "namespace", "digest_bytes", "digests", "parent")
    IS_HERE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    is_here: bool
    tier: str
    namespace: bytes
    digest_bytes: int
    digests: bytes
    parent: bytes
    def __init__(self, is_here: bool = ..., tier: _Optional[str] = ..., namespace: _Optional[bytes] = ..., digest_bytes: _Optional[int] = ..., digests: _Optional[bytes] = ..., parent: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("refused", "client", "arena_bytes", "pages_stay")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_STAY_FIELD_NUMBER: _ClassVar[int]
    refused: str
    client: bytes
    arena_bytes: int
    pages_stay: bool
    def __init__(self, refused: _Optional[str] = ..., client: _Optional[bytes] = ..., arena_bytes: _Optional[int] = ..., pages_stay: bool = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("call", "register", "pong", "open_namespace", "arrive", "finish", "lookup", "prefetch", "pin", "reserve", "commit", "end_leases", "clear", "evict", "acknowledge", "reserve_stripes", "commit_stripes")
    CALL_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    OPEN_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ARRIVE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    END_LEASES_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_STRIPES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_STRIPES_FIELD_NUMBER: _ClassVar[int]
    call: int
    register: Register
    pong: Pong
    open_namespace: OpenNamespace
    arrive: Arrive
    finish: Finish
    lookup: Lookup
    prefetch: Prefetch
    pin: Pin
    reserve: Reserve
    commit: Commit
    end_leases: EndLeases
    clear: Clear
    evict: Evict
    acknowledge: Acknowledge
    reserve_stripes: ReserveStripes
    commit_stripes: CommitStripes
    def __init__(self, call: _Optional[int] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., open_namespace: _Optional[_Union[OpenNamespace, _Mapping]] = ..., arrive: _Optional[_Union[Arrive, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., lookup: _Optional[_Union[Lookup, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., pin: _Optional[_Union[Pin, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., end_leases: _Optional[_Union[EndLeases, _Mapping]] = ..., clear: _Optional[_Union[Clear, _Mapping]] = ..., evict: _Optional[_Union[Evict, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ..., reserve_stripes: _Optional[_Union[ReserveStripes, _Mapping]] = ..., commit_stripes: _Optional[_Union[CommitStripes, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("client", "incarnation", "name")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    client: bytes
    incarnation: int
    name: str
    def __init__(self, client: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class OpenNamespace(_message.Message):
    __slots__ = ("namespace", "identity", "layout", "max_age_s", "prefill_tokens_per_s")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    identity: Identity
    layout: Layout
    max_age_s: int
    prefill_tokens_per_s: int
    def __init__(self, namespace: _Optional[int] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., max_age_s: _Optional[int] = ..., prefill_tokens_per_s: _Optional[int] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("model", "weights", "revision", "salt", "adapter", "adapter_version", "epoch", "hash_scheme")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: bytes
    revision: str
    salt: str
    adapter: str
    adapter_version: str
    epoch: int
    hash_scheme: str
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[bytes] = ..., revision: _Optional[str] = ..., salt: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_version: _Optional[str] = ..., epoch: _Optional[int] = ..., hash_scheme: _Optional[str] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("dtype", "num_layers", "num_heads", "plane_dims", "tokens_per_block", "quantisation", "engine_format", "num_stripes")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    PLANE_DIMS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    NUM_STRIPES_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    num_layers: int
    num_heads: int
    plane_dims: _containers.RepeatedScalarFieldContainer[int]
    tokens_per_block: int
    quantisation: str
    engine_format: str
    num_stripes: int
    def __init__(self, dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_heads: _Optional[int] = ..., plane_dims: _Optional[_Iterable[int]] = ..., tokens_per_block: _Optional[int] = ..., quantisation: _Optional[str] = ..., engine_format: _Optional[str] = ..., num_stripes: _Optional[int] = ...) -> None: ...

class Chain(_message.Message):
    __slots__ = ("namespace", "digest_bytes", "digests")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    digest_bytes: int
    digests: bytes
    def __init__(self, namespace: _Optional[int] = ..., digest_bytes: _Optional[int] = ..., digests: _Optional[bytes] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "now_s", "input_tokens", "hints")
    class HintsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bool
        def __init__(self, key: _Optional[str] = ..., value: bool = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    now_s: float
    input_tokens: int
    hints: _containers.ScalarMap[str, bool]
    def __init__(self, request_id: _Optional[str] = ..., now_s: _Optional[float] = ..., input_tokens: _Optional[int] = ..., hints: _Optional[_Mapping[str, bool]] = ...) -> None: ...

class Arrive(_message.Message):
    __slots__ = ("request", "chain")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    request: Request
    chain: Chain
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("request", "chain", "output_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: Request
    chain: Chain
    output_tokens: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class Lookup(_message.Message):
    __slots__ = ("chain",)
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    chain: Chain
    def __init__(self, chain: _Optional[_Union[Chain, _Mapping]] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("chain", "budget_ms")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    chain: Chain
    budget_ms: int
    def __init__(self, chain: _Optional[_Union[Chain, _Mapping]] = ..., budget_ms: _Optional[int] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("chain", "rank", "request_id")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    chain: Chain
    rank: Rank
    request_id: str
    def __init__(self, chain: _Optional[_Union[Chain, _Mapping]] = ..., rank: _Optional[_Union[Rank, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("engine", "index", "num_ranks")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    index: int
    num_ranks: int
    def __init__(self, engine: _Optional[str] = ..., index: _Optional[int] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("namespace", "num_blocks")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    num_blocks: int
    def __init__(self, namespace: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("lease", "chain", "parent", "num_named")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NUM_NAMED_FIELD_NUMBER: _ClassVar[int]
    lease: int
    chain: Chain
    parent: bytes
    num_named: int
    def __init__(self, lease: _Optional[int] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ..., parent: _Optional[bytes] = ..., num_named: _Optional[int] = ...) -> None: ...

class ReserveStripes(_message.Message):
    __slots__ = ("chain", "parent", "rank")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    chain: Chain
    parent: bytes
    rank: Rank
    def __init__(self, chain: _Optional[_Union[Chain, _Mapping]] = ..., parent: _Optional[bytes] = ..., rank: _Optional[_Union[Rank, _Mapping]] = ...) -> None: ...

class CommitStripes(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    def __init__(self, lease: _Optional[int] = ...) -> None: ...

class EndLeases(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leases: _Optional[_Iterable[int]] = ...) -> None: ...

class Clear(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    def __init__(self, namespace: _Optional[int] = ...) -> None: ...

class Evict(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("call", "refused", "registered", "ping", "done", "arrived", "found", "prefetched", "leased", "committed", "counted")
    CALL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    call: int
    refused: Refused
    registered: Registered
    ping: Ping
    done: Done
    arrived: Arrived
    found: Found
    prefetched: Prefetched
    leased: Leased
    committed: Committed
    counted: Counted
    def __init__(self, call: _Optional[int] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., registered: _Optional[_Union[Registered, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., arrived: _Optional[_Union[Arrived, _Mapping]] = ..., found: _Optional[_Union[Found, _Mapping]] = ..., prefetched: _Optional[_Union[Prefetched, _Mapping]] = ..., leased: _Optional[_Union[Leased, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., counted: _Optional[_Union[Counted, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("server", "version", "lease_ms")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    server: bytes
    version: str
    lease_ms: int
    def __init__(self, server: _Optional[bytes] = ..., version: _Optional[str] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("number", "last_pong")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAST_PONG_FIELD_NUMBER: _ClassVar[int]
    number: int
    last_pong: int
    def __init__(self, number: _Optional[int] = ..., last_pong: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Arrived(_message.Message):
    __slots__ = ("keep",)
    KEEP_FIELD_NUMBER: _ClassVar[int]
    keep: int
    def __init__(self, keep: _Optional[int] = ...) -> None: ...

class Found(_message.Message):
    __slots__ = ("ready", "found", "pending")
    READY_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    ready: int
    found: int
    pending: bool
    def __init__(self, ready: _Optional[int] = ..., found: _Optional[int] = ..., pending: bool = ...) -> None: ...

class Prefetched(_message.Message):
    __slots__ = ("ready", "blocks_from")
    class BlocksFromEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    READY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FROM_FIELD_NUMBER: _ClassVar[int]
    ready: int
    blocks_from: _containers.ScalarMap[str, int]
    def __init__(self, ready: _Optional[int] = ..., blocks_from: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Leased(_message.Message):
    __slots__ = ("offsets_bytes", "indices")
    OFFSETS_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    offsets_bytes: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offsets_bytes: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("offsets_bytes", "accepted")
    OFFSETS_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    offsets_bytes: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offsets_bytes: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ...) -> None: ...

class Counted(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
