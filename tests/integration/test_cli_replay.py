"""``kvstore replay`` as a person or a script meets it: in a process of its own."""

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner, Result

from kvstore.__main__ import app
from kvstore.errors import KVStoreError
from tests.integration.test_cli import assert_error, kvstore

AGENTS = Path(__file__).parents[2] / "bench" / "traces" / "lmcache_agent.csv.gz"
LINE = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'


def replay(*words: str) -> Result:
    """The command within this process, which is faster."""
    result = CliRunner().invoke(app, ["replay", *words])
    assert result.exit_code == 0, result.exception
    return result


def refusal(*words: str) -> str:
    with pytest.raises(KVStoreError) as caught:
        CliRunner().invoke(app, ["replay", *words], catch_exceptions=False)
    return str(caught.value)


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
    table = replay(str(path), "--capacity", "2", "--policy", "default,infinite").stdout
    assert "default" in table
    assert "75.00%" in table


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
    result = replay(str(packed), "--policy", "infinite", "--capacity", "1", "--json")
    assert json.loads(result.stdout)["token_hit_rate"] == 0.75
    for broken in (content[:-9], b"nonsense", content[:20] + b"nonsense" + content[28:]):
        packed.write_bytes(broken)
        assert "cannot be read" in refusal(str(packed))


CHATS = [
    {"conversations": [{"from": "human", "value": "please " * 40}, {"from": "gpt", "value": "yes " * 9}]},
    {"conversations": [{"from": "human", "value": "please " * 41}, {"from": "gpt", "value": "no " * 9}]},
]


def test_chats_say_how_tokens_were_counted(path: Path) -> None:
    path.write_text(json.dumps(CHATS))
    words = (str(path), "--policy", "infinite", "--capacity", "1", "--json")
    estimated = replay(*words)
    assert "estimated" in estimated.stderr
    tokenizer = Tokenizer(models.WordLevel({"please": 0, "?": 1}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    file = path.with_name("tokenizer.json")
    tokenizer.save(str(file))
    exact = replay(*words, "--tokenizer", str(file))
    assert "estimated" not in exact.stderr
    assert "made up" in exact.stderr
    rates = [json.loads(result.stdout)["token_hit_rate"] for result in (estimated, exact)]
    assert rates == [pytest.approx(rate, abs=1e-6) for rate in (4 * 16 / (73 + 75), 2 * 16 / (43 + 44))]
    file.write_text("{}")
    assert "no tokenizer.json" in refusal(*words, "--tokenizer", str(file))


def test_several_traces_at_once(path: Path) -> None:
    result = replay(str(path), str(AGENTS), "--policy", "infinite", "--capacity", "1", "--json")
    assert [json.loads(line)["trace"] for line in result.stdout.splitlines()] == ["t.jsonl", AGENTS.name]


def test_tiers_and_engines(path: Path) -> None:
    words = (str(path), "--tiers", "memory=1,shared=100%", "--engines", "2", "--policy", "lru,gdsf")
    rows = [json.loads(line) for line in replay(*words, "--share", "nothing", "--json").stdout.splitlines()]
    assert [row["policy"] for row in rows] == ["lru", "gdsf"]
    # Of four requests each engine gets two; loading the second block from far away is slower than to compute it.
    assert rows[0]["tiers"]["memory"] == {
        "capacity_blocks": 2,
        "token_hit_rate": 0.25,
        "written_bytes": 2 * 512 * 128 * 1024,
    }
    assert rows[0]["tiers"]["shared"]["token_hit_rate"] == 0.0
    assert rows[0]["declined_token_rate"] == 0.25
    assert set(rows[0]["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    profile = path.with_name("fast.toml")
    profile.write_text('[shared]\nbandwidth = "100GB"\nlatency = "0"\n')
    [row] = replay(*words[:-2], "--policy", "default", "--hardware", str(profile), "--json").stdout.splitlines()
    assert json.loads(row)["hardware"] == "fast"
    assert json.loads(row)["token_hit_rate"] == 0.75
    table = replay(*words)
    assert "TTFT p50" in table.stdout


def test_a_report_is_written_and_said(path: Path) -> None:
    report = path.with_name("report.html")
    result = replay(str(path), "--policy", "default", "--capacity", "1,2", "--html", str(report), "--json")
    assert f"wrote {report}" in result.stderr
    assert [json.loads(line)["policy"] for line in result.stdout.splitlines()][::2] == [
        *("default", "lru", "belady", "infinite")
    ]
    assert "<h2>t</h2>" in report.read_text()
    assert "cannot be written" in refusal(str(path), "--html", str(path.with_name("no") / "x"))


def test_a_mistake_is_one_line(path: Path) -> None:
    assert_error(kvstore("replay", str(path.with_name("none"))), "none", "cannot be read")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--policy", "fancy"), ("fancy", "belady")),
        (("--capacity", "lots"), ("lots", "64GiB")),
        (("--tiers", "attic=1"), ("attic=1", "hbm")),
        (("--tiers", ","), ("names no tier", "memory")),
        (("--tiers", "memory=1", "--policy", "belady"), ("belady", "gdsf")),
        (("--tiers", "memory=1", "--share", "all"), ("all", "sidecar")),
        (("--tiers", "memory=1", "--routing", "x"), ("'x'", "sticky")),
        (("--hardware", "abacus"), ("abacus", "h100-8b")),
    ],
)
def test_mistakes_name_what_would_do(path: Path, words: tuple[str, ...], told: tuple[str, ...]) -> None:
    message = refusal(str(path), *words)
    assert all(word in message for word in told)
