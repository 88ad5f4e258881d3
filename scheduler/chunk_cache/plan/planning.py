"""Planning: a prompt and what is stored of its chunks become a `RecomputePlan`.

    make_plan             decides, by the `PlanSettings` of the server
    replan_without_load   plans the same request when its chunks cannot be brought in after all

Promise: the same lookups give the same plan, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from chunk_cache.index.lookup import Lookup
from chunk_cache.index.need import OBSTACLES
from chunk_cache.index.reusability import share_to_fix
from chunk_cache.methods import METHODS, STAND_IN, Method, Options, Ranking, Stage
from chunk_cache.methods.fixed import Seams
from chunk_cache.methods.method_options import DRIFT, FOCUS_WINDOW, SHIFT
from chunk_cache.options.request_options import EXACT_MODES, RequestOptions
from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.image_spans import end_outside, num_within
from chunk_cache.plan.recompute_plan import RecomputePlan, lead_end
from chunk_cache.plan.row_plan import choose_rows
from chunk_cache.types import Span, Status

_IN_FORWARD = (FOCUS_WINDOW.name, DRIFT.name)  # options by which the forward drops or corrects


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What is the same for all prompts of a server.

    Attributes:
        default_method, default_ratio, default_options: used where a request names none.
        page_size: the load is whole pages, its end rounded down.
        min_reuse_len: a chunk that brings in fewer tokens is skipped, unless the request names a method or a ratio.
        alpha: the budget of each chunk is its CFO by this, if the request names no ratio and the method has the
            option. None = by ratio.
        max_cfo: a chunk with a higher CFO is computed instead. A smaller alpha of the request does not lower this CFO.
        max_unknown_rows: most rows of a step in which the forward itself chooses rows; if a method begins with more,
            `STAND_IN` chooses instead. None = any number.
        step_len: most rows of a step; if more tokens follow the load, `STAND_IN` chooses instead of a method that reads
            the question. None = any number.
        seam_len: as of `AllReused`.
        has_states: the model keeps states, which are known at the end of a chunk but not within it: all of a chunk
            behind its seam is reused, or nothing.
    """

    default_method: str
    default_ratio: float
    default_options: Options = ()
    page_size: int = 1
    min_reuse_len: int = 1
    alpha: float | None = None
    max_cfo: float | None = None
    max_unknown_rows: int | None = None
    step_len: int | None = None
    seam_len: int = 0
    has_states: bool = False


