"""What is lost by reuse, and which tokens bring it back: experiments on a pretrained model outside any server.

    python benchmark/quality/lab/study.py MODEL --data hotpotqa.jsonl 2wiki.jsonl --parts causes --num 10
    python benchmark/quality/lab/study.py MODEL --data hotpotqa.jsonl --parts choices --ratios 0.05 0.15 --half odd

Every question is computed once in full and once chunk by chunk; then each experiment changes something, computes what
it recomputes and the question, and both answers are read behind it, token by token. Lines of finished questions are
kept in OUT/NAME.jsonl: the same command goes on where it was stopped. OUT/NAME.md has the tables.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.common.results import RESULTS_DIR, mean_and_error, named, run_markdown
from benchmark.quality.lab.ape import ape
from benchmark.quality.lab.asking import ask_each, chat_or_text
from benchmark.quality.lab.case import Case
from benchmark.quality.lab.causes import causes
from benchmark.quality.lab.choices import best_passages, choices
from benchmark.quality.lab.rows import RowModel
from benchmark.quality.prompts import VERBATIM, Prompt
from benchmark.quality.question import Question, question_of

from chunk_cache_tools.jsonl import DataError, read_jsonl

PARTS = ("causes", "choices", "ape")
MEASURES = {
    "own_kl": "KL along own answer",
    "own_loss": "own answer",
    "gold_loss": "right answer",
    "first_kl": "KL, first token",
}
EXPLAINED = (
    "Answer the question from the passages. First say which facts of which passages you use, then give the answer."
)
OPENING = "Let me go through the facts in the passages. First,"
OWN_LEN = {False: 24, True: 100}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", help="Hugging Face folder or name, of Llama's shape")
    add("--data", nargs="+", required=True, metavar="FILE", help="JSONL as of evaluate.py; `supporting` is read too")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS[:2]))
    add("--ratios", nargs="+", type=float, default=[0.05, 0.15], metavar="R")
    add("--num", type=int, default=10, help="questions of each file (default: %(default)s)")
    add("--half", choices=("even", "odd"), default="even", help="the method was chosen on even lines (default)")
    add("--max-tokens", type=int, default=3000, help="longer prompts are left out (default: %(default)s)")
    add("--long", action="store_true", help=f"own answers of up to {OWN_LEN[True]} tokens that speak of the passages")
    add("--passages", action="store_true", help="also the oracle that tries every passage")
    add("--out", type=Path, default=RESULTS_DIR / "quality" / "lab", help="folder of the results")
    add("--name", help="of the result files (default: the model's)")
    args = parser.parse_args(argv)
    if bad := [ratio for ratio in args.ratios if not 0 < ratio < 1]:
        parser.error(f"--ratios: {bad[0]:g} is not between 0 and 1")
    if args.num < 1:
        parser.error("--num: at least 1")
    return args


def read(path: Path, half: str, num: int) -> Iterator[tuple[str, Question, list[int]]]:
    """(key, question, supporting passages) of every second line."""
    for number, (where, value) in enumerate(read_jsonl(path)):
        if number % 2 == (half == "odd"):
            supporting = value.pop("supporting", [])
            yield f"{path.name}:{number}", question_of(value, where), supporting
            num -= 1
        if not num:
            return


def prompt_of(model: RowModel, question: Question, long: bool) -> Prompt:
    """A chat prompt where the model has a template; a long one asks for an explanation and begins it."""
    asked = replace(question, system=EXPLAINED) if long else question
    prompt = chat_or_text(model, asked, VERBATIM)
    return replace(prompt, tail=prompt.tail + OPENING, answer=f" {prompt.answer.strip()}") if long else prompt


def experiments(case: Case, supporting: list[int], args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of `Case.judge`)."""
    if "causes" in args.parts:
        yield from causes(case)
    else:
        yield "reused", {"rows": torch.arange(0)}
    if "ape" in args.parts:
        yield from ape(case)
    if "choices" in args.parts:
        for ratio in args.ratios:
            for name, how in choices(case, supporting, ratio):
                yield f"{name} @{ratio:g}", how
            if args.passages:
                yield f"oracle: passages tried one by one @{ratio:g}", best_passages(case, ratio)


def table(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Mean and standard error over the questions of every measure, and the share of the chunks that was computed."""
    out = [f"| experiment | {' | '.join(MEASURES.values())} | computed |", "| --- |" + " ---: |" * (len(MEASURES) + 1)]
    for name in names:
        found = [line["results"][name] for line in lines if name in line["results"]]
        cells = [_mean([judged[measure] for judged in found]) for measure in MEASURES]
        computed = statistics.mean(judged["recomputed"] for judged in found)
        out.append(f"| {name} | {' | '.join(cells)} | {computed:.1%} |")
    return out


def _mean(values: Sequence[float]) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:+.3f} ({error:.3f})"


def page(lines: Sequence[dict[str, Any]], args: argparse.Namespace, about: dict[str, Any]) -> str:
    """The result as Markdown."""
    names = list(dict.fromkeys(name for line in lines for name in line["results"]))
    hours = sum(line["seconds"] for line in lines) / 3600
    files = [named(Path(path)) for path in args.data]
    lengths = [line["prompt_len"] for line in lines]
    own_len = statistics.mean(line["own_len"] for line in lines)
    return "\n".join(
        [
            f"# {Path(args.model).name}: what reuse loses" + (", long answers" if args.long else ""),
            "",
            f"{len(lines)} questions ({args.half} lines of {', '.join(files)}), {hours:.1f} hours.",
            f"Prompts of {min(lengths)} to {max(lengths)} tokens, own answers of {own_len:.0f} on average.",
            "Nats a token that an answer is less likely than behind a full prefill, or KL; mean (standard error).",
            "",
            *table(lines, names),
            "",
            *run_markdown(about),
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    name = args.name or Path(args.model).name + ("-long" if args.long else "")
    try:
        wanted = [one for path in args.data for one in read(Path(path), args.half, args.num)]
    except DataError as error:
        print(error, file=sys.stderr)
        return 1

    def results_of(case: Case, _: Prompt, asked: tuple[Question, list[int]]) -> dict[str, Any]:
        return {label: asdict(case.judge(**how)) for label, how in experiments(case, asked[1], args)}

    ask_each(
        args,
        name,
        [(key, (question, supporting)) for key, question, supporting in wanted],
        OWN_LEN[args.long],
        lambda model, asked: prompt_of(model, asked[0], args.long),
        results_of,
        page,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
