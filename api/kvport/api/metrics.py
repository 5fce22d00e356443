"""Prometheus metrics, made of the very numbers that `GET /api/cache/stats` answers.

In: a node. Out: the text that a Prometheus server scrapes. Nothing is counted here.
What a namespace counts has its labels; the counts of namespaces that are there no more
go on with empty ones, so that no sum ever falls.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
"""Of `exposition`."""

_NAMESPACE: Final = ("namespace", "model", "scope")
_NOBODY: Final = ("", "", "")
"""Labels of what is no namespace's, or of one that is there no more."""


def exposition(numbers: Mapping[str, Any]) -> bytes:
    """All metrics as text.

    Args:
        numbers: from `numbers.numbers`.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(numbers))
    return generate_latest(registry)


class _Numbers(Collector):
    def __init__(self, numbers: Mapping[str, Any]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        """All families of metrics."""
        cache = self._numbers["cache"]
        yield _gauge("available", "Whether there is a cache at present.",
                     int(cache is not None))  # fmt: skip
        if cache is not None:
            yield from self._held(cache)
            yield from _counts(cache)
        yield from _models(self._numbers["models"])

    def _held(self, cache: Mapping[str, Any]) -> Iterator[Metric]:
        yield _gauge("total_bytes", "Allocated and reserved bytes below the root.",
                     self._numbers["total_bytes"])  # fmt: skip
        yield _gauge("cap_bytes", "The limit of the total.", self._numbers["cap_bytes"])
        yield _gauge("effective_cap_bytes", "That limit, or less by the free floor.",
                     self._numbers["effective_cap_bytes"])  # fmt: skip
        nbytes = _labelled("bytes", "What the total is made of.", "kind")
        files = _labelled("files", "Files of stored state.", "kind")
        tokens = _labelled("stored_tokens", "Rows in stored segments.")
        segments = _labelled("stored_segments", "Stored segments.")
        for one in cache["namespaces"]:
            labels = _labels(one)
            tokens.add_metric(labels, one["tokens"])
            segments.add_metric(labels, one["segments"])
            for kind, held in one["kinds"].items():
                nbytes.add_metric((*labels, kind), held["bytes"])
                files.add_metric((*labels, kind), held["files"])
        for kind, size in cache["beside"].items():
            nbytes.add_metric((*_NOBODY, kind), size)
        yield from (nbytes, files, tokens, segments)
        yield _gauge("leases", "Segments that are leased.", cache["leases"])


def _counts(cache: Mapping[str, Any]) -> Iterator[Metric]:
    lookups = _counter("lookups", "Lookups of requests.", "result")
    restored = _counter("restored_tokens", "Tokens that requests started with.")
    captured = _counter("captured_tokens", "Rows of new segments.")
    written = _counter("written_bytes", "Bytes of blobs that were written.", "kind")
    removed = _counter("removed_segments", "Segments that went.", "reason")
    skipped = _counter("skipped_segments", "Segments that were not stored.", "reason")
    lost = {
        (name, unit): _counter(f"{name}_{unit}", f"Blobs that were {name}.", "kind")
        for name in ("pruned", "cleared")
        for unit in ("blobs", "bytes")
    }
    failed = _counter("failed_prunings", "Paths that could not be pruned.")
    damaged = _counter("damaged", "Blobs that were found damaged or missing.")
    for one in (*cache["namespaces"], cache["gone"]):
        labels = _labels(one)
        lookups.add_metric((*labels, "hit"), one["hits"])
        lookups.add_metric((*labels, "miss"), one["misses"])
        restored.add_metric(labels, one["restored_tokens"])
        captured.add_metric(labels, one["captured_tokens"])
        failed.add_metric(labels, one["failed_prunings"])
        damaged.add_metric(labels, one["damaged"])
        for family, name in (
            (written, "written"),
            (removed, "removed"),
            (skipped, "skipped"),
        ):
            for label, value in one[name].items():
                family.add_metric((*labels, label), value)
        for (name, unit), family in lost.items():
            for kind, counts in one[name].items():
                family.add_metric((*labels, kind), counts[unit])
    yield from (lookups, restored, captured, written, removed, skipped)
    yield from (*lost.values(), failed, damaged)
    resets = CounterMetricFamily(
        "kvport_cache_index_resets", "Times that the index was lost."
    )
    resets.add_metric((), cache["index_resets"])
    yield resets


def _models(models: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    names = dict.fromkeys(name for counts in models.values() for name in counts)
    for name in names:
        # The first is the number of requests; the others count in them.
        full = "kvport_requests" if name == "requests" else f"kvport_requests_{name}"
        about = f"Of the model's requests: {name.replace('_', ' ')}."
        family = CounterMetricFamily(full, about, labels=("model",))
        for model, counts in models.items():
            family.add_metric((model,), counts[name])
        yield family


def _labels(one: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(one.get(name, "")) for name in ("id", "model", "scope"))


def _gauge(name: str, about: str, value: int) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvport_cache_{name}", about, value=value)


def _labelled(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(
        f"kvport_cache_{name}", about, labels=(*_NAMESPACE, *labels)
    )


def _counter(name: str, about: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(
        f"kvport_cache_{name}", about, labels=(*_NAMESPACE, *labels)
    )
