"""``kvstore replay`` as a person or a script meets it: in a process of its own."""

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.integration.test_cli import assert_error, kvstore

AGENTS = Path(__file__).parents[2] / "bench" / "traces" / "lmcache_agent.csv.gz"
LINE = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text(LINE * 4)
    return path


def test_one_json_object_for_each_policy_and_capacity() -> None:
    result = kvstore("replay", str(AGENTS), "--policy", "lru,belady", "--capacity", "2%,64,1GiB", "--json")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        (policy, blocks) for policy in ("lru", "belady") for blocks in (138, 64, 128)
    ]
    assert set(rows[0]) == {
        "trace",
        "policy",
        "capacity_blocks",
        "capacity_share",
        "token_hit_rate",
        "compute_weighted_hit_rate",
        "blocks_written_per_referenced",
        "seconds",
    }
    assert rows[0]["trace"] == AGENTS.name
    assert rows[0]["token_hit_rate"] == pytest.approx(0.4575, abs=0.001)
    assert rows[0]["capacity_share"] == pytest.approx(0.02, abs=0.001)
    assert result.stderr == ""


def test_a_table_for_people(path: Path) -> None:
    result = kvstore("replay", str(path), "--capacity", "2", "--policy", "default,infinite")
    assert result.returncode == 0, result.stderr
    assert "default" in result.stdout
    assert "75.00 %" in result.stdout


def test_bad_lines_are_named_and_refused_unless_told_otherwise(path: Path) -> None:
    path.write_text(LINE + "nonsense\n" + LINE + "{}\n" + LINE)
    words = ("replay", str(path), "--policy", "infinite", "--capacity", "1", "--json")
    refused = kvstore(*words)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "line 2: " in refused.stderr
    assert "line 4: " in refused.stderr
    assert "2 bad lines" in refused.stderr
    told = kvstore(*words, "--skip-bad-lines")
    assert told.returncode == 0
    assert json.loads(told.stdout)["token_hit_rate"] == pytest.approx(2 / 3, abs=1e-5)
    assert "line 2: " in told.stderr
    assert "2 bad lines left out" in told.stderr


def test_a_packed_trace_is_read_and_half_of_one_is_not(path: Path) -> None:
    content = gzip.compress(path.read_bytes())
    packed = path.with_suffix(".gz")
    packed.write_bytes(content)
    result = kvstore("replay", str(packed), "--policy", "infinite", "--capacity", "1", "--json")
    assert json.loads(result.stdout)["token_hit_rate"] == 0.75
    for broken in (content[:-9], b"nonsense", content[:20] + b"nonsense" + content[28:]):
        packed.write_bytes(broken)
        assert_error(kvstore("replay", str(packed)), str(packed), "cannot be read")


CHATS = [
    {"conversations": [{"from": "human", "value": "please " * 40}, {"from": "gpt", "value": "yes " * 9}]},
    {"conversations": [{"from": "human", "value": "please " * 41}, {"from": "gpt", "value": "no " * 9}]},
]


def test_chats_say_how_tokens_were_counted(path: Path) -> None:
    path.write_text(json.dumps(CHATS))
    words = ("replay", str(path), "--policy", "infinite", "--capacity", "1", "--json")
    estimated = kvstore(*words)
    assert "estimated" in estimated.stderr
    tokenizer = Tokenizer(models.WordLevel({"please": 0, "?": 1}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    file = path.with_name("tokenizer.json")
    tokenizer.save(str(file))
    exact = kvstore(*words, "--tokenizer", str(file))
    assert "estimated" not in exact.stderr
    assert "made up" in exact.stderr
    rates = [json.loads(result.stdout)["token_hit_rate"] for result in (estimated, exact)]
    assert rates == [pytest.approx(rate, abs=1e-6) for rate in (4 * 16 / (73 + 75), 2 * 16 / (43 + 44))]
    file.write_text("{}")
    assert_error(kvstore(*words, "--tokenizer", str(file)), str(file), "no tokenizer.json")


def test_mistakes_are_one_line(path: Path) -> None:
    assert_error(kvstore("replay", str(path.with_name("none"))), "none", "cannot be read")
    assert_error(kvstore("replay", str(path), "--policy", "fancy"), "fancy", "belady")
    assert_error(kvstore("replay", str(path), "--capacity", "lots"), "lots")
