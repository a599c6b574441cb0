"""Where bytes lie, as pieces of equal size: what a copy declares to touch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Ranges(NamedTuple):
    """``num_bytes`` from each of the addresses ``starts`` on."""

    starts: NDArray[np.int64]
    num_bytes: int


def range_of(address: int, num_bytes: int) -> Ranges:
    """One piece."""
    return Ranges(np.array([address], dtype=np.int64), num_bytes)


def ranges_of(tensor: Tensor, indices: dict[int, Sequence[int]] | None = None) -> Ranges:
    """The bytes of ``tensor``'s elements, of any strides; of an axis in ``indices`` only those indices."""
    axes = [
        (stride * tensor.itemsize, np.arange(size) if indices is None or axis not in indices else indices[axis])
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
    num_bytes = tensor.itemsize
    starts = np.array([tensor.data_ptr()], dtype=np.int64)
    for stride_bytes, chosen in sorted(axes, key=lambda axis: axis[0]):
        if stride_bytes == num_bytes and isinstance(chosen, np.ndarray):
            num_bytes *= len(chosen)  # adjacent to each other: one larger piece
        else:
            starts = (starts + (np.asarray(chosen, dtype=np.int64) * stride_bytes)[:, None]).ravel()
    return Ranges(starts, num_bytes)
