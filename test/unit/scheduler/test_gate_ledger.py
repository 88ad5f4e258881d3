"""QualityLedger: histograms as Prometheus counts them, quantiles only of enough, drift once, and back from JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from chunk_cache.gate.verification_ledger import (
    BAND_EDGES,
    MAX_PARTITIONS,
    MIN_COUNT,
    NAT_EDGES,
    OTHERS,
    WINDOW,
    Histogram,
    Kind,
    Measure,
    QualityLedger,
    band_of,
)
from chunk_cache.keys import Partition

KIND = Kind("epic", "default", "0.1-0.2")


def add_all(ledger: QualityLedger, kls: Iterable[float]) -> list[str]:
    found = [ledger.add(KIND, Measure(kl, agreement=0.5, nats_lost=kl / 2)) for kl in kls]
    return [sentence for sentence in found if sentence is not None]


@pytest.mark.parametrize(
    ("ratio", "band"), [(0.0, "0"), (0.01, "0-0.05"), (0.05, "0-0.05"), (0.15, "0.1-0.2"), (1.0, "0.75-1")]
)
def test_bands(ratio: float, band: str) -> None:
    assert band_of(ratio) == band


def test_every_ratio_has_a_band() -> None:
    assert {band_of(i / 1000) for i in range(1001)} == {band_of(edge) for edge in BAND_EDGES}


def test_histogram_counts_as_a_sorted_list() -> None:
    rng = random.Random(0)
    values = [10 ** rng.uniform(-6, 2) for _ in range(500)] + list(NAT_EDGES)
    histogram = Histogram(NAT_EDGES)
    for value in values:
        histogram.add(value)
    for i, edge in enumerate(NAT_EDGES):
        assert sum(histogram.counts[: i + 1]) == sum(value <= edge for value in values)
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(sum(values))
    for share in (0.5, 0.9, 0.95, 0.99):
        exact = sorted(values)[-(-int(share * 1000 * len(values)) // 1000) - 1]
        quantile = histogram.quantile(share)
        assert quantile is not None
        assert quantile >= exact
        assert NAT_EDGES[max(0, NAT_EDGES.index(quantile) - 1)] < exact if quantile in NAT_EDGES else exact > 10


def test_a_quantile_of_too_few_is_unknown() -> None:
    histogram = Histogram(NAT_EDGES)
    for _ in range(MIN_COUNT - 1):
        histogram.add(0.02)
    assert histogram.quantile(0.95) is None
    histogram.add(0.02)
    assert histogram.quantile(0.95) == 0.03


def test_an_unsent_answer_counts_for_kl_alone() -> None:
    ledger = QualityLedger()
    ledger.add(KIND, Measure(0.2))
    (row,) = ledger.rows()
    assert [row[name]["count"] for name in ("kl", "agreement", "nats_lost")] == [1, 0, 0]


def test_drift_is_told_once() -> None:
    ledger, rng = QualityLedger(), random.Random(1)

    def some(high: float, num: int) -> list[float]:
        return [rng.uniform(0, high) for _ in range(num)]

    assert add_all(ledger, some(0.05, 20 * WINDOW)) == []
    (sentence,) = add_all(ledger, some(1.0, 10 * WINDOW))
    assert "epic" in sentence
    assert "at most 1 in the newest 32 replies and was 0.1" in sentence
    assert ledger.rows()[0]["kl"]["count"] == 30 * WINDOW


def test_partitions_are_few_and_their_names_say_nothing() -> None:
    ledger = QualityLedger()
    assert ledger.partition_name(Partition()) == "default"
    name = ledger.partition_name(Partition(cache_salt="secret"))
    assert name == ledger.partition_name(Partition(cache_salt="secret"))
    assert "secret" not in name
    names = {ledger.partition_name(Partition(extra_key=str(i))) for i in range(2 * MAX_PARTITIONS)}
    assert len(names) == MAX_PARTITIONS - 2 + 1
    assert OTHERS in names
    assert ledger.partition_name(Partition(cache_salt="secret")) == name
    ledger.forget()
    assert {ledger.partition_name(Partition(extra_key=f"later {i}")) for i in range(5)} == {OTHERS}


def test_what_is_dumped_is_loaded() -> None:
    ledger, again = QualityLedger(), QualityLedger()
    add_all(ledger, (i / 100 for i in range(3 * WINDOW)))
    again.load(json.loads(json.dumps(ledger.dump())))
    assert again.rows() == ledger.rows()
    assert again.dump() == ledger.dump()


@pytest.mark.parametrize(
    "value", [[["epic", "default"]], [["epic", "default", "0", []]], [["a", "b", "0", [[[1], 0]] * 4]]]
)
def test_what_was_not_dumped_is_refused(value: list[object]) -> None:
    with pytest.raises(ValueError):
        QualityLedger().load(value)
