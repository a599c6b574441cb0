"""What the Redis tier promises, against a real server: what lies there, for how long, and what of it is believed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvstore.codecs.registry import CODECS
from kvstore.errors import ConfigError
from kvstore.hashing import Identity, block_keys, namespace_digest
from kvstore.header import HEADER_BYTES, Header, checksum, parse
from kvstore.layout import Layout
from kvstore.testing.valkey import ValkeyServer
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_value import PART_BYTES, name
from kvstore.types import BlockKey, Outcome
from tests.redis_blocks import LAYOUT, NAMESPACE, WHOLE, are_right, content, empty, full, key, keys, probed, soon

OK, ABSENT, DAMAGED, FOREIGN = Outcome.OK, Outcome.ABSENT, Outcome.DAMAGED, Outcome.FOREIGN


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
def raw(server: ValkeyServer) -> Iterator[Any]:
    """The server itself, behind the tier's back; empty."""
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def open_tier(server: ValkeyServer, raw: Any) -> Iterator[Callable[..., RedisTier]]:
    tiers: list[RedisTier] = []

    def open_one(url: str = server.unix_url, **options: object) -> RedisTier:
        tiers.append(RedisTier(url, **options))  # type: ignore[arg-type]  # each test names real options
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close()


@pytest.fixture
def tier(open_tier: Callable[..., RedisTier]) -> RedisTier:
    return open_tier()


def store(tier: RedisTier, *of: BlockKey, layout: Layout = LAYOUT) -> None:
    assert tier.write(full(of, layout), soon()) == [OK] * len(of)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_what_was_written_is_read(
    open_tier: Callable[..., RedisTier], server: ValkeyServer, codec: str, transport: str
) -> None:
    tier = open_tier(server.unix_url if transport == "unix" else server.url, codec=codec)
    store(tier, *keys(40))
    moves = empty(keys(41))
    assert tier.read(moves, soon()) == [OK] * 40 + [ABSENT]
    assert are_right(moves[:40])


@pytest.mark.parametrize("codec", CODECS)
def test_a_reader_needs_no_codec_of_its_own(open_tier: Callable[..., RedisTier], codec: str) -> None:
    writer, reader = open_tier(codec=codec), open_tier()
    payload = memoryview(bytearray(LAYOUT.block_bytes))  # compresses
    (move,) = full([key(1)])
    assert writer.write([replace(move, buffer=payload)], soon()) == [OK]
    (got,) = empty([key(1)])
    assert reader.read([got], soon()) == [OK]
    assert got.buffer == payload


def test_a_codec_that_wins_saves_room_on_the_server(open_tier: Callable[..., RedisTier], raw: Any) -> None:
    (move,) = full([key(1)])
    zeros = replace(move, buffer=memoryview(bytearray(LAYOUT.block_bytes)))
    assert open_tier(codec="zstd-planes").write([zeros], soon()) == [OK]
    assert int(raw.strlen(name(key(1)))) < LAYOUT.block_bytes // 10


def test_a_block_is_one_self_describing_value(tier: RedisTier, raw: Any) -> None:
    """WK-001: key, layout, length and checksum travel with every payload."""
    parent = key(7)
    (move,) = full([key(1)])
    assert tier.write([replace(move, parent=parent)], soon()) == [OK]
    chain = key(1)[16:].hex()
    assert raw.keys() == [f"tkv1:{NAMESPACE.hex()}:{{{chain}}}".encode()]
    found = parse(raw.get(name(key(1))))
    assert isinstance(found, Header)
    assert (found.key, found.parent, found.fingerprint) == (key(1), parent, LAYOUT.fingerprint)
    assert raw.get(name(key(1)))[HEADER_BYTES:] == content(key(1))


def test_a_second_write_replaces_the_first(tier: RedisTier) -> None:
    store(tier, key(1))
    (move,) = full([key(1)])
    move.buffer[:] = b"\x01" * len(move.buffer)
    assert tier.write([move], soon()) == [OK]
    (got,) = empty([key(1)])
    assert tier.read([got], soon()) == [OK]
    assert got.buffer == move.buffer


def test_longer_buffers_than_blocks_are_left_alone_behind_the_block(tier: RedisTier) -> None:
    store(tier, key(1))
    slot = memoryview(bytearray(b"\xaa" * (LAYOUT.block_bytes + 4096)))
    assert tier.read([replace(*empty([key(1)]), buffer=slot)], soon()) == [OK]
    assert slot[: LAYOUT.block_bytes] == content(key(1))
    assert slot[LAYOUT.block_bytes :] == b"\xaa" * 4096


