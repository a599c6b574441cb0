"""The simulated device: streams in order, fences that order them, any delay, and memory that shows who was too late."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from gpu_io.hazards import HazardError
from gpu_io.ranges import Ranges, ranges_of
from gpu_io.simulated import POISON, Adversarial, Prompt, Random, Scheduler, SimulatedDevice
from gpu_io.streams import Work


@dataclass
class Note:
    """Writes down that it ran."""

    name: str
    notes: list[str]
    read: list[Tensor] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)

    def run(self) -> None:
        self.notes.append(self.name)

    def reads(self) -> list[Ranges]:
        return [ranges_of(tensor) for tensor in self.read]

    def writes(self) -> list[Ranges]:
        return [ranges_of(tensor) for tensor in self.written]


SCHEDULERS: list[Callable[[int], Scheduler]] = [lambda seed: Prompt(), Random, Adversarial]


def orders(kind: Callable[[int], Scheduler], *, fenced: bool) -> set[str]:
    """The orders in which two works on each of two streams ran, over many seeds."""
    seen = set()
    for seed in range(300):
        device, notes = SimulatedDevice(kind(seed)), list[str]()
        one, other = device.stream(), device.stream()
        one.submit(Note("a", notes))
        one.submit(Note("b", notes))
        if fenced:
            other.wait(one.fence())
        other.submit(Note("c", notes))
        other.submit(Note("d", notes))
        device.finish()
        seen.add("".join(notes))
    return seen


def test_a_prompt_device_does_what_it_is_given_in_that_order() -> None:
    assert orders(SCHEDULERS[0], fenced=False) == {"abcd"}


def test_a_random_device_has_every_order_that_keeps_those_of_its_streams() -> None:
    assert orders(Random, fenced=False) == {"abcd", "acbd", "acdb", "cabd", "cadb", "cdab"}


def test_an_adversarial_device_runs_one_stream_far_ahead_of_another() -> None:
    assert orders(Adversarial, fenced=False) == {"abcd", "cdab"}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_wait_orders_streams_on_any_device(kind: Callable[[int], Scheduler]) -> None:
    assert orders(kind, fenced=True) == {"abcd"}


def test_the_same_seed_has_the_same_order() -> None:
    def order() -> list[str]:
        device, notes = SimulatedDevice(Random(7)), list[str]()
        streams = [device.stream() for _ in range(5)]
        for number in range(40):
            streams[number % 5].submit(Note(str(number), notes))
        device.finish()
        return notes

    assert order() == order()


def test_nothing_runs_on_an_adversarial_device_before_somebody_waits() -> None:
    device, notes = SimulatedDevice(Adversarial(1)), list[str]()
    stream = device.stream()
    stream.submit(Note("a", notes))
    fence = stream.fence()
    assert not notes
    while not fence.query():
        pass
    assert notes == ["a"]


def bytes_of(device: SimulatedDevice) -> Tensor:
    memory = torch.zeros(16, dtype=torch.uint8)
    device.know(memory, "bytes")
    return memory


def test_streams_that_share_bytes_need_a_fence_even_if_all_comes_out_right() -> None:
    device, notes = SimulatedDevice(), list[str]()
    memory, one, other = bytes_of(device), device.stream(), device.stream()
    one.submit(Note("a", notes, written=[memory]))
    with pytest.raises(HazardError, match=r"Note reads bytes in stream 2, .* after stream 1 wrote there"):
        other.submit(Note("b", notes, read=[memory]))
    other.wait(one.fence())
    other.submit(Note("b", notes, read=[memory]))


def test_the_host_may_look_when_it_has_seen_the_fence() -> None:
    device, notes = SimulatedDevice(), list[str]()
    memory, stream = bytes_of(device), device.stream()
    stream.submit(Note("a", notes, written=[memory]))
    fence = stream.fence()
    with pytest.raises(HazardError, match="the host reads bytes"):
        device.host_reads(memory)
    assert fence.query()
    device.host_reads(memory)
    device.host_writes(memory)


def test_a_work_comes_after_what_the_host_did_before_it_was_submitted() -> None:
    device, notes = SimulatedDevice(), list[str]()
    memory, stream = bytes_of(device), device.stream()
    device.host_writes(memory)
    stream.submit(Note("a", notes, read=[memory]))
    with pytest.raises(HazardError, match="the host writes bytes"):
        device.host_writes(memory)


def test_compute_waits_for_a_fence_and_side_streams_for_compute() -> None:
    device, notes = SimulatedDevice(Adversarial(3)), list[str]()
    memory, stream = bytes_of(device), device.stream()
    device.compute.submit(Note("a", notes, written=[memory]))
    stream.wait(device.compute_fence())
    stream.submit(Note("b", notes, written=[memory]))
    stream.fence().wait()
    device.compute.submit(Note("c", notes, written=[memory]))
    device.finish_compute()
    assert notes == ["a", "b", "c"]


def test_new_memory_is_poison_and_was_somebody_elses() -> None:
    device, notes = SimulatedDevice(), list[str]()
    memory, stream = device.memory(8), device.stream()
    assert set(memory.tolist()) == {POISON}
    with pytest.raises(HazardError, match="compute wrote there"):
        stream.submit(Note("a", notes, written=[memory]))
    stream.wait(device.compute_fence())
    stream.submit(Note("a", notes, written=[memory]))


def test_freed_memory_is_poisoned_by_its_next_owner_and_touched_by_nobody_else() -> None:
    device, notes = SimulatedDevice(), list[str]()
    memory, stream = device.memory(8), device.stream()
    stream.wait(device.compute_fence())
    stream.submit(Note("a", notes, written=[memory]))
    fence = stream.fence()
    with pytest.raises(HazardError, match=r"compute, .* after stream 1 wrote"):
        device.free(memory)
    assert fence.query()
    memory.fill_(1)
    device.free(memory)
    assert set(memory.tolist()) == {POISON}
    with pytest.raises(HazardError, match="nobody"):
        stream.submit(Note("b", notes, read=[memory]))


def test_pinned_memory_is_the_hosts_again_when_it_is_freed() -> None:
    device, notes = SimulatedDevice(), list[str]()
    pinned, stream = device.pinned([1, 2, 3]), device.stream()
    stream.submit(Note("a", notes, read=[pinned]))
    with pytest.raises(HazardError, match="the host writes pinned memory"):
        device.free(pinned)


@pytest.mark.parametrize("reads", [True, False])
def test_the_host_copies_what_no_stream_may_touch_at_the_same_time(reads: bool) -> None:
    device, notes = SimulatedDevice(), list[str]()
    target, source = device.pinned_memory(4), device.pinned_memory(4)
    assert set(source.tolist()) == {POISON}
    stream = device.stream()
    stream.submit(Note("a", notes, read=[target] if reads else [], written=[] if reads else [source]))
    fence = stream.fence()
    with pytest.raises(HazardError, match="the host writes" if reads else "the host reads"):
        device.host_copy(target, source)
    assert fence.query()
    source.fill_(7)
    device.host_copy(target, source)
    assert target.tolist() == [7] * 4


def test_a_device_that_hangs_passes_nothing() -> None:
    device, notes = SimulatedDevice(), list[str]()
    stream = device.stream()
    device.is_held = True
    stream.submit(Note("a", notes))
    fence = stream.fence()
    assert not fence.query()
    device.finish()
    device.is_held = False
    assert fence.query()
    assert notes == ["a"]


def test_a_wait_for_what_nobody_does_is_reported() -> None:
    device, notes = SimulatedDevice(), list[str]()
    stream = device.stream()
    device.is_held = True
    stream.wait(device.compute_fence())
    device.is_held = False
    device.compute._queue.clear()
    stream.submit(Note("a", notes))
    with pytest.raises(HazardError, match="stream 1 wait for what nobody"):
        device.finish()


def test_after_so_many_works_the_device_takes_none() -> None:
    device, notes = SimulatedDevice(), list[str]()
    stream = device.stream()
    device.fail_after = 1
    works: list[Work] = [Note("a", notes), Note("b", notes), Note("c", notes)]
    stream.submit(works[0])
    with pytest.raises(RuntimeError, match="out of memory"):
        stream.submit(works[1])
    stream.submit(works[2])
    assert notes == ["a", "c"]
