"""Blocks: what it does to answers, and to the number of runs, that tokens are chosen in whole blocks (`block_size`).

    python benchmark/quality/blocks.py

Asks the trained models of this repository, on servers whose own attention backend attends (`"attention": "runs"`), and
counts the runs of the first prompts of each family. Written to `benchmark/results/quality/blocks.md`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from benchmark.common.machine import ROOT
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import Server, offline_env
from benchmark.quality.campaign import Plan, ask_models
from benchmark.quality.evaluate import FP32, find_models
from benchmark.quality.prompts import SEPARATOR, Prompt, build_prompt
from benchmark.quality.tasks import Task, TaskOptions, load_tasks
from rich.progress import Progress

from chunk_cache.prompt.marks import split_marked
from chunk_cache_tools.conditions import Condition, parse_method
from chunk_cache_tools.explain.explain_client import ExplainClient
from sglang_chunk_cache.forward.runs import Runs

METHODS = ("random", "h2o", "cache-craft", "cacheblend", "a3", "fusionrag", "question-drift")
SIZES = (0, 8, 16)
RATIO = 0.15
FLAGS = ("--chunk-cache", *FP32, "--chunk-cache-config", '{"attention":"runs"}')
WORK_DIR = ROOT / ".cache" / "blocks"


def conditions() -> list[Condition]:
    names = [f"{method}:block_size={size}" if size else method for method in METHODS for size in SIZES]
    return [Condition(parse_method(name), RATIO) for name in names]


def run_lens(positions: Iterable[int]) -> list[int]:
    """Lengths of the maximal runs of positions."""
    lens: list[int] = Runs.of([np.array(sorted(positions), dtype=np.int64)], [0]).lens.tolist()
    return lens


def count_runs(client: ExplainClient, prompts: Sequence[Prompt]) -> dict[str, list[list[int]]]:
    """Of each condition, by its label: the runs of recomputed tokens of each prompt."""
    found: dict[str, list[list[int]]] = {}
    for prompt in prompts:
        marked = split_marked(prompt.text, SEPARATOR, "text")
        assert marked is not None
        client.prime(marked)
        for condition in conditions():
            chunks = client.explain(marked, condition, 1)["meta_info"]["chunk_cache"]["chunks"]
            positions = [position for chunk in chunks for position in chunk["recomputed_positions"]]
            found.setdefault(condition.label, []).append(run_lens(positions))
    return found


def runs_of(model: str, tasks: Sequence[Task], num: int) -> dict[str, list[list[int]]]:
    with Server(model, *FLAGS, env=offline_env(), log_path=WORK_DIR / "server.log") as server:
        client = ExplainClient(server.url, None, SEPARATOR, None)
        found: dict[str, list[list[int]]] = {}
        for task in tasks:
            for label, runs in count_runs(client, task.prompts(build_prompt)[:num]).items():
                found.setdefault(label, []).extend(runs)
        return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=50, help="prompts of a family (default: %(default)s)")
    parser.add_argument("--num-counted", type=int, default=10, help="of which runs are counted (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep the replies of earlier runs")
    args = parser.parse_args(argv)
    about = describe_run()
    models, tasks = find_models(None), load_tasks(["synthetic"], None, TaskOptions(num=args.num))
    with Progress() as progress:
        plan = Plan(tasks=tasks, conditions=conditions(), work=WORK_DIR, flags=FLAGS, resume=args.resume)
        rows = ask_models(models, plan, progress).rows
    runs = runs_of(next(iter(models.values())), tasks, args.num_counted)
    cells, report = [], []
    for condition in conditions():
        mine = [row for row in rows if row.method == condition.label and row.ratio == RATIO]
        lens = runs[condition.label]
        result = {
            "method": condition.label,
            "score": statistics.fmean(row.score for row in mine if row.score is not None),
            "kl": statistics.fmean(row.kl for row in mine if row.kl is not None),
            "recomputed": statistics.fmean(row.recomputed for row in mine if row.recomputed is not None),
            "runs": statistics.fmean(map(len, lens)),
            "tokens_per_run": sum(map(sum, lens)) / sum(map(len, lens)),
        }
        report.append(result)
        percent = [f"{100 * result[name]:.1f}" for name in ("score", "recomputed")]
        numbers = [f"{result[name]:.1f}" for name in ("runs", "tokens_per_run")]
        cells.append([f"`{condition.label}`", percent[0], f"{result['kl']:.3f}", percent[1], *numbers])
    lines = [
        f"# Tokens chosen in whole blocks, at ratio {RATIO:g}",
        "",
        f"Means over {len(models)} trained models and {len(tasks)} families of {args.num} prompts; runs of recomputed "
        f"tokens in {args.num_counted} prompts of each family under the first model.",
        "",
        *run_markdown(about),
        "",
        *markdown_table(["method", "score, %", "KL, nats", "recomputed, %", "runs a prompt", "tokens a run"], cells),
    ]
    for path in write_result(RESULTS_DIR / "quality", "blocks", {**about, "rows": report}, lines):
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
