"""The choice of the next token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Temperature 0 is greedy; ``top_k`` 0 and ``top_p`` 1 cut nothing."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    """Of the request's own generator: the same seed gives the same tokens, whoever else runs."""
    stop_ids: tuple[int, ...] | None = None
    """Tokens that end the answer; None for the model's own."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; ask for at least one token")
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"cannot sample with temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p};"
                " they must be >= 0, >= 0 and in (0, 1]"
            )


def sample(logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[Generator]) -> list[int]:
    """One token for each row of ``logits`` [rows, vocabulary], with the row's parameters and generator."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (param, generator) in enumerate(zip(params, generators, strict=True)):
        if param.temperature > 0:
            tokens[row] = _draw(logits[row].float(), param, generator)
    return tokens


def _draw(scores: Tensor, params: SamplingParams, generator: Generator) -> int:
    """Draw by the softmax of ``scores`` [vocabulary] among the most likely tokens."""
    scores, ids = (scores / params.temperature).sort(descending=True)
    if params.top_k:
        scores = scores[: params.top_k]
    weights = scores.softmax(dim=0)
    before = weights.cumsum(dim=0) - weights
    weights = weights.masked_fill(before >= params.top_p, 0.0)
    return int(ids[torch.multinomial(weights, 1, generator=generator)])