# How long a block lives ------------------------------------------------------------------------------


def test_a_ttl_is_set_with_the_value(open_tier: Callable[..., RedisTier], raw: Any) -> None:
    store(open_tier(ttl_s=100), key(1))
    assert 90_000 < raw.pttl(name(key(1))) <= 100_000
    store(open_tier(), key(2))
    assert raw.pttl(name(key(2))) == -1


def test_age_limits_the_ttl(open_tier: Callable[..., RedisTier], raw: Any) -> None:
    now = int(time.time())
    moves = [
        *full([key(1)], created_unix_s=now - 50, max_age_s=80),
        *full([key(2)], created_unix_s=now - 50, max_age_s=8000),
    ]
    assert open_tier(ttl_s=100).write(moves, soon()) == [OK, OK]
    assert 20_000 < raw.pttl(name(key(1))) <= 30_000
    assert 90_000 < raw.pttl(name(key(2))) <= 100_000
    assert open_tier().write(full([key(3)], created_unix_s=now - 50, max_age_s=80), soon()) == [OK]
    assert 20_000 < raw.pttl(name(key(3))) <= 30_000


def test_a_block_past_its_age_is_not_written(tier: RedisTier, raw: Any) -> None:
    old = int(time.time()) - 100
    moves = [*full([key(1)], created_unix_s=old, max_age_s=50), *full([key(2)])]
    assert tier.write(moves, soon()) == [ABSENT, OK]
    assert raw.keys() == [name(key(2))]


def test_a_reader_refuses_what_is_too_old_for_it(tier: RedisTier) -> None:
    assert tier.write(full([key(1)], created_unix_s=int(time.time()) - 100), soon()) == [OK]
    assert tier.read(empty([key(1)]), soon()) == [OK]
    assert tier.read(empty([key(1)], max_age_s=50), soon()) == [ABSENT]


def test_a_reader_refuses_what_its_writer_limited(tier: RedisTier, raw: Any) -> None:
    """The limit holds although the server, which may lose a TTL in a restore, still has the value."""
    assert tier.write(full([key(1)], created_unix_s=int(time.time()) - 1, max_age_s=100), soon()) == [OK]
    raw.persist(name(key(1)))
    value = raw.get(name(key(1)))
    found = parse(value)
    assert isinstance(found, Header)
    raw.set(name(key(1)), found._replace(expires_unix_s=int(time.time())).pack() + value[HEADER_BYTES:])
    assert tier.read(empty([key(1)]), soon()) == [ABSENT]


def test_renewing_starts_the_ttl_afresh(open_tier: Callable[..., RedisTier], raw: Any) -> None:
    tier = open_tier(ttl_s=100)
    store(tier, key(1), key(2))
    for one in (key(1), key(2)):
        raw.pexpire(name(one), 5000)
    tier.renew([key(1), key(9)], soon())
    assert raw.pttl(name(key(1))) > 90_000
    assert raw.pttl(name(key(2))) <= 5000
    assert not raw.exists(name(key(9)))


def test_renewing_never_goes_beyond_the_age(open_tier: Callable[..., RedisTier], raw: Any) -> None:
    tier = open_tier(ttl_s=100)
    assert tier.write(full([key(1)], created_unix_s=int(time.time()) - 50, max_age_s=80), soon()) == [OK]
    raw.pexpire(name(key(1)), 5000)
    open_tier(ttl_s=100).renew([key(1)], soon())
    assert 20_000 < raw.pttl(name(key(1))) <= 30_000


def test_renewing_leaves_foreign_values_alone(open_tier: Callable[..., RedisTier], raw: Any) -> None:
    raw.set(name(key(1)), b"not ours", px=5000)
    open_tier(ttl_s=100).renew([key(1)], soon())
    assert raw.pttl(name(key(1))) <= 5000