def make_plan(
    opts: RequestOptions,
    settings: PlanSettings,
    *,
    prompt_len: int,
    prefix_len: int,
    max_prefix_len: int,
    lookups: Sequence[Lookup | None],
    chunk_keys: Sequence[bytes],
    rankings: Sequence[Ranking | None] | None = None,
    limit_reason: str = "prompt_end",
    selector_reason: str | None = None,
    rope_starts: Sequence[int] | None = None,
    images: Sequence[Span] = (),
) -> RecomputePlan:
    """Decides what happens to every token of one prompt.

    Args:
        opts: the request; its spans lie within the prompt.
        prefix_len: exact prefix, whole pages.
        max_prefix_len: position up to which KV may be brought in; in any case the prompt's last token is computed.
        lookups: one per span; None for spans inside the prefix, and for all in mode off.
        chunk_keys: one per span.
        rankings: one per span, what the method ranks by, `[chunk length]`: its statistic of the variant that was
            found, the selector's scores, or how near words of the question stand; None = there are none.
        limit_reason: why a chunk behind `max_prefix_len` is skipped: ``prompt_end`` or ``logprobs``.
        selector_reason: why a method that asks the selector has no scores; `STAND_IN` chooses then.
        rope_starts: rotary position of the first token of each span; None = where it stands in the prompt.
        images: of the prompt; no span cuts one.
    """
    num_chunks, page_size = len(opts.spans), settings.page_size
    assert num_chunks == len(lookups) == len(chunk_keys), f"{num_chunks} spans, {len(lookups)} lookups"
    assert 0 <= prefix_len <= prompt_len, f"prefix {prefix_len} of prompt {prompt_len}"
    assert prefix_len % page_size == 0, f"prefix {prefix_len} is not whole pages of {page_size}"
    assert not opts.spans or opts.spans[-1][1] <= prompt_len, f"span {opts.spans[-1]} outside the prompt {prompt_len}"
    served = _Served.as_asked(opts, settings)
    if selector_reason is not None and 0.0 < served.ratio < 1.0:
        served = served.by_stand_in(selector_reason)
    if images and 0.0 < served.ratio < 1.0 and served.method.stage is not Stage.BEFORE:
        served = served.by_stand_in("images", drops=_IN_FORWARD)
    budget_alpha = served.method.alpha_of(served.opts.options, opts.ratio, settings.alpha)
    server_alpha = settings.alpha or 1.0
    alpha = budget_alpha or server_alpha
    min_reuse_len = 1 if opts.names_method else max(1, settings.min_reuse_len)
    rules = _Rules(
        mode=opts.mode,
        prefix_len=prefix_len,
        limit=min(max_prefix_len, prompt_len - 1),
        limit_reason=limit_reason,
        min_reuse_len=max(min_reuse_len, settings.seam_len + 1) if settings.has_states else min_reuse_len,
        alpha=alpha,
        max_unit_cfo=math.inf if settings.max_cfo is None else settings.max_cfo / max(alpha, server_alpha),
        is_shifted=bool(served.opts.option(SHIFT.name, SHIFT.default)),
        statistic=served.method.statistic,
        images=images,
    )
    rankings = rankings or [None] * num_chunks
    starts = [start for start, _ in opts.spans] if rope_starts is None else rope_starts
    chunks = [
        _plan_chunk(span, start, lookup, ranking, rules)
        for span, start, lookup, ranking in zip(opts.spans, starts, lookups, rankings, strict=True)
    ]
    is_cut = [
        lookup is not None and span[0] + lookup.covered_len > rules.limit
        for span, lookup in zip(opts.spans, lookups, strict=True)
    ]
    load_end = _round_load(chunks, is_cut, rules, page_size, is_whole=settings.has_states)
    if rules.statistic is not None:
        chunks = [_note_ranking(chunk, one, rules.statistic) for chunk, one in zip(chunks, rankings, strict=True)]
    budgets = _budgets(chunks, served, by_cfo=budget_alpha is not None, images=images)
    choose = partial(
        choose_rows,
        chunks,
        chunk_keys,
        rankings,
        load_start=prefix_len,
        load_end=load_end,
        ratio=served.ratio,
        prompt_len=prompt_len,
        budgets=budgets,
        seam_len=settings.seam_len,
        images=images,
    )
    chosen = choose(method=served.method, opts=served.opts)
    if chosen.selection is not None:
        num_ahead, num_behind = lead_end(chunks) - prefix_len, prompt_len - load_end
        misfit = _misfit(chosen.num_rows, num_ahead, num_behind, served.method, settings)
        if images:  # what drops rows or corrects others knows no images
            misfit = "images"
        if misfit is not None:
            served = served.by_stand_in(misfit, drops=_IN_FORWARD)
            chosen = choose(method=served.method, opts=served.opts)
    num_reused = sum(chunk.num_reused for chunk in chunks)
    ratio = served.ratio
    if budgets is not None:
        ratio = chosen.num_recomputed / num_reused if num_reused else 0.0
    reason = _fallback_reason(opts.mode, chunks, num_reused) or (served.stood_in_for if num_reused else None)
    return RecomputePlan(
        prompt_len=prompt_len,
        prefix_len=prefix_len,
        load_start=prefix_len,
        load_end=load_end,
        chunks=tuple(chunks),
        method=served.method.name,
        ratio=ratio,
        row_positions=chosen.row_positions,
        num_recomputed=chosen.num_recomputed,
        num_reused=num_reused,
        fallback_reason=reason,
        selection=chosen.selection,
        num_late_rows=chosen.num_late_rows,
        images=tuple(images),
        is_shifted=rules.is_shifted,
    )


@dataclass(frozen=True, slots=True)
class _Served:
    """How a prompt is served: the method and its ratio, and the request with the options of this method."""

    method: Method
    opts: RequestOptions
    ratio: float
    stood_in_for: str | None = None

    @classmethod
    def as_asked(cls, opts: RequestOptions, settings: PlanSettings) -> _Served:
        """By what the request names, or else the server."""
        method = METHODS[opts.method or settings.default_method]
        if settings.default_options:
            options = method.with_defaults(dict(opts.options), settings.default_options)
            opts = replace(opts, options=tuple(sorted(options.items())))
        ratio = method.effective_ratio(opts.ratio, settings.default_ratio)
        # At ratio 0 all is reused but the seams.
        return cls(METHODS[Seams.name] if settings.has_states and ratio == 0.0 else method, opts, ratio)

    def by_stand_in(self, reason: str, drops: Sequence[str] = ()) -> _Served:
        """By `STAND_IN`, since the method cannot serve it; of its options those that `STAND_IN` has too.

        Args:
            drops: options that it has, but that are left out too.
        """
        method = METHODS[STAND_IN]
        known = {option.name for option in method.options_schema} - set(drops)
        options = tuple((name, value) for name, value in self.opts.options if name in known)
        return replace(self, method=method, opts=replace(self.opts, options=options), stood_in_for=reason)


