"""One request as the engine sees it, from submission to its last token."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Generator

from connectors.torch_engine.sampling import SamplingParams
from kvstore.types import BlockKey, Request


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # it chose a stop token
    LENGTH = "length"  # it has all the tokens it asked for
    ABORTED = "aborted"


@dataclass(slots=True)
class Metrics:
    """What one request cost and who served it. Times are seconds on ``time.monotonic``."""

    arrived_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    tokens_from_tier: dict[str, int] = field(default_factory=dict)
    """Prompt tokens served at first admission, by the tier that had them; the rest was computed."""
    bytes_onboarded: int = 0
    bytes_offloaded: int = 0
    num_preemptions: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s


@dataclass(eq=False, slots=True)
class EngineRequest:
    """Tokens, pages and progress. ``pages[i]`` holds block i; the first ``num_committed`` are READY and pinned."""

    announced: Request
    tokens: list[int]
    params: SamplingParams
    generator: Generator
    metrics: Metrics
    num_prompt_tokens: int
    keys: list[BlockKey] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_committed: int = 0
    load: Any = None
    finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        """The id it was submitted with."""
        return self.announced.request_id

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.tokens) - self.num_computed

    @property
    def output(self) -> list[int]:
        """The tokens chosen so far."""
        return self.tokens[self.num_prompt_tokens :]

    def count_served(self, tier: str, num_tokens: int) -> None:
        """``tier`` had KV of the prompt; what a preempted request finds of its own does not count."""
        if num_tokens and not self.metrics.num_preemptions:
            counts = self.metrics.tokens_from_tier
            counts[tier] = counts.get(tier, 0) + num_tokens

    def finish_reason_after(self, token: int, eos_ids: tuple[int, ...]) -> FinishReason | None:
        """Whether ``token``, just chosen, is the last one, and why."""
        stop_ids = eos_ids if self.params.stop_ids is None else self.params.stop_ids
        if token in stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.output) >= self.params.max_tokens else None


@dataclass(frozen=True, slots=True)
class Output:
    """One token of one request; ``finish_reason`` is set with the last. An aborted request ends without a token."""

    request_id: str
    token: int | None
    finish_reason: FinishReason | None = None