# What of it is believed ------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 9, 30, 200, 250, HEADER_BYTES, HEADER_BYTES + 500, -1])
@pytest.mark.parametrize("codec", ["none", "zstd-planes"])
def test_a_flipped_bit_is_damage(open_tier: Callable[..., RedisTier], raw: Any, offset: int, codec: str) -> None:
    """WK-052: one flipped bit anywhere in a value is a miss, and the block is gone once it is erased."""
    tier = open_tier(codec=codec)
    (move,) = full([key(1)])
    move.buffer[: LAYOUT.block_bytes // 2] = bytes(LAYOUT.block_bytes // 2)
    assert tier.write([move], soon()) == [OK]
    value = bytearray(raw.get(name(key(1))))
    value[offset] ^= 4
    raw.set(name(key(1)), bytes(value))
    (got,) = empty([key(1)])
    expected = FOREIGN if offset == 9 else DAMAGED  # byte 9 is the format version
    assert tier.read([got], soon()) == [expected]
    tier.erase([got])
    assert tier.read([got], soon()) == [ABSENT]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"x",
        bytes(HEADER_BYTES - 1),
        b"\xa5" * (HEADER_BYTES + LAYOUT.block_bytes),
        b"\x80\x04\x95pickle me",
        bytes(40 << 20),
    ],
    ids=["empty", "one byte", "short", "random", "pickle", "huge"],
)
def test_junk_under_a_blocks_name_is_damage(tier: RedisTier, raw: Any, value: bytes) -> None:
    """CR-029, SE-001, SE-006: whatever somebody puts there is bytes that do not verify; neighbours are served."""
    store(tier, key(1), key(2), key(3))
    raw.set(name(key(2)), value)
    moves = empty([key(1), key(2), key(3)])
    assert tier.read(moves, soon()) == [OK, DAMAGED, OK]
    assert are_right([moves[0], moves[2]])


def test_a_value_of_another_type_is_damage(tier: RedisTier, raw: Any) -> None:
    raw.rpush(name(key(1)), b"a list")
    assert tier.read(empty([key(1)]), soon()) == [DAMAGED]
    tier.erase(empty([key(1)]))
    assert raw.keys() == []


def test_another_blocks_value_is_damage(tier: RedisTier, raw: Any) -> None:
    """WK-001: intact bytes under the wrong name are nobody's bytes."""
    store(tier, key(1), key(2))
    raw.copy(name(key(1)), name(key(2)), replace=True)
    assert tier.read(empty([key(1), key(2)]), soon()) == [OK, DAMAGED]


@pytest.mark.parametrize("change", [-1, +1, -HEADER_BYTES])
def test_a_value_of_the_wrong_length_is_damage(tier: RedisTier, raw: Any, change: int) -> None:
    store(tier, key(1))
    value = raw.get(name(key(1)))
    raw.set(name(key(1)), value + b"x" if change > 0 else value[:change])
    assert tier.read(empty([key(1)]), soon()) == [DAMAGED]


def test_bf16_stored_and_fp16_asked_is_foreign(tier: RedisTier) -> None:
    """One key and two layouts of equal size cannot happen through namespaces; if it does, it is no hit."""
    store(tier, key(1))
    half = replace(LAYOUT, dtype="float16")
    assert half.block_bytes == LAYOUT.block_bytes
    assert tier.read(empty([key(1)], half), soon()) == [FOREIGN]
    assert tier.read(empty([key(1)]), soon()) == [OK]


@pytest.mark.parametrize("version", [0, 2, 99])
def test_other_format_versions_are_foreign_and_stay(tier: RedisTier, raw: Any, version: int) -> None:
    store(tier, key(1))
    value = bytearray(raw.get(name(key(1))))
    value[8:10] = version.to_bytes(2, "little")
    raw.set(name(key(1)), bytes(value))
    assert tier.read(empty([key(1)]), soon()) == [FOREIGN]
    assert raw.get(name(key(1))) == bytes(value)


def forged(raw: Any, of: BlockKey, payload: bytes, **fields: int) -> None:
    """A value whose header is consistent in itself and lies about the payload."""
    found = parse(raw.get(name(of)))
    assert isinstance(found, Header)
    honest = {"stored_bytes": len(payload), "checksum": checksum(payload)}
    lie = found._replace(**(honest | fields))  # type: ignore[arg-type]  # the integer fields only
    raw.set(name(of), lie.pack() + payload)


def test_a_codec_nobody_knows_is_foreign(tier: RedisTier, raw: Any) -> None:
    store(tier, key(1))
    forged(raw, key(1), content(key(1)), codec_id=200)
    assert tier.read(empty([key(1)]), soon()) == [FOREIGN]


