"""What vLLM lacks to run its OffloadingConnector on a CPU: a worker that copies between pages and rows of its CPU tier.

Everything else is vLLM's own. Named by ``{"spec_name": "CPUSpec", "spec_module_path": "tests.vllm.cpu_offload"}``.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CPUWorker(OffloadingWorker):
    """Copies at once; pages and chunks are of one size."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._refs = kv_caches.group_data_refs
        self._pages = [
            one.tensor.view(torch.int8).view((-1, one.page_size_bytes))  # as vLLM's worker for GPUs sees them
            for one in kv_caches.tensors
        ]
        self._rows = [region.create_next_worker_view(one.page_size_bytes) for one in kv_caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Pages to rows."""
        for pages, rows, source, target in self._copies(src_spec, dst_spec.chunk_ids):
            rows[target] = pages[source]
        self._finished.append(TransferResult(job_id, True, 1, 1e-6))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        """Rows to pages."""
        for pages, rows, target, source in self._copies(dst_spec, src_spec.chunk_ids):
            pages[target] = rows[source]
        self._finished.append(TransferResult(job_id, True, 1, 1e-6))
        return True

    def _copies(self, gpu_spec: Any, chunk_ids: Any) -> Any:
        """For each layer's tensor: its pages, its rows, and which of them are each other's."""
        start = 0
        for refs, size in zip(self._refs, gpu_spec.group_sizes, strict=True):
            pages = torch.from_numpy(gpu_spec.block_ids[start : start + size]).long()
            rows = torch.as_tensor(chunk_ids[start : start + size]).long()
            for ref in refs:
                yield self._pages[ref.tensor_idx], self._rows[ref.tensor_idx], pages, rows
            start += size

    def get_finished(self) -> list[TransferResult]:
        """Since the last time."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """They are over."""

    def shutdown(self) -> None:
        """Let the rows go."""
        self._rows.clear()
        self._region.cleanup()


class CPUSpec(TieringOffloadingSpec):
    """vLLM's own, but for the worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """One for a rank."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CPUWorker(kv_caches, region)
