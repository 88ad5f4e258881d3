"""Measures of one run: `summarize` returns the flat dictionary that tables are made of.

Percentiles are over the answered requests; failed ones are counted in `num_failed`, and not in goodput. With fewer than
100 requests the p99 lies between the two slowest, so `num_requests` stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from benchmark.serving.client import Record, Run
from benchmark.serving.prompt import Prompt

PERCENTILES = (50, 90, 99)


def summarize(run: Run, bound_s: float | None = None) -> dict[str, Any]:
    """The measures of a run; times in seconds, lengths in tokens.

    Args:
        bound_s: bound of the time to first token, for goodput; None while there is none.
    """
    done = run.answered
    prompt_len = sum(record.prompt_len for record in done)
    rows = sum(record.rows for record in done)
    result: dict[str, Any] = {
        "num_requests": len(run.records),
        "num_failed": len(run.records) - len(done),
        "seconds": round(run.seconds, 3),
        "requests_per_s": round(len(done) / run.seconds, 4),
        "prompt_tokens_per_s": round(prompt_len / run.seconds, 1),
        "output_tokens_per_s": round(sum(record.output_len for record in done) / run.seconds, 2),
        **_percentiles("ttft", [record.ttft_s for record in done]),
        **_percentiles("tpot", [record.tpot_s for record in done if record.tpot_s is not None]),
        **_percentiles("e2e", [record.e2e_s for record in done]),
        "mean_prompt_len": round(prompt_len / max(1, len(done)), 1),
        "mean_rows": round(rows / max(1, len(done)), 1),
        "exact_share": _share(sum(record.prefix_len for record in done), prompt_len),
        "reused_share": _share(sum(record.reused_len for record in done), prompt_len),
        "recomputed_share": _share(sum(record.recomputed_len for record in done), prompt_len),
        "missed_chunks": _share(sum(r.num_missed for r in done), sum(r.num_chunks for r in done)),
        "slots_median": int(np.median(run.slots)) if run.slots else None,
        "slots_max": max(run.slots, default=None),
    }
    if bound_s is not None:
        good = sum(record.ttft_s <= bound_s for record in done)
        result |= {"bound_s": round(bound_s, 4), "goodput_per_s": round(good / run.seconds, 4)}
    errors = [record.error for record in run.records if record.error is not None]
    return result | ({"first_error": errors[0]} if errors else {})


def share_right(prompts: Sequence[Prompt], records: Sequence[Record]) -> float:
    """Share of answers that are right, word by word; a request that failed is wrong."""
    assert all(prompt.answer is not None for prompt in prompts), "a prompt without a known answer"
    right = [
        record.error is None and record.text.split() == (prompt.answer or "").split()
        for prompt, record in zip(prompts, records, strict=True)
    ]
    return sum(right) / len(right)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {f"{name}_p{percent}_s": None for percent in PERCENTILES}
    found = np.percentile(values, PERCENTILES)
    return {f"{name}_p{percent}_s": round(float(value), 4) for percent, value in zip(PERCENTILES, found, strict=True)}


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