@pytest.mark.parametrize(
    ("payload", "fields"),
    [
        (content(key(1))[:-2], {}),
        (b"zzz", {"codec_id": 2}),
        (b"zzz", {"codec_id": 1}),
        (content(key(1)), {"stored_bytes": 1 << 60}),
        (content(key(1)), {"stored_bytes": 1 << 60, "codec_id": 2}),
        (content(key(1)), {"stored_bytes": 7, "codec_id": 2}),
        (content(key(1)), {"block_bytes": 1 << 40}),
        (content(key(1)), {"checksum": 5}),
    ],
)
def test_headers_that_lie_are_damage(tier: RedisTier, raw: Any, payload: bytes, fields: dict[str, int]) -> None:
    """SE-006: sizes are believed only as far as a block goes."""
    store(tier, key(1))
    forged(raw, key(1), payload, **fields)
    assert tier.read(empty([key(1)]), soon()) == [DAMAGED]


# Blocks in parts -------------------------------------------------------------------------------------


def test_a_large_block_goes_in_parts_of_one_hash_tag(open_tier: Callable[..., RedisTier], raw: Any) -> None:
    tier = open_tier(ttl_s=100)
    store(tier, key(1), layout=WHOLE)
    names = [name(key(1)), name(key(1), 1), name(key(1), 2)]
    assert sorted(raw.keys()) == names
    assert len({one[one.index(b"{") : one.index(b"}")] for one in names}) == 1
    assert [raw.strlen(one) for one in names] == [HEADER_BYTES + PART_BYTES, PART_BYTES, PART_BYTES]
    assert all(raw.pttl(one) > 90_000 for one in names)
    (got,) = empty([key(1)], WHOLE)
    assert tier.read([got], soon()) == [OK]
    assert are_right([got])

    for one in names:
        raw.pexpire(one, 5000)
    tier.renew([key(1)], soon())
    assert all(raw.pttl(one) > 90_000 for one in names)

    assert tier.clear(NAMESPACE, soon()) == 1
    assert raw.keys() == []


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_missing_part_is_a_miss(tier: RedisTier, raw: Any, part: int) -> None:
    """WK-002, WK-003: nothing is served of a block that is not whole."""
    store(tier, key(1), layout=WHOLE)
    store(tier, key(2))
    raw.delete(name(key(1), part))
    assert tier.read([*empty([key(1)], WHOLE), *empty([key(2)])], soon()) == [ABSENT, OK]
    tier.erase(empty([key(1)], WHOLE))
    assert raw.keys() == [name(key(2))]


def test_a_part_of_another_write_is_damage(tier: RedisTier, raw: Any) -> None:
    """WK-060: two writers whose parts mix leave a block that does not verify."""
    store(tier, key(1), layout=WHOLE)
    raw.set(name(key(1), 1), b"\x01" * PART_BYTES)
    assert tier.read(empty([key(1)], WHOLE), soon()) == [DAMAGED]
    raw.set(name(key(1), 1), b"short")
    assert tier.read(empty([key(1)], WHOLE), soon()) == [DAMAGED]


def test_parts_left_over_from_a_longer_payload_do_no_harm(open_tier: Callable[..., RedisTier], raw: Any) -> None:
    tier = open_tier(codec="zstd")
    store(tier, key(1), layout=WHOLE)
    (move,) = full([key(1)], WHOLE)
    zeros = replace(move, buffer=memoryview(bytearray(WHOLE.block_bytes)))
    assert tier.write([zeros], soon()) == [OK]
    assert raw.exists(name(key(1), 2))
    (got,) = empty([key(1)], WHOLE)
    assert tier.read([got], soon()) == [OK]
    assert got.buffer == zeros.buffer


# The further capabilities ----------------------------------------------------------------------------


def test_probing_tells_what_the_server_has_now(tier: RedisTier, raw: Any) -> None:
    """CR-022: nothing is remembered; what the server evicted is gone from the next answer."""
    store(tier, *keys(3))
    assert probed(tier, keys(5), soon()) == [True, True, True, False, False]
    raw.delete(name(key(1)))
    assert probed(tier, keys(5), soon()) == [True, False, True, False, False]
    many = keys(3000)
    assert probed(tier, many, soon()).count(True) == 2


@pytest.mark.parametrize("deadline_s", [float("inf"), 1e12])
def test_a_deadline_may_be_as_far_as_one_likes(tier: RedisTier, deadline_s: float) -> None:
    assert tier.write(full([key(1)]), deadline_s) == [OK]
    assert probed(tier, [key(1)], deadline_s) == [True]
    assert tier.read(empty([key(1)]), deadline_s) == [OK]


