"""Go or no-go: what reuse of passages costs answers in a hybrid with states, against a transformer of its size.

    python benchmark/quality/hybrid/study.py ask benchmark/quality/models/qa-hybrid-1m-seed0    # OUT/MODEL.jsonl
    python benchmark/quality/hybrid/study.py page                                              # OUT/study.md

Every question is computed in full. Then its passages are put together from stored pieces (`pieces.Prompt`): stored
alone behind the system prompt, or in the same prompt in another order, or as the mean over `CONTEXTS` such prompts;
with seams of `SEAMS` tokens computed in front of each piece; and with maps kept in each way of `pieces.KINDS`. `budget`
computes whole passages, those that looked most at others first, until half of the passages' tokens are computed.

The rule, written before any model was asked. Measured are the points of answers that are right in full and wrong with
reuse, less the reverse, and the nats a token of the right answer; mean over needle, multi and carry and over three
seeds, short passages, stored alone, seams of `RULE_SEAM` (HYPIC's default), maps in fp32. *No-go*, if by either measure
the hybrid loses more than twice what the transformer loses: if loss(hybrid) - 2 loss(transformer) is above 0. Its 95 %
interval (bootstrap over questions, each the mean over seeds) says how sure that is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, named, run_markdown
from benchmark.quality.hybrid.pieces import KINDS, Carried, Layer, Part, Prompt, Reused, Run, Stored, answered, mean_of
from benchmark.quality.question import Question
from benchmark.quality.synthetic.questions import HELD_OUT_SEEDS, make_questions
from benchmark.quality.synthetic.vocabulary import BOS, EOS, ID_OF, encode
from benchmark.quality.table import interval
from benchmark.quality.train.export import WEIGHTS_FILE, read_folder
from benchmark.quality.train.hybrid import Hybrid
from benchmark.quality.train.model import Llama

FAMILIES = ("needle", "multi", "carry", "number")
RULE_FAMILIES = FAMILIES[:3]
SHAPES: dict[str, dict[str, tuple[int, int]]] = {"short": {}, "long": {"num_chunks": (3, 3), "chunk_len": (96, 120)}}
SEAMS = {"short": (3, 8, 16), "long": (3, 8, 16, 64)}
RULE_SEAM = 8
CONTEXTS = 4
ALONE, SHUFFLED, MEAN = "alone", "in another order", f"mean of {CONTEXTS} orders"
BUDGET = 0.5
FULL = "full"
OUT = RESULTS_DIR / "quality" / "hybrid"


@dataclass(frozen=True)
class Condition:
    """How the passages of one prompt are stored, joined and repaired."""

    stored: str
    seam: int
    kind: str = "operator"
    budget: float = 0.0

    def text(self) -> str:
        return f"{self.stored} | {self.seam} | {self.kind} | {self.budget:g}"


def conditions(shape: str, is_hybrid: bool) -> Iterator[Condition]:
    for stored in (ALONE, SHUFFLED, MEAN):
        for seam in SEAMS[shape]:
            yield Condition(stored, seam)
        for kind in KINDS if is_hybrid and stored != MEAN else ():
            if kind != "operator":
                yield Condition(stored, RULE_SEAM, kind)
    yield Condition(SHUFFLED, RULE_SEAM, budget=BUDGET)


@torch.no_grad()
def ask(model: Hybrid | Llama, question: Question, shape: str, rng: random.Random) -> Iterator[dict[str, Any]]:
    """One line for the full prompt and one for each condition."""
    system = [ID_OF[BOS], *encode(question.system)]
    chunks = [encode(chunk) for chunk in question.chunks]
    answer = [*encode(question.answers[0]), ID_OF[EOS]]
    asked = Run([*encode(question.question), *answer])
    about = {"family": question.family, "id": question.id, "shape": shape}

    def line(condition: str, parts: Sequence[Part]) -> dict[str, Any]:
        is_right, nats = answered(Prompt(model, parts), answer)
        tokens = sum(len(part.ids) for part in parts[1:-1] if isinstance(part, Run))
        return about | {"condition": condition, "right": is_right, "nats": nats, "computed": tokens}

    yield line(FULL, [Run(system), Run([token for chunk in chunks for token in chunk]), asked])
    alone = [Prompt(model, [Run(system + chunk)]).stored(len(system), len(chunk)) for chunk in chunks]
    orders = [_in_another_order(model, system, chunks, rng) for _ in range(CONTEXTS)]
    if isinstance(model, Hybrid):
        yield about | {"condition": "maps", "norms": [_norms(stored.piece(RULE_SEAM)) for stored in alone]}
    for condition in conditions(shape, isinstance(model, Hybrid)):
        whole = _whole(orders[0], condition) if condition.budget else set()
        parts: list[Part] = [Run(system)]
        for index, chunk in enumerate(chunks):
            if index in whole or len(chunk) <= condition.seam:
                parts.append(Run(chunk))
                continue
            stores = {ALONE: [alone[index]], SHUFFLED: [orders[0][index]], MEAN: [order[index] for order in orders]}
            pieces = [stored.piece(condition.seam) for stored in stores[condition.stored]]
            layers = [_kept(layer, condition.kind) for layer in (mean_of(pieces) if len(pieces) > 1 else pieces[0])]
            parts += [Run(chunk[: condition.seam]), Reused(layers, len(chunk) - condition.seam)]
        yield line(condition.text(), [*parts, asked])


def _kept(layer: Layer, kind: str) -> Layer:
    return KINDS[kind](layer) if isinstance(layer, Carried) else layer


def _in_another_order(model, system: list[int], chunks: list[list[int]], rng: random.Random) -> list[Stored]:
    """Every chunk as a prompt of the same chunks in a random order computes it, by its number."""
    order = rng.sample(range(len(chunks)), len(chunks))
    prompt = Prompt(model, [Run([*system, *(token for index in order for token in chunks[index])])], watches=True)
    stored, start = {}, len(system)
    for index in order:
        stored[index] = prompt.stored(start, len(chunks[index]), len(system))
        start += len(chunks[index])
    return [stored[index] for index in range(len(chunks))]


def _whole(stored: Sequence[Stored], condition: Condition) -> set[int]:
    """The chunks to compute: those that looked most at others, while they fit into the budget behind the seams."""
    left = condition.budget * sum(each.size for each in stored) - condition.seam * len(stored)
    whole = set()
    for index in sorted(range(len(stored)), key=lambda index: -stored[index].outside):
        cost = stored[index].size - condition.seam
        if cost <= left:
            whole.add(index)
            left -= cost
    return whole


def _norms(layers: Sequence[Layer]) -> list[list[float]]:
    """||A||_2 of every head of every state layer: what is left of a state behind the piece, at most."""
    carried = [layer for layer in layers if isinstance(layer, Carried)]
    return [torch.linalg.matrix_norm(layer.turn, 2).tolist() for layer in carried]


def run_ask(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    run = describe_run() | {"weights": named(args.model / WEIGHTS_FILE)}
    model, begun = read_folder(args.model), time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"{args.model.name}.jsonl").open("w", encoding="utf-8", buffering=1) as file:
        for shape, sizes in SHAPES.items():
            for family in FAMILIES:
                questions = make_questions(family, num=args.num, seed=HELD_OUT_SEEDS[0], **sizes)
                for number, question in enumerate(questions):
                    for line in ask(model, question, shape, random.Random(f"orders {shape} {family} {number}")):
                        file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"condition": "run", **run, "hours": (time.perf_counter() - begun) / 3600}) + "\n")


class Answers:
    """All lines of the models of one kind, a model per seed: losses of a condition, a number for each question."""

    def __init__(self, models: Sequence[Sequence[dict[str, Any]]]) -> None:
        self.lines: dict[tuple[str, str, str], dict[tuple[int, str], dict[str, Any]]] = {}
        self.num_models = len(models)
        for seed, lines in enumerate(models):
            for line in lines:
                if "right" in line:
                    key = (line["shape"], line["family"], line["condition"])
                    self.lines.setdefault(key, {})[seed, line["id"]] = line

    def right(self, shape: str, family: str, condition: str) -> float:
        return float(np.mean([line["right"] for line in self.lines[shape, family, condition].values()]))

    def losses(self, shape: str, families: Sequence[str], condition: str, measure: str) -> np.ndarray:
        """Points or nats lost against the same question in full, mean over seeds, one question after the other."""
        sign = -100.0 if measure == "right" else 1.0
        values = []
        for family in families:
            full, reused = (self.lines[shape, family, name] for name in (FULL, condition))
            seeds: dict[str, list[float]] = {}
            for (seed, question), line in full.items():
                lost = sign * (float(reused[seed, question][measure]) - float(line[measure]))
                seeds.setdefault(question, []).append(lost)
            assert {len(losses) for losses in seeds.values()} == {self.num_models}, (
                "a model was not asked all questions"
            )
            values += [float(np.mean(seeds[question])) for question in sorted(seeds)]
        return np.array(values)

    def conditions(self, shape: str) -> list[str]:
        return list(dict.fromkeys(name for where, _, name in self.lines if where == shape))


def spread(values: np.ndarray, digits: int) -> str:
    low, high = interval(values)
    return f"{values.mean():.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def rule_lines(hybrid: Answers, llama: Answers) -> list[str]:
    """The outcome of the rule in this file's head."""
    condition, lines, is_no = Condition(ALONE, RULE_SEAM).text(), [], False
    for measure, unit, digits in (("right", "points of answers", 1), ("nats", "nats a token of the right answer", 3)):
        ours, theirs = (each.losses("short", RULE_FAMILIES, condition, measure) for each in (hybrid, llama))
        excess = ours - 2 * theirs
        is_no |= bool(excess.mean() > 0)
        lines.append(
            f"- {unit}: hybrid {spread(ours, digits)}, transformer {spread(theirs, digits)}, hybrid less twice the "
            f"transformer {spread(excess, digits)}"
        )
    return [*lines, f"- **{'no-go' if is_no else 'go'}**"]