def _budgets(
    chunks: Sequence[ChunkPlan], served: _Served, *, by_cfo: bool, images: Sequence[Span]
) -> list[float] | None:
    """For each chunk the share to recompute: by its CFO, or by a number of tokens; None = the ratio of all."""
    if by_cfo:
        return [served.ratio if chunk.cfo is None else share_to_fix(chunk.cfo) for chunk in chunks]
    num_tokens = None if served.opts.ratio is not None else served.method.tokens_per_chunk(served.opts.options)
    if num_tokens is None:
        return None
    text_lens = [chunk.num_reused - num_within(chunk.dst_start, chunk.dst_end, images) for chunk in chunks]
    return [min(1.0, num_tokens / max(1, text_len)) for text_len in text_lens]


def _misfit(num_rows: int, num_ahead: int, num_behind: int, method: Method, settings: PlanSettings) -> str | None:
    """Why rows that the forward chooses have no room in one step; None if they have.

    Args:
        num_rows: of the load.
        num_ahead: those of them that stand in front of the first chunk.
        num_behind: tokens behind the load.
    """
    most, step_len = settings.max_unknown_rows, settings.step_len
    if step_len is not None:
        num_rows -= num_ahead  # they run in earlier steps
    # The question runs with the rows, or else one page.
    if most is not None and num_rows + (num_behind if method.reads_question else settings.page_size) > most:
        return "too_many_rows"
    is_cut = method.reads_question and step_len is not None and num_behind > step_len
    return "question_in_parts" if is_cut else None


def _fallback_reason(mode: str, chunks: Sequence[ChunkPlan], num_reused: int) -> str | None:
    """Why nothing was reused: the mode that the client chose, or the reason of the first skipped chunk."""
    if mode == "off":
        return "off"
    if mode in EXACT_MODES:
        return "exact_mode"
    if num_reused:
        return None
    return next((chunk.reason for chunk in chunks if chunk.status is Status.SKIPPED), None)


def replan_without_load(plan: RecomputePlan, reason: str, begin: int | None = None) -> RecomputePlan:
    """Plans the same request with nothing brought in: its hits become skipped, with `reason`, such as "memory".

    Args:
        begin: what stands in front of it was brought in; None = nothing was.
    """
    begin = plan.load_start if begin is None else begin
    chunks = tuple(_cut(chunk, begin, reason) for chunk in plan.chunks)
    rows = plan.row_positions[: np.searchsorted(plan.row_positions, begin)]
    num_reused = sum(chunk.num_reused for chunk in chunks)
    return replace(
        plan,
        load_end=begin,
        chunks=chunks,
        row_positions=rows,
        num_recomputed=len(rows) - (begin - plan.load_start - num_reused),
        num_reused=num_reused,
        fallback_reason=plan.fallback_reason if num_reused else reason,
        selection=None,
        num_late_rows=0,
    )


def _cut(chunk: ChunkPlan, end: int, reason: str) -> ChunkPlan:
    if not chunk.num_reused or chunk.dst_end <= end:
        return chunk
    if chunk.dst_start >= end:
        return _without_load(chunk.start, chunk.end, Status.SKIPPED, reason)
    return replace(chunk, num_reused=end - chunk.dst_start)


@dataclass(frozen=True, slots=True)
class _Rules:
    """What is the same for all chunks of one request."""

    mode: str
    prefix_len: int
    limit: int
    limit_reason: str
    min_reuse_len: int
    alpha: float
    max_unit_cfo: float
    is_shifted: bool
    statistic: str | None
    images: Sequence[Span]


