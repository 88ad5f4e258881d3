"""Notes: the passages of one synthetic prompt, and everything that can be asked about them.

`make_notes` draws facts, puts them into chunks and renders the chunks. A fact is one sentence of words:

    owner ada cup .        needle    each name owns only one thing
    alias bob ada .        alias     in a LATER chunk: bob owns what ada owns; ada may be an alias herself
    visitor cal rome .     multi     two or three times in different chunks; the answer is the places in text order
    phone dan 4 0 7 1 .    number    four digit tokens
    cook eva .             carry     introduces a subject with its role
    wearer cook red .      carry     in a LATER chunk: names the subject only by its role

A name stands directly before what is asked about it, so that a model that has learnt to copy can begin to answer.
A carry question (`ask garb eva`) contains neither the role nor `wearer`, so the answer is connected with the name only
where the role is read: in the later chunk, if it is computed behind the introduction. All other words are filler.
No sentence says where its chunk stands.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmark.quality.synthetic.vocabulary import COLOURS, DIGITS, FILLERS, NAMES, PLACES, ROLES, THINGS

FAMILIES = ("needle", "multi", "carry", "number", "alias1", "alias2", "alias3")
NUM_DIGITS = 4
MAX_TRIES = 200


@dataclass(frozen=True)
class Shape:
    """How large the notes of one prompt are; pairs are inclusive ranges.

    Attributes:
        num_chunks: chunks per prompt.
        chunk_len: tokens per chunk.
        num_distractors: needle facts beside those that the other families need.
        num_carry, num_multi, num_number, num_chains: subjects, travellers, numbers and alias chains in one prompt.
        chain_depth: aliases in a chain.
        local_carry: share of the subjects whose two carry sentences are in one chunk. Only for training, which so
            teaches roles over short distances first; evaluations have none.
        apart: no two sentences about one traveller or of one alias chain share a chunk. If False, they may share one
            when too few chunks have room.
    """

    num_chunks: tuple[int, int] = (4, 8)
    chunk_len: tuple[int, int] = (24, 48)
    num_distractors: int = 3
    num_carry: int = 4
    num_multi: int = 2
    num_number: int = 2
    num_chains: int = 0
    chain_depth: int = 1
    local_carry: float = 0.0
    apart: bool = False


@dataclass(frozen=True)
class Asked:
    """One thing that can be asked: `question` and `answer` are words joined by one space."""

    family: str
    question: str
    answer: str


@dataclass(frozen=True)
class Notes:
    """Rendered chunks, and every question about them in random order."""

    chunks: tuple[str, ...]
    asked: tuple[Asked, ...]


class ShapeError(ValueError):
    """The facts asked for do not fit into the chunks."""


@dataclass(frozen=True)
class _Fact:
    """One sentence; sentences of one `story` stand in the text in the order of `order`."""

    words: tuple[str, ...]
    story: str | None = None
    order: int = 0


def make_notes(rng: random.Random, shape: Shape) -> Notes:
    """Draws the notes of one prompt.

    Raises:
        ShapeError: the facts do not fit into the chunks; ask for longer or more chunks, or for fewer facts.
    """
    for _ in range(MAX_TRIES):
        notes = _try_notes(rng, shape)
        if notes is not None:
            return notes
    raise ShapeError(f"{shape}: the facts do not fit; raise chunk_len or num_chunks, or lower the counts of facts.")


def _try_notes(rng: random.Random, shape: Shape) -> Notes | None:
    room = [rng.randint(*shape.chunk_len) for _ in range(rng.randint(*shape.num_chunks))]
    names = iter(rng.sample(NAMES, len(NAMES)))
    chunks: list[list[_Fact]] = [[] for _ in room]
    asked: list[Asked] = []

    def put(fact: _Fact, chunk: int) -> bool:
        chunks[chunk].append(fact)
        room[chunk] -= len(fact.words)
        return room[chunk] >= 0

    def put_apart(facts: list[_Fact]) -> bool:
        """Puts facts in order into chunks with room, into distinct ones if there are enough; False if it fails."""
        open_chunks = [chunk for chunk in range(len(room)) if room[chunk] >= len(facts[0].words)]
        rng.shuffle(open_chunks)
        if shape.apart and len(open_chunks) < len(facts):
            return False
        chosen = sorted(open_chunks[index % len(open_chunks)] for index in range(len(facts))) if open_chunks else []
        return bool(chosen) and all(put(fact, chunk) for fact, chunk in zip(facts, chosen, strict=True))

    if not _put_carry(rng, shape, names, put, asked, len(room)):
        return None
    for _ in range(shape.num_multi):
        traveller = next(names)
        places = rng.sample(PLACES, min(rng.randint(2, 3), len(room)))
        if not put_apart([_sentence("visitor", traveller, place) for place in places]):
            return None
        asked.append(Asked("multi", f"ask visitor {traveller}", ""))  # `_with_places` fills in the answer
    for _ in range(shape.num_number):
        owner = next(names)
        digits = [rng.choice(DIGITS) for _ in range(NUM_DIGITS)]
        if not put_apart([_sentence("phone", owner, *digits)]):
            return None
        asked.append(Asked("number", f"ask phone {owner}", " ".join(digits)))
    depths = [shape.chain_depth] * shape.num_chains + [0] * shape.num_distractors
    for depth, thing in zip(depths, rng.sample(THINGS, len(depths)), strict=True):
        chain = [next(names) for _ in range(depth + 1)]
        facts = [_Fact(("owner", chain[0], thing, "."), thing)]
        for order, (name, alias) in enumerate(pairwise(chain), start=1):
            facts.append(_Fact(("alias", alias, name, "."), thing, order))
        if not put_apart(facts):
            return None
        for hops, name in enumerate(chain):
            asked.append(Asked(f"alias{hops}" if hops else "needle", f"ask owner {name}", thing))

    texts = tuple(_render(rng, facts, spare) for facts, spare in zip(chunks, room, strict=True))
    rng.shuffle(asked)
    return Notes(texts, tuple(_with_places(question, texts) for question in asked))


def _sentence(*words: str) -> _Fact:
    return _Fact((*words, "."))


def _put_carry(rng, shape: Shape, names, put, asked: list[Asked], num_chunks: int) -> bool:
    """Puts the sentences of subjects with distinct roles: the introduction in one chunk, the colour in a later one."""
    pairs = zip(rng.sample(ROLES, shape.num_carry), rng.sample(COLOURS, shape.num_carry), strict=True)
    for role, colour in pairs:
        if rng.random() < shape.local_carry:
            first = second = rng.randrange(num_chunks)
        else:
            first, second = sorted(rng.sample(range(num_chunks), 2))
        subject = next(names)
        introduction = _Fact((role, subject, "."), role, 0)
        needy = _Fact(("wearer", role, colour, "."), role, 1)
        if not (put(introduction, first) and put(needy, second)):
            return False
        asked.append(Asked("carry", f"ask garb {subject}", colour))
    return True


def _render(rng: random.Random, facts: list[_Fact], spare: int) -> str:
    """Sentences in random order, with `spare` filler words between them; every story keeps its order."""
    items: list[_Fact] = [*facts, *(_Fact((rng.choice(FILLERS),)) for _ in range(spare))]
    rng.shuffle(items)
    for story in sorted({fact.story for fact in facts if fact.story is not None}):
        ordered = iter(sorted((fact for fact in items if fact.story == story), key=lambda fact: fact.order))
        items = [next(ordered) if fact.story == story else fact for fact in items]
    return " ".join(word for fact in items for word in fact.words)


def _with_places(asked: Asked, texts: tuple[str, ...]) -> Asked:
    """Fills in the answer of a `multi` question: the places in the order of the text."""
    if asked.family != "multi":
        return asked
    return Asked(asked.family, asked.question, " ".join(places_of(asked.question.split()[-1], texts)))


def places_of(traveller: str, texts: Sequence[str]) -> list[str]:
    """Where a traveller was, in the order of the texts."""
    words = " ".join(texts).split()
    return [words[i + 2] for i in range(len(words) - 2) if words[i] == "visitor" and words[i + 1] == traveller]
