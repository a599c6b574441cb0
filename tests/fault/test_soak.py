"""A short soak; ``make soak`` runs a long one."""

from pathlib import Path

from tests.soak.__main__ import soak


def test_clients_that_die_and_return_against_a_host_full_of_faults(tmp_path: Path) -> None:
    counts = soak(4.0, 1, tmp_path)
    assert counts["hosts killed"] > 0
    assert counts["loaded"] > 0
    assert counts["stored"] > 0
    assert counts["killed"] + counts["stopped"] + counts["left"] > 0
