"""What is stored: the KV of passages computed alone, behind a context, or as the mean over several contexts.

    python benchmark/quality/lab/storing.py MODEL --data hotpotqa.jsonl 2wiki.jsonl musique.jsonl --num 8

Each question of the last `--held-out` lines of a file is computed in full. Its passages are then stored in every way
that `stores` names, put together again, and every condition of `conditions` computes its rows and the question over
them. A mean is taken token by token: V as it is, K turned to where the passage stands. A passage that was stored behind
something is reused also where it stands first; one that was stored alone is the exact prefix there, as in the server.

Lines of finished questions are kept in OUT/NAME.jsonl: the same command goes on where it was stopped. OUT/NAME.md has
the tables: means, and paired differences with 95 % intervals (bootstrap over questions).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.common.results import RESULTS_DIR, mean_and_error, named, run_markdown
from benchmark.quality.lab.asking import ask_each, chat_or_text
from benchmark.quality.lab.case import Case
from benchmark.quality.lab.choices import Reused
from benchmark.quality.lab.fillers import FILLERS
from benchmark.quality.lab.rows import KV, RowModel
from benchmark.quality.prompts import PLAIN, Prompt
from benchmark.quality.question import DataError, Question, question_of

from chunk_cache.plan.neighbours import find_neighbours
from chunk_cache_tools.jsonl import read_jsonl

MEASURES = {"own_kl": "KL along own answer", "own_loss": "own answer", "gold_loss": "right answer"}
OWN_LEN = 100
CONTEXT_PASSAGES = 3
ALONE, FILLER, FOREIGN, SIMILAR = "alone", "filler", "foreign", "similar"
BASELINES = (ALONE, f"{FILLER} x1", f"{FOREIGN} x1")
"""What every store is compared with, question by question."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", help="Hugging Face folder or name, of Llama's shape or Gemma 3")
    add("--data", nargs="+", required=True, metavar="FILE", help="JSONL as of evaluate.py")
    add("--held-out", type=int, default=40, metavar="N", help="lines at the end of a file that are asked (default: 40)")
    add("--first", type=int, default=0, metavar="I", help="of these lines, leave out so many (default: 0)")
    add("--num", type=int, default=8, help="questions of each file (default: %(default)s)")
    add("--filler", nargs="*", type=int, default=[1, 2, 4], metavar="K", help="means over K fillers")
    add("--foreign", nargs="*", type=int, default=[1, 2, 4], metavar="K", help="means over K other questions' passages")
    add("--similar", nargs="*", type=int, default=[], metavar="K", help="means over K contexts of similar passages")
    add("--epic", nargs="*", type=float, default=[0.05, 0.15], metavar="R", help="ratios of epic")
    add("--question-drift", nargs="*", type=float, default=[0.10], metavar="R", help="ratios of question-drift")
    add("--max-tokens", type=int, default=3500, help="longer prompts are left out (default: %(default)s)")
    add("--out", type=Path, default=RESULTS_DIR / "quality" / "lab", help="folder of the results")
    add("--name", help="of the result files (default: storing-MODEL)")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Asked:
    """A question, and passages of the other questions of its file, which nobody is asked about."""

    key: str
    question: Question
    others: Sequence[Question]


def read(path: Path, held_out: int, first: int, num: int) -> list[Asked]:
    """The questions to ask.

    Raises:
        DataError: a line is no question.
    """
    lines: list[Question] = []
    for where, value in read_jsonl(path):
        value.pop("supporting", None)
        lines.append(question_of(value, where))
    start = len(lines) - held_out
    asked = range(start + first, min(start + first + num, len(lines)))
    return [Asked(f"{path.name}:{number}", lines[number], lines[:start]) for number in asked]


def prompt_of(model: RowModel, question: Question) -> Prompt:
    """A chat prompt where the model has a template, else text behind BOS."""
    prompt = chat_or_text(model, question, PLAIN)
    if model.tokenizer.chat_template:
        return prompt
    return replace(prompt, head=(model.tokenizer.bos_token or "") + prompt.head)


