"""A secondary tier for vLLM's own OffloadingConnector: our files and Redis under its CPU tier, with their checksums.

Named in ``secondary_tiers`` by ``{"type": "KVStoreTier", "module_path": "connectors.vllm_tier", "file": {...}}``;
connectors/README.md says how. vLLM's CPU tier is the RAM here: its rows are lent, and bytes move straight between them
and a level. A row is opaque, and whatever decides its bytes and is told to a tier is in the layout or the identity.

Rule 1: a job is reported once, when no copy touches its rows any more, and whatever came of it.
Rule 2: what did not arrive for a request is not offered to it again.
Rule 3: a lookup is answered by the tables, or by one probe of Redis with a deadline.
"""

import json
import logging
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
import vllm

from connectors.vllm import versions
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.lending import Transfer
from kvstore.namespace import Namespace
from kvstore.opening import open_store
from kvstore.promotion import Prefetch
from kvstore.types import BlockKey, Outcome
from kvstore.weights import weights_digest

with versions.explained(vllm.__version__):
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

WRITE_TIMEOUT_S = 10.0
DRAIN_INTERVAL_S = 0.1

_log = logging.getLogger("vllm.kvstore")  # vLLM configures what is below its own name


@dataclass(eq=False, slots=True)
class _Asked:
    """What one request wants to know of Redis, and what it must not be offered."""

    unknown: list[BlockKey] = field(default_factory=list)
    probes: dict[BlockKey, Prefetch] = field(default_factory=dict)
    missed: set[BlockKey] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Run:
    """Blocks of a job that follow one another, each in a row of vLLM's CPU tier."""

    keys: list[BlockKey]
    rows: list[memoryview]
    parent: BlockKey | None
    num_moved: int = 0
    transfer: Transfer | None = None


@dataclass(eq=False, slots=True)
class _Job:
    """A job under way; ``runs`` are what is left of it."""

    job: TransferJob
    keys: dict[BlockKey, Any]
    """vLLM's own key of each block."""
    runs: list[_Run]
    began_s: float
    deadline_s: float
    moved: set[BlockKey] = field(default_factory=set)


