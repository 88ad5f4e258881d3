"""Answer quality with reused chunks: families x methods x recompute ratios x models, asked of real servers.

    python benchmark/quality/evaluate.py                                  # the trained models of this repository
    python benchmark/quality/evaluate.py --resume                         # goes on after an interruption
    python benchmark/quality/evaluate.py --model DIR --tasks ruler --chat --num 50
    python benchmark/quality/evaluate.py --model DIR --tasks longbench:hotpotqa.jsonl jsonl:own.jsonl
    python benchmark/quality/evaluate.py --resume --methods epic cacheblend:focus_window=3 --ratios 0.15
    python benchmark/quality/evaluate.py --model DIR --methods cacheclip \
        --server-flags '--chunk-cache-selector DIR2 --chunk-cache-config {"selector":{"timeout_s":600}}'

One server per model. Each chunk is computed once, as `--stored` says; then every prompt is asked under every
method and ratio, and compared with a full prefill by stock SGLang (`"mode": "off"` on the same server). Replies are
kept in `.cache/quality/`; CSV and page go to `benchmark/results/quality/`. docs/quality.md says what they mean.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT
from benchmark.common.results import RESULTS_DIR, describe_run, without_folders
from benchmark.common.server import ServerError, leave_on_sigterm
from benchmark.quality.campaign import Plan, ask_models
from benchmark.quality.checks import check_rows
from benchmark.quality.conditions import (
    COMPOSED_RATIOS,
    RATIOS,
    built_methods,
    composed_methods,
    conditions_of,
)
from benchmark.quality.loaders.ruler import Size
from benchmark.quality.metrics import METRICS
from benchmark.quality.prompts import read_format
from benchmark.quality.question import DataError
from benchmark.quality.report import write_report
from benchmark.quality.tasks import KINDS, Task, TaskOptions, load_tasks
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from chunk_cache_tools.conditions import Condition, check_likelihood, parse_method
from chunk_cache_tools.server_client import ServerGone, ServerRefused
from chunk_cache_tools.verify.reply_log import fingerprint
from chunk_cache_tools.verify.session import STORED, WARMED, SetupError

MODELS_DIR = ROOT / "benchmark" / "quality" / "models"
WORK_DIR = ROOT / ".cache" / "quality"
FP32 = ("--dtype", "float32")
COLUMNS = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    defaults = TaskOptions()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", action="append", metavar="PATH", help="Hugging Face folder or name; again for more models")
    add("--tasks", nargs="+", default=["synthetic"], metavar="TASK", help=f"any of {KINDS} (default: synthetic)")
    add("--families", nargs="+", metavar="NAME", help="only these of the tasks (default: all)")
    add(
        "--methods",
        nargs="+",
        metavar="NAME[:OPTION=VALUE,...]",
        help="default: all, also with early termination, grouping; cacheclip where --server-flags name a selector",
    )
    add("--ratios", nargs="+", type=float, default=RATIOS, metavar="R", help="default: " + " ".join(map(str, RATIOS)))
    add("--num", type=int, default=defaults.num, help="prompts per family (default: %(default)s)")
    add("--held-out-seed", type=int, default=defaults.seed, help="of generated questions (default: %(default)s)")
    add("--stored", choices=STORED, default=WARMED, help="how chunks are computed before (default: %(default)s)")
    add("--max-new-tokens", type=int, help="end of an answer (default: by task)")
    add("--stop", action="append", metavar="TEXT", help="ends an answer; again for more (default: by task)")
    add("--top-logprobs", type=int, default=20, help="tokens compared one by one in the KL (default: %(default)s)")
    add("--likelihood", action="store_true", help="how likely the right answer and full prefill's own are")
    add("--metric", choices=tuple(METRICS), help="what is scored (default: by task)")
    add("--prompt-template", metavar="FILE", help="JSON: how system, chunk and question are written")
    add("--chat", action="store_true", help="put prompts through the model's chat template")
    add("--ruler-words", type=int, default=Size.num_words, help="length of generated haystacks (default: %(default)s)")
    add("--passage-words", type=int, default=Size.passage_words, help="of RULER and LongBench (default: %(default)s)")
    add("--server-flags", default="", metavar="FLAGS", help="more flags of launch_server, in one string")
    add("--resume", action="store_true", help="keep the replies of earlier runs and ask only for what is missing")
    add("--redo", nargs="+", default=[], metavar="METHOD", help="with --resume: ask these again")
    add("--out", type=Path, default=RESULTS_DIR / "quality", help="folder of the results")
    add("--work", type=Path, default=WORK_DIR, help="folder of the kept replies and server logs")
    add("--strict", action="store_true", help="exit code 1 when a check of the implementation does not hold")
    args = parser.parse_args(argv)
    for name in ("num", "ruler_words", "passage_words", "top_logprobs", "max_new_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1")
    if bad := [ratio for ratio in args.ratios if not 0 <= ratio <= 1]:
        parser.error(f"--ratios: {bad[0]:g} is not in [0, 1]")
    if args.redo and not args.resume:
        parser.error("--redo: give it together with --resume; without, everything is asked again")
    return args


def find_models(paths: Sequence[str] | None) -> dict[str, str]:
    """Paths of the models, by the names that tables use.

    Raises:
        DataError: there is no model, a folder holds none, or two have the same name.
    """
    paths = paths or sorted(str(path) for path in MODELS_DIR.glob("qa-1m-seed*") if path.is_dir())
    if not paths:
        raise DataError(f"--model: no trained model in {os.path.relpath(MODELS_DIR)}; give the path of one.")
    models = {Path(path).name: path for path in paths}
    if len(models) < len(paths):
        raise DataError("--model: two folders have the same name, which would mix their results; rename one.")
    for path in paths:
        is_local = path.startswith((".", "/")) or Path(path).exists()
        if is_local and not (Path(path) / "config.json").is_file():
            raise DataError(f"--model: {path} holds no config.json; give a Hugging Face folder or name.")
    return models


def load(args: argparse.Namespace) -> list[Task]:
    """The tasks, as the command line changes them."""
    size = Size(num_words=args.ruler_words, passage_words=args.passage_words)
    options = TaskOptions(num=args.num, seed=args.held_out_seed, size=size)
    style = {"style": read_format(args.prompt_template)} if args.prompt_template else {}
    metric = {"metric": args.metric} if args.metric else {}
    asking: dict[str, Any] = {"num_top": args.top_logprobs, "likelihood": args.likelihood}
    if args.max_new_tokens:
        asking["max_new_tokens"] = args.max_new_tokens
    if args.stop:
        asking["stop"] = tuple(args.stop)
    tasks = load_tasks(args.tasks, args.families, options)
    return [replace(task, asking=replace(task.asking, **asking), **style, **metric) for task in tasks]


def default_jobs(num_models: int) -> int:
    """Servers at a time: one on a GPU, else one per core at most, since a tiny model keeps only one thread busy."""
    return 1 if torch.cuda.is_available() else min(num_models, len(os.sched_getaffinity(0)))


def server_flags(given: str) -> tuple[str, ...]:
    """All flags of the servers; without a GPU they compute in fp32, unless `--dtype` is given."""
    flags = given.split()
    keep = torch.cuda.is_available() or any(flag.partition("=")[0] == "--dtype" for flag in flags)
    return ("--chunk-cache", *(() if keep else FP32), *flags)


def wanted_conditions(args: argparse.Namespace) -> list[Condition]:
    """Methods x ratios; by default every method, and at `COMPOSED_RATIOS` also early termination and grouping."""
    if args.methods:
        methods = [parse_method(text) for text in args.methods]
        if args.likelihood:
            check_likelihood(methods)
        return conditions_of(methods, args.ratios)
    ratios = [ratio for ratio in args.ratios if ratio in COMPOSED_RATIOS]
    built = built_methods(has_selector="--chunk-cache-selector" in args.server_flags)
    return [*conditions_of(built, args.ratios), *conditions_of(composed_methods(), ratios)]


def shown_tasks(tasks: Sequence[str]) -> str:
    """Tasks as results name them: files by name and digest, without their folders."""
    shown = []
    for task in tasks:
        kind, _, file = task.partition(":")
        if file and Path(file).is_file():
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            task = f"{kind}:{Path(file).name} (sha256 {digest[:16]})"
        shown.append(task)
    return ", ".join(shown)


def run(args: argparse.Namespace, console: Console) -> int:
    """Runs the evaluation and writes its results; returns the exit code."""
    about = describe_run()
    models, tasks = find_models(args.model), load(args)
    conditions = wanted_conditions(args)
    console.print(
        f"{len(models)} models x {len(tasks)} families x {args.num} prompts x {len(conditions) + 1} conditions",
        highlight=False,
    )
    plan = Plan(
        tasks=tasks,
        conditions=conditions,
        work=args.work,
        chat=args.chat,
        resume=args.resume,
        redo=args.redo,
        flags=server_flags(args.server_flags),
        jobs=default_jobs(len(models)),
        stored=args.stored,
    )
    with Progress(TextColumn("{task.description}"), *COLUMNS, console=console) as progress:
        result = ask_models(models, plan, progress)
    settings = {
        "models": ", ".join(f"{name} ({fingerprint(path)})" for name, path in models.items()),
        "tasks": f"{shown_tasks(args.tasks)}; seed {args.held_out_seed}, up to {args.num} prompts per family",
        "prompts": f"{'chat' if args.chat else 'plain text'}, template {args.prompt_template or 'of the task'}",
        "chunks": f"stored {args.stored}",
        "server flags": f"`{without_folders(' '.join(plan.flags))}`",
        "replies": f"{result.num_asked} of this run, {result.num_kept} kept from earlier ones",
        "KL": f"over the {args.top_logprobs} likeliest first tokens of the full prefill and one bucket for the rest",
    }
    for path in write_report(args.out, result.rows, {**about, "settings": settings}):
        console.print(f"written: {os.path.relpath(path)}", highlight=False, soft_wrap=True)
    failed = [check for check in check_rows(result.rows) if not check.holds]
    for check in failed:
        console.print(f"does not hold: {check.model}: {check.statement}: {check.numbers}", style="red", highlight=False)
    return 1 if failed and args.strict else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    leave_on_sigterm()
    console = Console()
    try:
        return run(args, console)
    except (DataError, SetupError, ServerError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except (ServerRefused, ServerGone) as error:
        console.print(f"A server failed: {error!r}; its log lies in {args.work}.", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; --resume goes on from here")
        return 130


if __name__ == "__main__":
    sys.exit(main())
