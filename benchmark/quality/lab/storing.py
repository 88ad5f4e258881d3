"""What is stored, and what is repaired: KV of passages computed alone or behind a context, times what is recomputed.

    python benchmark/quality/lab/storing.py MODEL --data hotpotqa.jsonl 2wiki.jsonl musique.jsonl
    python benchmark/quality/lab/storing.py MODEL --data hotpotqa.jsonl --foreign 1 2 --rules nothing epic --ratios 0.05

Each question is computed in full. Its passages are then stored in every way that `stores` names, put together again,
and every rule of `choices.RULES` computes its rows and the question over them. A mean (x2 and more) is taken token by
token: V as it is, K turned to where the passage stands. A passage that was stored behind something is reused also where
it stands first; one that was stored alone is the exact prefix there, as in the server.

Lines of finished questions are kept in OUT/NAME.jsonl: the same command goes on where it was stopped, and `--part 2/8`
in several processes at once shares the work; the command without it then writes the page. OUT/NAME.md has the tables:
means with 95 % intervals (bootstrap over questions), of all, and of the last `--held-out` lines of the files and the
others apart; and the differences that `--pair` names, question by question.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import compress, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.common.results import RESULTS_DIR, named, run_markdown
from benchmark.quality.lab.asking import Line, ask_each, chat_or_text
from benchmark.quality.lab.case import Case
from benchmark.quality.lab.choices import RULES, Pick, Reused
from benchmark.quality.lab.fillers import FILLERS
from benchmark.quality.lab.many import behind
from benchmark.quality.lab.rows import KV, RowModel
from benchmark.quality.prompts import PLAIN, Prompt
from benchmark.quality.question import DataError, Question, question_of
from benchmark.quality.table import interval

from chunk_cache.plan.neighbours import find_neighbours
from chunk_cache_tools.jsonl import read_jsonl

MEASURES = {
    "own_kl": "KL along own answer",
    "own_loss": "own answer lost",
    "gold_loss": "right answer lost",
    "own_kept": "own answer kept",
    "gold_found": "right answer found",
}
OWN_LEN = 100
CONTEXT_PASSAGES = 3
NUM_TAILS = 4
"""Other questions that rules learn from."""
ALONE, FILLER, FOREIGN, SIMILAR = "alone", "filler", "foreign", "similar"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", help="Hugging Face folder or name, of Llama's shape or Gemma 3")
    add("--data", nargs="+", required=True, metavar="FILE", help="JSONL as of evaluate.py")
    add("--num", type=int, help="questions at the end of each file that are asked (default: all)")
    add("--held-out", type=int, default=40, metavar="N", help="lines at the end of a file shown apart (default: 40)")
    add("--part", type=part_of, default=(0, 1), metavar="I/N", help="of N processes that share the questions, the I-th")
    add("--batch", type=int, default=4, metavar="N", help="conditions that are computed at once (default: %(default)s)")
    add("--device", default="cpu", help="of torch (default: %(default)s)")
    add("--filler", nargs="*", type=int, default=[1], metavar="K", help="means over K fillers")
    add("--foreign", nargs="*", type=int, default=[1], metavar="K", help="means over K other questions' passages")
    add("--similar", nargs="*", type=int, default=[], metavar="K", help="means over K contexts of similar passages")
    add("--rules", nargs="+", choices=RULES, default=["nothing", "epic", "question-drift"], metavar="RULE")
    add("--ratios", nargs="+", type=float, default=[0.05, 0.15], metavar="R")
    add(
        "--pair", dest="pairs", nargs=4, action="append", default=[], metavar="NAME", help="STORE RULE minus STORE RULE"
    )
    add("--max-tokens", type=int, default=3500, help="longer prompts are left out (default: %(default)s)")
    add("--out", type=Path, default=RESULTS_DIR / "quality" / "lab", help="folder of the results")
    add("--name", help="of the result files (default: storing-MODEL)")
    return parser.parse_args(argv)


def part_of(text: str) -> tuple[int, int]:
    """`2/8` as (1, 8)."""
    number, _, of = text.partition("/")
    return int(number) - 1, int(of)


@dataclass(frozen=True)
class Asked:
    """A question, and the other questions of its file."""

    key: str
    question: Question
    others: Sequence[Question]


def read(path: Path, num: int | None) -> list[Asked]:
    """The last `num` questions, from the last on.

    Raises:
        DataError: a line is no question.
    """
    lines: list[Question] = []
    for where, value in read_jsonl(path):
        value.pop("supporting", None)
        lines.append(question_of(value, where))
    numbers = list(reversed(range(len(lines))))[:num]
    return [Asked(f"{path.name}:{i}", lines[i], [*lines[:i], *lines[i + 1 :]]) for i in numbers]


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
        asking = draw.sample(list(asked.others), min(NUM_TAILS, len(asked.others)))
        self.tails = [self._ids([prompt_of(model, other).tail]) for other in asking]
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
        each = contexts if len(contexts) > 1 else [contexts[0]] * len(case.spans)
        head = KV(case.full.k[:, :head_len], case.full.v[:, :head_len])
        chunks = [case.ids[start:end] for start, end in case.spans]
        for (start, end), context, kv in zip(case.spans, each, behind(case.model, head, each, chunks), strict=True):
            self._sum.k[:, start:end] += case.model.turn(kv.k, start - head_len - len(context))
            self._sum.v[:, start:end] += kv.v
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


def conditions(reused: Reused, args: argparse.Namespace) -> Iterator[tuple[str, Pick]]:
    for name in args.rules:
        for ratio in args.ratios if name != "nothing" else (0.0,):
            yield (f"{name} {ratio:g}" if ratio else name), RULES[name](reused, ratio)


def with_interval(values: Sequence[float]) -> str:
    """The mean and its 95 % interval."""
    low, high = interval(np.array(values))
    return f"{statistics.mean(values):.3f} [{low:.3f}, {high:.3f}]"


def table(heads: Sequence[str], rows: Iterable[tuple[Sequence[str], Sequence[Sequence[float]]]]) -> Iterator[str]:
    """Of rows of names and of columns of values, one a question."""
    for number, (names, columns) in enumerate(rows):
        if number == 0:
            yield f"| {' | '.join(heads)} |"
            yield "|" + " --- |" * len(names) + " ---: |" * len(columns)
        yield f"| {' | '.join([*names, *map(with_interval, columns)])} |"


def values(lines: Sequence[Line], store: str, rule: str, measure: str) -> list[float]:
    return [line["results"][store][rule][measure] for line in lines]


def page(lines: Sequence[Line], args: argparse.Namespace, about: dict[str, Any]) -> str:
    """The result as Markdown."""
    lengths = [line["prompt_len"] for line in lines]
    out = [
        f"# {Path(args.model).name}: what is stored, what is repaired",
        "",
        f"{len(lines)} questions of {', '.join(named(Path(path)) for path in args.data)}, "
        f"{sum(line['seconds'] for line in lines) / 3600:.2f} hours of one process.",
        f"Prompts of {min(lengths)} to {max(lengths)} tokens, own answers of "
        f"{statistics.mean(line['own_len'] for line in lines):.0f} on average; a greedy reply of full prefill begins "
        f"with the right answer in {statistics.mean(line['full_finds'] for line in lines):.1%}.",
        "Nats a token, and shares of questions; mean [95 % interval].",
        "",
    ]
    if args.pairs:
        out += ["## Differences, question by question", ""]
        heads = ("stored", "recomputed", "minus stored", "recomputed", *MEASURES.values())
        out += [*table(heads, ((pair, differences(lines, *pair)) for pair in args.pairs)), ""]
    conditions = [(store, rule) for store, rules in lines[0]["results"].items() for rule in rules]
    first_held_out = {Path(path).name: sum(1 for _ in read_jsonl(path)) - args.held_out for path in args.data}
    is_held_out = [number >= first_held_out[file] for file, number in map(place_of, lines)]
    parts = {
        "All": lines,
        f"Last {args.held_out} lines of the files": list(compress(lines, is_held_out)),
        "Other lines": [line for line, is_held in zip(lines, is_held_out, strict=True) if not is_held],
    }
    for title, part in parts.items():
        if len(part) > 1:
            out += [f"## {title}: {len(part)} questions", ""]
            rows = ((one, [values(part, *one, measure) for measure in MEASURES]) for one in conditions)
            out += [*table(("stored", "recomputed", *MEASURES.values()), rows), ""]
    by_file = {file: [line for line in lines if place_of(line)[0] == file] for file in first_held_out}
    by_file = {f"{file} ({len(part)})": part for file, part in by_file.items() if len(part) > 1}
    out += ["## The right answer lost, by file", ""]
    rows = ((one, [values(part, *one, "gold_loss") for part in by_file.values()]) for one in conditions)
    return "\n".join([*out, *table(("stored", "recomputed", *by_file), rows), "", *run_markdown(about), ""])


def differences(lines: Sequence[Line], store: str, rule: str, from_store: str, from_rule: str) -> list[list[float]]:
    """Of every measure, one a question."""
    found = []
    for measure in MEASURES:
        both = zip(values(lines, store, rule, measure), values(lines, from_store, from_rule, measure), strict=True)
        found.append([one - other for one, other in both])
    return found


def place_of(line: Line) -> tuple[str, int]:
    """The file and the number of its line."""
    file, _, number = line["key"].partition(":")
    return file, int(number)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_default_device(args.device)
    try:
        each = [read(Path(path), args.num) for path in args.data]
    except DataError as error:
        print(error, file=sys.stderr)
        return 1

    def results_of(case: Case, prompt: Prompt, asked: Asked) -> dict[str, Any]:
        contexts = Contexts(case.model, asked, max(args.foreign, default=0))
        found = {}
        with torch.no_grad():
            for store, stored in stores(case, prompt.chunks, contexts, args):
                reused = Reused(stored, 1 if store == ALONE else 0, contexts.tails)
                names, picks = zip(*conditions(reused, args), strict=True)
                parts = [picks[i : i + args.batch] for i in range(0, len(picks), args.batch)]
                judged = [one for part in parts for one in reused.judge(part)]
                found[store] = dict(zip(names, map(asdict, judged), strict=True))
        return found

    wanted = [(asked.key, asked) for group in zip_longest(*each) for asked in group if asked is not None]
    number, of = args.part
    ask_each(
        args,
        args.name or f"storing-{Path(args.model).name}",
        wanted[number::of],
        OWN_LEN,
        lambda model, asked: prompt_of(model, asked.question),
        results_of,
        page if of == 1 else None,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
