"""Whether batches of copies are worth it on this device: tried when a copier is opened, with memory of our own.

Rule 1: it takes ``LIMIT_S`` twice at most, whatever the device does. What is not known by then is no.
Rule 2: a batch is used if it moved bytes there and back exactly, and was faster in both directions.
Rule 3: memory is given back when the device is seen to be through with it. If it is not, nobody ever gets it.
"""

import logging
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpu_io.direction import keep_for_good
from gpu_io.streams import Batch, Device, Fence, Stream, Work
from gpu_io.works import Copy, CopyBatch

LIMIT_S = 0.1
"""Twenty times what a link of 25 GB/s needs for it all, where copies are of 256 KiB."""
WIN = 0.95
"""A batch has to take less than this part of the time of single copies: less may be noise."""
NUM_COPIES = 16
REPEATS = 5

_log = logging.getLogger(__name__)


def calibrated(device: Device, copy_bytes: int) -> Batch | None:
    """What ``device`` has for batches, if it is faster than single copies of ``copy_bytes``, a multiple of 8."""
    batch = device.batch()
    if batch is None:
        return None
    stream = device.stream()
    num_bytes = NUM_COPIES * copy_bytes
    taken: list[Tensor] = []
    try:
        taken.append(device.pinned_memory(3 * num_bytes))
        taken.append(device.memory(2 * num_bytes))
        stream.wait(device.compute_fence())  # it may have been compute's
        wins = _wins(device, stream, batch, *(memory.view(-1, NUM_COPIES, copy_bytes) for memory in taken))
        _log.info("batches of copies are %s", "used" if wins else "not faster on this device, and not used")
    except RuntimeError as error:
        _log.warning("batches of copies are not used: %s", error)
        wins = False
        try:
            _see_through(stream.fence(), time.monotonic() + LIMIT_S)
        except RuntimeError:
            _log.warning("the device may still write to %d bytes, which are lost", sum(map(len, taken)))
            keep_for_good(taken)
            return None
    for memory in taken:
        device.free(memory)
    return batch if wins else None


def _wins(device: Device, stream: Stream, batch: Batch, host: Tensor, there: Tensor) -> bool:
    """Rule 2: of host memory ``[3][copy][byte]`` the first is sent, on the device ``[2][copy][byte]`` it is received.

    Raises ``RuntimeError`` if the driver refuses, if bytes differ or if time is up.
    """
    deadline_s = time.monotonic() + LIMIT_S
    sent, back, single_back = host
    sent.view(torch.int64).copy_(torch.arange(sent.numel() // 8).view(NUM_COPIES, -1))
    rivals = [
        [_batched(batch, there[0], sent)], _singles(there[1], sent),
        [_batched(batch, back, there[0])], _singles(single_back, there[1]),
    ]  # fmt: skip
    times = [[_timed(stream, works, deadline_s) for works in rivals] for _ in range(REPEATS + 1)]  # in turns
    device.host_copy(single_back.view(-1), back.view(-1))
    if not single_back.equal(sent):
        raise RuntimeError("one moved other bytes than it was given")
    batched_in, single_in, batched_out, single_out = (
        statistics.median(column) for column in zip(*times[1:], strict=True)
    )
    return bool(batched_in < WIN * single_in and batched_out < WIN * single_out)


def _timed(stream: Stream, works: Sequence[Work], deadline_s: float) -> float:
    """Seconds until the host sees that they are done."""
    started_s = time.perf_counter()
    for work in works:
        stream.submit(work)
    _see_through(stream.fence(), deadline_s)
    return time.perf_counter() - started_s


def _see_through(fence: Fence, deadline_s: float) -> None:
    while not fence.query():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the device did not pass a fence in {LIMIT_S} s")


def _singles(targets: Tensor, sources: Tensor) -> list[Work]:
    return [Copy(target, source) for target, source in zip(targets, sources, strict=True)]


def _batched(batch: Batch, targets: Tensor, sources: Tensor) -> Work:
    def refused(error: RuntimeError) -> None:
        raise error

    rows = [
        (target.data_ptr(), source.data_ptr(), len(target)) for target, source in zip(targets, sources, strict=True)
    ]
    return CopyBatch(batch, np.array(rows, dtype=np.int64), refused)
