"""Plans against a slow oracle that decides token by token."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chunk_cache.index.lookup import Lookup
from chunk_cache.index.variant import NodeHome, Variant
from chunk_cache.methods import METHODS, Method, Stage, num_rows_at
from chunk_cache.methods.base import AllReused
from chunk_cache.options.request_options import MODES, RequestOptions
from chunk_cache.plan.planning import replan_without_load
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.plan.selection_plan import Selection
from chunk_cache.types import REASONS, Span, Status
from unit.scheduler.method_suite import given_options
from unit.scheduler.plans import plan_by

STATISTICS = np.array((0.0, 0.5, 1.0, 2.0, math.nan), dtype=np.float32)  # few, so that ties are common


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
    rankings: list[npt.NDArray[np.float32] | None] | None = None
    alpha: float | None = None
    max_cfo: float | None = None

    @property
    def method(self) -> Method:
        return METHODS[self.opts.method or self.default_method]

    @property
    def own_alpha(self) -> float | None:
        """The alpha whose CFO is the budget; None = the ratio is."""
        if "alpha" not in [option.name for option in self.method.options_schema]:
            return None
        given = dict(self.opts.options).get("alpha")
        if given is not None:
            assert isinstance(given, float)
            return given or None  # 0: by ratio, whatever the server's alpha is
        return self.alpha if self.opts.ratio is None and self.alpha else None

    def cfo(self, i: int) -> float | None:
        lookup = self.lookups[i]
        if lookup is None or lookup.unit_cfo is None:
            return None
        return (self.own_alpha or self.alpha or 1.0) * lookup.unit_cfo

    @property
    def own_ends(self) -> int:
        """Tokens at either end of a chunk that are the budget; 0 = the ratio is."""
        ends = dict(self.opts.options).get("ends", 0) if self.opts.ratio is None else 0
        assert isinstance(ends, int)
        return ends

    def budget(self, i: int, num_reused: int) -> float:
        """The share of chunk i that is recomputed, of a method that chooses before the forward."""
        if self.own_ends:
            return min(1.0, 2 * self.own_ends / num_reused)
        cfo = self.cfo(i)
        return self.ratio if self.own_alpha is None or cfo is None else min(1.0, cfo)

    @property
    def is_explicit(self) -> bool:
        return self.opts.method is not None or self.opts.ratio is not None

    @property
    def ratio(self) -> float:
        return self.method.effective_ratio(self.opts.ratio, self.default_ratio)

    def option(self, name: str) -> object:
        return self.method.option(self.opts.options, name)

    def plan(self) -> RecomputePlan:
        return plan_by(**{name: getattr(self, name) for name in self.__dataclass_fields__})


@st.composite
def cases(draw: st.DrawFn, *, mostly_hits: bool = False, methods: Sequence[str] = tuple(sorted(METHODS))) -> Case:
    """Prompts; `mostly_hits`: in which something is found and rows are chosen, as often as not, by one of `methods`."""
    position, spans = 0, []
    for gap, length in draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=mostly_hits, max_size=6)
    ):
        spans.append((position + gap, position + gap + length))
        position = spans[-1][1]
    prompt_len = position + draw(st.integers(0 if spans else 1, 12))
    page_size = draw(st.sampled_from((1, 2, 4) if mostly_hits else (1, 2, 4, 16)))
    prefix_len = draw(st.integers(0, prompt_len // 2 if mostly_hits else prompt_len)) // page_size * page_size
    mode = "auto" if mostly_hits else draw(st.sampled_from(MODES))
    lookups = [draw(a_lookup(span, i)) if span[1] > prefix_len else None for i, span in enumerate(spans)]
    method = draw(st.sampled_from(methods) if mostly_hits else st.none() | st.sampled_from(methods))
    ratios = st.floats(0.05, 0.95) if mostly_hits else st.none() | st.floats(0, 1) | st.sampled_from((0.0, 1.0))
    return Case(
        opts=RequestOptions(
            spans=tuple(spans),
            mode=mode,
            method=method,
            ratio=draw(ratios),
            options=METHODS[method].check_options(draw(given_options(METHODS[method])), "p") if method else (),
            answer_tokens=draw(st.integers(0, prompt_len - spans[-1][1] if spans else prompt_len)),
        ),
        lookups=[None] * len(spans) if mode == "off" else lookups,
        chunk_keys=[draw(st.sampled_from((b"a" * 16, b"b" * 16))) for _ in spans],
        default_method=draw(st.sampled_from(sorted(METHODS))),
        default_ratio=draw(st.floats(0, 1)),
        prompt_len=prompt_len,
        prefix_len=prefix_len,
        max_prefix_len=prompt_len - 1 if mostly_hits else draw(st.integers(0, prompt_len) | st.just(prompt_len - 1)),
        page_size=page_size,
        min_reuse_len=draw(st.sampled_from((0, 1, 5) if mostly_hits else (0, 1, 5, 12))),
        alpha=draw(st.none() | st.sampled_from((0.0, 0.5, 3.0))),
        max_cfo=draw(st.none() | st.sampled_from((0.0, 0.6))),
        rankings=draw(st.none() | st.tuples(*(a_ranking(end - start) for start, end in spans)).map(list)),
    )


def a_ranking(length: int) -> st.SearchStrategy[npt.NDArray[np.float32] | None]:
    drawn = st.binary(min_size=length, max_size=length)
    return st.none() | drawn.map(lambda values: STATISTICS[np.frombuffer(values, np.uint8) % len(STATISTICS)])


@st.composite
def a_lookup(draw: st.DrawFn, span: Span, i: int) -> Lookup:
    length = span[1] - span[0]
    covered_len = draw(st.just(length) | st.integers(0, length))
    if covered_len == 0:
        return Lookup(None, 0, draw(st.sampled_from(("not_stored", "evicted", "generation_limit"))))
    home = NodeHome(array("q", range(length)), "chunk")
    start, generation = draw(st.integers(0, 100)), draw(st.integers(0, 3))
    unit_cfo = draw(st.none() | st.sampled_from((0.0, 0.25, 0.7, 1.0)))
    return Lookup(Variant(i, b"k" * 16, length, start, generation, (), 0, home), covered_len, None, unit_cfo)


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
            is_reusing = case.opts.mode in ("auto", "prepare")
            if is_reusing and lookup is not None and lookup.variant is not None and not self.is_costly(i):
                alive.add(i)
        while True:
            wanted = {p: i for i in alive for p in self.tokens(i)}
            end = max(wanted, default=-1) + 1
            self.load_end = max(case.prefix_len, end - end % case.page_size)
            self.brought_in = {p: i for p, i in wanted.items() if p < self.load_end}
            counts = {i: list(self.brought_in.values()).count(i) for i in alive}
            short = {i for i in alive if counts[i] < (1 if case.is_explicit else max(1, case.min_reuse_len))}
            if not short:
                return
            alive -= short

    def is_costly(self, i: int) -> bool:
        """By the request's alpha, and by the server's, whatever the request names."""
        lookup, limit = self.case.lookups[i], self.case.max_cfo
        if lookup is None or lookup.unit_cfo is None or limit is None:
            return False
        return lookup.unit_cfo > limit / max(self.case.own_alpha or 0.0, self.case.alpha or 1.0)

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
        if case.opts.mode in ("exact", "warm"):
            return (Status.SKIPPED, "exact_mode") if is_stored else (Status.MISS, lookup.reason)
        if lookup.variant is None:
            return (Status.SKIPPED if is_stored else Status.MISS), lookup.reason
        if i in self.brought_in.values():
            return Status.HIT, None
        stored = [p for p in range(start, end) if p - start < lookup.covered_len]
        if all(p < case.prefix_len for p in stored):
            return Status.MISS, "not_stored"
        last = min(case.max_prefix_len, case.prompt_len - 1)
        if self.is_costly(i) and max(start, case.prefix_len) < last:
            return Status.SKIPPED, "high_cfo"
        return Status.SKIPPED, "prompt_end" if any(p >= last for p in stored) else "too_short"


@dataclass
class RowsOracle:
    """For each chunk that is brought in, the positions computed again; those that all layers compute anyway."""

    case: Case
    brought_in: dict[int, int]
    load_end: int

    def positions(self, i: int) -> list[int]:
        return sorted(p for p, owner in self.brought_in.items() if owner == i)

    @property
    def hits(self) -> list[int]:
        return sorted(set(self.brought_in.values()))

    @property
    def missing(self) -> set[int]:
        return set(range(self.case.prefix_len, self.load_end)) - set(self.brought_in)

    def rows_of_all(self, i: int) -> list[int]:
        """The rows of chunk i, of a method that looks at all that is brought in at once."""
        each = [self.positions(i) for i in self.hits]
        spans = [(positions[0], positions[-1] + 1) for positions in each]
        question_start = min(self.case.opts.spans[-1][1], self.case.prompt_len - 1)
        worths = [self.worth(i, p) for i, positions in zip(self.hits, each, strict=True) for p in positions]
        names = [(i, self.block(i, p)) for i, positions in zip(self.hits, each, strict=True) for p in positions]
        blocks = np.array([[*dict.fromkeys(names)].index(name) for name in names]) if self.has_blocks else None
        ranking = np.array([math.nan if one == -math.inf else one for one in worths], dtype=np.float32)
        cfos = [lookup.unit_cfo for i in self.hits if (lookup := self.case.lookups[i]) is not None]
        reused = AllReused(spans, question_start, ranking=ranking, blocks=blocks, cfos=cfos)
        together = [p for positions in each for p in positions]
        rows = self.case.method.rows_of_all(self.case.ratio, reused).tolist()
        return sorted({together[row] for row in rows} & set(self.positions(i)))

    @property
    def has_blocks(self) -> bool:
        return bool(self.case.option("block_size"))

    def chosen_before(self, i: int) -> list[int]:
        """The rows of chunk i, one token at a time."""
        case, positions = self.case, self.positions(i)
        budget = case.budget(i, len(positions))
        num_rows = num_rows_at(budget, len(positions))
        if case.method.name in ("near", "near-words", "seams") and case.own_alpha is None:
            chosen = self.rows_of_all(i)
        elif case.method.asks_selector:
            return self.chosen_by_selector(i)
        elif case.method.statistic is not None:
            chosen = sorted(positions, key=lambda p: (-self.block_worth(i, p), p))[:num_rows]
        elif case.method.name == "random":
            seed = dict(case.opts.options).get("seed", 0)
            blocks = np.array([self.block(i, p) - self.block(i, positions[0]) for p in positions])
            how = {"seed": seed, "chunk_key": case.chunk_keys[i]}
            rows = case.method.rows_for_chunk(0, len(positions), budget, **how, blocks=blocks)
            chosen = [positions[row] for row in rows.tolist()]
        elif case.method.name == "near-words":
            chosen = positions[: num_rows - num_rows // 3]
            left = [p for p in positions if p not in chosen]
            around = sorted((p for p in left if self.block_worth(i, p) > 0), key=lambda p: (-self.block_worth(i, p), p))
            chosen += around[: num_rows // 3]
            chosen += [p for p in left if p not in chosen][: num_rows - len(chosen)]
        elif case.method.name == "lego-link":
            num_last = num_rows // 2
            chosen = positions[: num_rows - num_last] + positions[len(positions) - num_last :]
        else:
            chosen = positions[:num_rows]
        return self.in_windows(i, chosen)

    def chosen_by_selector(self, i: int) -> list[int]:
        """The best tokens; with a budget of kept ones, of all numbers of them the last that windows leave within it."""
        case = self.case
        chunks = self.hits if case.option("top_k") == "global" else [i]
        ratio = case.ratio if case.option("top_k") == "global" else case.budget(i, len(self.positions(i)))
        order = sorted(
            (p for j in chunks for p in self.positions(j)), key=lambda p: (-self.block_worth(self.brought_in[p], p), p)
        )
        budget = num_rows_at(ratio, len(order))
        found = None
        for num in range(budget, len(order) + 1):
            choice = {j: self.in_windows(j, [p for p in order[:num] if self.brought_in[p] == j]) for j in chunks}
            if found is None or (case.option("group_budget") == "kept" and sum(map(len, choice.values())) <= budget):
                found = choice
            if not case.option("group_size"):
                break
        assert found is not None
        return found[i]

    def in_windows(self, i: int, chosen: list[int]) -> list[int]:
        """Those in windows of which enough was chosen."""
        size, threshold = self.case.option("group_size"), self.case.option("group_threshold")
        assert isinstance(size, int)
        assert isinstance(threshold, int)
        if size == 0 or len(chosen) == len(self.positions(i)):
            return sorted(chosen)
        start, end = self.case.opts.spans[i]
        kept = []
        for first in range(start, end, size):
            window = range(first, min(first + size, end))
            inside = [p for p in sorted(chosen) if p in window]
            kept += inside if Fraction(len(inside), len(window)) > Fraction(threshold, size) else []
        return kept

    def block(self, i: int, p: int) -> int:
        size = self.case.option("block_size")
        assert isinstance(size, int)
        return (p - self.case.opts.spans[i][0]) // max(1, size)

    def block_worth(self, i: int, p: int) -> float:
        own = [self.worth(i, q) for q in self.positions(i) if self.block(i, q) == self.block(i, p)]
        known = [one for one in own if one > -math.inf]
        return float(np.float32(math.fsum(known) / len(known))) if known else -math.inf

    def worth(self, i: int, p: int) -> float:
        ranking = self.case.rankings[i] if self.case.rankings else None
        value = math.nan if ranking is None else float(ranking[p - self.case.opts.spans[i][0]])
        return -math.inf if math.isnan(value) else value

    def ranked_by(self, i: int) -> str | None:
        """What the rows of a hit were ranked by."""
        if self.case.method.statistic is None:
            return None
        is_known = any(self.worth(i, p) > -math.inf for p in self.positions(i))
        return self.case.method.statistic if is_known else "position"

    @property
    def segments(self) -> list[int]:
        """How many reused tokens share each budget."""
        lens = [len(self.positions(i)) for i in self.hits]
        return lens if self.case.option("top_k") == "chunk" else [sum(lens)]

    def selection(self, num_recomputed: int) -> Selection | None:
        case = self.case
        if case.method.stage is Stage.BEFORE:
            may_drop, segments = case.option("focus_window") != 0 or case.option("drift") != 0, []
        else:
            may_drop, segments = True, self.segments
        is_due = may_drop and 0 < num_recomputed < len(self.brought_in)
        last_end = max((end for _, end in case.opts.spans), default=0)
        first = min(last_end, case.prompt_len - 1)
        question = first, max(case.prompt_len - case.opts.answer_tokens, first + 1)
        selection = Selection(case.method.name, case.opts.options, case.ratio, tuple(segments), question)
        return selection if is_due else None


@given(cases())
def test_plan_equals_the_oracle(case: Case) -> None:
    plan, oracle = case.plan(), Oracle(case)
    assert [(c.status, c.reason) for c in plan.chunks] == [oracle.verdict(i) for i in range(len(plan.chunks))]
    assert (plan.load_start, plan.load_end) == (case.prefix_len, oracle.load_end)
    for i, chunk in enumerate(plan.chunks):
        positions = sorted(p for p, owner in oracle.brought_in.items() if owner == i)
        assert positions == list(range(chunk.dst_start, chunk.dst_end))
    assert plan.num_reused == len(oracle.brought_in)
    share = plan.num_recomputed / plan.num_reused if plan.num_reused else 0.0
    is_by_ratio = case.own_alpha is None and not case.own_ends
    assert (plan.method, plan.ratio) == (case.method.name, case.ratio if is_by_ratio else share)
    for i, chunk in enumerate(plan.chunks):
        assert chunk.cfo == (case.cfo(i) if chunk.num_reused else None)
    for chunk in (c for c in plan.chunks if c.num_reused):
        lookup = case.lookups[plan.chunks.index(chunk)]
        assert lookup is not None
        assert lookup.variant is not None
        assert chunk.shift == (chunk.start - lookup.variant.start if case.option("shift") else 0)


@settings(max_examples=300)
@given(cases() | cases(mostly_hits=True))
def test_rows_equal_the_oracle(case: Case) -> None:
    plan, found = case.plan(), Oracle(case)
    oracle = RowsOracle(case, found.brought_in, found.load_end)
    if case.method.stage is Stage.BEFORE:
        chosen = {i: oracle.chosen_before(i) for i in oracle.hits}
        num_recomputed, num_late = sum(map(len, chosen.values())), 0
        rows = oracle.missing.union(*chosen.values())
    else:
        num_recomputed = sum(num_rows_at(case.ratio, length) for length in oracle.segments)
        is_all = num_recomputed == len(oracle.brought_in)
        num_late = num_recomputed if case.method.stage is Stage.QUESTION and not is_all else 0
        begins_with_all = is_all or (num_recomputed > 0 and not num_late)
        rows = oracle.missing | (set(oracle.brought_in) if begins_with_all else set())
        chosen = {i: oracle.positions(i) if is_all else [] for i in oracle.hits}
    assert plan.row_positions.tolist() == sorted(rows)
    assert (plan.num_recomputed, plan.num_late_rows) == (num_recomputed, num_late)
    assert plan.selection == oracle.selection(num_recomputed)
    for i, chunk in enumerate(plan.reply(explain=True)["chunks"]):  # type: ignore[arg-type, var-annotated]
        assert chunk["recomputed_positions"] == chosen.get(i, [])
        assert chunk.get("ranked_by") == (oracle.ranked_by(i) if i in oracle.hits else None)


@given(cases() | cases(mostly_hits=True))
def test_invariants(case: Case) -> None:
    plan = case.plan()
    for p in (plan, replan_without_load(plan, "memory")):
        reply = p.reply()
        assert reply["prefix_tokens"] + reply["reused_tokens"] + reply["computed_tokens"] == case.prompt_len  # type: ignore[operator]
        assert 0 <= p.num_recomputed <= p.num_reused
        assert p.load_len % case.page_size == 0
        assert p.load_end <= max(p.prefix_len, min(case.max_prefix_len, case.prompt_len - 1))
        is_cut_later = p.selection is not None and p.selection.stage is Stage.LAYER
        assert p.num_rows == p.num_computed + (p.num_reused if is_cut_later else p.num_recomputed)
        assert p.num_load_rows == len(p.row_positions) + p.num_late_rows <= p.load_len
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
            assert chunk.ranked_by is None or chunk.status is Status.HIT
        assert str(p)
    assert case.plan() == plan


WITHIN_FORWARD = sorted(name for name, method in METHODS.items() if method.stage is not Stage.BEFORE)


@given(cases(mostly_hits=True, methods=WITHIN_FORWARD), st.integers(1, 80))
def test_counts_of_a_selection_fit_its_plan(case: Case, num_layers: int) -> None:
    plan = case.plan()
    selection = plan.selection
    assume(selection is not None)
    assert selection is not None
    assert selection.stage is not Stage.BEFORE
    options = dict(selection.options)
    num_layers += 12  # as many as the largest layer that options name
    counts = selection.layer_counts(num_layers)
    assert len(counts) == num_layers
    assert all(len(per_segment) == len(selection.segment_lens) for per_segment in counts)
    assert sum(selection.segment_lens) == plan.num_reused
    if selection.stage is Stage.QUESTION:
        assert set(map(sum, counts)) == {plan.num_late_rows}
    else:
        first = options.get("check_layer", 1)
        assert isinstance(first, int)
        assert set(map(sum, counts[:first])) <= {plan.num_reused}
        mean = sum(map(sum, counts[first:])) / (num_layers - first)
        # At each layer the budget of each segment is rounded up.
        assert abs(mean - plan.num_recomputed) < len(selection.segment_lens) + 1e-6
    for name in ("group_size", "group_threshold", "block_size", "focus_window", "drift"):
        assert getattr(selection, name) == METHODS[selection.method].option(selection.options, name)
