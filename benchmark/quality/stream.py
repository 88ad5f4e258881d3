"""Cache-Craft as a system: a stream of questions that share passages, stored only from the stream's own prompts.

    python benchmark/quality/stream.py MODEL --data hotpotqa.jsonl [--num N] [--systems NAME ...] [--flags '...']

The questions of a group share one stock of passages. A prompt has the passages that its question needs and others of
the stock, in a random order; each question comes once in every round. Each system is asked the whole stream three
times, each time from empty caches, so that only its own earlier prompts are stored: for the answer, and with two forced
answers, full prefill's own and the right one. A loss is in nats a token, against full prefill. The first round fills
the store and does not count. OUT/NAME.{json,md} are written again after each system.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from benchmark.common.machine import CACHE_DIR
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, named, run_markdown, write_result
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.quality.campaign import prompt_builder
from benchmark.quality.metrics import score
from benchmark.quality.prompts import Prompt
from benchmark.quality.question import DataError, Question, question_of
from benchmark.quality.table import mean_with_interval
from benchmark.serving.systems import System, parse_systems

from chunk_cache_tools.jsonl import read_jsonl
from chunk_cache_tools.verify.workload import PLAIN

SYSTEMS = (
    *("full-reuse@0", "random@0.15", "epic@0.15", "near-words@0.15", "cache-craft@0.15", "cache-craft@0.3"),
    *(f"cache-craft:alpha={alpha}" for alpha in (0.5, 1, 2)),
)
FULL = System("full prefill", "chunk", {"mode": "off"})
MEASURE = "token_f1"
LEGEND = "Lost: nats a token against full prefill. Brackets: 95 % intervals of the mean over questions."


@dataclass(frozen=True)
class Met:
    """A question, and which of its passages it needs."""

    question: Question
    needed: tuple[str, ...]


@dataclass(frozen=True)
class Shape:
    """The shape of a stream.

    Attributes:
        group: questions that share a stock.
        stock: passages of a stock.
        num_chunks: passages of a prompt.
        rounds: how often each question is asked.
    """

    group: int = 6
    stock: int = 20
    num_chunks: int = 8
    rounds: int = 4


def read(path: Path, num: int) -> list[Met]:
    """The last `num` questions of a file whose lines say in `supporting` which passages they need.

    Raises:
        DataError: a line has no such field.
    """
    found = []
    for where, value in read_jsonl(path):
        question, places = question_of(value, where), value.get("supporting")
        if not isinstance(places, list) or not all(place in range(len(question.chunks)) for place in places):
            raise DataError(f'{where}: "supporting" is not a list of places of passages.')
        found.append(Met(question, tuple(question.chunks[place] for place in places)))
    return found[-num:]


def stream(met: Sequence[Met], shape: Shape, seed: int = 0) -> Iterator[tuple[int, Question]]:
    """(round, question with the passages of its prompt), in the order of asking."""
    draw = random.Random(seed)
    for first in range(0, len(met), shape.group):
        block = met[first : first + shape.group]
        needed = dict.fromkeys(passage for one in block for passage in one.needed)
        others = dict.fromkeys(passage for one in block for passage in one.question.chunks if passage not in needed)
        stock = [*needed, *draw.sample(list(others), min(len(others), max(0, shape.stock - len(needed))))]
        for number in range(shape.rounds):
            for one in draw.sample(block, len(block)):
                free = [passage for passage in stock if passage not in one.needed]
                chosen = [*one.needed, *draw.sample(free, min(len(free), shape.num_chunks - len(one.needed)))]
                draw.shuffle(chosen)
                yield number, replace(one.question, chunks=tuple(chosen))


def ask(server: Server, text: str, options: Mapping[str, Any], num_tokens: int, start: int | None = None) -> Any:
    """One reply of `/generate`; with `start` also log-probabilities of the prompt's tokens from that one on."""
    params = {"temperature": 0.0, "max_new_tokens": num_tokens, "custom_params": {"chunk_cache": dict(options)}}
    forced = {} if start is None else {"return_logprob": True, "logprob_start_len": start}
    return server.post("/generate", {"text": text, "sampling_params": params, **forced}).json()


def answers_of(server: Server, system: System, prompts: Sequence[Prompt], length: int) -> list[Any]:
    """Replies to a stream, from empty caches."""
    assert system.options is not None
    server.flush()
    return [ask(server, prompt.text, system.options, length) for prompt in prompts]


def forced_of(
    server: Server, system: System, texts: Sequence[tuple[str, str]], lens: Sequence[int], known: Sequence[int] = ()
) -> list[list[float]]:
    """Log-probabilities of forced answers, token by token, from empty caches.

    Args:
        texts: (prompt, answer) pairs.
        lens: tokens of each prompt.
        known: tokens of each answer, so that no method looks at them; empty for full prefill.
    """
    assert system.options is not None
    server.flush()
    found = []
    for i, (text, answer) in enumerate(texts):
        options = {**system.options, **({"answer_tokens": known[i]} if known and known[i] else {})}
        meta = ask(server, text + answer, options, 1, lens[i] - 1)["meta_info"]
        found.append([entry[0] for entry in meta["input_token_logprobs"][1:]])
    return found