class KVStoreTier(SecondaryTierManager):
    """One for an engine, whose rows hold the pages of all its ranks. Called by vLLM's scheduler, one call at a time."""

    medium = base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        salt: str = "",
        weights: str | None = None,
        **tables: Any,
    ) -> None:
        """``tables`` are those of the store's configuration file. Raises ``KVStoreError`` for what cannot be used."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        logging.getLogger("kvstore").parent = _log
        self.locality = None if locality is None else base.Locality(locality)
        config = config_of(tables)
        self._rows = primary_kv_view.cast("B")
        self._row_bytes = primary_kv_view.strides[0] if primary_kv_view.strides else 0
        self._weights = weights_of(offloading_spec.config, weights)
        self._salt = salt
        self._wait_s = config.prefetch_deadline_ms / 1000
        self._has_shared = config.redis is not None
        self._store = open_store(config)
        self._layout = layout_of(offloading_spec.config, self._row_bytes)
        self._asked: dict[str, _Asked] = {}
        self._jobs: list[_Job] = []
        self._epoch = 0
        self._namespace: Namespace | None = None

    @property
    def _ns(self) -> Namespace:
        """Opened with the first request of an epoch: vLLM seeds its hashes after it has made the tier."""
        if self._namespace is None:
            self._namespace = self._store.open_namespace(self._identity(), self._layout)
        return self._namespace

    def _identity(self) -> Identity:
        root = kv_cache_utils.NONE_HASH.hex()[:16]  # shows the hash function and its seed
        # vLLM's default hash is of pickles, whose bytes may differ between versions of Python.
        python = ".".join(map(str, sys.version_info[:2]))
        scheme = f"vllm-offload-python{python}-{root}"
        return Identity("vllm", self._weights, salt=self._salt, epoch=self._epoch, hash_scheme=scheme)

    # ---- lookups

    def on_new_request(self, req_context: Any) -> base.RequestOffloadingContext:
        """Chunks are stored as they come."""
        self._asked[req_context.req_id] = _Asked()
        return base.RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> base.LookupResult:
        """Whether a chunk is here; RETRY while Redis is asked."""
        block = self._ns.key(bytes(key))
        asked = self._asked.setdefault(req_context.req_id, _Asked())
        if block in asked.missed:
            return base.LookupResult.MISS
        if self._store.lookup([block]).found:
            return base.LookupResult.HIT
        probe = asked.probes.get(block)
        if not self._has_shared or (probe is not None and probe.done):
            asked.missed.add(block)
            return base.LookupResult.MISS
        if probe is None and block not in asked.unknown:
            asked.unknown.append(block)
        return base.LookupResult.RETRY

    def on_schedule_end(self, context: Any) -> None:
        """Ask Redis once for all that a request wants to know."""
        self._store.poll()
        deadline_s = time.monotonic() + self._wait_s
        for asked in self._asked.values():
            if asked.unknown:
                probe = self._store.prefetch(asked.unknown, deadline_s)
                asked.probes.update(dict.fromkeys(asked.unknown, probe))
                asked.unknown = []

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what it asked."""
        self._asked.pop(req_context.req_id, None)

    # ---- jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Copy chunks down, as far as there is room; the others are dropped."""
        self._begin(job_metadata, WRITE_TIMEOUT_S)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Bring chunks up, as far as they arrive in time."""
        self._begin(job_metadata, self._wait_s)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that touch no row any more."""
        if self._jobs:
            self._store.poll()
        results, left = [], []
        for job in self._jobs:
            self._advance(job)
            if job.runs:
                left.append(job)
            else:
                results.append(self._result(job))
        self._jobs = left
        return results

    def has_pending_work(self) -> bool:
        """Whether to keep on stepping."""
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Until no copy touches a row; results stay for ``get_finished_jobs``.

        VLLM asks for it when it resets its cache, and for nothing else: the weights may be others afterwards.
        """
        while any(run.transfer is not None and run.transfer.busy for job in self._jobs for run in job.runs):
            self._store.wait(DRAIN_INTERVAL_S)
            self._store.poll()
        for job in self._jobs:
            job.deadline_s = 0.0  # nothing is begun any more
            self._advance(job)
        self._epoch = secrets.randbits(64)
        self._namespace = None

    def shutdown(self) -> None:
        """See copies through. Raises ``RuntimeError`` if one hangs: vLLM then keeps the rows mapped."""
        self._store.close()
        for job in self._jobs:
            if any(run.transfer is not None and run.transfer.busy for run in job.runs):
                raise RuntimeError("a copy of the KV store hangs and may still touch vLLM's CPU tier")
        self._jobs.clear()
        self._rows.release()

    # ---- the inside

    def _begin(self, job: TransferJob, wait_s: float) -> None:
        now_s = time.monotonic()
        begun = _Job(job, {self._ns.key(bytes(key)): key for key in job.keys}, [], now_s, now_s + wait_s)
        begun.runs = self._runs_of(job)
        self._jobs.append(begun)
        for run in begun.runs:
            self._start(begun, run)

    def _runs_of(self, job: TransferJob) -> list[_Run]:
        """Blocks by group, root first; where vLLM tells no position, nothing is known to follow anything."""
        position_of = job.req_context.get_offload_key_position
        chunks = [
            (base.get_offload_group_idx(key), position_of(key), self._ns.key(bytes(key)), self._row(row))
            for key, row in zip(job.keys, _plain(job.chunk_ids), strict=True)
        ]
        if any(position is None for _, position, _, _ in chunks):
            return [_Run([key], [row], None) for _, _, key, row in chunks]
        chunks.sort(key=lambda chunk: chunk[:2])
        runs = []
        for _, group in groupby(chunks, lambda chunk: chunk[0]):
            members = list(group)
            runs.append(_Run([key for _, _, key, _ in members], [row for _, _, _, row in members], None))
        return runs

    def _row(self, number: int) -> memoryview:
        return self._rows[number * self._row_bytes : (number + 1) * self._row_bytes]

    def _start(self, job: _Job, run: _Run) -> None:
        keys, rows = run.keys[run.num_moved :], run.rows[run.num_moved :]
        if job.job.is_promotion:
            run.transfer = self._store.load_into(self._ns, keys, rows, job.deadline_s)
        else:
            parent = run.keys[run.num_moved - 1] if run.num_moved else run.parent
            run.transfer = self._store.store_from(self._ns, keys, parent, rows, job.deadline_s)

    def _advance(self, job: _Job) -> None:
        """Settle runs whose copies have returned, and go on with those that a full lane held up."""
        now_s = time.monotonic()
        left = []
        for run in job.runs:
            transfer = run.transfer
            if transfer is None or transfer.busy or not transfer.done:
                left.append(run)
                continue
            moved = transfer.num_blocks
            run.num_moved += moved
            rest = transfer.outcomes[moved:]
            # A lane holds so many bytes at once. Loads wait for it; what is stored is given up where nothing moves.
            if rest and rest[0] is Outcome.FULL and now_s < job.deadline_s and (moved or job.job.is_promotion):
                self._start(job, run)
                left.append(run)
            else:
                job.moved.update(run.keys[: run.num_moved])
        job.runs = left

    def _result(self, job: _Job) -> JobResult:
        missed = [block for block in job.keys if block not in job.moved]
        if job.job.is_promotion and missed:
            asked = self._asked.get(job.job.req_context.req_id)
            if asked is not None:
                asked.missed.update(missed)
            _log.warning("request %s: %d chunks did not arrive", job.job.req_context.req_id, len(missed))
        return JobResult(
            job_id=job.job.job_id,
            success=not missed,
            successful_keys=tuple(job.keys[block] for block in job.moved) or None,
            transfer_time=time.monotonic() - job.began_s,
            transfer_bytes=len(job.moved) * self._row_bytes,
        )


def _plain(rows: npt.NDArray[Any] | Sequence[int]) -> list[int]:
    return [int(row) for row in rows]


def config_of(tables: dict[str, Any]) -> Config:
    """The store's configuration: files, Redis or both. Raises ``ConfigError``."""
    if "memory" in tables:
        raise ConfigError("secondary_tiers: memory is vLLM's own CPU tier here: leave it out, set cpu_bytes_to_use")
    config = Config.from_mapping({**tables, "memory": {"capacity": "0"}})
    if config.file is None and config.redis is None:
        raise ConfigError("secondary_tiers: KVStoreTier needs a file or a redis table, or it has nowhere to store")
    return config


def weights_of(config: Any, weights: str | None) -> bytes:
    """A digest of the model's weights. Raises ``ConfigError`` where they cannot be found."""
    path = Path(weights or config.model.name)
    if not path.exists():
        raise ConfigError(
            f"cannot find the weights of {config.model.name!r}: give vLLM the model as a directory, or say"
            ' "weights": where they lie; without them replaced weights would go unnoticed'
        )
    return weights_digest(path)


def layout_of(config: Any, row_bytes: int) -> Layout:
    """Of a row: opaque, with all in its name that decides how its bytes lie."""
    form = {
        "groups": [asdict(group) for group in config.groups],
        "bytes": config.worker_kv_bytes_per_block,
        "dtype": config.model.dtype,
        "cache": asdict(config.cache),
        "parallel": [
            getattr(config.parallel, name) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        ],
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
        "order": config.kv_cache_layout,
        "cpu": "" if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability(),
    }
    return Layout(
        dtype="uint8",
        num_layers=1,
        num_heads=1,
        plane_dims=(row_bytes,),
        tokens_per_block=1,
        engine_format=f"vllm-{vllm.__version__}-offload {json.dumps(form, sort_keys=True, default=str)}",
    )
