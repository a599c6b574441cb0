"""A store that records, and what a replay reads from it."""

import json
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvstore import recording
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.hashing import Identity
from kvstore.namespace import Namespace
from kvstore.opening import open_store
from kvstore.recording import Recording
from kvstore.replay import hashed
from kvstore.replay.formats import read_trace
from kvstore.replay.trace import Trace
from kvstore.store import Store
from kvstore.testing.blocks import key_of, layout_of
from kvstore.testing.policy_contract import keys_of, serve
from kvstore.testing.traces import made_up_trace
from kvstore.types import Request
from tests.integration.test_cli import kvstore

LAYOUT = layout_of(4096)


@contextmanager
def recording_store(directory: Path, **settings: object) -> Iterator[tuple[Store, Namespace]]:
    tables = {"memory": {"capacity": "1MiB"}, "record": {"directory": str(directory), **settings}}
    with closing(open_store(Config.from_mapping(tables))) as store:
        yield store, store.open_namespace(Identity("recorded", b"weights"), LAYOUT)


def only_file(directory: Path) -> Path:
    [path] = directory.iterdir()
    return path


def read(path: Path) -> Trace:
    with path.open() as lines:
        return read_trace(path.name, lines)


def request(name: str, *, hints: dict[str, object] | None = None) -> Request:
    return Request(name, 1_700_000_000.25, b"n" * 16, 0, hints or {})


def test_what_was_asked_for_is_what_is_replayed(tmp_path: Path) -> None:
    asked = made_up_trace(60)
    with recording_store(tmp_path / "new") as (store, ns):
        for number, each in enumerate(asked.requests):
            serve(store, ns, Request(str(number), each.now_s, ns.digest, len(each.chain)), each)
    path = only_file(tmp_path / "new")
    assert path.stat().st_mode & 0o777 == 0o600
    trace = read(path)
    assert trace.tokens_per_block == LAYOUT.tokens_per_block
    assert [list(each.chain) for each in trace.requests] == [list(each.chain) for each in asked.requests]
    assert [each.output_tokens for each in trace.requests] == [each.output_tokens for each in asked.requests]
    assert [each.now_s for each in trace.requests] == pytest.approx([each.now_s for each in asked.requests], abs=0.001)
    assert len({each.namespace for each in trace.requests}) == 1
    result = kvstore("replay", str(path), "--policy", "infinite", "--capacity", "1", "--json")
    assert json.loads(result.stdout)["token_hit_rate"] > 0.3


def test_nobody_learns_a_prompt_from_its_hashes(tmp_path: Path) -> None:
    chain = [key_of(number) for number in range(5)]
    for name in ("one", "other"):
        with closing(Recording(tmp_path / name, 1 << 20)) as record:
            record.arrive(request("r"), chain, 16)
            record.finish(request("r"), 3)
    one, other = (only_file(tmp_path / name).read_text() for name in ("one", "other"))
    digits = 12
    assert not any(
        key.hex()[start : start + digits] in one for key in chain for start in range(2 * len(key) - digits + 1)
    )
    assert set(json.loads(one)["hash_ids"]).isdisjoint(json.loads(other)["hash_ids"])
    assert b"n".hex() * 16 not in one


def test_lines_are_in_order_of_the_end_and_are_read_in_order_of_arrival(tmp_path: Path) -> None:
    with closing(Recording(tmp_path, 1 << 20)) as record:
        for number in range(6):
            record.arrive(request(str(number), hints={"session_end": number == 2, "odd": object()}), [], 16)
        for number in (3, 1, 5, 0):
            record.finish(request(str(number)), 10 + number)
        record.finish(request("never came"), 1)
    path = only_file(tmp_path)
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [3, 1, 5, 0, 2, 4]
    requests = list(read(path).requests)
    assert [each.output_tokens for each in requests] == [10, 11, 0, 13, 0, 15]  # what had not ended has no output
    assert [each.hints["session_end"] for each in requests] == [False, False, True, False, False, False]


def test_the_same_name_again_ends_the_request_before(tmp_path: Path) -> None:
    with closing(Recording(tmp_path, 1 << 20)) as record:
        record.arrive(request("r"), [key_of(0)], 16)
        record.arrive(request("r"), [key_of(0), key_of(1)], 16)
        record.finish(request("r"), 9)
    requests = list(read(only_file(tmp_path)).requests)
    assert [(list(each.chain), each.output_tokens) for each in requests] == [([0], 0), ([0, 1], 9)]


def test_of_requests_that_do_not_end_only_so_many_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_PENDING", 3)
    with closing(Recording(tmp_path, 1 << 20)) as record:
        for number in range(5):
            record.arrive(request(str(number)), [], 16)
        record.finish(request("0"), 7)
        record.finish(request("4"), 7)
    assert [each.output_tokens for each in read(only_file(tmp_path)).requests] == [0, 0, 0, 0, 7]


def test_keys_that_wait_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_HELD_BYTES", 48 * 4)
    with closing(Recording(tmp_path, 1 << 20)) as record:
        record.arrive(request("0"), [key_of(number) for number in range(3)], 16)
        record.arrive(request("1"), [key_of(number) for number in range(3)], 16)
        record.finish(request("0"), 7)
        record.arrive(request("too long"), [key_of(number) for number in range(9)], 16)
    assert record.num_left_out >= 1
    first, *_ = read(only_file(tmp_path)).requests
    assert first.output_tokens == 0


def test_readers_put_in_order_as_much_as_may_be_out_of_it() -> None:
    assert hashed.WINDOW >= recording.MAX_PENDING


def test_a_full_budget_ends_the_recording_and_is_counted(tmp_path: Path) -> None:
    with recording_store(tmp_path, capacity="5kB") as (store, ns):
        for number in range(40):
            announced = Request(str(number), 1.0, ns.digest, 8)
            store.arrive(announced, keys_of(ns, range(8)))
            store.finish(announced, [], 1)
        path = only_file(tmp_path)
    num_lines = len(path.read_text().splitlines())
    assert 0 < num_lines < 40
    assert path.stat().st_size <= 5000


def test_a_failed_write_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with recording_store(tmp_path) as (store, ns):
        announced = Request("r", 1.0, ns.digest, 8)
        chain = keys_of(ns, range(500))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            store.arrive(announced, chain)
            assert store._recording is not None
            store._recording.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.arrive(announced, chain) == len(chain)
        assert store.snapshot()["kvstore_unrecorded_requests_total"][()] == 1


def test_a_directory_that_cannot_be_written_is_told_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"record\.directory: .*cannot be written"):
        Recording(tmp_path / "file" / "below", 1)
