"""Early termination (`focus_window`) on a real model: rows it drops, seconds it saves, answers it changes.

    python benchmark/ttft/bench_focus.py MODEL --data hotpotqa.jsonl musique.jsonl [--num N] [--windows W ...]
    python benchmark/ttft/bench_focus.py MODEL --families carry multi [--num N] [--windows W ...]

Before each question the caches are emptied and its passages are computed in another order, so that Cache-Craft has
statistics of a context. The prompt is then asked for one token, which is timed: in full, without focus and with it, in
an order that changes; and again for an answer. Rows are added up over the layers. Results: OUT/NAME.*.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from benchmark.common.machine import CACHE_DIR
from benchmark.common.paired import loss_of_pairs
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, named, run_markdown, write_result
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.quality.campaign import prompt_builder
from benchmark.quality.prompts import Prompt
from benchmark.quality.question import read_questions
from benchmark.quality.tasks import TaskOptions, synthetic_task

from chunk_cache_tools.local_tokenizer import load_tokenizer
from chunk_cache_tools.verify.workload import PLAIN

FULL, WITHOUT = "in full", "without focus"


def conditions(method: str, ratio: float, windows: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Options of a request by the name of what is measured."""
    base = {"method": method, "ratio": ratio, "explain": True}
    focused = {f"window {window}": base | {"options": {"focus_window": window}} for window in windows}
    return {FULL: {"mode": "off"}, WITHOUT: base, **focused}


def ask(server: Server, prompt: Prompt, asked: Mapping[str, Mapping[str, Any]], answer_len: int) -> dict[str, Any]:
    """What became of one question, by condition."""
    found: dict[str, Any] = {}
    order = list(asked.items())
    random.Random(prompt.key).shuffle(order)
    for name, options in order:
        server.flush()
        server.generate(str(prompt.shuffled().content))
        timed = server.generate(prompt.text, chunk_cache=options)
        answer = server.generate(prompt.text, chunk_cache=options, max_new_tokens=answer_len).reply["text"]
        selection = timed.chunk_cache.get("selection")
        rows = selection and selection["rows_per_layer"]
        found[name] = {
            "seconds": timed.total_s,
            "answer": answer,
            "rows": rows,
            "focus": selection and selection["focus"],
        }
    return found


def summary(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[object]]:
    """Rows of the table, for the conditions with focus."""
    rows: list[list[object]] = []
    for name in names:
        settled = [line[name]["focus"]["settled_at_layer"] for line in lines if line[name]["focus"]]
        layers = [layer for layer in settled if layer is not None]
        sizes = [len(line[name]["focus"]["chunks"]) for line in lines if (line[name]["focus"] or {}).get("chunks")]
        left = [statistics.mean(line[name]["rows"]) / line[name]["rows"][0] for line in lines if line[name]["rows"]]
        time = loss_of_pairs([(line[name]["seconds"], line[WITHOUT]["seconds"]) for line in lines], 0.0)
        low, high = time["loss_95_percent_interval"]
        rows.append(
            [
                name,
                f"{len(layers)} of {len(lines)}",
                f"{statistics.median(layers):.0f}" if layers else "",
                f"{statistics.mean(sizes):.1f}" if sizes else "",
                f"{100 * (statistics.mean(left) - 1):+.1f} %",
                f"{time['loss_percent']:+.1f} % [{low:+.1f}, {high:+.1f}]",
                sum(line[name]["answer"] != line[WITHOUT]["answer"] for line in lines),
                sum(line[name]["answer"] == line[FULL]["answer"] for line in lines),
                sum(line[WITHOUT]["answer"] == line[FULL]["answer"] for line in lines),
            ]
        )
    return rows


def by_layer(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[object]]:
    """Rows of each layer, % of those of the first, mean over the questions."""
    rows: list[list[object]] = []
    for name in names:
        shares = [np.divide(line[name]["rows"], line[name]["rows"][0]) for line in lines if line[name]["rows"]]
        rows.append([name, " ".join(f"{100 * share:.0f}" for share in np.mean(shares, 0))])
    return rows


HEAD = [
    *("condition", "settled", "at layer, from 0 (median)", "chunks in focus", "rows", "seconds (median of pairs)"),
    *("answers changed", "answers as in full", "the same without focus"),
]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", help="Hugging Face folder; with a chat template unless --families are given")
    add("--families", nargs="+", default=[], metavar="NAME", help="synthetic questions instead of --data")
    add("--data", nargs="+", default=[], type=Path, metavar="FILE", help="JSONL as of evaluate.py")
    add("--num", type=int, default=10, help="questions at the end of each file (default: %(default)s)")
    add("--method", default="cache-craft")
    add("--ratio", type=float, default=0.15)
    add("--windows", nargs="+", type=int, default=[3, 5], metavar="W")
    add("--answer", type=int, default=16, metavar="N", help="tokens of an answer (default: %(default)s)")
    add("--max-tokens", type=int, default=3000, help="longer prompts are left out (default: %(default)s)")
    add("--name", default="focus", help="of the result files (default: %(default)s)")
    add("--out", type=Path, default=RESULTS_DIR / "ttft", help="folder of the result files")
    return parser.parse_args(argv)


def main() -> int:
    leave_on_sigterm()
    args = parse_args()
    report: dict[str, Any] = {**describe_run(), "data": [named(path) for path in args.data], "questions": []}
    tokenizer = load_tokenizer(args.model)

    if args.families:
        tasks = [synthetic_task(family, TaskOptions(num=args.num)) for family in args.families]
        prompts = [prompt for task in tasks for prompt in task.prompts()]
    else:
        build = prompt_builder(args.model, chat=True)
        questions = [question for path in args.data for question in read_questions(path)[-args.num :]]
        prompts = [build(question, PLAIN) for question in questions]
    prompts = [prompt for prompt in prompts if len(tokenizer.encode(prompt.text)) <= args.max_tokens]
    asked = conditions(args.method, args.ratio, args.windows)
    flags = ["--chunk-cache", "--dtype", "float32", "--max-total-tokens", str(4 * args.max_tokens)]
    with Server(args.model, *flags, env=offline_env(), log_path=CACHE_DIR / "server-focus.log") as server:
        ask(server, prompts[0], asked, args.answer)  # warms up
        for number, prompt in enumerate(prompts, 1):
            report["questions"].append(ask(server, prompt, asked, args.answer))
            print(f"{number} of {len(prompts)} questions", flush=True)
    lines = [
        "# Early termination",
        "",
        *run_markdown(report),
        f"- {len(prompts)} questions of {', '.join([*args.families, *report['data']])}; model {Path(args.model).name}",
        "",
        *markdown_table(HEAD, summary(report["questions"], list(asked)[2:])),
        "",
        "Rows by layer, % of those of the first layer (without focus 100 at every layer), mean over the questions:",
        "",
        *markdown_table(["condition", "layers, from the first"], by_layer(report["questions"], list(asked)[2:])),
    ]
    for path in write_result(args.out, args.name, report, lines):
        print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as error:
        sys.exit(f"error: {error}")
