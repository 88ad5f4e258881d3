"""What is stored, and what is repaired: KV of passages computed alone or behind a context, times what is recomputed.

    python benchmark/quality/lab/storing.py MODEL --data hotpotqa.jsonl 2wiki.jsonl musique.jsonl
    python benchmark/quality/lab/storing.py MODEL --data hotpotqa.jsonl --foreign 1 2 --rules nothing epic --ratios 0.05

Each question is computed in full. Its passages are then stored in every way that `stores` names, put together again,
and every rule of `choices.RULES` computes its rows and the question over them. A mean (x2 and more) is taken token by
token: V as it is, K turned to where the passage stands. A passage that was stored behind something is reused also where
it stands first; one that was stored alone is the exact prefix there, as in the server.

Lines of finished questions are kept in OUT/NAME.jsonl: the same command goes on where it was stopped, and `--part 2/8`
in several processes at once shares the work; the command without it then writes the page. OUT/NAME.md has the tables:
means, and paired differences to one condition, with 95 % intervals (bootstrap over questions), for the last
`--held-out` lines of the files and the others apart.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.common.results import RESULTS_DIR, named, run_markdown
from benchmark.quality.lab.asking import ask_each, chat_or_text
from benchmark.quality.lab.case import Case
from benchmark.quality.lab.choices import RULES, Pick, Reused
from benchmark.quality.lab.fillers import FILLERS
from benchmark.quality.lab.many import behind, judge_many
from benchmark.quality.lab.rows import KV, RowModel
from benchmark.quality.prompts import PLAIN, Prompt
from benchmark.quality.question import DataError, Question, question_of

from chunk_cache.plan.neighbours import find_neighbours
from chunk_cache_tools.jsonl import read_jsonl

MEASURES = {
    "own_kl": "KL along own answer",
    "own_loss": "own answer lost",
    "gold_loss": "right answer lost",
    "own_kept": "own answer kept",
    "gold_found": "right answer found",
}
Values = Callable[[str, str], Sequence[float]]
"""`values(store, rule)`: one a question."""
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
        "--against",
        nargs=2,
        default=[ALONE, "epic 0.15"],
        metavar=("STORE", "RULE"),
        help="what others are compared to",
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
        self.tails = [self._ids([prompt_of(model, other).tail]) for other in draw.sample(list(asked.others), NUM_TAILS)]
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


def batched(items: Sequence[Pick], num: int) -> Iterator[Sequence[Pick]]:
    return (items[i : i + num] for i in range(0, len(items), num))


def with_interval(values: Sequence[float]) -> str:
    """The mean and its 95 % interval, by bootstrap."""
    drawn = np.random.default_rng(0).integers(0, len(values), (4_000, len(values)))
    low, high = np.quantile(np.array(values)[drawn].mean(1), [0.025, 0.975])
    return f"{statistics.mean(values):.3f} [{low:.3f}, {high:.3f}]"


def table(lines: Sequence[Mapping[str, Any]], columns: Mapping[str, Values]) -> Iterator[str]:
    """A row for each store and rule."""
    yield "| stored | recomputed | " + " | ".join(columns) + " |"
    yield "| --- | --- |" + " ---: |" * len(columns)
    for store, rules in lines[0]["results"].items():
        for rule in rules:
            cells = [with_interval(values(store, rule)) for values in columns.values()]
            yield f"| {store} | {rule} | {' | '.join(cells)} |"


def values_of(lines: Sequence[Mapping[str, Any]], measure: str, against: Sequence[str] | None = None) -> Values:
    """A measure, question by question; minus that of the condition `against`."""
    results = [line["results"] for line in lines]
    base = [0.0 if against is None else one[against[0]][against[1]][measure] for one in results]
    return lambda store, rule: [one[store][rule][measure] - less for one, less in zip(results, base, strict=True)]


def page(lines: Sequence[dict[str, Any]], args: argparse.Namespace, about: dict[str, Any]) -> str:
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
    sizes = {Path(path).name: len(read(Path(path), None)) for path in args.data}
    held_out = [line for line in lines if _number(line) >= sizes[line["key"].partition(":")[0]] - args.held_out]
    groups = {f"Last {args.held_out} lines": held_out, "Other lines": [line for line in lines if line not in held_out]}
    for title, group in groups.items():
        if len(group) < 2:
            continue
        out += [f"## {title} of the files: {len(group)} questions", ""]
        out += [*table(group, {what: values_of(group, measure) for measure, what in MEASURES.items()}), ""]
        paired = {what: values_of(group, measure, args.against) for measure, what in MEASURES.items()}
        out += [f"Minus *{', '.join(args.against)}*, question by question:", "", *table(group, paired), ""]
        files = list(dict.fromkeys(line["key"].partition(":")[0] for line in group))
        each = {file: [line for line in group if line["key"].startswith(f"{file}:")] for file in files}
        by_file = {f"{file} ({len(some)})": values_of(some, "gold_loss") for file, some in each.items()}
        out += ["The right answer lost, by file:", "", *table(group, by_file), ""]
    return "\n".join([*out, *run_markdown(about), ""])


def _number(line: Mapping[str, Any]) -> int:
    return int(line["key"].partition(":")[2])


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
                judged = [one for part in batched(picks, args.batch) for one in judge_many(reused, part)]
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
