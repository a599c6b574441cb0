"""The class that vLLM loads: it hands every call to one of the two halves, and lets nothing of ours fail a request."""

import logging
import os
import secrets
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.plan import Draft, EngineTraits, Planner
from connectors.vllm import versions
from connectors.vllm.events import StoreEvents
from connectors.vllm.identity import adapter_version, hash_scheme, identity_of
from connectors.vllm.messages import Step, StoreReport
from connectors.vllm.metrics import ServedMetrics, ServedStats
from connectors.vllm.pages import PageFormat
from connectors.vllm.request import EngineRequest
from connectors.vllm.scheduler_half import SchedulerHalf
from connectors.vllm.settings import Settings
from connectors.vllm.worker_half import LayerGroup, WorkerHalf
from kvstore.block_store import BlockStore
from kvstore.errors import KVStoreError
from kvstore.namespace import Namespace
from kvstore.store import Store

SOURCES = {"memory": CacheHitSource.HOST, "file": CacheHitSource.DISK}
ATTENTION = {"FullAttentionSpec": "full", "MLAAttentionSpec": "mla", "SlidingWindowSpec": "sliding window"}
"""Kinds by the name of vLLM's class: its subclasses need more. Where hybrid groups are off, windows are full there."""
DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")

_log = logging.getLogger("vllm.kvstore")  # vLLM configures what is below its own name


class Handshake(base.KVConnectorHandshakeMetadata):
    """What a worker's pages look like."""

    def __init__(self, forms: tuple[PageFormat, ...]) -> None:
        """Of each group."""
        self.forms = forms


class KVStoreConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """One half, by the role it is made for."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ``ConfigError`` for a configuration that cannot be used."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        logging.getLogger("connectors").parent = logging.getLogger("kvstore").parent = _log
        if versions.is_unknown(vllm.__version__):
            _log.warning("vLLM %s is newer than any that the KV store was run with", vllm.__version__)
        parallel = vllm_config.parallel_config
        self._num_ranks = parallel.tensor_parallel_size
        self._tokens_per_block = vllm_config.cache_config.block_size
        self._settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config, os.environ)
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        self._events: StoreEvents | None = None
        self._namespaces: dict[str, list[Namespace]] = {}
        self._forms: tuple[PageFormat, ...] = ()
        self._refusals = self._planner().refusals
        if role is base.KVConnectorRole.WORKER:
            self._worker = WorkerHalf(parallel.rank % self._num_ranks, self._num_ranks)
            return
        for refusal in self._refusals:
            _log.error("the KV store is off for this engine: %s", refusal)
        if not self._refusals:
            self._open()

    def _open(self) -> None:
        self._identity = identity_of(self._vllm_config, self._settings.salt)
        config = self._settings.config
        self._scheduler = SchedulerHalf(
            store=self._settings.open(),
            planner=self._planner(),
            tokens_per_block=self._tokens_per_block,
            num_ranks=self._num_ranks,
            prefetch_s=config.prefetch_deadline_ms / 1000,
            namespaces_for=self._namespaces_for,
        )
        events = self._vllm_config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            self._tell_events(self._scheduler.store)

    def _tell_events(self, store: BlockStore) -> None:
        if isinstance(store, Store):
            self._events = StoreEvents(store, self._tokens_per_block)
        else:
            _log.warning("KV events tell nothing of the sidecar's blocks, which are its own: follow its Watch for them")

    def _planner(self) -> Planner:
        prefetch_s = self._settings.config.prefetch_deadline_ms / 1000
        planner = Planner(traits_of(self._vllm_config, self._kv_cache_config), self._tokens_per_block, prefetch_s)
        planner.refusals += refusals_of(self._vllm_config, self._kv_cache_config)
        return planner

    def _namespaces_for(self, request: EngineRequest) -> list[Namespace] | None:
        """Whose blocks a request's are in each group: the model's, or those of it with an adapter.

        None where that cannot be told.
        """
        if not all(feature.identifier for feature in request.mm_features):
            _log.error("request %s is served without the KV store: an image in it has no hash", request.request_id)
            return None
        adapter = request.lora_request
        name = "" if adapter is None else f"{adapter.lora_name}\0{adapter.lora_path}"
        spaces = self._namespaces.get(name)
        if spaces is None and self._forms and self._scheduler is not None:
            try:
                identity = self._identity_with(request)
                engine, quantisation = f"vllm-{vllm.__version__}", str(self._vllm_config.cache_config.cache_dtype)
                layouts = [form.layout(self._num_ranks, engine, quantisation) for form in self._forms]
                spaces = [self._scheduler.store.open_namespace(identity, layout) for layout in layouts]
                self._namespaces[name] = spaces
                if self._events is not None:
                    self._events.open_namespaces(spaces)
            except KVStoreError as error:
                _log.error("request %s is served without the KV store: %s", request.request_id, error)
        return spaces

    def _identity_with(self, request: EngineRequest) -> Any:
        algorithm = str(self._vllm_config.cache_config.prefix_caching_hash_algo)
        scheme = hash_scheme(algorithm, kv_cache_utils.NONE_HASH, os.environ)
        adapter = request.lora_request
        if adapter is None:
            return replace(self._identity, hash_scheme=scheme)
        return replace(
            self._identity,
            hash_scheme=scheme,
            adapter=adapter.lora_name,
            adapter_version=adapter_version(adapter),
        )

    # ---- the scheduler's side

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache hands nothing over: what is not stored is computed."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Hold pages there while they are copied."""
        if self._scheduler is not None:
            self._scheduler.pool = gpu_block_pool

    def set_xfer_handshake_metadata(self, metadata: dict[int, Handshake]) -> None:
        """Every rank's pages look alike, or nothing is stored."""
        forms = {handshake.forms for handshake in metadata.values()}
        if len(forms) == 1:
            (self._forms,) = forms
        else:
            _log.error("the KV store is off for this engine: the ranks' pages differ: %s", forms)

    def on_new_request(self, request: Any) -> None:
        """A request joins the line."""
        if self._scheduler is not None:
            hints = (request.kv_transfer_params or {}).get("kvstore") or {}
            self._scheduler.arrive(request, hints)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load, in the background."""
        if self._scheduler is None:
            return 0, False
        num_tokens = self._scheduler.offer(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has pages."""
        if self._scheduler is not None:
            self._scheduler.take(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """What is being loaded, by tier."""
        tokens_from = self._scheduler.tokens_from(request) if self._scheduler is not None else {}
        sources: dict[Any, int] = {}
        for tier, num_tokens in tokens_from.items():
            source = SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + num_tokens
        return sources

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """What the workers are to do with this step."""
        if self._scheduler is None:
            return Step()
        state = scheduler_output.kv_connector_block_state
        scheduled = {}
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            pages = state.get_block_ids(request_id)
            if pages:
                scheduled[request_id] = pages, num_tokens
        return self._scheduler.build(scheduled)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers say."""
        if self._scheduler is None:
            return
        if connector_output.kv_connector_worker_meta is not None:
            self._scheduler.stored(connector_output.kv_connector_worker_meta)
        finished, failed = connector_output.finished_recving, connector_output.failed_recving
        if finished:
            finished -= self._scheduler.loaded(finished, failed, connector_output.invalid_block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """The request has ended; its pages are vLLM's to hand out, but for those under a copy."""
        if self._scheduler is not None:
            self._scheduler.finish(request, block_ids, is_sound=request.status.name != "FINISHED_ERROR")
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """The same, where there is one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """Whether to keep on stepping until copies have returned."""
        return self._scheduler is not None and self._scheduler.has_work

    def take_events(self) -> list[Any]:
        """What has come to the store and left it."""
        if self._events is None or self._scheduler is None:
            return []
        with self._scheduler.owning:
            return self._events.take()

    def reset_cache(self) -> bool:
        """Forget the blocks of this engine's model in every tier. VLLM asks for it before weights change in place.

        What is computed from now on nobody else shall find: an engine or a restart with the weights on disk.
        """
        if self._scheduler is not None:
            self._scheduler.forget(chain.from_iterable(self._namespaces.values()))
            self._namespaces.clear()
            self._identity = replace(self._identity, epoch=secrets.randbits(64))
            _log.warning(
                "the KV store was reset; no other engine, nor this one restarted, is given what it stores from now on"
            )
        return True

    # ---- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The pages, once."""
        if self._worker is None or self._refusals:
            return
        if next(iter(kv_caches.values())).device.type == "cpu" and torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        groups = [
            LayerGroup({name: kv_caches[name] for name in kv_caches if name in group.layer_names}, window)
            for group, window in zip(
                self._kv_cache_config.kv_cache_groups, windows_of(self._kv_cache_config), strict=True
            )
        ]
        self._worker.register(groups, self._kv_cache_config.num_blocks, self._tokens_per_block)

    def get_handshake_metadata(self) -> Handshake | None:
        """For the scheduler half."""
        return Handshake(self._worker.forms) if self._worker is not None and self._worker.forms else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: what a step asks for begins in ``wait_for_save``, after the step's compute."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request computes once all its blocks have arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are stored whole."""

    def wait_for_save(self) -> None:
        """Begin the copies. Nobody waits for them: pages under a copy are held."""
        if self._worker is not None and self.has_connector_metadata():
            self._worker.begin(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """Requests whose loads are over, and those of them that vLLM is to compute from their first token on."""
        loaded, failed = self._worker.take_loaded() if self._worker is not None else (set(), set())
        return base.KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that do not hold what they should, of which vLLM is told where there is one group without a window."""
        return self._worker.take_failed_pages() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> StoreReport | None:
        """What was stored."""
        return self._worker.take_report() if self._worker is not None else None

    # ---- both

    def get_kv_connector_stats(self) -> ServedStats | None:
        """Counts since the last time."""
        counts = self._scheduler.served.take() if self._scheduler is not None else {}
        return ServedStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ServedStats:
        """The same, where they arrive."""
        return ServedStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> ServedMetrics:
        """Counters on vLLM's own page."""
        return ServedMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """See copies through and let go."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            scheduler.close()


def traits_of(vllm_config: Any, kv_cache_config: Any) -> EngineTraits:
    """What of this engine decides whether it can be served."""
    names = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    speculative = vllm_config.speculative_config
    draft = Draft.NONE if speculative is None or speculative.method in DRAFTS_WITHOUT_KV else Draft.ELSEWHERE
    return EngineTraits(
        tokens_per_page=vllm_config.cache_config.block_size,
        attention=frozenset(ATTENTION.get(name, name) for name in names),
        num_hosts=getattr(vllm_config.parallel_config, "nnodes", 1),
        draft=draft,
        window_tokens=windows_of(kv_cache_config),
    )


def windows_of(kv_cache_config: Any) -> tuple[int | None, ...]:
    """Tokens that a group's pages are kept for, the one to be computed among them; None: all of a request."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return tuple(
        spec.sliding_window + spec.extra_retained_tokens if type(spec).__name__ == "SlidingWindowSpec" else None
        for spec in specs
    )


def refusals_of(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Why this engine cannot be served, beyond what any engine is refused for."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    reasons = []
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if sizes != {cache.block_size}:
        reasons.append(f"pages of {sorted(sizes)} tokens, by group of layers, where vLLM says {cache.block_size}")
    if parallel.pipeline_parallel_size > 1:
        reasons.append(f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: stages hold different layers")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            reasons.append(f"{name} is {getattr(parallel, name)}: ranks hold different tokens")
    hash_tokens = kv_cache_config.hash_block_size or cache.block_size
    if hash_tokens != cache.block_size:
        reasons.append(f"vLLM hashes blocks of {hash_tokens} tokens, its pages have {cache.block_size}")
    if getattr(cache, "calculate_kv_scales", False):
        reasons.append(
            "calculate_kv_scales finds its scales while it runs, so that no other engine could read the blocks"
        )
    return reasons