class Contexts:
    """What may stand in front of a passage of one question, as token ids."""

    def __init__(self, model: RowModel, asked: Asked, num: int) -> None:
        self._model = model
        draw = random.Random(asked.key)
        self.foreign = []
        for other in draw.sample(list(asked.others), num):
            chunks = prompt_of(model, other).chunks
            self.foreign.append(self._ids(draw.sample(chunks, min(CONTEXT_PASSAGES, len(chunks)))))
        self.filler = [self._ids([text]) for text in FILLERS]
        self._asked = asked

    @cached_property
    def _corpus(self) -> tuple[str, ...]:
        rest = [chunk for other in self._asked.others for chunk in prompt_of(self._model, other).chunks]
        return tuple(dict.fromkeys(rest))

    def similar(self, chunks: Sequence[str], num: int) -> list[list[torch.Tensor]]:
        """For each chunk `num` contexts of similar passages of other questions, the most similar right in front."""
        corpus = [chunk for chunk in self._corpus if chunk not in chunks]
        places = find_neighbours([*chunks, *corpus], num * CONTEXT_PASSAGES + len(chunks))
        found = []
        for own in range(len(chunks)):
            texts = [corpus[place - len(chunks)] for place in places[own] if place >= len(chunks)]
            found.append([self._ids(texts[i : num * CONTEXT_PASSAGES : num][::-1]) for i in range(num)])
        return found

    def _ids(self, texts: Sequence[str]) -> torch.Tensor:
        ids = [self._model.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return torch.tensor([token for part in ids for token in part], dtype=torch.int64)


class Stored:
    """Sums of a case's passages over the contexts behind which they were computed, K turned to where they stand."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._sum = KV.empty(case.model, case.full.k.shape[1])
        self._num = 0

    def add(self, contexts: Sequence[torch.Tensor]) -> None:
        """One more context: one for all passages, or one for each."""
        case, head_len = self._case, self._case.head_len
        prefix = None
        for i, (start, end) in enumerate(case.spans):
            context = contexts[i] if len(contexts) > 1 else contexts[0]
            at = head_len + len(context)
            if prefix is None or len(contexts) > 1:
                prefix = KV(*(_room(part[:, :head_len], len(context)) for part in (case.full.k, case.full.v)))
                if len(context):
                    case.model.run(prefix, context, torch.arange(head_len, at))
            cache = KV(_room(prefix.k, end - start), _room(prefix.v, end - start))
            case.model.run(cache, case.ids[start:end], torch.arange(at, at + end - start))
            self._sum.k[:, start:end] += case.model.turn(cache.k[:, at:], start - at)
            self._sum.v[:, start:end] += cache.v[:, at:]
        self._num += 1

    def mean(self) -> Case:
        """The case whose passages are reused as the mean over the contexts so far."""
        case = self._case
        reused, (start, end) = case.full.clone(), (case.head_len, case.tail_start)
        reused.k[:, start:], reused.v[:, start:] = 0, 0
        reused.k[:, start:end] = self._sum.k[:, start:end] / self._num
        reused.v[:, start:end] = self._sum.v[:, start:end] / self._num
        return replace(case, reused=reused)


def stores(
    case: Case, chunks: Sequence[str], contexts: Contexts, args: argparse.Namespace
) -> Iterator[tuple[str, Case]]:
    """(name, the case with its passages stored so)."""
    yield ALONE, case
    similar = contexts.similar(chunks, max(args.similar)) if args.similar else []
    kinds = {
        FILLER: (args.filler, [[one] for one in contexts.filler]),
        FOREIGN: (args.foreign, [[one] for one in contexts.foreign]),
        SIMILAR: (args.similar, [list(each) for each in zip(*similar, strict=True)]),
    }
    for kind, (nums, each) in kinds.items():
        stored = Stored(case)
        for num in range(1, max(nums, default=0) + 1):
            stored.add(each[num - 1])
            if num in nums:
                yield f"{kind} x{num}", stored.mean()


def conditions(name: str, case: Case, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of `Case.judge`)."""
    reused = Reused(case, first=1 if name == ALONE else 0)
    yield "nothing", {"rows": torch.arange(0)}
    for ratio in args.epic:
        rows = [torch.arange(a, a + max(1, math.ceil(ratio * (b - a)))) for a, b in reused.spans]
        yield f"epic {ratio:g}", {"rows": torch.cat(rows)}
    for ratio in args.question_drift:
        rows = reused.best_tokens(reused.question_mass.mean(0), reused.num_rows(ratio))
        yield f"question-drift {ratio:g}", {"rows": rows, "change": reused.drift(rows)}


def _room(part: torch.Tensor, num: int) -> torch.Tensor:
    """KV `[num_layers, len, ...]` with `num` more places."""
    return torch.cat([part, part.new_zeros((part.shape[0], num, *part.shape[2:]))], 1)


def paired(lines: Sequence[Mapping[str, Any]], one: str, other: str, condition: str, measure: str) -> tuple[float, ...]:
    """Mean of one store's measure minus that of another, question by question, and its 95 % interval."""
    found = [line["results"] for line in lines if {one, other} <= line["results"].keys()]
    values = np.array([each[one][condition][measure] - each[other][condition][measure] for each in found])
    draws = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def page(lines: Sequence[dict[str, Any]], args: argparse.Namespace, about: dict[str, Any]) -> str:
    """The result as Markdown."""
    results = [line["results"] for line in lines]
    names = list(dict.fromkeys(name for each in results for name in each))
    nums = {name: sum(name in each for each in results) for name in names}
    labels = [label for label in results[0][ALONE] if all(label in each[ALONE] for each in results)]
    lengths = [line["prompt_len"] for line in lines]
    files = [named(Path(path)) for path in args.data]
    out = [
        f"# {Path(args.model).name}: what is stored",
        "",
        f"{len(lines)} questions of the last {args.held_out} lines of {', '.join(files)}, "
        f"{sum(line['seconds'] for line in lines) / 3600:.1f} hours.",
        f"Prompts of {min(lengths)} to {max(lengths)} tokens, own answers of "
        f"{statistics.mean(line['own_len'] for line in lines):.0f} on average.",
        "",
    ]
    for measure, title in MEASURES.items():
        out += [f"## {title}", "", "Nats a token; mean (standard error).", ""]
        out += [f"| stored | questions | {' | '.join(labels)} |", "| --- |" + " ---: |" * (1 + len(labels))]
        for name in names:
            mine = [each[name] for each in results if name in each]
            cells = [mean_and_error([one[label][measure] for one in mine]) for label in labels]
            shown = " | ".join(f"{mean:.3f} ({error:.3f})" for mean, error in cells)
            out.append(f"| {name} | {nums[name]} | {shown} |")
        for baseline in BASELINES:
            if nums.get(baseline, 0) < 2:
                continue
            out += ["", f"Minus *{baseline}*, paired [95 % interval]:", ""]
            out += [f"| stored | {' | '.join(labels)} |", "| --- |" + " ---: |" * len(labels)]
            for name in (name for name in names if name != baseline):
                cells3 = [paired(lines, name, baseline, label, measure) for label in labels]
                out.append(f"| {name} | {' | '.join(f'{m:+.3f} [{a:.3f}, {b:.3f}]' for m, a, b in cells3)} |")
        out.append("")
    return "\n".join([*out, *run_markdown(about), ""])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    name = args.name or f"storing-{Path(args.model).name}"
    try:
        each = [read(Path(path), args.held_out, args.first, args.num) for path in args.data]
    except DataError as error:
        print(error, file=sys.stderr)
        return 1

    def results_of(case: Case, prompt: Prompt, asked: Asked) -> dict[str, Any]:
        contexts = Contexts(case.model, asked, max(args.foreign, default=0))
        with torch.no_grad():
            return {
                store: {label: asdict(stored.judge(**how)) for label, how in conditions(store, stored, args)}
                for store, stored in stores(case, prompt.chunks, contexts, args)
            }

    ask_each(
        args,
        name,
        [(asked.key, asked) for group in zip(*each, strict=False) for asked in group],
        OWN_LEN,
        lambda model, asked: prompt_of(model, asked.question),
        results_of,
        page,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
