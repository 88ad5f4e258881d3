"""Generated long-context tasks in the manner of RULER (Hsieh et al. 2024): `make_ruler`.

    ruler-single        one needle among filler sentences
    ruler-multi-key     one needle is asked for, others with other keys distract
    ruler-multi-value   one key has several needles; all values are asked for
    ruler-multi-query   several keys are asked for at once
    ruler-variables     a chain of assignments "let B equal A"; all variables of one value are asked for

The kinds of task are RULER's, but sentences and words are ours, so figures cannot be compared with published ones.
Filler sentences come from a seeded grammar and hold no digits. Needles stand at random places in the passages; those of
a chain of variables keep their order.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmark.quality.question import Question

SYSTEM = "Read the passages. They hold a few facts among other text. Use only these facts to answer the question."


def _list(text: str) -> list[str]:
    """Items of a text, separated by commas."""
    return [item.strip() for item in text.split(",")]


_ADJECTIVES = _list("""
    amber, ancient, bright, calm, clever, copper, crooked, distant, eager, gentle, golden, green, hollow, humble, iron,
    lively, modest, narrow, noble, pale, patient, quiet, rapid, rough, silver, slender, solemn, steady, tender, upper
""")
_NOUNS = _list("""
    anchor, balcony, barrel, basket, beacon, bridge, canal, candle, castle, chimney, cottage, engine, falcon, ferry,
    garden, hammer, harbor, island, kettle, ladder, lantern, market, meadow, mirror, orchard, otter, pebble, violin
""")
_VERBS = _list("""
    admires, answers, avoids, borrows, carries, covers, describes, follows, greets, guards, hides, lifts, mentions,
    outlives, paints, passes, praises, remembers, repairs, resembles, surprises, touches, visits, watches
""")
_PLACES = _list("""
    at the crossing, behind the mill, below the cliff, beside the river, by the old gate, in the valley,
    near the chapel, on the hill, outside the village, past the bend, under the arch, within the walls