def _plan_chunk(
    span: Span, rope_start: int, lookup: Lookup | None, ranking: Ranking | None, rules: _Rules
) -> ChunkPlan:
    """One chunk by itself, before the load is rounded to pages."""
    (start, end), mode, prefix_len, limit = span, rules.mode, rules.prefix_len, rules.limit
    if end <= prefix_len:
        return _without_load(start, end, Status.PREFIX, None)
    if mode == "off":
        return _without_load(start, end, Status.SKIPPED, "off")
    assert lookup is not None, f"no lookup for the chunk [{start}, {end}), which reaches behind the prefix {prefix_len}"
    if mode in EXACT_MODES and lookup.reason in (None, *OBSTACLES):
        return _without_load(start, end, Status.SKIPPED, "exact_mode")
    variant = lookup.variant
    if variant is None:
        status = Status.SKIPPED if lookup.reason == "generation_limit" else Status.MISS
        return _without_load(start, end, status, lookup.reason)
    assert lookup.covered_len <= end - start == variant.length, f"{variant} for the chunk [{start}, {end})"
    stored_end = end_outside(start + lookup.covered_len, rules.images)
    limit = end_outside(limit, rules.images)
    dst_start = max(start, prefix_len)
    if stored_end <= dst_start:
        return _without_load(start, end, Status.MISS, "not_stored")  # all that is stored lies in the exact prefix
    if limit <= dst_start:
        return _without_load(start, end, Status.SKIPPED, rules.limit_reason)
    unit_cfo = lookup.unit_cfo
    if unit_cfo is not None and unit_cfo > rules.max_unit_cfo:
        return _without_load(start, end, Status.SKIPPED, "high_cfo")
    return ChunkPlan(
        start=start,
        end=end,
        status=Status.HIT,
        variant_id=variant.variant_id,
        src_offset=dst_start - start,
        dst_start=dst_start,
        num_reused=min(stored_end, limit) - dst_start,
        generation=variant.generation,
        kind=variant.kind,
        shift=(rope_start - variant.start) if rules.is_shifted else 0,
        cfo=None if unit_cfo is None else rules.alpha * unit_cfo,
        unit_cfo=unit_cfo,
        other_system=None if lookup.other_system is None else rules.alpha * lookup.other_system,
        # If the first token has a statistic, it is ranked by that, wherever pages cut it; else see `_note_ranking`.
        ranked_by=rules.statistic if ranking is not None and ranking[dst_start - start] >= 0.0 else None,
    )


def _round_load(
    chunks: list[ChunkPlan], is_cut: Sequence[bool], rules: _Rules, page_size: int, *, is_whole: bool
) -> int:
    """Cuts the hits to whole pages, in place, and returns the end of the load.

    Only the last hit is cut. If too little of it is left, it is skipped, the hit before it becomes the last, and so on.
    Hits in the middle keep their length, since the gaps between them are computed rows. `is_cut[i]` says whether the
    limit has already cut chunk i, and so is the reason if it is skipped.

    If chunks are reused whole or not at all (`is_whole`), none is cut: the last page is filled up with computed rows,
    as it is if it ends within an image.
    """
    load_end = rules.prefix_len
    for i, chunk in reversed([*enumerate(chunks)]):
        if not chunk.num_reused:
            continue
        is_last = load_end == rules.prefix_len  # nothing behind it is brought in
        dst_end = chunk.dst_end
        page_end = -(-dst_end // page_size) * page_size if is_last else dst_end
        reason = None
        if is_whole:
            is_complete = (chunk.dst_start, dst_end) == (chunk.start, chunk.end)
            reason = rules.limit_reason if is_cut[i] or page_end > rules.limit else None if is_complete else "cut"
        elif is_last:
            end = end_outside(dst_end, rules.images, page_size)
            if end == dst_end - dst_end % page_size or page_end > rules.limit:
                dst_end = page_end = end
        if reason is None and dst_end - chunk.dst_start < rules.min_reuse_len:
            reason = rules.limit_reason if is_cut[i] else "too_short"
        if reason is not None:
            chunks[i] = _without_load(chunk.start, chunk.end, Status.SKIPPED, reason)
            continue
        if dst_end != chunk.dst_end:
            chunks[i] = replace(chunk, num_reused=dst_end - chunk.dst_start)
        load_end = max(load_end, page_end)
    return load_end


def _note_ranking(chunk: ChunkPlan, ranking: Ranking | None, statistic: str) -> ChunkPlan:
    if not chunk.num_reused or chunk.ranked_by is not None:
        return chunk
    used = None if ranking is None else ranking[chunk.src_offset : chunk.src_offset + chunk.num_reused]
    return replace(chunk, ranked_by="position" if used is None or np.isnan(used).all() else statistic)


def _without_load(start: int, end: int, status: Status, reason: str | None) -> ChunkPlan:
    return ChunkPlan(start=start, end=end, status=status, reason=reason, dst_start=start)
