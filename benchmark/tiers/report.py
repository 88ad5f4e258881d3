"""Rows of the report of `bench_loading`, and the report as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.results import Spread, markdown_table, run_markdown

MAX_QUEUE_COST = 5.0  # percent of time to first token that loading may cost if the queue takes longer than the load
REAL_FLOPS, REAL_PARAMETERS, REAL_BYTES_PER_TOKEN = 400e12, 8.03e9, 131072  # see `real_bytes_per_s`
REAL_HIDDEN, REAL_LAYERS = 4096, 32


def idle_rows(mode: str, chunk_s: float, seconds: Mapping[int | str, Sequence[float]]) -> list[dict[str, Any]]:
    """Rows of an idle server: one per number of loaded chunks, and one for computing all.

    Args:
        chunk_s: seconds that loading a chunk takes.
        seconds: samples by number of loaded chunks, or "compute"; `over_pool_s` is the median over pairs with 0 loaded.
    """
    pool = seconds[0]
    return [
        {
            "mode": mode,
            "loaded": loaded,
            "load_s": 0.0 if loaded == "compute" else loaded * chunk_s,
            "factor": 0.0 if loaded == "compute" else loaded * chunk_s / statistics.median(pool),
            "seconds": Spread.of(values).as_dict(),
            "over_pool_s": statistics.median(value - other for value, other in zip(values, pool, strict=False)),
            "samples_s": [round(value, 4) for value in values],
        }
        for loaded, values in seconds.items()
        if values
    ]


def queued_row(mode: str, wait_s: float, load_s: float, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Row of a wait in the queue; costs are in percent of the time with all chunks in the pool, pair by pair."""
    costs = [100 * (disk / pool - 1) for disk, pool in zip(seconds["disk"], seconds["pool"], strict=True)]
    counts = wait_s > load_s and mode != "sync"
    return {
        "mode": mode,
        "wait_s": wait_s,
        "load_s": load_s,
        "disk_s": Spread.of(seconds["disk"]).as_dict(),
        "pool_s": Spread.of(seconds["pool"]).as_dict(),
        "cost_percent": Spread.of(costs).as_dict(),
        "target": MAX_QUEUE_COST if counts else None,
        "met": statistics.median(costs) < MAX_QUEUE_COST if counts else None,
        "samples_s": {place: [round(value, 4) for value in values] for place, values in seconds.items()},
    }


