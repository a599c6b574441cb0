"""Tensor parallelism: both ranks' stripes make a block, and another degree's blocks are nobody's."""

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import engine
from tests.vllm.prompts import NUM_TOKENS, PAGE_TOKENS, PROMPT

WHOLE_BLOCKS = 10 * PAGE_TOKENS


@pytest.mark.full
def test_two_ranks_store_and_load_together_and_apart_from_one(model: Path, tmp_path: Path) -> None:
    store = {
        "memory": {"capacity": "64MiB"},
        "file": {"directories": [str(tmp_path / "kv")], "capacity": "128MiB"},
    }
    two: dict[str, Any] = {"tensor_parallel_size": 2, "processes": True}
    with engine(model, tmp_path / "1.log", store=store) as one:
        alone = one.generate([PROMPT], NUM_TOKENS)[0]
    with engine(model, tmp_path / "2.log", store=store, **two) as pair:
        cold = pair.generate([PROMPT], NUM_TOKENS)[0]
        assert cold["cached"] == 0, "blocks of one rank"
        pair.reset(False)
        warm = pair.generate([PROMPT], NUM_TOKENS)[0]
        assert warm == {"tokens": cold["tokens"], "cached": WHOLE_BLOCKS}
    with engine(model, tmp_path / "3.log", store=store, **two) as again:
        assert again.generate([PROMPT], NUM_TOKENS)[0] == warm, "from files"
    with engine(model, tmp_path / "4.log", store=store) as one:
        answer = one.generate([PROMPT], NUM_TOKENS)[0]
        assert answer == {"tokens": alone["tokens"], "cached": WHOLE_BLOCKS}