def table(answers: Answers, shape: str) -> list[str]:
    rows = []
    for condition in answers.conditions(shape):
        cells = [f"{100 * answers.right(shape, family, condition):.1f}" for family in FAMILIES]
        if condition == FULL:
            rows.append([f"{FULL} | | |", *cells, "", ""])
            continue
        lost, nats = (answers.losses(shape, RULE_FAMILIES, condition, measure) for measure in ("right", "nats"))
        rows.append([condition, *cells, spread(lost, 1), spread(nats, 3)])
    header = ["stored | seam | map | budget", *FAMILIES, "points lost", "nats lost"]
    lines = markdown_table(header, rows)
    lines[1] = f"| --- | ---: | --- | ---: |{' ---: |' * (len(header) - 1)}"
    return lines


def run_page(args: argparse.Namespace) -> None:
    kinds: dict[str, list[list[dict[str, Any]]]] = {"hybrid": [], "transformer": []}
    for path in sorted(args.out.glob("qa-*.jsonl")):
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        kinds["hybrid" if "hybrid" in path.name else "transformer"].append(lines)
    hybrid, llama = Answers(kinds["hybrid"]), Answers(kinds["transformer"])
    runs = [line for models in kinds.values() for lines in models for line in lines if line["condition"] == "run"]
    if len(runs) != 6 or hybrid.num_models != 3:
        sys.exit(f"{args.out}: three hybrids and three transformers are wanted, each asked to the end.")
    norms = np.array([n for lines in kinds["hybrid"] for line in lines if "norms" in line for n in line["norms"]])
    page = [
        "# Passages reused in a small hybrid, against a transformer of its size",
        "",
        f"{len(kinds['hybrid'])} hybrids of 1.4 M parameters, {len(kinds['transformer'])} transformers of 1.1 M (both:"
        " `docs/benchmarks.md`), the same questions, never trained on. Exact match in percent; what is lost against"
        f" full prefill is the mean over {', '.join(RULE_FAMILIES)}, with 95 % intervals over questions.",
        "",
        "## The rule",
        "",
        "Written before any model was asked; in the head of `benchmark/quality/hybrid/study.py`.",
        "",
        *rule_lines(hybrid, llama),
    ]
    for shape in SHAPES:
        for name, answers in (("Hybrid", hybrid), ("Transformer", llama)):
            page += ["", f"## {name}, {shape} passages", "", *table(answers, shape)]
    page += ["", "## What a piece leaves of the state before it", ""]
    page += [
        f"The spectral norm of A, behind a seam of {RULE_SEAM}, stored alone, over layers, heads and passages:",
        "",
    ]
    marks = (0.05, 0.25, 0.5, 0.75, 0.95)
    page += markdown_table(
        ["quantile", *(f"{mark:.0%}" for mark in marks)],
        [["norm", *(f"{value:.3f}" for value in np.quantile(norms, marks))]],
    )
    page += ["", *run_markdown(runs[0])]
    page += [f"- {run['weights']}: {run['command']}, {run['hours']:.2f} hours" for run in runs]
    (args.out / "study.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    print("\n".join(page[:14]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    commands = parser.add_subparsers(required=True)
    asking = commands.add_parser("ask", help="all conditions of one model")
    asking.add_argument("model", type=Path)
    asking.add_argument("--num", type=int, default=100, help="questions per family and shape")
    asking.set_defaults(run=run_ask)
    commands.add_parser("page", help="the tables and the outcome").set_defaults(run=run_page)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
