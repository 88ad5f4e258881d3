"""What must hold after a soak (`summarize`), and its report as Markdown (`soak_markdown`)."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.results import markdown_table, run_markdown
from benchmark.tiers.traffic import PLACES, TOLERANCE

MAX_OVERHEAD = 300_000_000  # most bytes that the scheduler may grow beyond the budgets of pool and host tier
MAX_SLOPE = 1_000_000  # most growth in bytes a minute, in the second half
MAX_FDS_SPREAD = 32  # open files in the second half, most less fewest: connections and files being read come and go


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Median of the slopes of all pairs of points (Theil and Sen); a jump at one end hardly changes it."""
    points = list(zip(xs, ys, strict=True))
    slopes = [(y - v) / (x - u) for (u, v), (x, y) in itertools.combinations(points, 2) if x != u]
    return statistics.median(slopes) if slopes else 0.0


def summarize(report: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of the whole run; `holds` lists what must hold, the numbers that decide, and whether it does."""
    samples, end, budgets = report["samples"], report["end"], report["budgets"]
    late = [one for one in samples if one["at_s"] >= samples[-1]["at_s"] / 2]
    grown = max(one["rss"] for one in samples) - samples[0]["rss"]
    overhead = grown - budgets["pool"] - budgets["host"]
    bytes_per_min = slope([one["at_s"] / 60 for one in late], [one["rss"] for one in late])
    threads = [one["num_threads"] for one in late]
    fds = [one["num_fds"] for one in late]
    worst = {
        kind: max((check["difference"] for check in report["checks"] if check["kind"] == kind), default=None)
        for kind in sorted({check["kind"] for check in report["checks"]})
    }
    lost = end["pool_capacity"] - end["pool_free"] - end["pool_evictable"]
    disk_bytes = max(one["disk_bytes"] for one in samples)
    host_bytes = max(one["host_bytes"] for one in samples)
    rows = [
        ("no request failed", f"{report['num_errors']} of {report['num_requests']}", not report["num_errors"]),
        (
            f"log-probabilities within {TOLERANCE:g} of mode off",
            ", ".join(f"{kind}: {value:.1e}" for kind, value in worst.items()) or "none compared",
            bool(worst) and all(value <= TOLERANCE for value in worst.values()),
        ),
        ("host tier within its budget", f"at most {host_bytes / 1e6:.1f} MB", host_bytes <= budgets["host"]),
        ("disk tier within its budget", f"at most {disk_bytes / 1e6:.1f} MB", disk_bytes <= budgets["disk"]),
        (
            f"memory over the start within pool, host tier and {MAX_OVERHEAD / 1e6:.0f} MB",
            f"{grown / 1e6:+.0f} MB, {overhead / 1e6:+.0f} MB over both budgets",
            overhead <= MAX_OVERHEAD,
        ),
        (
            f"memory in the second half grows by at most {MAX_SLOPE / 1e6:g} MB a minute",
            f"{bytes_per_min / 1e6:+.2f} MB a minute",
            bytes_per_min <= MAX_SLOPE,
        ),
        (
            "threads in the second half stay as many",
            f"{min(threads)} to {max(threads)}",
            max(threads) == min(threads),
        ),
        (
            f"open files in the second half stay within {MAX_FDS_SPREAD}",
            f"{min(fds)} to {max(fds)}",
            max(fds) - min(fds) <= MAX_FDS_SPREAD,
        ),
        (
            "the pool is whole in the end",
            f"{end['pool_free']} free + {end['pool_evictable']} evictable of {end['pool_capacity']}, "
            f"{end['pool_protected']} protected",
            lost == 0 and end["pool_protected"] == 0,
        ),
        (
            "and empty after a flush",
            f"{end['pool_free_after_flush']} free, host tier {end['host_entries_after_flush']} entries",
            end["pool_free_after_flush"] == end["pool_capacity"] and not end["host_entries_after_flush"],
        ),
        (
            "nothing is held or waits to be written in the end",
            f"{end['held_requests']} held, {end['queued_write_bytes']} bytes",
            not (end["held_requests"] or end["queued_write_bytes"]),
        ),
        (
            "files on disk are those that the tier counts",
            f"{end['disk_files']} files, {end['disk_entries']} entries",
            end["disk_files"] == end["disk_entries"],
        ),
        (
            "the server lives and its log names no error",
            f"{len(end['bad_log_lines'])} lines",
            end["alive"] and not end["bad_log_lines"],
        ),
    ]
    return {
        "shares": shares(report["hits"]),
        "shares_second_half": shares(report["hits"][len(report["hits"]) // 2 :]),
        "requests_per_s": report["num_requests"] / max(1.0, samples[-1]["at_s"]),
        "rss_start": samples[0]["rss"],
        "rss_max": max(one["rss"] for one in samples),
        "rss_end": samples[-1]["rss"],
        "rss_bytes_per_min": bytes_per_min,
        "queued_write_bytes_max": max(one["queued_write_bytes"] for one in samples),
        "holds": [{"what": what, "found": found, "met": bool(met)} for what, found, met in rows],
    }


def shares(hits: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Share of the chunks of replies by place; `hits` has the counts of each interval."""
    counts = Counter({place: sum(int(one.get(place, 0)) for one in hits) for place in PLACES})
    total = max(1, counts.total())
    return {place: counts[place] / total for place in PLACES if counts[place]}


def soak_markdown(report: Mapping[str, Any]) -> list[str]:
    """Lines of a document."""
    summary, budgets = report["summary"], report["budgets"]
    kinds = Counter(check["kind"] for check in report["checks"])
    places = Counter(place for check in report["checks"] for place in check["places"])
    return [
        "# Soak of the tiers",
        "",
        *run_markdown(report),
        f"- load average {report['load_1min_end']:g} in the end; other work shared the two cores, so rates are rough",
        f"- model: {report['model']}, fp32 on a CPU, random weights",
        f"- prompt: {report['prompt']}; Zipf with exponent {report['exponent']:g} over {report['num_chunks']} chunks",
        f"- server flags: `--chunk-cache {' '.join(report['flags'])}`",
        f"- tiers: loading {report['tiers']['loading']}, controller {'on' if report['tiers']['controller'] else 'off'}",
        "",
        f"{report['num_clients']} clients for {report['minutes']:.0f} minutes: {report['num_requests']} requests,",
        f"{summary['requests_per_s']:.1f} a second, {report['num_chunks_seen']} different chunks. Budgets: KV pool",
        f"{budgets['pool'] / 1e6:.1f} MB ({budgets['pool'] // report['chunk_bytes']} chunks), host tier",
        f"{budgets['host'] / 1e6:.0f} MB ({budgets['host'] // report['chunk_bytes']}), disk tier",
        f"{budgets['disk'] / 1e9:.1f} GB ({budgets['disk'] // report['chunk_bytes']}); the corpus has",
        f"{report['num_chunks'] * report['chunk_bytes'] / 1e9:.2f} GB.",
        "",
        "## Where chunks came from",
        "",
        *_shares(summary),
        "",
        f"`computed` by reason: {', '.join(f'{name} {count}' for name, count in report['reasons'].items()) or 'none'}.",
        f"Evictions: host {report['samples'][-1]['host_evictions']}, disk {report['samples'][-1]['disk_evictions']}.",
        f"At most {summary['queued_write_bytes_max'] / 1e6:.1f} MB waited to be written when looked at.",
        "",
        "## What must hold",
        "",
        *_holds(summary["holds"]),
        "",
        f"Compared: {', '.join(f'{count} of {kind}' for kind, count in kinds.items())}; their chunks came from",
        f"{', '.join(f'{place} ({count})' for place, count in places.most_common())}. Memory of the scheduler process:",
        f"{summary['rss_start'] / 1e6:.0f} MB at the start, {summary['rss_max'] / 1e6:.0f} MB at most,",
        f"{summary['rss_end'] / 1e6:.0f} MB in the end.",
    ]


def _shares(summary: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            place,
            f"{100 * summary['shares'].get(place, 0):.1f} %",
            f"{100 * summary['shares_second_half'].get(place, 0):.1f} %",
        )
        for place in PLACES
        if place in summary["shares"]
    ]
    return markdown_table(("place", "whole run", "second half"), rows)


def _holds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| what | found | holds |", "| --- | --- | --- |"]
    return lines + [f"| {row['what']} | {row['found']} | {'yes' if row['met'] else '**no**'} |" for row in rows]
