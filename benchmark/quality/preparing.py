"""What it takes to prepare passages: seconds a passage for each way to store it ahead of time.

    python benchmark/quality/preparing.py MODEL --data hotpotqa.jsonl [--num N] [--repeats R] [--out DIR]

The passages of N questions are stored by `/chunk_cache/warm` alone, behind filler, and behind their ten most similar
(FusionRAG, section 3.1), each time from empty caches, in a drawn order. Results: OUT/seconds.*.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import CACHE_DIR
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, named, run_markdown, write_result
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.quality.question import read_questions

HEAD = "Answer the question from the passages.\n"
WAYS: dict[str, dict[str, Any]] = {"alone": {"alone": True}, "behind filler": {}, "behind ten": {"neighbours": 10}}


def main() -> int:
    leave_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", type=Path, help="Hugging Face folder")
    add("--data", required=True, type=Path, metavar="FILE", help="JSONL as of evaluate.py")
    add("--num", type=int, default=8, help="questions, the last of the file (default: %(default)s)")
    add("--repeats", type=int, default=3)
    add("--out", type=Path, default=RESULTS_DIR / "preparation", help="folder of the result files")
    args = parser.parse_args()
    questions = read_questions(args.data)[-args.num :]
    texts = list(dict.fromkeys(f"{chunk}\n" for question in questions for chunk in question.chunks))
    report: dict[str, Any] = describe_run()
    flags = ("--chunk-cache", "--dtype", "float32", "--max-total-tokens", "40000")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    num_tokens: dict[str, int] = {}
    with Server(str(args.model), *flags, env=offline_env(), log_path=CACHE_DIR / "server-preparing.log") as server:
        for _ in range(args.repeats):
            for way in random.sample(list(WAYS), len(WAYS)):
                server.flush()
                began = time.monotonic()
                *_, last = server.client.lines("/chunk_cache/warm", {"texts": texts, "prefix_text": HEAD, **WAYS[way]})
                seconds[way].append((time.monotonic() - began) / len(texts))
                summary = json.loads(last)
                assert summary["present"] == len(texts), summary
                num_tokens[way] = summary["computed_tokens"]
                print(f"{way}: {seconds[way][-1]:.3f} s a passage", flush=True)
    base = statistics.median(seconds["alone"])
    rows = [
        (
            way,
            num_tokens[way],
            f"{statistics.median(took):.3f} ({min(took):.3f}-{max(took):.3f})",
            f"{statistics.median(took) / base:.1f}x",
        )
        for way, took in seconds.items()
    ]
    lines = [
        "# What it takes to prepare passages",
        "",
        *run_markdown(report),
        f"- {len(texts)} passages of {args.num} questions of {named(args.data)}",
        f"- model {args.model.name}, {named(args.model / 'model.safetensors')}; median (min-max) of {args.repeats}",
        "",
        *markdown_table(("stored", "tokens computed", "seconds a passage", "against alone"), rows),
    ]
    for path in write_result(args.out, "seconds", {**report, "seconds": seconds, "tokens": num_tokens}, lines):
        print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as error:
        sys.exit(f"error: {error}")
