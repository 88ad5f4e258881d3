"""Plans: how large a benchmark is. `STANDARD` is `make bench`, `LONG` what the documentation cites, `QUICK` a check.

A plan fixes model, trace and load; what a run may change is on the command line of `bench_serving.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmark.common.models import LlamaShape
from benchmark.serving.systems import NO_CACHE, REORDER, STOCK
from benchmark.simulate.trace import TraceSpec

VOCAB = 4096
MAIN_PARTS, SMALL_PARTS = ("serve", "documents", "crowd", "fresh"), ("trained", "orders")
PARTS = (*MAIN_PARTS, *SMALL_PARTS)
"""By the model that they are about: the plan's, and the trained one."""


@dataclass(frozen=True)
class Load:
    """Requests of the parts of one system's run.

    Attributes:
        warmup: first queries, in a closed loop from an empty cache; the papers take 20.
        closed: queries of the closed loop.
        clients: of the closed loop.
        fractions: rates, as shares of what stock reached in the closed loop, ascending; the first is the low rate.
        point_s: a point of the sweep lasts about so long ...
        point_num: ... but has so many queries at least and at most.
        refinements: bisections at the end of a sweep.
        bound_factor: the bound of the p99 of the time to first token, in medians of stock at the low rate.
    """

    warmup: int = 20
    closed: int = 30
    clients: int = 4
    fractions: tuple[float, ...] = (0.3, 0.7, 1.0, 1.5, 2.2, 3.2)
    point_s: float = 45.0
    point_num: tuple[int, int] = (15, 80)
    refinements: int = 1
    bound_factor: float = 3.0

    def num_at(self, rate: float) -> int:
        """Queries of a point."""
        least, most = self.point_num
        return round(min(most, max(least, rate * self.point_s)))


@dataclass(frozen=True)
class Plan:
    """All that one benchmark does.

    Attributes:
        spec: of the generated trace; its number of requests is as many as the run may need.
        pool_len: tokens of the KV pool of every server.
        swept: systems that are swept; `closed_only` run warm-up and closed loop.
        parts: what is run unless the command line says otherwise.
        crowd_num, crowd_clients: queries of a crowd, and how many clients send them.
        fresh_blocks, fresh_len: pairs of blocks of the trace without a repeated chunk, and queries per block.
        trained: systems that the trained model answers for.
        trained_num: questions to each, behind `trained_warmup` that do not count.
        orders_num, orders_block: queries of the test for decay, and how many make one row of its table.
    """

    name: str
    shape: LlamaShape
    spec: TraceSpec
    pool_len: int
    load: Load
    swept: tuple[str, ...] = (STOCK, REORDER, "epic@0.15")
    closed_only: tuple[str, ...] = ()
    output_len: int = 8
    parts: tuple[str, ...] = PARTS
    crowd_num: int = 96
    crowd_clients: int = 48
    fresh_blocks: int = 8
    fresh_len: int = 4
    trained: tuple[str, ...] = ()
    trained_num: int = 200
    trained_warmup: int = 60
    orders_num: int = 5000
    orders_block: int = 500


_SPEC = TraceSpec(
    name="serving",
    num_requests=1500,
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
    load=Load(point_s=30.0, point_num=(12, 60)),
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
    load=Load(warmup=8, closed=8, fractions=(0.3, 1.0), point_s=3.0, point_num=(4, 12), refinements=0),
    closed_only=(NO_CACHE,),
    crowd_num=12,
    crowd_clients=12,
    fresh_blocks=2,
    fresh_len=2,
    trained=(STOCK, "epic@0.15"),
    trained_num=20,
    trained_warmup=8,
    orders_num=40,
    orders_block=20,
)
PLANS = {plan.name: plan for plan in (STANDARD, LONG, QUICK)}

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
