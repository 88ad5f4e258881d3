"""Host time that a fused request adds to the same request in mode `off`: 10 chunks, 4,160 tokens, no forward or copies.

    python benchmark/host/bench_host.py                       # 2 to 3 minutes
    git worktree add ../before COMMIT                         # an earlier state, measured by turns with this one
    python benchmark/host/bench_host.py --before ../before    # 4 to 6 minutes

Two processes work for a request, the scheduler and the one that serves HTTP; each is measured alone, on one core
(`child.py` says from where to where). The added time is the median of the differences within a round of requests, in
CPU time. Samples show where it goes: the stages are those of `benchmark/serving/stacks.py`. Results:
`benchmark/results/host/`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT, commit_of, packages_of
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import offline_env

PARTS = {"scheduler": "scheduler", "ids": "HTTP, token ids", "text": "HTTP, marked text"}
KINDS = ("plain", "off", "fused")
NUM_FUNCTIONS = 25


def ask_child(tree: Path, part: str, num: int, file: Path) -> dict[str, Any]:
    """Runs the `child.py` of a checkout, since names differ between checkouts, and returns what it prints."""
    tree = tree.resolve()
    folders = [*packages_of(tree), tree / "test", tree]
    env = os.environ | offline_env() | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, str(tree / "benchmark" / "host" / "child.py"), part, str(num), str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=tree)
    if done.returncode:
        raise RuntimeError(f"{part} of {tree.name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(trees: Mapping[str, Path], num: int, rounds: int) -> dict[str, Any]:
    """Measures every part of every checkout; returns checkout -> part -> summary."""
    given: dict[str, dict[str, list[Any]]] = {label: {part: [] for part in PARTS} for label in trees}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for part in PARTS:
                for label in sorted(trees, reverse=number % 2 > 0):
                    given[label][part].append(ask_child(trees[label], part, -(-num // rounds), Path(folder) / label))
    return {label: {part: _summary(reports) for part, reports in parts.items()} for label, parts in given.items()}


def _summary(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ms = {kind: [ns / 1e6 for report in reports for ns in report["ns"][kind]] for kind in KINDS}
    found: dict[str, Any] = {kind: _spread(values) for kind, values in ms.items()}
    for base in ("off", "plain"):
        found[f"over_{base}"] = _spread([a - b for a, b in zip(ms["fused"], ms[base], strict=True)])
    keys = {key for report in reports for by_key in report["us"].values() for key in by_key}
    us = {k: [round(statistics.mean(r["us"][kind].get(k, 0) for r in reports), 1) for kind in KINDS] for k in keys}
    ordered = sorted(us, key=lambda key: us[key][1] - us[key][2])  # what a fused request adds most to comes first
    for what, num in (("stage", None), ("own", NUM_FUNCTIONS), ("within", NUM_FUNCTIONS)):
        found[what] = {key.partition(" ")[2]: us[key] for key in [k for k in ordered if k.startswith(what)][:num]}
    return found | {"reply": reports[0]["reply"]}


def _spread(values: Sequence[float]) -> dict[str, float]:
    p95 = statistics.quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
    return {"median": round(statistics.median(values), 3), "p95": round(p95, 3), "num": len(values)}


def to_markdown(report: Mapping[str, Any]) -> list[str]:
    found = report["checkouts"]
    lines = ["# Host time of a fused request", "", *run_markdown(report), ""]
    lines += [
        f"- {name}: commit {report['commits'][name]}, tokens {found[name]['scheduler']['reply']}" for name in found
    ]
    lines += ["", "CPU time in ms, median (95th percentile); `plain` has no marks, `off` has them and mode off.", ""]
    columns = {"plain": "plain", "off": "off", "fused": "fused", "over_off": "added to off", "over_plain": "to plain"}
    header = ("process", *(f"{name}: {column}" for name in found for column in columns.values()))
    rows = [
        (title, *("{median:.2f} ({p95:.2f})".format(**found[name][part][key]) for name in found for key in columns))
        for part, title in PARTS.items()
    ]
    lines += markdown_table(header, rows)
    for name, parts in found.items():
        off, plain = (
            sum(parts[p][f"over_{base}"]["median"] for p in ("scheduler", "ids")) for base in ("off", "plain")
        )
        lines += [
            "",
            f"Scheduler and HTTP (token ids), {name}: **{off:.2f} ms** added to off, {plain:.2f} ms to plain.",
        ]
    for name, parts in found.items():
        tables = [(part, "stage", "by stage") for part in ("scheduler", "ids")]
        tables += [("scheduler", "own", "by function"), ("scheduler", "within", "by function, with what it calls")]
        for part, what, title in tables:
            rows = [(f"`{key}`", *us, round(us[2] - us[1], 1)) for key, us in parts[part][what].items()]
            lines += ["", f"## {PARTS[part]}, {name}: µs of a request {title}", ""]
            lines += markdown_table((what, *KINDS, "added to off"), rows)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=200, help="requests of each kind that are timed, and sampled")
    parser.add_argument("--rounds", type=int, default=2, help="processes that they are split into")
    parser.add_argument("--before", type=Path, help="another checkout, measured by turns with this one")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "host")
    args = parser.parse_args()
    trees = {"before": args.before, "after": ROOT} if args.before else {"now": ROOT}
    for tree in trees.values():
        if not (tree / "benchmark" / "host" / "child.py").is_file():
            parser.error(f"{tree} is no checkout of this project: it has no benchmark/host/child.py")
    report: dict[str, Any] = describe_run() | {"commits": {name: commit_of(tree) for name, tree in trees.items()}}
    report["checkouts"] = measure(trees, args.num, args.rounds)
    markdown = to_markdown(report)
    write_result(args.out, "host", report, markdown)
    print("\n".join(markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
