"""The demonstration: what reuse of passages gains and what it costs, on this repository's documents.

    make demo                  (or: python benchmark/demo/demo.py [--questions 30] [--answers 24])
    make demo MODEL=FOLDER     speed and quality of a model of yours

The documents are cut into passages, and TF-IDF retrieves 4 to 6 of them per question. The first table is about
questions whose passages are all stored: the time to the first token by stock SGLang and with reuse, and the quality of
the answers. The second table starts from an empty cache. Without a model of yours, time is measured on a model of
random weights, whose answers mean nothing, and quality on a small trained one, which is too small to be timed.
Nothing is fetched from a network. A GPU is used if there is one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT
from benchmark.common.models import LlamaShape, make_llama
from benchmark.common.results import describe_run
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.demo.answers import (
    DEFAULT,
    MODEL_DIR,
    REUSED,
    Quality,
    ask_all,
    count_right,
    make_notes,
    qualities_of,
)
from benchmark.demo.corpus import Passage, Question, ask_questions, cut_passages, read_corpus, train_on_corpus
from benchmark.demo.report import (
    LEGEND_COLD,
    LEGEND_WARM,
    cold_table,
    kinds_table,
    summarize,
    warm_table,
    write_json,
)
from benchmark.demo.retriever import Retriever
from benchmark.demo.session import OUTPUT_LEN, Clocked, Exchange, ask_both, make_prompt, time_warm, warm_up
from benchmark.quality.evaluate import server_flags
from benchmark.quality.prompts import Prompt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache_tools.conditions import Condition
from chunk_cache_tools.local_tokenizer import load_tokenizer
from chunk_cache_tools.server_client import ServerGone
from chunk_cache_tools.verify.session import SetupError

OUT_DIR = ROOT / ".cache" / "demo"
SHAPE = LlamaShape(layers=8, hidden=512, heads=8, kv_heads=8, intermediate=1408, vocab=4096, max_position=8192)
NUM_TOPICS = 8
SEED = 0
NUM_QUESTIONS, NUM_QUESTIONS_OF_YOURS = 30, 8  # a real model is slow on a CPU
NUM_WARM, NUM_WARM_OF_YOURS = 12, 6
NOTES_LEN = 6  # most tokens of an answer of the trained model


@dataclass(frozen=True)
class Measured:
    """All that the tables show."""

    clocked: list[Clocked]
    qualities: dict[Condition, Quality]
    exchanges: list[Exchange]
    time_on: str
    quality_on: str
    kinds: Table | None = None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model of yours (default: two of this repository)")
    defaults = f"{NUM_QUESTIONS}, of a model of yours {NUM_QUESTIONS_OF_YOURS}"
    parser.add_argument("--questions", type=int, help=f"to an empty cache (default: {defaults})")
    parser.add_argument("--answers", type=int, default=24, help="questions of each kind to the trained model")
    args = parser.parse_args()
    args.questions = args.questions or (NUM_QUESTIONS if args.model is None else NUM_QUESTIONS_OF_YOURS)
    if args.questions < 1 or args.answers < 1:
        parser.error("--questions, --answers: at least 1")
    if args.model is not None and not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model} holds no config.json; give a Hugging Face folder")
    return args


def prompts_of(passages: list[Passage], num: int) -> list[tuple[Question, Prompt]]:
    """Questions about the passages, with a prompt of the passages retrieved for each."""
    retriever = Retriever(passages)
    questions = ask_questions(passages, num, NUM_TOPICS, SEED)
    return [(q, make_prompt(retriever.find(q.text, q.num_passages), q)) for q in questions]


@contextmanager
def started(model: Path, name: str, console: Console) -> Iterator[Server]:
    """A server with the chunk cache; its log lies in the output folder."""
    server = Server(model, *server_flags(""), env=offline_env(), log_path=OUT_DIR / f"{name}.log")
    with console.status("starting a server: 20-80 s, nearly all of it imports of SGLang in several processes"):
        server.start()
    try:
        yield server
    finally:
        server.stop()


def progress_of(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


def clock(
    server: Server, asked: list[tuple[Question, Prompt]], num_warm: int, console: Console
) -> tuple[list[Clocked], list[Exchange]]:
    """Times both parts: every passage known, and from an empty cache."""
    warm_up(server)
    warm = [prompt for _, prompt in asked[:num_warm]]
    with progress_of(console) as progress:
        bar = progress.add_task("every passage known", total=len(warm) * (1 + len(REUSED)))
        clocked = time_warm(server, warm, REUSED, lambda: progress.advance(bar))
        bar = progress.add_task("from an empty cache", total=len(asked))
        exchanges = []
        for i, (question, prompt) in enumerate(asked):
            exchanges.append(ask_both(server, prompt, question, DEFAULT.request, stock_first=i % 2 == 0))
            progress.advance(bar)
    return clocked, exchanges


def measure_ours(args: argparse.Namespace, console: Console) -> Measured:
    """Measures quality on the trained model, and time on a larger one of random weights."""
    questions, prompts = make_notes(args.answers)
    quality_on = f"trained model of 1 M parameters, {len(prompts)} questions about notes of the kinds in table 3"
    console.print(f"quality: {os.path.relpath(MODEL_DIR)}, {quality_on}", soft_wrap=True)
    with started(MODEL_DIR, "server-answers", console) as server, console.status("asking"):
        replies = ask_all(server.client, prompts, NOTES_LEN)
    tokenizer, passages = train_on_corpus(SHAPE.vocab)
    model_dir = make_llama(OUT_DIR / "model", SHAPE, tokenizer=tokenizer, seed=SEED)
    asked = prompts_of(passages, args.questions)
    lengths = [len(tokenizer.tokenize(prompt.text)) for _, prompt in asked]
    time_on = f"{SHAPE}, random weights; prompts of {statistics.median(lengths):.0f} tokens from these documents"
    console.print(f"time:    {time_on}", soft_wrap=True)
    with started(model_dir, "server", console) as server:
        clocked, exchanges = clock(server, asked, NUM_WARM, console)
    kinds = kinds_table(count_right(questions, replies))
    return Measured(clocked, qualities_of(replies), exchanges, time_on, quality_on, kinds)


def measure_yours(args: argparse.Namespace, console: Console) -> Measured:
    """Measures time and quality on the user's model, with the same prompts."""
    tokenizer = load_tokenizer(str(args.model))
    passages = cut_passages(read_corpus(ROOT), lambda text: len(tokenizer.tokenize(text)))
    asked = prompts_of(passages, args.questions)
    num = min(NUM_WARM_OF_YOURS, len(asked))
    about = f"{args.model.name}, {num} questions about this repository's documents"
    console.print(f"model: {about}, the same for time and quality", soft_wrap=True)
    with started(args.model, "server", console) as server:
        clocked, exchanges = clock(server, asked, num, console)
        with console.status("asking how likely full prefill's own answers are"):
            replies = ask_all(server.client, [prompt for _, prompt in asked[:num]], OUTPUT_LEN)
    return Measured(clocked, qualities_of(replies), exchanges, about, about)


