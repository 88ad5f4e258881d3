"""Planning: a prompt and what is stored of its chunks become a `RecomputePlan`.

    make_plan             decides
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
from chunk_cache.methods import METHODS, STAND_IN, Method, Options, Ranking
from chunk_cache.methods.fixed import Seams
from chunk_cache.methods.method_options import DRIFT, FOCUS_WINDOW, SHIFT
from chunk_cache.options.request_options import EXACT_MODES, RequestOptions
from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.image_spans import end_outside, num_within
from chunk_cache.plan.recompute_plan import RecomputePlan, lead_end
from chunk_cache.plan.row_plan import choose_rows
from chunk_cache.plan.selection_plan import is_selecting
from chunk_cache.types import Span, Status


def make_plan(
    *,
    opts: RequestOptions,
    default_method: str,
    default_ratio: float,
    default_options: Options = (),
    prompt_len: int,
    prefix_len: int,
    max_prefix_len: int,
    page_size: int,
    lookups: Sequence[Lookup | None],
    min_reuse_len: int,
    chunk_keys: Sequence[bytes],
    rankings: Sequence[Ranking | None] | None = None,
    limit_reason: str = "prompt_end",
    alpha: float | None = None,
    max_cfo: float | None = None,
    selector_reason: str | None = None,
    max_unknown_rows: int | None = None,
    step_len: int | None = None,
    seam_len: int = 0,
    has_states: bool = False,
    rope_starts: Sequence[int] | None = None,
    images: Sequence[Span] = (),
) -> RecomputePlan:
    """Decides what happens to every token of one prompt.

    Args:
        opts: the request; its spans lie within the prompt.
        default_method, default_ratio, default_options: the server's, used where the request names none.
        prefix_len: exact prefix, whole pages.
        max_prefix_len: position up to which KV may be brought in; in any case the prompt's last token is computed.
        page_size: the load is whole pages, its end rounded down.
        lookups: one per span; None for spans inside the prefix, and for all in mode off.
        min_reuse_len: a chunk that brings in fewer tokens is skipped, unless the request names a method or a ratio.
        chunk_keys: one per span.
        rankings: one per span, what the method ranks by, `[chunk length]`: its statistic of the variant that was
            found, the selector's scores, or how near words of the question stand; None = there are none.
        limit_reason: why a chunk behind `max_prefix_len` is skipped: ``prompt_end`` or ``logprobs``.
        alpha: the server's. The budget of each chunk is then its CFO, if the request names no ratio and the method has
            the option. None = by ratio.
        max_cfo: a chunk with a higher CFO is computed instead. A smaller alpha of the request does not lower this CFO.
        selector_reason: why a method that asks the selector has no scores; `STAND_IN` chooses then.
        max_unknown_rows: most rows of a step in which the forward itself chooses rows; if a method begins with more,
            `STAND_IN` chooses instead. None = any number.
        step_len: most rows of a step; if more tokens follow the load, `STAND_IN` chooses instead of a method that reads
            the question. None = any number.
        seam_len: as of `AllReused`.
        has_states: the model keeps states, which are known at the end of a chunk but not within it: all of a chunk
            behind its seam is reused, or nothing.
        rope_starts: rotary position of the first token of each span; None = where it stands in the prompt.
        images: of the prompt; no span cuts one.
    """
    num_chunks = len(opts.spans)
    assert num_chunks == len(lookups) == len(chunk_keys), f"{num_chunks} spans, {len(lookups)} lookups"
    assert 0 <= prefix_len <= prompt_len, f"prefix {prefix_len} of prompt {prompt_len}"
    assert prefix_len % page_size == 0, f"prefix {prefix_len} is not whole pages of {page_size}"
    assert not opts.spans or opts.spans[-1][1] <= prompt_len, f"span {opts.spans[-1]} outside the prompt {prompt_len}"
    limit = min(max_prefix_len, prompt_len - 1)
    method = METHODS[opts.method or default_method]
    opts = _with_defaults(opts, method, default_options)
    ratio = method.effective_ratio(opts.ratio, default_ratio)
    if has_states and ratio == 0.0:
        method = METHODS[Seams.name]  # ratio 0: all but the seams is reused
    stood_in_for = None
    if selector_reason is not None and 0.0 < ratio < 1.0:
        stood_in_for, method, opts = selector_reason, *_stand_in(opts)
    if images and 0.0 < ratio < 1.0 and is_selecting(method, opts.options):
        stood_in_for, method, opts = "images", *_stand_in(opts, drops=(FOCUS_WINDOW.name, DRIFT.name))
    budget_alpha = method.alpha_of(opts.options, opts.ratio, alpha)
    scale = budget_alpha or alpha or 1.0
    if opts.names_method:
        min_reuse_len = 1
    if has_states:
        min_reuse_len = max(min_reuse_len, seam_len + 1)
    rankings = rankings or [None] * num_chunks
    rules = _Rules(
        mode=opts.mode,
        prefix_len=prefix_len,
        limit=limit,
        limit_reason=limit_reason,
        alpha=scale,
        max_unit_cfo=math.inf if max_cfo is None else max_cfo / max(scale, alpha or 1.0),
        is_shifted=bool(opts.option(SHIFT.name, SHIFT.default)),
        statistic=method.statistic,
        images=images,
    )
    starts = [start for start, _ in opts.spans] if rope_starts is None else rope_starts
    chunks = [
        _plan_chunk(span, start, lookup, ranking, rules)
        for span, start, lookup, ranking in zip(opts.spans, starts, lookups, rankings, strict=True)
    ]
    is_cut = [
        lookup is not None and span[0] + lookup.covered_len > limit
        for span, lookup in zip(opts.spans, lookups, strict=True)
    ]
    load_end = _round_load(
        chunks,
        prefix_len,
        page_size,
        max(1, min_reuse_len),
        is_cut,
        limit_reason,
        limit,
        is_whole=has_states,
        images=images,
    )
    if method.statistic is not None:
        chunks = [_note_ranking(chunk, one, method.statistic) for chunk, one in zip(chunks, rankings, strict=True)]
    budgets = None
    num_tokens = None if opts.ratio is not None else method.tokens_per_chunk(opts.options)
    if budget_alpha is not None:
        budgets = [_budget(chunk, ratio) for chunk in chunks]
    elif num_tokens is not None:
        text_lens = [chunk.num_reused - num_within(chunk.dst_start, chunk.dst_end, images) for chunk in chunks]
        budgets = [min(1.0, num_tokens / max(1, text_len)) for text_len in text_lens]
    choose = partial(
        choose_rows,
        chunks,
        chunk_keys,
        rankings,
        load_start=prefix_len,
        load_end=load_end,
        ratio=ratio,
        prompt_len=prompt_len,
        budgets=budgets,
        seam_len=seam_len,
        images=images,
    )
    chosen = choose(method=method, opts=opts)
    if chosen.selection is not None:
        misfit = None
        # Text in front of the first chunk runs in earlier steps; the question, or else one page, with the rows.
        num_ahead = 0 if step_len is None else lead_end(chunks) - prefix_len
        num_behind = prompt_len - load_end if method.reads_question else page_size
        if max_unknown_rows is not None and chosen.num_rows - num_ahead + num_behind > max_unknown_rows:
            misfit = "too_many_rows"
        elif method.reads_question and step_len is not None and prompt_len - load_end > step_len:
            misfit = "question_in_parts"
        if misfit is not None:
            stood_in_for, method, opts = misfit, *_stand_in(opts, drops=(FOCUS_WINDOW.name, DRIFT.name))
            chosen = choose(method=method, opts=opts)
    num_reused = sum(chunk.num_reused for chunk in chunks)
    if budgets is not None:
        ratio = chosen.num_recomputed / num_reused if num_reused else 0.0
    return RecomputePlan(
        prompt_len=prompt_len,
        prefix_len=prefix_len,
        load_start=prefix_len,
        load_end=load_end,
        chunks=tuple(chunks),
        method=method.name,
        ratio=ratio,
        row_positions=chosen.row_positions,
        num_recomputed=chosen.num_recomputed,
        num_reused=num_reused,
        fallback_reason=_fallback_reason(opts.mode, chunks, num_reused) or (stood_in_for if num_reused else None),
        selection=chosen.selection,
        num_late_rows=chosen.num_late_rows,
        images=tuple(images),
    )


def _with_defaults(opts: RequestOptions, method: Method, defaults: Options) -> RequestOptions:
    """The request, with the server's options for its method."""
    if not defaults:
        return opts
    return replace(opts, options=tuple(sorted(method.with_defaults(dict(opts.options), defaults).items())))