def other_row(mode: str, load_s: float, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Row of the other clients: their requests per second (without a pending load, with one), and the change."""
    return {
        "mode": mode,
        "load_s": load_s,
        "without_per_s": Spread.of([pair[0] for pair in pairs]).as_dict(),
        "pending_per_s": Spread.of([pair[1] for pair in pairs]).as_dict(),
        "change_percent": Spread.of([100 * (pending / without - 1) for without, pending in pairs]).as_dict(),
        "samples_per_s": [[round(value, 3) for value in pair] for pair in pairs],
    }


def real_bytes_per_s(factor: float, num_tokens: int, num_chunk_tokens: int, ratio: float) -> float:
    """Bandwidth at which loading takes `factor` times as long as computing, for Llama 3.1 8B in bf16 at 400 TFLOP/s.

    Estimated, not measured: 2 operations per parameter and row, 4 per row, key and channel, half of the keys masked.
    """
    rows = num_tokens - num_chunk_tokens + ratio * num_chunk_tokens
    flops = rows * (2 * REAL_PARAMETERS + 4 * num_tokens / 2 * REAL_HIDDEN * REAL_LAYERS)
    return num_chunk_tokens * REAL_BYTES_PER_TOKEN / (factor * flops / REAL_FLOPS)


def loading_markdown(report: Mapping[str, Any]) -> list[str]:
    """Lines of a document."""
    factor = max(row["factor"] for row in report["idle"])
    return [
        "# Loading from a slow tier",
        "",
        *run_markdown(report),
        f"- load average {report['load_1min_end']:g} when it ended after {report['minutes']:g} minutes; other work",
        "  shared the two cores, so look at the spread as well",
        f"- model: {report['model']}, fp32 on a CPU, random weights",
        f"- prompt: {report['prompt']}; `epic`, ratio 0.15",
        f"- server flags: `--chunk-cache {' '.join(report['flags'])}`, no host tier, controller off",
        f"- disk tier behind a throttle of {report['bytes_per_s'] / 1e6:.0f} MB/s",
        "",
        "Seconds of the whole request of one token, on the client's side: median (min-max).",
        "",
        "## Idle server",
        "",
        "So many of the eight chunks lie on disk only, the others in the pool. Load over compute: seconds of loading",
        "over those of the same request with all chunks in the pool. Over pool: the median over rounds.",
        "",
        *_idle(report["idle"]),
        "",
        f"Llama 3.1 8B in bf16 on a GPU that attains 400 TFLOP/s has the largest of these ratios ({factor:.1f}) with a",
        f"tier of {real_bytes_per_s(factor, 4192, 4096, 0.15) / 1e9:.1f} GB/s (one SSD), and a ratio of 1 with one of",
        f"{real_bytes_per_s(1, 4192, 4096, 0.15) / 1e9:.0f} GB/s (several, or a network of 200 Gbit/s). This is an",
        "estimate, not a measurement.",
        "",
        "## Waiting in the queue",
        "",
        "In front of it a plain one keeps the only slot (`--max-running-requests 1`) for so many seconds; two",
        "chunks have to be loaded. The time counts from submission. Cost: against the same queue with all chunks in",
        "the pool, the median over pairs.",
        "",
        *_queued(report["queued"]),
        "",
        "## Others meanwhile",
        "",
        "Requests per second of two clients in a closed loop (64 tokens, 4 of output), before and after a load of all",
        f"eight chunks ({report['others'][-1]['load_s']:.1f} s), and while it is pending. Change: the median of pairs.",
        "",
        *_others(report["others"]),
    ]


def _idle(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    header = ("mode", "loaded", "load, s", "load over compute", "seconds", "over pool, s")
    cells = []
    order = list(dict.fromkeys(row["mode"] for row in rows))
    for row in sorted(rows, key=lambda row: (order.index(row["mode"]), row["loaded"] == "compute", row["load_s"])):
        is_loaded = row["loaded"] not in (0, "compute")
        cells.append(
            (
                row["mode"],
                {0: "none", "compute": "all computed (mode off)"}.get(row["loaded"], row["loaded"]),
                f"{row['load_s']:.2f}" if is_loaded else "",
                f"{row['factor']:.2f}" if is_loaded else "",
                Spread(**row["seconds"]).text(),
                "" if row["loaded"] == 0 else f"{row['over_pool_s']:+.2f}",
            )
        )
    return markdown_table(header, cells)


def _queued(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    header = ("queue", "load", "mode", "from disk, s", "from the pool, s", "cost", "target")
    cells = [
        (
            f"{row['wait_s']:.2f} s",
            f"{row['load_s']:.2f} s",
            row["mode"],
            Spread(**row["disk_s"]).text(),
            Spread(**row["pool_s"]).text(),
            "{median:+.1f} % ({min:+.1f} to {max:+.1f})".format(**row["cost_percent"]),
            "" if row["target"] is None else f"{row['target']:g} %: {'met' if row['met'] else 'missed'}",
        )
        for row in rows
    ]
    return markdown_table(header, cells)


def _others(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    header = ("mode", "without, per s", "load pending, per s", "change")
    cells = [
        (
            row["mode"],
            Spread(**row["without_per_s"]).text(1),
            Spread(**row["pending_per_s"]).text(1),
            "{median:+.1f} % ({min:+.1f} to {max:+.1f})".format(**row["change_percent"]),
        )
        for row in rows
    ]
    return markdown_table(header, cells)
