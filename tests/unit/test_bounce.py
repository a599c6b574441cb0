"""Slots that the driver was not told of: what goes through the bounce, when the host copies, and when it does not."""

import time
from collections.abc import Sequence

import pytest
import torch

from gpu_io import bounce, direction, pipeline_ticket
from gpu_io.bounced_ticket import Round, rounds_of
from gpu_io.direction import Direction
from gpu_io.packing import TorchPacker
from gpu_io.pipeline import PipelineCopier
from gpu_io.simulated import Adversarial, Prompt, Scheduler, SimulatedDevice, SimulatedStream
from gpu_io.streams import Work
from gpu_io.testing import GUARD, NUM_LAYERS, NUM_PAGES, STRIDED, Pages, Slots, finish, started
from gpu_io.works import Copy

BLOCK_BYTES = 768


class Recorder(SimulatedDevice):
    """Remembers the works of its side streams, and what the host copied."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.works: list[Work] = []
        self.num_host_copies = 0

    def stream(self) -> SimulatedStream:
        stream = super().stream()
        submit = stream.submit

        def recorded(work: Work) -> None:
            self.works.append(work)
            submit(work)

        stream.submit = recorded  # type: ignore[method-assign]  # a seam of this test alone
        return stream

    def host_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_host_copies += 1
        super().host_copy(target, source)

    def dmas(self) -> list[int]:
        """Bytes of each copy over the link, tables aside."""
        return [
            work.target.numel() for work in self.works if isinstance(work, Copy) and work.target.dtype == torch.uint8
        ]


class World:
    """Pages and slots, of which ``registered`` are known to the driver, and a bounce with room for ``num_places``."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        num_places: int,
        registered: Sequence[int] = (),
        scheduler: Scheduler | None = None,
    ) -> None:
        monkeypatch.setattr(bounce, "BOUNCE_BYTES", num_places * BLOCK_BYTES)
        monkeypatch.setattr(pipeline_ticket, "_QUERY_INTERVAL_S", 0)
        self.device = Recorder(scheduler or Prompt())
        self.engine = Pages(STRIDED[0], 1, dtype=torch.bfloat16, device="cpu")
        self.slots = Slots(self.engine.kv, NUM_PAGES)
        for tensor in self.engine.tensors:
            self.device.know(tensor, "pages")
        self.memory = torch.frombuffer(self.slots.memory, dtype=torch.uint8)
        self.device.know(self.memory, "slots")
        known = {self.memory.data_ptr() + slot * BLOCK_BYTES for slot in registered}
        monkeypatch.setattr(Direction, "is_registered", lambda self, address, num_bytes: address in known)
        self.copier = PipelineCopier(self.engine.kv, self.device, TorchPacker(self.engine.kv))

    def blocks(self, pages: Sequence[int]) -> bytes:
        return b"".join(self.engine.block([page]) for page in pages)


# ---- rounds


@pytest.mark.parametrize(
    ("registered", "places", "expected"),
    [
        ("", "", [Round(range(0), [], [])]),
        ("111", "", [Round(range(3), [10, 20, 30], [])]),
        ("000", "abc", [Round(range(3), [-1, -2, -3], [(-1, 10), (-2, 20), (-3, 30)])]),
        ("000", "ab", [Round(range(2), [-1, -2], [(-1, 10), (-2, 20)]), Round(range(2, 3), [-1], [(-1, 30)])]),
        ("10101", "a", [Round(range(3), [10, -1, 30], [(-1, 20)]), Round(range(3, 5), [-1, 50], [(-1, 40)])]),
        ("0110", "a", [Round(range(3), [-1, 20, 30], [(-1, 10)]), Round(range(3, 4), [-1], [(-1, 40)])]),
    ],
)
def test_a_round_is_as_many_blocks_as_there_are_places_for(registered: str, places: str, expected: list[Round]) -> None:
    slots = [10 * (block + 1) for block in range(len(registered))]
    addresses = [-1 - number for number in range(len(places))]
    assert rounds_of(slots, [each == "1" for each in registered], addresses) == expected


# ---- what is copied


