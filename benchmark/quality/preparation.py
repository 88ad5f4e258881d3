"""Preparation: what it is worth to compute each chunk behind its most similar ones (FusionRAG eq. 10).

    python benchmark/quality/preparation.py --model-path DIR --tasks jsonl:hotpotqa.jsonl jsonl:musique.jsonl --chat
    python benchmark/quality/preparation.py --model-path DIR --tasks jsonl:own.jsonl --num 20 --resume

One server, each question asked in full by stock SGLang, then with its chunks stored alone and with them stored as
prepared, under each method: the score, and how likely the right answer is, token by token, which needs fewer questions.
Before that, with transformers, how far the stored KV lies from that of a full prefill at the second layer. All
differences are paired, with 95 % intervals from resampling the questions. Result: `benchmark/results/preparation/`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.quality.campaign import PATIENCE_S, prompt_builder
from benchmark.quality.conditions import conditions_of
from benchmark.quality.deviation import Deviation, measure_deviation, reduction
from benchmark.quality.evaluate import COLUMNS, find_models, load, server_flags
from benchmark.quality.experiment import Experiment
from benchmark.quality.loaders.ruler import Size
from benchmark.quality.metrics import METRICS, score
from benchmark.quality.neighbourhood import NUM_NEIGHBOURS, neighbours_of
from benchmark.quality.prepared_session import PREPARED
from benchmark.quality.report import METRIC_NAMES
from benchmark.quality.table import Floats, interval
from benchmark.quality.tasks import KINDS, Task, TaskOptions
from rich.console import Console
from rich.progress import Progress, TextColumn

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache_tools.conditions import REFERENCE, Condition, parse_method
from chunk_cache_tools.jsonl import DataError
from chunk_cache_tools.server_client import ServerGone, ServerRefused
from chunk_cache_tools.verify.reply_log import ReplyLog, fingerprint
from chunk_cache_tools.verify.session import ALONE, SetupError

WORK_DIR = ROOT / ".cache" / "preparation"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model-path", required=True, metavar="PATH", help="Hugging Face folder or name")
    add("--tasks", nargs="+", required=True, metavar="TASK", help=f"any of {KINDS}")
    add("--families", nargs="+", metavar="NAME", help="only these of the tasks (default: all)")
    add(
        "--methods",
        nargs="*",
        default=["full-reuse", "fusionrag"],
        metavar="NAME[:OPTION=VALUE,...]",
        help="none: only the deviation is measured (default: %(default)s)",
    )
    add("--ratios", nargs="+", type=float, default=[0.15], metavar="R", help="default: 0.15")
    add("--neighbours", type=int, default=NUM_NEIGHBOURS, metavar="NUM", help="of each chunk (default: %(default)s)")
    add("--num", type=int, default=TaskOptions.num, help="questions per family, at most (default: %(default)s)")
    add("--max-new-tokens", type=int, help="end of an answer (default: by task)")
    add("--stop", action="append", metavar="TEXT", help="ends an answer; again for more (default: by task)")
    add("--metric", choices=tuple(METRICS), help="what is scored (default: by task)")
    add("--prompt-template", metavar="FILE", help="JSON: how system, chunk and question are written")
    add("--chat", action="store_true", help="put prompts through the model's chat template")
    add("--server-flags", default="", metavar="FLAGS", help="more flags of launch_server, in one string")
    add("--resume", action="store_true", help="keep the replies of earlier runs and ask only for what is missing")
    add("--out", type=Path, default=RESULTS_DIR / "preparation", metavar="DIR", help="folder of the report")
    add("--work", type=Path, default=WORK_DIR, metavar="DIR", help="folder of the kept replies and the server log")
    size = Size()
    parser.set_defaults(top_logprobs=20, likelihood=True, held_out_seed=TaskOptions.seed)
    parser.set_defaults(ruler_words=size.num_words, passage_words=size.passage_words)
    args = parser.parse_args(argv)
    for name in ("num", "neighbours", "max_new_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1")
    return args


def ask(
    args: argparse.Namespace, tasks: Sequence[Task], conditions: Sequence[Condition], console: Console
) -> tuple[list[tuple[Experiment, Experiment]], list[list[Deviation]]]:
    """Per task the experiment with chunks stored alone and with them prepared, all asked, and the deviations.

    Without conditions there are deviations only.

    Raises:
        DataError, SetupError, ServerError, ServerRefused, ServerGone: what is needed is not there, or a server failed.
    """
    ((name, path),) = find_models([args.model_path]).items()
    build = prompt_builder(path, chat=args.chat)
    flags = tuple(server_flags(args.server_flags))
    pairs, deviations = [], []
    with ExitStack() as stack:
        for task in tasks:
            prompts = task.prompts(build)
            neighbours = neighbours_of(prompts, args.neighbours)
            deviations.append(list(measure_deviation(path, prompts, neighbours)))
            console.print(f"{task.family}: {len(deviations[-1])} prompts measured at the second layer", highlight=False)
            if not conditions:
                continue
            pair = []
            for stored, near in ((ALONE, None), (PREPARED, neighbours)):
                settings = {"model": fingerprint(path), "flags": flags, "asking": asdict(task.asking)}
                if near is not None:
                    settings["neighbours"] = args.neighbours
                log = ReplyLog(args.work / name / stored / f"{task.family}.jsonl", settings, resume=args.resume)
                pair.append(Experiment(name, task, prompts, stack.enter_context(log), stored, near))
            pairs.append((pair[0], pair[1]))
        missing = sum(experiment.num_missing(conditions) for pair in pairs for experiment in pair)
        if not missing:
            return pairs, deviations
        patience = {"start_deadline_s": PATIENCE_S, "request_timeout_s": PATIENCE_S}
        env = offline_env() if Path(path).is_dir() else {}
        with Progress(TextColumn("{task.description}"), *COLUMNS, console=console) as progress:
            bar = progress.add_task(f"{name}: starting a server", total=missing)
            with Server(path, *flags, env=env, log_path=args.work / name / "server.log", **patience) as server:
                for alone, prepared in pairs:
                    progress.update(bar, description=f"{name}: {alone.task.family}")
                    alone.ask(server, conditions, lambda num: progress.advance(bar, num))
                    # What stock SGLang answers does not depend on what is stored.
                    references = [alone.reply(prompt, REFERENCE) for prompt in alone.prompts]
                    progress.advance(bar, prepared.num_missing(()))
                    prepared.log.append(references)
                    prepared.ask(server, conditions, lambda num: progress.advance(bar, num))
    return pairs, deviations


def rows_of(pair: tuple[Experiment, Experiment], conditions: Sequence[Condition]) -> list[dict[str, Any]]:
    """One row per condition: score and loss of log-probability, alone and prepared, and what preparation adds."""
    alone = pair[0]
    full = _scores(alone, REFERENCE)
    rows = []
    for condition in conditions:
        scores = [_scores(experiment, condition) for experiment in pair]
        losses = [_losses(experiment, condition) for experiment in pair]
        rows.append(
            {
                "family": alone.task.family,
                "metric": alone.task.metric,
                "method": condition.label,
                "ratio": condition.ratio,
                "num": len(full),
                "full_score": float(full.mean()),
                "score": {stored: float(one.mean()) for stored, one in zip((ALONE, PREPARED), scores, strict=True)},
                "score_gain": _with_interval(scores[1] - scores[0]),
                "gold_loss": {
                    stored: _with_interval(one) for stored, one in zip((ALONE, PREPARED), losses, strict=True)
                },
                "gold_gain": _with_interval(losses[0] - losses[1]),
            }
        )
    return rows


def _scores(experiment: Experiment, condition: Condition) -> Floats:
    """Of every question."""
    task = experiment.task
    replies = [experiment.reply(prompt, condition) for prompt in experiment.prompts]
    scored = zip(replies, task.questions, strict=True)
    return np.array([score(task.metric, reply.text, question) for reply, question in scored])


def _losses(experiment: Experiment, condition: Condition) -> Floats:
    """How much less likely than in full the right answer is, nats per token, one of each prompt."""
    found = []
    for prompt in experiment.prompts:
        reference, reply = (experiment.reply(prompt, one).gold for one in (REFERENCE, condition))
        assert reference is not None, f"prompt {prompt.key} has no answer"
        assert reply is not None, f"prompt {prompt.key} has no answer"
        found.append(reference.logprob - reply.logprob)
    return np.array(found)


def _with_interval(values: Floats) -> dict[str, float | None]:
    low, high = interval(values)
    return {"mean": float(values.mean()), "low": low, "high": high}


def deviation_row(family: str, deviations: Sequence[Deviation]) -> dict[str, Any]:
    """Means over the prompts, and by what share preparation lowers them."""
    norms = [(one.alone, one.prepared) for one in deviations]
    squares = [(one.alone_squared, one.prepared_squared) for one in deviations]
    return {
        "family": family,
        "num": len(deviations),
        ALONE: float(np.mean([alone for alone, _ in norms])),
        PREPARED: float(np.mean([prepared for _, prepared in norms])),
        "reduction": dict(zip(("mean", "low", "high"), reduction(norms), strict=True)),
        "reduction_squared": dict(zip(("mean", "low", "high"), reduction(squares), strict=True)),
    }


def to_markdown(report: Mapping[str, Any]) -> list[str]:
    return [
        "# Preparation with similar chunks",
        "",
        *run_markdown(report),
        *(f"- {name}: {value}" for name, value in report["settings"].items()),
        "",
        "KV at the second layer: the distance of a token's K and V from those of a full prefill, mean over the tokens",
        "of all chunks but the first, and that of its square, as FusionRAG sums it up (eq. 7; it reports 70 % less).",
        "",
        *markdown_table(
            ("questions", "number", ALONE, PREPARED, "less by [95 %]", "square: less by [95 %]"),
            [
                (
                    row["family"],
                    row["num"],
                    f"{row[ALONE]:.3f}",
                    f"{row[PREPARED]:.3f}",
                    *(
                        f"{100 * share['mean']:.1f} % [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"
                        for share in (row["reduction"], row["reduction_squared"])
                    ),
                )
                for row in report["deviation"]
            ],
        ),
        *(_answers(report["answers"]) if report["answers"] else ()),
    ]


def _answers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "",
        "Answers: the score in percent, and how much less likely than in a full prefill the right answer is, in nats",
        "per token (0 = as likely). A gain is what preparation adds to the score, or takes from that loss, with its",
        "95 % interval.",
        "",
        *markdown_table(
            (
                *("questions", "method", "ratio", "number", "score of full", ALONE, PREPARED, "gain"),
                *(f"loss, {ALONE}", f"loss, {PREPARED}", "gain"),
            ),
            [
                (
                    f"{row['family']} ({METRIC_NAMES[row['metric']]})",
                    row["method"],
                    f"{row['ratio']:g}",
                    row["num"],
                    f"{100 * row['full_score']:.1f}",
                    f"{100 * row['score'][ALONE]:.1f}",
                    f"{100 * row['score'][PREPARED]:.1f}",
                    _told(row["score_gain"], 100.0, 1),
                    f"{row['gold_loss'][ALONE]['mean']:.3f}",
                    f"{row['gold_loss'][PREPARED]['mean']:.3f}",
                    _told(row["gold_gain"], 1.0, 3),
                )
                for row in rows
            ],
        ),
    ]


def _told(value: Mapping[str, float | None], scale: float, digits: int) -> str:
    mean, low, high = (None if value[name] is None else scale * value[name] for name in ("mean", "low", "high"))
    told = f"{mean:+.{digits}f}"
    return told if low is None else f"{told} ({low:+.{digits}f} to {high:+.{digits}f})"


def run(args: argparse.Namespace, console: Console) -> int:
    """Everything; the exit code."""
    about = describe_run()
    tasks = load(args)
    conditions = conditions_of(map(parse_method, args.methods), args.ratios)
    pairs, deviations = ask(args, tasks, conditions, console)
    report = {
        **about,
        "settings": {
            "model": f"{Path(args.model_path).name} ({fingerprint(args.model_path)})",
            "questions": f"up to {args.num} of each of {', '.join(task.family for task in tasks)}, "
            f"{'chat' if args.chat else 'plain text'}",
            "neighbours": f"{args.neighbours} of each chunk, by TF-IDF, from all chunks of these questions",
        },
        "deviation": [
            deviation_row(task.family, measured) for task, measured in zip(tasks, deviations, strict=True) if measured
        ],
        "answers": [row for pair in pairs for row in rows_of(pair, conditions)],
    }
    markdown = to_markdown(report)
    for line in markdown:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for path in write_result(args.out, "preparation", report, markdown):
        console.print(f"written: {os.path.relpath(path)}", highlight=False, soft_wrap=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    leave_on_sigterm()
    console = Console()
    try:
        return run(args, console)
    except (DataError, SetupError, ServerError, ChunkCacheRequestError, ServerRefused, ServerGone) as error:
        console.print(f"{error} Server logs lie in {args.work}.", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; --resume goes on from here")
        return 130


if __name__ == "__main__":
    sys.exit(main())
