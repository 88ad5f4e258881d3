"""`compare_policies`: the same trace under several policies and sizes of the KV memory, over several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmark.common.results import markdown_table
from benchmark.simulate.engine import simulate
from benchmark.simulate.report import Report, percent, row_of, spelled
from benchmark.simulate.settings import Settings
from benchmark.simulate.tally import Outcome
from benchmark.simulate.trace import Trace

MakeTrace = Callable[[int], Trace]
"""Returns the trace of a seed."""
WARM_UP = 0.1
"""Share of the requests, from the first on, that are not counted."""

POLICY_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "lru": {"policy": "lru"},
    "lfu": {"policy": "lfu"},
    "fifo": {"policy": "fifo"},
    "frequency-reuse": {"policy": "frequency-reuse"},
    "prefix cache": {"policy": "lru", "reuse": False},
}
"""Settings of each policy that can be compared, by its label in tables."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The outcome of one replay."""

    seed: int
    size: float
    label: str
    outcome: Outcome

    @property
    def first(self) -> int:
        return round(WARM_UP * len(self.outcome.per_request))

    def rate(self, name: str) -> float:
        """The property `name` of the `Tally` over the requests after the warm-up."""
        value: float = getattr(self.outcome.tally(self.first), name)
        return value


@dataclass(frozen=True, slots=True)
class Cells:
    """All replays of a comparison."""

    cells: tuple[Cell, ...]

    def of(self, label: str, size: float) -> list[Cell]:
        return [cell for cell in self.cells if (cell.label, cell.size) == (label, size)]

    def mean(self, label: str, size: float, name: str) -> float:
        return statistics.fmean(cell.rate(name) for cell in self.of(label, size))

    def gains(self, label: str, other: str, size: float, name: str) -> list[float]:
        """For each seed: how much lower a rate of `label` is than the rate of `other`, as a share of the latter."""
        pairs = zip(self.of(label, size), self.of(other, size), strict=True)
        return [1.0 - one.rate(name) / two.rate(name) for one, two in pairs]


def compare_policies(
    name: str,
    title: str,
    make_trace: MakeTrace,
    base: Settings,
    *,
    seeds: Sequence[int],
    pool_shares: Sequence[float],
    labels: Sequence[str],
    intro: Sequence[str] = (),
) -> Report:
    """Args:
    base: settings of all replays, except policy and pool.
    pool_shares: sizes of the KV memory, as shares of one copy of every chunk in the trace.
    labels: keys of `POLICY_SETTINGS`.
    """
    cells = []
    for seed in seeds:
        trace = make_trace(seed)
        for share in pool_shares:
            pool_tokens = max(trace.max_prompt_len, round(share * trace.distinct_tokens))
            for label in labels:
                changes = dict(POLICY_SETTINGS[label])
                settings = replace(base, seed=seed, pool_tokens=pool_tokens, **changes)  # type: ignore[arg-type]
                cells.append(Cell(seed, share, label, simulate(trace, settings)))
    found = Cells(tuple(cells))

    return Report(name, title, _rows(cells), [*intro, *_policy_tables(found, labels, pool_shares)])


def _rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    return [
        row_of(cell.outcome, seed=cell.seed, first=cell.first, pool_share=cell.size if cell.size <= 1 else None)
        for cell in cells
    ]


def _policy_tables(found: Cells, labels: Sequence[str], shares: Sequence[float]) -> list[str]:
    lines = []
    columns = (
        ("computed", "computed_share"),
        ("of it again", "recomputed_share"),
        ("chunks hit", "chunk_hit_rate"),
        ("tokens hit", "token_hit_rate"),
        ("CFO", "mean_fix_share"),
    )
    for share in shares:
        rows = []
        for label in labels:
            stored = statistics.fmean(cell.rate("mean_stored") for cell in found.of(label, share))
            last = found.of(label, share)[-1]
            rates = [percent(found.mean(label, share, name)) for _, name in columns]
            rows.append([label, *rates, f"{stored:,.0f}", spelled(last.outcome.variants_per_chunk)])
        header = ["policy", *(name for name, _ in columns), "tokens stored", "variants:chunks"]
        caption = f"*KV memory of {percent(share, 0)} of one copy of each chunk.*"
        lines += ["", caption, "", *markdown_table(header, rows)]
    second = "lru"
    for first in labels:
        if second not in labels or not first.startswith("frequency-reuse"):
            continue
        lines += ["", f"*{first} against {second}: tokens computed less, mean over the seeds.*", ""]
        rows = []
        for share in shares:
            gains = found.gains(first, second, share, "computed_share")
            spread = f"{percent(min(gains))} to {percent(max(gains))}"
            rows.append([percent(share, 0), percent(statistics.fmean(gains)), spread])
        lines += markdown_table(["KV memory", "less", "range"], rows)
    return lines
