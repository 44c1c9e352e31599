"""A page of metrics in prometheus-client's words, made anew for each scrape.

Decided here: how families become text. Each process names its own families.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Family(NamedTuple):
    """One name: what it says, and by what it is split."""

    text: str
    labels: tuple[str, ...] = ()


Rows = Iterable[tuple[tuple[str, ...], float]]
Shown = Metric
"""One family with its values."""


def plain(counters: Iterable[tuple[str, int]]) -> Iterator[Shown]:
    """A family for each counter that is not split."""
    for name, value in counters:
        yield CounterMetricFamily(name, "Since the start; see docs/metrics.md", value)


def split(families: Mapping[str, Family], rows: Mapping[str, Rows]) -> Iterator[Shown]:
    """All families of a table, each with its rows; names that end in `_total` count."""
    for name, family in families.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        made = kind(name, family.text, labels=family.labels)
        for labels, number in rows[name]:
            made.add_metric(labels, number)
        yield made


class One(Collector):
    """Hands one family to the renderer."""

    def __init__(self) -> None:
        self.family: Metric | None = None

    def collect(self) -> Iterable[Metric]:
        """That family."""
        return [] if self.family is None else [self.family]


class Page:
    """The page of metrics.

    All facts are of one moment; putting them into text is done family by family, because the whole
    page takes some milliseconds of the thread that callers wait for.
    """

    def __init__(self, read: Callable[[], Iterable[Shown]]) -> None:
        self._read = read
        self._one = One()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._one)

    async def render(self) -> tuple[bytes, str]:
        """The text, and its content type."""
        parts = []
        for family in list(self._read()):
            self._one.family = family
            parts.append(generate_latest(self._registry))
            await trio.lowlevel.checkpoint()
        return b"".join(parts), CONTENT_TYPE_LATEST
