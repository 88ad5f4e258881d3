"""How reuse changes answers: the same questions to stock SGLang and under a few methods and ratios.

- `ask_all` asks one server; `qualities_of` compares each condition with full prefill.
- `make_notes` makes questions for the trained model of this repository, `count_right` counts right answers by family.

The trained model (`benchmark/quality/models/`) has a million parameters and reads only notes in a made-up language of
some 180 words. It answers what it was trained for, so wrong answers come from reuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from benchmark.common.machine import ROOT
from benchmark.quality.prompts import VERBATIM, Prompt, build_prompt
from benchmark.quality.question import Question
from benchmark.quality.synthetic.questions import HELD_OUT_SEEDS, make_questions

from chunk_cache.options.defaults import DEFAULT_METHOD, DEFAULT_RATIO
from chunk_cache_tools.conditions import REFERENCE, Condition, MethodSpec
from chunk_cache_tools.server_client import ServerClient
from chunk_cache_tools.verify.reply_log import Reply
from chunk_cache_tools.verify.session import Asking, Session

MODEL_DIR = ROOT / "benchmark" / "quality" / "models" / "qa-1m-seed0"
FAMILIES = {
    "needle": "a fact inside one passage",
    "multi": "values from several passages, in order",
    "carry": "a fact that only an earlier passage explains",
}
DEFAULT = Condition(MethodSpec(DEFAULT_METHOD), DEFAULT_RATIO)
REUSED = (
    Condition(MethodSpec("full-reuse"), 0.0),
    DEFAULT,
    Condition(MethodSpec("question-drift"), DEFAULT_RATIO),
    Condition(MethodSpec(DEFAULT_METHOD), 0.5),
    Condition(MethodSpec(DEFAULT_METHOD), 1.0),
)
Replies = Mapping[Condition, Sequence[Reply]]


@dataclass(frozen=True)
class Quality:
    """Answers under one condition beside those of full prefill.

    Attributes:
        num_same: answers whose text equals full prefill's.
        kl: mean KL of the first token's distribution to full prefill's, nats.
        loss: how much less likely full prefill's own answers became, mean nats per token.
    """

    num: int
    num_same: int
    kl: float
    loss: float


def make_notes(num: int) -> tuple[list[Question], list[Prompt]]:
    """`num` questions of each family, none of them used in training, with their prompts."""
    questions = [q for family in FAMILIES for q in make_questions(family, num=num, seed=HELD_OUT_SEEDS[0])]
    return questions, [build_prompt(question, VERBATIM) for question in questions]


def ask_all(client: ServerClient, prompts: Sequence[Prompt], max_new_tokens: int) -> Replies:
    """Asks all prompts under all conditions, after each passage was computed alone; replies in the prompts' order.

    Raises:
        SetupError: a passage was not reused.
    """
    session = Session(client, Asking(max_new_tokens, likelihood=True), salt="answers-")
    asked = [replace(prompt, answer="") for prompt in prompts]  # only full prefill's own answer is compared
    full = {reply.prompt: reply for replies in session.ask_reference(asked) for reply in replies}
    found: dict[Condition, dict[str, Reply]] = {REFERENCE: full, **{condition: {} for condition in REUSED}}
    for block in session.blocks(asked, {key: reply.prompt_len for key, reply in full.items()}):
        session.prime(block)
        for condition in REUSED:
            for replies in session.ask([(prompt, condition) for prompt in block], full):
                found[condition] |= {reply.prompt: reply for reply in replies}
    return {condition: [replies[prompt.key] for prompt in prompts] for condition, replies in found.items()}


def qualities_of(replies: Replies) -> dict[Condition, Quality]:
    """The quality of each condition except the reference."""
    return {condition: _quality(replies[REFERENCE], replies[condition]) for condition in REUSED}


def _quality(full: Sequence[Reply], mine: Sequence[Reply]) -> Quality:
    pairs = list(zip(full, mine, strict=True))
    losses = [a.own.logprob - b.own.logprob for a, b in pairs if a.own is not None and b.own is not None]
    return Quality(
        num=len(pairs),
        num_same=sum(a.text == b.text for a, b in pairs),
        kl=float(np.mean([b.kl for _, b in pairs])),
        loss=float(np.mean(losses)),
    )


def count_right(questions: Sequence[Question], replies: Replies) -> dict[Condition, dict[str, tuple[int, int]]]:
    """(right, all) by condition and family."""
    found: dict[Condition, dict[str, tuple[int, int]]] = {}
    for condition, mine in replies.items():
        found[condition] = {}
        for family in FAMILIES:
            pairs = [(q, r) for q, r in zip(questions, mine, strict=True) if q.family == family]
            right = sum(reply.text.split() == question.answers[0].split() for question, reply in pairs)
            found[condition][family] = right, len(pairs)
    return found
