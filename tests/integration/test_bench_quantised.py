"""The benchmark of quantised blocks, with hardly any tokens of a generated model: every measurement runs."""

from bench import quantised


def test_without_quantisation_nothing_changes_and_with_it_blocks_are_smaller() -> None:
    rows = {row["quantisation"]: row for row in quantised.measure(None, "It is what it is. " * 40, quantised.DRY)}
    none, others = rows.pop("none"), rows
    assert (none["greedy_agreement"], none["same_choice"], none["answers_equal"]) == (1.0, 1.0, "2 of 2")
    assert set(others) == {"fp8", "int8"}
    for row in others.values():
        assert 3 * int(str(row["block_bytes"])) < int(str(none["block_bytes"]))
        assert row["perplexity"] != none["perplexity"]
        assert 0.8 < float(str(row["perplexity"])) / float(str(none["perplexity"])) < 1.25
