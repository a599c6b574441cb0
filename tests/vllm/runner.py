"""The scheduler of vLLM and both halves of the connector, around a model that can be checked.

The KV of a token is a digest of all tokens up to it, and so is the token that follows. Every step reads what it is to
attend to, and compares. The pages of all groups of layers lie in the same memory, as vLLM's do.
"""

import zlib
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.engine import TRANSFER
from tests.vllm.prompts import PAGE_TOKENS

MAX_LAYERS = 2
"""Of a group."""
VOCAB = 500


class Runner:
    """An engine without a model. ``store``: the connector's settings; ``transfer``: those of another connector.

    ``events``: where vLLM publishes, and where it tells again. ``windows``: what a token attends to in each group of
    layers; None: all. The last of several groups has one layer.
    """

    def __init__(
        self,
        model: Path,
        store: dict[str, Any],
        *,
        transfer: dict[str, Any] | None = None,
        events: tuple[str, str] | None = None,
        num_pages: int,
        is_async: bool = False,
        step_tokens: int = 128,
        dtype: str = "float32",
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        config = vllm_config(model, store, step_tokens, is_async=is_async, dtype=dtype)
        if transfer is not None:
            config.kv_transfer_config = KVTransferConfig(**transfer)
        if events is not None:
            endpoint, replay = events
            config.kv_events_config = KVEventsConfig(True, "zmq", endpoint=endpoint, replay_endpoint=replay)
        config.cache_config.num_gpu_blocks = num_pages
        self.windows = windows
        groups = groups_of(windows)
        page_bytes = groups[0].kv_cache_spec.page_size_bytes
        tensors = [
            KVCacheTensor(
                size=page_bytes * num_pages * MAX_LAYERS,
                layers=group.layer_names,
                layer_stride=page_bytes * num_pages,
                block_stride=page_bytes,
            )
            for group in groups
        ]
        cache = KVCacheConfig(num_blocks=num_pages, kv_cache_tensors=tensors, kv_cache_groups=groups)
        make = AsyncScheduler if is_async else Scheduler
        self.scheduler: Any = make(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=PAGE_TOKENS,
            log_stats=True,
        )
        self.worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        memory = torch.full((MAX_LAYERS, num_pages, 1, PAGE_TOKENS, 2), -1.0)
        self.layers = [group.layer_names for group in groups]
        self.kv = {name: memory[index] for names in self.layers for index, name in enumerate(names)}
        self.worker.register_kv_caches(self.kv)
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        hash_of = get_hash_fn_by_name("sha256")
        init_none_hash(hash_of)
        self._hasher = get_request_block_hasher(PAGE_TOKENS, hash_of)
        self._answers: dict[str, list[int]] = {}
        self._computed: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._num_behind = 1 if is_async else 0
        self.tokens: dict[str, list[int]] = {}
        self.num_failed_pages = 0
        self.num_failed_loads = 0
        self.counts: Counter[str] = Counter()
        self.num_preempted = 0
        self.weights = 0
        """What the KV depends on beside the tokens; may be changed in place."""

    @property
    def half(self) -> Any:
        """The scheduler half."""
        return self.scheduler.connector._scheduler

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        kv_transfer_params: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """A request joins the line; ``more`` is what else vLLM's ``Request`` can be made of."""
        extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(request_id, prompt, params, None, block_hasher=self._hasher, **more)
        self._answers[request_id] = answer_to(prompt, max_tokens + 1)
        self.tokens[request_id] = []
        self.scheduler.add_request(request)

    def say_more(self, session_id: str, tokens: list[int], max_tokens: int = 8) -> list[int]:
        """Go on in a session, one added as resumable; what was sampled last is dropped. Returns its prompt from now."""
        session = self.scheduler.requests[session_id]
        prompt = list(session.all_token_ids[: session.num_computed_tokens]) + tokens
        self.add(session_id, tokens, max_tokens, resumable=True)
        self._answers[session_id] = answer_to(prompt, max_tokens + 1)
        return prompt

    def run_session(self, session_id: str) -> None:
        """Until it waits for more."""
        while self.scheduler.requests[session_id].status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            self.step()

    def abort(self, request_id: str) -> None:
        """Its client has gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """Schedule, compute, and apply what was computed a step ago, or now."""
        scheduled = self.scheduler.schedule()
        self.num_preempted += len(scheduled.preempted_req_ids or ())
        self._computed.append((scheduled, self._compute(scheduled)))
        self.apply(self._num_behind if scheduled.num_scheduled_tokens else 0)

    def apply(self, num_left: int = 0) -> None:
        """Have the scheduler hear what was computed, but for the last ``num_left`` steps."""
        while len(self._computed) > num_left:
            outputs = self.scheduler.update_from_output(*self._computed.popleft())
            for batch in outputs.values():
                stats = batch.scheduler_stats and batch.scheduler_stats.kv_connector_stats
                self.counts.update({name: count for name, count in (stats or {}).items() if isinstance(count, int)})
            for output in (output for batch in outputs.values() for output in batch.outputs):
                self.tokens[output.request_id] += output.new_token_ids

    def run(self, max_steps: int = 20_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._computed:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def close(self) -> None:
        """End both halves."""
        self.worker.shutdown()
        self.scheduler.connector.shutdown()

    def held(self) -> dict[str, int]:
        """What is held for requests anywhere."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "requests": len(self.half._requests) + self.half.planner.num_requests + len(self.scheduler.requests),
            "copies": len(self.half._loads) + len(self.half._stores),
            "pages": sum(page.ref_cnt for page in pool.blocks if not page.is_null),
            "pins": sum(p.num_pinned for level in self.half.store.slot_levels for _, p in level.pools()),
        }

    # ---- the model

    def _compute(self, scheduled: Any) -> ModelRunnerOutput:
        self.worker.handle_preemptions(scheduled.kv_connector_metadata)
        self.worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = [
            self._attend(request_id, computed[request_id], num_tokens)
            for request_id, num_tokens in scheduled.num_scheduled_tokens.items()
        ]
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.num_failed_pages += len(output.invalid_block_ids)
        self.num_failed_loads += len(output.failed_recving)
        self.worker.clear_connector_metadata()
        ids = list(scheduled.num_scheduled_tokens)
        more: dict[str, Any] = {}
        if "req_id_to_index" in ModelRunnerOutput.__dataclass_fields__:  # before vLLM 0.34
            more["req_id_to_index"] = {request_id: index for index, request_id in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, sampled_token_ids=sampled, kv_connector_output=output, **more)

    def _attend(self, request_id: str, num_computed: int, num_tokens: int) -> list[int]:
        """Compute ``num_tokens`` more, over what the pages have of those before; the next token, if known."""
        request = self.scheduler.requests[request_id]
        prompt = list(request.prompt_token_ids)
        tokens = prompt + self._answers[request_id]
        end = num_computed + num_tokens
        values = torch.tensor(digests(tokens[:end])) + 1000 * self.weights
        pages_of = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        for group, (names, pages, window) in enumerate(zip(self.layers, pages_of, self.windows, strict=True)):
            first = 0 if window is None else max(0, num_computed + 1 - window)
            null = self.scheduler.kv_cache_manager.block_pool.null_block.block_id
            assert null not in pages[first // PAGE_TOKENS : -(-end // PAGE_TOKENS)]
            for index, name in enumerate(names):
                number = MAX_LAYERS * group + index
                kv = self.kv[name][pages].view(-1, 2)[first:num_computed]
                wanted = (values[first:num_computed, None] + number).expand(-1, 2)
                assert torch.equal(kv, wanted), f"{request_id}: wrong KV before token {num_computed} in {name}"
                for position in range(num_computed, end):
                    self.kv[name][pages[position // PAGE_TOKENS], :, position % PAGE_TOKENS] = values[position] + number
        return [tokens[end]] if end >= request.num_tokens else []  # one that was preempted computes its output too


def groups_of(windows: tuple[int | None, ...]) -> list[KVCacheGroupSpec]:
    """Of layers that attend to so many tokens."""
    shape: dict[str, Any] = {"block_size": PAGE_TOKENS, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = []
    for number, window in enumerate(windows):
        spec = FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
        num_layers = 1 if number and number == len(windows) - 1 else MAX_LAYERS
        names = [f"model.layers.{MAX_LAYERS * number + index}" for index in range(num_layers)]
        groups.append(KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec))
    return groups


def vllm_config(
    model: Path, store: dict[str, Any], step_tokens: int = 128, *, is_async: bool = False, dtype: str = "float32"
) -> VllmConfig:
    """As ``vllm serve`` would make it."""
    return VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, dtype=dtype, max_model_len=2048),
        cache_config=CacheConfig(block_size=PAGE_TOKENS, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=step_tokens,
            max_model_len=2048,
            enable_chunked_prefill=True,
            async_scheduling=is_async,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**TRANSFER, kv_connector_extra_config=store),
    )


def digests(tokens: list[int]) -> list[float]:
    """Of every prefix; whole numbers that a float32 has."""
    found, running = [], 0
    for token in tokens:
        running = zlib.crc32(token.to_bytes(4, "little"), running)
        found.append(float(running % 1_000_003))
    return found


def answer_to(prompt: list[int], num_tokens: int) -> list[int]:
    """What the model says: each token follows from all before it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(digests(tokens)[-1]) % VOCAB + 1)
    return tokens[len(prompt) :]
