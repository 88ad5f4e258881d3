"""The demonstration: questions about this repository's documents, asked of stock SGLang and with reused passages.

    make demo        (or: python benchmark/demo/demo.py [--questions 30] [--method epic] [--ratio 0.15])

Answers: a small trained model is asked questions whose answers are known, by stock SGLang and with reused passages, so
that one sees what reuse does to answers. Time: a corpus of real text is cut into passages, TF-IDF retrieves 4 to 6 of
them per question, and a larger model of random weights answers each prompt twice: as stock SGLang would, and with the
KV of passages that it has seen before. Nothing is fetched from a network. A GPU is used where there is one. Tables and
a plot come last.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT
from benchmark.common.models import LlamaShape, make_llama
from benchmark.common.results import describe_run
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.demo.answers import MODEL_DIR, build_answer_table, make_all_questions, show_examples
from benchmark.demo.answers import ask_all as ask_all_questions
from benchmark.demo.corpus import Passage, ask_questions, train_on_corpus
from benchmark.demo.report import LEGEND, build_table, draw_plot, summarize, write_json
from benchmark.demo.retriever import Retriever
from benchmark.demo.session import Exchange, ask_both, build_prompt, warm_up
from benchmark.quality.session import SetupError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

OUT_DIR = ROOT / ".cache" / "demo"
SHAPE = LlamaShape(layers=8, hidden=512, heads=8, kv_heads=8, intermediate=1408, vocab=4096, max_position=8192)
NUM_TOPICS = 8
SEED = 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--answers", type=int, default=40, help="questions of each kind to the trained model")
    parser.add_argument("--method", help="method of the reuse side (default: the server's, epic)")
    parser.add_argument("--ratio", type=float, default=0.15, help="share of the reused tokens that is recomputed")
    args = parser.parse_args()
    if args.questions < 1 or args.answers < 1:
        parser.error("--questions, --answers: at least 1")
    return args


def prepare(console: Console) -> tuple[list[Passage], Path]:
    """Passages of the corpus, and the folder of a model whose tokenizer was trained on them."""
    tokenizer, passages = train_on_corpus(SHAPE.vocab)
    model_dir = make_llama(OUT_DIR / "model", SHAPE, tokenizer=tokenizer, seed=SEED)
    lengths = [len(tokenizer.tokenize(passage.text)) for passage in passages]
    console.print(
        f"corpus: {len(passages)} passages of {min(lengths)}-{max(lengths)} tokens "
        f"(median {statistics.median(lengths):.0f}) from the documents of this repository\n"
        f"model:  {SHAPE}, random weights: its answers are nonsense, only the clock and the token counts mean anything"
    )
    return passages, model_dir


def ask_all(server: Server, passages: list[Passage], args: argparse.Namespace, console: Console) -> list[Exchange]:
    """All questions, with a live bar."""
    retriever = Retriever(passages)
    questions = ask_questions(passages, args.questions, NUM_TOPICS, SEED)
    options: dict[str, Any] = {"ratio": args.ratio, **({"method": args.method} if args.method else {})}
    exchanges: list[Exchange] = []
    columns = (
        TextColumn("asking"),
        BarColumn(40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(questions))
        for i, question in enumerate(questions):
            found = retriever.find(question.text, question.num_passages)
            prompt = build_prompt(found, question)
            exchange = ask_both(server, prompt, question, len(found), options, stock_first=i % 2 == 0)
            exchanges.append(exchange)
            median = statistics.median(e.speedup for e in exchanges)
            progress.update(
                task,
                advance=1,
                description=f"stock {1e3 * exchange.stock_s:.0f} ms, reuse {1e3 * exchange.reuse_s:.0f} ms; "
                f"median ratio so far {median:.1f}x",
            )
    return exchanges


def answer(num: int, console: Console) -> None:
    """The first part: right answers of the trained model under stock and reuse."""
    console.print(f"trained model: {os.path.relpath(MODEL_DIR)}; {num} questions of each kind")
    flags = ("--chunk-cache", "--max-total-tokens", "32768")
    with console.status("starting a server: 20-80 s, nearly all of it imports of SGLang in several processes"):
        server = Server(MODEL_DIR, *flags, env=offline_env(), log_path=OUT_DIR / "server-answers.log")
        server.start()
    try:
        with console.status("asking"):
            answers = ask_all_questions(server, make_all_questions(num))
    finally:
        server.stop()
    console.print(build_answer_table(answers))
    for line in show_examples(answers):
        console.print(line, style="dim", markup=False, soft_wrap=True)
    console.print()


def show(exchanges: list[Exchange], run: dict[str, Any], args: argparse.Namespace, console: Console) -> None:
    """Table, legend, summary; plot and JSON in the output folder."""
    console.print(build_table(exchanges))
    console.print(LEGEND, style="dim")
    console.print()
    for line in summarize(exchanges):
        console.print(line)
    machine = run["machine"]
    where = machine["accelerator"] or f"{machine['cpu']}, {machine['cores']} cores"
    method = exchanges[0].reuse["method"]
    draw_plot(exchanges, OUT_DIR / "demo.png", f"{SHAPE}\n{where}; {method}, ratio {args.ratio:g}")
    write_json(exchanges, OUT_DIR / "demo.json", {**run, "model": str(SHAPE), "ratio": args.ratio})
    for name, what in (("demo.png", "plot"), ("demo.json", "numbers"), ("server.log", "log")):
        console.print(f"{what + ':':<8} {os.path.relpath(OUT_DIR / name)}", soft_wrap=True)


def main() -> int:
    args = parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    leave_on_sigterm()
    began, run = time.monotonic(), describe_run()
    try:
        answer(args.answers, console)
    except (ServerError, SetupError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    passages, model_dir = prepare(console)
    server = Server(model_dir, "--chunk-cache", env=offline_env(), log_path=OUT_DIR / "server.log")
    try:
        with console.status("starting the server: 20-80 s, nearly all of it imports of SGLang in several processes"):
            server.start()
        console.print(f"server: ready after {server.start_s:.0f} s")
        warm_up(server)
        exchanges = ask_all(server, passages, args, console)
    except ServerError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    finally:
        server.stop()
    show(exchanges, run, args, console)
    console.print(f"all of it took {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