def show(found: Measured, run: dict[str, Any], console: Console) -> None:
    """Prints tables, legends and a summary; writes JSON into the output folder."""
    console.print()
    console.print(warm_table(found.clocked, found.qualities))
    console.print(f"Time on: {found.time_on}.", style="dim", soft_wrap=True)
    console.print(f"Quality on: {found.quality_on}.", style="dim", soft_wrap=True)
    console.print(LEGEND_WARM, style="dim")
    console.print()
    console.print(cold_table(found.exchanges))
    console.print(LEGEND_COLD, style="dim")
    console.print()
    if found.kinds is not None:
        console.print(found.kinds)
    for line in summarize(found.clocked, found.qualities, found.exchanges):
        console.print(line, soft_wrap=True)
    console.print()
    described = {**run, "time_on": found.time_on, "quality_on": found.quality_on}
    write_json(found.clocked, found.qualities, found.exchanges, OUT_DIR / "demo.json", described)
    for name, what in (("demo.json", "numbers"), ("server.log", "log")):
        console.print(f"{what + ':':<8} {os.path.relpath(OUT_DIR / name)}", soft_wrap=True)


def main() -> int:
    args = parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    leave_on_sigterm()
    began, run = time.monotonic(), describe_run()
    try:
        found = measure_ours(args, console) if args.model is None else measure_yours(args, console)
    except (ServerError, SetupError, ServerGone, ChunkCacheRequestError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    show(found, run, console)
    console.print(f"all of it took {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
