"""Questions: `make_questions` makes the evaluation set of one family, with exact answers.

Two seeds are held out: training refuses them, so no model was trained on questions made from them.
"""

from __future__ import annotations

import random

from benchmark.quality.question import Question
from benchmark.quality.synthetic.notes import FAMILIES, Shape, make_notes
from benchmark.quality.synthetic.vocabulary import SYSTEM

HELD_OUT_SEEDS = (7001, 7002)


def make_questions(
    family: str,
    *,
    num: int,
    seed: int = HELD_OUT_SEEDS[0],
    num_chunks: tuple[int, int] = (4, 8),
    chunk_len: tuple[int, int] = (24, 48),
    num_distractors: int = 3,
) -> list[Question]:
    """`num` questions of one of `FAMILIES`, one per prompt, each with its own notes.

    All families have the same kind of notes and differ in what is asked; only the alias families have alias chains.
    Ranges are inclusive, `chunk_len` is in tokens, `num_distractors` counts needle facts that are not asked about.
    The same arguments give the same questions.

    Raises:
        ValueError: there is no such family.
        ShapeError: the facts do not fit into the chunks.
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is unknown; choose one of {', '.join(FAMILIES)}.")
    depth = int(family[-1]) if family.startswith("alias") else 0
    shape = Shape(
        num_chunks=num_chunks,
        chunk_len=chunk_len,
        num_distractors=num_distractors + (family == "needle"),  # the one asked about is no distractor
        num_chains=int(depth > 0),
        chain_depth=depth,
        apart=True,
    )
    questions = []
    for index in range(num):
        notes = make_notes(random.Random(f"question {seed} {family} {index}"), shape)
        asked = next(asked for asked in notes.asked if asked.family == family)
        questions.append(
            Question(
                system=SYSTEM,
                chunks=notes.chunks,
                question=asked.question,
                answers=(asked.answer,),
                family=family,
                id=f"{family}-{seed}-{index}",
            )
        )
    return questions
