"""Plans: how large a benchmark is. `STANDARD` is `make bench`, `LONG` what the documentation cites, `QUICK` a check.

A plan sets model, trace and load; the flags of `bench_serving.py` change some of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from benchmark.common.models import LlamaShape
from benchmark.quality.question import DataError
from benchmark.serving.sglang_tool import SharedScale
from benchmark.serving.systems import CONTEXTPILOT, NO_CACHE, REBUILD, REORDER, STOCK
from benchmark.simulate.trace import TraceSpec

VOCAB = 4096
MAIN_PARTS, SMALL_PARTS = ("serve", "documents", "crowd", "fresh", "shared", "pulse"), ("trained", "orders")
PARTS = (*MAIN_PARTS, *SMALL_PARTS)
"""Parts that measure the plan's model (`MAIN_PARTS`), then those that measure the trained one."""


@dataclass(frozen=True)
class Load:
    """How many requests a system gets, and how.

    Attributes:
        warmup: first queries, in a closed loop from an empty cache; the papers take 20.
        closed: queries of the closed loop.
        closed_runs: runs that the closed loop is split into, for the spread.
        clients: clients of the closed loop.
        fractions: rates, as shares of what stock reached in the closed loop, ascending; the first is the low rate.
        point_s: about how long one rate of the sweep is measured.
        point_num: fewest and most queries of one rate, whatever `point_s` gives.
        refinements: bisections at the end of a sweep.
        tries: runs that must break the bound before a rate counts as too high.
        bound_factor: bound of the p99 of the time to first token, divided by stock's median at the low rate.
    """

    warmup: int = 20
    closed: int = 45
    closed_runs: int = 3
    clients: int = 4
    fractions: tuple[float, ...] = (0.3, 0.7, 1.0, 1.5, 2.2, 3.2)
    point_s: float = 45.0
    point_num: tuple[int, int] = (15, 80)
    refinements: int = 1
    tries: int = 2
    bound_factor: float = 3.0

    def num_at(self, rate: float) -> int:
        """Queries for one rate of the sweep."""
        least, most = self.point_num
        return round(min(most, max(least, rate * self.point_s)))


Changeable = TypeVar("Changeable", TraceSpec, Load)


def changed(values: Changeable, text: str, flag: str) -> Changeable:
    """The values, changed as `text` says, such as `chunk_len=300,zipf=1`.

    Raises:
        DataError: a key is unknown, or its value is not of the key's type; the message names `flag`.
    """
    known = {f.name: getattr(values, f.name) for f in fields(values)}
    known = {key: value for key, value in known.items() if isinstance(value, int | float | str) and key != "name"}
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, is_given, value = (piece.strip() for piece in part.partition("="))
        if key not in known or not is_given:
            raise DataError(f"{flag}: {part.strip()!r}; give KEY=VALUE with a key of {', '.join(known)}.")
        kind = type(known[key])
        try:
            found[key] = kind(value)
        except ValueError:
            raise DataError(f"{flag}: {key}={value}: give {'a whole number' if kind is int else 'a number'}.") from None
        if kind is float and not 0 <= found[key] < math.inf:
            raise DataError(f"{flag}: {key}={value}: give a number from 0.")
        if kind is int and found[key] < (1 if isinstance(values, Load) else 0):
            raise DataError(f"{flag}: {key}={value} is too small.")
    return replace(values, **found)


@dataclass(frozen=True)
class PulseScale:
    """How RAGPulse is scaled down for a CPU.

    Attributes:
        share, output_share: shares of the recorded lengths of texts, and of answers.
        num_timed: requests after the closed loop that arrive at their recorded times, scaled to `rate`.
        rate: mean rate of these requests, as a share of what the first system reached in the closed loop.
        behind: layouts: how many blocks of the system prompt stand behind the passages. Only the first has timed
            requests.
        marks_all: mark history and results from the web too, not only passages.
        warmup_output_len: tokens of an answer in the warm-up; None: as recorded.
    """

    share: float = 0.15
    output_share: float = 0.03
    num_timed: int = 60
    rate: float = 0.7
    behind: tuple[int, ...] = (0, 1)
    marks_all: bool = False
    warmup_output_len: int | None = None


_SHARED = SharedScale()


