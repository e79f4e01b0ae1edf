"""The metrics of all replicas as one text, each series with the name of its replica.

They are not summed here: a sum of counters falls when a replica ends, which Prometheus takes for a restart of all. A
query sums the rates instead: `sum without (replica) (rate(vllm:generation_tokens_total[1m]))`.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["merge_metrics"]


def merge_metrics(texts: Iterable[tuple[str, bytes]]) -> bytes:
    """Return the metrics of replicas in Prometheus' text format, with the label `replica`.

    Args:
        texts: The name of each replica, and its metrics in the same format.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)


class _Merged:
    """A collector of metrics that other processes have collected."""

    def __init__(self, texts: Iterable[tuple[str, bytes]]):
        self._families: dict[str, Metric] = {}
        for replica, text in texts:
            for family in text_string_to_metric_families(text.decode()):
                merged = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.samples.append(sample._replace(labels={"replica": replica} | sample.labels))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as a registry calls it."""
        yield from self._families.values()