@pytest.mark.parametrize("registered", [(), (0, 1, 5), range(NUM_PAGES)])
@pytest.mark.parametrize("num_places", [1, 4, 100])
def test_slots_that_are_registered_or_not_are_copied_both_ways_in_any_mix(
    registered: Sequence[int], num_places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, num_places=num_places, registered=registered, scheduler=Adversarial(1))
    finish(world.copier.offload(range(NUM_PAGES), world.slots.views))
    assert bytes(world.slots.memory) == world.blocks(range(NUM_PAGES))
    offloaded = bytes(world.slots.memory)
    finish(world.copier.onboard(world.slots.views, range(NUM_PAGES)[::-1]))
    assert bytes(world.slots.memory) == world.blocks(range(NUM_PAGES)[::-1]) == offloaded
    assert world.device.num_host_copies == 2 * (NUM_PAGES - len(registered))
    world.copier.close()


def test_a_device_is_given_no_slot_that_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver would copy with it while the host waits."""
    world = World(monkeypatch, num_places=4, registered=[2, 4])
    finish(world.copier.offload(range(6), world.slots.views[:6]))
    finish(world.copier.onboard(world.slots.views[:6], range(6)))
    first = world.memory.data_ptr()
    touched = {
        (start - first, num_bytes)
        for work in world.device.works
        for starts, num_bytes in (*work.reads(), *work.writes())
        for start in starts.tolist()
        if first <= start < first + len(world.slots.memory)
    }
    assert touched == {(2 * BLOCK_BYTES, BLOCK_BYTES), (4 * BLOCK_BYTES, BLOCK_BYTES)}


def test_a_round_through_places_that_are_adjacent_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, num_places=6)
    for _ in range(2):
        finish(world.copier.offload([7, 2, 5], [world.slots.views[slot] for slot in (0, 4, 8)]))
    assert world.device.dmas() == [3 * BLOCK_BYTES] * 2


def test_compute_after_wait_layer_finds_the_layers_of_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, num_places=4, scheduler=Adversarial(2))
    pages = [7, 2, 5, 0, 1]
    expected = world.engine.content()[pages]
    finish(world.copier.offload(pages, world.slots.views[:5]))
    for tensor in world.engine.tensors:
        tensor.zero_()
    ticket = started(world.copier.onboard(world.slots.views[:5], pages))
    for layer in range(NUM_LAYERS):
        ticket.wait_layer(layer)
        world.device.finish_compute()
        assert world.engine.content()[pages, layer].equal(expected[:, layer])
    finish(ticket)


def test_pages_are_free_when_the_last_round_has_gathered_them(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, num_places=4, scheduler=Adversarial(1))
    ticket = started(world.copier.offload(range(5), world.slots.views[:5]))
    assert not ticket.pages_free()
    for _ in range(1000):
        if ticket.pages_free():
            break
    assert sum(type(work).__name__ == "Pack" for work in world.device.works) == 3
    finish(ticket)


# ---- bounds


def test_what_finds_no_place_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits: None says to ask again."""
    world = World(monkeypatch, num_places=4, registered=[8])
    world.device.is_held = True
    views = world.slots.views
    first = started(world.copier.offload([1, 2], views[:2]))
    assert first is not None
    second = started(world.copier.offload([3], views[2:3]))
    num_works = len(world.device.works)
    assert world.copier.offload([4, 5], views[3:5]) is None
    assert len(world.device.works) == num_works
    third = started(world.copier.offload([4], views[3:4]))
    assert world.copier.offload([5], views[4:5]) is None
    free = started(world.copier.offload([8], views[8:]))  # needs no place
    back = started(world.copier.onboard(views[5:7], [6, 7]))  # has places of its own direction
    world.device.is_held = False
    for ticket in (first, second, third, free, back):
        finish(ticket)
    finish(world.copier.offload([5], views[4:5]))
    assert bytes(world.slots.memory[: 5 * BLOCK_BYTES]) == world.blocks(range(1, 6))


def test_no_ticket_takes_more_than_half_of_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, num_places=4)
    world.device.is_held = True
    large = started(world.copier.onboard(world.slots.views[:7], range(7)))
    other = started(world.copier.onboard(world.slots.views[7:], [7, 8]))
    assert world.device.num_host_copies == 4
    world.device.is_held = False
    finish(other)
    finish(large)


def test_the_bounce_is_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bounce.BOUNCE_BYTES == 64 << 20
    world = World(monkeypatch, num_places=4)
    sizes = [memory.numel() for memory in world.device._known.values()]
    finish(world.copier.offload(range(NUM_PAGES), world.slots.views))
    assert sizes.count(4 * BLOCK_BYTES) == 2
    world.copier.close()
    assert 4 * BLOCK_BYTES not in [memory.numel() for memory in world.device._known.values()]


def test_no_round_keeps_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, num_places=2)
    num_known = len(world.device._known)
    ticket = started(world.copier.offload(range(NUM_PAGES), world.slots.views))
    finish(ticket)
    assert len(world.device._known) == num_known


