"""The ticket of a copy with slots that are not registered: it goes through places of the bounce, in rounds.

Rule 1: in a round the device copies between pages on the one side, and places and registered slots on the other.
Rule 2: of an onboard the host copies slots to places before it submits the round; of an offload places to slots, when
it has seen the round's ends.
Rule 3: the next round begins when the host has seen the ends of the one before. Whoever asks after the ticket makes it
go on.
Rule 4: when the ticket has failed the host copies nothing any more, and no round begins.
Rule 5: the places are given back when the ticket is done, and not before.

Invariant: the host touches a place only while no stream may.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_io.bounce import Bounce
from gpu_io.pipeline_ticket import PipelineTicket, comes_true


class Round(NamedTuple):
    """Some of a ticket's blocks, by index."""

    blocks: range
    starts: list[int]
    """Where the device finds them: their slots, or places instead."""
    crossings: list[tuple[int, int]]
    """A place, and the slot whose bytes go through it."""


def rounds_of(slots: Sequence[int], are_registered: Sequence[bool], places: Sequence[int]) -> list[Round]:
    """``slots`` in as few rounds as ``places`` allow, in order; there is at least one place."""
    rounds = [Round(range(0), [], [])]
    for block, (slot, is_registered) in enumerate(zip(slots, are_registered, strict=True)):
        if not is_registered and len(rounds[-1].crossings) == len(places):
            rounds.append(Round(range(block, block), [], []))
        blocks, starts, crossings = rounds[-1]
        if is_registered:
            starts.append(slot)
        else:
            starts.append(places[len(crossings)])
            crossings.append((places[len(crossings)], slot))
        rounds[-1] = Round(range(blocks.start, block + 1), starts, crossings)
    return rounds


class BouncedTicket:
    """Rounds, each with a ticket of its own."""

    def __init__(
        self,
        slots: Sequence[memoryview],
        rounds: Sequence[Round],
        bounce: Bounce,
        submit: Callable[[Round], PipelineTicket],
        *,
        is_offload: bool,
    ) -> None:
        """``submit`` gives a round to the device; the first one is begun here."""
        self._slots = slots  # kept alive as long as the host may copy
        self._rounds = deque(rounds)
        self._places = [place for place, _ in rounds[0].crossings]
        self._bounce = bounce
        self._submit = submit
        self._is_offload = is_offload
        self._is_late = False
        self._is_over = False
        self._ticket = self.begin_round()

    @property
    def failed(self) -> bool:
        """Whether a round has, or somebody waited too long."""
        return self._is_late or self._ticket.failed

    @property
    def num_works(self) -> int:
        """Of the round that is under way."""
        return self._ticket.num_works

    def done(self) -> bool:
        """Whether the last round has ended, and its bytes are in their slots."""
        while not self._is_over and self._ticket.done():
            self._end()
        return self._is_over

    def pages_free(self) -> bool:
        """Whether the last round touches its pages no more."""
        return self.done() or (len(self._rounds) == 1 and self._ticket.pages_free())

    def wait(self) -> None:
        """See it through, or give up."""
        self._is_late |= not comes_true(self.done)

    def wait_layer(self, layer: int) -> None:
        """The host waits for all rounds but the last, once if they do not come; compute for its layer of that one."""
        self._is_late |= not comes_true(lambda: self.failed or len(self._rounds) == 1 or self.done())
        self._ticket.wait_layer(layer)

    def let_go(self) -> None:
        """Give back what the last round's submission took."""
        self._ticket.let_go()

    def begin_round(self) -> PipelineTicket:
        """The first of those that are left."""
        if not self._is_offload:
            for place, slot in self._rounds[0].crossings:
                self._bounce.copy(place, slot)
        return self._submit(self._rounds[0])

    def _end(self) -> None:
        if self._is_offload and not self.failed:
            for place, slot in self._rounds[0].crossings:
                self._bounce.copy(slot, place)
        self._ticket.let_go()
        self._rounds.popleft()
        if self._rounds and not self.failed:
            self._ticket = self.begin_round()
        else:
            self._bounce.give_back(self._places)
            self._is_over = True
