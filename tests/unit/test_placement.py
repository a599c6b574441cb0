"""What reads of a tier take, as learned from those that were made."""

import random
from collections.abc import Callable

import pytest

from kvstore.placement import MAX_SPELL_BYTES, MAX_TRIAL_INTERVAL_S, MIN_TRIAL_INTERVAL_S, ReadSpeed

MIB = 1 << 20


def spell(speed: ReadSpeed, num_bytes: int, seconds: float, began_s: float = 0.0) -> None:
    speed.note(num_bytes, began_s, began_s + seconds, is_last=True)


def disk(latency_s: float, bytes_per_s: float) -> Callable[[int], float]:
    return lambda num_bytes: latency_s + num_bytes / bytes_per_s


def test_of_a_tier_that_nothing_is_known_of_reading_is_free() -> None:
    assert ReadSpeed().seconds(1 << 40) == 0.0
    assert ReadSpeed(1e9).seconds(1 << 30) == pytest.approx(1.07, rel=0.1)


@pytest.mark.parametrize("before", [None, 5e9, 5e7])
def test_latency_and_bandwidth_are_told_apart_by_reads_of_several_sizes(before: float | None) -> None:
    speed, takes = ReadSpeed(before), disk(5e-3, 1e9)
    sizes = random.Random(1)
    for _ in range(60):
        num_bytes = sizes.choice([64 << 10, MIB, 32 * MIB])
        spell(speed, num_bytes, takes(num_bytes))
    for num_bytes in (64 << 10, MIB, 32 * MIB, 256 * MIB):
        assert speed.seconds(num_bytes) == pytest.approx(takes(num_bytes), rel=0.2)


def test_reads_at_the_same_time_are_one_spell() -> None:
    """Four threads that each take as long as all of them together."""
    speed = ReadSpeed()
    for left in (3, 2, 1, 0):
        speed.note(4 * MIB, 7.0, 7.5 - 0.001 * left, is_last=left == 0)
    assert speed.seconds(16 * MIB) == pytest.approx(0.5, rel=0.01)


def test_the_time_between_two_reads_is_not_counted() -> None:
    speed = ReadSpeed()
    speed.note(8 * MIB, 0.0, 0.1, is_last=False)
    speed.note(8 * MIB, 50.0, 50.1, is_last=True)
    assert speed.seconds(16 * MIB) == pytest.approx(0.2)


def test_one_spell_on_a_busy_machine_is_soon_forgotten() -> None:
    speed, takes = ReadSpeed(1e9), disk(1e-3, 1e9)
    spell(speed, 16 * MIB, 1000.0)
    assert speed.seconds(16 * MIB) <= 2.1 * takes(16 * MIB)
    for _ in range(3):
        spell(speed, 16 * MIB, takes(16 * MIB))
    assert speed.seconds(16 * MIB) == pytest.approx(takes(16 * MIB), rel=0.15)


def test_a_disk_that_changes_for_good_is_followed_both_ways() -> None:
    speed, fast, slow = ReadSpeed(1e9), disk(1e-3, 1e9), disk(1e-1, 1e7)
    for takes in (slow, fast):
        for _ in range(10):
            spell(speed, 16 * MIB, takes(16 * MIB))
        assert speed.seconds(16 * MIB) == pytest.approx(takes(16 * MIB), rel=0.25)


def test_a_tier_that_never_rests_is_learned_from() -> None:
    speed = ReadSpeed()
    for number in range(MAX_SPELL_BYTES // MIB):
        speed.note(MIB, number / 100, (number + 1) / 100, is_last=False)
    assert speed.seconds(100 * MIB) == pytest.approx(1.0, rel=0.01)


def test_what_a_clock_does_that_stands_or_is_set_back_teaches_nothing_for_long() -> None:
    speed = ReadSpeed(1e9)
    before = speed.seconds(MIB)
    spell(speed, MIB, 0.0)
    spell(speed, MIB, -3.0)
    spell(speed, 0, 9.0)
    assert speed.seconds(MIB) == before
    speed.note(MIB, 1000.0, 1001.0, is_last=False)
    speed.note(MIB, 3.0, 4.0, is_last=True)
    for _ in range(12):
        spell(speed, 16 * MIB, 0.5, began_s=4.0)
    assert speed.seconds(16 * MIB) == pytest.approx(0.5, rel=0.2)


def test_trials_take_a_hundredth_of_the_time() -> None:
    speed = ReadSpeed(MIB)  # a second for a MiB
    assert speed.take_trial(0.0, MIB)
    assert not speed.take_trial(99.0, MIB)
    assert speed.take_trial(102.0, MIB)
    fast = ReadSpeed(1e9)
    assert fast.take_trial(0.0, MIB)
    assert not fast.take_trial(MIN_TRIAL_INTERVAL_S - 0.1, MIB)
    assert fast.take_trial(MIN_TRIAL_INTERVAL_S, MIB)
    hopeless = ReadSpeed(1.0)
    assert hopeless.take_trial(0.0, MIB)
    assert hopeless.take_trial(MAX_TRIAL_INTERVAL_S, MIB)


def test_a_trial_that_surprises_is_repeated_at_once_and_one_that_does_not_is_not() -> None:
    speed = ReadSpeed(MIB)
    assert speed.take_trial(0.0, MIB)
    spell(speed, MIB, 0.01)
    assert speed.take_trial(1.0, MIB)
    spell(speed, MIB, 5.0)
    assert not speed.take_trial(2.0, MIB)


def test_a_clock_that_was_set_back_does_not_end_trials() -> None:
    speed = ReadSpeed(MIB)
    assert speed.take_trial(1e9, MIB)
    assert speed.take_trial(0.0, MIB)
