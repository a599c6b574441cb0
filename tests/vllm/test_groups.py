"""A model whose layers lie in groups, most of them with sliding windows: the tokens of vLLM alone, from every tier."""

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import EngineProcess, engine
from tests.vllm.models import tiny_hybrid
from tests.vllm.prompts import CROWD, NUM_TOKENS, PAGE_TOKENS, PROMPT
from tests.vllm.test_tiers import damage, store_in

pytestmark = pytest.mark.engine

WHOLE_BLOCKS = 10 * PAGE_TOKENS
BRANCH = PROMPT[: 6 * PAGE_TOKENS] + [11, 13, 17] * PAGE_TOKENS
"""Leaves the prompt where its windows have long moved on."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def alone(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM says on its own to the prompt, to its branch, and to the crowd."""
    with engine(hybrid, tmp_path_factory.mktemp("log") / "plain.log") as plain:
        answers = [plain.generate([prompt], NUM_TOKENS)[0]["tokens"] for prompt in (PROMPT, BRANCH)]
        answers += [answer["tokens"] for answer in plain.generate(CROWD, NUM_TOKENS)]
    assert len({tuple(answer) for answer in answers}) == len(answers), "a model that repeats itself shows nothing"
    return answers


def ask(process: EngineProcess, prompt: list[int]) -> tuple[list[int], int]:
    process.reset(False)
    answer = process.generate([prompt], NUM_TOKENS)[0]
    return answer["tokens"], answer["cached"]


def test_every_tier_serves_groups_with_windows(hybrid: Path, alone: list[list[int]], tmp_path: Path) -> None:
    with engine(hybrid, tmp_path / "1.log", store=store_in(tmp_path / "kv")) as first:
        assert ask(first, PROMPT) == (alone[0], 0)
        assert first.numbers()["external_prefix_cache_hits"] == 0
        assert ask(first, PROMPT) == (alone[0], WHOLE_BLOCKS), "from RAM"
        assert first.numbers()["external_prefix_cache_hits"] == WHOLE_BLOCKS
        assert ask(first, BRANCH) == (alone[1], 6 * PAGE_TOKENS), "from the middle of what was computed at once"
        assert set(first.held().values()) == {0}, "something leaks"
    with engine(hybrid, tmp_path / "2.log", store=store_in(tmp_path / "kv")) as restarted:
        assert ask(restarted, PROMPT) == (alone[0], WHOLE_BLOCKS), "from files, after a restart"
        assert restarted.numbers()["kvstore_loaded_tokens/file"] == WHOLE_BLOCKS
        restarted.scribble()
        wrong, cached = ask(restarted, PROMPT)
        assert cached == WHOLE_BLOCKS
        assert wrong != alone[0], "what is loaded is not what is computed with"
    damage(tmp_path / "kv")
    with engine(hybrid, tmp_path / "3.log", store=store_in(tmp_path / "kv")) as damaged:
        assert ask(damaged, PROMPT) == (alone[0], 0), "a damaged block is a miss"


def test_a_crowd_of_groups_is_preempted_and_leaves_nothing_behind(
    hybrid: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    pages = 80 * PAGE_TOKENS * 2 * 2 * 2 * 32 * 4  # tokens, K and V, layers of a group, heads, dim, float32
    few: dict[str, Any] = {"kv_cache_memory_bytes": pages, "max_num_batched_tokens": 256, "max_model_len": 512}
    with engine(hybrid, tmp_path / "1.log", store={"memory": {"capacity": "64MiB"}}, **few) as crowded:
        for _ in range(2):
            answers = crowded.generate(CROWD, NUM_TOKENS)
            assert [answer["tokens"] for answer in answers] == alone[2:]
            assert set(crowded.held().values()) == {0}
            crowded.reset(False)
        numbers = crowded.numbers()
        assert numbers["num_preemptions"] > 0
        assert numbers["external_prefix_cache_hits"] > 24 * 4 * PAGE_TOKENS
