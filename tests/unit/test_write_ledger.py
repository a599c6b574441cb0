"""Flash is written no more than a day's bytes in any day."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.write_ledger import LEDGER_BYTES, WriteLedger

DAY_S = 86_400
CAP_BYTES = 1_000_000


def test_a_quarter_at_once_and_the_rest_over_the_day() -> None:
    ledger = WriteLedger(CAP_BYTES, 0.0)
    assert ledger.take(1000, 600, 0.0) == 250
    assert ledger.take(1000, 600, 0.0) == 0
    assert ledger.take(1000, 600, DAY_S / 10) == 75
    assert ledger.take(1000, 600, 10 * DAY_S) == 250


@given(
    st.lists(st.tuples(st.floats(0, 20_000), st.integers(1, 60_000), st.integers(0, 50)), max_size=60),
    st.sets(st.integers(0, 60)),
)
def test_no_day_sees_more_than_the_cap_whatever_the_restarts(
    asks: list[tuple[float, int, int]], restarts: set[int]
) -> None:
    now_s, ledger, written = 0.0, WriteLedger(CAP_BYTES, 0.0), []
    for step, (pause_s, block_bytes, num_blocks) in enumerate(asks):
        now_s += pause_s
        if step in restarts:
            ledger = WriteLedger(CAP_BYTES, now_s, ledger.pack())
        written.append((now_s, block_bytes * ledger.take(block_bytes, num_blocks, now_s)))
    for start_s, _ in written:
        assert sum(num for when_s, num in written if start_s <= when_s < start_s + DAY_S) <= CAP_BYTES


def test_a_restart_goes_on_where_it_was() -> None:
    ledger = WriteLedger(CAP_BYTES, 0.0)
    ledger.take(1000, 200, 0.0)
    saved = ledger.pack()
    assert len(saved) == LEDGER_BYTES
    assert WriteLedger(CAP_BYTES, 0.0, saved).take(1000, 600, 0.0) == 50
    assert WriteLedger(CAP_BYTES // 10, 0.0, saved).take(1000, 600, 0.0) == 25


def test_a_broken_ledger_has_nothing_left() -> None:
    saved = bytearray(WriteLedger(CAP_BYTES, 0.0).pack())
    saved[10] ^= 1
    assert WriteLedger(CAP_BYTES, 0.0, bytes(saved)).take(1, 1, 0.0) == 0
    assert WriteLedger(CAP_BYTES, 0.0, b"short").take(1, 1, 0.0) == 0


def test_a_clock_that_jumps_gives_no_more_than_the_burst() -> None:
    ledger = WriteLedger(CAP_BYTES, 1000.0)
    assert ledger.take(1000, 600, 1000.0) == 250
    assert ledger.take(1000, 600, 500.0) == 0
    assert ledger.take(1000, 600, 1e12) == 250
