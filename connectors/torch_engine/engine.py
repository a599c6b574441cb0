"""The loop: schedule, compute, keep, choose."""

import itertools
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from connectors.torch_engine.attention import Chunk, Scratch, build_batch
from connectors.torch_engine.cache import PagedCache
from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.model import Model
from connectors.torch_engine.request import EngineRequest, FinishReason, Metrics, Output
from connectors.torch_engine.sampling import SamplingParams, sample
from connectors.torch_engine.scheduler import Scheduler
from kvstore.errors import ConfigError, TokenError
from kvstore.types import Request

IDLE_WAIT_S = 0.05
"""How long a caller with nothing to compute sleeps at most for a copy to return."""


class Engine:
    """Continuous batching over one model. One thread owns it; ``step`` never waits for the store."""

    def __init__(self, model: Model, cache: PagedCache, config: EngineConfig) -> None:
        self.model = model
        self.cache = cache
        self._config = config
        self._scratch = Scratch(cache.kv)
        self._scheduler = Scheduler(cache, config.max_running, config.max_step_tokens)
        self._requests: dict[str, EngineRequest] = {}
        self._aborted: list[Output] = []
        self._ids = itertools.count()

    # ---- requests

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        hints: Mapping[str, object] | None = None,
    ) -> EngineRequest:
        """A request joins the line; its tokens come from ``step``. ``hints`` go to the store's policies.

        Raises ``TokenError`` for a prompt the model cannot read and ``ConfigError`` for one that can never fit.
        """
        params = params or SamplingParams()
        request_id = request_id or f"request-{next(self._ids)}"
        self._require_fits(prompt, params, request_id)
        announced = Request(request_id, time.time(), self.cache.namespace.digest, len(prompt), hints or {})
        request = EngineRequest(
            announced=announced,
            tokens=list(prompt),
            params=params,
            generator=torch.Generator(self.model.device).manual_seed(params.seed),
            metrics=Metrics(time.monotonic()),
            num_prompt_tokens=len(prompt),
        )
        self._requests[request_id] = request
        self.cache.arrive(request)
        self._scheduler.add(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; one that has ended already is left as it is."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORTED)
            self._aborted.append(Output(request_id, None, FinishReason.ABORTED))

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or its end was not reported."""
        return bool(self._requests or self._aborted)

    # ---- the loop

    def step(self) -> list[Output]:
        """Advance every request that can be: one token each, or a chunk of its prompt."""
        outputs, self._aborted = self._aborted, []
        self.cache.poll()
        work = self._scheduler.schedule()
        if work:
            outputs += self._compute(work)
        elif not outputs and self._requests:
            self.cache.wait(IDLE_WAIT_S)
        return outputs

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None) -> list[list[int]]:
        """Answer ``prompts`` together, all with the same ``params``; returns the tokens of each."""
        requests = [self.submit(prompt, params) for prompt in prompts]
        while any(request.finish_reason is None for request in requests):
            self.step()
        return [request.output for request in requests]

    def close(self) -> None:
        """Abort what runs and see the copies through; the store stays open."""
        for request_id in tuple(self._requests):
            self.abort(request_id)
        self.cache.close()

    # ---- the inside

    @torch.inference_mode()
    def _compute(self, work: list[tuple[EngineRequest, int]]) -> list[Output]:
        # Requests that decode are neighbours, of similar length, so that they attend together.
        work.sort(key=lambda item: (item[1] > 1, len(item[0].tokens)))
        chunks = [Chunk(request.num_computed, num_tokens, request.pages) for request, num_tokens in work]
        batch = build_batch(chunks, self.cache.kv, self._scratch, self.model.config.group_size)
        tokens = [
            token
            for request, num_tokens in work
            for token in request.tokens[request.num_computed : request.num_computed + num_tokens]
        ]
        requests = [request for request, _ in work]
        hidden = self.model.forward(
            torch.tensor(tokens, device=self.model.device), batch, self.cache.kv, self.cache.layer_wait(requests)
        )
        last_rows = itertools.accumulate(num_tokens for _, num_tokens in work)
        choosing: list[tuple[EngineRequest, int]] = []
        for (request, num_tokens), end in zip(work, last_rows, strict=True):
            if not self.cache.settle(request, num_tokens):
                continue  # its prefix did not arrive: what was computed on top of it counts for nothing
            if request.num_left == 0:
                choosing.append((request, end - 1))
        return self._choose(choosing, hidden)

    def _choose(self, choosing: Sequence[tuple[EngineRequest, int]], hidden: Tensor) -> list[Output]:
        """The next token of each request whose last hidden state is in the given row."""
        if not choosing:
            return []
        logits = self.model.logits(hidden[[row for _, row in choosing]])
        requests = [request for request, _ in choosing]
        tokens = sample(logits, [r.params for r in requests], [r.generator for r in requests])
        outputs = []
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
            request.metrics.first_token_s = request.metrics.first_token_s or time.monotonic()
            reason = request.finish_reason_after(token, self.model.config.eos_ids)
            outputs.append(Output(request.request_id, token, reason))
            if reason is not None:
                self._finish(request, reason)
        return outputs

    def _finish(self, request: EngineRequest, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.metrics.finished_s = time.monotonic()
        self._scheduler.remove(request)
        self.cache.finish(request)
        del self._requests[request.request_id]

    def _require_fits(self, prompt: Sequence[int], params: SamplingParams, request_id: str) -> None:
        if request_id in self._requests:
            raise ConfigError(f"request {request_id!r} is running already; give every request an id of its own")
        vocab_size = self.model.config.vocab_size
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
            raise TokenError(f"the prompt must be at least one token id, each in [0, {vocab_size})")
        num_tokens = len(prompt) + params.max_tokens
        if num_tokens > self.max_tokens:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens with {params.max_tokens} to generate needs room for {num_tokens},"
                f" the engine has {self.max_tokens}; shorten it or raise num_pages"
            )

    @property
    def max_tokens(self) -> int:
        """Prompt and answer of one request together."""
        return min(self.cache.num_pages * self._config.tokens_per_block, self.model.max_positions)