""")
_TIMES = _list("at dawn, at noon, in spring, in winter, last year, now and then, once more, years ago")


@dataclass(frozen=True)
class Size:
    """How large a task is.

    Attributes:
        num_words: about how many words all passages have together.
        passage_words: about how many words a passage has.
        num_keys: keys in `ruler-multi-key`, including the one that is asked for.
        num_values: values of the key in `ruler-multi-value`.
        num_queries: keys that `ruler-multi-query` asks for.
        num_hops: assignments of a variable to the next one in `ruler-variables`; a second chain distracts.
    """

    num_words: int = 1200
    passage_words: int = 150
    num_keys: int = 6
    num_values: int = 4
    num_queries: int = 4
    num_hops: int = 3


@dataclass(frozen=True)
class _Needles:
    """Facts to hide, the question about them and all its answers; the facts of a group keep their order in the text."""

    groups: Sequence[Sequence[str]]
    question: str
    answers: tuple[str, ...]


def make_ruler(family: str, *, num: int, seed: int, size: Size | None = None) -> list[Question]:
    """`num` questions of one of `RULER_FAMILIES`; the same arguments give the same questions.

    All answers are required: a reply scores the share of them that it gives.

    Raises:
        KeyError: there is no such family.
    """
    size = size or Size()
    questions = []
    for index in range(num):
        draw = random.Random(f"{family} {seed} {index}")
        needles = RULER_FAMILIES[family](draw, size)
        questions.append(
            Question(
                system=SYSTEM,
                chunks=_hide(draw, needles.groups, size),
                question=needles.question,
                answers=needles.answers,
                family=family,
                id=f"{family}-{seed}-{index}",
                require_all=True,
            )
        )
    return questions


def _single(draw: random.Random, size: Size) -> _Needles:
    return _codes(draw, num_keys=1, num_values=1, num_asked=1)


def _multi_key(draw: random.Random, size: Size) -> _Needles:
    return _codes(draw, num_keys=size.num_keys, num_values=1, num_asked=1)


def _multi_value(draw: random.Random, size: Size) -> _Needles:
    return _codes(draw, num_keys=1, num_values=size.num_values, num_asked=1)


def _multi_query(draw: random.Random, size: Size) -> _Needles:
    return _codes(draw, num_keys=size.num_queries, num_values=1, num_asked=size.num_queries)


def _codes(draw: random.Random, *, num_keys: int, num_values: int, num_asked: int) -> _Needles:
    """Each key has `num_values` codes; the first `num_asked` keys are asked for."""
    pairs = [f"{adjective} {noun}" for adjective in _ADJECTIVES for noun in _NOUNS]
    keys = draw.sample(pairs, num_keys)
    codes = [str(code) for code in draw.sample(range(100_000, 1_000_000), num_keys * num_values)]
    of_key = {key: codes[i * num_values : (i + 1) * num_values] for i, key in enumerate(keys)}
    facts = [(f"A code of the {key} is {code}.",) for key in keys for code in of_key[key]]
    asked = keys[:num_asked]
    answers = tuple(code for key in asked for code in of_key[key])
    what = "all codes" if len(answers) > 1 else "the code"
    return _Needles(facts, f"Give {what} of {_join([f'the {key}' for key in asked])}.", answers)


def _variables(draw: random.Random, size: Size) -> _Needles:
    length = size.num_hops + 1
    names = ["".join(letters) for letters in _draw_distinct(draw, 2 * length)]
    first, second = draw.sample(range(10_000, 100_000), 2)
    chains = [_chain(names[:length], first), _chain(names[length:], second)]
    question = f"Which variables equal {first}, directly or through other variables? Name all of them."
    return _Needles(chains, question, tuple(names[:length]))


def _chain(names: Sequence[str], value: int) -> list[str]:
    facts = [f"Let the variable {names[0]} equal {value}."]
    return facts + [f"Let the variable {new} equal {old}." for old, new in pairwise(names)]


def _draw_distinct(draw: random.Random, num: int) -> list[tuple[str, ...]]:
    """Distinct names of five capital letters each."""
    found: dict[tuple[str, ...], None] = {}
    while len(found) < num:
        found[tuple(draw.choices(string.ascii_uppercase, k=5))] = None
    return list(found)


def _hide(draw: random.Random, groups: Sequence[Sequence[str]], size: Size) -> tuple[str, ...]:
    """Passages of filler sentences with the facts at random places."""
    fillers: list[str] = []
    num_words = sum(len(fact.split()) for group in groups for fact in group)
    while num_words < size.num_words:
        fillers.append(_filler(draw))
        num_words += len(fillers[-1].split())
    # A slot is a place between two fillers. In a slot, groups are in random order, and each group's facts in order.
    slots: list[list[str]] = [[] for _ in range(len(fillers) + 1)]
    for group in draw.sample(list(groups), len(groups)):
        for slot, fact in zip(sorted(draw.choices(range(len(slots)), k=len(group))), group, strict=True):
            slots[slot].append(fact)
    sentences = [*slots[0]]
    for filler, slot in zip(fillers, slots[1:], strict=True):
        sentences += [filler, *slot]
    return _passages(sentences, size.passage_words)


def _passages(sentences: Sequence[str], passage_words: int) -> tuple[str, ...]:
    passages: list[list[str]] = [[]]
    num_words = 0
    for sentence in sentences:
        if num_words >= passage_words:
            passages.append([])
            num_words = 0
        passages[-1].append(sentence)
        num_words += len(sentence.split())
    return tuple(" ".join(passage) for passage in passages)


def _filler(draw: random.Random) -> str:
    subject, thing = (f"the {draw.choice(_ADJECTIVES)} {draw.choice(_NOUNS)}" for _ in range(2))
    return f"{draw.choice(_TIMES).capitalize()} {subject} {draw.choice(_VERBS)} {thing} {draw.choice(_PLACES)}."


def _join(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


RULER_FAMILIES: Mapping[str, Callable[[random.Random, Size], _Needles]] = {
    "ruler-single": _single,
    "ruler-multi-key": _multi_key,
    "ruler-multi-value": _multi_value,
    "ruler-multi-query": _multi_query,
    "ruler-variables": _variables,
}
