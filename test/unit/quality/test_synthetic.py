"""The synthetic questions: the same seed gives the same text, and every answer follows from the text alone."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from benchmark.quality.question import Question, read_questions, write_questions
from benchmark.quality.synthetic.notes import FAMILIES, Shape, ShapeError, make_notes
from benchmark.quality.synthetic.questions import HELD_OUT_SEEDS, make_questions
from benchmark.quality.synthetic.vocabulary import ROLES, SYSTEM, UNKNOWN, WORDS, decode, encode


def solve(question: Question) -> str:
    """Answers by reading the text word by word; knows nothing of how it was made."""
    words = " ".join(question.chunks).split()
    _, relation, name = question.question.split()

    def after(verb: str, subject: str, num: int = 1) -> list[str]:
        return [" ".join(words[i + 2 : i + 2 + num]) for i in range(len(words)) if words[i : i + 2] == [verb, subject]]

    match relation:
        case "visitor":
            return " ".join(after("visitor", name))
        case "phone":
            (number,) = after("phone", name, 4)
            return number
        case "owner":
            while aliased := after("alias", name):
                (name,) = aliased
            (thing,) = after("owner", name)
            return thing
        case "garb":
            # The role that stands before the name, but not after "wearer".
            (role,) = (words[i - 1] for i, word in enumerate(words) if word == name)
            (colour,) = after("wearer", role)
            return colour
    raise AssertionError(f"no answer to {question.question!r}")


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_follows_from_text(family):
    questions = make_questions(family, num=60, seed=3)
    assert [solve(question) for question in questions] == [question.answers[0] for question in questions]
    assert {question.family for question in questions} == {family}
    assert all(question.system == SYSTEM for question in questions)


@pytest.mark.parametrize("shape", [Shape(), Shape((2, 2), (48, 72), num_chains=4, chain_depth=2, local_carry=0.4)])
def test_every_question_of_notes_is_answerable(shape):
    rng = random.Random(1)
    for _ in range(20):
        notes = make_notes(rng, shape)
        for asked in notes.asked:
            assert solve(Question(SYSTEM, notes.chunks, asked.question, (asked.answer,))) == asked.answer


@pytest.mark.parametrize("family", FAMILIES)
def test_seed_decides_questions(family):
    assert make_questions(family, num=5, seed=3) == make_questions(family, num=5, seed=3)
    assert make_questions(family, num=5, seed=3) != make_questions(family, num=5, seed=4)
    # More questions do not change the first ones.
    assert make_questions(family, num=8, seed=3)[:5] == make_questions(family, num=5, seed=3)


def test_alias_depth_is_the_familys():
    for depth in (1, 2, 3):
        for question in make_questions(f"alias{depth}", num=20, seed=3):
            words = " ".join(question.chunks).split()
            name, hops = question.question.split()[-1], 0
            aliases = {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "alias"}
            while name in aliases:
                name, hops = aliases[name], hops + 1
            assert hops == depth


def test_alias_refers_to_an_earlier_chunk():
    for question in make_questions("alias3", num=50, seed=3):
        seen: set[str] = set()
        for chunk in question.chunks:
            words = chunk.split()
            assert all(words[i + 2] in seen for i, word in enumerate(words) if word == "alias")
            seen |= {words[i + 1] for i, word in enumerate(words) if word in ("alias", "owner")}


def test_carry_needs_an_earlier_chunk():
    """What a role wears never stands in the chunk that says who has the role, and always in a later one."""
    for question in make_questions("carry", num=100, seed=3):
        roles: dict[str, int] = {}
        for index, chunk in enumerate(question.chunks):
            words = chunk.split()
            for before, word in pairwise(["", *words]):
                if word in ROLES and before == "wearer":
                    assert roles[word] < index
                elif word in ROLES:
                    roles[word] = index
        assert len(roles) == 4


def test_needy_fact_stands_anywhere_in_its_chunk():
    """Its place within the chunk covers the whole chunk, so recomputing a chunk's first tokens finds few of them."""
    places = []
    for question in make_questions("carry", num=100, seed=3):
        for chunk in question.chunks:
            words = chunk.split()
            places += [i / len(words) for i, word in enumerate(words) if word == "wearer"]
    assert min(places) < 0.1
    assert max(places) > 0.85
    assert 0.3 < sum(place > 0.5 for place in places) / len(places) < 0.7


def test_carry_question_repeats_no_word_of_the_needy_fact():
    for question in make_questions("carry", num=50, seed=3):
        assert not set(question.question.split()) & {"wearer", *ROLES, question.answers[0]}


def test_multi_values_stand_in_different_chunks():
    for question in make_questions("multi", num=50, seed=3):
        name = question.question.split()[-1]
        counts = [chunk.split().count(name) for chunk in question.chunks]
        assert max(counts) == 1
        assert sum(counts) == len(question.answers[0].split()) >= 2


def test_ranges_are_kept():
    for question in make_questions("needle", num=60, seed=3, num_chunks=(5, 6), chunk_len=(30, 40)):
        assert 5 <= len(question.chunks) <= 6
        assert all(30 <= len(chunk.split()) <= 40 for chunk in question.chunks)


def test_distractors_are_other_things_owned():
    few, many = (
        sum(chunk.split().count("owner") for chunk in make_questions("needle", num=1, num_distractors=num)[0].chunks)
        for num in (0, 6)
    )
    assert many - few == 6


def test_ids_of_parts_join_to_ids_of_the_prompt():
    question = make_questions("number", num=1, seed=3)[0]
    parts = [question.system, *question.chunks, question.question]
    whole = " ".join(parts)
    assert [index for part in parts for index in encode(part)] == encode(whole)
    assert decode(encode(whole)) == whole
    assert UNKNOWN not in whole
    assert 160 <= len(WORDS) <= 256


def test_questions_are_read_back_equal(tmp_path):
    questions = make_questions("multi", num=3)
    write_questions(tmp_path / "questions.jsonl", questions)
    assert read_questions(tmp_path / "questions.jsonl") == questions


def test_two_seeds_are_held_out():
    assert len(set(HELD_OUT_SEEDS)) == 2


def test_wrong_family_names_the_right_ones():
    with pytest.raises(ValueError, match="alias1"):
        make_questions("alias9", num=1)


def test_too_many_facts_are_refused():
    with pytest.raises(ShapeError, match="raise chunk_len"):
        make_notes(random.Random(0), replace(Shape(), num_chunks=(2, 2), chunk_len=(10, 10)))
