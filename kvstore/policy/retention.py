"""When to give a block up: the retention index of a life whose hazard depends on its age. Pure.

The index at an age is the largest, over all horizons h, of P(reuse within h) / E[time held up to h]: the most hits
that a block-second can buy. It is the Gittins index of a job that ends when it is reused (Gittins 1979), with horizons
at the edges of the age bins.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

AGE_EDGES_S: Floats = np.concatenate([[0.0], 0.5 * 2.0 ** (np.arange(43) / 2)])
"""Where each age bin begins, in seconds: half an octave each, from half a second to twelve days; the last is open."""
NUM_AGES = len(AGE_EDGES_S)
AGE_WIDTHS_S: Floats = np.append(np.diff(AGE_EDGES_S), AGE_EDGES_S[-1])

_MAX_RISK = 700.0
"""So much of it nobody lives through; more could not be told from it."""
_LEAST_S = 1e-300


def age_bins(ages_s: Floats) -> npt.NDArray[np.intp]:
    """The bin of each age, which is not negative."""
    return np.searchsorted(AGE_EDGES_S, ages_s, side="right") - 1


def retention_index(hazards: Floats) -> Floats:
    """Hits per block-second at the start of every bin, ``[n, NUM_AGES]``.

    ``hazards`` are uses per second in every bin, ``[n, NUM_AGES]``.
    """
    risk = hazards * AGE_WIDTHS_S
    # How many are left at each edge, and for how long those are held beyond it; sums from the far end lose nothing.
    left = np.exp(-np.minimum(np.cumsum(risk, axis=1), _MAX_RISK))
    left = np.concatenate([np.ones((len(hazards), 1)), left], axis=1)
    held_s = np.cumsum((left[:, :-1] * -np.expm1(-risk) / hazards)[:, ::-1], axis=1)[:, ::-1]
    held_s = np.concatenate([held_s, np.zeros((len(hazards), 1))], axis=1)
    used = left[:, :NUM_AGES, None] - left[:, None, 1:]
    held_until_s = held_s[:, :NUM_AGES, None] - held_s[:, None, 1:]
    # An edge that is not ahead has neither use nor time beyond it, and becomes no index above 0.
    np.maximum(held_until_s, _LEAST_S, out=held_until_s)
    np.divide(used, held_until_s, out=used)
    best: Floats = np.maximum(used.max(axis=2), hazards)  # up to the next edge it is the hazard
    return best
