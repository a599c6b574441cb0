"""A prompt served from every tier: its tokens are those of vLLM without a connector, and vLLM counts the hit."""

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import PAGE_TOKENS, engine
from tests.vllm.models import tiny_llama

PROMPT = [(7 * index + index * index) % 500 + 3 for index in range(10 * PAGE_TOKENS + 5)]
NUM_TOKENS = 24


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What vLLM says on its own."""
    with engine(model, tmp_path_factory.mktemp("log") / "plain.log") as plain:
        tokens: list[int] = plain.generate([PROMPT], NUM_TOKENS)[0]["tokens"]
        assert len(set(tokens)) > 4, "a model that repeats itself shows nothing"
        return tokens


def file_store(directory: Path) -> dict[str, Any]:
    return {
        "memory": {"capacity": "64MiB"},
        "file": {"directories": [str(directory)], "capacity": "128MiB"},
    }


def test_ram_then_files_after_a_restart(model: Path, expected: list[int], tmp_path: Path) -> None:
    store = file_store(tmp_path / "kv")
    with engine(model, tmp_path / "1.log", store=store) as first:
        cold = first.generate([PROMPT], NUM_TOKENS)[0]
        assert (cold["tokens"], cold["cached"]) == (expected, 0)
        assert first.reset(False)
        warm = first.generate([PROMPT], NUM_TOKENS)[0]
        assert (warm["tokens"], warm["cached"]) == (expected, 10 * PAGE_TOKENS)
        assert first.numbers()["external_prefix_cache_hits"] == 10 * PAGE_TOKENS
    with engine(model, tmp_path / "2.log", store=store) as second:
        warm = second.generate([PROMPT], NUM_TOKENS)[0]
        assert (warm["tokens"], warm["cached"]) == (expected, 10 * PAGE_TOKENS)
        assert second.numbers()["kvstore_loaded_tokens/file"] == 10 * PAGE_TOKENS