# ---- when the host copies, and when it does not


def test_an_offload_is_done_when_its_bytes_are_in_their_slots_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, num_places=4)
    ticket = started(world.copier.offload([7], world.slots.views[:1]))
    world.device.finish()
    assert set(world.slots.memory) == {GUARD}  # the device has done its part, and the host was not asked
    assert ticket.done()
    assert bytes(world.slots.views[0]) == world.blocks([7])
    assert ticket.done()
    assert world.device.num_host_copies == 1


def test_a_copy_that_takes_too_long_writes_to_no_slot_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots may be somebody else's as soon as it is done; its places are in quarantine until then."""
    world = World(monkeypatch, num_places=2)
    world.device.is_held = True
    ticket = started(world.copier.offload([0, 1, 2], world.slots.views[:3]))
    with monkeypatch.context() as patch:
        patch.setattr(pipeline_ticket, "COPY_TIMEOUT_S", 0.01)
        ticket.wait()
    assert ticket.failed
    assert not ticket.done()
    assert not ticket.pages_free()
    world.device.is_held = False
    world.device.finish()
    assert ticket.done()
    assert ticket.failed
    assert set(world.slots.memory) == {GUARD}
    assert world.device.dmas() == [BLOCK_BYTES]  # nor did another round begin
    finish(world.copier.offload([5, 6], world.slots.views[5:7]))  # the places are free again
    assert bytes(world.slots.memory[5 * BLOCK_BYTES : 7 * BLOCK_BYTES]) == world.blocks([5, 6])


def test_a_layer_that_takes_too_long_fails_the_ticket_and_begins_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, num_places=2)
    world.device.is_held = True
    ticket = started(world.copier.onboard(world.slots.views[:2], [0, 1]))
    with monkeypatch.context() as patch:
        patch.setattr(pipeline_ticket, "COPY_TIMEOUT_S", 0.01)
        ticket.wait_layer(0)
        assert ticket.failed
        patch.setattr(pipeline_ticket, "COPY_TIMEOUT_S", 60)
        started_s = time.monotonic()
        ticket.wait_layer(1)  # nor is the time spent again for each layer
        assert time.monotonic() - started_s < 10
    world.device.is_held = False
    ticket.wait()
    assert ticket.done()
    assert world.device.num_host_copies == 1


@pytest.mark.parametrize("way", ["offload", "onboard"])
@pytest.mark.parametrize("num_works", range(1, 7))
def test_a_round_that_cannot_be_submitted_fails_the_ticket_and_ends_it(
    way: str, num_works: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three rounds, of three works each."""
    world = World(monkeypatch, num_places=2, scheduler=Adversarial(1))
    views = world.slots.views[:3]
    world.device.fail_after = num_works
    ticket = started(
        world.copier.offload([0, 1, 2], views) if way == "offload" else world.copier.onboard(views, [0, 1, 2])
    )
    ticket.wait()
    world.device.fail_after = None
    assert ticket.failed
    assert ticket.done()
    assert ticket.pages_free()
    num_whole = num_works // 3
    if way == "offload":
        assert bytes(world.slots.memory[: num_whole * BLOCK_BYTES]) == world.blocks(range(num_whole))
        assert set(world.slots.memory[num_whole * BLOCK_BYTES :]) == {GUARD}
    finish(world.copier.offload([4], world.slots.views[4:5]))
    finish(world.copier.onboard(world.slots.views[4:5], [5]))
    assert world.blocks([4]) == world.blocks([5])
    world.device.is_held = True  # each place was given back once
    others = [world.copier.offload([page], world.slots.views[page:][:1]) for page in (6, 7, 8)]
    assert [other is None for other in others] == [False, False, True]
    world.device.is_held = False
    world.copier.close()


def test_close_keeps_the_bounce_that_a_stuck_device_may_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr(direction, "_kept_for_good", kept)
    monkeypatch.setattr(pipeline_ticket, "COPY_TIMEOUT_S", 0.01)
    world = World(monkeypatch, num_places=4)
    world.device.is_held = True
    ticket = started(world.copier.offload([0], world.slots.views[:1]))
    world.copier.close()
    assert sum(memory.numel() == 4 * BLOCK_BYTES for memory in world.device._known.values()) == 1
    assert any(world.copier._offloads.bounce in each for each in kept if isinstance(each, tuple))
    world.device.is_held = False
    world.device.finish()
    assert ticket.done()
    assert set(world.slots.memory) == {GUARD}
