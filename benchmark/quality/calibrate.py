"""Calibration: the smallest alpha or ratio that keeps a wanted share of the full prefill's score on your questions.

    python benchmark/quality/calibrate.py --model-path DIR --data jsonl:own.jsonl --keep 0.95 --config chunk_cache.json
    python benchmark/quality/calibrate.py --model-path DIR --data longbench:hotpotqa.jsonl --by ratio --method epic
    python benchmark/quality/calibrate.py --model-path DIR --data ruler --values 0.5 1 2 --chat --resume

One server. Every prompt is asked with a full prefill by stock SGLang and then under every value of the grid; the curve
is printed, written to --out with a plot, and the chosen alpha is set in --config, which the server takes as
`--chunk-cache-config @FILE`. Exit code 0: a value was found; 1: none suffices, and the file is left alone; 2: the call
is wrong or a server failed. docs/calibrate.md says how to read the curve.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT
from benchmark.common.results import RESULTS_DIR, describe_run
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.quality.calibration.asking import ALPHA, BY, RATIO, answers_of, condition_of
from benchmark.quality.calibration.config_file import read_config, write_config
from benchmark.quality.calibration.curve import choose, mean_score, point_of
from benchmark.quality.calibration.report import Calibration, flags, table, text_table, verdict, write_report
from benchmark.quality.campaign import PATIENCE_S, prompt_builder
from benchmark.quality.conditions import REFERENCE, Condition, MethodSpec, parse_method
from benchmark.quality.evaluate import COLUMNS, find_models, load, server_flags
from benchmark.quality.experiment import Experiment, fingerprint
from benchmark.quality.loaders.ruler import Size
from benchmark.quality.metrics import METRICS
from benchmark.quality.question import DataError
from benchmark.quality.replies import ReplyLog
from benchmark.quality.report import METRIC_NAMES
from benchmark.quality.session import ALONE, SHUFFLED, STORED, SetupError
from benchmark.quality.synthetic.questions import HELD_OUT_SEEDS
from benchmark.quality.tasks import KINDS, Task, TaskOptions
from rich.console import Console
from rich.progress import Progress, TextColumn

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.methods import METHODS
from sglang_chunk_cache.server_client import ServerGone, ServerRefused

PROG = "python benchmark/quality/calibrate.py"
WORK_DIR = ROOT / ".cache" / "calibrate"
# The paper's alphas lie between 0.5 and 3 (Cache-Craft, section 5); ratios are close where they are used.
GRIDS = {
    ALPHA: (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
    RATIO: (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
}
VALIDATION_SEED = HELD_OUT_SEEDS[1]  # evaluate.py asks questions of the other one


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model-path", required=True, metavar="PATH", help="Hugging Face folder or name")
    add("--data", nargs="+", required=True, dest="tasks", metavar="DATA", help=f"any of {KINDS}")
    add("--families", nargs="+", metavar="NAME", help="only these of the data (default: all)")
    add("--by", choices=BY, default=ALPHA, help="what is calibrated (default: %(default)s)")
    add("--method", default="cache-craft", metavar="NAME[:OPTION=VALUE,...]", help="default: %(default)s")
    add("--keep", type=float, default=0.95, metavar="SHARE", help="of full prefill's score (default: %(default)s)")
    add("--values", nargs="+", type=float, metavar="V", help=f"the grid (default: {_grids()})")
    add(
        "--stored",
        choices=STORED,
        help="how chunks are computed first: alone behind the system prompt, or with the prompt's other chunks in "
        f"another order (default: {SHUFFLED} by {ALPHA}, {ALONE} by {RATIO})",
    )
    add("--num", type=int, default=TaskOptions.num, help="prompts per family, at most (default: %(default)s)")
    add("--seed", type=int, default=VALIDATION_SEED, dest="held_out_seed", help="of generated questions")
    add("--metric", choices=tuple(METRICS), help="what is scored (default: by data)")
    add("--max-new-tokens", type=int, help="end of an answer (default: by data)")
    add("--stop", action="append", metavar="TEXT", help="ends an answer; again for more (default: by data)")
    add("--prompt-template", metavar="FILE", help="JSON: how system, chunk and question are written")
    add("--chat", action="store_true", help="put prompts through the model's chat template")
    add("--ruler-words", type=int, default=Size.num_words, help="length of generated haystacks (default: %(default)s)")
    add("--passage-words", type=int, default=Size.passage_words, help="of RULER and LongBench (default: %(default)s)")
    add("--server-flags", default="", metavar="FLAGS", help="more flags of launch_server, in one string")
    add("--resume", action="store_true", help="keep the replies of earlier runs and ask only for what is missing")
    add("--out", type=Path, default=RESULTS_DIR / "calibrate", metavar="DIR", help="folder of the report")
    add("--work", type=Path, default=WORK_DIR, metavar="DIR", help="folder of the kept replies and the server log")
    add("--config", type=Path, metavar="FILE", help="JSON for --chunk-cache-config @FILE; its other keys are kept")
    parser.set_defaults(top_logprobs=20, likelihood=False)
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    _check_args(args, parser)
    return args


def _check_args(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Completes the defaults that depend on --by; a wrong value ends the process with exit code 2."""
    for name in ("num", "ruler_words", "passage_words", "max_new_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1")
    if not 0 < args.keep <= 1:
        parser.error(f"--keep: {args.keep:g} is not in (0, 1]; 0.95 keeps 95 % of the full prefill's score")
    for value in args.values or ():
        if args.by == RATIO and not 0 <= value <= 1:
            parser.error(f"--values: {value:g} is no ratio in [0, 1]")
        if args.by == ALPHA and not 0 < value < math.inf:
            parser.error(f"--values: {value:g} is no alpha above 0")
    if args.by == RATIO and args.config is not None:
        parser.error(
            "--config: a ratio has a flag of its own, --chunk-cache-ratio, which is printed; leave --config out"
        )
    args.values = sorted(set(args.values or GRIDS[args.by]))
    args.stored = args.stored or (SHUFFLED if args.by == ALPHA else ALONE)


