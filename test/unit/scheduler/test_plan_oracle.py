"""Plans against a slow oracle that decides token by token."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.index import Lookup
from chunk_cache.methods import METHODS
from chunk_cache.plan import RecomputePlan, make_plan, replan_without_load
from chunk_cache.request import MODES, RequestOptions
from chunk_cache.types import REASONS, Span, Status
from chunk_cache.variant import NodeHome, Variant


@dataclass(frozen=True)
class Case:
    opts: RequestOptions
    lookups: list[Lookup | None]
    chunk_keys: list[bytes]
    default_method: str
    default_ratio: float
    prompt_len: int
    prefix_len: int
    max_prefix_len: int
    page_size: int
    min_reuse_len: int

    def plan(self) -> RecomputePlan:
        return make_plan(**{name: getattr(self, name) for name in self.__dataclass_fields__})


@st.composite
def cases(draw: st.DrawFn) -> Case:
    position, spans = 0, []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=6)):
        spans.append((position + gap, position + gap + length))
        position = spans[-1][1]
    prompt_len = position + draw(st.integers(0 if spans else 1, 12))
    page_size = draw(st.sampled_from((1, 2, 4, 16)))
    prefix_len = draw(st.integers(0, prompt_len)) // page_size * page_size
    mode = draw(st.sampled_from(MODES))
    lookups = [draw(a_lookup(span, i)) if span[1] > prefix_len else None for i, span in enumerate(spans)]
    method = draw(st.none() | st.sampled_from(sorted(METHODS)))
    return Case(
        opts=RequestOptions(
            spans=tuple(spans),
            mode=mode,
            method=method,
            ratio=draw(st.none() | st.floats(0, 1)),
            options=(("seed", draw(st.integers(0, 3))),) if method == "random" else (),
        ),
        lookups=[None] * len(spans) if mode == "off" else lookups,
        chunk_keys=[draw(st.sampled_from((b"a" * 16, b"b" * 16))) for _ in spans],
        default_method=draw(st.sampled_from(sorted(METHODS))),
        default_ratio=draw(st.floats(0, 1)),
        prompt_len=prompt_len,
        prefix_len=prefix_len,
        max_prefix_len=draw(st.integers(0, prompt_len) | st.just(prompt_len - 1)),
        page_size=page_size,
        min_reuse_len=draw(st.sampled_from((0, 1, 5, 12))),
    )


@st.composite
def a_lookup(draw: st.DrawFn, span: Span, i: int) -> Lookup:
    length = span[1] - span[0]
    covered_len = draw(st.just(length) | st.integers(0, length))
    if covered_len == 0:
        return Lookup(None, 0, draw(st.sampled_from(("not_stored", "evicted", "generation_limit"))))
    home = NodeHome(array("q", range(length)), "chunk")
    start, generation = draw(st.integers(0, 100)), draw(st.integers(0, 3))
    return Lookup(Variant(i, b"k" * 16, length, start, generation, (), home), covered_len, None)


@dataclass
class Oracle:
    """For each prompt position, the chunk that brings it in; for each chunk, status and reason."""

    case: Case
    brought_in: dict[int, int] = field(default_factory=dict)
    load_end: int = 0

    def __post_init__(self) -> None:
        case = self.case
        self.load_end = case.prefix_len
        alive = set()
        for i, lookup in enumerate(case.lookups):
            if case.opts.mode == "auto" and lookup is not None and lookup.variant is not None:
                alive.add(i)
        while True:
            wanted = {p: i for i in alive for p in self.tokens(i)}
            end = max(wanted, default=-1) + 1
            self.load_end = max(case.prefix_len, end - end % case.page_size)
            self.brought_in = {p: i for p, i in wanted.items() if p < self.load_end}
            counts = {i: list(self.brought_in.values()).count(i) for i in alive}
            short = {i for i in alive if counts[i] < max(1, case.min_reuse_len)}
            if not short:
                return
            alive -= short

    def tokens(self, i: int) -> list[int]:
        """The positions chunk i could bring in if there were no pages."""
        lookup, (start, end) = self.case.lookups[i], self.case.opts.spans[i]
        assert lookup is not None
        last = min(self.case.max_prefix_len, self.case.prompt_len - 1)
        return [p for p in range(start, end) if self.case.prefix_len <= p < last and p - start < lookup.covered_len]

    def verdict(self, i: int) -> tuple[Status, str | None]:
        case, lookup, (start, end) = self.case, self.case.lookups[i], self.case.opts.spans[i]
        if all(p < case.prefix_len for p in range(start, end)):
            return Status.PREFIX, None
        if case.opts.mode == "off":
            return Status.SKIPPED, "off"
        assert lookup is not None
        is_stored = lookup.variant is not None or lookup.reason == "generation_limit"
        if case.opts.mode == "exact":
            return (Status.SKIPPED, "exact_mode") if is_stored else (Status.MISS, lookup.reason)
        if lookup.variant is None:
            return (Status.SKIPPED if is_stored else Status.MISS), lookup.reason
        if i in self.brought_in.values():
            return Status.HIT, None
        stored = [p for p in range(start, end) if p - start < lookup.covered_len]
        if all(p < case.prefix_len for p in stored):
            return Status.MISS, "not_stored"
        last = min(case.max_prefix_len, case.prompt_len - 1)
        return Status.SKIPPED, "prompt_end" if any(p >= last for p in stored) else "too_short"


@given(cases())
def test_plan_equals_the_oracle(case: Case) -> None:
    plan, oracle = case.plan(), Oracle(case)
    assert [(c.status, c.reason) for c in plan.chunks] == [oracle.verdict(i) for i in range(len(plan.chunks))]
    assert (plan.load_start, plan.load_end) == (case.prefix_len, oracle.load_end)
    for i, chunk in enumerate(plan.chunks):
        positions = sorted(p for p, owner in oracle.brought_in.items() if owner == i)
        assert positions == list(range(chunk.dst_start, chunk.dst_end))
    assert plan.num_reused == len(oracle.brought_in)

    method = METHODS[case.opts.method or case.default_method]
    ratio = method.effective_ratio(case.opts.ratio, case.default_ratio)
    seed = dict(case.opts.options).get("seed", 0)
    rows = {p for p in range(plan.load_start, plan.load_end) if p not in oracle.brought_in}
    num_gaps = len(rows)
    for i in set(oracle.brought_in.values()):
        positions = sorted(p for p, owner in oracle.brought_in.items() if owner == i)
        offset = positions[0] - case.opts.spans[i][0]
        selected = method.rows_for_chunk(offset, len(positions), ratio, seed=seed, chunk_key=case.chunk_keys[i])
        rows |= {positions[j] for j in selected.tolist()}
    assert plan.row_positions.tolist() == sorted(rows)
    assert plan.num_recomputed == len(rows) - num_gaps
    assert (plan.method, plan.ratio) == (method.name, ratio)


@given(cases())
def test_invariants(case: Case) -> None:
    plan = case.plan()
    for p in (plan, replan_without_load(plan, "memory")):
        reply = p.reply()
        assert reply["prefix_tokens"] + reply["reused_tokens"] + reply["computed_tokens"] == case.prompt_len  # type: ignore[operator]
        assert 0 <= p.num_recomputed <= p.num_reused
        assert p.load_len % case.page_size == 0
        assert p.load_end <= max(p.prefix_len, min(case.max_prefix_len, case.prompt_len - 1))
        assert p.num_rows == p.num_computed + p.num_recomputed
        assert p.row_positions.dtype == np.int64
        assert not p.row_positions.flags.writeable
        assert np.all(np.diff(p.row_positions) > 0)
        assert all(p.load_start <= row < p.load_end for row in p.row_positions.tolist())
        for chunk, span in zip(p.chunks, case.opts.spans, strict=True):
            assert (chunk.start, chunk.end) == span
            assert chunk.start + chunk.src_offset == chunk.dst_start
            assert chunk.reason is None or chunk.reason in REASONS
            assert (chunk.reason is None) == (chunk.status in (Status.HIT, Status.PREFIX))
            assert (chunk.variant_id is None) == (chunk.status is not Status.HIT)
        assert str(p)
    assert case.plan() == plan