def test_clearing_takes_one_namespace_and_says_how_much(tier: RedisTier, raw: Any) -> None:
    other = bytes(16)
    store(tier, *keys(2500))
    store(tier, *keys(3, other))
    raw.set(b"somebody's", b"key")
    assert tier.clear(NAMESPACE, soon(20)) == 2500
    assert probed(tier, keys(2500), soon()) == [False] * 2500
    assert probed(tier, keys(3, other), soon()) == [True] * 3
    assert raw.exists(b"somebody's")
    assert tier.clear(NAMESPACE, soon()) == 0


def test_tenants_with_another_salt_have_other_names(tier: RedisTier, raw: Any) -> None:
    """SE-007, SE-008: the same tokens under another salt are not there, to be read, probed or cleared."""
    a, b = (namespace_digest(Identity(model="m", weights=b"w", salt=salt), LAYOUT) for salt in ("a", "b"))
    ours, theirs = (block_keys(ns, range(64), LAYOUT.tokens_per_block) for ns in (a, b))
    store(tier, *ours)
    assert tier.read(empty(theirs), soon()) == [ABSENT] * 4
    assert probed(tier, theirs, soon()) == [False] * 4
    assert tier.clear(b, soon()) == 0
    assert probed(tier, ours, soon()) == [True] * 4


@pytest.mark.parametrize("namespace", [b"*" * 16, b"[a-z]?*\\*\r\n\0../."])
def test_no_namespace_is_a_pattern(tier: RedisTier, raw: Any, namespace: bytes) -> None:
    """SE-012: names are hex, so nothing in them means anything to the server."""
    store(tier, *keys(3), key(5, namespace))
    assert tier.clear(namespace, soon()) == 1
    assert len(raw.keys()) == 3


def test_erasing_takes_what_it_is_told(tier: RedisTier) -> None:
    store(tier, *keys(3))
    tier.erase(empty([key(1), key(9)]))
    assert probed(tier, keys(3), soon()) == [True, False, True]


def test_a_shared_tier_has_nothing_to_scan(tier: RedisTier) -> None:
    store(tier, key(1))
    assert list(tier.scan()) == []


def test_a_closed_tier_misses(tier: RedisTier) -> None:
    store(tier, key(1))
    tier.close()
    tier.close()
    assert tier.read(empty([key(1)]), soon()) == [Outcome.FAILED]
    assert tier.write(full([key(1)]), soon()) == [Outcome.FAILED]
    assert tier.probe([key(1)], soon()) == [Outcome.FAILED]
    assert tier.clear(NAMESPACE, soon()) is None
    tier.renew([key(1)], soon())
    tier.erase(empty([key(1)]))


def test_empty_batches_cost_nothing(tier: RedisTier) -> None:
    assert tier.write([], soon()) == []
    assert tier.read([], soon()) == []
    assert probed(tier, [], soon()) == []
    tier.erase([])
    tier.renew([], soon())


def test_a_past_deadline_is_late_at_once(tier: RedisTier) -> None:
    store(tier, key(1))
    assert tier.read(empty([key(1)]), time.monotonic() - 1) == [Outcome.LATE]
    assert tier.write(full([key(1)]), time.monotonic() - 1) == [Outcome.LATE]
    assert tier.read(empty([key(1)]), soon()) == [OK]


# Configuration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://:secret@host", "begins with none of redis://"),
        ("redis://user:secret@host:port", "port"),
        ("redis://user:secret@host:70000", "port"),
        ("redis://user:secret@", "no host"),
        ("redis://user:secret@host/x", "database"),
        ("redis://user:secret@host?timeout=5", "option"),
        ("unix://", "no socket"),
        ("redis+sentinel://user:secret@host", "service"),
        ("redis+cluster://user:secret@host,,", "no host"),
    ],
)
def test_a_url_that_cannot_be_used_is_said_so_without_the_password(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        RedisTier(url)
    assert "secret" not in str(caught.value)


def test_unknown_codecs_and_missing_tls_files_are_errors() -> None:
    with pytest.raises(ConfigError, match="zstd-planes"):
        RedisTier("redis://host", codec="zstd-plane")
    with pytest.raises(ConfigError, match="tls_ca_file"):
        RedisTier("rediss://host", tls_ca_file="/nowhere/ca.pem")