def conditions_of(method: MethodSpec, by: str, values: Sequence[float]) -> dict[float, Condition]:
    """The condition of each value.

    Raises:
        DataError: the method does not follow what is calibrated, or a value lies outside its range.
    """
    found = METHODS[method.method]
    names = {option.name for option in found.options_schema}
    if by == ALPHA and ALPHA not in names:
        able = [name for name, other in METHODS.items() if ALPHA in {option.name for option in other.options_schema}]
        remedy = f"choose one of {', '.join(able)}, or --by {RATIO}" if able else f"use --by {RATIO}"
        raise DataError(f"--method: {method.method} has no option alpha; {remedy}.")
    if by == RATIO and found.effective_ratio(0.5, 0.25) != 0.5:
        raise DataError(f"--method: {method.method} does not follow the ratio; choose another.")
    if ALPHA in dict(method.options):
        raise DataError(f"--method: leave alpha out of {method.label}; give the alphas to try in --values.")
    try:
        return {value: condition_of(method, by, value) for value in values}
    except ChunkCacheRequestError as error:
        raise DataError(f"{error}.") from error


def ask(
    args: argparse.Namespace, tasks: Sequence[Task], conditions: Sequence[Condition], console: Console
) -> tuple[list[Experiment], int]:
    """One experiment per task with all replies, and how many were asked for; no server starts where none are missing.

    Raises:
        DataError, SetupError, ServerError, ServerRefused, ServerGone: what is needed is not there, or a server failed.
    """
    ((name, path),) = find_models([args.model_path]).items()
    build = prompt_builder(path, chat=args.chat)
    given = server_flags(args.server_flags)
    with ExitStack() as stack:
        experiments = []
        for task in tasks:
            settings = {
                "model": fingerprint(path),
                "flags": given,
                "asking": asdict(task.asking),
                "stored": args.stored,
            }
            log = ReplyLog(args.work / name / args.stored / f"{task.family}.jsonl", settings, resume=args.resume)
            stack.enter_context(log)
            experiments.append(Experiment(name, task, task.prompts(build), log, args.stored))
        missing = sum(experiment.num_missing(conditions) for experiment in experiments)
        if not missing:
            return experiments, 0
        env = offline_env() if Path(path).is_dir() else {}
        patience = {"start_deadline_s": PATIENCE_S, "request_timeout_s": PATIENCE_S}
        with Progress(TextColumn("{task.description}"), *COLUMNS, console=console) as progress:
            bar = progress.add_task(f"{name}: starting a server", total=missing)
            with Server(path, *given, env=env, log_path=args.work / name / "server.log", **patience) as server:
                for experiment in experiments:
                    progress.update(bar, description=f"{name}: {experiment.task.family}")
                    experiment.ask(server, conditions, lambda num: progress.advance(bar, num))
        return experiments, missing


