"""Statistics in the text format that Prometheus reads."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvstore.stats import Stats


class StatsCollector(Collector):
    """Hands a ``Stats`` to a prometheus-client registry, at every scrape anew."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Every metric of the catalogue, also those that counted nothing yet."""
        values = self._stats.snapshot()
        for metric in self._stats.catalogue:
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            samples = family(metric.name, metric.help, labels=metric.labels)
            for labels, value in sorted(values[metric.name].items()):
                samples.add_metric(labels, value)
            yield samples


def registry_of(stats: Stats) -> CollectorRegistry:
    """What an HTTP server answers from."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatsCollector(stats))
    return registry


def expose(stats: Stats) -> bytes:
    """The page that a Prometheus server scrapes."""
    return generate_latest(registry_of(stats))
