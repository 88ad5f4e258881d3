"""Plans in one line: `hit` and `NOT_STORED` are lookups, `plan_of` plans a prompt of 100 tokens, `outcome` sums up."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

from chunk_cache.index.lookup import Lookup
from chunk_cache.index.variant import NodeHome, Variant
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.planning import PlanSettings, make_plan
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.types import Span

NOT_STORED = Lookup(None, 0, "not_stored")


def hit(
    length: int,
    covered_len: int | None = None,
    *,
    start: int = 0,
    generation: int = 0,
    unit_cfo: float | None = None,
) -> Lookup:
    home = NodeHome(array("q", range(length)), "chunk")
    variant = Variant(7, b"k" * 16, length, start, generation, (), 0, home)
    return Lookup(variant, length if covered_len is None else covered_len, None, unit_cfo)


def plan_of(spans: list[Span], lookups: list[Lookup | None], **given: Any) -> RecomputePlan:
    option_names = [f.name for f in dataclasses.fields(RequestOptions)]
    opts = RequestOptions(spans=tuple(spans), **{k: given.pop(k) for k in list(given) if k in option_names})
    prompt_len = given.pop("prompt_len", 100)
    arguments: dict[str, Any] = {
        "default_method": "epic",
        "default_ratio": 0.15,
        "prefix_len": 0,
        "max_prefix_len": prompt_len - 1,
        "chunk_keys": [bytes([i]) * 16 for i in range(len(spans))],
    }
    return plan_by(opts, prompt_len=prompt_len, lookups=lookups, **(arguments | given))


def plan_by(opts: RequestOptions, **given: Any) -> RecomputePlan:
    """`make_plan`, by the settings among what is given."""
    names = [f.name for f in dataclasses.fields(PlanSettings)]
    settings = PlanSettings(**{name: given.pop(name) for name in names if name in given})
    return make_plan(opts, settings, **given)


def outcome(plan: RecomputePlan) -> list[tuple[str, str | None, int]]:
    return [(c.status.value, c.reason, c.num_reused) for c in plan.chunks]
