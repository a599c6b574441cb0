"""How a copy of blocks is cut: what fits a staging buffer, which layers first, which DMAs. Pure.

Layers are numbered as they lie in a block, stripe after stripe (``pages``).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kvstore.layout import Layout


class Shape(NamedTuple):
    """What of a layout matters here."""

    num_layers: int
    """Of one stripe: the model's."""
    layer_bytes: int
    """Of one stripe of one block."""
    num_stripes: int = 1

    @classmethod
    def of(cls, layout: Layout) -> "Shape":
        """That of ``layout``."""
        num_layers = layout.num_layers * layout.num_stripes
        return cls(layout.num_layers, layout.block_bytes // num_layers, layout.num_stripes)

    @property
    def layers(self) -> range:
        """Of all stripes."""
        return range(self.num_stripes * self.num_layers)

    @property
    def block_bytes(self) -> int:
        """All layers."""
        return len(self.layers) * self.layer_bytes

    def num_ready(self, layers: range) -> int:
        """Leading layers of the model that are there, in all stripes, once a copy in order has come to ``layers``."""
        return max(0, layers.stop - (self.num_stripes - 1) * self.num_layers)


class Part(NamedTuple):
    """``layers`` of ``blocks``, by index: what is staged at a time, ``[block][layer]``."""

    layers: range
    blocks: range


class Dma(NamedTuple):
    """``num_bytes`` at an address in host memory and at an offset in what is staged."""

    address: int
    offset: int
    num_bytes: int


def steps(num_layers: int, layer_bytes: int, least_bytes: int) -> list[range]:
    """Layers in groups of at least ``least_bytes``, where all are so many, and hardly one larger than another."""
    num_steps = max(1, num_layers // -(-least_bytes // layer_bytes))
    bounds = [num_layers * step // num_steps for step in range(num_steps + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


def in_turn(shape: Shape, groups: Sequence[range]) -> list[range]:
    """``groups`` of the model's layers in every stripe, the first group of all stripes before the second."""
    firsts = shape.layers[:: shape.num_layers]
    return [range(first + layers.start, first + layers.stop) for layers in groups for first in firsts]


def offload_parts(shape: Shape, num_blocks: int, buffer_bytes: int) -> list[Part]:
    """Blocks as they are, as many as fit; of blocks that do not, as many layers as fit."""
    if shape.block_bytes <= buffer_bytes:
        return _cut(shape.layers, num_blocks, buffer_bytes // shape.block_bytes)
    groups = groups_of(shape.layers, buffer_bytes // shape.layer_bytes)
    return [Part(layers, range(block, block + 1)) for block in range(num_blocks) for layers in groups]


def onboard_parts(shape: Shape, num_blocks: int, buffer_bytes: int, least_bytes: int) -> list[Part]:
    """What does not fit as a whole goes by layers, ``in_turn``, in pieces of ``least_bytes`` and more."""
    if shape.block_bytes * num_blocks <= buffer_bytes:
        return _cut(shape.layers, num_blocks, max(1, num_blocks))
    groups = steps(shape.num_layers, shape.layer_bytes, least_bytes)
    if max(map(len, groups)) * shape.layer_bytes > buffer_bytes:
        groups = groups_of(range(shape.num_layers), buffer_bytes // shape.layer_bytes)
    return [
        part
        for layers in in_turn(shape, groups)
        for part in _cut(layers, num_blocks, buffer_bytes // (len(layers) * shape.layer_bytes))
    ]


def dmas(shape: Shape, part: Part, starts: Sequence[int]) -> list[Dma]:
    """As few copies as move ``part`` between what is staged and the slots at ``starts``, one for each block."""
    piece_bytes = len(part.layers) * shape.layer_bytes
    wanted = starts[part.blocks.start : part.blocks.stop]
    is_whole = part.layers == shape.layers
    runs = adjacent(wanted, piece_bytes) if is_whole else [range(at, at + 1) for at in range(len(wanted))]
    within = part.layers.start * shape.layer_bytes
    return [Dma(wanted[run.start] + within, run.start * piece_bytes, len(run) * piece_bytes) for run in runs]


def adjacent(starts: Sequence[int], num_bytes: int) -> list[range]:
    """Runs of slots that follow each other in memory, as ranges of indices into ``starts``."""
    breaks = [index for index, (one, next_one) in enumerate(pairwise(starts), 1) if next_one != one + num_bytes]
    return [range(*bounds) for bounds in pairwise([0, *breaks, len(starts)])] if starts else []


def _cut(layers: range, num_blocks: int, at_a_time: int) -> list[Part]:
    starts = range(0, num_blocks, at_a_time)
    return [Part(layers, range(start, min(start + at_a_time, num_blocks))) for start in starts]


def groups_of(layers: range, num_layers: int) -> list[range]:
    """``layers`` in groups of ``num_layers``, the last one of what is left."""
    return [layers[start : start + num_layers] for start in layers[::num_layers]]
