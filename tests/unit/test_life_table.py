"""Learning when segments are used again: from uses, from the time without one, and apart for each trait."""

import numpy as np
import pytest

from kvstore.policy.life_table import (
    NUM_GAPS,
    OLD_AGE_S,
    UNKNOWN,
    Kind,
    LifeTable,
    Model,
    Traits,
    codes_of,
    first_model,
    fit,
)
from kvstore.policy.retention import AGE_EDGES_S, age_bins, retention_index

QUICK = UNKNOWN._replace(app=1)
SLOW = UNKNOWN._replace(app=2)


def lived(table: LifeTable, traits: Traits, ages_s: list[float | None], at_s: float = 0.0) -> None:
    """Segments that were used after these ages; None: never."""
    for age_s in ages_s:
        number = table.open(traits, at_s)
        if age_s is not None:
            table.use(number, at_s + age_s)


def bin_of(age_s: float) -> int:
    return int(age_bins(np.array([age_s]))[0])


def test_a_hazard_is_uses_over_time_at_risk() -> None:
    table = LifeTable()
    rng = np.random.default_rng(0)
    lived(table, UNKNOWN, rng.exponential(100.0, 4000).tolist())
    hazards = fit(table.observations(1e6)).hazards(codes_of([UNKNOWN]))[0]
    assert hazards[bin_of(10.0) : bin_of(200.0)] == pytest.approx(0.01, rel=0.3)


def test_segments_that_are_never_used_again_count_as_time_at_risk() -> None:
    table = LifeTable()
    lived(table, UNKNOWN, [10.0] * 100 + [None] * 900)
    model = fit(table.observations(11.0))
    later = fit(table.observations(5000.0))
    rows = codes_of([UNKNOWN])
    assert later.hazards(rows)[0, bin_of(1000.0)] < model.hazards(rows)[0, bin_of(1000.0)] / 10


def test_traits_are_told_apart() -> None:
    table = LifeTable()
    lived(table, QUICK, [5.0] * 300)
    lived(table, SLOW, [None] * 300)
    index = retention_index(fit(table.observations(3600.0)).hazards(codes_of([QUICK, SLOW])))
    assert index[0, 0] > 10 * index[1, 0]


def test_young_and_old_ages_have_multipliers_of_their_own() -> None:
    table = LifeTable()
    lived(table, QUICK, [5.0] * 150 + [None] * 150)
    lived(table, SLOW, [300.0] * 150 + [None] * 150)
    hazards = fit(table.observations(3600.0)).hazards(codes_of([QUICK, SLOW]))
    young, old = bin_of(5.0), bin_of(300.0)
    assert AGE_EDGES_S[young] < OLD_AGE_S < AGE_EDGES_S[old]
    assert hazards[0, young] > 3 * hazards[1, young]
    assert hazards[1, old] > 3 * hazards[0, old]


def test_a_trait_that_was_never_seen_changes_nothing() -> None:
    table = LifeTable()
    lived(table, QUICK, [5.0] * 300)
    model = fit(table.observations(100.0))
    assert model.multipliers[Model.rows_of("root")][77].tolist() == [1.0, 1.0]


def test_a_kind_has_a_shape_of_its_own() -> None:
    table = LifeTable()
    last = UNKNOWN._replace(kind=Kind.LAST, shape=2 * NUM_GAPS)
    lived(table, UNKNOWN, [5.0] * 200)
    lived(table, last, [None] * 200)
    hazards = fit(table.observations(1000.0)).hazards(codes_of([UNKNOWN, last]))
    assert hazards[0, bin_of(5.0)] > 10 * hazards[1, bin_of(5.0)]


def test_before_anything_is_known_what_is_older_is_worth_less() -> None:
    index = retention_index(first_model().hazards(codes_of([UNKNOWN])))[0]
    assert all(np.diff(index) < 0)
    assert fit(LifeTable().observations(0.0)).base.min() > 0


def test_the_ring_forgets_the_oldest_and_nobody_can_end_it_later() -> None:
    table = LifeTable(capacity=10)
    first = table.open(QUICK, 0.0)
    for _ in range(10):
        table.open(SLOW, 1.0)
    table.use(first, 2.0)
    table.set_output(first, 3)
    found = table.observations(5.0)
    assert len(found.state) == 10
    assert set(found.traits[:, Traits._fields.index("app")].tolist()) == {2}
    assert not found.state.any()
    assert found.traits[:, Traits._fields.index("output_size")].tolist() == [0] * 10


def test_the_second_end_of_an_observation_counts_for_nothing() -> None:
    table = LifeTable()
    number = table.open(QUICK, 0.0)
    table.censor(number, 3.0)
    table.use(number, 9.0)
    found = table.observations(20.0)
    assert found.ended_s.tolist() == [3.0]
    assert not (found.state == 1).any()


def test_a_fit_is_of_a_copy() -> None:
    table = LifeTable()
    number = table.open(QUICK, 0.0)
    found = table.observations(10.0)
    table.use(number, 4.0)
    table.set_output(number, 5)
    assert found.ended_s.tolist() == [10.0]
    assert found.traits[0, Traits._fields.index("output_size")] == 0
