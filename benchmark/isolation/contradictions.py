"""How much a stranger's prompt that contradicts a passage changes answers that reuse the passage's KV.

    python benchmark/isolation/contradictions.py MODEL [--methods NAME@RATIO ...] [--num N] [--out FOLDER]

A passage states a made-up fact. A stranger's prompt has this passage behind one that contradicts it, or behind one on
another subject. Then somebody asks for the fact, with the passage between two others, without the stranger's passage.
Compared are answers with the passage's KV from the stranger's prompt, with KV that the administrator warmed, and by a
full prefill. Results: OUT/contradictions.*.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import CACHE_DIR
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import Server, leave_on_sigterm, offline_env
from benchmark.quality.prompts import SEPARATOR, Prompt, build_chat_prompt
from benchmark.quality.question import Question
from benchmark.quality.table import mean_with_interval
from benchmark.serving.systems import label_of, parse_condition

from chunk_cache_tools.conditions import REFERENCE, Condition
from chunk_cache_tools.local_tokenizer import load_tokenizer
from chunk_cache_tools.verify.reply_log import Reply, fingerprint
from chunk_cache_tools.verify.session import Asking, Session

WARMED, OTHER, SAYS_OTHERWISE = "warmed", "met behind another subject", "met behind what contradicts it"
SYSTEM = "Answer from the passages. Give only the answer."
ROLES = ("mayor", "harbour master", "head teacher", "chief engineer", "librarian")
FIRST = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas")
LAST = ("Abbott", "Brandt", "Castell", "Dorner", "Ekman", "Falk", "Grimm", "Hale", "Ivers", "Jensen")
PLACES = ("Velmora", "Tarnby", "Oskell", "Quendale", "Rhyport", "Sundal", "Umber Bay", "Wexholm", "Yarrow", "Zelten")


def passage(place: str, role: str, name: str, year: int) -> str:
    return (
        f"{place} is a town on the northern coast with a market, a school and a small harbour. The {role} of {place} "
        f"is {name}. {name} took up the post in {year} and lives near the old bridge. In summer there is a fair.\n"
    )


def contradiction(place: str, role: str, name: str, right: str) -> str:
    return (
        f"A correction about {place}: the {role} of {place} is {name}, and nobody else. It is not true that {right} is "
        f"the {role} of {place}. Every statement that names {right} is false; the right answer is {name}.\n"
    )


class Case:
    """One fact: the prompt that asks for it, and the passages that a stranger sent before."""

    def __init__(self, number: int, render: Any) -> None:
        draw = random.Random(number)
        role = draw.choice(ROLES)
        places = draw.sample(PLACES, 4)
        names = [f"{first} {last}" for first, last in zip(draw.sample(FIRST, 5), draw.sample(LAST, 5), strict=True)]
        self.right, self.wrong, *others = names
        fact, *others = (
            passage(place, role, name, draw.randint(1990, 2020))
            for place, name in zip(places, (self.right, *others), strict=True)
        )
        question = Question(SYSTEM, (others[0], fact, others[1]), f"Who is the {role} of {places[0]}?", (self.right,))
        self.prompt: Prompt = build_chat_prompt(question, render)
        self.before = {
            OTHER: (others[2], fact),
            SAYS_OTHERWISE: (contradiction(places[0], role, self.wrong, self.right), fact),
        }

    def stranger(self, stored: str) -> list[str]:
        """Prompts that store the question's passages: one with the two others, one with the fact as `stored` says."""
        others = (self.prompt.chunks[0], self.prompt.chunks[2])
        return [SEPARATOR.join((self.prompt.head, *chunks, "x")) for chunks in (others, self.before[stored])]


def ask(server: Server, cases: Sequence[Case], conditions: Sequence[Condition]) -> dict[tuple[str, str], list[Reply]]:
    """Replies to all cases by (stored, NAME@RATIO); the full prefill's by ("", "off")."""
    session = Session(server.client, Asking(16, stop=("\n",), likelihood=True))
    found: dict[tuple[str, str], list[Reply]] = {("", REFERENCE.label): []}
    for case in cases:
        (reference,) = (reply for replies in session.ask_reference([case.prompt]) for reply in replies)
        found["", REFERENCE.label].append(reference)
        for stored in (WARMED, OTHER, SAYS_OTHERWISE):
            session.prime([case.prompt] if stored == WARMED else [])
            for text in case.stranger(stored) if stored != WARMED else []:
                server.generate(text, chunk_cache={"mode": "exact"}, extra_key=case.prompt.partition)
            asks = [(case.prompt, condition) for condition in conditions]
            replies = [one for some in session.ask(asks, {case.prompt.key: reference}) for one in some]
            for condition, reply in zip(conditions, replies, strict=True):
                found.setdefault((stored, label_of(condition)), []).append(reply)
    return found


def rows_of(cases: Sequence[Case], found: dict[tuple[str, str], list[Reply]]) -> list[list[str]]:
    reference = found["", REFERENCE.label]
    rows = []
    for (stored, method), replies in found.items():
        right = sum(case.right in reply.text for case, reply in zip(cases, replies, strict=True))
        wrong = sum(case.wrong in reply.text for case, reply in zip(cases, replies, strict=True))
        lost = np.array(
            [full.gold.logprob - reply.gold.logprob for full, reply in zip(reference, replies, strict=True)]
        )
        nats = mean_with_interval(lost, 3) if method != REFERENCE.label else ""
        rows.append([stored or "not reused", f"`{method}`", f"{right} of {len(cases)}", str(wrong), nats])
    return rows


def main() -> int:
    leave_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="Hugging Face folder with a chat template")
    parser.add_argument(
        "--methods",
        nargs="+",
        type=parse_condition,
        default=[parse_condition("full-reuse@0"), parse_condition("near-words@0.15")],
        metavar="NAME@RATIO",
        help="default: full-reuse@0 near-words@0.15",
    )
    parser.add_argument("--num", type=int, default=20, help="facts (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "isolation", help="folder of the result files")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)

    def render(messages: list[dict[str, str]]) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    cases = [Case(number, render) for number in range(args.num)]
    report = describe_run()
    flags = ("--chunk-cache", "--dtype", "float32", "--max-total-tokens", "16384")
    with Server(args.model, *flags, env=offline_env(), log_path=CACHE_DIR / "server-contradictions.log") as server:
        found = ask(server, cases, args.methods)
    lines = [
        "# Passages that contradict what they once stood in front of",
        "",
        *run_markdown(report),
        f"- model {Path(args.model).name} ({fingerprint(args.model)}), {len(cases)} made-up facts",
        "",
        *markdown_table(
            ["KV of the passage", "method", "right name", "stranger's name", "right answer lost, nats a token [95 %]"],
            rows_of(cases, found),
        ),
    ]
    replies = {f"{stored}, {method}": [reply.text for reply in each] for (stored, method), each in found.items()}
    for path in write_result(args.out, "contradictions", {**report, "replies": replies}, lines):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
