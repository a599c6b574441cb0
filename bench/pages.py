"""Memory that blocks are stored from and loaded into; knows no store, since peers use it in their environments."""

import mmap

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def on_pages(num_blocks: int, block_bytes: int) -> Bytes:
    """Memory for blocks, one a row, that starts on a page as an engine's own would."""
    return np.frombuffer(mmap.mmap(-1, num_blocks * block_bytes), dtype=np.uint8).reshape(num_blocks, block_bytes)


def noise(num_blocks: int, block_bytes: int) -> Bytes:
    """Blocks that differ and do not compress."""
    blocks = on_pages(num_blocks, block_bytes)
    blocks[:] = np.random.default_rng(0).integers(0, 256, blocks.shape, dtype=np.uint8)
    return blocks