def measure(
    server: Server,
    systems: Sequence[System],
    asked: Sequence[Question],
    prompts: Sequence[Prompt],
    answer_len: int,
) -> Iterator[dict[str, Any]]:
    """Yields after each system the values of all systems so far, prompt by prompt; full prefill is the first."""
    full = answers_of(server, FULL, prompts, answer_len)
    lens = [reply["meta_info"]["prompt_tokens"] for reply in full]
    pairs = {
        "own": [(prompt.text, reply["text"]) for prompt, reply in zip(prompts, full, strict=True)],
        "right": [(prompt.text, prompt.answer) for prompt in prompts],
    }
    base = {name: forced_of(server, FULL, texts, lens) for name, texts in pairs.items()}
    scores = [score(MEASURE, reply["text"], question) for reply, question in zip(full, asked, strict=True)]
    found: dict[str, Any] = {FULL.name: {"f1": scores}}
    yield found
    for system in systems:
        replies = answers_of(server, system, prompts, answer_len)
        caches = [reply["meta_info"]["chunk_cache"] for reply in replies]
        values: dict[str, Any] = {
            "f1": [score(MEASURE, reply["text"], question) for reply, question in zip(replies, asked, strict=True)],
            "rows": [
                (one["computed_tokens"] + one["recomputed_tokens"]) / length
                for one, length in zip(caches, lens, strict=True)
            ],
            "hits": [np.mean([chunk["status"] in ("hit", "prefix") for chunk in one["chunks"]]) for one in caches],
            "cfo": [
                np.mean([chunk["cfo"] for chunk in one["chunks"] if chunk["status"] == "hit"] or [0]) for one in caches
            ],
        }
        for name, texts in pairs.items():
            given = forced_of(server, system, texts, lens, [len(one) for one in base[name]])
            values[name] = [
                float(np.mean(a) - np.mean(b)) if a else 0.0 for a, b in zip(base[name], given, strict=True)
            ]
        found[system.name] = {name: [float(value) for value in column] for name, column in values.items()}
        yield found


def table(found: Mapping[str, Mapping[str, Sequence[float]]], asked: Sequence[str | None]) -> list[str]:
    """One row per system; intervals are of the mean over questions.

    Args:
        asked: the question of each prompt; None = the prompt does not count.
    """
    questions = [one for one in dict.fromkeys(asked) if one is not None]

    def column(name: str, kind: str) -> np.ndarray:
        values = np.array(found[name][kind])
        return np.array([np.mean(values[[one == question for one in asked]]) for question in questions])

    header = ("system", "rows computed", "found", "CFO", "own answer lost", "right answer lost", "F1", "less full")
    cells: list[Sequence[object]] = []
    for name in found:
        f1 = 100 * column(name, "f1")
        if name == FULL.name:
            cells.append((name, "100 %", "", "", "", "", f"{np.mean(f1):.1f}", ""))
            continue
        cells.append(
            (
                f"`{name}`",
                f"{100 * np.mean(column(name, 'rows')):.1f} %",
                f"{100 * np.mean(column(name, 'hits')):.0f} %",
                f"{np.mean(column(name, 'cfo')):.2f}",
                *(mean_with_interval(column(name, kind), 3) for kind in ("own", "right")),
                f"{np.mean(f1):.1f}",
                mean_with_interval(f1 - 100 * column(FULL.name, "f1"), 1),
            )
        )
    return markdown_table(header, cells)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", type=Path, help="Hugging Face folder with a chat template")
    add("--data", required=True, type=Path, metavar="FILE", help='JSONL as of evaluate.py, with "supporting"')
    add("--num", type=int, default=24, help="questions, the last of the file (default: %(default)s)")
    add("--systems", nargs="+", default=SYSTEMS, metavar="NAME", help="as in bench_serving.py (default: Cache-Craft's)")
    for name, default in (("group", 6), ("stock", 20), ("num-chunks", 8), ("rounds", 4)):
        add(f"--{name}", type=int, default=default, help="see Shape (default: %(default)s)")
    add("--answer", type=int, default=16, metavar="N", help="tokens of an answer (default: %(default)s)")
    add("--flags", default="", help="further flags of the server, such as '--chunk-cache-config {...}'")
    add("--seed", type=int, default=0)
    add("--name", default="stream", help="of the result files (default: %(default)s)")
    add("--out", type=Path, default=RESULTS_DIR / "quality", help="folder of the result files")
    return parser.parse_args()


def main() -> int:
    leave_on_sigterm()
    args = parse_args()
    shape = Shape(args.group, args.stock, args.num_chunks, args.rounds)
    systems = parse_systems(args.systems)
    build = prompt_builder(str(args.model), chat=True)
    numbers, asked = zip(*stream(read(args.data, args.num), shape, args.seed), strict=True)
    prompts = [build(question, PLAIN) for question in asked]
    report: dict[str, Any] = {**describe_run(), "data": named(args.data), "shape": asdict(shape)}
    head = [
        "# A stream of questions that share passages",
        "",
        *run_markdown(report),
        f"- {args.num} questions of {report['data']}, groups of {shape.group} over {shape.stock} passages; prompts of"
        f" {shape.num_chunks} passages, {shape.rounds} rounds, of which the first does not count",
        f"- model {args.model.name}, {named(args.model / 'model.safetensors')}; at most {args.answer} tokens an answer",
    ]
    began = time.monotonic()
    flags = ("--chunk-cache", *shlex.split(args.flags))
    with Server(args.model, *flags, env=offline_env(), log_path=CACHE_DIR / "server-stream.log") as server:
        for found in measure(server, systems, asked, prompts, args.answer):
            seconds = time.monotonic() - began
            lines = [*head, f"- {seconds:.0f} s", "", LEGEND, ""]
            lines += table(found, [one.id if number else None for number, one in zip(numbers, asked, strict=True)])
            paths = write_result(args.out, args.name, report | {"found": found, "rounds": numbers}, lines)
            print(f"{seconds:6.0f} s  {list(found)[-1]}", flush=True)
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ServerError, DataError) as error:
        sys.exit(f"error: {error}")
