"""The decoder computes what transformers computes, whole or in chunks, alone or in a batch, over scattered pages."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from connectors.torch_engine.attention import Chunk, Scratch, build_batch
from connectors.torch_engine.config import ModelConfig
from connectors.torch_engine.model import Model
from connectors.torch_engine.weights import Checkpoint, open_checkpoint, tiny_checkpoint
from kvstore.errors import ConfigError

transformers = pytest.importorskip("transformers")

NUM_PAGES, TOKENS_PER_PAGE = 64, 16
TOLERANCE = 5e-6
"""Of logits about 1 in float32: sums in another order."""

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "llama tied, biased": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True)
    ),
    "llama rope llama3": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, head_dim=32)),
}
CHUNKS = [(200,), (64, 136), (37, 50, 1, 1, 111)]


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def build(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Model:
    return Model(checkpoint, dtype, torch.device("cpu"), 512)


def new_kv(model: Model) -> Tensor:
    """KV full of other people's finite leftovers."""
    return model.new_kv(NUM_PAGES, TOKENS_PER_PAGE).normal_()


def run(model: Model, kv: Tensor, tokens: Sequence[int], pages: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Logits of every token."""
    start, logits = 0, []
    for num_tokens in chunks:
        batch = build_batch([Chunk(start, num_tokens, pages)], kv, Scratch(kv), model.config.group_size)
        rows = torch.tensor(tokens[start : start + num_tokens])
        logits.append(model.logits(model.forward(rows, batch, kv, lambda _: None)))
        start += num_tokens
    return torch.cat(logits)


def random_case(seed: int, num_tokens: int, vocab_size: int) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(NUM_PAGES, generator=generator)[: -(-num_tokens // TOKENS_PER_PAGE)]
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist(), pages.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_however_the_prompt_is_cut(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    peer = FAMILIES[family]()
    for parameter in peer.parameters():
        parameter.data.normal_(0, 0.2)
    peer.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        model = build(checkpoint)
    tokens, pages = random_case(1, 200, SHAPE["vocab_size"])
    expected = peer(torch.tensor([tokens])).logits[0]
    for chunks in CHUNKS:
        actual = run(model, new_kv(model), tokens, pages, chunks)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    """Prompts, continuations and decoding of very different lengths in one step give what each gives alone."""
    model = build(tiny_checkpoint(seed=0))
    lengths = [(40, 1), (33, 1), (200, 1), (32, 1), (0, 50), (64, 30), (16, 1)]
    kv, alone, chunks, tokens = new_kv(model), [], [], []
    order = torch.randperm(NUM_PAGES).tolist()
    for seed, (start, num_tokens) in enumerate(lengths):
        ids, _ = random_case(seed, start + num_tokens, model.config.vocab_size)
        pages, order = order[: -(-len(ids) // TOKENS_PER_PAGE)], order[-(-len(ids) // TOKENS_PER_PAGE) :]
        alone.append(run(model, new_kv(model), ids, pages, [len(ids)])[start:])
        if start:
            run(model, kv, ids[:start], pages, [start])
        chunks.append(Chunk(start, num_tokens, pages))
        tokens += ids[start:]
    batch = build_batch(chunks, kv, Scratch(kv), model.config.group_size)
    assert len(batch.groups) < len(chunks), "no two requests decoded together"
    logits = model.logits(model.forward(torch.tensor(tokens), batch, kv, lambda _: None))
    torch.testing.assert_close(logits, torch.cat(alone), atol=2e-4, rtol=0)


def test_a_layer_reads_no_kv_before_it_was_waited_for() -> None:
    """KV that arrives in ``wait_layer`` is as good as KV that was there: onboarding may overlap compute."""
    model = build(tiny_checkpoint(seed=0))
    tokens, pages = random_case(3, 80, model.config.vocab_size)
    source, kv = new_kv(model), new_kv(model)
    expected = run(model, source, tokens, pages, [64, 16])[64:]

    def arrive(layer: int) -> None:
        kv[pages[:4], layer] = source[pages[:4], layer]

    batch = build_batch([Chunk(64, 16, pages)], kv, Scratch(kv), model.config.group_size)
    actual = model.logits(model.forward(torch.tensor(tokens[64:]), batch, kv, arrive))
    assert torch.equal(actual, expected)


def test_bfloat16_stays_near_float32() -> None:
    tokens, pages = random_case(4, 100, 259)
    exact, rounded = build(tiny_checkpoint(seed=0)), build(tiny_checkpoint(seed=0), torch.bfloat16)
    expected = run(exact, new_kv(exact), tokens, pages, [100])
    actual = run(rounded, new_kv(rounded), tokens, pages, [60, 39, 1]).float()
    assert torch.nn.functional.cosine_similarity(actual, expected).min() > 0.98


def test_a_tensor_the_engine_does_not_know_is_refused() -> None:
    checkpoint = tiny_checkpoint(seed=0)
    checkpoint.names |= {"model.layers.0.mlp.experts.gate"}
    with pytest.raises(ConfigError, match="experts"):
        build(checkpoint)


def test_a_model_that_would_be_computed_wrongly_is_refused() -> None:
    raw = transformers.Qwen2Config(**SHAPE).to_dict()
    for change in (
        {"model_type": "gemma"},
        {"use_sliding_window": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ):
        with pytest.raises(ConfigError):
            ModelConfig.from_hf(raw | change)
