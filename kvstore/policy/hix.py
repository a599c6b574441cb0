"""HIX, eviction by hazard index: what leaves first is what buys the fewest hits per block-second.

Blocks are kept by segments, the stretches of a chain that one request used last. A life table learns from all requests
how long such a segment waits for its next use, given what is known of it; the retention index of that life at the
segment's age ranks it. A request whose blocks would rank lowest at once is not kept: admission is the same order.

Rule 1: the owner's calls only read tables; learning is a pure job that ``refit`` hands out, applied when it is done.
Rule 2: everything that grows with the requests is bounded: history, observations, and what is expected.
Rule 3: seconds are the policy's own: a clock that is set back stands, one that leaps moves a day at most, and where it
stands, time goes by requests.
Rule 4: what a request uses outranks everything else until the request ends, or has run for ``MAX_RUNNING_S``.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from math import log2
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.policy.base import Refit
from kvstore.policy.history import History, Visit, marker_depths
from kvstore.policy.learned import Learned
from kvstore.policy.life_table import (
    NUM_GAPS,
    NUM_TURNS,
    SIZES,
    UNKNOWN,
    Codes,
    Kind,
    LifeTable,
    Match,
    Traits,
    codes_of,
    first_model,
    fit,
)
from kvstore.policy.numbering import Numbering
from kvstore.policy.retention import Floats, retention_index
from kvstore.policy.segments import ENDLESS, MAX_RANKED, Segment, Segments
from kvstore.types import Request

K = TypeVar("K", bound=Hashable)
H = TypeVar("H", bound=Hashable)
V = TypeVar("V")

FIRST_REFIT_REQUESTS = 16
REFIT_REQUESTS = 128
"""A refit after so many requests, and earlier while little is known."""
MAX_EXPECTED = 4096
MAX_RUNNING_S = 600.0
"""A request that has not ended by then was forgotten by whoever should have told."""
MAX_LEAP_S = 86_400.0
MIN_STEP_S = 1 / 64
"""Every request is later than the one before it, so that there is an order where the clock is coarse or stands."""
MAX_LEAD_S = 10.0
"""How far that may run ahead of a clock that moves."""
NUM_LOWEST = 128
"""So many segments are put in order at once; more when that is not enough."""
MAX_BLOCKED = 16
"""More are looked at again when all are put in order the next time."""
MAX_BLOCKS_WITH_LAST = 64
"""Of longer chains not every block is a marker, and one block makes no difference."""


class HIX(Generic[K]):
    """The policy of one pool."""

    def __init__(self) -> None:
        self._capacity_blocks = 0
        self._is_full = False
        self._history: History[K] = History()
        self._table = LifeTable()
        self._model = first_model()
        self._segments: Segments[K] = Segments(self._curves(codes_of([UNKNOWN]))[0])
        self._apps: Numbering[K] = Numbering(SIZES.app - 1, first=1)
        self._roots: Numbering[K] = Numbering(SIZES.root)
        self._namespaces: Numbering[bytes] = Numbering(SIZES.namespace)
        self._numberings: dict[str, Numbering[Any]] = {
            "app": self._apps,
            "root": self._roots,
            "namespace": self._namespaces,
        }
        self._now_s = 0.0
        self._told_s = 0.0
        """What ``_now_s`` would be had the clock never stood."""
        self._wall_s: float | None = None
        self._num_requests = 0
        self._next_refit = FIRST_REFIT_REQUESTS
        self._expected: OrderedDict[K, Segment[K]] = OrderedDict()
        """The first block that a request lacked, and the part of it that the block belongs to."""
        self._running: OrderedDict[str, list[Segment[K]]] = OrderedDict()
        self._ranking: list[Segment[K]] = []
        """Segments from the worst on, last first, as of the last request."""
        self._blocked: deque[Segment[K]] = deque(maxlen=MAX_BLOCKED)
        """Those of the ranking that were passed over last, because their tails may not leave, from the worst on."""

    def resize(self, capacity_blocks: int) -> None:
        """How many blocks there is room for; more may come where it has grown, until a victim is asked for."""
        self._is_full = self._is_full and capacity_blocks <= self._capacity_blocks
        self._capacity_blocks = capacity_blocks

    # ---- requests

    def arrive(self, request: Request, chain: Sequence[K]) -> int:
        """What the request uses becomes its segments; returns how many blocks rank above what they would displace."""
        self._tick(request.now_s)
        if not chain:
            return 0
        self._num_requests += 1
        depths = marker_depths(len(chain))
        before, num_known = self._history.find(chain, depths)
        visit, match, gap_s = self._place(chain, depths, before, num_known)
        for depth in depths:
            observation = self._history.unwatch(chain[depth])
            if observation is not None:
                self._table.use(observation, self._now_s)
        num_resident, left = self._segments.take(chain)
        parts = self._parts(chain, visit, self._traits(request, chain, visit, match, gap_s, num_known))
        if before is not None and match is Match.BRANCH and num_known > before.num_shared:
            self._supersede(before, num_known, left)
        worth = self._worth(parts, num_resident, len(chain))
        for part in parts:
            held = chain[part.start : min(part.end, num_resident)]
            if held:
                self._segments.give(part, held)
        self._history.remember(visit, [chain[depth] for depth in depths])
        if num_resident < len(chain):
            _put(self._expected, chain[num_resident], parts[0].part_at(num_resident))
        self._begin(request.request_id, parts)
        return worth

    def finish(self, request: Request, output_tokens: int) -> None:
        """The length of the answer says something about the next turn."""
        for part in self._end(request.request_id):
            self._table.set_output(part.observation, 1 + _size(output_tokens))
            self._segments.describe(part, part.traits._replace(output_size=1 + _size(output_tokens)), part.used_s)

    # ---- blocks

    def insert(self, key: K, parent: K | None) -> None:
        """It belongs to the request that lacked it, or to that of its parent."""
        above = self._segments.of(parent)
        part = self._expected.pop(key, None)
        if part is None and above is not None and above.keys[-1] == parent:
            depth = above.start + len(above.keys)
            part = above if depth < above.end else above.part_at(depth)
        if part is None or (part.keys and part.keys[-1] != parent):
            part = Segment(0 if above is None else above.start + len(above.keys), ENDLESS, UNKNOWN, self._now_s)
        self._segments.append(part, key)

    def remove(self, key: K) -> None:
        """Its segment is shorter now."""
        self._segments.remove(key)

    def victim(self, may_leave: Callable[[K], bool]) -> K | None:
        """The tail of the lowest segment whose tail may leave."""
        self._is_full = True
        for num_lowest in (0, NUM_LOWEST, MAX_RANKED):
            if num_lowest:
                self._rank(num_lowest)
            while self._ranking:
                keys = self._ranking[-1].keys
                if keys and may_leave(keys[-1]):
                    return keys[-1]
                segment = self._ranking.pop()
                if keys:
                    self._blocked.append(segment)
                else:  # the one above it in its chain may have had to wait for this
                    self._ranking.extend(reversed(self._blocked))
                    self._blocked.clear()
        return None

    # ---- learning

    def refit(self) -> Refit | None:
        """A pure job that learns from the requests so far, once there are enough; what it returns applies it."""
        if self._num_requests < self._next_refit:
            return None
        self._next_refit = self._num_requests + min(max(FIRST_REFIT_REQUESTS, self._num_requests // 4), REFIT_REQUESTS)
        observations, (versions, traits) = self._table.observations(self._now_s), self._segments.rows()

        def job() -> Callable[[], None]:
            model = fit(observations)
            kinds, rows = np.unique(traits, axis=0, return_inverse=True)
            curves = np.concatenate(
                [retention_index(model.hazards(kinds[at : at + 256])) for at in range(0, len(kinds), 256)]
            )[rows.reshape(-1)]

            def apply() -> None:
                self._model = model
                self._segments.set_curves(versions, curves)
                self._ranking.clear()

            return apply

        return job

    def learned(self) -> Learned[K]:
        """What it has learned so far, to be kept over a restart."""
        codes = {trait: numbering.entries() for trait, numbering in self._numberings.items()}
        return Learned(self._table.observations(self._now_s), self._model, codes, self._table.num_opened)

    def resume(self, learned: Learned[K]) -> None:
        """Go on with what was learned before a restart; keys that have come since keep their codes."""
        codes = {}
        for trait, numbering in self._numberings.items():
            codes[trait] = np.arange(getattr(SIZES, trait))
            for key, code in learned.codes[trait]:
                codes[trait][code] = numbering.number(key)
        known = learned.recoded(codes)
        self._table.load(known.observations)
        self._model = known.model

    def check(self, resident: Set[K]) -> None:
        """Prove that exactly ``resident`` is held, and that nothing outgrows its bound; raises AssertionError."""
        self._segments.check(resident)
        assert len(self._expected) <= MAX_EXPECTED, "too much is expected"
        assert len(self._running) <= MAX_EXPECTED, "too many requests never end"

    # ---- the inside

    def _tick(self, wall_s: float) -> None:
        if self._wall_s is None:
            self._segments.rebase(self._now_s)
        else:
            passed_s = min(max(0.0, wall_s - self._wall_s), MAX_LEAP_S)
            self._told_s = max(self._told_s, self._now_s - MAX_LEAD_S) + passed_s
            self._now_s = max(self._now_s + MIN_STEP_S, self._told_s)
        self._wall_s = wall_s
        while self._running:
            request_id, parts = next(iter(self._running.items()))
            if self._now_s - parts[0].used_s <= MAX_RUNNING_S:
                break
            self._end(request_id)

    def _begin(self, request_id: str, parts: list[Segment[K]]) -> None:
        self._end(request_id)
        self._running[request_id] = parts
        for part in parts[0].parts:
            self._segments.set_running(part, True)
        if len(self._running) > MAX_EXPECTED:
            self._end(next(iter(self._running)))

    def _end(self, request_id: str) -> list[Segment[K]]:
        """The parts of the request, which count by their worth from now on; none if it does not run."""
        parts = self._running.pop(request_id, [])
        for part in parts[0].parts if parts else ():
            self._segments.set_running(part, False)
        return parts

    def _place(
        self, chain: Sequence[K], depths: Sequence[int], before: Visit[K] | None, num_known: int
    ) -> tuple[Visit[K], Match, float | None]:
        """What this request is to those before it, and how long ago the one was that it goes on from."""
        own_depth = next((depth for depth in reversed(depths) if depth <= len(chain) - 2), 0)
        visit: Visit[K] = Visit(self._now_s, len(chain), own_depth)
        if before is None:
            return visit, Match.NEW, None
        if before.is_continued_by(num_known):
            visit.num_shared, visit.turn, visit.app = before.num_shared, before.turn + 1, before.app
            match = Match.REPETITION if num_known == len(chain) else Match.CONTINUATION
            return visit, match, self._now_s - before.now_s
        visit.num_shared = num_known
        visit.app = self._apps.number(chain[num_known - 1])
        return visit, Match.REPETITION if num_known == len(chain) else Match.BRANCH, None

    def _parts(self, chain: Sequence[K], visit: Visit[K], traits: Traits) -> list[Segment[K]]:
        """The segments of the request, each under observation: shared, own, last, and what the answer will add."""
        shared, end = visit.num_shared, len(chain)
        last = max(shared, end - 1) if end <= MAX_BLOCKS_WITH_LAST else end
        bounds = [
            (Kind.SHARED, 0, shared, chain[shared - 1]),
            (Kind.OWN, shared, last, chain[visit.own_depth]),
            (Kind.LAST, last, end, chain[-1]),
        ]
        there = [bound for bound in bounds if bound[1] < bound[2]]
        parts = []
        for kind, start, stop, marker in there:
            known = self._shared(chain, visit, traits) if kind is Kind.SHARED else _of_kind(traits, kind)
            part: Segment[K] = Segment(start, stop, known, self._now_s)
            part.observation = self._table.open(known, self._now_s)
            self._history.watch(marker, part.observation)
            if kind is Kind.OWN:
                visit.own = marker, known
            parts.append(part)
        growth: Segment[K] = Segment(end, ENDLESS, traits, self._now_s)
        for part in parts:
            part.parts = [*parts, growth]
        return parts

    def _traits(
        self,
        request: Request,
        chain: Sequence[K],
        visit: Visit[K],
        match: Match,
        gap_s: float | None,
        num_known: int,
    ) -> Traits:
        """Of the own part."""
        num_new = len(chain) - num_known
        return Traits(
            shape=_gap(gap_s),
            turn=_turn(visit.turn),
            input_size=_size(request.input_tokens),
            suffix_size=_size(request.input_tokens * num_new // len(chain)),
            output_size=0,
            app=visit.app,
            root=self._roots.number(chain[0]),
            namespace=self._namespaces.number(request.namespace),
            match=match,
            hint=_hint(request.hints),
            kind=Kind.OWN,
        )

    def _shared(self, chain: Sequence[K], visit: Visit[K], traits: Traits) -> Traits:
        """Of the part that other sessions have too: by how long ago and how often it was used, by whomever."""
        last = self._history.last(chain[visit.num_shared - 1])
        gap_s = None
        if last is not None:
            gap_s = self._now_s - last.now_s
            visit.num_shared_uses = 1 + (last.num_shared_uses if last.num_shared >= visit.num_shared else 1)
        turn = NUM_TURNS + _turn(visit.num_shared_uses)
        return traits._replace(shape=NUM_GAPS + _gap(gap_s), turn=turn, kind=Kind.SHARED)

    def _supersede(self, before: Visit[K], num_known: int, left: Sequence[Segment[K]]) -> None:
        """A session took another branch: what is left of what it had before lives another life from now on."""
        if before.own is None:
            return
        marker, known = before.own
        number = self._history.unwatch(marker)
        if number is None:
            return
        traits = _of_kind(known, Kind.SUPERSEDED)
        if 2 * num_known > before.num_shared + before.own_depth + 1:  # most of it has been used
            self._table.use(number, self._now_s)
        else:
            self._table.censor(number, self._now_s)
        self._history.watch(marker, self._table.open(traits, self._now_s))
        for segment in left:
            if segment.observation == number:
                self._segments.describe(segment, traits, self._now_s)

    def _worth(self, parts: Sequence[Segment[K]], num_resident: int, num_blocks: int) -> int:
        """How many leading blocks rank above the ones that would have to leave for them."""
        free = self._capacity_blocks - len(self._segments)
        if not self._is_full or num_blocks - num_resident <= free:
            self._ranking.clear()
            return num_blocks
        # As coarse as the table, so that of equals the new one stays.
        curves = self._segments.refresh(self._curves, [part.traits for part in parts])
        mine = curves[:, 0].astype(np.float32)
        indices, lengths = self._rank(NUM_LOWEST)
        if num_blocks - num_resident > lengths.sum():
            indices, lengths = self._rank(MAX_RANKED)
        below = np.concatenate([[0], np.cumsum(lengths)])
        keep = num_resident
        for part, index in zip(parts, mine, strict=True):
            start = max(part.start, num_resident)
            if start >= part.end:
                continue
            room = free + int(below[np.searchsorted(indices, index, side="right")]) - (start - num_resident)
            keep = min(part.end, start + max(0, room))
            if keep < part.end:
                break
        return keep

    def _rank(self, num_lowest: int) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Put the lowest in order; returns indices and lengths from the lowest index on."""
        self._segments.refresh(self._curves)
        segments, indices, lengths = self._segments.ranked(self._now_s, num_lowest)
        self._ranking = segments[::-1]
        self._blocked.clear()
        return indices, lengths

    def _curves(self, traits: Codes) -> Floats:
        return retention_index(self._model.hazards(traits))


def _of_kind(traits: Traits, kind: Kind) -> Traits:
    return traits if kind is Kind.OWN else traits._replace(shape=2 * NUM_GAPS + kind - Kind.LAST, kind=kind)


def _gap(gap_s: float | None) -> int:
    """The octave of the time since the last use; 0: there was none."""
    return 0 if gap_s is None else min(NUM_GAPS - 1, 1 + int(log2(max(gap_s, 0.5) * 2)))


def _turn(number: int) -> int:
    """The number of a use, and its octave from the fifth on."""
    return number - 1 if number < 5 else min(NUM_TURNS - 1, 3 + int(log2(number / 2)))


def _hint(hints: Mapping[str, object]) -> int:
    """What the engine knows of the session: 0 nothing, 1 it goes on, 2 it ends."""
    if hints.get("session_end") is True:
        return 2
    return int(hints.get("session_end") is False or bool(hints.get("tool_call_pending")))


def _size(num_tokens: int) -> int:
    """The octave of a length."""
    return min(15, max(0, num_tokens.bit_length() - 3))


def _put(table: OrderedDict[H, V], key: H, value: V) -> None:
    """The newest, at the cost of the oldest."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > MAX_EXPECTED:
        table.popitem(last=False)
