"""Tensor parallelism: the stripes of both ranks make a block."""

from pathlib import Path

import pytest

from tests.vllm.engine import engine
from tests.vllm.prompts import NUM_TOKENS, PAGE_TOKENS, PROMPT


@pytest.mark.engine
@pytest.mark.full
def test_two_ranks_store_and_load_together(model: Path, tmp_path: Path) -> None:
    store = {"memory": {"capacity": "64MiB"}}
    with engine(model, tmp_path / "two.log", store=store, tensor_parallel_size=2, processes=True) as pair:
        cold = pair.generate([PROMPT], NUM_TOKENS)[0]
        assert cold["cached"] == 0
        pair.reset(False)
        assert pair.generate([PROMPT], NUM_TOKENS)[0] == {"tokens": cold["tokens"], "cached": 10 * PAGE_TOKENS}