@dataclass(frozen=True)
class Plan:
    """The parts, models and sizes of one benchmark.

    Attributes:
        spec: what the generated trace is like; it has as many requests as the run may need.
        pool_len: tokens of the KV pool of every server.
        swept: systems that are swept over rates; `closed_only` only run warm-up and closed loop.
        parts: parts that run unless the command line names others.
        crowd_num, crowd_clients: queries of part crowd, and how many clients send them.
        fresh_blocks, fresh_len: pairs of blocks of the trace without a repeated chunk, and queries per block.
        trained: systems that are measured with the trained model.
        trained_num: questions to each of these systems, after `trained_warmup` that do not count.
        pulse: scale of part pulse.
        shared: scale of part shared.
        orders_num, orders_block: queries of part orders, and how many make one row of its table.
    """

    name: str
    shape: LlamaShape
    spec: TraceSpec
    pool_len: int
    load: Load
    swept: tuple[str, ...] = (STOCK, REORDER, "epic@0.15")
    closed_only: tuple[str, ...] = ()
    output_len: int = 8
    parts: tuple[str, ...] = tuple(part for part in PARTS if part not in ("shared", "pulse"))
    crowd_num: int = 96
    crowd_clients: int = 48
    fresh_blocks: int = 8
    fresh_len: int = 4
    trained: tuple[str, ...] = ()
    trained_num: int = 200
    trained_warmup: int = 60
    pulse: PulseScale = PulseScale()
    shared: SharedScale = _SHARED
    orders_num: int = 5000
    orders_block: int = 500


_SPEC = TraceSpec(
    name="serving",
    num_requests=2500,
    num_chunks=60,
    chunks_per_request=5,
    max_chunks_per_request=15,
    zipf=0.8,
    new_share=0.03,
    chunk_len=120,
    length_spread=0.4,
    system_len=64,
    question_len=32,
    order="drawn",
    topic_size=6,
)
_METHODS = ("epic", "cache-craft", "cacheblend", "a3", "fusionrag")
_TRAINED = (
    STOCK,
    REORDER,
    "full-reuse@0",
    *(f"{method}@0.15" for method in _METHODS),
    *(f"{method}@0.5" for method in ("epic", "cacheblend", "fusionrag")),
    "full@1",
)

STANDARD = Plan(
    name="standard",
    shape=LlamaShape(8, 512, 8, 8, 1408, VOCAB),
    spec=_SPEC,
    pool_len=49152,
    load=Load(closed=30, point_s=30.0, point_num=(12, 60)),
    closed_only=(NO_CACHE, "cache-craft@0.15"),
    parts=("serve", "documents", "fresh", "trained"),
    trained=_TRAINED,
)
LONG = Plan(
    name="long",
    shape=LlamaShape(12, 768, 12, 12, 2048, VOCAB),
    spec=_SPEC,
    pool_len=49152,
    load=Load(),
    closed_only=(
        NO_CACHE,
        "full-reuse@0",
        *(f"{method}@0.15" for method in ("cache-craft", "cacheblend", "fusionrag")),
        "epic@0.3",
    ),
    fresh_blocks=32,
    trained=_TRAINED,
    trained_num=300,
)
QUICK = Plan(
    name="quick",
    shape=LlamaShape(2, 128, 2, 2, 352, VOCAB),
    spec=replace(_SPEC, num_requests=400, chunk_len=60, num_chunks=30),
    pool_len=16384,
    load=Load(8, 8, 2, fractions=(0.3, 1.0), point_s=3.0, point_num=(4, 12), refinements=0, tries=1),
    closed_only=(NO_CACHE,),
    crowd_num=12,
    crowd_clients=12,
    fresh_blocks=2,
    fresh_len=2,
    shared=SharedScale(groups=3, per_group=3, system_len=150, question_len=30, pairs=2),
    trained=(STOCK, "epic@0.15"),
    trained_num=20,
    trained_warmup=8,
    orders_num=40,
    orders_block=20,
)
RAGPULSE = Plan(
    name="ragpulse",
    shape=STANDARD.shape,
    spec=_SPEC,
    pool_len=49152,
    load=Load(warmup=60, closed=120),
    swept=(STOCK, REORDER, REBUILD, "epic@0.15"),
    parts=("pulse",),
)
STEADY = replace(
    RAGPULSE,
    name="ragpulse-steady",
    load=Load(warmup=3640, closed=240),
    swept=(STOCK, CONTEXTPILOT, REBUILD, "near-words@0.15"),
    pulse=PulseScale(num_timed=120, behind=(0,), marks_all=True, warmup_output_len=1),
)
PLANS = {plan.name: plan for plan in (STANDARD, LONG, QUICK, RAGPULSE, STEADY)}

ORDERS_SPEC = TraceSpec(
    name="orders",
    num_chunks=200,
    chunks_per_request=8,
    zipf=0.8,
    chunk_len=100,
    length_spread=0.3,
    system_len=64,
    question_len=16,
    order="new",
)
