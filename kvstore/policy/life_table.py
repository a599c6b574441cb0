"""How long until a segment is used again: hazards by age, learned from every segment that was or was not. Pure.

The model is one of proportional hazards: the hazard at an age is that of a shape, which the gap before the last use
chooses, times a multiplier for each trait, learned apart for young and for old ages. A multiplier is observed over
expected uses, fitted by iterative proportional fitting with shrinkage towards 1. A segment that has not been used
again counts as time at risk, so that nothing has to be labelled or waited for.

Invariant: an observation is open, ended by a use, or censored; each is one row of a ring, the oldest of which is
overwritten and then heard of no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.policy.retention import AGE_EDGES_S, AGE_WIDTHS_S, NUM_AGES, Floats, age_bins

NUM_OBSERVATIONS = 24_576
HALF_LIFE_OBSERVATIONS = 20_000
"""After so many newer ones an observation counts half."""
OLD_AGE_S = 20.0
"""A tool answers within that, a person rarely does: the multipliers differ before and after."""
SHRINKAGE_EVENTS = 12.0
"""How many expected uses a trait needs for its multiplier to be believed by half."""
SHAPE_EVENTS = 3.0
"""The same for an age bin of a shape, against the shape of all gaps together; and of a bin against the one before."""
NUM_ROUNDS = 4
NUM_GAPS = 14


class Kind(IntEnum):
    """Which part of a request's chain a segment is."""

    OWN = 0  # what no other session has
    SHARED = 1  # the prefix that several sessions have
    LAST = 2  # the last block alone: it may be partial, and then the next turn has another in its place
    SUPERSEDED = 3  # what a session had before it took another branch


class Match(IntEnum):
    """How a request's chain relates to those before it."""

    NEW = 0
    BRANCH = 1
    CONTINUATION = 2
    REPETITION = 3


class Traits(NamedTuple):
    """What is known of a segment's last use, each as a small code below its entry of ``SIZES``."""

    shape: int
    turn: int
    input_size: int
    suffix_size: int
    output_size: int
    app: int
    root: int
    namespace: int
    match: int
    hint: int
    kind: int


