"""The Grafana dashboard shows metrics that exist, and all of them; alert rules ask for what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY

from chunk_cache.advice import ADVICE, Level
from chunk_cache.types import REASONS, Status
from sglang_chunk_cache.selector.selector_client import SELECTOR_METERS
from sglang_chunk_cache.telemetry.chunk_metrics import ChunkMetrics
from sglang_chunk_cache.telemetry.gate_metrics import GateMetrics
from sglang_chunk_cache.telemetry.meters import Meters
from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "grafana"
DASHBOARD, ALERTS = FOLDER / "chunk_cache.json", FOLDER / "alerts.yml"


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def labels_of() -> dict[str, set[str]]:
    """Labels by the name that Prometheus scrapes, of all metrics that the chunk cache registers."""
    before = set(REGISTRY._collector_to_names)
    ChunkMetrics(enabled=True)
    TierMetrics(enabled=True)
    Meters(SELECTOR_METERS, enabled=True)
    GateMetrics(enabled=True, model="m")
    ours = {one: names for one, names in REGISTRY._collector_to_names.items() if one not in before}
    found = {}
    for collector, names in ours.items():
        metric_type = collector._type  # type: ignore[attr-defined]
        suffixes = {"counter": ("_total",), "histogram": ("_bucket",), "gauge": ("",)}[metric_type]
        for suffix in suffixes:
            name = collector._name + suffix  # type: ignore[attr-defined]
            assert name in names or suffix == "", f"{name} is none of {names}"
            found[name] = set(collector._labelnames) | {"instance", "le"}  # type: ignore[attr-defined]
    for collector in ours:
        REGISTRY.unregister(collector)
    return found


def test_every_metric_is_on_it_and_no_other(panels: list[dict[str, Any]], labels_of: dict[str, set[str]]) -> None:
    text = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    assert set(re.findall(r"sglang:chunk_cache_\w+", text)) == set(labels_of)


def test_queries_use_labels_that_are_there(panels: list[dict[str, Any]], labels_of: dict[str, set[str]]) -> None:
    for panel in panels:
        for target in panel["targets"]:
            names = re.findall(r"sglang:chunk_cache_\w+", target["expr"])
            if not names:
                continue
            known = set.intersection(*(labels_of[name] for name in names))
            by = {
                label.strip() for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(",")
            }
            selected = set(re.findall(r"(\w+)=~?\"", target["expr"]))
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert by | selected <= known, panel["title"]
            assert shown <= by | {"partition"}, panel["title"]


def test_panels_neither_overlap_nor_share_an_id(panels: list[dict[str, Any]]) -> None:
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_alerts_ask_for_what_there_is(labels_of: dict[str, set[str]]) -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    values: dict[str, set[str]] = {}
    for rule in group["rules"]:
        names = re.findall(r"sglang:chunk_cache_\w+", rule["expr"])
        assert names, rule["alert"]
        assert rule["annotations"]["summary"]
        known = set.intersection(*(labels_of[name] for name in names))
        by = {label for found in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in found.split(", ")}
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        selected = re.findall(r"(\w+)=~?\"([^\"]*)\"", rule["expr"])
        assert shown <= by <= known, rule["alert"]
        assert {label for label, _ in selected} <= known, rule["alert"]
        for label, text in selected:
            values.setdefault(label, set()).update(text.split("|"))
    assert values["status"] <= set(Status)
    assert values["reason"] <= set(REASONS)
    broken = {reason for reason, (level, _) in ADVICE.items() if level is Level.FAILURE}
    assert broken <= values["reason"], "whatever is broken is told"
