"""Steps of a plan: how a load that has more rows than a step may have is computed in several steps.

    needs_steps   whether a plan has more rows than a step
    next_step     what a step brings in, and up to where it computes
    part_of       the plan of what one step brings in

Rows are taken in the order of the prompt, exactly those of the plan. A step brings in what stands in front of its last
run of rows, which is computed as an ordinary extend; so new text is computed as in any chunked prefill:

    |############|.............|..........|....R==R|====R==R|R=====R==|>>>>>>>>>|
    prefix       step 1        step 2     step 3   step 4   step 5, in which the load ends

If the forward itself chooses rows, the last step brings in the whole load; the text in front of the first chunk is
computed before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.recompute_plan import RecomputePlan, lead_end
from chunk_cache.types import Status


@dataclass(frozen=True, slots=True)
class PlanStep:
    """Positions [begin, load_end) are brought in, [load_end, end) computed."""

    load_end: int
    """`begin` = nothing is brought in."""
    end: int | None
    """None = the load ends in this step, and as much as has room is computed behind it."""


def needs_steps(plan: RecomputePlan, step_len: int | None) -> bool:
    """Whether one step has no room for the rows of the load and one token behind it.

    Args:
        step_len: rows of a step; None = any number.
    """
    if step_len is None or plan.num_load_rows < step_len:
        return False
    return plan.selection is None or lead_end(plan.chunks) > plan.load_start


def next_step(plan: RecomputePlan, begin: int, most: int) -> PlanStep:
    """The next step of a plan that needs several.

    Args:
        begin: position up to which the prompt is done; less than the end of the load.
        most: rows that the step may have at most.
    """
    assert plan.load_start <= begin < plan.load_end, f"{begin} is outside [{plan.load_start}, {plan.load_end})"
    if plan.selection is not None:
        ahead = lead_end(plan.chunks)
        return PlanStep(begin, min(ahead, begin + most)) if begin < ahead else PlanStep(plan.load_end, None)
    rows = plan.row_positions[np.searchsorted(plan.row_positions, begin) :]
    tail_len = plan.prompt_len - plan.load_end  # computed in one step if it fits into one
    if not len(rows) or (len(rows) < most and not most - len(rows) < tail_len <= most):
        return PlanStep(plan.load_end, None)
    rows = rows[:most]
    gaps = np.flatnonzero(np.diff(rows) != 1)
    return PlanStep(int(rows[gaps[-1] + 1] if len(gaps) else rows[0]), int(rows[-1]) + 1)


def part_of(plan: RecomputePlan, begin: int, end: int) -> RecomputePlan:
    """The plan of one step: the request has [0, begin), and [begin, end) of the load is brought in."""
    chunks = tuple(_within(chunk, begin, end) for chunk in plan.chunks)
    first, last = np.searchsorted(plan.row_positions, (begin, end))
    num_reused = sum(chunk.num_reused for chunk in chunks)
    is_chosen = plan.selection is not None  # then nothing of the chunks is cut off
    return replace(
        plan,
        prefix_len=begin,
        load_start=begin,
        load_end=end,
        chunks=chunks,
        row_positions=plan.row_positions[first:last],
        num_recomputed=plan.num_recomputed if is_chosen else int(last - first) - (end - begin - num_reused),
        num_reused=num_reused,
    )


def _within(chunk: ChunkPlan, begin: int, end: int) -> ChunkPlan:
    start, stop = max(chunk.dst_start, begin), min(chunk.dst_end, end)
    if not chunk.num_reused or (start, stop) == (chunk.dst_start, chunk.dst_end):
        return chunk
    if stop <= start:
        return ChunkPlan(chunk.start, chunk.end, Status.SKIPPED, dst_start=chunk.start)
    return replace(
        chunk, src_offset=chunk.src_offset + start - chunk.dst_start, dst_start=start, num_reused=stop - start
    )