SHAPES = 2 * NUM_GAPS + len(Kind) - 2
"""The gaps of OWN segments, those of SHARED ones, and one shape for each other kind."""
NUM_TURNS = 8
SIZES = Traits(SHAPES, 2 * NUM_TURNS, 16, 16, 17, 64, 1024, 16, len(Match), 3, len(Kind))
UNKNOWN = Traits(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
OUTPUT_COLUMN = Traits._fields.index("output_size")

Codes = npt.NDArray[np.int16]
_ZONES = (AGE_EDGES_S >= OLD_AGE_S).astype(np.intp)  # of each age bin: 0 young, then 1 old
_FIRST_CODES = np.concatenate([[0], np.cumsum(SIZES[1:-1])])
_OPEN, _USED, _CENSORED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Observations:
    """A copy of the ring, oldest first: ``traits`` [n, len(Traits)], times in the policy's own seconds."""

    traits: Codes
    began_s: Floats
    ended_s: Floats
    state: npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Model:
    """``base`` [SHAPES, NUM_AGES] per second, ``multipliers`` [codes of all traits in turn, young or old]."""

    base: Floats
    multipliers: Floats

    def hazards(self, traits: Codes) -> Floats:
        """Of each row of ``traits``, ``[n, NUM_AGES]``."""
        factors = self.multipliers[traits[:, 1:] + _FIRST_CODES].prod(axis=1)
        hazards: Floats = self.base[traits[:, 0]] * factors[:, _ZONES]
        return hazards

    @staticmethod
    def rows_of(trait: str) -> slice:
        """Where ``multipliers`` has those of a trait, which is no shape."""
        column = Traits._fields.index(trait) - 1
        return slice(int(_FIRST_CODES[column]), int(_FIRST_CODES[column]) + SIZES[column + 1])


def first_model() -> Model:
    """Before anything was learned: hazards that fall with age, so that the index orders as LRU does."""
    base = np.tile(0.3 / (AGE_EDGES_S + 30.0), (SHAPES, 1))
    return Model(base, np.ones((sum(SIZES[1:]), 2)))


class LifeTable:
    """The ring of observations."""

    def __init__(self, capacity: int = NUM_OBSERVATIONS) -> None:
        self._capacity = capacity
        self._traits = np.zeros((capacity, len(SIZES)), dtype=np.int16)
        self._began_s = np.zeros(capacity)
        self._ended_s = np.zeros(capacity)
        self._state = np.zeros(capacity, dtype=np.int8)
        self.num_opened = 0

    def open(self, traits: Traits, now_s: float) -> int:
        """A segment was used; returns the observation's number."""
        row = self.num_opened % self._capacity
        self._traits[row] = traits
        self._began_s[row] = now_s
        self._state[row] = _OPEN
        self.num_opened += 1
        return self.num_opened - 1

    def use(self, number: int, now_s: float) -> None:
        """It is used again."""
        self._end(number, now_s, _USED)

    def censor(self, number: int, now_s: float) -> None:
        """It can no longer be told whether it is."""
        self._end(number, now_s, _CENSORED)

    def set_output(self, number: int, output_size: int) -> None:
        """The length of the answer is known now."""
        if self._is_here(number):
            self._traits[number % self._capacity, OUTPUT_COLUMN] = output_size

    def observations(self, now_s: float) -> Observations:
        """What is known, with those that are open censored at ``now_s``."""
        count = min(self.num_opened, self._capacity)
        rows = np.arange(self.num_opened - count, self.num_opened) % self._capacity
        state = self._state[rows]
        ended_s = np.where(state == _OPEN, now_s, self._ended_s[rows])
        return Observations(self._traits[rows], self._began_s[rows], ended_s, state)

    def load(self, found: Observations) -> None:
        """Take what another table observed, as the newest; nothing of it goes on."""
        count = min(len(found.state), self._capacity)
        rows = np.arange(self.num_opened, self.num_opened + count) % self._capacity
        newest = slice(len(found.state) - count, None)
        self._traits[rows] = found.traits[newest]
        self._began_s[rows], self._ended_s[rows] = found.began_s[newest], found.ended_s[newest]
        self._state[rows] = np.where(found.state[newest] == _USED, _USED, _CENSORED)
        self.num_opened += count

    def _end(self, number: int, now_s: float, state: int) -> None:
        if self._is_here(number) and self._state[number % self._capacity] == _OPEN:
            self._ended_s[number % self._capacity] = now_s
            self._state[number % self._capacity] = state

    def _is_here(self, number: int) -> bool:
        return max(0, self.num_opened - self._capacity) <= number < self.num_opened


def fit(found: Observations) -> Model:
    """The model under which ``found`` is most likely, nearly."""
    order = np.argsort(found.traits[:, 0], kind="stable")
    weights = (0.5 ** (np.arange(len(order))[::-1] / HALF_LIFE_OBSERVATIONS))[order]
    traits, is_used = found.traits[order], found.state[order] == _USED
    ages_s = np.maximum(found.ended_s - found.began_s, 1e-3)[order]
    at_risk_s = np.clip(ages_s[:, None] - AGE_EDGES_S, 0.0, AGE_WIDTHS_S) * weights[:, None]
    by_zone = [np.ascontiguousarray(at_risk_s[:, zone == _ZONES]) for zone in (0, 1)]
    of_shape = [slice(*np.searchsorted(traits[:, 0], (shape, shape + 1))) for shape in range(SHAPES)]
    bins = age_bins(ages_s)
    events = np.zeros((SHAPES, NUM_AGES))
    np.add.at(events, (traits[is_used, 0], bins[is_used]), weights[is_used])
    observed = np.zeros((len(order), 2))
    observed[is_used, _ZONES[bins[is_used]]] = weights[is_used]
    multipliers = [np.ones((size, 2)) for size in SIZES[1:]]
    factors = np.ones((len(order), 2))
    expected = np.empty((len(order), 2))
    base = np.empty((SHAPES, NUM_AGES))
    for _ in range(NUM_ROUNDS):
        base = _base(events, np.stack([_total(by_zone, factors, rows) for rows in of_shape]))
        for rows, hazards in zip(of_shape, base, strict=True):
            for zone in (0, 1):
                expected[rows, zone] = by_zone[zone][rows] @ hazards[zone == _ZONES]
        for column, old in enumerate(multipliers):
            codes = traits[:, column + 1]
            new = np.empty_like(old)
            for zone in (0, 1):
                num_observed = np.bincount(codes, observed[:, zone], len(old))
                num_expected = np.bincount(codes, expected[:, zone] * factors[:, zone], len(old)) / old[:, zone]
                new[:, zone] = (num_observed + SHRINKAGE_EVENTS) / (num_expected + SHRINKAGE_EVENTS)
            factors *= (new / old)[codes]
            multipliers[column] = new
    return Model(base, np.concatenate(multipliers))


def _total(by_zone: Sequence[Floats], factors: Floats, rows: slice) -> Floats:
    """Time at risk of the observations in ``rows``, each by its multipliers, by age."""
    return np.concatenate([factors[rows, zone] @ by_zone[zone][rows] for zone in (0, 1)])


def _base(events: Floats, at_risk_s: Floats) -> Floats:
    """Hazards of each shape; those of a gap are drawn to those of all gaps of its kind together."""
    found = []
    for gaps in (slice(0, NUM_GAPS), slice(NUM_GAPS, 2 * NUM_GAPS)):
        pooled = _smoothed(events[gaps].sum(axis=0), at_risk_s[gaps].sum(axis=0))
        found.append((events[gaps] + SHAPE_EVENTS) / (at_risk_s[gaps] + SHAPE_EVENTS / pooled))
    others = slice(2 * NUM_GAPS, None)
    found += [_smoothed(*of_kind)[None] for of_kind in zip(events[others], at_risk_s[others], strict=True)]
    return np.concatenate(found)


def _smoothed(events: Floats, at_risk_s: Floats) -> Floats:
    """Hazards by age; where little was seen, that of the age before, falling as one over the age."""
    hazards = np.empty(NUM_AGES)
    before = 5 * (events.sum() + 0.5) / (at_risk_s.sum() + 60.0)
    for age in range(NUM_AGES):
        hazards[age] = (events[age] + 2.0) / (at_risk_s[age] + 2.0 / before)
        before = max(hazards[age] * 2**-0.5, 1e-12)
    return hazards


def codes_of(traits: Sequence[Traits]) -> Codes:
    """The rows of an array."""
    return np.array(traits, dtype=np.int16).reshape(-1, len(SIZES))