def calibrate(args: argparse.Namespace, console: Console) -> Calibration:
    """Asks, measures and chooses.

    Raises:
        DataError: also where the full prefill answers nothing, so that there is no share of it.
    """
    method, tasks = parse_method(args.method), load(args)
    conditions = conditions_of(method, args.by, args.values)
    asked = list(conditions.values())
    experiments, num_asked = ask(args, tasks, asked, console)
    full = {experiment.task.family: answers_of(experiment, REFERENCE) for experiment in experiments}
    if mean_score(full) == 0:
        raise DataError(
            "--data: the full prefill scores 0 on all prompts, so there is nothing to keep; look at --metric, "
            "--prompt-template and --chat, or take another model."
        )
    points = [
        point_of(value, full, {each.task.family: answers_of(each, condition) for each in experiments})
        for value, condition in conditions.items()
    ]
    names = dict.fromkeys(METRIC_NAMES[task.metric] for task in tasks)
    return Calibration(
        method=method.label,
        by=args.by,
        keep=args.keep,
        score_name=next(iter(names)) if len(names) == 1 else "score",
        full_score=mean_score(full),
        num_prompts=sum(len(experiment.prompts) for experiment in experiments),
        num_asked=num_asked,
        num_kept=sum(experiment.num_needed(asked) for experiment in experiments) - num_asked,
        points=points,
        choice=choose(points, args.keep),
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Everything; the exit code."""
    about = {**describe_run(), "command": command(args.argv)}
    if args.config is not None:
        read_config(args.config)  # before the minutes that follow
    result = calibrate(args, console)
    for line in (*text_table(*table(result)), "", *verdict(result)):
        console.print(line, highlight=False, soft_wrap=True)
    config = None if args.config is None else os.path.relpath(args.config)
    for path in write_report(args.out, result, {**about, "settings": settings_of(args, result)}, config):
        console.print(f"written: {os.path.relpath(path)}", highlight=False, soft_wrap=True)
    if result.choice.value is None:
        if args.config is not None:
            console.print(f"{config} is left as it was.", highlight=False, soft_wrap=True)
        return 1
    if args.config is not None:
        write_config(args.config, ALPHA, result.choice.value)
        console.print(f'written: {config} ("{ALPHA}": {result.choice.value:g})', highlight=False, soft_wrap=True)
    console.print(f"Serve with {flags(result, config)}", highlight=False, soft_wrap=True, markup=False)
    return 0


def settings_of(args: argparse.Namespace, result: Calibration) -> dict[str, str]:
    """What the page says about the run."""
    families = f" ({', '.join(args.families)})" if args.families else ""
    return {
        "model": f"{Path(args.model_path).name} ({fingerprint(args.model_path)})",
        "prompts": f"{result.num_prompts} of {', '.join(args.tasks)}{families}, seed {args.held_out_seed}, "
        f"{'chat' if args.chat else 'plain text'}, template {args.prompt_template or 'of the data'}",
        "replies": f"{result.num_asked} of this run, {result.num_kept} kept from earlier ones",
        "chunks stored": f"`{args.stored}`",
        "wanted": f"{100 * args.keep:g} % of the full prefill's score",
        "server flags": f"`{shlex.join(server_flags(args.server_flags))}`",
    }


def command(argv: Sequence[str]) -> str:
    """The command as a user would type it; folders of this machine are left out."""
    return f"{PROG} {shlex.join(arg for arg in argv if not Path(arg).is_absolute())}"


def _grids() -> str:
    return "; ".join(f"{by}: {' '.join(f'{value:g}' for value in values)}" for by, values in GRIDS.items())


def _in_our_words(error: Exception) -> str:
    """The harness names the flags of evaluate.py."""
    ours = {"--tasks": "--data", "--methods": "--method", "--model": "--model-path"}
    return re.sub(r"^(--[a-z]+)\b(?!-)", lambda found: ours.get(found[1], found[1]), str(error))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    leave_on_sigterm()
    console = Console()
    try:
        return run(args, console)
    except (DataError, SetupError, ServerError) as error:
        print(f"{PROG}: {_in_our_words(error)}", file=sys.stderr)
    except (ServerRefused, ServerGone) as error:
        print(f"{PROG}: a server failed: {error!r}; its log lies in {args.work}.", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; --resume goes on from here", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
