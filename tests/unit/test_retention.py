"""The retention index: a constant hazard is its own index, a falling one falls, a peak ahead is worth waiting for."""

import numpy as np
import pytest

from kvstore.policy.retention import AGE_EDGES_S, AGE_WIDTHS_S, NUM_AGES, age_bins, retention_index


def test_a_constant_hazard_is_its_own_index() -> None:
    index = retention_index(np.full((1, NUM_AGES), 0.01))
    assert index[0] == pytest.approx(0.01, rel=1e-6)


def test_a_falling_hazard_is_worth_what_it_is_now() -> None:
    hazards = 1.0 / (AGE_EDGES_S + 1.0)
    index = retention_index(hazards[None])[0]
    assert index == pytest.approx(hazards, rel=1e-6)


def test_what_is_about_to_be_used_is_worth_more_the_nearer_that_is() -> None:
    hazards = np.full(NUM_AGES, 1e-5)
    (peak,) = age_bins(np.array([100.0]))
    hazards[peak] = 1.0
    index = retention_index(hazards[None])[0]
    assert all(np.diff(index[: peak + 1]) > 0)
    assert index[peak + 1] < 1e-4


def test_the_index_is_the_best_of_all_horizons() -> None:
    """Against the definition: use within the horizon, over the expected time held, both summed in small steps."""
    rng = np.random.default_rng(3)
    hazards = 10 ** rng.uniform(-5, -1, NUM_AGES)
    start = 7
    steps = [np.full(400, width / 400) for width in AGE_WIDTHS_S[start:]]
    rates = [np.full(400, hazard) for hazard in hazards[start:]]
    cumulated = np.cumsum(np.concatenate(steps) * np.concatenate(rates))
    survival = np.exp(-np.concatenate([[0.0], cumulated]))
    held_s = np.cumsum((survival[:-1] + survival[1:]) / 2 * np.concatenate(steps))
    best = max((1 - survival[end]) / held_s[end - 1] for end in range(400, len(survival), 400))
    assert retention_index(hazards[None])[0, start] == pytest.approx(best, rel=0.01)


def test_ages_fall_into_bins_of_half_an_octave() -> None:
    assert age_bins(np.array([0.0, 0.49, 0.5, 1.0, 2.0, 1e12])).tolist() == [0, 0, 1, 3, 5, NUM_AGES - 1]
