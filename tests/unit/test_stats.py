"""Statistics: what is counted, what is refused, and the page that Prometheus reads."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.exposition import expose
from kvstore.stats import CATALOGUE, Stats


def scrape(stats: Stats) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(expose(stats).decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_counters_add_up_by_label() -> None:
    stats = Stats()
    stats.inc("kvstore_evicted_blocks_total", 2, "memory")
    stats.inc("kvstore_evicted_blocks_total", 3, "memory")
    stats.inc("kvstore_evicted_blocks_total", 1, "file")
    stats.inc("kvstore_requests_total")
    assert stats.get("kvstore_evicted_blocks_total", "memory") == 5
    assert stats.get("kvstore_evicted_blocks_total", "file") == 1
    assert stats.get("kvstore_evicted_blocks_total", "redis") == 0
    assert stats.get("kvstore_requests_total") == 1


def test_a_gauge_is_what_it_was_set_to_last() -> None:
    stats = Stats()
    stats.set("kvstore_used_bytes", 10, "file")
    stats.set("kvstore_used_bytes", 4, "file")
    assert stats.get("kvstore_used_bytes", "file") == 4


@pytest.mark.parametrize("labels", [(), ("file", "read")])
def test_a_wrong_number_of_labels_is_a_bug_and_counts_nothing(labels: tuple[str, ...]) -> None:
    stats = Stats()
    with pytest.raises(ValueError, match="takes 1 labels"):
        stats.inc("kvstore_evicted_blocks_total", 1, *labels)
    with pytest.raises(ValueError, match="takes 1 labels"):
        stats.set("kvstore_used_bytes", 1, *labels)
    assert stats.snapshot()["kvstore_evicted_blocks_total"] == {}


def test_an_unknown_name_is_a_bug() -> None:
    with pytest.raises(KeyError, match="kvstore_typo_total"):
        Stats().inc("kvstore_typo_total")
    with pytest.raises(KeyError, match="kvstore_typo"):
        Stats().set("kvstore_typo", 1)


def test_a_snapshot_does_not_change_afterwards() -> None:
    stats = Stats()
    stats.inc("kvstore_lookups_total")
    before = stats.snapshot()
    stats.inc("kvstore_lookups_total")
    assert before["kvstore_lookups_total"] == {(): 1}


def test_prometheus_reads_what_was_counted() -> None:
    stats = Stats()
    stats.inc("kvstore_copies_total", 7, "redis", "read", "ok")
    stats.set("kvstore_capacity_bytes", 64 << 30, "memory")
    page = scrape(stats)
    assert page["kvstore_copies_total", frozenset({("tier", "redis"), ("op", "read"), ("outcome", "ok")})] == 7
    assert page["kvstore_capacity_bytes", frozenset({("tier", "memory")})] == 64 << 30
    assert page["kvstore_requests_total", frozenset()] == 0  # there before anything happened


def test_the_catalogue_follows_the_naming_of_prometheus() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.startswith("kvstore_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
