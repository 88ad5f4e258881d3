"""Requests at a small ratio, by methods that look at no layer with a window: for a model with attention sinks."""

from __future__ import annotations

from exactness.cases import Session
from exactness.selection_cases import Recorder, Run, recipe

__all__ = ["CASES", "FULL_LAYERS", "Session"]

FULL_LAYERS = [1, 3]
RATIO = 0.15
RECIPES = [
    recipe("epic", RATIO),
    recipe("h2o", RATIO),
    recipe("cache-craft", RATIO),
    recipe("cacheblend", RATIO),
    recipe("a3", RATIO, check_layer=1),
    recipe("a3", RATIO, check_layer=3, drift=1),
    recipe("fusionrag", RATIO, layers=[3]),
    recipe("infoflow", RATIO, layers=FULL_LAYERS),
    recipe("question-drift", RATIO, layers=FULL_LAYERS),
]


def case_small_ratio(s: Session) -> list[Run]:
    recorder = Recorder(s, seed=6)
    recorder.prime(10)
    for one in RECIPES:
        for _ in range(3):
            recorder.send((recorder.prompt(has_misses=True), one))
    return recorder.runs


CASES = {"small_ratio": case_small_ratio}
