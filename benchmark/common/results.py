"""Result files and the numbers in them: `Spread`, `named`, `markdown_table`, `write_result`.

Results that the documentation cites lie in `benchmark/results/`, each as JSON (everything) and Markdown (to be read).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmark.common.machine import CACHE_DIR, ROOT, describe_code, describe_machine

RESULTS_DIR = ROOT / "benchmark" / "results"


@dataclass(frozen=True)
class Spread:
    """Summary of repeated measurements, in their unit."""

    median: float
    min: float
    max: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def text(self, digits: int = 2) -> str:
        """`median (min-max)`."""
        return f"{self.median:.{digits}f} ({self.min:.{digits}f}-{self.max:.{digits}f})"


def describe_run() -> dict[str, Any]:
    """Command, machine and versions of a measurement; call it first, so that the load average is that before it."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return {
        "command": shlex.join(["python", name, *map(without_folders, sys.argv[1:])]),
        "machine": describe_machine(),
        "versions": describe_code(),
    }


def without_folders(text: str) -> str:
    """An argument without the folders of absolute paths, also within `jsonl:FILE` and flags within a flag."""
    return re.sub(r"(^|[\s:=])/\S*/", r"\1.../", text)


def named(path: Path) -> str:
    """A file by its name and the first digits of its sha256."""
    return f"{path.name} ({hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"


def result_dir(args: argparse.Namespace, name: str) -> Path:
    """Folder of the results: `--out` if given; with `--quick` one that is not kept; else `results/NAME`."""
    chosen: Path | None = args.out
    return chosen or (CACHE_DIR if args.quick else RESULTS_DIR / name)


def run_markdown(run: Mapping[str, Any]) -> list[str]:
    """Lines that say where the numbers come from."""
    machine, versions = run["machine"], dict(run["versions"])
    commit, date = versions.pop("commit"), versions.pop("date")
    accelerator = machine["accelerator"] or "no accelerator"
    return [
        f"- command: `{run['command']}`",
        f"- machine: {machine['cpu']}, {machine['cores']} cores, {machine['ram_gib']:g} GiB, {accelerator}; "
        f"load average {machine['load_1min']:g} when it began",
        f"- versions: {', '.join(f'{name} {number}' for name, number in versions.items())}",
        f"- commit {commit}, {date}",
    ]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a table; the first column is text, the others are numbers."""
    lines = [f"| {' | '.join(header)} |", f"| --- |{' ---: |' * (len(header) - 1)}"]
    return lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]


def write_result(folder: Path, name: str, report: Mapping[str, Any], markdown: Sequence[str]) -> tuple[Path, Path]:
    """Writes `name`.json and `name`.md into `folder` and returns both."""
    folder.mkdir(parents=True, exist_ok=True)
    json_path, markdown_path = folder / f"{name}.json", folder / f"{name}.md"
    json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    markdown_path.write_text("\n".join(markdown) + "\n", encoding="utf-8")
    return json_path, markdown_path
