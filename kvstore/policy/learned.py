"""What a policy has learned, to be kept over a restart. Pure.

It is packed with a checksum and with a mark of the tables that it is for: what is damaged, or not of this release's
tables, is not read at all, and learning starts afresh.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.policy.life_table import SHAPES, SIZES, Model, Observations, Traits
from kvstore.policy.retention import AGE_EDGES_S, NUM_AGES
from kvstore.types import BlockKey

K = TypeVar("K")

NUMBERED = ("app", "root", "namespace")
"""The traits whose codes were given to keys."""

_FIELDS = struct.Struct("<8s8sIHHH")
_KEY = struct.Struct("<HB")
_CHECKSUM = struct.Struct("<Q")
_ROW = np.dtype([("traits", "<i2", len(SIZES)), ("age_s", "<f8"), ("state", "i1")])
_MODEL = np.dtype([("base", "<f8", (SHAPES, NUM_AGES)), ("multipliers", "<f8", (sum(SIZES[1:]), 2))])
_MAGIC = b"TKVHABIT"
_TABLES = xxhash.xxh3_64_digest(repr((SIZES, SHAPES)).encode() + AGE_EDGES_S.tobytes())


@dataclass(frozen=True, slots=True)
class Learned(Generic[K]):
    """A copy. ``codes`` has, of each trait of ``NUMBERED``, keys and their codes, seen last at the end."""

    observations: Observations
    model: Model
    codes: Mapping[str, Sequence[tuple[K | bytes, int]]]
    num_observed: int = 0
    """How many observations there have ever been; not kept."""

    def recoded(self, codes: Mapping[str, npt.NDArray[np.intp]]) -> "Learned[K]":
        """The same where a code ``c`` of a trait has become ``codes[trait][c]``."""
        traits, multipliers = self.observations.traits.copy(), self.model.multipliers.copy()
        for trait, code in codes.items():
            column, rows = traits[:, Traits._fields.index(trait)], Model.rows_of(trait)
            column[:] = code[column]
            multipliers[rows][code] = self.model.multipliers[rows]
        return replace(
            self,
            observations=replace(self.observations, traits=traits),
            model=replace(self.model, multipliers=multipliers),
        )


def pack(learned: Learned[BlockKey]) -> bytes:
    """As bytes, a megabyte at most."""
    found, model = learned.observations, np.zeros(1, dtype=_MODEL)
    rows = np.zeros(len(found.state), dtype=_ROW)
    rows["traits"], rows["age_s"], rows["state"] = found.traits, found.ended_s - found.began_s, found.state
    model["base"], model["multipliers"] = learned.model.base, learned.model.multipliers
    counts = [len(learned.codes[trait]) for trait in NUMBERED]
    keys = [_KEY.pack(code, len(key)) + key for trait in NUMBERED for key, code in learned.codes[trait]]
    body = b"".join([_FIELDS.pack(_MAGIC, _TABLES, len(rows), *counts), model.tobytes(), rows.tobytes(), *keys])
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def parse(packed: bytes) -> Learned[BlockKey] | None:
    """What ``pack`` was given; None for what is damaged or of other tables."""
    body, checksum = packed[: -_CHECKSUM.size], packed[-_CHECKSUM.size :]
    if len(body) < _FIELDS.size or checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)):
        return None
    magic, tables, num_rows, *counts = _FIELDS.unpack_from(body)
    if magic != _MAGIC or tables != _TABLES:
        return None
    model = np.frombuffer(body, _MODEL, 1, _FIELDS.size)[0]
    rows = np.frombuffer(body, _ROW, num_rows, _FIELDS.size + _MODEL.itemsize)
    at = _FIELDS.size + _MODEL.itemsize + rows.nbytes
    codes: dict[str, list[tuple[BlockKey, int]]] = {trait: [] for trait in NUMBERED}
    for trait, count in zip(NUMBERED, counts, strict=True):
        for _ in range(count):
            code, num_bytes = _KEY.unpack_from(body, at)
            at += _KEY.size + num_bytes
            codes[trait].append((BlockKey(body[at - num_bytes : at]), code))
    observations = Observations(rows["traits"].astype(np.int16), np.zeros(num_rows), rows["age_s"], rows["state"])
    return Learned(observations, Model(model["base"], model["multipliers"]), codes)
