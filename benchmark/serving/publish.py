"""Writes what the documentation shows of the serving benchmark, from the result files: nothing is typed by hand.

    python benchmark/serving/publish.py            # docs/benchmarks/{serving,papers,profile}.md, pictures, README table
    python benchmark/serving/publish.py --check    # exit code 1 where a file is not what the results say

Of `benchmark/results/serving/`, `long.json` is shown, `standard.json` on a page of its own; in its place where there is
no long one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT
from benchmark.common.results import RESULTS_DIR
from benchmark.serving.papers import FIGURES
from benchmark.serving.papers_table import ours_by_axis, papers_markdown
from benchmark.serving.profile_serving import to_markdown as profile_markdown
from benchmark.serving.report import headline, to_markdown

SOURCE = RESULTS_DIR / "serving"
TARGET = ROOT / "docs" / "benchmarks"
README = ROOT / "README.md"
BEGIN, END = "<!-- serving: written by benchmark/serving/publish.py -->", "<!-- serving: end -->"
PROFILES = {
    "profile": "# Where the time of a request goes",
    "profile-before": "## Before the two largest avoidable costs were removed",
    "profile-trained": "## Questions to the trained model of a million parameters",
}
"""Headings of the page of profiles, by name of the result file."""
GENERATED = "<!-- Written by benchmark/serving/publish.py from benchmark/results/serving/; change neither by hand. -->"


def pages(source: Path = SOURCE) -> dict[Path, str]:
    """Text of every file that is written, by its path.

    Raises:
        FileNotFoundError: there is no result yet.
    """
    name, report = read_main(source)
    text = {TARGET / "serving.md": _page([*to_markdown(report), "", f"![the runs as a plot]({name}.png)"])}
    standard = _read(source / "standard.json")
    if standard is not None and name != "standard":
        text[TARGET / "standard.md"] = _page([*to_markdown(standard), "", "![the runs as a plot](standard.png)"])
    kernel = _read(RESULTS_DIR / "kernel" / "sparse_extend.json")
    text[TARGET / "papers.md"] = _page(papers_markdown(FIGURES, ours_by_axis(report, kernel)))
    profiles = _profiles(source)
    if profiles:
        text[TARGET / "profile.md"] = _page(profiles)
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise FileNotFoundError(f"{README.name} lacks the line {BEGIN} or {END}")
    text[README] = f"{before}{BEGIN}\n{_block(report)}\n{END}{after}"
    return text


def _profiles(source: Path) -> list[str]:
    """One page of all profiles that there are."""
    lines: list[str] = []
    for name, title in PROFILES.items():
        report = _read(source / f"{name}.json")
        if report is not None:
            lines += [*([""] if lines else []), *profile_markdown(report, title)]
    return lines


def read_main(source: Path) -> tuple[str, dict[str, Any]]:
    """Name and content of the result that is shown."""
    for name in ("long", "standard"):
        report = _read(source / f"{name}.json")
        if report is not None:
            return name, report
    raise FileNotFoundError(f"{source} has neither long.json nor standard.json; run make bench")


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _page(lines: Sequence[str]) -> str:
    return "\n".join([GENERATED, "", *lines]) + "\n"


def _block(report: Mapping[str, Any]) -> str:
    part = report["serve"]
    machine = part["run"]["machine"]
    trace = part["trace"]
    about = (
        f"Serving under load, {part['model']}, {machine['cores']} cores of {machine['cpu']}; prompts of "
        f"{trace['mean_prompt_len']} tokens on average, {trace['chunks_per_prompt'][0]} to "
        f"{trace['chunks_per_prompt'][1]} retrieved passages each ([all numbers](docs/benchmarks/serving.md), "
        f"`python benchmark/serving/bench_serving.py --plan {report['plan']}`):"
    )
    return "\n".join([about, "", *headline(report)])


def pictures(source: Path = SOURCE) -> list[Path]:
    """Files that are copied as they are."""
    plots = (source / f"{name}.png" for name in ("long", "standard"))
    return [path for path in (*plots, *sorted(source.glob("profile-*.svg"))) if path.is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    try:
        wanted = pages()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    if args.check:
        stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text("utf-8") != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the results say; run python benchmark/serving/publish.py")
        return 1 if stale else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    for path in pictures():
        shutil.copyfile(path, TARGET / path.name)
    print("written:", ", ".join(str(path.relative_to(ROOT)) for path in wanted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