def _stand_in(opts: RequestOptions, drops: Sequence[str] = ()) -> tuple[Method, RequestOptions]:
    """The method that replaces one that cannot serve a request, and the request without options that it does not have.

    Args:
        drops: options that it has, but that are left out too.
    """
    method = METHODS[STAND_IN]
    known = {option.name for option in method.options_schema} - set(drops)
    return method, replace(opts, options=tuple((name, value) for name, value in opts.options if name in known))


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
    chunks: list[ChunkPlan],
    prefix_len: int,
    page_size: int,
    min_reuse_len: int,
    is_cut: Sequence[bool],
    limit_reason: str,
    limit: int,
    *,
    is_whole: bool,
    images: Sequence[Span],
) -> int:
    """Cuts the hits to whole pages, in place, and returns the end of the load.

    Only the last hit is cut. If too little of it is left, it is skipped, the hit before it becomes the last, and so on.
    Hits in the middle keep their length, since the gaps between them are computed rows. `is_cut[i]` says whether the
    limit has already cut chunk i, and so is the reason if it is skipped.

    If chunks are reused whole or not at all (`is_whole`), none is cut: the last page is filled up with computed rows,
    as it is if it ends within an image.
    """
    load_end = prefix_len
    for i in range(len(chunks) - 1, -1, -1):
        chunk = chunks[i]
        if not chunk.num_reused:
            continue
        dst_end = page_end = chunk.dst_end
        is_last = load_end == prefix_len  # nothing behind it is brought in
        if is_last:
            page_end = -(-dst_end // page_size) * page_size
        if is_whole:
            fits = (chunk.dst_start, dst_end) == (chunk.start, chunk.end) and page_end <= limit
            if not fits or dst_end - chunk.start < min_reuse_len:
                reason = "too_short" if fits else limit_reason if is_cut[i] or page_end > limit else "cut"
                chunks[i] = _without_load(chunk.start, chunk.end, Status.SKIPPED, reason)
                continue
            load_end = max(load_end, page_end)
            continue
        end = end_outside(dst_end, images, page_size)
        if is_last and (end == dst_end - dst_end % page_size or page_end > limit):
            dst_end = page_end = end
        if dst_end - chunk.dst_start < min_reuse_len:
            reason = limit_reason if is_cut[i] else "too_short"
            chunks[i] = _without_load(chunk.start, chunk.end, Status.SKIPPED, reason)
            continue
        chunks[i] = replace(chunk, num_reused=dst_end - chunk.dst_start) if dst_end != chunk.dst_end else chunk
        load_end = max(load_end, page_end)
    return load_end


def _budget(chunk: ChunkPlan, ratio: float) -> float:
    """The share of a reused chunk to recompute by its CFO; the ratio where no CFO is known."""
    return ratio if chunk.cfo is None else share_to_fix(chunk.cfo)


def _note_ranking(chunk: ChunkPlan, ranking: Ranking | None, statistic: str) -> ChunkPlan:
    if not chunk.num_reused or chunk.ranked_by is not None:
        return chunk
    used = None if ranking is None else ranking[chunk.src_offset : chunk.src_offset + chunk.num_reused]
    return replace(chunk, ranked_by="position" if used is None or np.isnan(used).all() else statistic)


def _without_load(start: int, end: int, status: Status, reason: str | None) -> ChunkPlan:
    return ChunkPlan(start=start, end=end, status=status, reason=reason, dst_start=start)
