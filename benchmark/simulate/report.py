"""Reports: `row_of` makes one line of the CSV, `write_report` writes the CSV and the page of a report."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.simulate.settings import Settings
from benchmark.simulate.tally import Outcome, Tally

from chunk_cache.index.victims import AGEING

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one study."""

    name: str
    title: str
    rows: Sequence[Row]
    """Lines of the CSV; all have the same columns."""
    text: Sequence[str]
    """Lines of Markdown, behind the title and the origin of the numbers."""


def label_of(settings: Settings) -> str:
    """The name of a policy in tables."""
    if not settings.reuse:
        return "prefix cache"
    if settings.policy != "frequency-reuse" or settings.ageing == AGEING:
        return settings.policy
    return f"{settings.policy}, " + (f"ageing {settings.ageing:g}" if settings.ageing else "no ageing")


def row_of(outcome: Outcome, *, seed: int, first: int = 0, pool_share: float | None = None) -> dict[str, object]:
    """One line of the CSV: rates over the requests from `first` on, sizes at the end of the replay."""
    settings, tally = outcome.settings, outcome.tally(first)
    return {
        "trace": outcome.trace,
        "seed": seed,
        "policy": label_of(settings),
        "holds": settings.holds,
        "counts_system": settings.counts_system,
        "remember": settings.remember if settings.reuse else "paths",
        "pool_tokens": settings.pool_tokens,
        "pool_share": None if pool_share is None else f"{pool_share:g}",
        "max_variants": settings.max_variants,
        "max_variants_per_chunk": settings.max_variants_per_chunk,
        "max_generation": settings.max_generation,
        "budget": f"ratio {settings.ratio:g}" if settings.alpha is None else f"alpha {settings.alpha:g}",
        "requests": tally.num_requests,
        "chunks": tally.num_chunks,
        **_rates(tally),
        "stored_mean": round(tally.mean_stored),
        "stored_peak": outcome.peak_stored,
        "stored_end": outcome.end_stored,
        "dead_end": outcome.end_dead,
        "evicted_nodes": outcome.num_evicted,
        "variants_end": sum(size * num for size, num in outcome.variants_per_chunk.items()),
        "chunks_end": sum(outcome.variants_per_chunk.values()),
        "variants_per_chunk": spelled(outcome.variants_per_chunk),
        "generations": spelled(outcome.generations),
        "reasons": "; ".join(f"{reason}: {num}" for reason, num in outcome.reasons.items()),
    }


def _rates(tally: Tally) -> dict[str, str]:
    names = ("chunk_hit_rate", "chunk_token_hit_rate", "reuse_rate", "token_hit_rate")
    names = (*names, "recomputed_share", "computed_share", "mean_fix_share")
    prefix_share = tally.num_prefix / tally.num_chunks if tally.num_chunks else 0.0
    return {"prefix_share": f"{prefix_share:.5f}", **{name: f"{getattr(tally, name):.5f}" for name in names}}


def spelled(counts: Mapping[int, int]) -> str:
    """`size:number` pairs, as the CSV and the tables show a distribution."""
    return " ".join(f"{size}:{num}" for size, num in counts.items())


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def write_report(report: Report, folder: Path, origin: Sequence[str]) -> list[Path]:
    """Writes `name`.csv and .md into `folder`; returns them.

    Args:
        origin: lines of Markdown that say command, machine and versions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{report.name}.{kind}" for kind in ("csv", "md")]
    with paths[0].open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(report.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(report.rows)
    page = [f"# {report.title}", "", *origin, "", *report.text, "", f"All numbers: [{report.name}.csv]"]
    page[-1] += f"({report.name}.csv)"
    paths[1].write_text("\n".join(page) + "\n", encoding="utf-8")
    return paths
