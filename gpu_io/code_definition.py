"""What quantised blocks are, by definition and slowly: quantisers are tested against it and are written apart."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def magnitudes(name: str) -> NDArray[np.float32]:
    """What a code without its sign stands for, by code: NaN is none of them."""
    codes = torch.arange(127 if name == "fp8" else 128, dtype=torch.uint8)
    return (codes.view(torch.float8_e4m3fn) if name == "fp8" else codes).float().numpy()


def stored(layer: NDArray[np.float32], name: str) -> bytes:
    """One layer of a block, ``[plane, token, head, dim]``, as it is stored in the format ``name``: by definition."""
    codes, scales = [], []
    numbers = magnitudes(name)
    even_first = np.argsort(np.arange(len(numbers)) % 2, kind="stable")
    for plane, axis in zip(layer, (0, 2), strict=True):
        largest = np.abs(plane).max(axis=axis, keepdims=True)
        is_finite = np.isfinite(largest)
        least = np.maximum(np.where(is_finite, largest, 0) * np.float32(1 / numbers[-1]), np.float32(2.0**-100))
        scale = torch.from_numpy(least).bfloat16()
        quotients = np.where(is_finite, plane, 0) / scale.float().numpy()
        distances = np.abs(np.abs(quotients)[..., None].astype(np.float64) - numbers[even_first])
        nearest = even_first[distances.argmin(axis=-1)]
        signed = nearest + 128 * np.signbit(quotients) if name == "fp8" else np.where(quotients < 0, -nearest, nearest)
        codes.append(signed.astype(np.uint8).tobytes())
        scales.append(np.where(is_finite, scale.view(torch.int16).numpy(), np.int16(0x7FC0)).tobytes())
    return b"".join((*codes, *scales))


def restored(piece: NDArray[np.uint8], shape: tuple[int, ...], name: str) -> Tensor:
    """One layer of a block that is ``stored`` as numbers again, ``[plane, token, head, dim]``, in float32."""
    _, tokens, heads, dim = shape
    codes = piece[: 2 * tokens * heads * dim].reshape(shape).astype(np.int64)
    signs = codes > 127
    numbers = magnitudes(name)[np.where(signs, codes - 128 if name == "fp8" else 256 - codes, codes)]
    scales = torch.from_numpy(piece[codes.size :].copy()).view(torch.bfloat16).float()
    of_key, of_value = scales[: heads * dim].view(1, heads, dim), scales[heads * dim :].view(tokens, heads, 1)
    signed = torch.from_numpy(np.where(signs, -numbers, numbers))
    return torch.stack([signed[0] * of_key, signed[1] * of_value])
