"""QualityLedger: how far replies with reused chunks were from exact ones, as histograms.

Verbs: `add` (counts a verified reply; says if its kind has drifted), `rows` (what is known), `dump` and `load` (as JSON
values).

A kind of reply is its method, its partition and its band of ratios. The ledger belongs to one model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunk_cache.errors import show
from chunk_cache.keys import Partition

NAT_EDGES = (1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper edges of the buckets of KL and of nats lost; above the last is one more."""
SHARE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""Upper edges of the buckets of agreement."""
BAND_EDGES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
"""Ends of the bands of ratios; 0 is a band of its own."""
MAX_PARTITIONS = 64
"""Partitions that are told apart; all later ones are `OTHERS`."""
OTHERS = "others"
MIN_COUNT = 20
"""Values that a quantile needs; with fewer it is unknown."""
WINDOW = 32
"""Newest replies of a kind that are compared with all before them."""
_DRIFT = 1.95
"""Bound on the Kolmogorov-Smirnov statistic: less than one false alarm in 1,000 windows."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One verified reply.

    Attributes:
        kl: KL(exact || fused) of the first token, over the whole vocabulary, in nats.
        agreement: share of the sent tokens that are the likeliest ones by an exact prefill of the same tokens; None if
            none was sent.
        nats_lost: how much less likely the sent tokens are by the exact prefill than its likeliest ones, nats per
            token; None as above.
    """

    kl: float
    agreement: float | None = None
    nats_lost: float | None = None


MEASURES: Mapping[str, Sequence[float]] = {"kl": NAT_EDGES, "agreement": SHARE_EDGES, "nats_lost": NAT_EDGES}
"""Measure -> upper edges of its buckets."""


@dataclass(slots=True)
class Histogram:
    """Counts of values, by bucket; a value on an edge lies below it."""

    edges: Sequence[float]
    counts: list[int] = field(default_factory=list)
    """One per edge, and one above the last."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.edges) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    def absorb(self, other: Histogram) -> None:
        """Adds the values of another one."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def quantile(self, share: float) -> float | None:
        """Upper edge of the bucket of a quantile, infinite for the last; None with fewer than `MIN_COUNT` values."""
        count = self.count
        if count < MIN_COUNT:
            return None
        rank, seen = math.ceil(share * count), 0
        for edge, num in zip((*self.edges, math.inf), self.counts, strict=True):
            seen += num
            if seen >= rank:
                return edge
        raise AssertionError("the counts add up to their sum")

    def distance(self, other: Histogram) -> float:
        """Kolmogorov-Smirnov statistic: largest difference of the distribution functions, scaled by the sizes."""
        mine, theirs, n, m, largest = 0, 0, self.count, other.count, 0.0
        for a, b in zip(self.counts, other.counts, strict=True):
            mine, theirs = mine + a, theirs + b
            largest = max(largest, abs(mine / n - theirs / m))
        return largest * math.sqrt(n * m / (n + m))


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """Replies that are counted together."""

    method: str
    partition: str
    band: str


@dataclass(slots=True)
class _Row:
    """What is known of one kind.

    Attributes:
        histograms: of all replies, by measure.
        before, newest: KL of the replies before the newest window, and in it.
    """

    histograms: dict[str, Histogram]
    before: Histogram = field(default_factory=lambda: Histogram(NAT_EDGES))
    newest: Histogram = field(default_factory=lambda: Histogram(NAT_EDGES))


def band_of(ratio: float) -> str:
    """The band of a recompute ratio, such as `0.1-0.2`, which is (0.1, 0.2]."""
    place = bisect_left(BAND_EDGES, ratio)
    return "0" if place == 0 else f"{BAND_EDGES[place - 1]:g}-{BAND_EDGES[place]:g}"


class QualityLedger:
    """See the head of this file."""

    def __init__(self) -> None:
        self._rows: dict[Kind, _Row] = {}
        self._partitions: set[str] = set()

    def partition_name(self, partition: Partition) -> str:
        """`Partition.name`; `OTHERS` if there are too many partitions."""
        name = partition.name
        if name not in self._partitions and len(self._partitions) < MAX_PARTITIONS:
            self._partitions.add(name)
        return name if name in self._partitions else OTHERS

    def forget(self) -> None:
        """Forgets all replies; partitions keep their names, which metrics never forget."""
        self._rows.clear()

    def add(self, kind: Kind, measure: Measure) -> str | None:
        """Counts one reply; returns a sentence if the KL of its kind has drifted."""
        row = self._rows.get(kind)
        if row is None:
            row = self._rows[kind] = _Row({name: Histogram(edges) for name, edges in MEASURES.items()})
        for name, histogram in row.histograms.items():
            value = getattr(measure, name)
            if value is not None:
                histogram.add(value)
        row.newest.add(measure.kl)
        if row.newest.count < WINDOW:
            return None
        before, newest = row.before, row.newest
        row.newest = Histogram(NAT_EDGES)
        if before.count < WINDOW or before.distance(newest) < _DRIFT:
            before.absorb(newest)
            return None
        row.before = newest
        return (
            f"KL of {kind.method}, ratios {kind.band}, partition {kind.partition} has drifted: its 95th percentile is "
            f"at most {newest.quantile(0.95):g} in the newest {WINDOW} replies and was {before.quantile(0.95):g}"
        )

    def rows(self) -> list[dict[str, Any]]:
        """What is known of each kind, as JSON values; an infinite quantile is the word `inf`."""
        found = []
        for kind, row in sorted(self._rows.items()):
            shown: dict[str, Any] = {"method": kind.method, "partition": kind.partition, "ratios": kind.band}
            for name, histogram in row.histograms.items():
                shown[name] = {
                    "count": histogram.count,
                    "sum": histogram.total,
                    "buckets": dict(zip(_labels(histogram.edges), histogram.counts, strict=True)),
                }
            found.append(shown | {"kl_p50": _shown(row, 0.5), "kl_p95": _shown(row, 0.95)})
        return found

    def dump(self) -> list[Any]:
        """Everything that is known, for `load`."""
        return [
            [kind.method, kind.partition, kind.band, [_dumped(h) for h in (*row.histograms.values(), row.before)]]
            for kind, row in sorted(self._rows.items())
        ]

    def load(self, value: Iterable[Any]) -> None:
        """Takes what `dump` gave.

        Raises:
            ValueError: `dump` did not give this.
        """
        for method, partition, band, histograms in value:
            if len(histograms) != len(MEASURES) + 1:
                raise ValueError(f"{show(histograms)} are not {len(MEASURES) + 1} histograms")
            loaded = [_loaded(edges, h) for edges, h in zip((*MEASURES.values(), NAT_EDGES), histograms, strict=True)]
            self._partitions.add(partition)
            self._rows[Kind(method, partition, band)] = _Row(dict(zip(MEASURES, loaded, strict=False)), loaded[-1])


def _labels(edges: Sequence[float]) -> list[str]:
    return [*(f"{edge:g}" for edge in edges), "inf"]


def _shown(row: _Row, share: float) -> float | str | None:
    value = row.histograms["kl"].quantile(share)
    return "inf" if value == math.inf else value


def _dumped(histogram: Histogram) -> list[Any]:
    return [histogram.counts, histogram.total]


def _loaded(edges: Sequence[float], value: Any) -> Histogram:
    counts, total = value
    if len(counts) != len(edges) + 1 or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise ValueError(f"{show(counts)} are not {len(edges) + 1} counts")
    return Histogram(edges, list(counts), float(total))
