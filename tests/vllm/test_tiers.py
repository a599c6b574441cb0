"""A prompt served from every tier: its tokens are those of vLLM without a connector, and vLLM counts the hit."""

from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.valkey import ValkeyServer
from tests.vllm.engine import EngineProcess, engine
from tests.vllm.prompts import CROWD, NUM_TOKENS, PAGE_TOKENS, PROMPT

pytestmark = pytest.mark.engine

WHOLE_BLOCKS = 10 * PAGE_TOKENS
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
Expected = dict[str, list[list[int]]]


def store_in(directory: Path, **more: object) -> dict[str, Any]:
    return {
        "memory": {"capacity": "64MiB"},
        "file": {"directories": [str(directory)], "capacity": "128MiB"},
        **more,
    }


def ask(process: EngineProcess) -> tuple[list[int], int]:
    answer = process.generate([PROMPT], NUM_TOKENS)[0]
    return answer["tokens"], answer["cached"]


def test_every_tier_gives_the_tokens_of_vllm_alone(model: Path, expected: Expected, tmp_path: Path) -> None:
    (tokens,) = expected["one"]
    with ValkeyServer() as valkey:
        redis = {"redis": {"url": valkey.url}}
        with engine(model, tmp_path / "1.log", store=store_in(tmp_path / "kv", **redis)) as first:
            assert ask(first) == (tokens, 0)
            assert first.numbers()["external_prefix_cache_hits"] == 0
            first.reset(False)
            assert ask(first) == (tokens, WHOLE_BLOCKS), "from RAM"
            assert first.numbers()["external_prefix_cache_hits"] == WHOLE_BLOCKS
            assert first.numbers()["kvstore_loaded_tokens/memory"] == WHOLE_BLOCKS
            assert set(first.held().values()) == {0}, "something leaks"
        with engine(model, tmp_path / "2.log", store=store_in(tmp_path / "kv")) as restarted:
            assert ask(restarted) == (tokens, WHOLE_BLOCKS), "from files, after a restart"
            assert restarted.numbers()["kvstore_loaded_tokens/file"] == WHOLE_BLOCKS
            restarted.scribble()
            restarted.reset(False)
            wrong, cached = ask(restarted)
            assert cached == WHOLE_BLOCKS
            assert wrong != tokens, "what is loaded is not what is computed with"
        with engine(model, tmp_path / "3.log", store=store_in(tmp_path / "fresh", **redis)) as elsewhere:
            assert ask(elsewhere) == (tokens, WHOLE_BLOCKS), "from Redis, on another host"
            assert elsewhere.numbers()["kvstore_loaded_tokens/redis"] == WHOLE_BLOCKS
    damage(tmp_path / "kv")
    with engine(model, tmp_path / "4.log", store=store_in(tmp_path / "kv")) as damaged:
        assert ask(damaged) == (tokens, 0), "a damaged block is a miss"


def damage(directory: Path) -> None:
    """Flip a bit in every page of disk that holds anything of a block."""
    damaged = 0
    for file in directory.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 20:
            content = bytearray(file.read_bytes())
            for offset in range(0, len(content), 4096):
                if any(content[offset : offset + 4096]):
                    content[offset + 100] ^= 0x10
                    damaged += 1
            file.write_bytes(content)
    assert damaged > 10


def test_a_crowd_is_preempted_and_leaves_nothing_behind(model: Path, expected: Expected, tmp_path: Path) -> None:
    pages = 60 * PAGE_TOKENS * 2 * 3 * 2 * 32 * 4  # tokens, K and V, layers, heads, dim, float32
    few: dict[str, Any] = {"kv_cache_memory_bytes": pages, "max_num_batched_tokens": 256, "max_model_len": 512}
    with engine(model, tmp_path / "1.log", store={"memory": {"capacity": "64MiB"}}, **few) as crowded:
        for _ in range(2):
            answers = crowded.generate(CROWD, NUM_TOKENS)
            assert [answer["tokens"] for answer in answers] == expected["crowd"]
            assert set(crowded.held().values()) == {0}
            crowded.reset(False)
        numbers = crowded.numbers()
        assert numbers["num_preemptions"] > 0
        assert numbers["external_prefix_cache_hits"] > 24 * 4 * PAGE_TOKENS


def test_speculation_changes_neither_tokens_nor_hits(model: Path, tmp_path: Path) -> None:
    """SC-010: wrong guesses are not stored, and a turn that goes on from an answer finds it, guessed or not."""
    answers = []
    ways: dict[str, dict[str, Any]] = {"plain": {}, "guessing": {"speculative_config": NGRAMS}}
    for name, more in ways.items():
        with engine(model, tmp_path / f"{name}.log", store={"memory": {"capacity": "64MiB"}}, **more) as process:
            prompt, turns = PROMPT, []
            for _ in range(3):
                turns += process.generate([prompt], NUM_TOKENS)
                prompt = [*prompt, *turns[-1]["tokens"], 17, 19]
                process.reset(False)
            answers.append(turns)
            numbers = process.numbers()
    assert numbers["spec_decode_num_draft_tokens"] > numbers["spec_decode_num_accepted_tokens"], "nothing was wrong"
    assert answers[0] == answers[1]
    assert [turn["cached"] for turn in answers[0]] == [0, 11 * PAGE_TOKENS, 12 * PAGE_TOKENS]


@pytest.mark.full
def test_nothing_of_before_a_sleep_is_served_after_it(model: Path, expected: Expected, tmp_path: Path) -> None:
    """VLLM resets its connector when it sleeps, since weights may be changed meanwhile; it waits for our copies."""
    (tokens,) = expected["one"]
    with engine(model, tmp_path / "1.log", store=store_in(tmp_path / "kv"), processes=True) as process:
        assert ask(process) == (tokens, 0)
        process.sleep()
        assert ask(process) == (tokens, 0)
        process.reset(False)
        assert ask(process) == (tokens, WHOLE_BLOCKS)
    with engine(model, tmp_path / "2.log", store=store_in(tmp_path / "kv")) as restarted:
        assert ask(restarted) == (tokens, 0)
