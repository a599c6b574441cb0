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

_FROM, _TO = np.ogrid[:NUM_AGES, :NUM_AGES]
_IS_AHEAD = _TO >= _FROM


def age_bins(ages_s: Floats) -> npt.NDArray[np.intp]:
    """The bin of each age, which is not negative."""
    return np.searchsorted(AGE_EDGES_S, ages_s, side="right") - 1


def retention_index(hazards: Floats, num_ages: int = NUM_AGES) -> Floats:
    """Hits per block-second at the start of the first ``num_ages`` bins, ``[n, num_ages]``.

    ``hazards`` are uses per second in every bin, ``[n, NUM_AGES]``.
    """
    risk = hazards * AGE_WIDTHS_S
    before = np.cumsum(risk, axis=1) - risk
    # Of those that are there at the start of bin i, so many reach bin j, and are held in it so long.
    is_ahead = _IS_AHEAD[:num_ages]
    reach = np.exp(np.minimum(before[:, :num_ages, None] - before[:, None, :], 0.0)) * is_ahead
    held_s = np.cumsum(reach * (-np.expm1(-risk) / hazards)[:, None, :], axis=2)
    left = reach * np.exp(-risk)[:, None, :]
    index = np.divide(1.0 - left, held_s, out=np.zeros_like(held_s), where=is_ahead)
    best: Floats = index.max(axis=2)
    return best
