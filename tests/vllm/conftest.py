"""These run where vLLM is installed, and are not collected elsewhere: ``make test-vllm`` fails where it cannot be."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.engine import engine
from tests.vllm.models import tiny_llama
from tests.vllm.prompts import CROWD, NUM_TOKENS, PROMPT

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """What vLLM says on its own, to the one prompt and to the crowd."""
    with engine(model, tmp_path_factory.mktemp("log") / "plain.log") as plain:
        answers = {
            "one": [answer["tokens"] for answer in plain.generate([PROMPT], NUM_TOKENS)],
            "crowd": [answer["tokens"] for answer in plain.generate(CROWD, NUM_TOKENS)],
        }
    assert len(set(answers["one"][0])) > 4, "a model that repeats itself shows nothing"
    return answers
