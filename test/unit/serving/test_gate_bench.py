"""The gate's benchmark: its histograms are those of the gate, its table of time that of the requests."""

from __future__ import annotations

import random

from benchmark.common.machine import ROOT
from benchmark.gate.offline import MEASURES as COMPARED
from benchmark.gate.offline import compare
from benchmark.gate.questions import make_prompts
from benchmark.gate.report import over_time

from chunk_cache.gate.verification_ledger import MEASURES, Histogram


def test_histograms_are_those_of_the_gate() -> None:
    rng = random.Random(0)
    replies = [{name: rng.choice([rng.random(), rng.choice(MEASURES[name])]) for name in COMPARED} for _ in range(300)]
    moved = [{**replies[0], "kl": replies[0]["kl"] + 20.0}, *replies[1:]]
    found = compare(replies, moved, MEASURES)
    assert set(COMPARED) == set(MEASURES)
    for name, edges in MEASURES.items():
        histogram = Histogram(edges)
        for reply in replies:
            histogram.add(reply[name])
        assert found[name]["gate"] == histogram.counts
        assert found[name]["replies_in_another_bucket"] == (name == "kl")
    assert found["kl"]["largest_difference"] == 20.0


def test_over_time() -> None:
    served = [
        {"at_s": at_s, "is_exact": step == 2, "ratio": 0.1 * (step + 1), "step": step, "family": "needle"}
        for at_s, step in ((1, 0), (9, 1), (12, 2), (31, 0))
    ]
    rows = over_time(served, 10.0)
    assert [(row["from_s"], row["requests"], row["steps"]) for row in rows] == [
        (0.0, 2, {0: 1, 1: 1}),
        (10.0, 1, {2: 1}),
        (30.0, 1, {0: 1}),
    ]
    assert [round(row["mean_ratio"], 2) for row in rows] == [0.15, 1.0, 0.1]


def test_a_chunk_is_the_same_alone_and_in_its_prompt() -> None:
    for prompt in make_prompts(ROOT / "benchmark" / "quality" / "models" / "qa-1m-seed0", "carry", 3):
        alone = [ids[slice(*spans[0])] for ids, spans in prompt.priming]
        assert alone == [prompt.ids[slice(*span)] for span in prompt.spans]
        head = prompt.ids[: prompt.spans[0][0]]
        assert all(ids[: len(head)] == head for ids, _ in prompt.priming)
        assert len(prompt.ids) > prompt.spans[-1][1]
